"""The grammar backends of one engine: its own, and those that single grammars ask for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from .backend import GrammarBackend, make_backend
from .cache import CACHE_BYTES, GrammarCache
from .compile import CompileService
from .disk_cache import DiskCache
from .matcher import CompiledGrammar
from .routing import Routing
from .spec import GrammarSpec
from .vocabulary import Vocabulary

__all__ = ["GrammarService"]


class _Shared:
    """A backend and its compiled grammars, for every service of the same settings."""

    def __init__(self, backend: GrammarBackend, cache: GrammarCache):
        self.backend, self.cache = backend, cache


_shared: weakref.WeakValueDictionary[tuple[object, ...], _Shared] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def _share(name: str, vocabulary: Vocabulary, cache_bytes: int) -> _Shared:
    key = (name, vocabulary.fingerprint, cache_bytes)
    with _shared_lock:
        found = _shared.get(key)
        if found is None:
            cache = GrammarCache(cache_bytes)
            found = _shared[key] = _Shared(make_backend(name, vocabulary), cache)
        return found


class GrammarService:
    """Compiles each grammar with the backend it names, or with the default one.

    Matchers of different backends may sit in one batch: the guided worker is the same for all.
    Services of one process with an equal vocabulary and equal settings share their backends and
    compiled grammars for as long as one of them lives, unless a callable makes the backend.

    Parameters
    ----------
    vocabulary
        What the grammars are compiled for.
    choice
        Default backend: a name, or a callable that makes one for the vocabulary. ``"auto"`` routes
        JSON schemas (`GrammarSpec.resolved`), gives EBNF to XGrammar, whose notation it is, and the
        rest to the first backend installed.
    threads, timeout_s
        Of each backend's `CompileService`; as many compiling processes as threads.
    cache_bytes
        Bound of the compiled grammars kept in memory, for each backend.
    cache_dir
        Folder for grammars that can be serialised (XGrammar's), kept between runs and bounded to
        1 GiB; None: none are.

    Notes
    -----
    A further backend is made when a grammar first names it, on the calling thread: about a second
    for a vocabulary of 128k tokens.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        choice: str | Callable[[Vocabulary], GrammarBackend] = "xgrammar",
        *,
        threads: int = 1,
        timeout_s: float = 30.0,
        cache_bytes: int = CACHE_BYTES,
        cache_dir: str | Path | None = None,
    ):
        self._vocabulary = vocabulary
        self._threads, self._timeout_s, self._cache_bytes = threads, timeout_s, cache_bytes
        self._disk = None if cache_dir is None else DiskCache(cache_dir)
        self._services: dict[str, CompileService] = {}
        self._backends: list[_Shared] = []  # what is shared lives as long as its last service
        self._routing = Routing(choice, self._compile)
        choice = self._routing.default
        if isinstance(choice, str):
            self._default = self._named(choice)
        else:
            made = make_backend(choice, vocabulary)
            self._default = self._start(_Shared(made, GrammarCache(cache_bytes)))
        self.backend = self._backends[0].backend

    def _named(self, name: str) -> CompileService:
        service = self._services.get(name)
        if service is None:
            shared = _share(name, self._vocabulary, self._cache_bytes)
            service = self._services[name] = self._start(shared)
        return service

    def _start(self, shared: _Shared) -> CompileService:
        self._backends.append(shared)
        return CompileService(
            shared.backend, self._threads, self._threads, cache=shared.cache, disk=self._disk,
            timeout_s=self._timeout_s,
        )  # fmt: skip

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """A future of the compiled grammar, as `CompileService.submit`; not for several threads.

        Raises
        ------
        GrammarError, OptionError
            If the backend that the grammar names cannot be had.
        """
        return self._routing.submit(spec)

    def _compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        return (self._named(spec.backend) if spec.backend else self._default).submit(spec)

    def counters(self) -> dict[str, dict[str, int]]:
        """`CompileService.counters` by the backend's name."""
        services = dict.fromkeys((self._default, *self._services.values()))
        return {service.backend.name: service.counters() for service in services}

    def close(self) -> None:
        """Close every compile service."""
        self._routing.close()
        for service in dict.fromkeys((self._default, *self._services.values())):
            service.close()
