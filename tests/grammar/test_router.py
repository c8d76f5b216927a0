"""Tests of the JSON schema router: exact forms, reasons and refusals."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from guide_util import BYTES, accepts
from router_util import Grammar

from graft.grammar import (
    GrammarError,
    GrammarSpec,
    StructuralTag,
    make_backend,
    resolve,
    resolve_spec,
    usable,
)
from graft.grammar.schema.keyword_support import KEYWORDS
from graft.grammar.schema.llguidance_check import schema_error
from graft.grammar.schema.router import route
from graft.grammar.schema.wellformed import check_schema

pytest.importorskip("llguidance")
# Schemas that no backend enforces exactly, each with the pointer and the keyword of the reason, and
# with an invalid value that the closest form accepts.
INEXACT: list[tuple[Any, str, str, Any]] = [
    (
        {"type": "array", "anyOf": [{"uniqueItems": True}, {"maxItems": 2}]},
        "#/anyOf/0",
        "uniqueItems",
        ["a", "a"],
    ),
    (
        {"type": "string", "not": {"format": "email"}, "x-guidance": {"lenient": True}},
        "#",
        "not",
        "a@b.cd",
    ),
    (
        {"properties": {"x/y": {"not": {"format": "email"}}}},
        "#/properties/x~1y",
        "not",
        {"x/y": "a@b.cd"},
    ),
    ({"type": "string", "oneOf": [{"format": "email"}, {"maxLength": 9}]}, "#", "oneOf", "a@b.cd"),
    ({"type": "string", "format": "idn-email"}, "#", "format", "("),
    ({"type": "string", "pattern": "^(?<!x)"}, "#", "pattern", "x"),
    (
        {"properties": {"a": {"$ref": "https://example.com/other.json"}}},
        "#/properties/a",
        "$ref",
        {"a": 1},
    ),
    (
        {"unevaluatedProperties": False, "anyOf": [{"properties": {"a": True}}, True]},
        "#",
        "unevaluatedProperties",
        {"a": 1},
    ),
    (
        {"type": "array", "contains": {"const": 1}, "maxContains": 1, "maxItems": 3},
        "#",
        "contains",
        [1, 1],
    ),
]


@pytest.mark.parametrize("schema, pointer, keyword, value", INEXACT, ids=lambda x: str(x)[:30])
def test_route_reports_unenforced_keyword_and_pointer(schema, pointer, keyword, value):
    """The closest form of the schema accepts an invalid value, and is used only with partial=True.

    LLGuidance's own options (``x-guidance``) have no effect if a schema contains them.
    """
    found = route(schema)
    assert not found.exact and "x-guidance" not in json.dumps(found.schema)
    assert (pointer, keyword) in {(r.pointer, r.keyword) for r in found.reasons}
    assert f"{pointer}: {keyword}: " in found.refusal()
    if found.backend == "llguidance":
        assert Grammar(found.schema).accepts_value(value)
    with pytest.raises(GrammarError, match="cannot be enforced") as caught:
        GrammarSpec.json_schema(schema, backend="auto").check()
    assert pointer in str(caught.value) and keyword in str(caught.value)
    loose = resolve_spec(GrammarSpec.json_schema(schema, partial=True), "auto")
    assert loose.partial and loose.spec.schema == schema
    assert "uniqueItems" not in loose.text


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"allOf": [True, False]},
        {"not": {}},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"enum": []},
    ],
)
def test_grammar_check_refuses_unsatisfiable_schema(schema):
    """The error does not suggest partial=True, which would not help."""
    for partial in (False, True):
        with pytest.raises(GrammarError, match="allows no output") as caught:
            GrammarSpec.json_schema(schema, partial=partial).check()
        assert "partial" not in str(caught.value)


def test_resolve_spec_rejects_unknown_and_missing_backends(monkeypatch):
    """A backend that is unknown or not installed is an error.

    With ``auto``, XGrammar is used if no other backend is installed.
    """
    with pytest.raises(GrammarError, match="unknown"):
        GrammarSpec.json_schema({}, backend="outlines")
    missing = {"llguidance": "LLGuidance is not installed", "xgrammar": ""}
    for module in (resolve, usable):
        monkeypatch.setattr(module, "unusable_reason", missing.get)
    texts = ("{}", '{"not": {"type": "null"}}')
    plain, negated = (GrammarSpec("json_schema", text) for text in texts)
    assert resolve.resolve_spec(plain, "auto").backend == "xgrammar"
    with pytest.raises(GrammarError, match="XGrammar ignores not"):
        resolve.resolve_spec(negated, "auto")
    with pytest.raises(GrammarError, match="LLGuidance is not installed"):
        resolve.resolve_spec(plain, "llguidance")


@pytest.mark.parametrize(
    "keyword, schema",
    [
        ("not", {"not": {"type": "string"}}),
        ("if", {"if": {}, "then": {}}),
        ("dependentRequired", {"dependentRequired": {"a": ["b"]}}),
        ("contains", {"contains": {}}),
        ("propertyNames", {"propertyNames": {"pattern": "a"}}),
        ("uniqueItems", {"uniqueItems": True}),
        ("unevaluatedProperties", {"unevaluatedProperties": False}),
    ],
)
def test_llguidance_refuses_keywords_listed_as_refused(keyword, schema):
    assert KEYWORDS[keyword][0] == "refused" and schema_error(schema)


def test_refusal_names_only_unenforced_keywords():
    """The refusal does not name keywords that have been rewritten exactly."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"not": {"const": 1}, "type": ["string", "null"]},
            "b": {"enum": [1, 2], "minimum": 2},
            "c": {"type": "array", "anyOf": [{"uniqueItems": True}, {"minItems": 3}]},
        },
    }
    for backend in ("", "auto", "llguidance"):
        with pytest.raises(GrammarError, match="#/properties/c/anyOf/0: uniqueItems: ") as caught:
            GrammarSpec.json_schema(schema, backend=backend).check()
        assert "properties/a" not in str(caught.value)
        assert "properties/b" not in str(caught.value)


