"""Tests of budgets and distances: matchers that know how many tokens complete their text."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guide_util import BYTES, STOP
from reference_language import LanguageBackend

from graft.grammar import (
    CompiledGrammar,
    GrammarError,
    GrammarSpec,
    Matcher,
    Vocabulary,
    check_output,
    make_backend,
)
from graft.grammar.backends.llguidance import LLGuidanceBackend
from graft.grammar.matcher import NO_BUDGET
from graft.grammar.spec import Marker
from graft.models.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"


class CountdownMatcher(Matcher):
    """Matcher of the texts ``a*b``: it records the budgets of its rows."""

    def __init__(self) -> None:
        backend = make_backend("llguidance", BYTES)
        super().__init__(CompiledGrammar(backend, GrammarSpec.regex("a*b"), None, 0), (STOP,))
        self.text: list[int] = []
        self.budgets: list[int] = []
        self.broken = False

    def accept(self, token):
        if token not in self._legal():
            return False
        self.text.append(token)
        return True

    def fill(self, row, budget=NO_BUDGET):
        self.budgets.append(budget)
        row[:] = 0
        for token in self._legal():
            row[token // 32] |= np.array(1 << (token % 32), np.uint32).astype(np.int32)
        return True

    def rollback(self, tokens):
        del self.text[len(self.text) - tokens :]

    def is_terminated(self):
        return STOP in self.text

    def distance(self):
        if self.broken:
            return -7
        return 0 if self.is_terminated() else 1 + (ord("b") not in self.text)

    def _legal(self):
        if ord("b") in self.text:
            return () if STOP in self.text else (STOP,)
        return (ord("a"), ord("b"))


def test_python_matcher_passes_budget_and_distance():
    matcher = CountdownMatcher()
    row = np.zeros(matcher.words, np.int32)
    assert matcher.native.distance() == 2
    assert matcher.native.fill(row) and matcher.native.fill(row, 9)
    assert matcher.budgets == [NO_BUDGET, 9]
    assert matcher.native.accept(ord("b"))
    assert matcher.native.distance() == 1
    matcher.broken = True
    with pytest.raises(RuntimeError, match="number of tokens"):
        matcher.native.distance()


def test_matcher_without_distance_ignores_the_budget():
    backend = LLGuidanceBackend(BYTES, automata=False)
    matcher = backend.compile(GrammarSpec.lark("start: /a*b/")).matcher()
    assert matcher.distance() is None
    rows = np.zeros((2, matcher.words), np.int32)
    assert matcher.fill(rows[0]) == matcher.fill(rows[1], 1)
    assert np.array_equal(rows[0], rows[1])


#: Bytes and longer tokens that overlap with an opening, a marker and the texts of the grammars.
TOKENS = [
    *(bytes([byte]) for byte in b"<think>/abc \n"),
    *(b"</", b"think>", b"</think>", b"<th", b"k>", b"a</think>", b"</think>a", b"<think></think>"),
    *(b"\n\n", b" <", b"\n<think>", b"ab", b"abc", b"<t", b"</think></", b"b>", b"aaa"),
    *(b"", b"", b"", b""),
]
END, OTHER_END, THINK_ID, MARKER_ID = range(len(TOKENS) - 4, len(TOKENS))
NAMES = {"<think>": THINK_ID, "</think>": MARKER_ID}
SMALL = Vocabulary(TOKENS, len(TOKENS) + 3, [END, OTHER_END])
NAMED = Vocabulary(TOKENS, len(TOKENS) + 3, [END, OTHER_END], NAMES)
GRAMMARS = ("(ab|c)*a", "a{2,5}", "<t(hin|able)|ok|( |\n)ab*c", "(<think>a)+b")
MARKERS: dict[str, dict[str, Any]] = {
    "required": {"required": True},
    "optional": {},
    "space": {"required": True, "skips_space": True},
    "opening": {"required": True, "opening": "<think>", "skips_space": True},
    "optional opening": {"opening": "<think>"},
}


def text_of(tokens: list[int], vocabulary: Vocabulary) -> bytes:
    """Return the text of tokens, with the names of added tokens."""
    names = {token: name.encode() for name, token in vocabulary.names.items()}
    texts = [TOKENS[token] if token < len(TOKENS) else b"" for token in tokens]
    return b"".join(names.get(token, text) for token, text in zip(tokens, texts, strict=True))


def row_ids(matcher: Matcher, budget: int = NO_BUDGET) -> list[int]:
    """Return the ids of a matcher's row."""
    row = np.zeros(matcher.words, np.int32)
    if not matcher.fill(row, budget):
        return list(range(matcher.size))
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def distance_after(matcher: Matcher, token: int) -> int | None:
    """Return the distance after a legal token. The matcher is unchanged."""
    assert matcher.accept(token), token
    distance = matcher.distance()
    matcher.rollback(1)
    return distance


