"""Compiles the grammars of one engine off the path of its rounds, each within one bound."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from graft.cudagraph.errors import OptionError
from graft.grammar.backends.base import BoundedBackend
from graft.grammar.backends.registry import make_backend
from graft.grammar.compile.cache import CACHE_BYTES, GrammarCache
from graft.grammar.errors import GrammarError, clean_message
from graft.grammar.matcher import CompiledGrammar, GrammarBackend
from graft.grammar.schema.enforcement import available_backends
from graft.grammar.spec import Spec
from graft.grammar.vocabulary import Vocabulary
from graft.native.children.process import (
    LIMIT_S,
    MEMORY_BYTES,
    Child,
    ChildLost,
    Question,
    TooSlow,
    leave,
    take,
)

__all__ = ["GrammarService"]

_PATIENCE_S = 1.0  # of the lane that everybody passes
_log = logging.getLogger("graft.grammar")


Choice = str | Callable[[Vocabulary], GrammarBackend]


class _Job(NamedTuple):
    spec: Spec
    future: Future[CompiledGrammar]


class _Shared:
    """Backends by name and their compiled grammars, for every service of the same settings."""

    def __init__(self, vocabulary: Vocabulary, choice: Choice, cache_bytes: int):
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._backends: dict[str, GrammarBackend] = {}
        self.cache = GrammarCache(cache_bytes)
        if isinstance(choice, str):
            self.default = self.named(available_backends()[0] if choice == "auto" else choice)
        else:
            self.default = make_backend(choice, vocabulary)

    def named(self, name: str) -> GrammarBackend:
        with self._lock:
            if name not in self._backends:
                self._backends[name] = make_backend(name, self._vocabulary)
            return self._backends[name]


_shared: weakref.WeakValueDictionary[tuple[object, ...], _Shared] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def _share(vocabulary: Vocabulary, choice: Choice, cache_bytes: int) -> _Shared:
    if not isinstance(choice, str):
        return _Shared(vocabulary, choice, cache_bytes)
    key = (choice, vocabulary.fingerprint, cache_bytes)
    with _shared_lock:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = _Shared(vocabulary, choice, cache_bytes)
        return found


class GrammarService:
    """Compiles each grammar with the backend it names, or with the engine's own.

    Everything that a grammar's text decides the cost of (routing a schema, rewriting it, reading a
    grammar, compiling it) is done in processes with limits of time and memory, so that a grammar
    which takes too long, or crashes a library, fails alone. Every grammar has a second in the first
    lane; what takes longer begins anew in the second one, where it has ``timeout_s`` and keeps
    nobody waiting but its like.

    Matchers of different backends may sit in one batch: the guided worker is the same for all.
    Services of one process with an equal vocabulary and equal settings share their backends and
    compiled grammars for as long as one of them lives, unless a callable makes the backend.

    Parameters
    ----------
    vocabulary
        What the grammars are compiled for.
    choice
        Default backend: a name, or a callable that makes one for the vocabulary; the grammars of
        one that is no `BoundedBackend` compile in this process, without any bound. ``"auto"``
        routes JSON schemas (`resolved`), gives EBNF to XGrammar, whose notation it is, and the rest
        to the first backend installed.
    threads
        Grammars compiled at once, in each lane.
    timeout_s, memory_bytes
        Seconds that one grammar may take once it is taken up, and address space that its process
        may take.
    cache_bytes
        Bound of the compiled grammars kept in memory.

    Attributes
    ----------
    backend
        The default one.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        choice: Choice = "xgrammar",
        *,
        threads: int = 1,
        timeout_s: float = LIMIT_S,
        memory_bytes: int = MEMORY_BYTES,
        cache_bytes: int = CACHE_BYTES,
    ):
        for name, value in (
            ("threads", threads),
            ("timeout_s", timeout_s),
            ("memory_bytes", memory_bytes),
        ):
            if not value > 0:
                raise OptionError(f"compile service: {name} is {value}, must be positive")
        installed = available_backends()
        if choice == "auto" and not installed:
            raise OptionError("grammar_backend: auto needs llguidance or xgrammar installed")
        self._choice = choice if isinstance(choice, str) else ""
        self._ebnf = choice == "auto" and "xgrammar" in installed
        self._shared = _share(vocabulary, choice, cache_bytes)
        self.backend = self._shared.default
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # guards the three below
        self._pending: dict[Spec, Future[CompiledGrammar]] = {}
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._first: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._second: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._threads: list[threading.Thread] = []
        lanes = ((self._first, min(_PATIENCE_S, timeout_s)), (self._second, timeout_s))
        for lane, limit_s in lanes:
            for _ in range(threads):
                child = take(memory_bytes) if lane is self._first else Child(memory_bytes)
                thread = threading.Thread(
                    target=self._serve,
                    args=(lane, child, limit_s),
                    name="graft-compile",
                    daemon=True,
                )
                self._children.append(child)
                self._threads.append(thread)
                thread.start()

    def submit(self, spec: Spec) -> Future[CompiledGrammar]:
        """A future of the compiled grammar, shared by all who ask for an equal ``spec``.

        The future raises ``GrammarError``, in one sentence, if no backend can be had or it refuses
        the grammar, cannot enforce part of it, takes longer than ``timeout_s`` or dies of it. It
        cannot be cancelled.
        """
        with self._lock:
            if self._closed:
                raise GrammarError("compile service: is closed")
            future = self._shared.cache.get(spec) or self._pending.get(spec)
            if future is not None:
                return future
            future = Future()
            future.set_running_or_notify_cancel()  # others may wait for it: nobody cancels it
            self._pending[spec] = future
        self._first.put(_Job(spec, future))
        return future

    def counters(self) -> dict[str, int]:
        """What was compiled, what failed why, and the cache's counters."""
        with self._lock:
            return {**self._counts, **self._shared.cache.counters()}

    def close(self) -> None:
        """Kill the processes; what has not been compiled fails with ``GrammarError``.

        Waits for what each thread does outside a process: the grammars of unbounded backends, and
        reading what a process has compiled. A second call does nothing.
        """
        with self._lock:
            if self._closed:  # a process that is left twice would serve two at once
                return
            self._closed = True
        for child in self._children:
            leave(child)
        half = len(self._threads) // 2
        # the first lane passes work on to the second, which therefore ends last
        for lane, threads in (
            (self._first, self._threads[:half]),
            (self._second, self._threads[half:]),
        ):
            for _ in threads:
                lane.put(None)
            for thread in threads:
                thread.join()

    def _serve(self, lane: queue.SimpleQueue[_Job | None], child: Child, limit_s: float) -> None:
        if lane is self._first and isinstance(self.backend, BoundedBackend):
            child.warm()  # while the engine loads its models
        while (job := lane.get()) is not None:
            kind = job.spec.kind
            try:
                if self._closed:
                    raise ChildLost("it is too late")
                compiled = self._compile(job.spec, child, limit_s)
                _require_output(compiled)
            except ChildLost as error:
                if isinstance(error, TooSlow) and limit_s < self._timeout_s and not self._closed:
                    self._second.put(job)
                    continue
                # another attempt may have more luck
                why = str(error)
                if isinstance(error, TooSlow):
                    why = f"took longer than {limit_s:g} s to compile"
                if self._closed:
                    why = "the compile service was closed"
                self._finish(job, GrammarError(f"{kind}: {why}"), "killed_or_crashed", keep=False)
            except GrammarError as error:
                self._finish(job, error, "refused")
            except OptionError as error:
                self._finish(job, GrammarError(f"{kind}: {error}"), "refused", keep=False)
            except BaseException as error:  # whoever waits must hear of it
                said = GrammarError(f"{kind}: {type(error).__name__}: {clean_message(error)}")
                said.__cause__ = error
                self._finish(job, said, "failed", keep=False)
            else:
                self._finish(job, compiled, "compiled")

    def _compile(self, spec: Spec, child: Child, limit_s: float) -> CompiledGrammar:
        deadline = time.monotonic() + limit_s
        routed = spec.kind == "json_schema" and not spec.backend and bool(self._choice)
        if routed:
            question = Question("graft.grammar.resolve:resolved", (spec, self._choice))
            spec = child.ask(question, limit_s)
        elif spec.kind == "ebnf" and not spec.backend and self._ebnf:
            spec = replace(spec, backend="xgrammar")
        backend = self._shared.named(spec.backend) if spec.backend else self.backend
        if not isinstance(backend, BoundedBackend):
            return backend.compile(spec)
        left_s = max(0.0, deadline - time.monotonic())
        return backend.load(spec, child.ask(backend.question(spec, routed), left_s))

    def _finish(
        self, job: _Job, result: CompiledGrammar | GrammarError, how: str, *, keep: bool = True
    ) -> None:
        """Settle a future; what may go better another time is not kept."""
        with self._lock:
            self._counts[how] += 1
            if not keep:
                del self._pending[job.spec]
        if isinstance(result, GrammarError):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)
        if not keep:
            return
        try:
            self._shared.cache.put(job.spec, job.future)
        except Exception as error:  # of a backend that cannot tell how large its grammar is
            _log.warning("compiled grammar not kept: %s: %s", type(error).__name__, error)
        with self._lock:
            del self._pending[job.spec]


def _require_output(compiled: CompiledGrammar) -> None:
    """Refuse a grammar of no text at all; where a vocabulary merely cannot spell one, it runs."""
    vocabulary = compiled.backend.vocabulary
    if not (vocabulary.spells_everything and vocabulary.stop_ids):
        return
    row = np.zeros(vocabulary.words, np.int32)
    if compiled.matcher().fill(row) and not row.any():
        raise GrammarError(f"{compiled.spec.kind}: allows no output")
