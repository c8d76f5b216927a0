"""Forced tokens: the draft where the grammar allows only one text (jump-forward decoding)."""

from __future__ import annotations

import numpy as np

from graft.grammar.vocabulary import Vocabulary
from graft.native import _native

__all__ = ["ForcedTokens"]


class ForcedTokens:
    """Determines the forced token of a mask row.

    A text is forced if every legal token is a prefix of the longest legal token: all of them spell
    the same text and differ only in length. The longest token is drafted; in nine of ten cases it
    is the one that a tokenizer would use. The choice depends on the mask row only, hence on the
    prefix only, and the draft is verified like any other, so the output distribution does not
    change. If only one id is legal, verification cannot reject it.

    Parameters
    ----------
    vocabulary
        Text of each id. An id without text, such as a stop id, is forced only if it is the only
        legal id.
    unique_only
        Whether a token is forced only if it is the only legal id, so that verification cannot
        reject it.
    """

    def __init__(self, vocabulary: Vocabulary, *, unique_only: bool = False):
        texts = vocabulary.tokens
        lengths = [len(text) for text in texts]
        self.native = _native.guide.Forced(lengths, b"".join(texts), unique_only)

    def token(self, row: np.ndarray) -> int:
        """Return the forced token of a mask row (int32, one bit per id), or -1 if there is none."""
        return int(self.native.token(row))
