"""Forced text: what to draft where a grammar leaves no choice of what to write."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from .matcher import Matcher

__all__ = ["ForcedText", "LongerTokens", "forced_text"]

_MOST = 64
#: Bytes that are looked ahead at most: a grammar can force text without an end.
_MOST_BYTES = 1024


def few_ids(row: np.ndarray, most: int = _MOST) -> list[int] | None:
    """The ids of a mask row's bits, ascending; None where there are more than ``most``."""
    words = np.flatnonzero(row)
    if len(words) > most:
        return None
    bits = np.unpackbits(row[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    return None if len(word) > most else [int(i) for i in words[word] * 32 + bit]


def forced_text(matcher: Matcher) -> bytes:
    """The text that the grammar forces from where ``matcher`` stands, from its mask rows.

    What all legal tokens begin with is forced. Where that is a token, the matcher takes it and is
    asked again, and in the end is rolled back; so this serves every backend. Text is told up to
    1,024 bytes, and up to a state with more than 64 legal tokens, which a longer text can precede.

    Returns
    -------
    bytes
        Empty where the grammar may end, or has; may end within a character.
    """
    vocabulary = matcher.compiled.backend.vocabulary
    tokens, row = vocabulary.tokens, np.zeros(vocabulary.words, np.int32)
    text, taken = b"", 0
    while len(text) < _MOST_BYTES and not matcher.is_terminated() and matcher.fill(row):
        ids = few_ids(row) or []
        texts = [tokens[i] if i < len(tokens) else b"" for i in ids]
        common = _common(texts)
        text += common
        if not common or common not in texts:
            break
        if not matcher.accept(ids[texts.index(common)]):
            raise RuntimeError(f"the grammar refused {common!r}, which its own mask allows")
        taken += 1
    matcher.rollback(taken)
    return text


def a_choice(matcher: Matcher) -> tuple[int, ...]:
    """Two legal tokens that begin differently; none where that is not seen at once."""
    vocabulary = matcher.compiled.backend.vocabulary
    tokens, row = vocabulary.tokens, np.zeros(vocabulary.words, np.int32)
    if matcher.is_terminated() or not matcher.fill(row):
        return ()
    begins: dict[bytes, int] = {}
    for word in np.flatnonzero(row)[:_MOST]:
        for token in (int(word) * 32 + bit for bit in range(32) if row[word] >> bit & 1):
            begins[(tokens[token] if token < len(tokens) else b"")[:1]] = token
            if len(begins) == 2:
                return tuple(begins.values())
    return ()


def all_legal(matcher: Matcher, tokens: Sequence[int]) -> bool:
    """Whether each of some tokens is legal, tried one by one; cheaper than a mask row."""
    for token in tokens:
        if not matcher.accept(token):
            return False
        matcher.rollback(1)
    return True


def _common(texts: list[bytes]) -> bytes:
    """What all of them begin with."""
    low, high = min(texts, default=b""), max(texts, default=b"")
    same = next((i for i, byte in enumerate(low) if byte != high[i]), len(low))
    return low[:same]


class LongerTokens:
    """Tells whether a legal token begins with a text and goes on after it."""

    def __init__(self, vocabulary: Vocabulary):
        order = sorted((text, token) for token, text in enumerate(vocabulary.tokens) if text)
        self._texts = [text for text, _ in order]
        self._ids = np.array([token for _, token in order], np.int64)

    def legal(self, text: bytes, row: np.ndarray) -> bool:
        """Whether ``row``, int32 words with a bit per id, allows a token longer than ``text``."""
        size = len(text)
        first = bisect_right(self._texts, text)
        end = bisect_right(self._texts, text, lo=first, key=lambda other: other[:size])
        ids = self._ids[first:end]
        return bool(np.any(row.view(np.uint32)[ids >> 5] >> (ids & 31).astype(np.uint32) & 1))


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
