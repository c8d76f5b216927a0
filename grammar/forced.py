"""Forced text: what to draft where a grammar leaves no choice of what to write."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from .vocabulary import Vocabulary

__all__ = ["ForcedText"]

_MOST = 64


def few_ids(row: np.ndarray, most: int = _MOST) -> list[int] | None:
    """The ids of a mask row's bits, ascending; None where there are more than ``most``."""
    words = np.flatnonzero(row)
    if len(words) > most:
        return None
    bits = np.unpackbits(row[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    return None if len(word) > most else [int(i) for i in words[word] * 32 + bit]


class ForcedText:
    """Tells of a mask row which token to draft, if its text is forced.

    Text is forced where every legal token is a beginning of the longest one: they spell the same
    text and differ in how much of it they take. The longest is drafted: nine times out of ten it is
    how a tokenizer writes that text. The choice depends on the row alone, hence on the prefix
    alone, and the draft is tested as any other, so the distribution of outputs stays what it is.
    Where one id is legal, verification cannot refuse it.

    Parameters
    ----------
    vocabulary
        Bytes of each id. An id without text, such as a stop id, is forced only where it is the one
        legal id.
    certain
        Only what verification cannot refuse: a token counts as forced where it is the one legal id.
    """

    def __init__(self, vocabulary: Vocabulary, *, certain: bool = False):
        self._tokens = vocabulary.tokens
        self._certain, self._most = certain, 1 if certain else _MOST

    @cached_property
    def native(self) -> Any:
        """The same for the native worker."""
        from graft.native import _native

        lengths = [len(text) for text in self._tokens]
        return _native.guide.Forced(lengths, b"".join(self._tokens), self._certain)

    def token(self, row: np.ndarray) -> int:
        """The forced token of a mask row, int32 words with a bit per id; -1 where there is none."""
        ids = few_ids(row, self._most)
        if not ids:
            return -1
        if len(ids) == 1:
            return ids[0]
        texts = [self._tokens[i] if i < len(self._tokens) else b"" for i in ids]
        longest = max(texts, key=len)
        if not all(text and longest.startswith(text) for text in texts):
            return -1
        return ids[texts.index(longest)]