def test_grammar_check_refuses_malformed_schemas():
    """The error is always a GrammarError with a short message."""
    nonsense: list[Any] = [
        {"properties": []},
        {"properties": {"a": 3}},
        {"oneOf": {}},
        {"required": "a"},
        {"minProperties": "x"},
        {"minProperties": -1.5},
        {"type": 7},
        {"enum": 3},
        {"dependencies": []},
        {"not": 3},
        {"pattern": 3},
        {"format": 3},
        {"items": 3},
        {"$ref": 3},
        {"$ref": "#/nowhere"},
        {"if": 3, "then": 4},
        {"propertyNames": 3},
        {"allOf": 3},
        {"not": {"required": 3}},
        {"not": {"minLength": "x"}},
        {"maxLength": "x"},
        {"type": "string", "pattern": "("},
        {"type": "nothing"},
        {"required": True},
        {"oneOf": [{"minLength": "x"}, {"maxLength": None}]},
        {"patternProperties": {"(": {}}},
        {"$ref": "#/x", "x": {"properties": [1]}},
        {"$ref": "#/x", "x": {"not": {"enum": 3}}},
    ]
    for schema in nonsense:
        with pytest.raises(GrammarError, match="JSON schema: ") as caught:
            GrammarSpec.json_schema(schema).check()
        assert len(str(caught.value)) < 400


