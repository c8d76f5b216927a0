"""Tests of patterns with look-ahead, and of complements and intersections of patterns."""

from __future__ import annotations

import collections
import itertools
import random
import re
import uuid

import pytest
from router_util import Grammar

from graft.grammar import GrammarError, GrammarSpec
from graft.grammar.regular.expression import characters, concat, minus, repeat, text, union
from graft.grammar.regular.pattern_text import matching_pattern
from graft.grammar.regular.regex import NoAutomaton, has_alternatives
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.schema.rewrite import rewrite
from graft.grammar.schema.rewrite.patterns import DisjointPatterns, complement_of, plain_pattern
from graft.grammar.schema.rewrite.strings import (
    HOSTNAME,
    HOSTNAME_WITHOUT_PUNYCODE,
    NOT_HOSTNAME,
    PERHAPS_PUNYCODE,
    PIECE,
)
from graft.grammar.validate import search_pattern

STRINGS = ["".join(chars) for size in range(5) for chars in itertools.product("ab-", repeat=size)]


def random_pattern(rng: random.Random, depth: int = 3) -> str:
    """Return a random pattern with anchors, look-ahead and groups."""
    options = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        parts = []
        for _ in range(rng.randint(1, 3)):
            draw = rng.random()
            if draw < 0.12:
                parts.append(rng.choice("^$"))
            elif draw < 0.3 and depth:
                parts.append(f"(?{rng.choice('!!=')}{random_pattern(rng, depth - 1)})")
            elif draw < 0.45 and depth:
                group = f"{rng.choice(('(', '(?:'))}{random_pattern(rng, depth - 1)})"
                parts.append(group + rng.choice(("", "", "*", "?", "{2}")))
            else:
                parts.append(
                    rng.choice(("a", "b", "[^a]", ".", "ab")) + rng.choice("   *+?").strip()
                )
        options.append("".join(parts))
    pattern = "|".join(options)
    return "^" + pattern if rng.random() < 0.4 else pattern


def matches(pattern: str | None) -> list[str]:
    """Return the strings of `STRINGS` that match a pattern; none if the pattern is None."""
    if pattern is None:
        return []
    search = re.compile(pattern.replace("$", r"\Z")).search
    return [string for string in STRINGS if search(string)]


def test_patterns_without_look_ahead_match_the_same_strings():
    outcomes = collections.Counter()
    for seed in range(300):
        pattern = random_pattern(random.Random(seed))
        expected = matches(pattern)
        try:
            plain = plain_pattern(pattern)
            other = complement_of(pattern)
        except NoExactForm:
            outcomes["refused"] += 1
            continue
        assert matches(plain) == expected, pattern
        assert matches(other) == [string for string in STRINGS if string not in expected], pattern
        outcomes["written"] += plain is not None and "(?!" in pattern
        outcomes["empty"] += plain is None
    assert outcomes["written"] > 30 and outcomes["empty"] > 5 and outcomes["refused"] < 150


def test_disjoint_patterns_divide_the_strings_of_their_sources():
    divided = 0
    for seed in range(100):
        rng = random.Random(seed)
        sources = [random_pattern(rng, 1) for _ in range(rng.randint(2, 4))]
        sources = list(dict.fromkeys(sources))
        found = DisjointPatterns().divide(sources)
        if found is None:
            continue
        divided += 1
        matched = {source: set(matches(source)) for source in sources}
        divided_strings = {pattern: set(matches(pattern)) for pattern in found}
        for string in STRINGS:
            expected = [source for source in sources if string in matched[source]]
            assert [
                plain_sources
                for pattern, plain_sources in found.items()
                if string in divided_strings[pattern]
            ] == ([expected] if expected else [])
    assert divided > 30


@pytest.mark.parametrize(
    "pattern, good, bad",
    [
        ("^(?!@@)[@a-z]+$", ["@", "a@@", "@a"], ["", "@@", "@@a", "A"]),
        ("^(?!^lucene\\.|builtin\\.).*", ["", "lucene", "x.lucene."], ["lucene.a", "builtin."]),
        ("^(?!(False|None)$)[A-Za-z]+$", ["Falsey", "none"], ["False", "None", ""]),
        ("^(?=.*[0-9])(?=.*[a-z]).{2,4}$", ["a1", "1--a"], ["aa", "11", "a", "a1---"]),
        ('^(?!["\\\\]).*$', ["", "a\\", 'a"'], ['"', "\\", '"a']),
        ("^(?:(?!.*--)[a-]*a)?$", ["", "a", "a-a"], ["a--a", "b", "-"]),
        ('^(?![\\s\\S]*")[^a]*$', ["", "b", "\\", "\n"], ['"', "a", 'b"']),
        ('^(?!["\\\\])[^"\\\\]+$', ["b", "\n"], ['"', "\\", "b\\"]),
        ("(?!a)[ab]$", ["b", "ab"], ["a", "ba", ""]),
        ("(^a|b$|^$)", ["", "ax", "xb"], ["xa", "bx"]),
    ],
)
def test_patterns_with_look_ahead_are_enforced(pattern, good, bad):
    for schema, accepted, refused in [
        ({"pattern": pattern}, good, bad),
        ({"not": {"pattern": pattern}}, bad, good),
    ]:
        new = rewrite({"type": "string", **schema})
        assert not new.lost
        grammar = Grammar(new.schema)
        assert [string for string in accepted if not grammar.accepts_value(string)] == []
        assert [string for string in refused if grammar.accepts_value(string)] == []