def close_randomly(matcher: Matcher, budget: int, rng: np.random.Generator) -> list[int]:
    """Sample an output from rows with budgets, and return its tokens.

    Each row is compared with its definition: the legal tokens after which the distance is less than
    the budget. If a row has many legal tokens, some of them are compared.
    """
    tokens: list[int] = []
    while not matcher.is_terminated():
        distance = matcher.distance()
        assert distance is not None and 1 <= distance <= budget
        legal = row_ids(matcher)
        row = row_ids(matcher, budget)
        assert set(row) <= set(legal)
        if len(legal) <= 100:
            compared = legal
        else:
            compared = rng.choice(legal, 40).tolist() + rng.choice(row, 40).tolist()
        nearest = {token: distance_after(matcher, token) for token in compared}
        within = {token for token in compared if nearest[token] < budget}
        assert within == set(row) & set(compared), (tokens, budget)
        if compared is legal:
            assert min(nearest.values()) < distance
        if distance == 1:
            assert set(matcher.stop_ids) <= set(row)
        # Tokens far from the end are preferred, so that most outputs use their whole budget.
        far = [token for token in within if nearest[token] >= distance] or row
        token = int(rng.choice(far if rng.random() < 0.7 else row))
        assert matcher.accept(token)
        tokens.append(token)
        budget -= 1
        if rng.random() < 0.1 and len(tokens) > 2:
            matcher.rollback(2)
            assert matcher.native.accept_all(tokens[-2:]) == 2
    assert matcher.distance() == 0
    return tokens


@pytest.mark.parametrize("vocabulary", [SMALL, NAMED], ids=["spelled", "named"])
@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("pattern", GRAMMARS)
def test_marked_matcher_closes_within_every_budget(pytestconfig, pattern, marker, vocabulary):
    """Free text ends in time for the marker and the answer."""
    options = MARKERS[marker]
    grammar = LanguageBackend(vocabulary).compile(GrammarSpec.regex(pattern))
    grammar.spec = replace(grammar.spec, marker=Marker("</think>", **options))
    first = grammar.matcher().distance()
    rng = np.random.default_rng(len(pattern))
    lengths = set()
    for extra in [*range(12), 30] * (4 if pytestconfig.getoption("--full") else 1):
        tokens = close_randomly(grammar.matcher(), first + extra, rng)
        text = text_of(tokens, vocabulary)
        is_free = text.lstrip().startswith(b"<think>") or not options.get("opening")
        _, found, answer = text.partition(b"</think>")
        answer = answer if is_free else text
        assert found or not is_free or not options.get("required")
        if found or not is_free:
            spaces = len(answer) - len(answer.lstrip()) if options.get("skips_space") else 0
            ends = [answer[skipped:] for skipped in range(spaces + 1)]
            assert any(re.fullmatch(pattern.encode(), end) for end in ends), text
        lengths.add(len(tokens) - first - extra)
    assert 0 in lengths


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("limit", [9, 12, 20])
@pytest.mark.full("[12-")
def test_marked_matcher_limits_reasoning(pytestconfig, marker, limit):
    """The marker is complete within `max_reasoning_tokens`, with and without a budget."""
    grammar = LanguageBackend(SMALL).compile(GrammarSpec.regex("(ab|c)*a"))
    grammar.spec = replace(grammar.spec, marker=Marker("</think>", **MARKERS[marker]))
    rng = np.random.default_rng(limit)
    longest = 0
    for trial in range(0, 40, 1 if pytestconfig.getoption("--full") else 2):
        matcher = grammar.matcher(max_reasoning_tokens=limit)
        tokens = close_randomly(matcher, limit + 3 + trial, rng)
        text = text_of(tokens, SMALL)
        end = text.find(b"</think>")
        if end < 0 or (not text.lstrip().startswith(b"<think>") and MARKERS[marker].get("opening")):
            continue
        sizes = np.cumsum([len(text_of([token], SMALL)) for token in tokens])
        count = 1 + int(np.searchsorted(sizes, end + len(b"</think>")))
        assert count <= limit
        longest = max(longest, count)
    assert longest == limit