REST = {"unevaluatedProperties": False}
#: Schemas, each with values that satisfy it and values that do not.
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "unused definitions": ({"type": "integer", "$defs": {"x": {"$ref": "https://a.b/c"}}}, [1], []),
    "no-ops": (
        {
            "type": ["array", "object"],
            "unevaluatedProperties": True,
            "minContains": 0,
            "unevaluatedItems": {},
            "contains": {"const": 1},
        },
        [[], {}],
        [1],
    ),
    "a lone bound": ({"type": "array", "minContains": 3}, [[]], [1]),
    "unevaluatedProperties": (
        {
            "type": "object",
            "allOf": [{"$ref": "#/$defs/x"}],
            **REST,
            "properties": {"a": True},
            "$defs": {"x": {"properties": {"b": {"type": "null"}}}},
        },
        [{"a": 1}, {"b": None}],
        [{"c": 1}, {"b": 1}],
    ),
    "unevaluated, all seen": (
        {"type": "object", "additionalProperties": {"type": "null"}, **REST},
        [{"a": None}],
        [{"a": 1}],
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [True], "unevaluatedItems": False},
        [[1], []],
        [[1, 2]],
    ),
    "contains": (
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}, "maxItems": 3},
        [[1], [2, 1], [2, 2, 1], [1, 1]],
        [[], [2], [2, 2, 2], ["x", 1]],
    ),
    "contains twice": (
        {"type": "array", "contains": {"const": 1}, "minContains": 2, "maxItems": 3},
        [[1, 1], [1, 2, 1]],
        [[1], [1, 2]],
    ),
    "contains anything": ({"type": ["array", "null"], "contains": True}, [[1], None], [[]]),
    "dynamicRef": (
        {
            "$dynamicRef": "#n",
            "$defs": {
                "n": {"$dynamicAnchor": "n", "type": "array", "items": {"$dynamicRef": "#n"}}
            },
        },
        [[], [[]]],
        [1, [1]],
    ),
    "anchor": (
        {
            "not": {"$ref": "#n"},
            "type": ["string", "null"],
            "$defs": {"n": {"$anchor": "n", "type": "null"}},
        },
        ["x"],
        [None],
    ),
    "unevaluatedItems with contains": (
        {"contains": {"type": "string"}, "minContains": 0, "unevaluatedItems": False},
        [[], ["a"], ["a", "b"], 1],
        [[1], ["a", 1]],
    ),
    "unevaluatedItems with contains and prefixItems": (
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}],
            "contains": {"type": "string"},
            "maxItems": 3,
            "unevaluatedItems": {"type": "null"},
        },
        [[1, "a"], [1, None, "a"], [2, "a", None]],
        [[], [1], [1, None], [1, "a", 1], ["a"]],
    ),
    "recursiveRef": (
        {
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "type": "array",
            "items": {"$recursiveRef": "#"},
        },
        [[[]]],
        [[1]],
    ),
}


#: Definitions that no value satisfies, and a recursive definition.
IMPOSSIBLE = {
    "C": {"type": "object", "allOf": [{"type": "string"}]},
    "list": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/C"}},
    "number": {"type": "integer", "minimum": 3, "maximum": 1},
    "node": {
        "type": "object",
        "properties": {"c": {"$ref": "#/$defs/C"}, "next": {"$ref": "#/$defs/node"}},
        "additionalProperties": False,
    },
}
ENFORCED |= {
    "optional property without values": (
        {"type": "object", "properties": {"c": {"$ref": "#/$defs/list"}}, "$defs": IMPOSSIBLE},
        [{}, {"d": 1}],
        [{"c": []}, {"c": ["a"]}, {"c": "a"}],
    ),
    "options without values": (
        {
            "anyOf": [{"$ref": "#/$defs/number"}, {"$ref": "#/$defs/list"}, {"type": "null"}],
            "$defs": IMPOSSIBLE,
        },
        [None],
        [2, [], ["a"]],
    ),
    "items without values": (
        {"type": "array", "items": {"$ref": "#/properties/x"}, "properties": {"x": False}},
        [[]],
        [[1], [{}]],
    ),
    "recursive definition with a property without values": (
        {"$ref": "#/$defs/node", "$defs": IMPOSSIBLE},
        [{}, {"next": {"next": {}}}],
        [{"c": 1}, {"next": {"c": {}}}, {"next": 1}],
    ),
    "overlapping options whose property has no values": (
        {
            "oneOf": [
                {"$ref": "#/$defs/node"},
                {"type": "object", "properties": {"d": {}}, "additionalProperties": False},
            ],
            "$defs": IMPOSSIBLE,
        },
        [{"d": 1}, {"next": {}}],
        [{}, {"c": 1}],
    ),
}


