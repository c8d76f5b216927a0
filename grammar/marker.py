"""Free text until a marker, then the grammar: for models that reason before they answer.

Before the marker nothing is constrained. The grammar begins with the token after the one that
completes the marker; a token that would carry the marker's end *and* more text is illegal, so that
no byte of the answer escapes the grammar. The marker is a token id, or text that may be spread over
tokens, in accepted tokens and in drafts alike.
"""

from __future__ import annotations

import functools
from typing import Any

from graft.native import _native

from .errors import GrammarError
from .matcher import Matcher, NativeBackedMatcher
from .spec import Marker
from .vocabulary import Vocabulary

__all__ = ["Marker", "marked"]


def marked(inner: Matcher, marker: Marker | None) -> Matcher:
    """``inner`` behind the free text that ends with ``marker``; as it is where there is none."""
    if marker is None:
        return inner
    if set(marker.ids(inner.compiled.backend.vocabulary)) & set(inner.stop_ids):
        raise GrammarError("marker: its token is one of the request's stop ids")
    return MarkedMatcher(inner, marker)


@functools.lru_cache(maxsize=32)
def _native_marker(vocabulary: Vocabulary, marker: Marker) -> Any:
    return _native.guide.Marker(
        marker.ids(vocabulary),
        marker.text.encode("utf-8"),
        vocabulary.tokens,
        vocabulary.size,
        marker.required,
    )


class MarkedMatcher(NativeBackedMatcher):
    """The native scanner in front of a matcher."""

    def __init__(self, inner: Matcher, marker: Marker):
        native = _native.guide.MarkedMatcher(
            inner.native,
            _native_marker(inner.compiled.backend.vocabulary, marker),
            inner.stop_ids,
        )
        super().__init__(inner.compiled, inner.stop_ids, native)
        self._inner = inner  # its native side is borrowed

