"""Tests of budgets and distances: matchers that know how many tokens complete their text."""

from __future__ import annotations

import numpy as np
import pytest
from guide_util import BYTES, STOP

from graft.grammar import CompiledGrammar, GrammarSpec, Matcher, make_backend
from graft.grammar.matcher import NO_BUDGET


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
    matcher = make_backend("llguidance", BYTES).compile(GrammarSpec.lark("start: /a*b/")).matcher()
    assert matcher.distance() is None
    rows = np.zeros((2, matcher.words), np.int32)
    assert matcher.fill(rows[0]) == matcher.fill(rows[1], 1)
    assert np.array_equal(rows[0], rows[1])
