"""Tests of property names: their spelling in JSON, their number, and names already in use."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from guide_util import BYTES, STOP
from router_util import Grammar
from schema_fuzz import escaped

from graft.grammar import GrammarError, GrammarSpec, LLGuidanceBackend
from graft.grammar.backends.llguidance import Prepared
from graft.grammar.schema.keyword_support import ignored_keywords
from graft.grammar.schema.llguidance_check import document_text, schema_grammar
from graft.grammar.schema.name_spelling import EVERY_NAME
from graft.grammar.schema.router import route

pytest.importorskip("llguidance")


@pytest.mark.parametrize("key_order", ["schema", "any"])
@pytest.mark.parametrize(
    "schema, text",
    [
        ({"properties": {"id": {"type": "integer"}}}, '{"id": "x"}'),
        ({"properties": {"id": {"type": "integer"}}, "required": ["b"]}, '{"b": 1, "id": "x"}'),
        (
            {"properties": {"id": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            '{"id": "x"}',
        ),
        ({"patternProperties": {"^A": {"type": "integer"}}}, '{"A": "x"}'),
        ({"properties": {"a": False}}, '{"a": 1}'),
        ({"not": {"required": ["a"]}}, '{"a": 1}'),
        ({"propertyNames": {"enum": ["b"]}}, '{"a": 1}'),
        ({"dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
        ({"required": ["a"]}, "{}"),
        ({"allOf": [{"properties": {"a": {"type": "null"}}}, {"required": ["a"]}]}, '{"a": 1}'),
    ],
    ids=str,
)
def test_escaped_name_does_not_evade_schema(schema: dict[str, Any], text: str, key_order: Any):
    assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    found = route({"type": "object", **schema}, key_order=key_order)
    grammar = Grammar.routed(found)
    assert found.exact and not grammar.accepts(text) and not grammar.accepts(escaped(text))
    # The escape sequence of one character may be the short one.
    named = {"type": "object", "properties": {"a\n": {"type": "integer"}}}
    grammar = Grammar.routed(route(named, key_order=key_order))
    assert grammar.accepts('{"a\\n": 1}') and not grammar.accepts('{"a\\u000a": "x"}')


@pytest.mark.parametrize("key_order", ["schema", "any"])
@pytest.mark.parametrize(
    "format_, valid, invalid",
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("uuid", "0123ABcd-0000-0000-0000-000000000000", "0123ABcd"),
        ("ipv4", "10.0.0.255", "10.0.0.256"),
        ("date-time", "2024-02-29T00:00:00Z", "2024-02-29"),
    ],
)
def test_names_with_format(format_: str, valid: str, invalid: str, key_order: Any):
    """The schema is what pydantic gives for a dictionary such as ``dict[date, int]``."""
    schema = {
        "type": "object",
        "propertyNames": {"format": format_},
        "additionalProperties": {"type": "integer"},
    }
    checker = jsonschema.FormatChecker()
    found = route(schema, key_order=key_order)
    assert not found.reasons
    grammar = Grammar.routed(found)
    for name, fits in ((valid, True), (invalid, False)):
        assert checker.conforms(name, format_) == fits or format_ == "date-time"
        assert grammar.accepts_value({name: 1}) == fits
    assert not grammar.accepts_value({valid: "x"})
    ignored = route(schema, key_order=key_order, assert_formats=False)
    assert Grammar.routed(ignored).accepts_value({invalid: 1})


def test_values_next_to_compared_names_keep_control_characters():
    """Strings lose control characters only in schemas with patterns; the route reports the loss."""
    found = route({"type": "object", "properties": {"a": {"type": "string"}}})
    assert Grammar.routed(found).accepts('{"a": "\\u001b\\u000a", "\\u001b": 1}')
    assert set(found.narrowed) == set(found.ordered)
    found = route({"properties": {"a": {"type": "string"}}, "patternProperties": {"^x": True}})
    assert not Grammar.routed(found).accepts('{"a": "\\u001b"}')
    assert any("control characters" in reason.why for reason in found.narrowed)


@pytest.mark.parametrize(
    "listed, keyword",
    [({"enum": ["\x1b"]}, "enum"), ({"pattern": "^[\\x00-\\x07]$", "type": "string"}, "pattern")],
)
def test_control_characters_next_to_patterns_are_refused(listed: dict[str, Any], keyword: str):
    found = route({"properties": {"a": listed}, "patternProperties": {"^x": True}})
    assert [reason.keyword for reason in found.reasons] == [keyword]
    assert route({"properties": {"a": listed}}).exact


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"^id$": {"type": "integer", "maximum": 3}}, "required": ["id"]},
        {"patternProperties": {"^[ab]$": {"type": "null"}}, "required": ["a", "b"]},
        {"patternProperties": {"^x{2}$": {}}, "properties": {"xx": {"type": "null"}}},
        {
            "allOf": [
                {"patternProperties": {"^a$": {}}, "additionalProperties": False},
                {"properties": {"a": {"type": "null"}}},
            ]
        },
    ],
    ids=str,
)
def test_no_comma_is_legal_when_all_names_are_used(schema: dict[str, Any]):
    """A matcher never reaches a state without a legal token."""
    closed = {"additionalProperties": False} if "allOf" not in schema else {}
    grammar = Grammar.routed(route({"type": "object", **schema, **closed}))
    rng = random.Random(1)
    for _ in range(40):

        def choose(legal: list[int]) -> int:
            assert legal
            return STOP if STOP in legal else rng.choice(legal)

        text = grammar.generate(choose, 200)
        assert text is not None


def test_reference_to_endless_value_is_not_produced():
    """A definition that only endless values satisfy is treated as ``false``."""
    endless = {
        "type": "object",
        "required": ["n"],
        "properties": {"n": {"$ref": "#/$defs/a"}},
        "additionalProperties": False,
    }
    schema = {
        "$defs": {"a": endless},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"type": "integer"}},
        "additionalProperties": False,
    }
    grammar = Grammar.routed(route(schema))
    assert grammar.accepts('{"y": 1}')
    matcher = grammar.matcher()
    assert all(map(matcher.accept, b'{"')) and matcher.legal().tolist() == [ord("y")]


@pytest.mark.parametrize(
    "schema, narrowed",
    [
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, True),
        ({"properties": {"a": {}}, "required": ["a"], "minProperties": 2}, False),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2, "maxProperties": 3}, True),
    ],
)
def test_repeated_name_does_not_count_twice(schema: dict[str, Any], narrowed: bool):
    found = route({"type": "object", **schema})
    grammar = Grammar.routed(found)
    assert found.exact and (set(found.narrowed) > set(found.ordered)) == narrowed
    assert grammar.accepts('{"a": 1, "c": 2}')
    assert not grammar.accepts('{"c": 1, "c": 2}') and not grammar.accepts('{"a": 1, "a": 2}')


def test_min_properties_of_several_unlisted_names_is_refused():
    """LLGuidance cannot require that two names differ."""
    schema = {"type": "object", "minProperties": 2}
    [reason] = route(schema).reasons
    assert reason.keyword == "minProperties" and "twice" in reason.why
    assert route({**schema, "minProperties": 1}).exact


def test_xgrammar_refuses_names_that_escapes_evade():
    listed = {"type": "object", "properties": {"id": {"type": "integer"}}}
    assert not ignored_keywords(listed)
    for extra in ({"additionalProperties": True}, {"additionalProperties": {"type": "string"}}):
        [reason] = ignored_keywords({**listed, **extra})
        assert reason.keyword == "additionalProperties"
    assert not ignored_keywords({**listed, "additionalProperties": False})
    assert ignored_keywords({"type": "object", "minProperties": 2, "additionalProperties": {}})


def test_union_keeps_values_that_only_python_considers_equal():
    found = route({"enum": [False, 0, 1, True, 1.0]})
    grammar = Grammar.routed(found)
    assert all(map(grammar.accepts, ("false", "0", "1", "true")))
    items = {"type": "array", "items": {"enum": [0, False, 1]}, "uniqueItems": True}
    grammar = Grammar.routed(route(items))
    assert grammar.accepts("[0, false]") and not grammar.accepts("[0, 0]")
    twice = {"type": "array", "items": {"enum": [1, 1.0]}, "uniqueItems": True}
    assert not Grammar.routed(route(twice)).accepts("[1, 1]")
    for order in ([0, False], [False, 0]):
        grammar = Grammar.routed(route({"not": {"not": {"enum": order}}}))
        assert grammar.accepts("0") and grammar.accepts("false")


@pytest.mark.parametrize(
    "draft",
    [
        "http://json-schema.org/draft-04",
        "http://json-schema.org/draft-07",
        "https://json-schema.org/draft/2020-12",
    ],
)
def test_unique_items_are_enforced_in_each_draft(draft: str):
    """LLGuidance ignores ``const`` in draft 4."""
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    found = route({"$schema": f"{draft}/schema", **schema})
    grammar = Grammar.routed(found)
    assert grammar.accepts("[1, 2]") and not grammar.accepts("[1, 1]")


def test_unique_items_with_prefix_items_are_refused():
    schema = {"prefixItems": [{"type": "string"}], "items": {"enum": [1, 2]}, "uniqueItems": True}
    [reason] = route({"type": "array", **schema}).reasons
    assert reason.keyword == "uniqueItems"


def test_property_names_leave_listed_properties_to_their_schema():
    """A schema for additional properties does not apply to listed ones."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "additionalProperties": {"type": "integer"},
    }
    grammar = Grammar.routed(route({**schema, "propertyNames": {"enum": ["a", "c"]}}))
    assert grammar.accepts('{"a": null, "c": 1}') and not grammar.accepts('{"b": null}')
    assert not grammar.accepts('{"a": 1}') and not grammar.accepts('{"c": null}')
    [reason] = route({**schema, "propertyNames": {"pattern": "^a"}}).reasons
    assert reason.keyword == "propertyNames"


