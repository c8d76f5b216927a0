"""Tests that refusals name the true cause.

The oracle of the tests is removal: without the keywords that an error names, the schema must be
accepted. Without all of them but one, it must still be refused.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from graft.grammar import GrammarError, GrammarSpec
from graft.grammar.schema.references import pointer_steps
from graft.grammar.schema.router import route

pytest.importorskip("llguidance")

INTEGER = {"type": "integer"}
STRING = {"type": "string"}
OVERLAPPING = [INTEGER, {"type": "number"}]
REMOTE = "https://example.com/other.json"
UNIONS = [
    {"anyOf": [{"minimum": i}, {"type": "string", "minLength": i}]} for i in range(20)
]  # multiplied out, these are 2**20 schemas
DRAFT_7 = "http://json-schema.org/draft-07/schema#"

#: Schemas of a property, each of which is refused for one keyword.
VALUES: list[dict[str, Any]] = [
    # invalid values of keywords
    {"type": "strnig"},
    {"type": ["string", 3]},
    {"minimum": "3"},
    {"maximum": True},
    {"multipleOf": 0},
    {"minLength": -1},
    {"maxItems": 1.5},
    {"pattern": 3},
    {"required": "a"},
    {"enum": "a"},
    {"items": 3},
    {"properties": []},
    {"allOf": []},
    {"not": 3},
    {"contentMediaType": 3},
    {"dependentRequired": {"a": "b"}},
    # references
    {"$ref": "#/nope"},
    {"$ref": REMOTE},
    {"$ref": "other.json#/a"},
    {"items": {"items": {"$ref": "other.json"}}},
    {"$dynamicRef": "other.json"},
    # numbers and strings
    {"type": "integer", "minimum": 1e20},
    {"type": "number", "exclusiveMinimum": 1e308},
    {"type": "number", "multipleOf": 1e-30},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "[z-a]"},
    {"type": "string", "pattern": r"\bfoo"},
    {"type": "string", "pattern": "(?:a(?!b))*"},
    {"type": "string", "pattern": r"(a)\1"},
    {"type": "string", "format": "idn-email"},
    # arrays
    {"type": "array", "uniqueItems": True, "items": STRING},
    {"type": "array", "contains": INTEGER},
    {"type": "array", "contains": INTEGER, "minContains": 2},
    {"type": "array", "prefixItems": [STRING, {"type": "string", "pattern": "(?<=x)"}]},
    {
        "type": "array",
        "unevaluatedItems": False,
        "anyOf": [{"prefixItems": [INTEGER]}, {"minItems": 1}],
    },
    # objects
    {"type": "object", "propertyNames": {"format": "email"}},
    {"type": "object", "propertyNames": {"pattern": "("}},
    {"type": "object", "patternProperties": {"name": STRING, "tags": INTEGER}},
    {"type": "object", "patternProperties": {"(?<=a)": INTEGER}, "properties": {"abc": STRING}},
    {"type": "object", "minProperties": 3, "properties": {f"p{i}": {} for i in range(20)}},
    {"type": "object", "maxProperties": 3, "properties": {f"p{i}": {} for i in range(20)}},
    {"type": "object", "dependentRequired": {f"p{i}": [f"q{i}"] for i in range(12)}},
    {"type": "object", "additionalProperties": {"type": "string", "pattern": "^(?<!a)"}},
    {"unevaluatedProperties": False, "anyOf": [{"properties": {"a": STRING}}, {"required": ["x"]}]},
    # combinations
    {"oneOf": OVERLAPPING},
    {"allOf": [{"oneOf": OVERLAPPING}]},
    {"oneOf": [{"type": "string", "format": "email"}, {"type": "string", "maxLength": 3}]},
    {"not": {"format": "email"}},
    {"not": {"items": STRING}},
    {"if": {"format": "email"}, "then": {"maxLength": 3}},
    {"allOf": UNIONS},
    {"type": "object", "properties": {"b": STRING, "c": {"allOf": UNIONS}}},
]
#: Whole documents, each of which is refused for one keyword.
DOCUMENTS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "string", "minLength": 5, "maxLength": 3},
    {"type": "array", "minItems": 1, "items": False},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"not": {}},
    {"anyOf": [False]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": False}},
    {"$ref": "#/$defs/n", "$defs": {"n": {"allOf": [{"$ref": "#/$defs/n"}, STRING]}}},
    {"$id": REMOTE, "type": "object", "properties": {"a": STRING, "b": {"$ref": "d.json"}}},
    {"$id": REMOTE, "$defs": {"a": {"$ref": "d.json"}}, "items": {"$ref": "#/$defs/a"}},
    {"$ref": DRAFT_7},
    {
        # The pattern is refused in a copy of the referenced schema, which has another pointer.
        "properties": {
            "x": {"$ref": "#/properties/y/items"},
            "y": {"type": "array", "items": {"type": "string", "pattern": r"a\bb"}},
        }
    },
    {
        # Without the patterns, additionalProperties would forbid the required property.
        "type": "object",
        "required": ["name"],
        "patternProperties": {"name": STRING, "tags": INTEGER},
        "additionalProperties": False,
    },
]
SCHEMAS = [{"type": "object", "properties": {"p": part, "q": STRING}} for part in VALUES]
SCHEMAS += DOCUMENTS


def named_places(schema: Any) -> list[tuple[str, str]]:
    """Return the JSON pointers and keywords that the refusal of a schema names."""
    try:
        GrammarSpec.json_schema(schema)
        return [reason[:2] for reason in route(schema).reasons]
    except GrammarError as error:
        found = re.match(r"JSON schema: (#\S*): (\S+): ", str(error))
        assert found, f"the error names no keyword: {error}"
        return [(found[1], found[2])]


def without(schema: Any, places: list[tuple[str, str]]) -> Any:
    """Return a copy of a schema without some keywords, each of which must exist."""
    schema = copy.deepcopy(schema)
    for pointer, keyword in places:
        part = schema
        for step in pointer_steps(pointer):
            part = part[int(step)] if isinstance(part, list) else part[step]
        del part[keyword]
        if keyword == "patternProperties":  # additionalProperties refers to the patterns
            part.pop("additionalProperties", None)
    return schema


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema)[:80])
def test_refusal_names_keyword_whose_removal_suffices(schema: Any):
    [place] = named_places(schema)
    assert named_places(without(schema, [place])) == []


def test_refusal_names_every_cause():
    """Three causes at different places are named, and no two of them suffice."""
    schema = {
        "properties": {
            "a": {"type": "string", "pattern": r"a\bb"},
            "b": {"items": {"$ref": "other.json"}},
            "c": {"type": "string", "format": "idn-email"},
        }
    }
    places = named_places(schema)
    assert len(places) == 3 and named_places(without(schema, places)) == []
    for place in places:
        rest = [other for other in places if other != place]
        assert named_places(without(schema, rest)) == [place]


@pytest.mark.parametrize(
    ("reference", "document"), [(REMOTE, REMOTE), ("a.json#/$defs/x", "a.json")]
)
def test_refusal_of_reference_to_another_document_names_it(reference: str, document: str):
    [reason] = route({"properties": {"a": {"$ref": reference}}}).reasons
    assert reason[:2] == ("#/properties/a", "$ref")
    words = f"'{document}' is another document, and other documents are not fetched"
    assert reason.why.startswith(words)


def test_refusal_of_large_schema_names_limit():
    [reason] = route({"properties": {"a": {"allOf": UNIONS}}}).reasons
    assert reason[:2] == ("#/properties/a", "allOf") and "50,000 compilation steps" in reason.why


@pytest.mark.parametrize(
    "pattern, message",
    [
        (r"\bx", "word boundary"),
        ("a^b", "an anchor"),
        ("a\\", "incomplete escape sequence"),
        ("(?=x)a", "look-ahead"),
        ("a(b", "unclosed group"),
    ],
)
def test_refusal_of_regex_names_cause(pattern: str, message: str):
    with pytest.raises(GrammarError, match=message):
        GrammarSpec.regex(pattern).check()


@pytest.mark.parametrize("base", [{}, {"$id": "https://example.com/schemas/root.json"}])
def test_missing_documents_are_named_in_order(base):
    """The message is the same in each call: it names the first missing documents of the schema."""
    names = [f"part-{letter}.json" for letter in "hgfedcba"]
    references = {name: {"$ref": f"{name}#/$defs/x"} for name in names}
    known = {"$ref": DRAFT_7}
    schema = {**base, "properties": {"known": known, **references}, "type": "object"}
    with pytest.raises(GrammarError) as caught:
        GrammarSpec.json_schema(schema).check()
    found = re.findall(r"#/properties/(\S+): \$ref", str(caught.value))
    assert found == names[:5]


@pytest.mark.parametrize("kind, levels", [("$ref", 3001), ("properties", 6000), ("anyOf", 8999)])
def test_long_chain_of_references_is_refused(kind: str, levels: int):
    """LLGuidance's stack would overflow, and no automaton is built for so long a chain."""

    def definition(number: int) -> dict:
        reference = {"$ref": f"#/$defs/d{number}"}
        if kind == "properties":
            return {"type": "object", "properties": {"a": reference}}
        if kind == "anyOf":
            return {"anyOf": [{"type": "null"}, {"type": "array", "items": reference}]}
        return reference

    definitions = {f"d{number}": definition(number + 1) for number in range(2999)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d2999": {"type": "integer"}}}
    with pytest.raises(GrammarError, match=rf"nested {levels:,} levels .* at most 1,500 levels"):
        GrammarSpec.json_schema(schema).check()
    few = {name: definitions[name] for name in [*definitions][:300]}
    schema = {"$ref": "#/$defs/d0", "$defs": {**few, "d300": {"type": "integer"}}}
    GrammarSpec.json_schema(schema).check()
