"""Compiled grammars kept in memory, least recently used first out, bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future

from graft.cudagraph.errors import OptionError
from graft.grammar.matcher import CompiledGrammar
from graft.grammar.spec import Spec

__all__ = ["CACHE_BYTES", "GrammarCache"]

CACHE_BYTES = 1 << 29
_ENTRY_BYTES = 1024  # of an entry beside its texts and its grammar


class GrammarCache:
    """Compiled grammars and refusals by specification, for one backend; any thread may use it.

    An entry counts with what `CompiledGrammar.nbytes` says, its specification and 1 KiB; one larger
    than the bound is not kept. Matchers keep their grammar themselves.
    """

    def __init__(self, limit_bytes: int = CACHE_BYTES):
        if not limit_bytes > 0:
            raise OptionError(f"grammar_cache_bytes is {limit_bytes}, must be positive")
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Spec, tuple[Future[CompiledGrammar], int]] = OrderedDict()
        self._nbytes = 0

    def get(self, spec: Spec) -> Future[CompiledGrammar] | None:
        """The finished future of an equal specification, or None."""
        with self._lock:
            if spec not in self._entries:
                return None
            self._entries.move_to_end(spec)
            return self._entries[spec][0]

    def put(self, spec: Spec, future: Future[CompiledGrammar]) -> None:
        """Keep a finished future, and drop the least recently used until the bound holds."""
        grammar = 0 if future.exception() else future.result().nbytes
        size = grammar + len(spec.text) + len(spec.source) + _ENTRY_BYTES
        if size > self._limit_bytes:
            return
        with self._lock:
            _, before = self._entries.pop(spec, (None, 0))
            self._entries[spec] = (future, size)
            self._nbytes += size - before
            while self._nbytes > self._limit_bytes:
                _, (_, gone) = self._entries.popitem(last=False)
                self._nbytes -= gone

    def counters(self) -> dict[str, int]:
        """Entries, and their bytes."""
        with self._lock:
            return {"cache_entries": len(self._entries), "cache_bytes": self._nbytes}
