"""Schemas that refer to themselves: those without a finite value are refused when stated."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from graft.grammar import GrammarError, GrammarSpec, StructuralTag
from graft.grammar.schema.endless import is_endless


def node(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": {"type": "integer"}, "n": {"$ref": "#"}}} | more


ENDLESS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                 "$ref": "#/$defs/a"},
    "a required property": node(required=["n"]),
    "an item": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "a first item": {"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 2},
    "every option": {"anyOf": [node(required=["n"]), {"$ref": "#"}]},
    "a conjunct": {"allOf": [{"type": "integer"}, {"$ref": "#"}]},
    "far away": {"$ref": "#/x/y~1z/0", "x": {"y/z": [{"oneOf": [{"$ref": "#/x/y~1z/0"}]}]}},
    "quoted": {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"$ref": "#/$defs/a%20b"}}},
}  # fmt: skip
#: Schemas that refer to themselves, and a value that satisfies each.
FINITE: dict[str, tuple[Any, Any]] = {
    "a property": (node(required=["v"]), {"v": 1}),
    "another type": (node(required=["n"]) | {"type": ["object", "null"]}, None),
    "no type": ({"properties": {"n": {"$ref": "#"}}, "required": ["n"]}, 5),
    "no items": ({"type": "array", "items": {"$ref": "#"}}, []),
    "an option": ({"anyOf": [node(required=["n"]), {"type": "null"}]}, None),
    "the second of two": ({"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 1},
                          [0]),
    "a name that is no keyword": ({"type": "object", "properties": {"$ref": {"type": "integer"}},
                                   "required": ["$ref"]}, {"$ref": 1}),
    "a long way": ({"$ref": "#/$defs/0", "$defs": {
        **{str(i): node(required=["n"], properties={"n": {"$ref": f"#/$defs/{i + 1}"}})
           for i in range(40)}, "40": {"type": "null"}}}, None),
}  # fmt: skip


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS)
def test_what_only_endless_values_satisfy_is_refused(schema: Any) -> None:
    """By every backend's name, in a tag and loosely too: there is no output to make."""
    for backend in ("", "auto", "xgrammar", "llguidance"):
        for partial in (False, True):
            with pytest.raises(GrammarError, match=r"allows no output: a \$ref leads back"):
                GrammarSpec.json_schema(json.dumps(schema), backend=backend, partial=partial)
    with pytest.raises(GrammarError, match=r"tag schema: .* allows no output"):
        StructuralTag.of("<", schema, ">")


@pytest.mark.parametrize("schema, value", FINITE.values(), ids=FINITE)
def test_what_a_finite_value_satisfies_is_not(schema: Any, value: Any) -> None:
    """Recursion with a way out is no reason to refuse."""
    assert not is_endless(schema)
    if value is None and "$defs" in schema:
        for _ in range(40):
            value = {"n": value}
    jsonschema.Draft202012Validator(schema).validate(value)


def test_what_is_no_schema_is_left_to_others() -> None:
    """Wrong forms and references to elsewhere are not judged here."""
    for schema in (True, {"$ref": 5}, {"$ref": "#/none"}, {"$ref": "http://localhost/x"},
                   {"allOf": [{"$ref": "#/none/0"}], "none": []}, {"anyOf": 3, "$ref": "#x"},
                   {"type": "object", "properties": [], "required": ["a"], "not": {"$ref": "#"}}):
        assert not is_endless(schema)
