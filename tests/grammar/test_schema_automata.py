"""Automata of JSON schemas, compared with LLGuidance and with a slow matcher of their rules."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from mask_walks import STOP, VOCABULARY, compile_both, require_equal_walks, require_oracle_walks
from rule_matcher import RuleMatcher

from graft.grammar import CompiledGrammar, GrammarError, GrammarSpec
from graft.grammar.automaton.formats import FORMATS
from graft.grammar.automaton.lower import compile_automaton, lower
from graft.grammar.automaton.schema import Rules, SchemaLowering
from graft.grammar.automaton.strings import NamePatterns
from graft.grammar.regular.regex import NoAutomaton, lower_search
from graft.grammar.resolve import resolve_for_automaton, resolve_for_backend

NULL = {"type": "null"}
INTEGER = {"type": "integer"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Any] = {
    "any": {},
    "array": {"type": "array"},
    "object": {"type": "object"},
    "no_type": {"minLength": 2, "minimum": 3, "required": ["a"]},
    "additional": {"type": "object", "properties": {"id": INTEGER, "idx": {"type": "boolean"}}},
    "additional_schema": {
        "type": "object",
        "properties": {"id": INTEGER},
        "additionalProperties": {"type": "string"},
    },
    "map": {"type": "object", "additionalProperties": INTEGER},
    "required_order": {"type": "object", "required": ["b", "a"], "properties": {"a": NULL}},
    "pattern_properties": {
        "type": "object",
        "patternProperties": {"^x-": INTEGER},
        "additionalProperties": False,
    },
    "pattern_and_names": {
        "type": "object",
        "properties": {"x-a": {"type": "boolean"}, "b": {}},
        "patternProperties": {"^x-": {}, "^[0-9]+$": {"type": "string"}},
        "additionalProperties": NULL,
    },
    "property_names": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]+$"},
        "additionalProperties": INTEGER,
    },
    "prefix": {
        "type": "array",
        "prefixItems": [INTEGER, {"type": "string"}, NULL],
        "items": {"type": "boolean"},
        "minItems": 2,
    },
    "items_before_prefix": {"type": "array", "items": NULL, "prefixItems": [INTEGER]},
    "prefix_ends": {"type": "array", "prefixItems": [INTEGER, NULL], "items": False},
    "prefix_bounds": {"type": "array", "prefixItems": [INTEGER, NULL], "maxItems": 1},
    "prefix_and_more": {"type": "array", "prefixItems": [NULL], "minItems": 3, "maxItems": 5},
    "old_items": {"$schema": DRAFT_7, "type": "array", "items": [INTEGER], "additionalItems": NULL},
    "nested_bounds": {
        "type": "array",
        "items": {"type": "array", "items": INTEGER, "maxItems": 2},
        "minItems": 2,
        "maxItems": 3,
    },
    "list": {
        "$ref": "#/$defs/n",
        "$defs": {"n": closed({"v": INTEGER, "next": {"$ref": "#/$defs/n"}}, [])},
    },
    "tree": {
        "type": "object",
        "properties": {"c": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["c"],
    },
    "pointers": {
        "$defs": {"x/y": {"anyOf": [{"type": "string", "maxLength": 2}]}, "p q": NULL},
        "anyOf": [{"$ref": "#/$defs/x~1y/anyOf/0"}, {"$ref": "#/$defs/p%20q"}],
    },
    "ref_and_keywords": {
        "$defs": {"o": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}},
        "$ref": "#/$defs/o",
        "properties": {"b": NULL},
    },
    "any_of_required": {
        "type": "object",
        "properties": {"a": INTEGER, "b": {"type": "string"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "any_of_required_and_required": {
        **closed({"a": INTEGER, "b": NULL, "c": INTEGER, "d": NULL}, ["b"]),
        "anyOf": [{"required": ["a"]}, {"required": ["b", "c"]}, {"required": ["d"]}],
    },
    "any_of_properties": {
        "type": "object",
        "anyOf": [{"properties": {"z": INTEGER}}, {"properties": {"y": NULL}, "required": ["y"]}],
        "properties": {"a": {}},
        "required": ["a"],
    },
    "any_of_alike": {
        "anyOf": [
            closed({"k": {"const": "a"}, "v": INTEGER}),
            closed({"k": {"const": "b"}, "v": {"type": "array", "items": NULL}}),
            {"type": "array", "items": INTEGER},
        ]
    },
    "all_of": {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}},
            {"properties": {"a": {"minimum": 3}, "b": NULL}, "required": ["b"]},
        ]
    },
    "all_of_strings": {
        "type": "string",
        "allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 5}],
    },
    "pattern_and_length": {"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 4},
    "pattern_and_format": {"type": "string", "pattern": "5", "format": "date"},
    "enum": {"enum": ["a", 'é\n"', 1, 1.5, -2, 1e30, None, True, [1, "x", []], {"b c": {"d": []}}]},
    "enum_of_types": {"type": ["integer", "string"], "enum": ["a", 1, 1.5, None]},
    "const": {"const": {"a": [1, {"b": None}]}},
    "keys": closed({'a"b': {}, "é": NULL, "x\ny": NULL, "\\": NULL, "日本": NULL}, []),
    "keys_and_others": {"type": "object", "properties": {'a"b': NULL, "x\ny": NULL}},
    "at_least_one": {**closed({"a": NULL, "b": NULL}, []), "minProperties": 1},
    "at_least_two": {**closed({"a": NULL, "b": NULL, "c": NULL}, ["b"]), "minProperties": 2},
    "at_most_one": {**closed({"a": NULL, "b": NULL}, []), "maxProperties": 1},
    "number_of_properties": {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 3,
        "additionalProperties": NULL,
    },
    "forbidden_property": {"type": "object", "properties": {"a": False, "b": NULL}},
    "unsatisfiable_name": {
        "type": "object",
        "patternProperties": {"^id$": {"type": "integer", "maximum": 3}},
        "required": ["id"],
        "additionalProperties": False,
    },
    "one_of": {"oneOf": [INTEGER, {"type": "string"}]},
    "dependent": {**closed({"a": NULL, "b": NULL}, []), "dependentRequired": {"a": ["b"]}},
    "unique_enum": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
    "lengths": {"type": "string", "minLength": 1, "maxLength": 3},
    **{f"format {name}": {"type": "string", "format": name} for name in FORMATS},
}
#: Schemas that the router refuses.
REFUSED = {"format unknown"}


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - REFUSED))
def test_schema_automaton_has_masks_of_llguidance(name: str):
    require_equal_walks(GrammarSpec.json_schema(SCHEMAS[name]))


@pytest.mark.parametrize("whitespace", ["compact", "any", 2])
@pytest.mark.parametrize("name", ["additional", "prefix", "enum", "at_least_one", "list", "any"])
def test_automaton_with_white_space_has_masks_of_llguidance(name: str, whitespace: Any):
    require_equal_walks(GrammarSpec.json_schema(SCHEMAS[name], whitespace=whitespace))


@pytest.mark.full
@pytest.mark.parametrize("whitespace", ["compact", "any", 2, 20])
@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - REFUSED))
def test_any_automaton_with_white_space_has_masks_of_llguidance(name: str, whitespace: Any):
    require_equal_walks(GrammarSpec.json_schema(SCHEMAS[name], whitespace=whitespace), 30)


ORACLE_SCHEMAS = [
    "additional",
    "additional_schema",
    "pattern_and_names",
    "prefix",
    "list",
    "any_of_required",
    "any_of_required_and_required",
    "at_least_one",
    "any_of_alike",
    "pattern_and_length",
    "enum",
    "keys_and_others",
    "number_of_properties",
    "lengths",
]


@pytest.mark.parametrize("name", ORACLE_SCHEMAS)
def test_schema_automaton_has_masks_of_rules(name: str):
    require_oracle_walks(GrammarSpec.json_schema(SCHEMAS[name]), 2, 12)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - REFUSED))
def test_any_schema_automaton_has_masks_of_rules(name: str):
    require_oracle_walks(GrammarSpec.json_schema(SCHEMAS[name]), 6, 40)


@pytest.mark.parametrize("additional", [False, True])
@pytest.mark.parametrize(
    "keywords",
    [
        {"anyOf": [{"required": ["a"]}, {"required": ["c"]}]},
        {"anyOf": [{"required": ["b", "c"]}, {"required": ["a", "b"]}, {"required": ["d", "b"]}]},
        {"anyOf": [{"required": ["a"]}, {"required": ["c"]}], "required": ["b"]},
        {"anyOf": [{"required": ["a"]}, {"required": ["a", "b"]}, {"required": ["d"]}]},
        {"anyOf": [{"required": ["a", "b"]}, {"required": ["c", "d"]}]},
        {"anyOf": [{"required": ["a"]}, {"required": ["x"]}]},
        {"anyOf": [{"required": ["x", "a"]}, {"required": ["y", "a"]}, {"required": ["x", "y"]}]},
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "required": ["y", "x"]},
        {"minProperties": 1},
        {"minProperties": 2, "required": ["c"]},
    ],
)
def test_automaton_requires_any_of_some_properties(keywords: dict[str, Any], additional: bool):
    """Compare the accepted objects with those that jsonschema accepts, for all sets of names."""
    schema = {
        "type": "object",
        "properties": dict.fromkeys("abcd", NULL),
        "additionalProperties": additional and NULL,
        **keywords,
    }
    form = resolve_for_automaton(GrammarSpec.json_schema(schema, whitespace="compact"))
    matcher = RuleMatcher(lower(form))
    validator = jsonschema.Draft202012Validator(schema)
    for count in range(7):
        for names in itertools.combinations("abcdxy", count):
            value = dict.fromkeys(names)
            orders = [names]
            if "x" in names and "y" in names:  # the order of other names depends on the schema
                orders.append((*names[:-2], "y", "x"))
            texts = [json.dumps(dict.fromkeys(order), separators=(",", ":")) for order in orders]
            assert any(matcher.accepts(text.encode()) for text in texts) == validator.is_valid(
                value
            )


def test_automaton_size_is_linear_in_options_that_require_properties():
    sizes = []
    for count in (8, 16):
        names = [f"p{i}" for i in range(count)]
        schema = closed({name: {"type": "boolean"} for name in names}, [])
        schema["anyOf"] = [{"required": [name]} for name in names]
        compiled = compile_both(GrammarSpec.json_schema(schema))
        assert compiled.automaton is not None
        sizes.append(compiled.automaton.num_states)
    assert sizes[1] < 3 * sizes[0]


BOUNDS = [
    (0, None),
    (10, None),
    (-5, None),
    (None, 0),
    (None, -3),
    (None, 17),
    (-3, 12),
    (5, 5),
    (95, 1203),
    (-12, -7),
    (-0.5, 0.5),
    (1.5, 2.25),
    (16.87, 99.5),
    (None, 16.87),
    (2.5, 2.75),
    (-2.75, -2.5),
]


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("low, high", BOUNDS)
def test_number_automaton_has_masks_of_llguidance(low: Any, high: Any, exclusive: bool):
    names = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ("minimum", "maximum")
    bounds = dict(zip(names, (low, high), strict=True))
    bounds = {name: bound for name, bound in bounds.items() if bound is not None}
    compared = 0
    for json_type in ("integer", "number"):
        spec = GrammarSpec.json_schema({"type": json_type, **bounds})
        try:
            resolve_for_backend(spec, "llguidance")
        except GrammarError:  # no number is between the bounds
            continue
        compared += require_equal_walks(spec, 10, 12)
    assert compared or exclusive or isinstance(low, float)


@pytest.mark.parametrize(
    "divisor", [1, 2, 3, 5, 7, 8, 15, 20, 60, 99, 100, 1.5, 0.5, 0.35, 0.25, 0.05, 0.01]
)
def test_multiples_automaton_has_masks_of_llguidance(divisor: float):
    for keywords in ({"type": "number"}, {"type": "integer", "minimum": 0, "maximum": 1000}):
        spec = GrammarSpec.json_schema({**keywords, "multipleOf": divisor})
        require_equal_walks(spec, 8, 12)


PATTERNS = [
    "^[^a]$",
    r'^["\\]$',
    '^[^"]+$',
    r'^[^"\n]*$',
    "ab",
    "^ab",
    "b$",
    r"^\d{2}-\w+$",
    r"^\W\D$",
    "^(a|b)c$",
    "a|b",
    "",
    r"\n",
    "^a|b$",
    "(^a|b)c",
    "^a$|^b$",
    "a|^b|c$",
    r"^\s\S$",
    r"^[\w.-]+$",
    r"^[\s\d]+$",
    "^a+?b*?$",
    "^(?:x|y){2,3}$",
    "^(?<n>a)b$",
    "^$",
    "^",
    "(foo)?$",
    r"^(\([0-9]{3}\))?[0-9]{3}-[0-9]{4}$",
    "^[$_a-z]{1,3}$",
    r"^\/x",
    "^[a-]$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_automaton_has_masks_of_llguidance(pattern: str):
    require_equal_walks(GrammarSpec.json_schema({"type": "string", "pattern": pattern}), 8, 12)


CHECKED_TEXTS = {
    "listed_name": ("additional", ['{"id": 1}', '{"i": 1}'], ['{"id": "a"}', r'{"\u0069d": 1}']),
    "pattern_of_name": (
        "pattern_and_names",
        ['{"x-a": true, "b": 1, "x-b": [], "1": ""}', '{"y": null}'],
        [r'{"\u0078-b": 1}', '{"x-a": 1}', '{"1": null}', '{"y": 1}'],
    ),
    "exclusive_bounds": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        ["0.5", "0.01"],
        ["0", "-0", "0.51"],
    ),
    "large_bounds": (
        {"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740999},
        ["9007199254740996"],
        ["9007199254740992", "9007199254741000"],
    ),
    "no_name_left": ("unsatisfiable_name", ['{"id": 3}'], ['{"id": 3, ', '{"id": 4}', "{}"]),
    "forbidden_name": ("forbidden_property", ['{"b": null}', '{"c": 1}'], ['{"a": 1}']),
    "repeated_name": (
        {**closed({"a": NULL, "b": NULL}, []), "minProperties": 2},
        ['{"a": null, "b": null}'],
        ['{"a": null, "a": null}', '{"a": null}'],
    ),
    "quote": ({"type": "string", "pattern": r'^[^"\n]+$'}, ['"a"'], [r'"\""', r'"\n"', '""']),
    "recursive": ("list", ['{"next": {"next": {"v": 1}}}'], ['{"next": {"next": 1}}']),
    "nested_data": ("any", ['[{"a": [[], {}]}, 1e5]', '""'], ["[1,]", "{,}"]),
}


@pytest.mark.parametrize("name", CHECKED_TEXTS)
def test_automaton_accepts_only_valid_texts(name: str):
    schema, valid, invalid = CHECKED_TEXTS[name]
    schema = SCHEMAS[schema] if isinstance(schema, str) else schema
    compiled = compile_both(GrammarSpec.json_schema(schema))
    for text in valid:
        assert accepts(compiled, text), text
    for text in invalid:
        assert not accepts(compiled, text), text


def accepts(compiled: CompiledGrammar, text: str) -> bool:
    matcher = compiled.matcher()
    tokens = [VOCABULARY.tokens.index(bytes([byte])) for byte in text.encode()]
    return all(map(matcher.accept, [*tokens, STOP]))


REFUSED_BY_LOWERING = {
    "small_divisor": {"type": "number", "multipleOf": 1 / 512},
    "many_properties": {"type": "object", "maxProperties": 1 << 32},
    "many_absent_items": {"type": "array", "prefixItems": [{"type": "string"}] * 600},
    "doubling_references": {
        "$defs": {
            **{f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)},
            "d40": NULL,
        },
        "$ref": "#/$defs/d0",
    },
    "pattern_with_exponential_automaton": {
        "type": "object",
        "properties": {"a": NULL},
        "patternProperties": {"(a|b)*a(a|b){15}": NULL},
    },
}


@pytest.mark.parametrize("name", REFUSED_BY_LOWERING)
def test_lower_refuses_schema_without_known_rules(name: str):
    spec = GrammarSpec.json_schema(REFUSED_BY_LOWERING[name])
    with pytest.raises(NoAutomaton):
        lower(resolve_for_backend(spec, "llguidance"))


@pytest.mark.parametrize("keyword", ["minLength", "minItems", "maxItems"])
def test_automaton_with_too_many_states_is_not_compiled(keyword: str):
    spec = GrammarSpec.json_schema({keyword: 100_000})
    assert compile_automaton(resolve_for_backend(spec, "llguidance")) is None


def test_masks_with_all_bytes_apart_equal_llguidance():
    """No two bytes of characters outside ASCII are in the same class of bytes."""
    codes = [*range(0x80, 0xC0, 2), 0x800, 0x1000, 0x2000, 0xF000, 0x40000, 0x80000, 0x100000]
    pattern = f"^[{''.join(map(chr, codes))}]*$"
    strings = {
        "a": {"type": "string", "pattern": pattern},
        "b": {"type": "string", "maxLength": 50},
    }
    assert require_equal_walks(GrammarSpec.json_schema(closed(strings)), 3, 30) > 30


def test_rules_grow_with_schema_and_not_with_nesting():
    """Each object is a rule, so ten levels with two references each have few rules."""
    definitions = {
        f"d{level}": closed(
            {"a": {"$ref": f"#/$defs/d{level + 1}"}, "b": {"$ref": f"#/$defs/d{level + 1}"}}
        )
        for level in range(10)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d10": NULL}}
    grammar = resolve_for_backend(GrammarSpec.json_schema(schema), "llguidance")
    assert len(lower(grammar)) == 11


def test_rules_grow_linearly_with_optional_properties():
    sizes = []
    for count in (50, 100):
        schema = closed({f"property_{index}": INTEGER for index in range(count)}, [])
        grammar = resolve_for_backend(GrammarSpec.json_schema(schema), "llguidance")
        sizes.append(sum(len(body) for _, _, body in lower(grammar)))
    assert sizes[1] < 2.1 * sizes[0]


@pytest.mark.parametrize("is_intersection", [False, True])
def test_patterns_are_read_once_for_all_property_names(
    monkeypatch: pytest.MonkeyPatch, is_intersection: bool
):
    """The work grows with the number of patterns, and hardly with names times patterns."""
    read = []

    def count(pattern: str, *arguments: Any) -> Any:
        read.append(pattern)
        return lower_search(pattern, *arguments)

    monkeypatch.setattr("graft.grammar.automaton.strings.lower_search", count)
    patterns = {f"^once{index}_{is_intersection}": NULL for index in range(4)}
    objects = [
        {"type": "object", "properties": {f"name{index}": INTEGER for index in range(500)}},
        {"type": "object", "patternProperties": patterns, "additionalProperties": False},
    ]
    schema = {"allOf": objects} if is_intersection else {**objects[0], **objects[1]}
    lower(resolve_for_backend(GrammarSpec.json_schema(schema), "llguidance"))
    assert set(read) == set(patterns)
    assert len(read) <= 4 * len(patterns)


def test_lower_refuses_too_many_property_names_and_patterns():
    properties = {f"name{index}": INTEGER for index in range(3000)}
    patterns = {f"^x{index}$": NULL for index in range(100)}
    schema = {"type": "object", "properties": properties, "patternProperties": patterns}
    with pytest.raises(NoAutomaton, match="too many property names and patterns"):
        SchemaLowering(Rules(), "line").lower(schema)


@pytest.mark.parametrize("name", ["", "a", "ab", "ba", "é", "a\nb", "\ud800", "\ud800a", "\0a"])
@pytest.mark.parametrize("pattern", ["^a", "b$", "^(a|é)$", "[^a]", "^.$", "a{2}", "^[^a]*$"])
def test_matches_name_agrees_with_python(pattern: str, name: str):
    expected = re.search(pattern, name) is not None
    if "\ud800" not in name:  # strings of an output contain no lone surrogates
        assert NamePatterns().matches(pattern, name) == expected
    else:
        assert not NamePatterns().matches(pattern, name)


def real_schemas(shared_data: Any, count: int) -> list[Any]:
    """Return random JSON schemas of MaskBench and of SchemaStore."""
    lines: list[str] = []
    paths = [*(shared_data / "maskbench").glob("*.gz"), *(shared_data / "schemastore").glob("*.gz")]
    for path in sorted(paths):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines += file
    return [json.loads(line)["schema"] for line in random.Random(1).sample(lines, count)]


PARTS = [pytest.param(1000, part, 10, marks=pytest.mark.full) for part in range(8)]


@pytest.mark.parametrize("count, part, walks", [(96, 0, 4), *PARTS])
def test_real_schema_automata_have_masks_of_llguidance(
    shared_data: Any, count: int, part: int, walks: int
):
    """At least 85 % of the schemas that the router accepts have automata."""
    accepted = compared = 0
    for index, schema in enumerate(real_schemas(shared_data, count)[part::8]):
        spec = GrammarSpec.json_schema(schema, strict=None if index % 2 else True)
        try:
            grammar = resolve_for_backend(spec, "llguidance")
        except GrammarError:
            continue
        accepted += 1
        if compile_automaton(grammar) is not None:
            compared += 1
            require_equal_walks(spec, walks, 40)
    assert compared >= 0.85 * accepted
