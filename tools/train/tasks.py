"""Training tasks of the demo model: data extraction, copies, schemas without data, real JSON.

Data extraction requires the model to copy text. Copying tasks teach this skill in isolation. Tasks
with a schema but without data teach the model to give a minimal answer and to close all brackets,
even if the schema is unfamiliar.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from ..demo import tasks as demo
from ..demo.tasks import Json, Schema, Task, object_schema

FILLS: list[str] = demo.WORDS["fills"]
#: Maximum number of characters of a document in the corpus, and of an object taken from it.
MAX_DOCUMENT = 4000
MAX_OBJECT = 300


def repeat_task(rng: random.Random) -> Task:
    """Return a task whose answer is a copy of a text."""
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


#: Minimal string for each value of the keyword "format"; "" stands for strings without a format.
MINIMAL_STRINGS = {
    "": "none",
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "uri": "http://none",
    "email": "none@none.com",
    "uuid": "00000000-0000-0000-0000-000000000000",
}


def minimal(rng: random.Random, depth: int) -> tuple[Schema, Json]:
    """Return a random schema and the smallest value that it allows.

    In a task whose prompt has a schema but no data to extract, this value is the correct answer.
    `depth` is the maximum nesting depth.
    """
    form = rng.randrange(11 if depth else 8)
    if form <= 2:
        name = rng.choice(tuple(MINIMAL_STRINGS)) if rng.random() < 0.4 else ""
        schema: Schema = {"type": "string"}
        if name:
            schema["format"] = name
        return schema, MINIMAL_STRINGS[name]
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
        items, value = minimal(rng, depth - 1)
        min_items = rng.choice((0, 1))
        schema = {"type": "array", "items": items}
        if min_items:
            schema["minItems"] = 1
        return schema, [value] * min_items
    return _minimal_object(rng, depth)


def _minimal_object(rng: random.Random, depth: int) -> tuple[Schema, Json]:
    """Return a random object schema and its minimal answer, without optional keys."""
    fields: list[tuple[str, Schema]] = []
    answer: dict[str, Json] = {}
    used_keys: set[str] = set()
    optional: list[str] = []
    for _ in range(rng.randint(1, 5)):
        key = demo.new_key(rng, rng.choice(tuple(demo.SEEN)), False, used_keys)
        schema, value = minimal(rng, depth - 1)
        fields.append((key, schema))
        if rng.random() < 0.4:
            optional.append(key)
        else:
            answer[key] = value
    return object_schema(fields, optional), answer


def fill_task(rng: random.Random) -> Task:
    """Return a task with a schema but without data. Its answer is the schema's minimal instance."""
    schema, value = minimal(rng, 3)
    while not isinstance(value, dict | list) and rng.random() < 0.8:
        schema, value = minimal(rng, 3)
    return Task(rng.choice(FILLS), schema, json.dumps(value), None, "fill")


def training_tasks(start: int = 0, extra: float = 0.2) -> Iterator[Task]:
    """Yield training tasks forever, from the one with number `start`.

    The fraction `extra` of the tasks are made by `fill_task` or `repeat_task`.
    """
    for n in itertools.count(start):
        rng = random.Random(f"train-{n}")
        if rng.random() < extra:
            yield fill_task(rng) if rng.random() < 0.5 else repeat_task(rng)
        else:
            yield demo.make_task(rng)


# Real documents -----------------------------------------------------------------------------------


def _keys(value: Any) -> Iterator[str]:
    """Yield the keys of all objects in a JSON value."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for child in value:
            yield from _keys(child)


def corpus_documents(path: Path) -> list[Any]:
    """Return short JSON objects of the corpus' training split that have no key in `demo.UNSEEN`."""
    reserved = {key for pool in demo.UNSEEN.values() for key in pool}

    def is_usable(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and bool(value)
            and len(json.dumps(value)) < MAX_OBJECT
            and reserved.isdisjoint(_keys(value))
        )

    found: list[Any] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["split"] != "train" or len(row["text"]) >= MAX_DOCUMENT:
                continue
            value = json.loads(row["text"])
            children = value.values() if isinstance(value, dict) else value
            found += filter(is_usable, [value, *children])
    return found


def _infer_schema(rng: random.Random, value: Any) -> tuple[dict[str, Any], Any]:
    """Return a JSON schema that `value` satisfies, and the minimal instance of the schema.

    If the elements of a list differ in their types or keys, the schema allows any elements.
    """
    if isinstance(value, dict):
        fields = {key: _infer_schema(rng, child) for key, child in value.items()}
        optional = [key for key in fields if rng.random() < 0.4]
        schema = object_schema(((key, field) for key, (field, _) in fields.items()), optional)
        return schema, {key: least for key, (_, least) in fields.items() if key not in optional}
    if isinstance(value, list):
        is_uniform = len(set(map(_shape, value))) == 1
        items, least = _infer_schema(rng, value[0]) if is_uniform else ({}, {})
        min_items = int(rng.random() < 0.3 and bool(value))
        return {"type": "array", "items": items, "minItems": min_items}, [least] * min_items
    minimal_by_type = {
        bool: ("boolean", False),
        int: ("integer", 0),
        float: ("number", 0),
        str: ("string", "none"),
    }
    name, least = minimal_by_type.get(type(value), ("null", None))
    return {"type": name}, least


def _shape(value: Any) -> Hashable:
    """Return a description of the types and keys in a JSON value.

    Values with equal descriptions satisfy the schemas that `_infer_schema` returns for each other.
    """
    if isinstance(value, dict):
        return "dict", frozenset((key, _shape(child)) for key, child in value.items())
    if isinstance(value, list):
        return "list", frozenset(map(_shape, value))
    return type(value).__name__


def corpus_task(rng: random.Random, value: Any) -> Task:
    """Return a task from a real JSON object.

    In half of the tasks, the prompt contains the object's data in words. In the other half, the
    prompt has no data.
    """
    schema, least = _infer_schema(rng, value)
    if rng.random() < 0.5:
        return Task(rng.choice(FILLS), schema, json.dumps(least), None, "fill")
    lines = []
    for path, leaf in demo.leaves(value).items():
        name = path.strip(".").replace(".", " ")
        lines.append(f"{name}: {leaf if isinstance(leaf, str) else json.dumps(leaf)}")
    return Task("\n".join(lines), schema, json.dumps(value, ensure_ascii=False), None, "corpus")


def mixture(documents: list[Any], copying: float, start: int) -> Iterator[Task]:
    """Yield training tasks forever. About one task in eight is made from a real document.

    `documents` is the result of `corpus_documents`. Of the other tasks, the fraction `copying` are
    copying tasks, and the rest come from `training_tasks`. `start` is the number of the first task.
    """
    tasks = training_tasks(start, 0.12)
    for n in itertools.count(start):
        rng = random.Random(f"mix-{n}")
        if documents and rng.random() < 0.12:
            yield corpus_task(rng, rng.choice(documents))
        else:
            yield repeat_task(rng) if rng.random() < copying else next(tasks)
