"""Forced text: what to draft where a grammar leaves no choice of what to write."""

from __future__ import annotations

import numpy as np

from graft.grammar.vocabulary import Vocabulary
from graft.native import _native

__all__ = ["ForcedText"]


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
        texts = vocabulary.tokens
        self.native = _native.guide.Forced([len(t) for t in texts], b"".join(texts), certain)

    def token(self, row: np.ndarray) -> int:
        """The forced token of a mask row, int32 words with a bit per id; -1 where there is none."""
        return int(self.native.token(row))
