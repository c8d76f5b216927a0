"""Extraction tasks for the demo model: generator, held-out sets and scoring.

A task is a short text that describes a record, a JSON schema and the one right
answer. Everything is drawn from a ``random.Random`` so a seed names a task for
good. The same generator feeds training, the demo and the evaluation, so it needs
nothing but the standard library. Its words stand in ``demo_words.json``.

Seed spaces: training uses ``train-<n>``, held-out tasks ``held-<seed>-<n>``, tasks
with unseen keys ``unseen-<seed>-<n>``. Keys of the last kind never occur as keys in
training: invented keys are split by a checksum, natural ones by two lists.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = Any
Schema = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One prompt with its only right answer.

    Attributes
    ----------
    text : str
        What the user says.
    schema : dict or None
        JSON schema that the answer obeys; None for tasks without JSON.
    answer : str
        The right answer; JSON in ``json.dumps`` default form where there is a schema.
    pattern : str or None
        Regular expression for the whole answer of a ``regex`` task.
    kind : str
        ``record``, ``regex`` or ``free``; training has some more.
    """

    text: str
    schema: Schema | None
    answer: str
    pattern: str | None = None
    kind: str = "record"


@dataclass(frozen=True)
class Field:
    """A key with its schema, its value and the words that tell the value."""

    key: str
    label: str
    schema: Schema
    value: Json
    words: str
    phrase: str | None = None


WORDS = json.loads(Path(__file__).with_name("demo_words.json").read_text(encoding="utf-8"))
SEEN: dict[str, list[str]] = WORDS["seen"]
UNSEEN: dict[str, list[str]] = WORDS["unseen"]
CHOICES: list[list[str]] = WORDS["choices"]
PHRASES: dict[str, str] = WORDS["phrases"]
FIRST, LAST, PLACES, NOUNS, INTROS, ASKS, ONSETS, VOWELS, CODAS = (
    WORDS[name]
    for name in (
        "first_names",
        "last_names",
        "places",
        "nouns",
        "intros",
        "asks",
        "onsets",
        "vowels",
        "codas",
    )
)
PHONE = r"\+[0-9]{2} [0-9]{3} [0-9]{4}"
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"


def invented(rng: random.Random, syllables: int | None = None) -> str:
    """A pronounceable word that is (almost surely) in no dictionary."""
    n = syllables or rng.choice((2, 2, 2, 2, 3))
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(n))


def is_reserved(key: str) -> bool:
    """Whether `key` is kept out of training (natural held-out keys and 1 in 8 others)."""
    if any(key in keys for keys in UNSEEN.values()):
        return True
    return zlib.crc32(key.encode()) % 8 == 0 and not any(key in keys for keys in SEEN.values())


def code(rng: random.Random) -> tuple[str, str]:
    """A random identifier and the regular expression that describes it."""
    upper = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    digit = "0123456789"
    hexa = "0123456789abcdef"

    def pick(letters: str, n: int) -> str:
        return "".join(rng.choice(letters) for _ in range(n))

    a = rng.randint(1, 3)
    n = rng.randint(3, 5)
    form = rng.randrange(5)
    if form == 0:
        return f"{pick(upper, a)}-{pick(digit, n)}", f"[A-Z]{{{a}}}-[0-9]{{{n}}}"
    if form == 1:
        return f"{pick(upper, a)}{pick(digit, n)}", f"[A-Z]{{{a}}}[0-9]{{{n}}}"
    if form == 2:
        return f"{pick(digit, 3)}-{pick(upper, 2)}", "[0-9]{3}-[A-Z]{2}"
    if form == 3:
        return pick(hexa, 6), "[0-9a-f]{6}"
    return f"#{pick(digit, n)}", f"#[0-9]{{{n}}}"


def string(rng: random.Random, kind: str) -> str:
    if kind == "person":
        first = rng.choice(FIRST) if rng.random() < 0.5 else invented(rng, 2).capitalize()
        last = rng.choice(LAST) if rng.random() < 0.4 else invented(rng).capitalize()
        return first if rng.random() < 0.25 else f"{first} {last}"
    if kind == "place":
        known = rng.choice(PLACES) if rng.random() < 0.5 else invented(rng).capitalize()
        return known if rng.random() < 0.9 else f"{rng.choice(('New', 'Port', 'San'))} {known}"
    word = rng.choice(NOUNS) if rng.random() < 0.5 else invented(rng)
    return word if rng.random() < 0.75 else f"{word} {rng.choice(NOUNS)}"


