"""Tests of bounds and multiples of numbers, compared with exact fractions."""

from __future__ import annotations

import itertools
import json
import random
from fractions import Fraction
from typing import Any

import pytest
from router_util import Grammar

from graft.grammar import GrammarError
from graft.grammar.schema.router import route

pytest.importorskip("llguidance")

#: Whole parts and fractions near which random bounds lie.
WHOLE = (0, 1, 5, 9, 10, 99, 100, 2**31, 2**53 - 1, 2**53, 2**53 + 1, 2**60, 10**18, 2**63 - 1)
PARTS = ("", ".5", ".05", ".87", ".999", ".000001")


def exact(text: str) -> Fraction:
    return Fraction(text)


def satisfies(schema: dict[str, Any], text: str) -> bool:
    """Return whether a JSON number satisfies a schema of draft 6 or later."""
    value = exact(text)
    numbers = {key: exact(repr(schema[key])) for key in schema if key != "type"}
    return (
        (schema["type"] == "number" or value.denominator == 1)
        and value >= numbers.get("minimum", value)
        and value <= numbers.get("maximum", value)
        and not ("exclusiveMinimum" in numbers and value <= numbers["exclusiveMinimum"])
        and not ("exclusiveMaximum" in numbers and value >= numbers["exclusiveMaximum"])
        and (value / numbers.get("multipleOf", value or 1)).denominator == 1
    )


def spellings(value: Fraction) -> set[str]:
    """Return decimal texts of a number, with up to four zeros at the end."""
    digits = 0
    while (value * 10**digits).denominator > 1:
        digits += 1
    whole = str(abs(value.numerator * 10**digits // value.denominator)).rjust(digits + 1, "0")
    sign = "-" if value < 0 else ""
    found = set()
    for zeros in range(5):
        places = digits + zeros
        padded = whole + "0" * zeros
        found.add(sign + (f"{padded[:-places]}.{padded[-places:]}" if places else padded))
    return found


def candidates(schema: dict[str, Any]) -> set[Fraction]:
    """Return numbers at and near the bounds of a schema."""
    bounds = [exact(repr(schema[key])) for key in schema if key not in ("type", "multipleOf")]
    step = exact(repr(schema.get("multipleOf", 1)))
    near = {Fraction(0), Fraction(1), Fraction(-1)}
    offsets = (0, 1, 2, "0.1", "0.5", "0.05", "0.001", "0.00000001")
    for bound, offset, sign in itertools.product(bounds, map(Fraction, offsets), (1, -1)):
        near |= {bound + sign * offset, Fraction(round(bound) + sign * int(offset))}
        near.add(bound // step * step + sign * int(offset) * step)
    return near


@pytest.mark.parametrize(
    "schema, text",
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0"),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "-0"),
        ({"type": "number", "exclusiveMinimum": 7, "exclusiveMaximum": 7.25}, "7"),
        ({"type": "number", "allOf": [{"exclusiveMinimum": 1}, {"maximum": 1.5}]}, "1"),
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53)),
        ({"type": "integer", "exclusiveMinimum": 2**53}, str(2**53)),
        ({"type": "number", "maximum": 2**60}, str(2**60 + 1)),
        ({"type": "number", "exclusiveMinimum": 2**53 - 1, "multipleOf": 0.1}, str(2**53 - 1)),
        ({"type": "number", "maximum": 11.20814868975978}, "11.208148689759781"),
        ({"enum": [2**53 + 1, 1]}, str(2**53)),
        ({"type": "integer", "enum": [10**19, 1]}, str(2**63 - 1)),
    ],
    ids=str,
)
def test_number_outside_bounds_is_not_produced(schema: dict[str, Any], text: str):
    found = route(schema)
    assert found.exact and not Grammar.routed(found).accepts(text)


def test_number_between_close_multiples_has_no_dead_end():
    """LLGuidance calculates that 0.3 is in this range, and then allows no digit."""
    none = {"multipleOf": 0.1, "exclusiveMinimum": 0.3, "maximum": 0.35}
    grammar = Grammar.routed(route({**none, "type": ["number", "null"]}))
    assert grammar.generate(lambda legal: legal[0], 10) == b"null"
    one = {"type": "number", "multipleOf": 0.1, "minimum": 0.3, "maximum": 0.3}
    assert Grammar.routed(route(one)).accepts("0.3")


def test_listed_number_is_written_as_it_is():
    """LLGuidance reads some numbers with 16 or 17 digits as a neighboring double."""
    rng = random.Random(1)
    listed = [rng.uniform(0, 20) for _ in range(200)]
    written = 0
    for value in listed:
        found = route({"enum": [value, "a"]})
        assert found.exact
        text = Grammar.routed(found).generate(lambda legal: legal[-1], 30)
        if any(reason.keyword == "enum" for reason in found.narrowed):
            assert text == b'"a"'
        else:
            assert text == repr(value).encode()
            written += 1
    assert 100 < written < 200