def test_overlapping_pattern_properties_are_intersected():
    schema = {
        "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}, "^x(?!y)": False},
        "additionalProperties": {"type": "null"},
    }
    new = rewrite(schema)
    assert not new.lost
    grammar = Grammar(new.schema)
    for value in [{"a": 1}, {"ab": 5}, {"b": "x"}, {"b": 5.5}, {"c": None}, {"xy": None}]:
        assert grammar.accepts_value(value), value
    for value in [{"a": "x"}, {"ab": 4}, {"ab": 5.5}, {"b": 4}, {"c": 1}, {"x": None}]:
        assert not grammar.accepts_value(value), value


def test_formats_with_complement_are_excluded():
    schema = {"type": "string", "not": {"anyOf": [{"format": "ipv4"}, {"format": "date"}]}}
    grammar = Grammar(rewrite(schema).schema)
    assert [text for text in ("1.2.3.4", "2024-02-29") if grammar.accepts_value(text)] == []
    for other in ("1.2.3.256", "1.2.3", "", "2023-02-29"):
        assert grammar.accepts_value(other)


def test_matching_pattern_of_differences():
    letter = characters([(0x61, 0x7A)])
    word = repeat(letter, 1, None)
    assert matching_pattern(minus(word, repeat(letter, 0, None))) is None
    found = matching_pattern(minus(word, union([text("a"), concat([text("ab"), word])])))
    assert matches(found) == [
        string
        for string in STRINGS
        if re.fullmatch("[ab]+", string) and string != "a" and not re.fullmatch("ab[ab]+", string)
    ]
    with pytest.raises(NoAutomaton, match="more than 400 states"):
        matching_pattern(concat([repeat(letter, 0, None), text("a"), repeat(letter, 12, 12)]))


def test_host_names_and_their_complement_divide_all_strings():
    rng = random.Random(1)
    pieces = ["a", "Z", "0", "-", ".", "--", "xn--", "_", " ", "é", "b" * 62, "c" * 63, "d" * 64]
    counts: collections.Counter[bool] = collections.Counter()
    for _ in range(2000):
        string = "".join(rng.choices(pieces, k=rng.randrange(6)))
        is_name = re.search(HOSTNAME, string) is not None
        assert (re.search(NOT_HOSTNAME, string) is None) == is_name, string
        if is_name and not re.search(PERHAPS_PUNYCODE, string):
            assert re.search(HOSTNAME_WITHOUT_PUNYCODE, string), string
        counts[is_name] += 1
    assert min(counts.values()) > 100


@pytest.mark.parametrize("key_order", ["schema", "any"])
def test_one_of_host_names_and_addresses(key_order):
    """Every IPv4 address is a host name, and no IPv6 address is one."""
    formats = [{"format": name} for name in ("hostname", "ipv4", "ipv6")]
    host = {"type": "string", "oneOf": formats}
    schema = {"type": "object", "properties": {"a": host, "b": {}}}
    grammar = Grammar(spec=GrammarSpec.json_schema(schema, key_order=key_order))
    for value, is_valid in (("a.b-c", True), ("::1", True), ("1.2.3.4", False), ("a_b", False)):
        assert grammar.accepts_value({"a": value}) == is_valid


@pytest.mark.parametrize("version", [1, 3, 4, 5, 6, 7, 8])
def test_uuid_versions_of_pydantic(version: int):
    """Pydantic writes the format of its type `UUID4` as ``uuid4``."""
    grammar = Grammar(spec=GrammarSpec.json_schema({"type": "string", "format": f"uuid{version}"}))
    digits = "0123456789abcdef"
    for number, variant in itertools.product(digits, digits):
        value = f"0123abcd-0000-{number}fff-{variant}fff-ABCDEF012345"
        assert grammar.accepts_value(value) == (uuid.UUID(value).version == version)
    assert not grammar.accepts_value("0123abcd")


@pytest.mark.parametrize("end", ["", "\\"])
def test_class_without_end_extends_to_the_end_of_the_pattern(end: str):
    """Each opening bracket would otherwise be searched for an end, in quadratic time."""
    pattern = "[|.^a" * 100 + end
    assert PIECE.findall("a" + pattern) == ["a", pattern]
    assert not has_alternatives(pattern)
    with pytest.raises(re.error, match=r"unterminated|bad escape"):
        search_pattern(pattern, "a")
    with pytest.raises(GrammarError, match="cannot be enforced"):
        GrammarSpec.json_schema({"type": "string", "pattern": pattern}).check()
