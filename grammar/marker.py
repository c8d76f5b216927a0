"""Free text until a marker, then the grammar: for models that reason before they answer.

Before the marker nothing is constrained. The grammar begins with the token after the one that
completes the marker; a token that would carry the marker's end *and* more text is illegal, so that
no byte of the answer escapes the grammar. The marker is a token id, or text that may be spread over
tokens, in accepted tokens and in drafts alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import GrammarError
from .matcher import Matcher, NativeBackedMatcher
from .vocabulary import Vocabulary

__all__ = ["Marker", "PythonMarkedMatcher", "marked"]


@dataclass(frozen=True)
class Marker:
    """Where free text ends.

    Attributes
    ----------
    text
        The marker as text, or empty. Where an added token of the tokenizer has this very text, its
        id is the marker too.
    token
        The marker as a token id, or None.
    required
        ``False``: a stop id in the free text ends the output, without the grammar ever having
        begun. ``True``: stop ids are illegal until the marker has come.
    """

    text: str = ""
    token: int | None = None
    required: bool = False

    def ids(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        """Tokens that are the marker by themselves.

        Raises
        ------
        GrammarError
            If the id is out of range or a stop id.
        """
        ids = [] if self.token is None else [self.token]
        if self.text in vocabulary.names:
            ids.append(vocabulary.names[self.text])
        for token in ids:
            if not 0 <= token < vocabulary.size:
                raise GrammarError(f"marker: token {token} is outside [0, {vocabulary.size})")
            if token in vocabulary.stop_ids:
                raise GrammarError(f"marker: token {token} is a stop id")
        return tuple(dict.fromkeys(ids))


def marked(inner: Matcher, marker: Marker | None) -> Matcher:
    """``inner`` behind the free text that ends with ``marker``; as it is where there is none."""
    if marker is None:
        return inner
    if set(marker.ids(inner.compiled.backend.vocabulary)) & set(inner.stop_ids):
        raise GrammarError("marker: its token is one of the request's stop ids")
    if inner.native is None:
        return PythonMarkedMatcher(inner, marker)
    return NativeMarkedMatcher(inner, marker)


@functools.lru_cache(maxsize=32)
def _native_marker(vocabulary: Vocabulary, marker: Marker) -> Any:
    from graft.native import _native

    return _native.guide.Marker(
        marker.ids(vocabulary),
        marker.text.encode("utf-8"),
        vocabulary.tokens,
        vocabulary.size,
        marker.required,
    )


class NativeMarkedMatcher(NativeBackedMatcher):
    """The native scanner in front of a matcher with a native side."""

    def __init__(self, inner: Matcher, marker: Marker):
        from graft.native import _native

        native = _native.guide.MarkedMatcher(
            inner.native,
            _native_marker(inner.compiled.backend.vocabulary, marker),
            inner.stop_ids,
        )
        super().__init__(inner.compiled, inner.stop_ids, native)
        self._inner = inner  # its native side is borrowed


class PythonMarkedMatcher(Matcher):
    """The same in Python alone, for any matcher: it keeps the free text and searches it."""

    def __init__(self, inner: Matcher, marker: Marker):
        super().__init__(inner.compiled, inner.stop_ids)
        self._inner, self._marker = inner, marker
        self._vocabulary = inner.compiled.backend.vocabulary
        self._ids = marker.ids(self._vocabulary)
        self._text = marker.text.encode("utf-8")
        # What was searched before each free token, then what is to be searched now.
        self._tails: list[bytes] = [b""]
        self._inside = 0
        self._started = self._stopped = False

    def accept(self, token: int) -> bool:
        if self._started:
            accepted = self._inner.accept(token)
            self._inside += accepted
            return accepted
        if self._stopped or not 0 <= token < self.size:
            return False
        if token in self.stop_ids:
            if self._marker.required:
                return False
            self._stopped = True
            self._tails.append(b"")
            return True
        found, tail = self._search(self._tails[-1], token)
        if found is None:
            return False
        self._started = found
        self._tails.append(tail)
        return True

    def _search(self, tail: bytes, token: int) -> tuple[bool | None, bytes]:
        """Whether the marker ends with ``token`` (None: within it), and the new tail."""
        if token in self._ids:
            return True, b""
        piece = self._vocabulary.tokens[token] if token < len(self._vocabulary.tokens) else b""
        if not self._text or not piece:
            return False, b""  # a token that is no text breaks a marker
        text = tail + piece
        at = text.find(self._text)
        if at >= 0:
            return (True if at + len(self._text) == len(text) else None), b""
        return False, text[max(0, len(text) - len(self._text) + 1) :]

    def fill(self, row: np.ndarray) -> bool:
        self._require_running()
        if self._started:
            return self._inner.fill(row)
        tail = self._tails[-1]
        legal = np.zeros(len(row) * 32, bool)
        legal[: self.size] = [
            self._search(tail, token)[0] is not None for token in range(self.size)
        ]
        if legal[: self.size].all() and not self._marker.required:
            return False
        legal[list(self.stop_ids)] = not self._marker.required
        row[:] = np.packbits(legal, bitorder="little").view(np.int32)
        return True

    def rollback(self, tokens: int) -> None:
        inside = min(tokens, self._inside)
        outside = tokens - inside
        if outside >= len(self._tails):
            raise RuntimeError("rollback of more free text than there is")
        if inside:
            self._inner.rollback(inside)
            self._inside -= inside
        if outside:
            del self._tails[-outside:]
            self._started = self._stopped = False

    def is_terminated(self) -> bool:
        return self._inner.is_terminated() if self._started else self._stopped