def test_marked_matcher_refuses_too_small_reasoning_limit():
    grammar = LanguageBackend(BYTES).compile(GrammarSpec.regex("a"))
    with pytest.raises(GrammarError, match="the grammar has no marker"):
        grammar.matcher(max_reasoning_tokens=9)
    grammar.spec = replace(grammar.spec, marker=Marker("</think>"))
    assert grammar.matcher(max_reasoning_tokens=8).distance() == 8 + 2
    with pytest.raises(GrammarError, match="is 7, but the marker needs at least 8 tokens"):
        grammar.matcher(max_reasoning_tokens=7)
    grammar.spec = replace(grammar.spec, marker=Marker("</think>", opening="<think>"))
    assert grammar.matcher(max_reasoning_tokens=15).distance() == 2
    with pytest.raises(GrammarError, match="at least 15 tokens"):
        grammar.matcher(max_reasoning_tokens=14)


def test_marked_matcher_without_tokens_for_marker_has_no_distance():
    tokens = [text for text in TOKENS if b"/" not in text or len(text) == 8] + [b""]
    vocabulary = Vocabulary(tokens, len(tokens), [len(tokens) - 1])
    grammar = LanguageBackend(vocabulary).compile(GrammarSpec.regex("a"))
    assert grammar.matcher().distance() == 2
    grammar.spec = replace(grammar.spec, marker=Marker("</think>"))
    assert grammar.matcher().distance() is None
    with pytest.raises(GrammarError, match="do not spell the marker"):
        grammar.matcher(max_reasoning_tokens=50)


@pytest.mark.parametrize("count", [12, pytest.param(600, marks=pytest.mark.full)])
def test_real_schemas_close_within_every_budget(shared_data, count):
    """Outputs of schemas of MaskBench are complete and valid for budgets near the smallest one."""
    tokenizer = Tokenizer(DEMO)
    vocabulary = Vocabulary.from_tokenizer(tokenizer.backend, 2048, tokenizer.stop_ids)
    backend = LLGuidanceBackend(vocabulary)
    lines = []
    for path in sorted((shared_data / "maskbench").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines += file
    rng = np.random.default_rng(7)
    closed = 0
    for index in rng.permutation(len(lines))[:count]:
        schema = json.loads(lines[index])["schema"]
        try:
            grammar = backend.compile(GrammarSpec.json_schema(schema))
        except GrammarError:
            continue
        distance = grammar.matcher().distance()
        if distance is None:
            continue
        closed += 1
        for extra in (0, 1, 7, 30):
            tokens = close_randomly(grammar.matcher(), distance + extra, rng)
            text = b"".join(vocabulary.tokens[token] for token in tokens).decode()
            if re.search("[eE][+-]?[0-9]{9}", text):
                continue  # an exponent that the validator does not read
            try:
                assert check_output(schema, text), (schema, text)
            except GrammarError:
                json.loads(text)  # the validator takes too long
    assert closed > count / 2
