"""Tests that a rewritten JSON schema is equivalent to the original schema."""

from __future__ import annotations

import collections
import itertools
import json
import random
import re
import warnings
from typing import Any

import jsonschema
import pytest
from router_util import Grammar
from schema_fuzz import random_schema

from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.schema.references import References
from graft.grammar.schema.rewrite import rewrite
from graft.grammar.schema.rewrite.listed import ListedValues
from graft.grammar.schema.rewrite.negate import Negation
from graft.grammar.schema.rewrite.objects import distinct
from graft.grammar.schema.rewrite.strings import FORMATS, none_of

ATOMS: list[Any] = [None, True, False, 0, 1, -3, 2.5, 12, "", "a", "b", "ab", "abc", "xyz"]
OBJECTS: list[Any] = [
    dict(items)
    for size in range(4)
    for items in itertools.combinations([("a", 1), ("b", "x"), ("c", True), ("zz", None)], size)
] + [{"a": "s"}, {"a": 5, "b": 1}, {"b": "y", "zz": 7}]
ARRAYS: list[Any] = [[], [1], ["a"], [1, 1], [1, 2], ["a", "b"], ["b", "a"], ["a", "a"], [[]], [{}]]
VALUES = [*ATOMS, *OBJECTS, *ARRAYS]
PROPERTIES = {"a": {}, "b": {}, "c": {}, "zz": {}}

