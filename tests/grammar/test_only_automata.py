"""Tests of JSON schemas that LLGuidance cannot enforce, but automata can."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from guide_util import BYTES
from router_util import Grammar
from schema_fuzz import walk

from graft.grammar import GrammarError, GrammarSpec, LLGuidanceBackend
from graft.grammar.automaton import strings
from graft.grammar.automaton.values import SchemaReader
from graft.grammar.backends.llguidance import prepare
from graft.grammar.regular.expression import NoAutomaton
from graft.grammar.schema.rewrite import rewrite
from graft.grammar.schema.router import route
from graft.native import _native

ITEMS: list[Any] = [0, 1, 6, 7, -3, 2.5, "", "a", "bb", None, True, [], [0], ["a"], {}, {"a": 1}]
VALUES: list[Any] = [
    *ITEMS,
    *(list(pair) for pair in itertools.product(ITEMS, repeat=2)),
    *([1, 2, item] for item in ITEMS),
    *([item, "a", "a"] for item in ITEMS),
    *({"a": item} for item in ITEMS),
    *({"a": item, "b": other} for item in ITEMS[:6] for other in ITEMS[:9]),
    *({"c": {"a": item}} for item in ITEMS),
    *(n + 0.5 for n in range(-20, 20)),
    *range(-30, 60),
    *("".join(chars) for size in range(4) for chars in itertools.product("a1.", repeat=size)),
]
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
ONE_OF_ARRAYS = {"oneOf": [{"items": STRING}, {"items": {"maxLength": 1}, "minItems": 1}]}

SCHEMAS: dict[str, Any] = {
    "contains": {"type": "array", "contains": INTEGER},
    "contains object": {"type": "array", "contains": {"required": ["a"]}},
    "contains two": {"type": "array", "contains": STRING, "minContains": 2},
    "contains both": {"type": "array", "allOf": [{"contains": STRING}, {"contains": INTEGER}]},
    "contains at least": {"type": "array", "contains": STRING, "minItems": 2},
    "contains among": {
        "type": "array",
        "contains": STRING,
        "items": {"type": ["string", "integer"]},
        "minItems": 3,
    },
    "contains nested": {"contains": {"contains": {"const": "a"}}},
    "not items": {"type": "array", "not": {"items": STRING}},
    "one of arrays": ONE_OF_ARRAYS,
    "number or integer": {"oneOf": [INTEGER, {"type": "number", "minimum": 5}]},
    "no integer": {"type": ["number", "string"], "not": INTEGER},
    "no integer in range": {"type": "number", "not": INTEGER, "minimum": -2.5, "maximum": 9},
    "no multiple": {"type": "number", "not": {"multipleOf": 3}},
    "no multiple of 7": {"type": "integer", "not": {"multipleOf": 7}},
    "no multiples": {"type": "integer", "not": {"anyOf": [{"multipleOf": 4}, {"multipleOf": 6}]}},
    "long complement": {
        "type": "string",
        "not": {"pattern": "^a(?:[1a]{0,20}a)?(?:\\.a(?:[1a]{0,20}a)?)*$"},
    },
    "complement of complement": {"not": {"not": {"type": "array", "contains": INTEGER}}},
    "recursive with other keywords": {
        "$defs": {
            "node": {"properties": {"a": INTEGER, "c": {"$ref": "#/$defs/node", "required": ["a"]}}}
        },
        "$ref": "#/$defs/node",
        "type": "object",
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_automaton_enforces_schema_that_llguidance_cannot(name: str):
    """The automaton accepts the values that jsonschema accepts, and generates only such values."""
    schema = SCHEMAS[name]
    found = route(schema)
    assert not found.exact
    grammar = Grammar(spec=GrammarSpec.json_schema(schema))
    valid = jsonschema.Draft202012Validator(schema)
    accepted = 0
    for value in VALUES:
        expected = valid.is_valid(value)
        assert grammar.accepts_value(value) == expected, value
        accepted += expected
    assert 0 < accepted < len(VALUES)
    rng = random.Random(0)
    for _ in range(20):
        text = walk(grammar.matcher(), BYTES, rng)
        if text is not None:
            assert valid.is_valid(json.loads(text)), text


def test_numbers_that_are_no_multiples_have_no_other_spelling():
    grammar = Grammar(spec=GrammarSpec.json_schema({"type": "number", "not": INTEGER}))
    assert grammar.accepts("2.50") and grammar.accepts("-0.5")
    assert not any(map(grammar.accepts, ("2.0", "2", "-0", "2.5e1", "0.00", "1e-1")))
    grammar = Grammar(spec=GrammarSpec.json_schema({"type": "number", "not": {"multipleOf": 2}}))
    assert grammar.accepts("3") and grammar.accepts("2.5")
    assert not any(map(grammar.accepts, ("2", "-0", "2.0", "4e0")))


def test_refusal_remains_without_automaton():
    """An automaton is refused where only LLGuidance can run, or if it would be too large."""
    schema = SCHEMAS["contains"]
    GrammarSpec.json_schema(schema).check()
    message = "contains: cannot be enforced in arrays without maxItems"
    with pytest.raises(GrammarError, match=message):
        LLGuidanceBackend(BYTES, automata=False).compile(GrammarSpec.json_schema(schema))
    form = {"type": "json_schema", "json_schema": schema}
    with pytest.raises(GrammarError, match=message):
        GrammarSpec.structural_format(form).check("llguidance")
    large = {"allOf": [{"not": {"pattern": f"a.{{{n}}}$"}} for n in (20, 21)], **STRING}
    with pytest.raises(GrammarError, match="not: "):
        GrammarSpec.json_schema(large).check()


TOO_LARGE: dict[str, Any] = {
    "maxItems": {"type": "array", "contains": INTEGER, "maxItems": 10**9},
    "minItems": {"type": "array", "contains": INTEGER, "minItems": 10**9},
    "multiples": {"type": "integer", "multipleOf": 1_000_003},
    "common multiples": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]},
    "divisor": {"type": "integer", "not": {"multipleOf": 10**12 + 7}},
    "fraction": {"type": "number", "not": {"multipleOf": 1e300}},
    "start": {"type": "string", "pattern": "x" + "(?:^|^)" * 26},
    "end": {"type": "string", "pattern": "(?:^|a)" * 26},
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_schema_with_too_large_automaton_is_refused(name: str):
    """The work is bounded. Without a bound, it would take minutes and gigabytes."""
    with pytest.raises(GrammarError, match="cannot be enforced"):
        prepare(GrammarSpec.json_schema(TOO_LARGE[name]), {}, True)


@pytest.mark.parametrize("step", [86_400, 3_600_000, 10**9, 32_749, 0.25, 2**-13])
def test_multiples_that_compile_quickly_are_accepted(step: float):
    GrammarSpec.json_schema({"type": "number", "multipleOf": step}).check()


def test_values_of_enums_are_bounded():
    """The automaton of 40,000 values would be too large."""
    SchemaReader({}).read({"type": "string", "enum": [str(n) for n in range(5000)]})
    many = {"type": "string", "enum": [str(n) for n in range(40_000)]}
    with pytest.raises(NoAutomaton, match="too large"):
        SchemaReader({}).read(many)


def test_comparisons_of_name_patterns_are_bounded(monkeypatch):
    monkeypatch.setattr(strings, "_MAX_STEPS", strings._MAX_STEPS // 20)
    patterns = {f"^{n}x": INTEGER for n in range(1000)}
    with pytest.raises(NoAutomaton, match="takes too long"):
        SchemaReader({}).read({"type": "object", "patternProperties": patterns})
    few = dict(itertools.islice(patterns.items(), 40))
    SchemaReader({}).read({"type": "object", "patternProperties": few})


def test_work_for_name_patterns_is_bounded_in_total(monkeypatch: pytest.MonkeyPatch):
    """Each automaton is small enough, but all of them would take too long."""
    patterns = {f"^{n}(a|b)*a(a|b){{11}}$": INTEGER for n in range(200)}
    built = []

    def count(*arguments: Any) -> Any:
        built.append(1)
        return pattern_class(*arguments)

    pattern_class = _native.guide.Pattern
    monkeypatch.setattr(_native.guide, "Pattern", count)
    few = dict(itertools.islice(patterns.items(), 30))
    SchemaReader({}).read({"type": "object", "patternProperties": few})
    assert len(built) == 30  # none for pairs of patterns
    with pytest.raises(NoAutomaton, match="takes too long"):
        SchemaReader({}).read({"type": "object", "patternProperties": patterns})
    built.clear()
    patterns = {f"^{n}(a|b)*a(a|b){{8}}$": INTEGER for n in range(200)}
    form = rewrite({"type": "object", "patternProperties": patterns})
    assert form.schema["patternProperties"].keys() == patterns.keys()
    assert 40 < len(built) < 50  # no more than the number of patterns that are divided


def test_key_order_any_needs_an_automaton_without_orders():
    Grammar(spec=GrammarSpec.json_schema(SCHEMAS["not items"], key_order="any"))
    schema = {**SCHEMAS["contains two"], "items": {"properties": {"a": INTEGER, "b": INTEGER}}}
    assert Grammar(spec=GrammarSpec.json_schema(schema)).accepts('["x", "y", {"a": 1, "b": 2}]')
    with pytest.raises(GrammarError, match="contains"):
        GrammarSpec.json_schema(schema, key_order="any").check()


def test_partial_schema_is_exact_with_an_automaton():
    spec = GrammarSpec.json_schema(SCHEMAS["contains"], partial=True)
    assert not Grammar(spec=spec).accepts("[]")
