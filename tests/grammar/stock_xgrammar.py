"""XGrammar's own matcher objects, which hold the GIL: the oracle of the native ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from graft.grammar import CompiledGrammar, Matcher, Vocabulary, XGrammarBackend
from graft.grammar.backends.base import ending_ids
from graft.grammar.backends.xgrammar import library


class StockXGrammar(XGrammarBackend):
    """A backend whose matchers are XGrammar's, kept from what it would warn of."""

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """A new matcher at the start."""
        return StockMatcher(compiled, ending_ids(self, compiled, stop_ids))


class StockMatcher(Matcher):
    """Ids that are no text and no stop id of this request are never legal."""

    def __init__(self, compiled: CompiledGrammar, stop_ids: tuple[int, ...]):
        super().__init__(compiled, stop_ids)
        self._handle: Any = library().GrammarMatcher(
            compiled.native, list(stop_ids), False, -1, None
        )
        vocabulary: Vocabulary = compiled.backend.vocabulary
        ids = range(vocabulary.words * 32)
        self._known = np.array([vocabulary.is_text(i) or i in stop_ids for i in ids])

    def accept(self, token: int) -> bool:
        if not 0 <= token < self.size or not self._known[token] or self.is_terminated():
            return False
        return bool(self._handle.accept_token(int(token), False))

    def fill(self, row: np.ndarray) -> bool:
        self._require_running()
        self._handle.fill_next_token_bitmask(row, 0, False)
        row &= np.packbits(self._known, bitorder="little").view(np.int32)
        return True

    def rollback(self, tokens: int) -> None:
        self._handle.rollback(int(tokens))

    def is_terminated(self) -> bool:
        return bool(self._handle.is_terminated())
