"""Compilation off the critical path, cached."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from .errors import GrammarError
from .matcher import CompiledGrammar
from .spec import GrammarSpec
from .xgrammar import XGrammarBackend

__all__ = ["CompileService"]


class CompileService:
    """Compiles grammars on threads of its own and remembers the last ``cache_entries``."""

    def __init__(
        self,
        backend: XGrammarBackend,
        threads: int = 1,
        cache_entries: int = 256,
        timeout_s: float = 30.0,
    ):
        self._backend = backend
        self._pool = ThreadPoolExecutor(threads, "graft-compile")
        self._cache: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._entries = cache_entries
        self._lock = threading.Lock()
        self.timeout_s = timeout_s

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """A future of the compiled grammar; it raises ``GrammarError`` if the grammar is refused."""
        with self._lock:
            future = self._cache.get(spec)
            if future is None:
                try:
                    future = self._pool.submit(self._backend.compile, spec)
                except RuntimeError as error:
                    raise GrammarError("compile service: is closed") from error
                self._cache[spec] = future
            self._cache.move_to_end(spec)
            while len(self._cache) > self._entries:
                self._cache.popitem(last=False)
        return future

    def close(self) -> None:
        """Stop; what is compiling is finished first."""
        self._pool.shutdown(wait=True, cancel_futures=True)
