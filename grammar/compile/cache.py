"""LRU cache of compiled grammars, limited in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future

from graft.cudagraph.errors import OptionError
from graft.grammar.matcher import CompiledGrammar
from graft.grammar.spec import Spec

__all__ = ["CACHE_BYTES", "GrammarCache"]

#: Default size limit in bytes.
CACHE_BYTES = 1 << 29
_ENTRY_BYTES = 1024  # estimated overhead of an entry, besides its specification and its grammar


class GrammarCache:
    """LRU cache of completed compilations, by grammar specification. Thread-safe.

    An entry is the completed future of a compilation. The future contains either the compiled
    grammar or the error with which the grammar was refused. The size of an entry is the sum of
    `CompiledGrammar.nbytes`, the length of the specification and 1 KiB. An entry that is larger
    than the cache's limit is not stored. Existing matchers remain valid when their grammar is
    evicted, because each matcher holds a reference to its grammar.

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
        self._entries: OrderedDict[Spec, tuple[Future[CompiledGrammar], int]] = OrderedDict()
        self._nbytes = 0

    def get(self, spec: Spec) -> Future[CompiledGrammar] | None:
        """Return the completed future that is stored for an equal specification, or None."""
        with self._lock:
            if spec not in self._entries:
                return None
            self._entries.move_to_end(spec)
            future, _ = self._entries[spec]
            return future

    def put(self, spec: Spec, future: Future[CompiledGrammar]) -> None:
        """Store a completed future.

        The least recently used entries are evicted until the total size is within the limit.
        """
        size = len(spec.text) + len(spec.source) + _ENTRY_BYTES
        if not future.exception():
            size += future.result().nbytes
        if size > self._limit_bytes:
            return
        with self._lock:
            _, previous_size = self._entries.pop(spec, (None, 0))
            self._entries[spec] = (future, size)
            self._nbytes += size - previous_size
            while self._nbytes > self._limit_bytes:
                _, (_, evicted_size) = self._entries.popitem(last=False)
                self._nbytes -= evicted_size

    def counters(self) -> dict[str, int]:
        """Return the number of entries and their total size in bytes."""
        with self._lock:
            return {
                "cache_entries": len(self._entries),
                "cache_bytes": self._nbytes,
            }
