"""LLGuidance's own Python objects, which hold the GIL: the oracle, and the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .matcher import CompiledGrammar, Matcher, row_limit

__all__ = ["StockMatcher", "stock_tokenizer"]


def stock_tokenizer(
    tokens: Sequence[bytes], size: int, stops: Sequence[int], names: Any
) -> Any:
    """LLGuidance's own tokenizer object, without any model's tokenizer behind it."""
    import llguidance

    ids = {token: i for i, token in reversed(list(enumerate(tokens))) if token}
    longest = max(map(len, ids))

    def greedy(data: bytes) -> list[int]:
        out, at = [], 0
        while at < len(data):
            for size in range(min(longest, len(data) - at), 0, -1):
                token = ids.get(data[at : at + size])
                if token is not None:
                    break
            else:
                break  # a byte that no token spells
            out.append(token)
            at += size
        return out

    class Wrapper(llguidance.TokenizerWrapper):
        def __init__(self) -> None:  # what LLGuidance reads; the base wants a tokenizer
            self.tokens = [*tokens, *[b""] * (size - len(tokens))]
            self.special_token_ids = sorted({*stops, *names.values()})
            for name, token in names.items():
                self.tokens[token] = name.encode("utf-8")
            for token in stops:
                self.tokens[token] = self.tokens[token] or b"<stop%d>" % token
            self.eos_token_id, self.bos_token_id = stops[0], None
            self.is_tokenizer_wrapper = True

        def __call__(self, text: bytes | str) -> list[int]:
            data = text.encode("utf-8") if isinstance(text, str) else text
            return greedy(data)

    return llguidance.LLTokenizer(Wrapper(), eos_token=list(stops))


class StockMatcher(Matcher):
    """LLGuidance's own Python matcher, with termination by stop ids kept here."""

    def __init__(self, compiled: CompiledGrammar, stop_ids: tuple[int, ...], handle: Any):
        super().__init__(compiled, stop_ids)
        self._start = handle  # never moved: LLGuidance's rollback is not relied upon
        self._handle = handle.deep_copy()
        self._history: list[int] = []
        self._terminated = self._dead = False
        self._last_word = row_limit(self.size)

    def accept(self, token: int) -> bool:
        if self._terminated or self._dead or not 0 <= token < self.size:
            return False
        if token in self.stop_ids:
            self._terminated = self._handle.is_accepting()
            return self._terminated
        vocabulary = self.compiled.backend.vocabulary
        if token in vocabulary.stop_ids or self._handle.validate_tokens([int(token)]) != 1:
            return False
        if not self._handle.consume_token(int(token)):
            raise RuntimeError(self._handle.get_error())
        self._history.append(int(token))
        return True

    def fill(self, row: np.ndarray) -> bool:
        self._require_running()
        self._require_row(row)
        if not self._dead:
            try:
                self._handle.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            except ValueError as error:  # also where no token is legal
                self._dead = "NoExtensionBias" in str(error)
                if not self._dead:
                    raise RuntimeError(str(error)) from error
        if self._dead:
            row[:] = 0
            return True
        words = row.view(np.uint32)
        for stop in self.compiled.backend.vocabulary.stop_ids:
            words[stop >> 5] &= ~np.uint32(1 << (stop & 31))
        if self._handle.is_accepting():
            for stop in self.stop_ids:
                words[stop >> 5] |= np.uint32(1 << (stop & 31))
        row[-1] &= self._last_word
        return True

    def rollback(self, tokens: int) -> None:
        if tokens <= 0:
            return
        if tokens > len(self._history) + self._terminated:
            raise RuntimeError("rollback of more tokens than were accepted")
        tokens -= self._terminated
        self._terminated = self._dead = False
        if tokens:
            del self._history[-tokens:]
            self._handle = self._start.deep_copy()
            if not self._handle.consume_tokens(self._history):
                raise RuntimeError(self._handle.get_error())

    def is_terminated(self) -> bool:
        return self._terminated
