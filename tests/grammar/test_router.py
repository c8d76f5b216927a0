"""The router says what will be enforced, and nothing is loosened without a word."""

from __future__ import annotations

import json
from typing import Any

import pytest
from router_util import Grammar

from graft.grammar import GrammarError, GrammarSpec, Vocabulary, make_backend
from graft.grammar.schema.enforcement import ENFORCEMENT, preflight, trial
from graft.grammar.schema.router import check_output, route

pytest.importorskip("llguidance")
BOTH = ("llguidance", "xgrammar")

# Schemas that no backend enforces exactly, the keyword and place, and a value that gets past.
INEXACT: list[tuple[Any, str, str, Any]] = [
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "#", "uniqueItems",
     ["a", "a"]),
    ({"properties": {"a": {"type": "array", "contains": {"const": 1}}}}, "#/properties/a",
     "contains", {"a": [2]}),
    ({"properties": {"x/y": {"not": {"pattern": "a+"}}}}, "#/properties/x~1y", "not",
     {"x/y": "aa"}),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#", "oneOf", 3),
    ({"type": "string", "format": "regex"}, "#", "format", "("),
    ({"type": "object", "patternProperties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
     "#", "patternProperties", {"a": "x"}),
    ({"type": "string", "pattern": "^(?!x)"}, "#", "pattern", "x"),
    ({"properties": {"a": {"$ref": "https://example.com/other.json"}}}, "#/properties/a", "$ref",
     {"a": 1}),
    ({"unevaluatedProperties": False}, "#", "unevaluatedProperties", {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize("schema, pointer, keyword, value", INEXACT, ids=lambda x: str(x)[:30])
def test_what_cannot_be_enforced_is_named(schema, pointer, keyword, value):
    """An inexact route names keyword and pointer, and its loose schema indeed lets more through."""
    found = route(schema, BOTH)
    assert not found.exact
    assert (pointer, keyword) in {(r.pointer, r.keyword) for r in found.reasons}
    assert f"{pointer}: {keyword}: " in found.refusal()
    if found.backend == "llguidance":
        assert Grammar(found.schema).takes(value)
    with pytest.raises(GrammarError, match="cannot be enforced") as caught:
        GrammarSpec.json_schema(schema, backend="auto")
    assert pointer in str(caught.value) and keyword in str(caught.value)


def test_a_loose_route_is_taken_only_when_allowed_and_is_marked():
    """partial=True takes an inexact schema and marks it; an exact one is never marked."""
    loose = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    spec = GrammarSpec.json_schema(loose, backend="auto", partial=True)
    assert spec.partial and spec.schema == loose and "uniqueItems" not in spec.text
    exact = GrammarSpec.json_schema({"type": "string"}, backend="auto", partial=True)
    assert not exact.partial


def test_marked_outputs_are_checked_against_the_users_schema():
    """check_output tells satisfying texts from violating ones and from what is no JSON."""
    schema = {"type": "array", "uniqueItems": True, "items": {"format": "date"}}
    assert check_output(schema, '["2024-02-29"]')
    assert not check_output(schema, '["2024-02-29", "2024-02-29"]')
    assert not check_output(schema, '["2023-02-29"]')
    assert not check_output(schema, '["2024-02-29"')
    with pytest.raises(GrammarError, match="cannot be checked"):
        check_output({"$ref": "https://example.com/nowhere"}, "1")


@pytest.mark.parametrize("schema", [False, {"allOf": [True, False]}, {"type": "string",
                         "minLength": 3, "maxLength": 2}, {"enum": []}])  # fmt: skip
def test_a_schema_without_outputs_is_refused(schema):
    """What nothing satisfies has no backend."""
    found = route(schema, ("llguidance",))
    assert found.backend is None and not found.exact
    assert "no output" in found.refusal()


def test_llguidance_is_chosen_where_it_is_exact_and_xgrammar_where_it_is_alone():
    """The first exact backend in order of preference wins; a lone one must be exact by itself."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5000}},
              "additionalProperties": False}  # fmt: skip
    assert route(schema, BOTH).backend == "llguidance"
    lone = route(schema, ("xgrammar",))
    assert not lone.exact and lone.reasons[0].keyword == "maxLength" and lone.backend is None
    small = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}},
             "additionalProperties": False}  # fmt: skip
    assert route(small, ("xgrammar", "llguidance")).backend == "xgrammar"
    disjoint = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    assert route(disjoint, ("xgrammar",)).exact
    assert not route({"type": "array", "uniqueItems": True, "items": {}}, ("xgrammar",)).exact


def test_a_schema_cannot_switch_strictness_off():
    """LLGuidance's in-schema options are no way around the router."""
    schema = {"type": "array", "items": {}, "uniqueItems": True, "x-guidance": {"lenient": True}}
    found = route(schema, BOTH)
    assert not found.exact and "x-guidance" not in found.schema


def test_routes_are_pure():
    """The same schema gives the same route, and stays as it was."""
    schema = {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}
    before = json.dumps(schema)
    assert route(schema, BOTH) == route(schema, BOTH)
    assert json.dumps(schema) == before


def test_unknown_backends_are_refused():
    """Backend names are checked before anything else."""
    for names in ((), ("outlines",)):
        with pytest.raises(GrammarError, match="needs some of"):
            route({}, names)
    with pytest.raises(GrammarError, match="unknown"):
        GrammarSpec.json_schema({}, backend="outlines")


@pytest.mark.parametrize("keyword, schema", [
    ("not", {"not": {"type": "string"}}), ("if", {"if": {}, "then": {}}),
    ("dependentRequired", {"dependentRequired": {"a": ["b"]}}), ("contains", {"contains": {}}),
    ("propertyNames", {"propertyNames": {"pattern": "a"}}), ("uniqueItems", {"uniqueItems": True}),
    ("unevaluatedProperties", {"unevaluatedProperties": False}),
])  # fmt: skip
def test_the_table_agrees_with_llguidance(keyword, schema):
    """Keywords that the preflight calls refused are refused by LLGuidance itself."""
    assert keyword in ENFORCEMENT["llguidance"]["refused"]
    assert trial(schema)
    assert [f for f in preflight(schema, "llguidance") if f.keyword == keyword]


def test_hostile_schemas_are_refused_in_a_sentence():
    """Nonsense where a schema or a number belongs is a refusal, never another exception."""
    nonsense: list[Any] = [
        {"properties": []}, {"properties": {"a": 3}}, {"oneOf": {}}, {"required": "a"},
        {"minProperties": "x"}, {"minProperties": -1.5}, {"type": 7}, {"enum": 3},
        {"dependencies": []}, {"not": 3}, {"pattern": 3}, {"format": 3}, {"items": 3},
        {"$ref": 3}, {"$ref": "#/nowhere"}, {"if": 3, "then": 4}, {"propertyNames": 3},
        {"allOf": 3}, {"not": {"required": 3}}, {"not": {"minLength": "x"}}, {"maxLength": "x"},
        {"type": "string", "pattern": "("}, {"type": "nothing"},
        {"oneOf": [{"minLength": "x"}, {"maxLength": None}]}, {"patternProperties": {"(": {}}},
    ]  # fmt: skip
    for schema in nonsense:
        found = route(schema, BOTH)
        if found.exact and found.backend == "llguidance":
            assert Grammar(found.schema).takes(1) == (schema != {"type": "nothing"}), schema
        else:
            assert found.refusal()


def test_a_routed_spec_means_what_the_standard_says():
    """backend="auto" compiles on the chosen backend; further properties are legal unless strict."""
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], 257, [256])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}},
              "dependentRequired": {"a": ["b"]}}  # fmt: skip
    for strict, open_end in ((None, True), (True, False)):
        spec = GrammarSpec.json_schema(schema, backend="auto", strict=strict)
        backend = make_backend(spec.backend, vocabulary)
        compiled = backend.compile(spec)

        def fits(text: str, backend: Any = backend, compiled: Any = compiled) -> bool:
            matcher = backend.matcher(compiled)
            return all(matcher.accept(byte) for byte in [*text.encode(), 256])

        assert spec.backend == "llguidance" and not spec.partial and spec.schema == schema
        assert fits('{"a": 1, "b": 2}') and fits("{}") and fits('{"b": 2}')
        assert not fits('{"a": 1}') and not fits('{"a": "x", "b": 2}')
        assert fits('{"c": 3}') == open_end
