"""Extraction tasks for the demo model: generator, held-out sets and scoring.

A task is a short text that describes a record, a JSON schema and the only correct answer. All
choices are made by a ``random.Random``, so a seed identifies a task permanently. The generator is
used for training, the demo and the evaluation, and therefore requires only the standard library.
Its vocabulary is ``demo_words.json``.

Seeds of training tasks are ``train-<n>``, those of held-out tasks ``held-<seed>-<n>``, and those of
tasks with unseen keys ``unseen-<seed>-<n>``. Keys of the last kind never occur as keys in training:
invented keys are split by a checksum, natural keys by two lists.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = Any
Schema = dict[str, Any]
#: Schema, value and text of a value that is not an object.
Scalar = tuple[Schema, Json, str]


@dataclass(frozen=True)
class Task:
    """A prompt with its only correct answer.

    Attributes
    ----------
    text
        Prompt.
    schema
        JSON schema of the answer; None for tasks without JSON.
    answer
        Correct answer. JSON is in the default form of ``json.dumps``.
    pattern
        Regular expression of the whole answer of a ``regex`` task.
    kind
        ``"record"``, ``"regex"`` or ``"free"``; training has further kinds.
    """

    text: str
    schema: Schema | None
    answer: str
    pattern: str | None = None
    kind: str = "record"


@dataclass(frozen=True)
class Field:
    """A key of a record, with its value.

    Attributes
    ----------
    key
        Key in the schema.
    label
        Name of the field in the text.
    schema
        JSON schema of the value.
    value
        Value.
    words
        Value as it is written in the text.
    phrase
        Words that can precede the value in place of the label; None if there are none.
    """

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
FIRST_NAMES: list[str] = WORDS["first_names"]
LAST_NAMES: list[str] = WORDS["last_names"]
PLACES: list[str] = WORDS["places"]
NOUNS: list[str] = WORDS["nouns"]
INTROS: list[str] = WORDS["intros"]
INSTRUCTIONS: list[str] = WORDS["asks"]
ONSETS: list[str] = WORDS["onsets"]
VOWELS: list[str] = WORDS["vowels"]
CODAS: list[str] = WORDS["codas"]
PHONE = r"\+[0-9]{2} [0-9]{3} [0-9]{4}"
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"


def make_word(rng: random.Random, syllables: int | None = None) -> str:
    """Return a pronounceable word that is almost certainly not in a dictionary."""
    count = syllables or rng.choice((2, 2, 2, 2, 3))
    word = ""
    for _ in range(count):
        word += rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
    return word


def is_reserved(key: str) -> bool:
    """Return whether `key` is excluded from training: natural held-out keys and 1/8 of others."""
    if any(key in keys for keys in UNSEEN.values()):
        return True
    return zlib.crc32(key.encode()) % 8 == 0 and not any(key in keys for keys in SEEN.values())


def make_code(rng: random.Random) -> tuple[str, str]:
    """Return a random identifier and the regular expression of its form."""
    upper = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    digit = "0123456789"
    hexadecimal = "0123456789abcdef"

    def pick(letters: str, n: int) -> str:
        return "".join(rng.choice(letters) for _ in range(n))

    num_letters = rng.randint(1, 3)
    num_digits = rng.randint(3, 5)
    letters = f"[A-Z]{{{num_letters}}}"
    digits = f"[0-9]{{{num_digits}}}"
    form = rng.randrange(5)
    if form == 0:
        return f"{pick(upper, num_letters)}-{pick(digit, num_digits)}", f"{letters}-{digits}"
    if form == 1:
        return f"{pick(upper, num_letters)}{pick(digit, num_digits)}", f"{letters}{digits}"
    if form == 2:
        return f"{pick(digit, 3)}-{pick(upper, 2)}", "[0-9]{3}-[A-Z]{2}"
    if form == 3:
        return pick(hexadecimal, 6), "[0-9a-f]{6}"
    return f"#{pick(digit, num_digits)}", f"#{digits}"


def make_string(rng: random.Random, kind: str) -> str:
    """Return a person's name, a place name or a noun."""
    if kind == "person":
        first = rng.choice(FIRST_NAMES) if rng.random() < 0.5 else make_word(rng, 2).capitalize()
        last = rng.choice(LAST_NAMES) if rng.random() < 0.4 else make_word(rng).capitalize()
        return first if rng.random() < 0.25 else f"{first} {last}"
    if kind == "place":
        place = rng.choice(PLACES) if rng.random() < 0.5 else make_word(rng).capitalize()
        if rng.random() < 0.9:
            return place
        prefix = rng.choice(("New", "Port", "San"))
        return f"{prefix} {place}"
    word = rng.choice(NOUNS) if rng.random() < 0.5 else make_word(rng)
    if rng.random() < 0.75:
        return word
    return f"{word} {rng.choice(NOUNS)}"