def test_dollar_sign_does_not_match_before_line_feed():
    schema = {
        "type": "object",
        "properties": {"a\n": {"type": "integer"}},
        "patternProperties": {"^a$": {"type": "null"}},
        "additionalProperties": False,
    }
    for key_order in ("schema", "any"):
        grammar = Grammar.routed(route(schema, key_order=key_order))
        assert grammar.accepts('{"a\\n": 1}') and not grammar.accepts('{"a\\n": null}')


def test_keywords_separated_by_an_applicator_are_enforced_together():
    """LLGuidance reads the keywords before and after ``anyOf`` as two schemas."""
    either = {"anyOf": [{"type": "object"}, {"type": "array"}]}
    patterns = {"patternProperties": {"^a": {"type": "null"}}}
    schema = {**patterns, **either, "additionalProperties": {"type": "integer"}}
    for ordered in (schema, dict(reversed(schema.items()))):
        grammar = Grammar.routed(route(ordered))
        assert grammar.accepts('{"a": null, "b": 1}') and not grammar.accepts('{"a": 1}')
    items = {"items": [{"type": "null"}], **either, "additionalItems": False}
    items["$schema"] = "http://json-schema.org/draft-07/schema#"
    for ordered in (items, dict(reversed(items.items()))):
        grammar = Grammar.routed(route(ordered))
        assert grammar.accepts("[null]") and not grammar.accepts("[null, 1]")


