"""One request's place in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import GrammarError

if TYPE_CHECKING:
    from .spec import GrammarSpec
    from .xgrammar import XGrammarBackend

__all__ = ["CompiledGrammar", "Matcher"]


class CompiledGrammar:
    """A grammar compiled for one vocabulary; shared by any number of matchers, read-only."""

    def __init__(self, backend: XGrammarBackend, spec: GrammarSpec, native: Any):
        self.backend = backend
        self.spec = spec
        self.native = native

    @property
    def nbytes(self) -> int:
        """Memory the compiled grammar takes, in bytes, as XGrammar counts it."""
        return int(self.native.memory_size_bytes())


class Matcher:
    """A matcher: which tokens may follow the ones accepted so far.

    One matcher is used by one thread at a time; the guided decoder owns it while replays that name
    it are in flight. These Python methods are the oracle and the ``"python"`` transport.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        native: Any,
        stop_ids: tuple[int, ...],
        acceptable: np.ndarray,
    ):
        self.compiled = compiled
        self.native = native
        self.stop_ids = stop_ids
        self.acceptable = acceptable  # bit per id that is text or a stop id, uint32 words
        self.size = compiled.backend.vocabulary.size
        used = (self.size - 1) % 32 + 1  # ids in a row's last word
        self._last_word = np.array([(1 << used) - 1], np.uint32).view(np.int32)[0]
        self.claimed = False  # by a request of a guided decoder: its state is not ours any more

    @property
    def handle(self) -> int:
        """Address of the native matcher, valid while this object lives."""
        return int(self.native.__chandle__())

    def accept(self, token: int) -> bool:
        """Take one more token. False, and no change, if it is illegal, out of range or too late."""
        # XGrammar would refuse these as well, and print a warning.
        if not self.is_acceptable(token) or self.is_terminated():
            return False
        return bool(self.native.accept_token(int(token), False))

    def is_acceptable(self, token: int) -> bool:
        """Whether an id is in range and either text or one of the stop ids."""
        return 0 <= token < self.size and bool(int(self.acceptable[token >> 5]) >> (token & 31) & 1)

    def fill(self, row: np.ndarray) -> None:
        """Write the legal tokens as bits of ``row``, contiguous int32 ``[ceil(size / 32)]``.

        Raises
        ------
        GrammarError
            After termination: there is no next token.
        """
        if self.is_terminated():
            raise GrammarError("matcher: cannot fill a mask after the grammar has terminated")
        self.native.fill_next_token_bitmask(row, 0, False)
        row[-1] &= self._last_word  # XGrammar sets bits beyond the vocabulary too

    def legal(self) -> np.ndarray:
        """The legal token ids, ascending, int64."""
        row = np.zeros(self.compiled.backend.vocabulary.words, np.int32)
        self.fill(row)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))

    def rollback(self, tokens: int) -> None:
        """Undo the last ``tokens`` accepted tokens; a stop token counts as one."""
        self.native.rollback(int(tokens))

    def is_terminated(self) -> bool:
        """Whether a stop token was accepted."""
        return bool(self.native.is_terminated())

    def fresh(self) -> Matcher:
        """A matcher of the same grammar and stop ids at the start."""
        return self.compiled.backend.matcher(self.compiled, self.stop_ids)