SCHEMAS: list[Any] = [
    {"not": {"type": "string"}},
    {"not": {"type": ["object", "array", "null"]}},
    {"type": "string", "not": {"enum": ["a", "ab", ""]}},
    {"type": ["string", "boolean"], "not": {"const": True}},
    {"type": "number", "not": {"minimum": 1, "maximum": 5}},
    {"type": "integer", "not": {"enum": [0, 12]}},
    {"not": {"const": {"a": 1}}, "type": "object"},
    {"not": {"enum": [[1], ["a", "b"]]}, "type": "array"},
    {"type": "object", "properties": PROPERTIES, "not": {"required": ["a", "b"]}},
    {"type": "object", "properties": PROPERTIES, "not": {"properties": {"a": {"type": "number"}}}},
    {
        "type": "object",
        "properties": PROPERTIES,
        "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    },
    {"type": "array", "not": {"minItems": 1, "maxItems": 1}},
    {"type": "string", "not": {"maxLength": 2}},
    {"not": {"not": {"type": "integer"}}},
    {"not": {"type": "number", "enum": [False, None, "1"]}},
    {"unevaluatedProperties": False, "if": True},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 2}]},
    {
        "type": "object",
        "properties": PROPERTIES,
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}],
    },
    {"properties": PROPERTIES, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {
        "oneOf": [
            {"type": "array", "items": {"type": "integer"}},
            {"type": "array", "items": {"type": "string"}},
        ]
    },
    {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", 1]}, {"const": None}]},
    {
        "type": "object",
        "oneOf": [
            {"properties": {"a": {"const": 1}}, "additionalProperties": False},
            {"properties": {"b": {"type": "string"}}, "additionalProperties": False},
        ],
    },
    {
        "type": "object",
        "properties": PROPERTIES,
        "if": {"required": ["a"]},
        "then": {"required": ["b"]},
        "else": {"required": ["c"]},
    },
    {
        "type": "object",
        "properties": PROPERTIES,
        "if": {"required": ["a"]},
        "else": {"required": ["c"]},
    },
    {
        "properties": PROPERTIES,
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "then": {"properties": {"b": {"type": "string"}}},
    },
    {"type": "object", "properties": PROPERTIES, "dependentRequired": {"a": ["b", "c"]}},
    {"type": "object", "properties": PROPERTIES, "dependentRequired": {"a": ["b"], "b": ["a"]}},
    {
        "properties": PROPERTIES,
        "dependentSchemas": {"a": {"properties": {"b": {"type": "string"}}}},
    },
    {"type": "object", "properties": PROPERTIES, "minProperties": 2},
    {"type": "object", "properties": PROPERTIES, "maxProperties": 1},
    {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "additionalProperties": False,
        "minProperties": 1,
    },
    {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "additionalProperties": False,
        "maxProperties": 1,
    },
    {"properties": {"a": {}}, "required": ["a"], "minProperties": 2},
    {"properties": {"a": {}}, "additionalProperties": False, "minProperties": 10**12},
    {
        "type": ["object", "null"],
        "properties": PROPERTIES,
        "required": ["a", "b"],
        "maxProperties": 1,
    },
    {"type": "object", "properties": PROPERTIES, "propertyNames": {"maxLength": 1}},
    {"type": "object", "properties": PROPERTIES, "propertyNames": {"enum": ["a", "zz"]}},
    {"type": "object", "properties": PROPERTIES, "propertyNames": {"pattern": "^[ab]"}},
    {"propertyNames": False},
    {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}},
    {"type": "array", "uniqueItems": True, "items": {}, "maxItems": 1},
    {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, "a"]}, "minItems": 2},
    {"type": "string", "format": "no-such-format"},
    {"$defs": {"s": {"type": "string"}}, "not": {"$ref": "#/$defs/s"}},
    {
        "properties": {
            "a": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
            "b": {"$ref": "#/properties/a/oneOf/1"},
        }
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:60])
def test_rewritten_schema_is_equivalent(schema):
    """LLGuidance with the rewritten schema accepts the same values as jsonschema with the original.

    The original schema is not modified.
    """
    before = json.dumps(schema)
    new = rewrite(schema)
    assert not new.lost and json.dumps(schema) == before
    grammar = Grammar(new.schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert any(validator.is_valid(value) for value in VALUES)
    for value in VALUES:
        assert grammar.accepts_value(value) == validator.is_valid(value), (value, new.schema)


def test_negation_is_complement():
    schemas = [
        {"type": ["string", "null"]},
        {"enum": [1, "a", [1], {"a": 1}]},
        {"required": ["a"]},
        {"properties": {"a": {"type": "number"}, "b": False}},
        {"minimum": 1},
        {"maxLength": 1},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        {"oneOf": [{"required": ["a"]}, {"minProperties": 2}]},
        {"exclusiveMaximum": 2.5},
        {"minItems": 2},
        {"prefixItems": [{"type": "number"}]},
    ]
    for schema in schemas:
        complement = Negation(References(schema), 2020).complement(schema)
        for value in VALUES:
            holds = jsonschema.Draft202012Validator(schema).is_valid(value)
            other = jsonschema.Draft202012Validator(complement).is_valid(value)
            assert holds != other, (schema, complement, value)


NARROWED: list[tuple[Any, list[Any], list[Any]]] = [
    # Each option of the oneOf requires a list property. A value with both lists is valid if exactly
    # one of the lists satisfies its option, but the grammar never produces such a value.
    (
        {
            "type": "object",
            "oneOf": [
                {
                    "required": ["a"],
                    "properties": {"a": {"type": "array", "items": {"type": "string"}}},
                },
                {
                    "required": ["b"],
                    "properties": {"b": {"type": "array", "items": {"type": "null"}}},
                },
            ],
        },
        [{"a": ["x"]}, {"b": [None]}, {"a": [], "c": 1}],
        [{}, {"a": [], "b": []}, {"a": [1]}, {"a": ["x"], "b": [None]}, {"c": 1}],
    ),
    # A narrowed option leaves out valid values. The other options must not allow these values.
    (
        {
            "oneOf": [
                {
                    "type": "object",
                    "oneOf": [
                        {
                            "required": ["a"],
                            "properties": {"a": {"type": "array", "items": {"type": "string"}}},
                        },
                        {
                            "required": ["b"],
                            "properties": {"b": {"type": "array", "items": {"type": "null"}}},
                        },
                    ],
                },
                {"type": "object", "required": ["a", "b"]},
            ]
        },
        [{"a": ["x"]}, {"b": [None]}],
        [{}, {"a": 1}, {"a": ["x"], "b": 1}, {"a": 1, "b": [None]}],
    ),
]


@pytest.mark.parametrize(
    "part",
    [
        {"propertyNames": {"enum": ["a_b"]}},
        {"propertyNames": {"pattern": "^a_b$"}},
        {"patternProperties": {"^(a_b)$": {"type": "integer"}}, "additionalProperties": False},
    ],
)
def test_pattern_of_listed_names_allows_no_extra_key(part: dict[str, Any]) -> None:
    """A pattern that matches only listed names applies to them and allows no further property."""
    schema = {"type": "object", "properties": {"a_b": {"enum": [1, "x"]}}, **part}
    grammar = Grammar(rewrite(schema).schema)
    texts: list[bytes] = []

    def choose(legal: list[int]) -> int:
        texts.append(bytes(byte for byte in legal if byte < 256))
        wanted = b'{"a_b": 1,}'[len(texts) - 1 :]
        return next((byte for byte in wanted if byte in legal), legal[-1])

    assert grammar.generate(choose, 20) == b'{"a_b": 1}'
    valid = jsonschema.Draft202012Validator(schema)
    for value in ({}, {"a_b": 1}, {"a_b": "x"}, {"c": 1}):
        assert grammar.accepts_value(value) == valid.is_valid(value)


@pytest.mark.parametrize("schema, clear, invalid", NARROWED)
def test_one_of_is_narrowed_to_avoid_overlap(schema, clear, invalid):
    """If the overlap of two options has no exact complement, outputs avoid the overlap.

    The rewriter reports the restriction.
    """
    validator = jsonschema.Draft202012Validator(schema)
    new = rewrite(schema)
    assert new.narrowed and not new.lost
    assert all(reason.keyword == "oneOf" for reason in new.narrowed)
    grammar = Grammar(new.schema)
    for value in clear:
        assert validator.is_valid(value) and grammar.accepts_value(value), value
    for value in invalid:
        assert not validator.is_valid(value) and not grammar.accepts_value(value), value


def test_one_of_option_is_never_narrowed_to_nothing():
    """If excluding the overlap would exclude a whole option, the oneOf is not enforced."""
    schema = {
        "type": "object",
        "required": ["a"],
        "oneOf": [
            {"properties": {"a": {"type": "number", "multipleOf": 3}}, "required": ["a"]},
            {"properties": {"a": {"type": "number", "multipleOf": 5}}, "required": ["a"]},
        ],
    }
    new = rewrite(schema)
    assert [reason.keyword for reason in new.lost] == ["oneOf"] and not new.narrowed


def test_distinct_counts_no_arrays_beyond_the_limit():
    """The number of all arrays of the values would have 77,000 digits."""
    with pytest.raises(NoExactForm, match="20000 values form more than"):
        distinct({}, list(range(20_000)))


def test_negation_raises_for_inexpressible_complements():
    for schema, keyword in [
        ({"pattern": "a.{9}$"}, "pattern"),
        ({"multipleOf": 3}, "multipleOf"),
        ({"items": {"type": "string"}}, "items"),
        ({"type": "integer"}, "type"),
        ({"format": "email"}, "format"),
        ({"contains": {}, "minContains": 2}, "contains"),
        ({"uniqueItems": True}, "uniqueItems"),
    ]:
        with pytest.raises(NoExactForm) as caught:
            Negation(References(schema), 2020).complement(schema)
        assert caught.value.keyword == keyword


LABEL = "a" * 63
HOSTS = ["a", "1host", "a--b.com", "A-1.example", f"{LABEL}.com", ".".join([LABEL] * 3) + ".b"]
NO_HOSTS = [
    "",
    ".",
    "-a",
    "a-",
    "a_b",
    "a.",
    ".a",
    "a..b",
    f"a{LABEL}",
    ".".join([LABEL] * 4),
    "a\n",
    "\u212aelvin.example",
    "a b",
]
WORDS = [["a"], ["a", "ab", "abc"], ["", "x"], ["[", "\\", "é", "a-b"]]
OTHERS = ["", "a", "ab", "abc", "abcd", "b", "x", "xx", "[", "[[", "é", "a-"]


@pytest.mark.parametrize(
    "stated, good, bad",
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "0400-02-29", "2023-12-31", "0001-01-01", "0100-01-01"],
            ["2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-1-01", "0000-04-15"],
        ),
        ("time", ["00:00:00Z", "23:59:59.25+01:30"], ["24:00:00Z", "12:00:00"]),
        (
            "date-time",
            ["2024-02-29T12:00:00Z"],
            ["2023-02-29T12:00:00Z", "0000-02-29T12:00:00Z", "1998-12-31T23:58:60Z", "2024-02-29"],
        ),
        (
            "ipv6",
            [
                "::",
                "::1",
                "1::8",
                "1:2:3:4:5:6:7:8",
                "::ffff:1.2.3.4",
                "1:2::192.168.0.1",
                "1:2:3:4:5:6:1.2.3.4",
                "1:2:3:4:5:6:7::",
            ],
            ["", ":", "1:2:3:4:5:6:7", "1::2::3", "1:2:3:4:5:6:7:8:9", "::256.0.0.1", "12345::"],
        ),
        ("json-pointer", ["", "/a~0b/~1", "/"], ["a", "/~2", "/~"]),
        (
            "regex",
            ["", "^(a|b)*?$", r"[^a-z/-]{2,}\.\(", "(?:x(y(z)+)?)", "a||b", "[+*(]"],
            ["(", "a**", "[z-a]", r"\1", "(?=a)", "{", "a{3,2}", ")", "|*", "[]", r"\u", "^*"],
        ),
        ("relative-json-pointer", ["0", "12#", "3/a/~1", "0/"], ["", "/a", "01", "-1", "0##"]),
        (
            "uri-template",
            ["", "http://x/{?q,r}", "{+a.b}/é", "{a:3}{b*}", "%20~{%C3}"],
            ["{", "a}", "{a b}", "{=a}", "a b", "%2", "{a:0}", "{a:10000}", "{a,}"],
        ),
        (
            "iri",
            ["http://é.com/日?q=\ue000#\U00010000", "a:", "urn:x:y", "http://[::1]/"],
            ["", "/a", "http://a b", "http://x/\ue000", "http://[::é]/", "a:\ufdd0", "a:%zz"],
        ),
        ("iri-reference", ["", "/é", "http://x", "#日"], ["é :", "\\a", ":x"]),
        ("uri-reference", ["", "a/b", "//h/p", "http://x/?q#f", "#f"], ["a b", "\\a", "%zz", ":x"]),
        *(
            (none_of(words), [text for text in OTHERS if text not in words], words)
            for words in WORDS
        ),
        (r"^[^\\]+$", ["a", '"', "\n"], ["\\", "a\\b"]),
        (r'^[^"]+$', ["a\\", "\t"], ['"', 'a"']),
        (r"^[^\\/]*$", ["", "é"], ["/", "\\"]),
        (r'^[^"\n]+$', ["a\\", "\t"], ['"', "\n"]),
        (r"^[^\\\n]+$", ['"', "\t"], ["\\", "\n"]),
        (r"^[\x00-\x21]$", ["!", "\n"], ['"', "\\"]),
        (r"^[^a]$", ["\\", '"', "b"], ["a"]),
        (r"^\S+$", ["\\", '"'], [" ", "\ufeff"]),
        ("hostname", HOSTS, NO_HOSTS),
    ],
)
def test_formats_and_patterns_are_exact(stated, good, bad):
    """Strings are accepted if and only if they are valid.

    The cases are formats that are replaced by patterns, host names up to draft 6, complements of
    words, and character classes that exclude quotes or backslashes. Such a class must not allow the
    excluded character as an escape sequence.
    """
    keyword = "format" if stated in {*FORMATS, "hostname"} else "pattern"
    assert (keyword == "format") == stated.replace("-", "").isalnum()
    for draft in (4, 6) if stated == "hostname" else (2020,):
        new = rewrite({"type": "string", keyword: stated}, draft=draft)
        assert not new.lost
        grammar = Grammar(new.schema)
        assert [text for text in good if not grammar.accepts_value(text)] == []
        assert [text for text in bad if grammar.accepts_value(text)] == []