@pytest.mark.parametrize("schema, good, bad", ENFORCED.values(), ids=ENFORCED)
def test_route_is_exact_for_rewritable_schemas(schema, good, bad):
    """The grammar of the route accepts the valid values and refuses the invalid values.

    The schemas have unused definitions, unevaluated properties, contains and dynamic references.
    """
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    before = json.dumps(schema)
    found = route(schema)
    assert found.exact, found.refusal()
    assert found == route(schema) and json.dumps(schema) == before
    assert not resolve_spec(GrammarSpec.json_schema(schema, partial=True), "auto").partial
    grammar = Grammar.routed(found)
    for value in (*good, *bad):
        assert grammar.accepts_value(value) == validator.is_valid(value) == (value in good), value


@pytest.mark.parametrize(
    "pattern",
    ["(?i)a", "(?x) a", r"\Aa", r"\a", r"a\z", "a++", "a**", "a{2}+", "a*?+", r"\x{41}", r"\pL"],
)
def test_route_refuses_patterns_that_ecma_does_not_define(pattern):
    found = route({"type": "string", "pattern": pattern})
    assert [reason[:2] for reason in found.reasons] == [("#", "pattern")]


@pytest.mark.parametrize(
    "pattern, text, other",
    [
        ("^[[:alpha:]]$", ":]", "b"),
        (r"^\<a\>$", "<a>", "a"),
        ("^a*?b+?$", "aab", "a"),
        (r"^[+*]+\+$", "*+", "*"),
        ("^(?:a|b)+$", "ab", "c"),
        (r"^\x41\u0042[\d-]\n$", "AB-\\n", "A"),
    ],
)
def test_route_reads_patterns_as_ecma_defines(pattern, text, other):
    grammar = Grammar.routed(route({"type": "string", "pattern": pattern}))
    assert grammar.accepts(f'"{text}"') and not grammar.accepts(f'"{other}"')


def test_route_asserts_formats_as_the_draft_specifies():
    latest = "https://json-schema.org/draft/2020-12/schema"
    plain = {"type": "string", "format": "date"}
    for schema, asked, enforced in (
        (plain, None, True),
        (plain, False, False),
        ({"$schema": latest, **plain}, None, False),
        ({"$schema": latest, **plain}, True, True),
    ):
        found = route(schema, assert_formats=asked)
        assert Grammar.routed(found).accepts_value("no date") != enforced
        assert Grammar.routed(found).accepts_value("2024-02-29")
    mail = route({"type": "string", "format": "email"})
    assert [reason.keyword for reason in mail.narrowed] == ["format"]


@pytest.mark.parametrize(
    "schema, keyword, texts",
    [
        ({"type": "integer"}, "type", ["1.0", "1e2"]),
        ({"enum": [1, "x"]}, "enum", ["1.0"]),
        ({"type": "number", "minimum": 0}, "minimum", ["1e-06", "-0", "1.5e0"]),
        ({"type": "number", "multipleOf": 0.25}, "multipleOf", ["2.5", "2.0"]),
    ],
)
def test_route_reports_unproduced_spellings(schema, keyword, texts):
    """The cases include OpenAPI's keyword ``nullable``, with which null is never produced."""
    found = route({"properties": {"a": schema}})
    assert [reason[:2] for reason in found.spelling] == [("#/properties/a", keyword)]
    for text in texts:
        assert not Grammar.routed(found).accepts(f'{{"a": {text}}}')
    assert route({"type": ["number", "string"], "enum": ["x", True]}).spelling == ()
    found = route({"properties": {"a": {"type": "string", "nullable": True}}})
    assert ("#/properties/a", "nullable") in [reason[:2] for reason in found.narrowed]
    assert not Grammar.routed(found).accepts_value({"a": None})