def integer(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 4, 5)))


def _listing(rng: random.Random, parts: Sequence[str]) -> str:
    if len(parts) > 1 and rng.random() < 0.4:
        return ", ".join(parts[:-1]) + " and " + parts[-1]
    return ", ".join(parts) if parts else "none"


def _scalar(rng: random.Random, kind: str) -> tuple[Schema, Json, str]:
    """Schema, value and wording of one value that is no object."""
    if kind == "integer":
        number = integer(rng)
        bounds = {}
        if rng.random() < 0.3:
            top = rng.choice((9, 10, 100, 120, 999))
            number = rng.randint(0, top)
            bounds = {"minimum": 0, "maximum": top}
        return {"type": "integer", **bounds}, number, str(number)
    if kind == "number":
        value = round(rng.randrange(10 ** rng.choice((2, 3, 4))) / 10 + 0.05 * rng.randrange(2), 2)
        bounded = {"minimum": 0, "maximum": 2000} if rng.random() < 0.2 else {}
        return {"type": "number", **bounded}, value, json.dumps(value)
    if kind == "boolean":
        flag = rng.random() < 0.5
        return {"type": "boolean"}, flag, rng.choice((("no", "false"), ("yes", "true"))[flag])
    if kind == "enum":
        options = rng.choice(CHOICES)
        if rng.random() < 0.3:
            options = list(dict.fromkeys(invented(rng) for _ in range(rng.randint(2, 4))))
        choice = rng.choice(options)
        return {"type": "string", "enum": list(options)}, choice, choice
    if kind == "words":
        words = [string(rng, "noun") for _ in range(rng.choice((0, 1, 2, 2, 3, 3, 4)))]
        return {"type": "array", "items": {"type": "string"}}, words, _listing(rng, words)
    if kind == "integers":
        numbers = [rng.randrange(rng.choice((10, 100))) for _ in range(rng.randint(1, 4))]
        listed = _listing(rng, [str(x) for x in numbers])
        return {"type": "array", "items": {"type": "integer"}}, numbers, listed
    if kind == "code":
        text, pattern = code(rng)
        return {"type": "string", "pattern": f"^{pattern}$"}, text, text
    if kind == "date":
        text = f"{rng.randint(1950, 2039)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        form = {"pattern": f"^{DATE}$"} if rng.random() < 0.6 else {"format": "date"}
        return {"type": "string", **form}, text, text
    text = string(rng, kind)
    return {"type": "string"}, text, text


def object_schema(fields: Iterable[tuple[str, Schema]], optional: Iterable[str] = ()) -> Schema:
    """A closed object schema whose properties stand in the order given."""
    properties = dict(fields)
    left_out = set(optional)
    return {
        "type": "object",
        "properties": properties,
        "required": [k for k in properties if k not in left_out],
        "additionalProperties": False,
    }


SCALARS = ("person", "place", "noun", "integer", "number", "boolean", "enum", "code", "date")
WEIGHTS = {
    "person": 4,
    "place": 3,
    "noun": 3,
    "integer": 4,
    "number": 3,
    "boolean": 2,
    "enum": 2.5,
    "words": 2.5,
    "integers": 1,
    "code": 3,
    "date": 2,
    "object": 2,
    "objects": 1.5,
}


def new_key(rng: random.Random, kind: str, unseen: bool, taken: set[str]) -> str:
    pools = UNSEEN if unseen else SEEN
    while True:
        key = rng.choice(pools[kind if rng.random() < 0.85 else rng.choice(tuple(pools))])
        if rng.random() < (0.5 if unseen else 0.4):
            key = invented(rng, 2)
            if rng.random() < 0.2:
                key += rng.choice(("_id", "_name", "_no", "_date"))
            if len(key) < 3 or is_reserved(key) != unseen:
                continue
        if key not in taken:
            taken.add(key)
            return key


def _label(rng: random.Random, key: str) -> str:
    if rng.random() < 0.4:
        return key
    spaced = "".join(" " + c.lower() if c.isupper() else c for c in key)
    return spaced.replace("_", " ")


