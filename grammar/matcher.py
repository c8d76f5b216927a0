"""One request's place in its grammar, whichever backend stands behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import GrammarError
from .forced import forced_text

if TYPE_CHECKING:
    from .backend import GrammarBackend
    from .spec import Spec

__all__ = ["CompiledGrammar", "Matcher", "NativeBackedMatcher", "row_limit"]


class CompiledGrammar:
    """A grammar compiled for one vocabulary; shared by any number of matchers, read-only.

    Parameters
    ----------
    backend
        Whose grammar it is.
    spec
        What it was compiled from.
    native
        The backend's own form of it.
    nbytes
        Memory it takes, in bytes, as far as the backend tells.

    Attributes
    ----------
    pace
        How fast its matchers are; made and kept by guided decoders.
    """

    pace: Any = None

    def __init__(self, backend: GrammarBackend, spec: Spec, native: Any, nbytes: int):
        self.backend = backend
        self.spec = spec
        self.native = native
        self.nbytes = nbytes


class Matcher(ABC):
    """Which tokens may follow the ones accepted so far.

    One matcher is used by one thread at a time; the guided decoder owns it while replays that name
    it are in flight. A backend in Python alone implements the abstract methods and leaves
    ``native`` None: its matchers run on the ``"python"`` transport.

    Attributes
    ----------
    compiled, stop_ids
        The grammar, and the ids that end it once it is complete.
    size
        Logit columns of the vocabulary.
    native
        The matcher as the native worker drives it, sharing this one's state, or None.
    claimed
        Taken by a request of a guided decoder: its state is not the caller's any more.
    """

    native: Any = None

    def __init__(self, compiled: CompiledGrammar, stop_ids: tuple[int, ...]):
        self.compiled = compiled
        self.stop_ids = stop_ids
        self.size = compiled.backend.vocabulary.size
        self.claimed = False

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Take one more token. False, and no change, if it is illegal, out of range or too late."""

    @abstractmethod
    def fill(self, row: np.ndarray) -> bool:
        """Write the legal tokens as bits of ``row``, contiguous int32 ``[ceil(size / 32)]``.

        Returns
        -------
        bool
            False where nothing is constrained: the row is then left as it was.

        Raises
        ------
        GrammarError
            After termination: there is no next token.
        """

    @abstractmethod
    def rollback(self, tokens: int) -> None:
        """Undo the last ``tokens`` accepted tokens; a stop token counts as one."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether a stop token was accepted."""

    def legal(self) -> np.ndarray:
        """The legal token ids, ascending, int64."""
        row = np.zeros((self.size + 31) // 32, np.int32)
        if not self.fill(row):
            return np.arange(self.size)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))

    def forced_text(self) -> bytes:
        """The text that the grammar forces from here on, empty where there is a choice.

        From mask rows, for any backend; one that knows better may override it. It must not change
        the matcher's state, and must come to an end where the forced text does not.
        """
        return forced_text(self)

    def fresh(self) -> Matcher:
        """A matcher of the same grammar and stop ids at the start."""
        return self.compiled.backend.matcher(self.compiled, self.stop_ids)

    def _require_running(self) -> None:
        if self.is_terminated():
            raise GrammarError("matcher: cannot fill a mask after the grammar has terminated")

    def _require_row(self, row: np.ndarray) -> None:
        # The libraries look at the address alone: strides and other types would be written over.
        if row.dtype != np.int32 or row.shape != ((self.size + 31) // 32,):
            raise GrammarError(
                f"mask row: is {row.dtype} {list(row.shape)}, "
                f"expected int32 [{(self.size + 31) // 32}]"
            )
        if not row.flags.c_contiguous:
            raise GrammarError("mask row: must be contiguous")


class NativeBackedMatcher(Matcher):
    """A matcher whose Python methods call the native one."""

    def __init__(self, compiled: CompiledGrammar, stop_ids: tuple[int, ...], native: Any):
        super().__init__(compiled, stop_ids)
        self.native = native

    def accept(self, token: int) -> bool:
        return -(2**31) <= token < 2**31 and bool(self.native.accept(int(token)))

    def fill(self, row: np.ndarray) -> bool:
        self._require_running()
        return bool(self.native.fill(row))

    def rollback(self, tokens: int) -> None:
        self.native.rollback(int(tokens))

    def is_terminated(self) -> bool:
        return bool(self.native.is_terminated())


def row_limit(size: int) -> np.int32:
    """The bits of a row's last word that stand for an id."""
    used = (size - 1) % 32 + 1
    return np.array([(1 << used) - 1], np.uint32).view(np.int32)[0]
