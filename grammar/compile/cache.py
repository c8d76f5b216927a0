"""LRU cache of compiled grammars, limited in bytes."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict

from graft.grammar.matcher import CompiledGrammar
from graft.grammar.spec import Spec
from graft.native.errors import OptionError

__all__ = ["CACHE_BYTES", "GrammarCache"]

#: Default size limit of the cache of compiled grammars, in bytes.
CACHE_BYTES = 1 << 29

#: Estimated size of an entry's Python objects, without the texts and the compiled grammar.
_ENTRY_BYTES = 1024

#: Result of a compilation: the compiled grammar, or the message with which it was refused.
Outcome = CompiledGrammar | str


class GrammarCache:
    """LRU cache of the outcomes of compilations, by grammar specification. Thread-safe.

    An outcome is either the compiled grammar or the message of the error with which the grammar was
    refused. The cache stores neither futures nor exceptions, because callbacks and tracebacks refer
    to the requests that wait for a grammar. The size of an entry is the sum of
    `CompiledGrammar.nbytes`, the size of the text of the specification, and 1 KiB. An entry that is
    larger than the cache's limit is not stored. Existing matchers remain valid when their grammar
    is evicted, because each matcher holds a reference to its grammar.

    Parameters
    ----------
    limit_bytes
        Maximum total size in bytes.
    """

    def __init__(self, limit_bytes: int = CACHE_BYTES):
        if not limit_bytes > 0:
            raise OptionError(f"grammar_cache_bytes is {limit_bytes}, must be positive")
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Spec, tuple[Outcome, int]] = OrderedDict()
        self._nbytes = 0

    def get(self, spec: Spec) -> Outcome | None:
        """Return the cached outcome for a specification; None if there is none."""
        with self._lock:
            if spec not in self._entries:
                return None
            self._entries.move_to_end(spec)
            outcome, _ = self._entries[spec]
            return outcome

    def put(self, spec: Spec, outcome: Outcome) -> None:
        """Store an outcome.

        The least recently used entries are evicted until the total size is within the limit.
        """
        size = _entry_bytes(spec, outcome)
        with self._lock:
            self._remove(spec)
            if size > self._limit_bytes:
                return
            self._entries[spec] = (outcome, size)
            self._nbytes += size
            while self._nbytes > self._limit_bytes:
                self._remove(next(iter(self._entries)))

    def _remove(self, spec: Spec) -> None:
        """Remove the entry of a specification, if there is one. The caller must hold the lock."""
        _, size = self._entries.pop(spec, (None, 0))
        self._nbytes -= size

    def counters(self) -> dict[str, int]:
        """Return the number of entries and their total size in bytes."""
        with self._lock:
            return {"cache_entries": len(self._entries), "cache_bytes": self._nbytes}


def _entry_bytes(spec: Spec, outcome: Outcome) -> int:
    """Return the estimated size of an entry in bytes."""
    size = _ENTRY_BYTES + sys.getsizeof(spec.text)
    if isinstance(outcome, CompiledGrammar):
        return size + outcome.nbytes
    return size + sys.getsizeof(outcome)
