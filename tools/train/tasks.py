"""Training material for the demo model: extraction tasks, plain copies, empty forms, real JSON.

Copies teach the one skill that extraction rests on. Forms asked for without any
data teach to say little and to close what is open, also under unfamiliar schemas.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import demo_tasks as demo
from ..demo_tasks import Json, Schema, Task, object_schema

FILLS: list[str] = demo.WORDS["fills"]


def repeat_task(rng: random.Random) -> Task:
    """Copy a text: the plainest form of the skill that all other tasks rest on."""
    parts = []
    for _ in range(rng.randint(3, 14)):
        form = rng.randrange(5)
        if form == 0:
            parts.append(demo.make_code(rng)[0])
        elif form == 1:
            parts.append(str(demo.make_integer(rng)))
        else:
            parts.append(demo.make_string(rng, rng.choice(("person", "place", "noun"))))
    text = rng.choice((" ", ", ", "; ", "\n")).join(parts)
    return Task(f"Repeat: {text}", None, text, None, "repeat")


MINIMAL = {
    "": "none",
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "uri": "http://none",
    "email": "none@none.com",
    "uuid": "00000000-0000-0000-0000-000000000000",
}


def minimal(rng: random.Random, depth: int) -> tuple[Schema, Json]:
    """A random schema with the smallest answer: what to say when nothing is known."""
    form = rng.randrange(11 if depth else 8)
    if form <= 2:
        name = rng.choice(tuple(MINIMAL)) if rng.random() < 0.4 else ""
        return {"type": "string", **({"format": name} if name else {})}, MINIMAL[name]
    if form == 3:
        return {"type": "integer"}, 0
    if form == 4:
        return {"type": "number"}, 0
    if form == 5:
        return {"type": "boolean"}, False
    if form == 6:
        options = rng.choice(demo.CHOICES)
        return {"enum": list(options)}, options[0]
    if form == 7:
        return rng.choice(({}, {"type": "object"})), {}
    if form == 8:
        schema, value = minimal(rng, depth - 1)
        least = rng.choice((0, 1))
        bound = {"minItems": 1} if least else {}
        return {"type": "array", "items": schema, **bound}, [value] * least
    fields: list[tuple[str, Schema]] = []
    answer: dict[str, Json] = {}
    taken: set[str] = set()
    optional: list[str] = []
    for _ in range(rng.randint(1, 5)):
        key = demo.new_key(rng, rng.choice(tuple(demo.SEEN)), False, taken)
        schema, value = minimal(rng, depth - 1)
        fields.append((key, schema))
        if rng.random() < 0.4:
            optional.append(key)
        else:
            answer[key] = value
    return object_schema(fields, optional), answer


def fill_task(rng: random.Random) -> Task:
    """Obey a schema with no data at all: the smallest answer, closed soon."""
    schema, value = minimal(rng, 3)
    while not isinstance(value, dict | list) and rng.random() < 0.8:
        schema, value = minimal(rng, 3)
    return Task(rng.choice(FILLS), schema, json.dumps(value), None, "fill")


def training_tasks(start: int = 0, extra: float = 0.2) -> Iterator[Task]:
    """Endless training tasks; `extra` is the share of `fill` and `repeat` tasks."""
    n = start
    while True:
        rng = random.Random(f"train-{n}")
        n += 1
        if rng.random() < extra:
            yield fill_task(rng) if rng.random() < 0.5 else repeat_task(rng)
        else:
            yield demo.make_task(rng)


def corpus_documents(path: Path) -> list[Any]:
    """Short JSON objects of the corpus' training split, none with a reserved key."""

    def keys(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from value
            value = list(value.values())
        for child in value if isinstance(value, list) else ():
            yield from keys(child)

    held = {k for pool in demo.UNSEEN.values() for k in pool}
    found = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["split"] == "train" and len(row["text"]) < 4000:
                value = json.loads(row["text"])
                parts = [value, *(value.values() if isinstance(value, dict) else value)]
                found += [
                    v
                    for v in parts
                    if isinstance(v, dict)
                    and v
                    and len(json.dumps(v)) < 300
                    and held.isdisjoint(keys(v))
                ]
    return found


def _infer(rng: random.Random, value: Any) -> tuple[dict[str, Any], Any]:
    """A schema that `value` obeys, and its smallest instance."""
    if isinstance(value, dict):
        parts = {k: _infer(rng, v) for k, v in value.items()}
        optional = [k for k in parts if rng.random() < 0.4]
        schema = object_schema(((k, s) for k, (s, _) in parts.items()), optional)
        return schema, {k: v for k, (_, v) in parts.items() if k not in optional}
    if isinstance(value, list):
        item, least = _infer(rng, value[0]) if value else ({}, {})
        filled = int(rng.random() < 0.3)
        return {"type": "array", "items": item, "minItems": filled}, [least] * filled
    kinds = {
        bool: ("boolean", False),
        int: ("integer", 0),
        float: ("number", 0),
        str: ("string", "none"),
    }
    name, least = kinds.get(type(value), ("null", None))
    return {"type": name}, least


def corpus_task(rng: random.Random, value: Any) -> Task:
    """A real JSON object, told leaf by leaf or (half the time) asked for without data."""
    schema, least = _infer(rng, value)
    if rng.random() < 0.5:
        return Task(rng.choice(FILLS), schema, json.dumps(least), None, "fill")
    told = [
        f"{k.strip('.').replace('.', ' ')}: {v if isinstance(v, str) else json.dumps(v)}"
        for k, v in demo.leaves(value).items()
    ]
    return Task("\n".join(told), schema, json.dumps(value, ensure_ascii=False), None, "corpus")


def mixture(documents: list[Any], copying: float, start: int) -> Iterator[Task]:
    """Training tasks: 1 in 8 from real documents, `copying` of the rest plain copies."""
    tasks = training_tasks(start, 0.12)
    for n in itertools.count(start):
        rng = random.Random(f"mix-{n}")
        if documents and rng.random() < 0.12:
            yield corpus_task(rng, rng.choice(documents))
        else:
            yield repeat_task(rng) if rng.random() < copying else next(tasks)