def test_routed_schema_follows_the_standard():
    """Additional properties are legal unless the grammar is strict."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {}},
        "dependentRequired": {"a": ["b"]},
    }
    texts = ['{"a": 1, "b": 2}', "{}", '{"b": 2}', '{"a": 1}', '{"a": "x", "b": 2}', '{"c": 3}']
    for strict, open_end in ((None, True), (True, False)):
        spec = GrammarSpec.json_schema(schema, backend="auto", strict=strict)
        spec.check()
        found = resolve_spec(spec, "xgrammar")  # the backend of the specification is used
        assert found.backend == "llguidance" and not found.partial
        compiled = make_backend(found.backend, BYTES).compile(spec)
        taken = [accepts(compiled, text) for text in texts]
        assert taken == [True, True, True, False, False, open_end]


def node(**more: Any) -> dict[str, Any]:
    """Return a recursive object schema."""
    return {"type": "object", "properties": {"v": {"type": "integer"}, "n": {"$ref": "#"}}} | more


ENDLESS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "a circle": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "a required property": node(required=["n"]),
    "an item": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "a first item": {"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 2},
    "every option": {"anyOf": [node(required=["n"]), {"$ref": "#"}]},
    "a conjunct": {"allOf": [{"type": "integer"}, {"$ref": "#"}]},
    "far away": {"$ref": "#/x/y~1z/0", "x": {"y/z": [{"oneOf": [{"$ref": "#/x/y~1z/0"}]}]}},
    "quoted": {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"$ref": "#/$defs/a%20b"}}},
}
#: Schemas that refer to themselves, each with a value that satisfies it.
FINITE: dict[str, tuple[Any, Any]] = {
    "a property": (node(required=["v"]), {"v": 1}),
    "another type": (node(required=["n"]) | {"type": ["object", "null"]}, None),
    "no type": ({"properties": {"n": {"$ref": "#"}}, "required": ["n"]}, 5),
    "no items": ({"type": "array", "items": {"$ref": "#"}}, []),
    "an option": ({"anyOf": [node(required=["n"]), {"type": "null"}]}, None),
    "the second of two": (
        {"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 1},
        [0],
    ),
    "a name that is no keyword": (
        {"type": "object", "properties": {"$ref": {"type": "integer"}}, "required": ["$ref"]},
        {"$ref": 1},
    ),
    "elsewhere": ({"anyOf": [{"type": "null"}, {"$ref": "http://localhost/x"}]}, None),
    "a long way": (
        {
            "$ref": "#/$defs/0",
            "$defs": {
                **{
                    str(i): node(required=["n"], properties={"n": {"$ref": f"#/$defs/{i + 1}"}})
                    for i in range(40)
                },
                "40": {"type": "null"},
            },
        },
        None,
    ),
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS)
def test_json_schema_rejects_schema_without_finite_value(schema: Any):
    """The schema is rejected for every backend, in structural tags, and with partial=True."""
    for backend in ("", "auto", "xgrammar", "llguidance"):
        for partial in (False, True):
            with pytest.raises(
                GrammarError,
                match=r"#.*: \$ref: allows no output, because the reference leads back",
            ):
                GrammarSpec.json_schema(json.dumps(schema), backend=backend, partial=partial)
    with pytest.raises(GrammarError, match=r"tag schema: .* allows no output"):
        StructuralTag.of("<", schema, ">")


@pytest.mark.parametrize("schema, value", FINITE.values(), ids=FINITE)
def test_check_schema_accepts_recursive_schema_with_finite_value(schema: Any, value: Any):
    check_schema(schema)
    if value is None and "$defs" in schema:
        for _ in range(40):
            value = {"n": value}
    jsonschema.Draft202012Validator(schema).validate(value)


def test_schema_that_makes_llguidance_panic_is_refused():
    """A panic of Rust code is not an `Exception`, but the router reports it as a reason."""
    number = {"type": ["integer", "number"], "minimum": -(10**18), "maximum": -(10**18)}
    found = route({"anyOf": [number, {"type": "null"}]})
    [reason] = found.reasons
    assert not found.exact and "LLGuidance fails" in reason.why


@pytest.mark.parametrize("key_order", ["schema", "any"])
def test_identifiers_of_other_drafts_are_ignored(key_order):
    """``id`` is no keyword from draft 6 on, so references below it refer to the whole document."""
    one = {"id": "one", "type": "object", "properties": {"b": {"$ref": "#/definitions/two"}}}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"a": {"$ref": "#/definitions/one"}, "id": {"const": 1}},
        "definitions": {"one": one, "two": {"id": "two", "type": "integer"}},
    }
    grammar = Grammar(spec=GrammarSpec.json_schema(schema, key_order=key_order))
    assert grammar.accepts_value({"a": {"b": 1}, "id": 1})
    assert not grammar.accepts_value({"a": {"b": "x"}})
    assert not grammar.accepts_value({"id": 2})
