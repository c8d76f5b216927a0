"""Compilation off the critical path: threads, processes that can be killed, and two caches."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any

import numpy as np

from graft.cudagraph.errors import OptionError

from .backend import GrammarBackend, SerializingBackend
from .cache import CACHE_BYTES, GrammarCache
from .compile_process import ChildLost, CompileProcess
from .compile_risk import risk
from .disk_cache import DiskCache
from .errors import GrammarError, clean_message
from .matcher import CompiledGrammar
from .spec import Spec

__all__ = ["CompileService"]

_log = logging.getLogger("graft.grammar")
_Job = tuple[Spec, "Future[CompiledGrammar]"]


class CompileService:
    """Compiles grammars for one backend without ever blocking its callers.

    Cheap grammars compile on ``threads`` daemon threads of this process, without the GIL. What
    `compile_risk` finds risky, for backends whose grammars can be serialised, compiles in
    ``children`` processes with limits of time and memory, each started when it is first needed: a
    grammar that takes too long is stopped by killing its process, and a crash kills that process
    only. Either fails that one grammar; the next one gets a new process. Neither way waits for the
    other.

    Parameters
    ----------
    backend
        The vocabulary to compile for; compiled grammars belong to it.
    threads, children
        Grammars compiled at once in this process, and in others.
    cache
        Where finished grammars are kept; shared with other services of the same backend, or by
        default one of its own of ``cache_bytes``.
    disk
        Where serialised grammars are kept between runs, or None.
    timeout_s
        Seconds one risky grammar may take, from the moment a running process takes it up.
    memory_bytes
        Address space that one process may take for grammars.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        threads: int = 1,
        children: int = 1,
        *,
        cache: GrammarCache | None = None,
        cache_bytes: int = CACHE_BYTES,
        disk: DiskCache | None = None,
        timeout_s: float = 30.0,
        memory_bytes: int = 4 << 30,
    ):
        for name, value in (
            ("threads", threads),
            ("children", children),
            ("timeout_s", timeout_s),
            ("memory_bytes", memory_bytes),
        ):
            if not value > 0:
                raise OptionError(f"compile service: {name} is {value}, must be positive")
        self.backend = backend
        self._serializing = backend if isinstance(backend, SerializingBackend) else None
        self._cache = GrammarCache(cache_bytes) if cache is None else cache
        self._disk = disk if self._serializing is not None else None
        self._timeout_s, self._memory_bytes = timeout_s, memory_bytes
        self._lock = threading.Lock()
        self._pending: dict[Spec, Future[CompiledGrammar]] = {}
        self._counts: Counter[str] = Counter()
        self._cheap: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._risky: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._children: set[CompileProcess] = set()
        self._here = [
            threading.Thread(target=self._serve_here, name=f"graft-compile-{i}", daemon=True)
            for i in range(threads)
        ]
        self._away = [
            threading.Thread(
                target=self._serve_away, args=(self._serializing,),
                name=f"graft-compile-away-{i}", daemon=True,
            )
            for i in range(children if self._serializing is not None else 0)
        ]  # fmt: skip
        for thread in (*self._here, *self._away):
            thread.start()

    def submit(self, spec: Spec) -> Future[CompiledGrammar]:
        """A future of the compiled grammar, shared by all who ask for an equal ``spec``.

        The future raises ``GrammarError``, in one sentence, if the backend refuses the grammar,
        cannot enforce part of it, takes longer than ``timeout_s`` or dies of it. It cannot be
        cancelled.
        """
        with self._lock:
            if self._closed:
                raise GrammarError("compile service: is closed")
            future = self._cache.get(spec) or self._pending.get(spec)
            if future is not None:
                return future
            future = Future()
            future.set_running_or_notify_cancel()  # others may wait for it: nobody cancels it
            self._pending[spec] = future
        self._cheap.put((spec, future))
        return future

    def counters(self) -> dict[str, int]:
        """What was compiled where, what failed why, and the caches' counters."""
        with self._lock:
            counts = dict(self._counts)
        disk = {} if self._disk is None else self._disk.counters()
        return {**counts, **self._cache.counters(), **disk}

    def close(self) -> None:
        """Kill the processes; what has not been compiled fails with ``GrammarError``.

        Waits for the grammar that each thread is compiling just now, which is no risky one.
        """
        with self._lock:
            self._closed = True
            children = list(self._children)
        for child in children:
            child.stop()
        # the first kind passes work on to the second, which therefore ends last
        for jobs, threads in ((self._cheap, self._here), (self._risky, self._away)):
            for _ in threads:
                jobs.put(None)
            for thread in threads:
                thread.join()

    def _finish(
        self, job: _Job, result: CompiledGrammar | BaseException, how: str, *, keep: bool = True
    ) -> None:
        """Settle a future; what may go better another time is not kept."""
        spec, future = job
        with self._lock:
            self._counts[how] += 1
            if not keep:
                del self._pending[spec]
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
        if not keep:
            return
        try:
            self._cache.put(spec, future)
        except Exception as error:  # of a backend that cannot tell how large its grammar is
            _log.warning("compiled grammar not kept: %s: %s", type(error).__name__, error)
        with self._lock:
            del self._pending[spec]

    def _serve_here(self) -> None:
        """Take grammars as they come; pass on what is risky, compile the rest."""
        while (job := self._cheap.get()) is not None:
            try:
                self._take(job)
            except GrammarError as error:
                self._finish(job, error, "refused", keep=not self._closed)
            except BaseException as error:  # whoever waits must hear of it
                self._finish(job, _unexpected(job, error), "failed", keep=False)

    def _take(self, job: _Job) -> None:
        spec, backend = job[0], self._serializing
        if self._closed:
            raise GrammarError(f"{spec.kind}: the compile service was closed")
        if backend is None:
            compiled = self.backend.compile(spec)
            _require_output(compiled)
            self._finish(job, compiled, "compiled_in_threads")
            return
        stored = None if self._disk is None else self._disk.load(backend, spec)
        if stored is not None:
            self._finish(job, stored, "loaded_from_disk")
        elif risk(spec):
            self._risky.put(job)
        else:
            compiled = backend.compile(spec)
            _require_output(compiled)
            self._finish(job, compiled, "compiled_in_threads")
            if self._disk is not None:
                self._disk.store(backend, spec, backend.dump(compiled))

    def _serve_away(self, backend: SerializingBackend) -> None:
        """Compile what is risky in a process of this thread's own."""
        child: CompileProcess | None = None
        while (job := self._risky.get()) is not None:
            try:
                if self._closed:
                    raise ChildLost
                child = child or self._start_child(backend)
                text = self._ask(child, backend.request(job[0]), job[0])
                compiled = backend.load(job[0], text)
                _require_output(compiled)
            except ChildLost as error:
                self._drop(child)
                child = None
                # another attempt may have more luck
                why = "the compile service was closed" if self._closed else error
                error_of_user = GrammarError(f"{job[0].kind}: {why}")
                self._finish(job, error_of_user, "killed_or_crashed", keep=False)
            except GrammarError as error:
                self._finish(job, error, "refused")
            except BaseException as error:  # whoever waits must hear of it
                self._drop(child)
                child = None
                self._finish(job, _unexpected(job, error), "failed", keep=False)
            else:
                self._finish(job, compiled, "compiled_in_children")
                if self._disk is not None:
                    self._disk.store(backend, job[0], text)
        self._drop(child)

    def _ask(self, child: CompileProcess, request: tuple[Any, ...], spec: Spec) -> str:
        """The serialised grammar; what the child refused, or would enforce in part, raises."""
        outcome, text, printed = child.ask(request, self._timeout_s)
        if outcome == "memory":
            limit = self._memory_bytes / (1 << 30)
            raise GrammarError(f"{spec.kind}: needs more than {limit:.3g} GiB of memory to compile")
        if outcome != "compiled":
            raise GrammarError(f"{spec.kind}: {clean_message(text)}")
        ignored = list(dict.fromkeys(clean_message(line) for line in printed.splitlines()))
        if ignored and not spec.partial:
            raise GrammarError(f"{spec.kind}: cannot be enforced as a whole: {'; '.join(ignored)}")
        return str(text)

    def _start_child(self, backend: SerializingBackend) -> CompileProcess:
        vocabulary = backend.vocabulary
        parts = (vocabulary.tokens, vocabulary.size, vocabulary.stop_ids)
        child = CompileProcess((backend.child, parts, self._memory_bytes))
        with self._lock:
            self._children.add(child)
            closed = self._closed
        if closed:
            child.stop()
        return child

    def _drop(self, child: CompileProcess | None) -> None:
        if child is not None:
            child.stop()
            child.wait()
            with self._lock:
                self._children.discard(child)


def _require_output(compiled: CompiledGrammar) -> None:
    """Refuse a grammar of no text at all; where a vocabulary merely cannot spell one, it runs."""
    vocabulary = compiled.backend.vocabulary
    row = np.zeros(vocabulary.words, np.int32)
    if not (vocabulary.spells_everything and vocabulary.stop_ids):
        return
    if compiled.backend.matcher(compiled).fill(row) and not row.any():
        raise GrammarError(f"{compiled.spec.kind}: allows no output")


def _unexpected(job: _Job, error: BaseException) -> GrammarError:
    """What a backend raises against its protocol, as the refusal of one grammar."""
    refusal = GrammarError(f"{job[0].kind}: {type(error).__name__}: {clean_message(error)}")
    refusal.__cause__ = error
    return refusal
