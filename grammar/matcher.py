"""What a grammar backend is, what it compiles, and the matchers that it makes.

A matcher is one request's place in its grammar, whichever backend stands behind it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from graft.grammar.errors import GrammarError, clean_message
from graft.grammar.spec import Marker, Spec
from graft.grammar.vocabulary import Vocabulary
from graft.native import _native

__all__ = ["CompiledGrammar", "GrammarBackend", "Matcher", "NativeBackedMatcher"]


@runtime_checkable
class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary and makes matchers.

    A backend may be written in Python alone: see `Matcher`. A JSON schema that names no backend
    comes as it stands (unless `resolved` knows the backend): enforce all of it, or
    refuse it.

    ``name`` is for messages.
    """

    name: str
    vocabulary: Vocabulary

    def compile(self, spec: Spec) -> CompiledGrammar:
        """Compile on the calling thread; ``GrammarError`` with the reason if it is refused."""

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """A new matcher at the start; ``stop_ids`` end it, the vocabulary's if absent.

        It is independent of every other: matchers of one grammar run on different threads. Free
        text before the grammar is no business of it, see `CompiledGrammar.matcher`.
        """


class CompiledGrammar:
    """A grammar compiled for one vocabulary; shared by any number of matchers, read-only.

    Parameters
    ----------
    backend, spec
        Whose grammar it is, and what it was compiled from.
    native
        The backend's own form of it.
    nbytes
        Memory it takes, in bytes, as far as the backend tells.
    """

    def __init__(self, backend: GrammarBackend, spec: Spec, native: Any, nbytes: int):
        self.backend = backend
        self.spec = spec
        self.native = native
        self.nbytes = nbytes
        self.pace = _native.guide.Pace()  # what the native worker knows of its matchers' speed

    def matcher(self, stop_ids: Iterable[int] | None = None, tokens: Iterable[int] = ()) -> Matcher:
        """A new matcher that has taken some tokens, behind free text where the spec says so.

        ``stop_ids`` end it, the vocabulary's if absent. ``GrammarError`` if the grammar refuses a
        token, or a stop id is the marker too.
        """
        matcher = self.backend.matcher(self, stop_ids)
        if self.spec.marker is not None:
            matcher = _marked(matcher, self.spec.marker)
        for index, token in enumerate(tokens):
            if not matcher.accept(token):
                raise GrammarError(f"matcher: the grammar refuses token {token}, number {index}")
        return matcher


class Matcher(ABC):
    """Which tokens may follow the ones accepted so far.

    One matcher is used by one thread at a time; the guided decoder owns it while replays that name
    it are in flight. A backend in Python alone implements the abstract methods; the native worker
    calls them, on its own threads, with the GIL held.

    Attributes
    ----------
    compiled, stop_ids
        The grammar, and the ids that end it once it is complete.
    size, words
        Logit columns of the vocabulary, and int32 words of a mask row.
    claimed
        Taken by a request of a guided decoder: its state is not the caller's any more.
    """

    def __init__(self, compiled: CompiledGrammar, stop_ids: tuple[int, ...]):
        self.compiled = compiled
        self.stop_ids = stop_ids
        self.size = compiled.backend.vocabulary.size
        self.words = compiled.backend.vocabulary.words
        self.claimed = False

    @functools.cached_property
    def native(self) -> Any:
        """The matcher as the native worker drives it, sharing this one's state."""
        return _native.guide.PythonMatcher(self, np.zeros(self.words, np.int32), self.size)

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Take one more token. False, and no change, if it is illegal, out of range or too late."""

    @abstractmethod
    def fill(self, row: np.ndarray) -> bool:
        """Write the legal tokens as bits of ``row``, contiguous int32 ``[ceil(size / 32)]``.

        False where nothing is constrained: the row is then left as it was. ``GrammarError`` after
        termination: there is no next token.
        """

    @abstractmethod
    def rollback(self, tokens: int) -> None:
        """Undo the last ``tokens`` accepted tokens; a stop token counts as one."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether a stop token was accepted."""

    def legal(self) -> np.ndarray:
        """The legal token ids, ascending, int64."""
        row = np.zeros(self.words, np.int32)
        if not self.fill(row):
            return np.arange(self.size)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))

    def _require_running(self) -> None:
        if self.is_terminated():
            raise GrammarError("matcher: cannot fill a mask after the grammar has terminated")

    def _require_row(self, row: np.ndarray) -> None:
        if not isinstance(row, np.ndarray):
            raise GrammarError(f"mask row: must be an int32 array, got {row!r}")
        # The libraries look at the address alone: strides and other types would be written over.
        if row.dtype != np.int32 or row.shape != (self.words,) or not row.flags.c_contiguous:
            raise GrammarError(
                f"mask row: is {row.dtype} {list(row.shape)}, "
                f"expected contiguous int32 [{self.words}]"
            )


def _typed(method: Callable[..., Any]) -> Callable[..., Any]:
    """A failure inside a backend is a GrammarError, with the backend's words."""

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except RuntimeError as error:
            raise GrammarError(f"matcher: {clean_message(error)}") from None

    return call


class NativeBackedMatcher(Matcher):
    """A matcher whose Python methods call the native one, which borrows what is kept."""

    def __init__(
        self, compiled: CompiledGrammar, stop_ids: tuple[int, ...], native: Any, keep: Any = None
    ):
        super().__init__(compiled, stop_ids)
        self.native = native
        self._keep = keep

    @_typed
    def accept(self, token: int) -> bool:
        return -(2**31) <= token < 2**31 and bool(self.native.accept(int(token)))

    @_typed
    def fill(self, row: np.ndarray) -> bool:
        self._require_running()
        self._require_row(row)
        return bool(self.native.fill(row))

    @_typed
    def rollback(self, tokens: int) -> None:
        if not isinstance(tokens, (int, np.integer)) or not 0 <= tokens < 2**31:
            raise GrammarError(f"rollback: takes a number of tokens, got {tokens!r}")
        self.native.rollback(int(tokens))

    @_typed
    def is_terminated(self) -> bool:
        return bool(self.native.is_terminated())


@functools.lru_cache(maxsize=32)
def _native_marker(vocabulary: Vocabulary, marker: Marker) -> Any:
    return _native.guide.Marker(
        marker.ids(vocabulary),
        marker.text.encode("utf-8"),
        vocabulary.tokens,
        vocabulary.size,
        marker.required,
    )


def _marked(inner: Matcher, marker: Marker) -> Matcher:
    """The native scanner in front of a matcher."""
    compiled = inner.compiled
    vocabulary = inner.compiled.backend.vocabulary
    if set(marker.ids(vocabulary)) & set(inner.stop_ids):
        raise GrammarError("marker: its token is one of the request's stop ids")
    native = _native.guide.MarkedMatcher(
        inner.native, _native_marker(vocabulary, marker), inner.stop_ids
    )
    return NativeBackedMatcher(compiled, inner.stop_ids, native, keep=inner)