def test_hostname_from_draft_7_has_no_punycode_labels():
    """Labels with two hyphens as third and fourth character would have to be checked further."""
    new = rewrite({"type": "string", "format": "hostname"}, draft=7)
    grammar = Grammar(new.schema)
    inner = [f"{end * 2}b{'-' * count}b" for end in "a1" for count in range(5)]
    longest = ["a-a" + "-" * 59 + "a", "a" * 63, "aaa-" + "a" * 59]
    for text in [*HOSTS, *NO_HOSTS, "xn--a", "b.xn--a", "a-", "ab-", "a---b", *inner, *longest]:
        expected = text not in NO_HOSTS and all(
            label[2:4] != "--" and not label.endswith("-") for label in text.split(".")
        )
        assert grammar.accepts_value(text) == expected, text
    assert [reason.keyword for reason in new.narrowed] == ["format"]


def test_strings_of_format_regex_are_regular_expressions():
    rng = random.Random(0)
    grammar = Grammar(rewrite({"type": "string", "format": "regex"}).schema)
    accepted = 0
    for _ in range(3000):
        text = "".join(rng.choices("a0-^$.*+?()[]{}|\\d,2:/z", k=rng.randint(1, 6)))
        if grammar.accepts_value(text):
            accepted += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                re.compile(text)
    assert accepted > 300


