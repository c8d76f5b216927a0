"""Forced tokens: drafts for positions where the grammar allows only one text.

This is jump-forward decoding: a forced token is drafted without the drafter's model.
"""

from __future__ import annotations

import numpy as np

from graft.grammar.vocabulary import Vocabulary
from graft.native import _native

__all__ = ["ForcedTokens"]


class ForcedTokens:
    """Determines the forced token of a mask row.

    There is a forced token if every legal token is a prefix of the longest legal token: all legal
    tokens then spell the beginning of the same text and differ only in length. The forced token is
    the longest legal token. In nine of ten cases, the tokenizer would use the same token.

    Forced tokens do not change the distribution of the output, because the choice depends only on
    the mask row, and a forced token is verified like any other draft. If only one id is legal,
    verification cannot reject the forced token.

    Parameters
    ----------
    vocabulary
        Vocabulary with the text of each id. An id without text, such as a stop id, is forced only
        if no other id is legal.
    unique_only
        If True, a token is forced only if no other id is legal. Verification then never rejects a
        forced token.
    """

    def __init__(self, vocabulary: Vocabulary, *, unique_only: bool = False):
        texts = vocabulary.tokens
        lengths = [len(text) for text in texts]
        self.native = _native.guide.Forced(lengths, b"".join(texts), unique_only)

    def token(self, row: np.ndarray) -> int:
        """Return the forced token of a mask row (int32, one bit per id); -1 if there is none."""
        return int(self.native.token(row))
