"""Automata that count the characters of long strings, near the limits of the strings."""

from __future__ import annotations

import random

import numpy as np
import pytest
from mask_walks import (
    STOP,
    VOCABULARY,
    compile_both,
    legal_ids,
    require_equal_walks,
    unescaped_matcher,
)
from rule_matcher import RuleMatcher
from test_automaton_stack import load

from graft.grammar import GrammarSpec
from graft.grammar.automaton.lower import compile_automaton, lower
from graft.grammar.resolve import resolve_for_backend

FIRST_BYTE = 2
#: Spellings of one character in a JSON string.
CHARACTERS = [
    "a",
    " ",
    "é",
    "日",
    "😀",
    r"\n",
    r"\"",
    r"\\",
    r"\u001f",
    "\u00ad",
    r"\u00fc",
    r"\uD83d\ude00",
]
#: Schemas, a text before a string's characters, and the greatest number of these characters.
SCHEMAS = {
    "text": ({"type": "string", "maxLength": 300}, '"', 300),
    "both_limits": ({"type": "string", "minLength": 3, "maxLength": 300}, '"', 300),
    "options": (
        {
            "anyOf": [
                {"type": "string", "maxLength": 300},
                {"type": "string", "maxLength": 305},
                {"enum": ["a" * 302, "b", None]},
            ]
        },
        '"',
        305,
    ),
    "objects": (
        {
            "anyOf": [
                {"type": "object", "properties": {"x": {"type": "string", "maxLength": 300}}},
                {
                    "type": "object",
                    "properties": {"x": {"type": "string", "maxLength": 310}, "y": {}},
                    "required": ["y"],
                },
            ]
        },
        '{"x": "',
        310,
    ),
    "items": (
        {"type": "array", "items": {"type": "string", "maxLength": 250}},
        '["' + "a" * 250 + '", "',
        250,
    ),
    "pattern": ({"type": "string", "pattern": "^[a-z]+-[0-9]{3}$", "maxLength": 300}, '"', 296),
    "pattern_of_items": (
        {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]+-[0-9]{3}$", "maxLength": 300},
            "maxItems": 2,
        },
        '["a-123", "',
        296,
    ),
    "email": ({"type": "string", "format": "email", "maxLength": 300}, '"', 298),
    "patterns": (
        {
            "anyOf": [
                {"type": "string", "pattern": "^a*(bc)*$", "maxLength": 300},
                {"type": "string", "pattern": "^a*z?$", "maxLength": 304},
            ]
        },
        '"',
        304,
    ),
}
#: Schemas whose strings may contain only letters.
LETTERS = {"pattern", "pattern_of_items", "email", "patterns"}


def tokens_of(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def string_of(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(CHARACTERS, k=length))


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.full)])
def test_rows_near_limit_equal_those_of_llguidance_and_oracle(name, step):
    """Compare rows after strings of all lengths near the limit, also after rolling back."""
    schema, before, limit = SCHEMAS[name]
    spec = GrammarSpec.json_schema(schema)
    compiled = compile_both(spec)
    assert len(compiled.automaton.table()["counts"]) > 0
    oracle = RuleMatcher(lower(resolve_for_backend(spec, "llguidance")))
    longest = max(map(len, VOCABULARY.tokens))
    far = limit - longest
    lengths = [0, far - 15, far - 1, far + 2, far, *range(limit - 3, limit + 1)]
    for seed, length in enumerate(lengths[::step]):
        letters = name in LETTERS
        # In short runs, the strings are prefixes of one string, which the oracle reads once.
        random_text = string_of(length, seed if step == 1 else 0)
        text = before + ("a" * length if letters else random_text)
        matcher, expected = compiled.matcher(), unescaped_matcher(compiled)
        for token in tokens_of(text):
            assert matcher.accept(token)
            assert expected.accept(token)
        legal = legal_ids(matcher)
        expected.require_row(legal, text.encode())
        node = oracle.after(text.encode())
        assert set(legal) == {
            token
            for token, spelled in enumerate(VOCABULARY.tokens)
            if spelled and oracle.is_prefix(spelled, node)
        }
        for token in random.Random(seed).sample(legal, min(len(legal), 12)):
            assert matcher.accept(token)
            assert expected.accept(token)
            expected.require_row(legal_ids(matcher), text.encode())
            matcher.rollback(1)
            expected.rollback(1)
        assert legal_ids(matcher) == legal


@pytest.mark.parametrize("name", SCHEMAS)
def test_rows_with_budget_near_limit_can_be_completed(name):
    schema, before, limit = SCHEMAS[name]
    matcher = compile_both(GrammarSpec.json_schema(schema)).matcher()
    for token in tokens_of(before + "a" * (limit - 12)):
        assert matcher.accept(token)
    generator = random.Random(name)
    while not matcher.is_terminated():
        legal = legal_ids(matcher)
        after = {}
        for token in legal:
            assert matcher.accept(token)
            after[token] = matcher.distance()
            matcher.rollback(1)
        distance = matcher.distance()
        assert min(after.values()) <= distance - 1
        for budget in range(distance, distance + 6):
            row = np.zeros(VOCABULARY.words, np.int32)
            assert matcher.fill(row, budget)
            narrowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            assert narrowed.tolist() == [token for token in legal if after[token] <= budget - 1]
        assert matcher.accept(generator.choice(legal))