def _field(rng: random.Random, kind: str, unseen: bool, taken: set[str]) -> Field:
    key = new_key(rng, kind, unseen, taken)
    label = _label(rng, key)
    if kind not in ("object", "objects"):
        schema, value, words = _scalar(rng, kind)
        return Field(key, label, schema, value, words, PHRASES.get(key))
    kinds = [rng.choice(SCALARS) for _ in range(2 if kind == "objects" else rng.randint(2, 3))]
    inner: set[str] = set()
    subs = [_field(rng, k, unseen, inner) for k in kinds]
    schema = object_schema((f.key, f.schema) for f in subs)
    joiner = rng.choice((" ", ": ", " is "))

    def row(told: Iterable[Field]) -> str:
        return ", ".join(f"{f.label}{joiner}{f.words}" for f in told)

    if kind == "object":
        words = rng.choice(("{}", "({})", "[{}]")).format(row(rng.sample(subs, len(subs))))
        return Field(key, label, schema, {f.key: f.value for f in subs}, words)
    rows = []
    for _ in range(rng.randint(1, 3)):
        rows.append(
            [
                Field(f.key, f.label, f.schema, *_again(rng, k, f.schema))
                for k, f in zip(kinds, subs, strict=True)
            ]
        )
    wrap, between = rng.choice((("({})", ", "), ("{}", " / "), ("[{}]", " "), ("({})", " and ")))
    words = between.join(wrap.format(row(r)) for r in rows)
    return Field(
        key,
        label,
        {"type": "array", "items": schema},
        [{f.key: f.value for f in r} for r in rows],
        words,
    )


def _again(rng: random.Random, kind: str, schema: Schema) -> tuple[Json, str]:
    """Another value and wording for a schema that is already fixed."""
    while True:
        other, value, words = _scalar(rng, kind)
        if kind == "enum":
            value = words = rng.choice(schema["enum"])
        if kind == "enum" or other == schema:
            return value, words


def _tell(rng: random.Random, fields: Sequence[Field]) -> str:
    """Describe the fields, in shuffled order, in one of several styles."""
    told = rng.sample(fields, len(fields))
    plain = all("," not in f.words and " and " not in f.words for f in fields)
    style = rng.randrange(6)
    if style == 0:
        end = rng.choice(("; ", "\n", " | ", ". ") + ((", ",) if plain else ()))
        return end.join(f"{f.label}: {f.words}" for f in told)
    if style == 1:
        end = rng.choice(("; ", "\n", "\n") + ((" ",) if plain else ()))
        mark = rng.choice((" = ", "=", " - "))
        return end.join(f"{f.label}{mark}{f.words}" for f in told)
    if style == 2:
        return " ".join(f"The {f.label} is {f.words}." for f in told)
    if style == 3:
        end = ", " if plain else "; "
        return "A record with " + end.join(f"{f.label} {f.words}" for f in told) + "."
    if style == 4:
        return "\n".join(f"- {f.label}: {f.words}" for f in told)
    said = []
    for f in told:
        by_label = rng.choice(
            ("with {} {}", "{} is {}", "its {} is {}", "{}: {}", "the {} being {}")
        )
        by_phrase = f.phrase and rng.random() < 0.7
        said.append(f"{f.phrase} {f.words}" if by_phrase else by_label.format(f.label, f.words))
    return rng.choice(("It ", "This one ", "")) + (", " if plain else "; ").join(said) + "."


def _fields(
    rng: random.Random, unseen: bool, low: int, high: int, kinds: Sequence[str]
) -> list[Field]:
    taken: set[str] = set()
    weights = [WEIGHTS[k] for k in kinds]
    fields: list[Field] = []
    for kind in rng.choices(kinds, weights, k=rng.randint(low, high)):
        if kind in ("object", "objects") and any(isinstance(f.value, dict | list) for f in fields):
            kind = "noun"
        fields.append(_field(rng, kind, unseen, taken))
    return fields


def record_task(rng: random.Random, unseen: bool = False) -> Task:
    """Extract the fields of a described record; some optional ones, some not asked for."""
    fields = _fields(rng, unseen, 2, 6, tuple(WEIGHTS))
    asked = list(fields)
    told = list(fields)
    optional = []
    if len(fields) > 2 and rng.random() < 0.2:
        asked.remove(rng.choice(fields))
    for field in asked:
        if rng.random() < 0.1 and len(told) > 1:
            optional.append(field.key)
            if rng.random() < 0.5:
                told.remove(field)
    answer = {f.key: f.value for f in asked if f in told}
    schema = object_schema(((f.key, f.schema) for f in asked), optional)
    intro = rng.choice(INTROS)
    words = _tell(rng, told)
    words = (intro.strip() + "\n" + words).strip() if words.startswith("-") else intro + words
    ask = rng.choice(ASKS)
    text = f"{ask}\n{words}" if rng.random() < 0.5 else f"{words}\n{ask}"
    return Task(text.strip(), schema, json.dumps(answer))