def random_bounds(rng: random.Random) -> dict[str, Any]:
    """Return a schema of numbers or integers with at least one bound."""

    def number(text: str) -> int | float:
        return float(text) if "." in text else int(text)

    schema: dict[str, Any] = {"type": rng.choice(("number", "number", "integer"))}
    base = rng.choice(WHOLE) + rng.choice((0, 0, 1))
    part = rng.choice(PARTS) if base < 1000 else ""
    sign = rng.choice(("", "-"))
    schema[rng.choice(("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))] = number(
        f"{sign}{base}{part}"
    )
    if rng.random() < 0.7:
        keyword = rng.choice(("maximum", "exclusiveMaximum", "minimum"))
        other = base + rng.choice((0, 0, 0, 1, 10, -1))
        part = rng.choice(PARTS) if abs(other) < 1000 else ""
        schema[keyword] = number(f"{sign}{max(other, 0)}{part}")
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice((1, 2, 3, 7, 0.5, 0.1, 0.05, 0.01))
    return schema


@pytest.mark.parametrize("seed, count", [(1, 40), pytest.param(2, 8000, marks=pytest.mark.full)])
def test_random_bounds_are_exact(seed: int, count: int):
    """Outside numbers are refused in each spelling, inside ones accepted in at least one.

    Numbers that `Route.narrowed` names may be missing.
    """
    rng = random.Random(seed)
    checked = 0
    for _ in range(count):
        schema = random_bounds(rng)
        found = route({"anyOf": [schema, {"type": "null"}]})
        if not found.exact:
            assert found.reasons[0].keyword in schema, (schema, found.reasons)
            continue
        grammar = Grammar.routed(found)
        for value in candidates(schema):
            texts = spellings(value)
            accepted = [text for text in texts if grammar.accepts(text)]
            assert all(satisfies(schema, text) for text in accepted), (schema, accepted)
            if satisfies(schema, min(texts, key=len)) and not found.narrowed:
                assert accepted, (schema, texts)
                assert found.spelling or accepted == list(texts)
        checked += 1
    assert checked > 0.8 * count


@pytest.mark.parametrize("bound", [5e-324, 2.2250738585072014e-308, 1e-100, 1e-30])
def test_bounds_very_near_0_end_the_search_for_a_form(bound: float):
    """A search that visits each double from the bound on would never end."""
    for sign, keyword in itertools.product((1, -1), ("inimum", "aximum")):
        for name in (f"m{keyword}", f"exclusiveM{keyword}"):
            found = route({"type": "number", name: sign * bound})
            assert found.exact and found.narrowed
            grammar = Grammar.routed(found)
            assert grammar.accepts("0") == (sign == (-1 if keyword == "inimum" else 1))
            assert grammar.accepts("1") == (keyword == "inimum")


@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMaximum", "multipleOf"])
def test_numbers_of_400_digits_are_refused(keyword: str):
    value = -(10**400) if keyword == "exclusiveMaximum" else 10**400
    found = route({"type": "number", keyword: value})
    assert not found.exact
    assert [reason.keyword for reason in found.reasons] == [keyword]
    assert len(found.refusal()) < 200


@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMaximum", "multipleOf", "maxLength"])
def test_numbers_beyond_doubles_are_refused(keyword: str):
    """Python reads 1e400 as an infinite number."""
    with pytest.raises(GrammarError, match=f"#: {keyword}: must be a .*inf"):
        route(json.loads(f'{{"{keyword}": 1e400}}'))


@pytest.mark.parametrize("bound", [float(2**53 - 1), float(2**52 + 1), -float(2**53 - 1)])
def test_whole_bound_with_decimal_point_is_exact(bound: float):
    """LLGuidance reads 9007199254740991.0 as 9007199254740990."""
    for json_type in ("integer", "number"):
        least = Grammar.routed(route({"type": json_type, "minimum": bound}))
        assert least.accepts(str(int(bound))) and not least.accepts(str(int(bound) - 1))
        most = Grammar.routed(route({"type": json_type, "maximum": bound}))
        assert most.accepts(str(int(bound))) and not most.accepts(str(int(bound) + 1))


def random_multiples(rng: random.Random) -> dict[str, Any]:
    """Return a schema of the multiples of a decimal fraction near bounds."""
    step = Fraction(rng.choice(("0.25", "0.125", "0.75", "1.5", "2.5", "0.05", "0.1", "12.5")))
    low = rng.randint(-12, 12) * step
    high = low + rng.choice((0, 0, 1, 2, 3, 8, 40)) * step
    low -= rng.choice((0, 0, Fraction("0.01"), step / 4))
    high += rng.choice((0, 0, Fraction("0.01"), step / 4))
    bounds = {"minimum": float(low), "maximum": float(high)}
    if rng.random() < 0.3:
        del bounds[rng.choice(list(bounds))]
    return {"multipleOf": float(step), **bounds}


@pytest.mark.parametrize("seed, count", [(1, 30), pytest.param(2, 5000, marks=pytest.mark.full)])
def test_multiples_of_decimal_fractions_are_all_produced(seed: int, count: int):
    """LLGuidance writes multiples of 0.25 as 0.50, but numbers up to the maximum 0.5 as 0.5."""
    rng = random.Random(seed)
    refused = 0
    for _ in range(count):
        schema = {"type": "number", **random_multiples(rng)}
        inner = {key: schema[key] for key in ("type", "multipleOf")}
        bounds = {key: schema[key] for key in schema.keys() - inner.keys()}
        for document in (schema, {"allOf": [inner, bounds]}):
            found = route(document)
            if not found.exact:
                refused += 1
                continue
            grammar = Grammar.routed(found)
            assert grammar.matcher().legal().size, document
            for value in candidates(schema):
                texts = spellings(value)
                if satisfies(schema, min(texts, key=len)):
                    is_produced = any(map(grammar.accepts, texts))
                    assert is_produced or found.narrowed, (document, texts)
    assert refused < count  # bounds in another subschema are often refused
