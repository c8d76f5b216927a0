"""Plain schemas are accepted by LLGuidance, which the router therefore does not ask."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

import pytest
from schema_fuzz import random_schema

from graft.grammar.schema.documents import subschemas
from graft.grammar.schema.llguidance_check import document_text, text_error
from graft.grammar.schema.name_spelling import with_one_spelling
from graft.grammar.schema.plain import is_plain
from graft.grammar.schema.rewrite import rewrite

pytest.importorskip("llguidance")

ATOMS = [
    "a",
    "-",
    "/",
    r"\.",
    r"\d",
    r"\w",
    "[a-f0-9]",
    "[^ .@]",
    r"[^\n\r\u2028\u2029]",
    "[3-9_-]",
]
REPETITIONS = ["", "", "", "*", "+", "?", "{3}", "{40}", "{2,}"]
NAMES = ["a", "b", "name", "x y", "ü", 'quoted "name"', "back\\slash", "new\nline", "\x01", ""]
REFUSED = [
    {"type": "string", "pattern": r"a\b"},
    {"type": "string", "pattern": "[z-a]"},
    {"type": "string", "pattern": "a{3,1}"},
    {"type": "string", "pattern": "^a", "format": "date"},
    {"type": "string", "minLength": 3, "maxLength": 2},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "number", "minimum": 3, "maximum": 2},
    {"type": "string", "enum": [1]},
    {"enum": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#/definitions/a b", "definitions": {"a b": {"type": "string"}}},
    {"$ref": "https://example.com/other", "type": "string"},
    {"$schema": "https://example.com/own", "type": "string"},
    {"type": "string", "$id": "no uri"},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "object", "patternProperties": {"^a": {}, "b$": {}}},
    {"type": "array", "items": False, "minItems": 1},
    {"anyOf": [{"type": "string"}, False], "type": "integer"},
    {"type": "string", "default": json.loads("[" * 200 + "]" * 200)},
    {"anyOf": [{"type": "object", "properties": {f"a{i}": {}}} for i in range(20_000)]},
]


def is_accepted(schema: Any) -> bool | None:
    """Return whether LLGuidance accepts a schema; None if the schema is not plain."""
    text = document_text(with_one_spelling(schema).schema, "line")
    return not text_error(text) if is_plain(subschemas(schema), text) else None


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    parts = []
    for _ in range(rng.randint(1, 4)):
        if depth > 0 and rng.random() < 0.3:
            options = [random_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            parts.append(f"({'|'.join(options)}){rng.choice(['', '*', '+', '?'])}")
        else:
            parts.append(rng.choice(ATOMS) + rng.choice(REPETITIONS))
    return "".join(parts)


def random_plain_schema(rng: random.Random, depth: int = 3) -> Any:
    """Return a random schema that is plain in most cases."""
    kinds = ["string", "pattern", "format", "integer", "enum", "$ref", "list", "null", "anything"]
    if depth > 0:
        kinds += ["object", "object", "object", "map", "array", "anyOf"]
    kind = rng.choice(kinds)
    low = rng.randint(0, 3)
    high = low + rng.randint(1, 900)
    inner = lambda: random_plain_schema(rng, depth - 1)  # noqa: E731
    if kind == "string":
        return {"type": "string", "minLength": low, "maxLength": high}
    if kind == "pattern":
        pattern = random_pattern(rng)
        return {"type": "string", "pattern": rng.choice([pattern, f"^{pattern}$", f"^{pattern}"])}
    if kind == "format":
        return {"type": ["string", "null"], "format": rng.choice(["date", "time", "uuid", "email"])}
    if kind == "integer":
        return {"type": rng.choice(["integer", "number"]), "minimum": -low, "maximum": high}
    if kind == "enum":
        return {"enum": rng.sample([*NAMES, None, True, False], 4), "description": "a\nb"}
    if kind == "$ref":
        return {"$ref": "#/definitions/some:name"}
    if kind == "list":
        return {"type": ["string", "integer", "boolean"], "default": [1], "x-more": {"a": [{}]}}
    if kind == "null":
        return {"type": "null"}
    if kind == "anything":
        return rng.choice([True, {}, {"title": "any"}])
    if kind == "array":
        return {"type": "array", "items": inner(), "minItems": low, "maxItems": high}
    if kind == "anyOf":
        return {"anyOf": [inner() for _ in range(rng.randint(1, 3))]}
    if kind == "map":
        return {"type": "object", "patternProperties": {random_pattern(rng): inner()}}
    names = rng.sample(NAMES, rng.randint(0, 5))
    schema: dict[str, Any] = {"type": "object", "properties": {name: inner() for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.5]
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice([False, False, True, {"type": "string"}])
    return schema


@pytest.mark.parametrize("schema", REFUSED, ids=range(len(REFUSED)))
def test_plain_schemas_exclude_a_refused_schema(schema):
    assert is_accepted(schema) is None
    assert text_error(document_text(with_one_spelling(schema).schema, "line"))


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(i, marks=pytest.mark.full) for i in range(2, 12))]
)
def test_plain_schemas_are_accepted(seed):
    rng = random.Random(seed)
    results = []
    for _ in range(400):
        schema = random_plain_schema(rng)
        if isinstance(schema, dict):
            schema = {**schema, "definitions": {"some:name": random_plain_schema(rng)}}
        results.append((is_accepted(schema), schema))
    assert [schema for accepted, schema in results if accepted is False] == []
    assert sum(accepted is True for accepted, _ in results) > 100


def test_plain_schemas_of_any_keywords_are_accepted():
    rng = random.Random(3)
    results = []
    for _ in range(1500):
        schema = rewrite(random_schema(rng)).schema
        results.append((is_accepted(schema), schema))
    assert [schema for accepted, schema in results if accepted is False] == []
    assert sum(accepted is True for accepted, _ in results) > 50


@pytest.mark.parametrize("step", [100, pytest.param(1, marks=pytest.mark.full)])
def test_plain_schemas_of_maskbench_are_accepted(shared_data, step):
    rows = []
    for path in sorted((shared_data / "maskbench").glob("*.jsonl.gz")):
        rows += gzip.decompress(path.read_bytes()).splitlines()
    results = []
    for row in rows[::step]:
        schema = rewrite(json.loads(row)["schema"]).schema
        results.append((is_accepted(schema), schema))
    assert [schema for accepted, schema in results if accepted is False] == []
    assert sum(accepted is True for accepted, _ in results) > len(results) // 2