def regex_task(rng: random.Random, unseen: bool = False) -> Task:
    """Give only one value, whose form is a regular expression."""
    fields = _fields(rng, unseen, 1, 3, SCALARS)
    kind = rng.choice(("date", "code", "integer", "phone"))
    taken = {f.key for f in fields}
    wanted = _field(rng, "code" if kind == "phone" else kind, unseen, taken)
    patterns = {"date": DATE, "integer": "[0-9]+", "phone": PHONE}
    pattern = patterns[kind] if kind in patterns else wanted.schema["pattern"][1:-1]
    if kind == "phone":
        digits = "".join(rng.choice("0123456789") for _ in range(9))
        number = f"+{digits[:2]} {digits[2:5]} {digits[5:]}"
        wanted = Field("phone", "phone", {"type": "string"}, number, number)
    told = _tell(rng, [*fields, wanted])
    ask = rng.choice(
        ("Give only the {}.", "What is the {}?", "Answer with the {} only.", "Just the {}, please.")
    )
    return Task(f"{told}\n{ask.format(wanted.label)}", None, wanted.words, pattern, "regex")


def free_task(rng: random.Random, unseen: bool = False) -> Task:
    """Say the record in one sentence, in the order of the text; no grammar."""
    fields = _fields(rng, unseen, 2, 3, SCALARS)
    sentence = " and ".join(f"the {f.label} is {f.words}" for f in fields)
    told = "; ".join(f"{f.label}: {f.words}" for f in fields)
    ask = rng.choice(
        ("Say it in one sentence.", "Summarise in one sentence.", "Describe the record.")
    )
    return Task(f"{told}\n{ask}", None, sentence[0].upper() + sentence[1:] + ".", None, "free")


def with_schema(text: str, schema: Any) -> str:
    """A request for JSON to a model that knows schemas from reading: the words, then the schema."""
    return f"{text}\nReply with JSON that follows this schema:\n{json.dumps(schema)}"


def make_task(rng: random.Random, unseen: bool = False) -> Task:
    """One task of the kinds that are scored (`record`, `regex`, `free`)."""
    draw = rng.random()
    if draw < 0.84:
        return record_task(rng, unseen)
    return regex_task(rng, unseen) if draw < 0.94 else free_task(rng, unseen)


def held_out_tasks(n: int, seed: int = 0) -> list[Task]:
    """`n` tasks like those of training, from a seed space that training never uses."""
    return [make_task(random.Random(f"held-{seed}-{i}")) for i in range(n)]


def unseen_key_tasks(n: int, seed: int = 0) -> list[Task]:
    """`n` record tasks all of whose keys never occur as keys in training."""
    return [record_task(random.Random(f"unseen-{seed}-{i}"), True) for i in range(n)]


def leaves(value: Json, path: str = "") -> dict[str, Json]:
    if isinstance(value, dict):
        parts: Iterable[tuple[str, Json]] = ((f"{path}.{k}", v) for k, v in value.items())
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        parts = ((f"{path}[{i}]", v) for i, v in enumerate(value))
    else:
        return {path: value}
    return {k: v for p, sub in parts for k, v in leaves(sub, p).items()}


def score_fields(answer_text: str, task: Task) -> tuple[int, int, bool]:
    """Fields right, fields expected, and whether the whole answer is right.

    A field is a leaf of the answer; a list of plain values is one field. Text that
    is no JSON scores zero. Tasks without a schema count as one field.
    """
    if task.schema is None:
        right = answer_text.strip() == task.answer
        return int(right), 1, right
    wanted = json.loads(task.answer)
    expected = leaves(wanted)
    try:
        given = json.loads(answer_text)
    except json.JSONDecodeError:
        return 0, len(expected), False
    found = leaves(given)
    same = sum(
        k in found and type(found[k]) is type(v) and found[k] == v for k, v in expected.items()
    )
    return same, len(expected), same == len(expected) == len(found)