def make_integer(rng: random.Random) -> int:
    """Return a non-negative integer of at most five digits."""
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 4, 5)))


def _join_words(rng: random.Random, parts: Sequence[str]) -> str:
    """Return a list as text."""
    if len(parts) > 1 and rng.random() < 0.4:
        return ", ".join(parts[:-1]) + " and " + parts[-1]
    return ", ".join(parts) if parts else "none"


def _scalar(rng: random.Random, kind: str) -> Scalar:
    """Return the schema, the value and the text of a value that is not an object."""
    if kind in _SCALAR_MAKERS:
        return _SCALAR_MAKERS[kind](rng)
    text = make_string(rng, kind)
    return {"type": "string"}, text, text


def _integer(rng: random.Random) -> Scalar:
    number = make_integer(rng)
    schema: Schema = {"type": "integer"}
    if rng.random() < 0.3:
        maximum = rng.choice((9, 10, 100, 120, 999))
        number = rng.randint(0, maximum)
        schema |= {"minimum": 0, "maximum": maximum}
    return schema, number, str(number)


def _number(rng: random.Random) -> Scalar:
    tenths = rng.randrange(10 ** rng.choice((2, 3, 4)))
    value = round(tenths / 10 + 0.05 * rng.randrange(2), 2)
    schema: Schema = {"type": "number"}
    if rng.random() < 0.2:
        schema |= {"minimum": 0, "maximum": 2000}
    return schema, value, json.dumps(value)


def _boolean(rng: random.Random) -> Scalar:
    flag = rng.random() < 0.5
    words = ("yes", "true") if flag else ("no", "false")
    return {"type": "boolean"}, flag, rng.choice(words)


def _enum(rng: random.Random) -> Scalar:
    options = rng.choice(CHOICES)
    if rng.random() < 0.3:
        words = [make_word(rng) for _ in range(rng.randint(2, 4))]
        options = list(dict.fromkeys(words))
    choice = rng.choice(options)
    return {"type": "string", "enum": list(options)}, choice, choice


def _word_list(rng: random.Random) -> Scalar:
    count = rng.choice((0, 1, 2, 2, 3, 3, 4))
    words = [make_string(rng, "noun") for _ in range(count)]
    return {"type": "array", "items": {"type": "string"}}, words, _join_words(rng, words)


def _integer_list(rng: random.Random) -> Scalar:
    count = rng.randint(1, 4)
    numbers = [rng.randrange(rng.choice((10, 100))) for _ in range(count)]
    text = _join_words(rng, [str(number) for number in numbers])
    return {"type": "array", "items": {"type": "integer"}}, numbers, text


def _code(rng: random.Random) -> Scalar:
    text, pattern = make_code(rng)
    return {"type": "string", "pattern": f"^{pattern}$"}, text, text


