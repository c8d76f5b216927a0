"""Extraction tasks for the demo model: generator, held-out sets and scoring.

A task is a short text that describes a record, a JSON schema and the only correct answer. All
random choices use one ``random.Random``, so the seed of this generator determines the task. A code
change that alters the order of the random draws changes all tasks. The task generator is used for
training, the demo and the evaluation, and requires only the standard library. The words in the
tasks are from ``words.json``.

There are three sets of tasks. Training tasks have the seeds ``train-<n>``, held-out tasks the seeds
``held-<seed>-<n>``, and tasks with unseen keys the seeds ``unseen-<seed>-<n>``. Unseen keys are
property names that no training task has. Two word lists contain the seen and the unseen natural
words; for an invented word, a checksum decides whether it is unseen.
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
#: A value that is not an object: its schema, the value, and the value as text.
Scalar = tuple[Schema, Json, str]


@dataclass(frozen=True)
class Task:
    """A prompt with its only correct answer."""

    text: str  #: prompt
    schema: Schema | None  #: JSON schema of the answer; None if the answer is not JSON
    #: Correct answer. JSON is formatted as ``json.dumps`` does by default.
    answer: str
    #: Regular expression that the whole answer of a ``regex`` task matches; None for other tasks.
    pattern: str | None = None
    kind: str = "record"  #: ``"record"``, ``"regex"`` or ``"free"``; training has further kinds


@dataclass(frozen=True)
class Field:
    """A field of a record: its key and value, and the words that describe them in the text."""

    key: str  #: key in the schema
    label: str  #: name of the field in the text
    schema: Schema  #: JSON schema of the value
    value: Json  #: value of the field
    words: str  #: value in the form in which it occurs in the text
    #: Words that can introduce the value in place of the label; None if there are none.
    phrase: str | None = None


WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
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
        for parts in (ONSETS, VOWELS, CODAS):
            word += rng.choice(parts)
    return word


def is_unseen(key: str) -> bool:
    """Return whether training excludes a key.

    The keys in `UNSEEN` are unseen. Of the keys in neither `SEEN` nor `UNSEEN`, a checksum selects
    one in eight as unseen.
    """
    if any(key in keys for keys in UNSEEN.values()):
        return True
    if any(key in keys for keys in SEEN.values()):
        return False
    return zlib.crc32(key.encode()) % 8 == 0


def make_code(rng: random.Random) -> tuple[str, str]:
    """Return a random identifier, and a regular expression for identifiers of the same form."""
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
        prefix = pick(upper, num_letters)
        number = pick(digit, num_digits)
        return f"{prefix}-{number}", f"{letters}-{digits}"
    if form == 1:
        prefix = pick(upper, num_letters)
        number = pick(digit, num_digits)
        return prefix + number, letters + digits
    if form == 2:
        number = pick(digit, 3)
        suffix = pick(upper, 2)
        return f"{number}-{suffix}", "[0-9]{3}-[A-Z]{2}"
    if form == 3:
        return pick(hexadecimal, 6), "[0-9a-f]{6}"
    number = pick(digit, num_digits)
    return f"#{number}", f"#{digits}"


def make_string(rng: random.Random, kind: str) -> str:
    """Return a name of a person or place, or a noun, depending on `kind`."""
    if kind == "person":
        return _make_person(rng)
    if kind == "place":
        return _make_place(rng)
    word = rng.choice(NOUNS) if rng.random() < 0.5 else make_word(rng)
    if rng.random() < 0.75:
        return word
    second = rng.choice(NOUNS)
    return f"{word} {second}"


def _make_name(
    rng: random.Random, names: Sequence[str], known_share: float, syllables: int | None = None
) -> str:
    """Return one of `names` with probability `known_share`, and an invented name otherwise."""
    if rng.random() < known_share:
        return rng.choice(names)
    return make_word(rng, syllables).capitalize()


def _make_person(rng: random.Random) -> str:
    """Return a first name, usually followed by a last name. Either name can be an invented word."""
    first = _make_name(rng, FIRST_NAMES, 0.5, syllables=2)
    last = _make_name(rng, LAST_NAMES, 0.4)
    if rng.random() < 0.25:
        return first
    return f"{first} {last}"


def _make_place(rng: random.Random) -> str:
    """Return a place name, which can be an invented word and can have a prefix such as "New"."""
    place = _make_name(rng, PLACES, 0.5)
    if rng.random() < 0.9:
        return place
    prefix = rng.choice(("New", "Port", "San"))
    return f"{prefix} {place}"


def make_integer(rng: random.Random) -> int:
    """Return a non-negative integer of at most five digits."""
    digits = rng.choice((1, 2, 2, 3, 4, 5))
    return rng.randrange(10**digits)


def _join_words(rng: random.Random, parts: Sequence[str]) -> str:
    """Join parts with commas, or "and" before the last part. Return "none" without parts."""
    if not parts:
        return "none"
    if len(parts) > 1 and rng.random() < 0.4:
        return ", ".join(parts[:-1]) + " and " + parts[-1]
    return ", ".join(parts)


def _scalar(rng: random.Random, kind: str) -> Scalar:
    """Return a random value of a kind other than "object" and "objects"."""
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
    digits = rng.choice((2, 3, 4))
    tenths = rng.randrange(10**digits)
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
    numbers = []
    for _ in range(count):
        limit = rng.choice((10, 100))
        numbers.append(rng.randrange(limit))
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
    """Return the schema of an object with the properties `fields`, in this order, and no others.

    Properties in `optional` may be missing; all others are required.
    """
    properties = dict(fields)
    optional_keys = set(optional)
    return {
        "type": "object",
        "properties": properties,
        "required": [key for key in properties if key not in optional_keys],
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
    """Return a random key that is not in `used`, and add the key to `used`.

    Most keys suit values of the kind `kind` or are invented words; some are keys for values of
    other kinds. With `unseen`, the key is one that the training tasks never use.
    """
    pools = UNSEEN if unseen else SEEN
    invented_share = 0.5 if unseen else 0.4
    while True:
        pool = kind if rng.random() < 0.85 else rng.choice(tuple(pools))
        key = rng.choice(pools[pool])
        if rng.random() < invented_share:
            key = make_word(rng, 2)
            if rng.random() < 0.2:
                key += rng.choice(("_id", "_name", "_no", "_date"))
            if len(key) < 3 or is_unseen(key) != unseen:
                continue
        if key not in used:
            used.add(key)
            return key


def _make_label(rng: random.Random, key: str) -> str:
    """Return the name of a field in the text: the key, or the words of which the key consists."""
    if rng.random() < 0.4:
        return key
    label = ""
    for character in key:
        if character.isupper():
            label += " "
        label += character.lower()
    return label.replace("_", " ")


def _make_field(rng: random.Random, kind: str, unseen: bool, used: set[str]) -> Field:
    """Return a random field of a kind. `unseen` and `used` are passed to `new_key`."""
    key = new_key(rng, kind, unseen, used)
    label = _make_label(rng, key)
    if kind in ("object", "objects"):
        return _make_nested_field(rng, kind, unseen, key, label)
    schema, value, words = _scalar(rng, kind)
    return Field(key, label, schema, value, words, PHRASES.get(key))


def _make_nested_field(rng: random.Random, kind: str, unseen: bool, key: str, label: str) -> Field:
    """Return a field whose value is an object or a list of objects."""
    count = 2 if kind == "objects" else rng.randint(2, 3)
    kinds = [rng.choice(SCALARS) for _ in range(count)]
    used_inside: set[str] = set()
    columns = [_make_field(rng, column_kind, unseen, used_inside) for column_kind in kinds]
    schema = object_schema((column.key, column.schema) for column in columns)
    joiner = rng.choice((" ", ": ", " is "))
    if kind == "object":
        wrapper = rng.choice(("{}", "({})", "[{}]"))
        shuffled = rng.sample(columns, len(columns))
        words = wrapper.format(_object_words(shuffled, joiner))
        return Field(key, label, schema, _object_value(columns), words)
    rows = []
    for _ in range(rng.randint(1, 3)):
        rows.append(_resample_object(rng, kinds, columns))
    wrapper, separator = rng.choice(
        (("({})", ", "), ("{}", " / "), ("[{}]", " "), ("({})", " and "))
    )
    objects = [_object_words(row, joiner) for row in rows]
    words = separator.join(wrapper.format(text) for text in objects)
    values = [_object_value(row) for row in rows]
    return Field(key, label, {"type": "array", "items": schema}, values, words)


def _object_words(fields: Iterable[Field], joiner: str) -> str:
    """Return a nested object as text. `joiner` is the text between a label and its value."""
    return ", ".join(_format_fields("{}" + joiner + "{}", fields))


def _object_value(fields: Iterable[Field]) -> dict[str, Json]:
    """Return the JSON object that consists of the given fields."""
    return {field.key: field.value for field in fields}


def _resample_object(
    rng: random.Random, kinds: Sequence[str], fields: Sequence[Field]
) -> list[Field]:
    """Return fields with the keys of `fields` and new values, for the next object of a list.

    `kinds` has the kind of each field.
    """
    resampled = []
    for kind, field in zip(kinds, fields, strict=True):
        value, words = _resample(rng, kind, field.schema)
        resampled.append(Field(field.key, field.label, field.schema, value, words))
    return resampled


def _resample(rng: random.Random, kind: str, schema: Schema) -> tuple[Json, str]:
    """Return a random value of the kind `kind` that satisfies `schema`, and the value as text."""
    while True:
        other, value, words = _scalar(rng, kind)
        if kind == "enum":
            value = words = rng.choice(schema["enum"])
        if kind == "enum" or other == schema:
            return value, words


def _describe(rng: random.Random, fields: Sequence[Field]) -> str:
    """Return a text that contains the fields in random order, in one of six styles."""
    shuffled = rng.sample(fields, len(fields))
    # Commas can separate fields only if no value, such as a list, contains a comma or "and".
    is_plain = all("," not in field.words and " and " not in field.words for field in fields)
    style = rng.randrange(6)
    if style == 0:
        separators = ["; ", "\n", " | ", ". "]
        if is_plain:
            separators.append(", ")
        separator = rng.choice(separators)
        return separator.join(_format_fields("{}: {}", shuffled))
    if style == 1:
        separators = ["; ", "\n", "\n"]
        if is_plain:
            separators.append(" ")
        separator = rng.choice(separators)
        sign = rng.choice((" = ", "=", " - "))
        return separator.join(_format_fields("{}" + sign + "{}", shuffled))
    if style == 2:
        return " ".join(_format_fields("The {} is {}.", shuffled))
    separator = ", " if is_plain else "; "
    if style == 3:
        return "A record with " + separator.join(_format_fields("{} {}", shuffled)) + "."
    if style == 4:
        return "\n".join(_format_fields("- {}: {}", shuffled))
    clauses = []
    for field in shuffled:
        template = rng.choice(
            ("with {} {}", "{} is {}", "its {} is {}", "{}: {}", "the {} being {}")
        )
        if field.phrase and rng.random() < 0.7:
            clauses.append(f"{field.phrase} {field.words}")
        else:
            clauses.append(template.format(field.label, field.words))
    opening = rng.choice(("It ", "This one ", ""))
    return opening + separator.join(clauses) + "."


def _format_fields(template: str, fields: Iterable[Field]) -> list[str]:
    """Return the text of each field. `template` has placeholders for the label and the value."""
    return [template.format(field.label, field.words) for field in fields]


def _make_fields(
    rng: random.Random, unseen: bool, low: int, high: int, kinds: Sequence[str]
) -> list[Field]:
    """Return `low` to `high` fields of random kinds.

    A field of the kind "object" or "objects" becomes one of the kind "noun" if the value of an
    earlier field is an object or a list.
    """
    used: set[str] = set()
    weights = [WEIGHTS[kind] for kind in kinds]
    count = rng.randint(low, high)
    fields: list[Field] = []
    for kind in rng.choices(kinds, weights, k=count):
        has_nested_value = any(isinstance(field.value, dict | list) for field in fields)
        if kind in ("object", "objects") and has_nested_value:
            kind = "noun"
        fields.append(_make_field(rng, kind, unseen, used))
    return fields


def record_task(rng: random.Random, unseen: bool = False) -> Task:
    """Return a task that asks for a record as JSON.

    The prompt may describe a field that is not in the schema. Some fields of the schema are
    optional, and the prompt may omit them. With `unseen`, the keys are excluded from training.
    """
    fields = _make_fields(rng, unseen, 2, 6, tuple(WEIGHTS))
    wanted = list(fields)
    described = list(fields)
    optional = []
    if len(fields) > 2 and rng.random() < 0.2:
        unwanted = rng.choice(fields)
        wanted.remove(unwanted)
    for field in wanted:
        if rng.random() < 0.1 and len(described) > 1:
            optional.append(field.key)
            if rng.random() < 0.5:
                described.remove(field)
    answer = _object_value(field for field in wanted if field in described)
    schema = object_schema(((field.key, field.schema) for field in wanted), optional)
    intro = rng.choice(INTROS)
    words = _describe(rng, described)
    if words.startswith("-"):  # a list starts on a new line
        intro = f"{intro.strip()}\n".lstrip()
    words = intro + words
    instruction = rng.choice(INSTRUCTIONS)
    lines = [instruction, words] if rng.random() < 0.5 else [words, instruction]
    text = "\n".join(lines).strip()
    return Task(text, schema, json.dumps(answer))


def regex_task(rng: random.Random, unseen: bool = False) -> Task:
    """Return a task that asks for one value in a text. The answer matches a regular expression."""
    fields = _make_fields(rng, unseen, 1, 3, SCALARS)
    kind = rng.choice(("date", "code", "integer", "phone"))
    used = {field.key for field in fields}
    field_kind = "code" if kind == "phone" else kind
    wanted = _make_field(rng, field_kind, unseen, used)
    patterns = {"date": DATE, "integer": "[0-9]+", "phone": PHONE}
    pattern = patterns.get(kind)
    if pattern is None:  # the pattern of a code, without the anchors ^ and $
        pattern = wanted.schema["pattern"][1:-1]
    if kind == "phone":
        digits = "".join(rng.choice("0123456789") for _ in range(9))
        number = f"+{digits[:2]} {digits[2:5]} {digits[5:]}"
        wanted = Field("phone", "phone", {"type": "string"}, number, number)
    text = _describe(rng, [*fields, wanted])
    instruction = rng.choice(
        ("Give only the {}.", "What is the {}?", "Answer with the {} only.", "Just the {}, please.")
    )
    request = instruction.format(wanted.label)
    prompt = f"{text}\n{request}"
    return Task(prompt, None, wanted.words, pattern, "regex")


def free_task(rng: random.Random, unseen: bool = False) -> Task:
    """Return a task that asks for a description of a record in one sentence, without a grammar."""
    fields = _make_fields(rng, unseen, 2, 3, SCALARS)
    sentence = " and ".join(_format_fields("the {} is {}", fields))
    text = "; ".join(_format_fields("{}: {}", fields))
    instruction = rng.choice(
        ("Say it in one sentence.", "Summarise in one sentence.", "Describe the record.")
    )
    answer = sentence[0].upper() + sentence[1:] + "."
    return Task(f"{text}\n{instruction}", None, answer, None, "free")


def add_schema_to_prompt(text: str, schema: Any) -> str:
    """Append a JSON schema to a prompt, for models whose chat template does not render schemas."""
    return f"{text}\nReply with JSON that follows this schema:\n{json.dumps(schema)}"


def make_task(rng: random.Random, unseen: bool = False) -> Task:
    """Return a task of one of the kinds that are scored: ``record``, ``regex`` or ``free``."""
    draw = rng.random()
    if draw < 0.84:
        return record_task(rng, unseen)
    if draw < 0.94:
        return regex_task(rng, unseen)
    return free_task(rng, unseen)


def held_out_tasks(count: int, seed: int = 0) -> list[Task]:
    """Return `count` tasks that are generated like the training tasks, but with other seeds."""
    return [make_task(random.Random(f"held-{seed}-{i}")) for i in range(count)]


def unseen_key_tasks(count: int, seed: int = 0) -> list[Task]:
    """Return `count` record tasks whose keys never occur in training."""
    return [record_task(random.Random(f"unseen-{seed}-{i}"), True) for i in range(count)]


def leaves(value: Json, path: str = "") -> dict[str, Json]:
    """Return the leaves of a JSON value, by path. A list that contains no objects is one leaf."""
    found: dict[str, Json] = {}
    if isinstance(value, dict):
        for key, part in value.items():
            found |= leaves(part, f"{path}.{key}")
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for index, part in enumerate(value):
            found |= leaves(part, f"{path}[{index}]")
    else:
        found[path] = value
    return found


def score_fields(answer_text: str, task: Task) -> tuple[int, int, bool]:
    """Return the number of correct fields, the number of fields, and whether the answer is correct.

    Each leaf of the correct answer counts as a field. If the generated answer is not JSON, none of
    its fields is correct. If the task has no schema, the whole answer is one field.
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
        value = found.get(path)
        if path in found and type(value) is type(wanted) and value == wanted:
            num_correct += 1
    is_correct = num_correct == len(expected) == len(found)
    return num_correct, len(expected), is_correct