@pytest.mark.parametrize(
    "seeds", [range(120), pytest.param(range(120, 400), marks=pytest.mark.full)], ids=len
)
def test_listed_values_are_those_that_jsonschema_accepts(seeds):
    """For schemas that list their values, keywords without an exact form are decided directly."""
    outcomes = collections.Counter()
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng)
        if isinstance(schema, bool):
            continue
        definitions = schema.pop("$defs", {})
        listed = {"allOf": [{"enum": VALUES}, {"not": schema}], "$defs": definitions}
        found = ListedValues(References(listed), 2020, True)
        validator = jsonschema.Draft202012Validator(listed)
        try:
            allowed = found.satisfying(listed)
            expected = [value for value in VALUES if validator.is_valid(value)]
        except (NoExactForm, RecursionError) as error:
            outcomes[type(error).__name__] += 1
            continue
        assert list(map(repr, allowed)) == list(map(repr, expected)), listed
        outcomes["equal"] += 1
    assert outcomes["equal"] > 0.6 * len(seeds)


def test_schema_of_listed_values_without_other_exact_form():
    part = {"enum": [1, 2, 2.5, "x"], "not": {"type": "integer"}}
    assert rewrite(part).schema == {"enum": [2.5, "x"]}
    with_reference = {
        "properties": {"a": {"allOf": [{"$ref": "#/$defs/v"}, {"not": {"multipleOf": 2}}]}},
        "$defs": {"v": {"enum": [1, 2, 3]}},
    }
    grammar = Grammar(rewrite(with_reference).schema)
    assert [n for n in range(5) if grammar.accepts_value({"a": n})] == [1, 3]
    assert rewrite({"items": {"enum": [3], "not": {"multipleOf": 3}}}).schema == {"items": False}