def test_dependency_of_required_property_applies_to_objects_only():
    schema = {"required": ["a"], "dependentSchemas": {"a": {"required": ["b"], "type": "object"}}}
    grammar = Grammar.routed(route(schema))
    assert grammar.accepts("[]") and grammar.accepts('{"a": 1, "b": 2}')
    assert not grammar.accepts('{"a": 1}')


def test_endless_schema_is_refused():
    with pytest.raises(GrammarError, match="allows no output"):
        route({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}})


def test_pattern_of_every_name_allows_what_the_empty_pattern_allows():
    """The two patterns differ in the time that LLGuidance needs for a mask."""
    listed = {"type": "object", "properties": {"id": {"type": "integer"}, "a\n": False}}
    backend = LLGuidanceBackend(BYTES, automata=False)
    grammars = []
    for pattern in ("", EVERY_NAME):
        document = {**listed, "patternProperties": {pattern: {}}, "additionalProperties": False}
        text = schema_grammar(document_text(document, "line"))
        grammars.append(backend.load(GrammarSpec.json_schema(document), Prepared(text, (), None)))
    rng = random.Random(1)
    for _ in range(60):
        matchers = [grammar.matcher() for grammar in grammars]
        for _ in range(30):
            legal, same = (matcher.legal().tolist() for matcher in matchers)
            assert legal == same
            likely = [token for token in legal if token in set(b'\\u0069"idan')]
            token = rng.choice(likely or legal)
            if token == 256:
                break
            assert all(matcher.accept(token) for matcher in matchers)