def _date(rng: random.Random) -> Scalar:
    year = rng.randint(1950, 2039)
    month = rng.randint(1, 12)
    day = rng.randint(1, 28)
    text = f"{year}-{month:02d}-{day:02d}"
    if rng.random() < 0.6:
        return {"type": "string", "pattern": f"^{DATE}$"}, text, text
    return {"type": "string", "format": "date"}, text, text


_SCALAR_MAKERS: dict[str, Callable[[random.Random], Scalar]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "enum": _enum,
    "words": _word_list,
    "integers": _integer_list,
    "code": _code,
    "date": _date,
}


def object_schema(fields: Iterable[tuple[str, Schema]], optional: Iterable[str] = ()) -> Schema:
    """Return the schema of an object without additional properties, in the order of `fields`."""
    properties = dict(fields)
    optional_keys = set(optional)
    return {
        "type": "object",
        "properties": properties,
        "required": [k for k in properties if k not in optional_keys],
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


def new_key(rng: random.Random, kind: str, unseen: bool, used: set[str]) -> str:
    """Return a key that is not in `used`, and add it to `used`.

    Parameters
    ----------
    rng
        Random number generator.
    kind
        Kind of the value.
    unseen
        Whether the key must be one that is excluded from training.
    used
        Keys of the same object.
    """
    pools = UNSEEN if unseen else SEEN
    while True:
        pool = kind if rng.random() < 0.85 else rng.choice(tuple(pools))
        key = rng.choice(pools[pool])
        if rng.random() < (0.5 if unseen else 0.4):
            key = make_word(rng, 2)
            if rng.random() < 0.2:
                key += rng.choice(("_id", "_name", "_no", "_date"))
            if len(key) < 3 or is_reserved(key) != unseen:
                continue
        if key not in used:
            used.add(key)
            return key


def _make_label(rng: random.Random, key: str) -> str:
    """Return the key, or the words that it consists of."""
    if rng.random() < 0.4:
        return key
    spaced = "".join(" " + c.lower() if c.isupper() else c for c in key)
    return spaced.replace("_", " ")


def _make_field(rng: random.Random, kind: str, unseen: bool, used: set[str]) -> Field:
    """Return a field of a kind; see `new_key` for the other parameters."""
    key = new_key(rng, kind, unseen, used)
    label = _make_label(rng, key)
    if kind not in ("object", "objects"):
        schema, value, words = _scalar(rng, kind)
        return Field(key, label, schema, value, words, PHRASES.get(key))
    count = 2 if kind == "objects" else rng.randint(2, 3)
    kinds = [rng.choice(SCALARS) for _ in range(count)]
    used_inside: set[str] = set()
    columns = [_make_field(rng, k, unseen, used_inside) for k in kinds]
    schema = object_schema((f.key, f.schema) for f in columns)
    joiner = rng.choice((" ", ": ", " is "))
    if kind == "object":
        wrapper = rng.choice(("{}", "({})", "[{}]"))
        words = wrapper.format(_row_words(rng.sample(columns, len(columns)), joiner))
        return Field(key, label, schema, {f.key: f.value for f in columns}, words)
    rows = []
    for _ in range(rng.randint(1, 3)):
        row = []
        for column_kind, column in zip(kinds, columns, strict=True):
            value, words = _resample(rng, column_kind, column.schema)
            row.append(Field(column.key, column.label, column.schema, value, words))
        rows.append(row)
    wrapper, separator = rng.choice(
        (("({})", ", "), ("{}", " / "), ("[{}]", " "), ("({})", " and "))
    )
    words = separator.join(wrapper.format(_row_words(row, joiner)) for row in rows)
    values = [{f.key: f.value for f in row} for row in rows]
    return Field(key, label, {"type": "array", "items": schema}, values, words)


def _row_words(fields: Iterable[Field], joiner: str) -> str:
    """Return the text of a nested object."""
    return ", ".join(f"{f.label}{joiner}{f.words}" for f in fields)


def _resample(rng: random.Random, kind: str, schema: Schema) -> tuple[Json, str]:
    """Return another value of a schema, and its text."""
    while True:
        other, value, words = _scalar(rng, kind)
        if kind == "enum":
            value = words = rng.choice(schema["enum"])
        if kind == "enum" or other == schema:
            return value, words


def _describe(rng: random.Random, fields: Sequence[Field]) -> str:
    """Return a text that contains the fields in random order, in one of several styles."""
    shuffled = rng.sample(fields, len(fields))
    # Values without commas can be separated by commas.
    is_plain = all("," not in f.words and " and " not in f.words for f in fields)
    style = rng.randrange(6)
    if style == 0:
        separators = ["; ", "\n", " | ", ". "]
        if is_plain:
            separators.append(", ")
        separator = rng.choice(separators)
        return separator.join(f"{f.label}: {f.words}" for f in shuffled)
    if style == 1:
        separators = ["; ", "\n", "\n"]
        if is_plain:
            separators.append(" ")
        separator = rng.choice(separators)
        mark = rng.choice((" = ", "=", " - "))
        return separator.join(f"{f.label}{mark}{f.words}" for f in shuffled)
    if style == 2:
        return " ".join(f"The {f.label} is {f.words}." for f in shuffled)
    separator = ", " if is_plain else "; "
    if style == 3:
        return "A record with " + separator.join(f"{f.label} {f.words}" for f in shuffled) + "."
    if style == 4:
        return "\n".join(f"- {f.label}: {f.words}" for f in shuffled)
    clauses = []
    for f in shuffled:
        template = rng.choice(
            ("with {} {}", "{} is {}", "its {} is {}", "{}: {}", "the {} being {}")
        )
        uses_phrase = f.phrase and rng.random() < 0.7
        clauses.append(
            f"{f.phrase} {f.words}" if uses_phrase else template.format(f.label, f.words)
        )
    return rng.choice(("It ", "This one ", "")) + separator.join(clauses) + "."


def _make_fields(
    rng: random.Random, unseen: bool, low: int, high: int, kinds: Sequence[str]
) -> list[Field]:
    """Return `low` to `high` fields, at most one of them with a nested value."""
    used: set[str] = set()
    weights = [WEIGHTS[k] for k in kinds]
    fields: list[Field] = []
    for kind in rng.choices(kinds, weights, k=rng.randint(low, high)):
        if kind in ("object", "objects") and any(isinstance(f.value, dict | list) for f in fields):
            kind = "noun"
        fields.append(_make_field(rng, kind, unseen, used))
    return fields


def record_task(rng: random.Random, unseen: bool = False) -> Task:
    """Return a task to extract a record; fields may be optional, missing or not part of it."""
    fields = _make_fields(rng, unseen, 2, 6, tuple(WEIGHTS))
    wanted = list(fields)
    described = list(fields)
    optional = []
    if len(fields) > 2 and rng.random() < 0.2:
        wanted.remove(rng.choice(fields))
    for field in wanted:
        if rng.random() < 0.1 and len(described) > 1:
            optional.append(field.key)
            if rng.random() < 0.5:
                described.remove(field)
    answer = {f.key: f.value for f in wanted if f in described}
    schema = object_schema(((f.key, f.schema) for f in wanted), optional)
    intro = rng.choice(INTROS)
    words = _describe(rng, described)
    if words.startswith("-"):  # a list starts on a new line
        intro = f"{intro.strip()}\n".lstrip()
    words = intro + words
    instruction = rng.choice(INSTRUCTIONS)
    text = f"{instruction}\n{words}" if rng.random() < 0.5 else f"{words}\n{instruction}"
    return Task(text.strip(), schema, json.dumps(answer))


def regex_task(rng: random.Random, unseen: bool = False) -> Task:
    """Return a task to extract one value, whose form is a regular expression."""
    fields = _make_fields(rng, unseen, 1, 3, SCALARS)
    kind = rng.choice(("date", "code", "integer", "phone"))
    used = {f.key for f in fields}
    wanted = _make_field(rng, "code" if kind == "phone" else kind, unseen, used)
    patterns = {"date": DATE, "integer": "[0-9]+", "phone": PHONE}
    pattern = patterns[kind] if kind in patterns else wanted.schema["pattern"][1:-1]
    if kind == "phone":
        digits = "".join(rng.choice("0123456789") for _ in range(9))
        number = f"+{digits[:2]} {digits[2:5]} {digits[5:]}"
        wanted = Field("phone", "phone", {"type": "string"}, number, number)
    text = _describe(rng, [*fields, wanted])
    instruction = rng.choice(
        ("Give only the {}.", "What is the {}?", "Answer with the {} only.", "Just the {}, please.")
    )
    prompt = f"{text}\n{instruction.format(wanted.label)}"
    return Task(prompt, None, wanted.words, pattern, "regex")


def free_task(rng: random.Random, unseen: bool = False) -> Task:
    """Return a task to describe a record in one sentence, without a grammar."""
    fields = _make_fields(rng, unseen, 2, 3, SCALARS)
    sentence = " and ".join(f"the {f.label} is {f.words}" for f in fields)
    text = "; ".join(f"{f.label}: {f.words}" for f in fields)
    instruction = rng.choice(
        ("Say it in one sentence.", "Summarise in one sentence.", "Describe the record.")
    )
    answer = sentence[0].upper() + sentence[1:] + "."
    return Task(f"{text}\n{instruction}", None, answer, None, "free")


def add_schema_to_prompt(text: str, schema: Any) -> str:
    """Return a prompt that contains the schema as text, for pretrained models."""
    return f"{text}\nReply with JSON that follows this schema:\n{json.dumps(schema)}"


def make_task(rng: random.Random, unseen: bool = False) -> Task:
    """Return a task of one of the kinds that are scored: ``record``, ``regex`` or ``free``."""
    draw = rng.random()
    if draw < 0.84:
        return record_task(rng, unseen)
    return regex_task(rng, unseen) if draw < 0.94 else free_task(rng, unseen)


def held_out_tasks(count: int, seed: int = 0) -> list[Task]:
    """Return tasks like those of training, with seeds that training never uses."""
    return [make_task(random.Random(f"held-{seed}-{i}")) for i in range(count)]


def unseen_key_tasks(count: int, seed: int = 0) -> list[Task]:
    """Return record tasks whose keys never occur as keys in training."""
    return [record_task(random.Random(f"unseen-{seed}-{i}"), True) for i in range(count)]


def leaves(value: Json, path: str = "") -> dict[str, Json]:
    """Return the leaves of a JSON value by path. A list without objects is one leaf."""
    if isinstance(value, dict):
        parts = {f"{path}.{key}": part for key, part in value.items()}
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        parts = {f"{path}[{i}]": part for i, part in enumerate(value)}
    else:
        return {path: value}
    found: dict[str, Json] = {}
    for part_path, part in parts.items():
        found |= leaves(part, part_path)
    return found


def score_fields(answer_text: str, task: Task) -> tuple[int, int, bool]:
    """Compare an answer with the correct one.

    Fields are the leaves of the answer. Text that is not JSON has no correct fields. Tasks without
    a schema have one field.

    Returns
    -------
    (int, int, bool)
        Number of correct fields, number of fields, and whether the whole answer is correct.
    """
    if task.schema is None:
        correct = answer_text.strip() == task.answer
        return int(correct), 1, correct
    expected = leaves(json.loads(task.answer))
    try:
        value = json.loads(answer_text)
    except json.JSONDecodeError:
        return 0, len(expected), False
    found = leaves(value)
    num_correct = 0
    for path, wanted in expected.items():
        if path in found and type(found[path]) is type(wanted) and found[path] == wanted:
            num_correct += 1
    return num_correct, len(expected), num_correct == len(expected) == len(found)