@pytest.mark.parametrize(
    "keywords", [{"format": "date-time"}, {"format": "email"}, {"pattern": "^:// https?://.*</a>$"}]
)
def test_distance_does_not_depend_on_a_large_maximum_length(keywords):
    """Tokens of several characters count although the value of the counter is not known."""
    text = {"type": "string", **keywords}
    distances = []
    for limit in ({}, {"maxLength": 300}):
        compiled = compile_both(GrammarSpec.json_schema({**text, **limit}))
        assert bool(limit) == (len(compiled.automaton.table()["counts"]) > 0)
        distances.append(compiled.matcher().distance())
    assert distances[0] == distances[1] > 1


COUNTED = {
    "letters": GrammarSpec.regex("[a-z]{0,5000}"),
    "letter_after": GrammarSpec.regex("[ab]{3,400}b"),
    "two_loops": GrammarSpec.regex("(ab|cd){1,300}-a{0,300}"),
    "loop_in_loop": GrammarSpec.regex("(x[a-c]{0,300},)*"),
    "pattern": GrammarSpec.json_schema({"type": "string", "pattern": "^x.{0,1000}$"}),
    "map": GrammarSpec.json_schema({"type": "object", "additionalProperties": {"maxLength": 999}}),
}


@pytest.mark.parametrize("name", COUNTED)
def test_counting_automaton_allows_tokens_of_llguidance(name):
    spec = COUNTED[name]
    assert len(compile_both(spec).automaton.table()["counts"]) > 0
    require_equal_walks(spec, walks=6)


AMBIGUOUS = {
    "prefix": GrammarSpec.regex("(a|ab){0,250}"),
    "second_loop": GrammarSpec.regex("[ab]{0,250}c{0,250}"),
    "minimum_lengths": GrammarSpec.json_schema(
        {"anyOf": [{"type": "string", "minLength": n, "maxLength": 300} for n in (0, 2)]}
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_repetitions_are_not_counted(name):
    spec = AMBIGUOUS[name]
    assert len(compile_both(spec).automaton.table()["counts"]) == 0
    require_equal_walks(spec, walks=4)


def test_string_of_greatest_lengths_ends_at_its_limit():
    limit = 262_144
    matcher = compile_both(GrammarSpec.json_schema({"maxLength": limit})).matcher()
    assert matcher.accept(FIRST_BYTE + ord('"'))
    letter, quotation = FIRST_BYTE + ord("a"), FIRST_BYTE + ord('"')
    assert VOCABULARY.tokens[letter] == b"a"
    for _ in range(limit):
        assert matcher.accept(letter)
    assert not matcher.accept(letter)
    assert [VOCABULARY.tokens[token] for token in legal_ids(matcher)] == [b'"']
    matcher.rollback(1)
    assert matcher.accept(letter)
    assert matcher.accept(quotation)
    assert matcher.accept(STOP)


def test_size_of_automaton_does_not_depend_on_length():
    sizes = set()
    for limit in (300, 30_000, 1 << 30):
        spec = GrammarSpec.json_schema({"type": "string", "maxLength": limit})
        sizes.add(len(compile_automaton(resolve_for_backend(spec, "llguidance"))))
    assert len(sizes) == 1


def test_large_grammar_counts_short_strings_too():
    """Written out, the strings would need more than 32,767 states."""
    strings = {f"name{i}": {"type": "string", "maxLength": 150} for i in range(40)}
    schema = {"type": "object", "properties": strings, "additionalProperties": False}
    few = {"type": "object", "properties": {"name": strings["name0"]}}
    assert len(compile_both(GrammarSpec.json_schema(few)).automaton.table()["counts"]) == 0
    spec = GrammarSpec.json_schema(schema)
    assert len(compile_both(spec).automaton.table()["counts"]) == 40
    require_equal_walks(spec, walks=2)


def test_items_with_a_large_maximum_number_have_an_automaton():
    """The time of compilation is linear in the maximum number of items."""
    items = {"type": "string", "pattern": "^[A-F0-9]{24}$"}
    spec = GrammarSpec.json_schema({"type": "array", "items": items, "maxItems": 1000})
    matcher = compile_both(spec).matcher()
    text = '["' + '", "'.join(["0123456789ABCDEF01234567"] * 1000)
    assert all(map(matcher.accept, tokens_of(text)))
    assert [VOCABULARY.tokens[token] for token in legal_ids(matcher)] == [b'"', b'"]']


def test_invalid_counts_in_serialized_automaton_raise():
    spec = GrammarSpec.json_schema({"type": "string", "maxLength": 300})
    data = compile_automaton(resolve_for_backend(spec, "llguidance"))
    [count] = load(data).table()["counts"]
    stored = np.array(count[:1], np.int32).tobytes() + np.array(count[1:], np.int16).tobytes()
    assert data.count(stored) == 1
    for position in range(0, len(stored), 2):
        broken = stored[:position] + b"\xff\xff" + stored[position + 2 :]
        if position == 0:
            broken = b"\0\0\0\0" + stored[4:]
        with pytest.raises(RuntimeError, match="invalid data"):
            load(data.replace(stored, broken))