def test_rewrite_ignores_keywords_as_old_drafts_do():
    """Up to draft 7, keywords next to ``$ref`` are ignored. In draft 4, ``if`` is ignored."""
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "definitions": {"n": {"type": "integer"}},
        "properties": {"a": {"$ref": "#/definitions/n", "minimum": 5}},
        "if": True,
        "then": False,
    }
    new = rewrite(schema)
    assert not new.lost
    grammar = Grammar(new.schema)
    assert grammar.accepts_value({"a": 1}) and not grammar.accepts_value({"a": "x"})
    newer = rewrite(
        {
            **schema,
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "if": {"required": ["a"]},
            "then": {"required": ["b"]},
        }
    )
    grammar = Grammar(newer.schema)
    assert not grammar.accepts_value({"a": 1}) and grammar.accepts_value({"a": 7, "b": 1})


def test_options_of_large_schemas_are_proved_disjoint():
    """Properties and items that may be absent are left out of the schema that LLGuidance checks."""
    large = {f"p{i}": {"enum": [f"value {j}" for j in range(i, i + 40)]} for i in range(60)}
    options = [
        {
            "type": "object",
            "properties": {"n": {"type": "number", **bound}, "all": {"items": large}, **large},
            "required": ["n"],
        }
        for bound in ({"maximum": 3}, {"minimum": 4})
    ]
    assert rewrite({"oneOf": options}).schema == {"anyOf": options}
