"""Compile the grammars of an engine's requests in child processes, concurrently with decoding."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

from graft.grammar.backends.base import BoundedBackend
from graft.grammar.backends.registry import BACKENDS, make_backend
from graft.grammar.compile.cache import CACHE_BYTES, GrammarCache, Outcome
from graft.grammar.errors import (
    GrammarBackendError,
    GrammarError,
    UnsupportedFormatError,
    clean_message,
)
from graft.grammar.matcher import CompiledGrammar, GrammarBackend
from graft.grammar.processes import POOL, call_error
from graft.grammar.resolve import candidate_backends
from graft.grammar.spec import Spec
from graft.grammar.usable import usable_backends, warn_if_unusable
from graft.grammar.vocabulary import Vocabulary
from graft.native.children.child import STACK_BYTES
from graft.native.children.errors import ChildCrashed, ChildLost, ChildTimeout, ChildUnavailable
from graft.native.children.process import MEMORY_BYTES, TIMEOUT_S, ChildProcess
from graft.native.children.usage import TimeLimit
from graft.native.errors import OptionError, short_repr

__all__ = ["GrammarService"]

_FAST_QUEUE_TIMEOUT_S = 1.0
# Maximum number of grammars that the service remembers as slow.
_MAX_SLOW_GRAMMARS = 4096
# LLGuidance's recursion is as deep as the references of a schema, and a stack overflow would end
# this process. A child process has compiled the grammar before, so its smaller stack is enough.
_THREAD_STACK_BYTES = 2 * STACK_BYTES
_stack_size_lock = threading.Lock()
_log = logging.getLogger("graft.grammar")


BackendChoice = str | Callable[[Vocabulary], GrammarBackend]


class _Compilation(NamedTuple):
    """A grammar to compile, and the future of the result."""

    spec: Spec
    future: Future[CompiledGrammar]


class _CompileQueue:
    """Queue of compilations, the threads that execute them, and the time limit per compilation.

    The queue refers weakly to the futures of its compilations. A future that no request waits for
    is therefore deleted, and `get` skips its compilation.

    There are as many child processes as threads. A thread takes the last one of `idle` for each
    compilation and returns it afterwards, so a further process is started only when all started
    ones are in use.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.threads: list[threading.Thread] = []
        self.idle: list[ChildProcess] = []
        self.jobs: queue.SimpleQueue[tuple[Spec, weakref.ref[Future[CompiledGrammar]]] | None] = (
            queue.SimpleQueue()
        )

    def put(self, job: _Compilation) -> None:
        """Add a compilation."""
        self.jobs.put((job.spec, weakref.ref(job.future)))

    def get(self) -> _Compilation | None:
        """Wait for the next compilation whose result is needed; None when the thread must end."""
        while True:
            job = self.jobs.get()
            if job is None:
                return None
            spec, reference = job
            future = reference()
            if future is not None:
                return _Compilation(spec, future)

    def end_threads(self) -> None:
        """Let the threads finish the queued jobs and end, and wait until they have ended."""
        for _ in self.threads:
            self.jobs.put(None)
        for thread in self.threads:
            thread.join()


class _SharedBackends:
    """Backends and compiled grammars that services with equal settings share.

    Parameters
    ----------
    vocabulary
        Vocabulary of the backends.
    choice
        Default backend: a name, ``"auto"`` or a factory.
    cache_bytes
        Size limit of the grammar cache, in bytes.

    Attributes
    ----------
    cache
        Compiled grammars by specification.
    default
        Backend of grammars whose specification names no backend; None if `choice` is ``"auto"`` and
        no grammar library can be used.
    """

    def __init__(self, vocabulary: Vocabulary, choice: BackendChoice, cache_bytes: int):
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._backends: dict[str, GrammarBackend] = {}
        self.cache = GrammarCache(cache_bytes)
        self.default: GrammarBackend | None
        if isinstance(choice, str):
            name = next(usable_backends(), "") if choice == "auto" else choice
            self.default = self.backend(name) if name else None
        else:
            self.default = make_backend(choice, vocabulary)

    def backend(self, name: str) -> GrammarBackend:
        """Return the backend with this name. The backend is created on first use."""
        with self._lock:
            if name not in self._backends:
                self._backends[name] = make_backend(name, self._vocabulary)
            return self._backends[name]


_shared_backends: weakref.WeakValueDictionary[tuple[object, ...], _SharedBackends] = (
    weakref.WeakValueDictionary()
)
_shared_backends_lock = threading.Lock()


def _get_shared_backends(
    vocabulary: Vocabulary, choice: BackendChoice, cache_bytes: int
) -> _SharedBackends:
    """Return the backends that all services with these settings share.

    If `choice` is a factory, nothing is shared: each call returns new backends.
    """
    if not isinstance(choice, str):
        return _SharedBackends(vocabulary, choice, cache_bytes)
    key = (choice, vocabulary.fingerprint, cache_bytes)
    with _shared_backends_lock:
        shared = _shared_backends.get(key)
        if shared is None:
            shared = _SharedBackends(vocabulary, choice, cache_bytes)
            _shared_backends[key] = shared
        return shared


class GrammarService:
    """Compiles the grammars of an engine's requests.

    A grammar is compiled with the backend that its specification names. If the specification names
    no backend, the engine's backend is used. A grammar is parsed, checked, rewritten (if it is a
    schema) and compiled in a child process with limits of time and memory. If a grammar takes too
    long or crashes a library, only the compilation of this grammar fails. This process then creates
    the compiled grammar: XGrammar reads what the child process compiled; LLGuidance compiles the
    grammar, which the child process has checked, a second time, within LLGuidance's own limits.

    The service has two queues, each with its own threads. Each compilation starts in the fast queue
    with a time limit of one second. If the compilation exceeds this limit, it is aborted and starts
    again in the slow queue with the limit `timeout_s`. A later compilation of the same grammar
    starts in the slow queue. Slow grammars therefore delay only other slow grammars. The limits
    refer to the time that the child process uses (see
    `graft.native.children.usage`), so that the compilation of a fast grammar is not aborted because
    the machine is busy.

    If a child process is killed or crashes during a compilation, the compilation is repeated in a
    new process. After several failures, it fails with an error.

    Services of one process with equal vocabularies and settings share their backends and compiled
    grammars, unless `choice` is a factory. The shared objects exist as long as at least one of
    these services.

    Parameters
    ----------
    vocabulary
        Vocabulary that the grammars are compiled for.
    choice
        Backend of grammars whose specification names no backend: a name, ``"auto"``, or a factory
        that is called with the vocabulary. ``"auto"`` compiles EBNF with XGrammar if it can be
        used, a structural format with the first backend that supports it, and other grammars with
        the first backend that can be used.
        A backend that is not a `BoundedBackend` compiles in this process without limits of time
        and memory.
    threads
        Number of threads per queue, each of which runs one compilation at a time in a child
        process. The first child process of the fast queue starts with the service, and the others
        when several grammars are compiled at once.
    timeout_s
        Time limit of one compilation in seconds. The time in the queue, and the time in which the
        child process waits for a processor, do not count.
    memory_bytes
        Maximum address space that compilations may add to one child process, in bytes.
    cache_bytes
        Size limit of the cache of compiled grammars, in bytes.

    Attributes
    ----------
    backend
        Backend of grammars whose specification names no backend. None if the choice is ``"auto"``
        and no grammar library can be used; every grammar is then refused with the reason.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        choice: BackendChoice = "xgrammar",
        *,
        threads: int = 1,
        timeout_s: float = TIMEOUT_S,
        memory_bytes: int = MEMORY_BYTES,
        cache_bytes: int = CACHE_BYTES,
    ):
        limits = {"threads": threads, "timeout_s": timeout_s, "memory_bytes": memory_bytes}
        for name, value in limits.items():
            if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
                raise OptionError(
                    f"compile service: {name} is {short_repr(value)}, must be a positive number"
                )
        self._choice = choice if choice in ("auto", *BACKENDS) else ""
        self._shared = _get_shared_backends(vocabulary, choice, cache_bytes)
        self.backend = self._shared.default
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # guards the four fields below
        self._pending: weakref.WeakValueDictionary[Spec, Future[CompiledGrammar]] = (
            weakref.WeakValueDictionary()
        )
        # Hashes of grammars that have exceeded the time limit of the fast queue. A fast grammar
        # with the hash of a slow one only starts in the slow queue.
        self._slow: deque[int] = deque(maxlen=_MAX_SLOW_GRAMMARS)
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._fast_queue = _CompileQueue(min(_FAST_QUEUE_TIMEOUT_S, timeout_s))
        self._slow_queue = _CompileQueue(timeout_s)
        # The pool returns its running processes first.
        self._fast_queue.idle += [POOL.acquire(memory_bytes) for _ in range(threads)][::-1]
        self._slow_queue.idle += [POOL.new(memory_bytes) for _ in range(threads)]
        self._children = [*self._fast_queue.idle, *self._slow_queue.idle]
        self._start_thread(self._fast_queue, self._fast_queue.idle[-1])
        for jobs in [self._fast_queue] * (threads - 1) + [self._slow_queue] * threads:
            self._start_thread(jobs)

    def submit(self, spec: Spec) -> Future[CompiledGrammar]:
        """Start compiling a grammar.

        Returns
        -------
        Future
            Result of the compilation. Submissions of an equal `spec` share one future while the
            compilation runs, so the future cannot be cancelled. If all callers drop the future
            before its compilation begins, the grammar is not compiled.

            If the compilation fails, the future's exception is a `GrammarError` with a message of
            one sentence. The reasons are that the backend is not available, refuses the grammar or
            cannot enforce a part of it, or that the compilation crashes or exceeds its limit of
            time or memory. The exception is a `GrammarUnavailableError` if no child process could
            finish the compilation.

        Raises
        ------
        GrammarError
            The service is closed.
        """
        with self._lock:
            if self._closed:
                raise GrammarError("compile service: is closed")
            outcome = self._shared.cache.get(spec)
            if outcome is not None:
                return _completed(outcome)
            pending = self._pending.get(spec)
            if pending is not None:
                return pending
            future: Future[CompiledGrammar] = Future()
            # Several requests may wait for this future, so none of them may cancel it. A future in
            # the running state cannot be cancelled.
            future.set_running_or_notify_cancel()
            self._pending[spec] = future
            jobs = self._slow_queue if hash(spec) in self._slow else self._fast_queue
            jobs.put(_Compilation(spec, future))  # before close() can end the threads
            return future

    def counters(self) -> dict[str, int]:
        """Return the number of grammars by outcome, and the counters of the cache."""
        with self._lock:
            return {**self._counts, **self._shared.cache.counters()}

    def close(self) -> None:
        """Kill the child processes. Unfinished compilations fail with `GrammarError`.

        `close` waits for work in this process, because such work cannot be interrupted: the
        compilations of backends that are not a `BoundedBackend`, and the loading of the results of
        child processes. A second call of `close` has no effect.
        """
        with self._lock:
            if self._closed:  # a child process must not be released twice
                return
            self._closed = True
        for child in self._children:
            POOL.release(child)
        # The fast queue passes jobs on to the slow queue, so the slow queue must end last.
        self._fast_queue.end_threads()
        self._slow_queue.end_threads()

    def _start_thread(self, jobs: _CompileQueue, child: ChildProcess | None = None) -> None:
        """Start a thread of a queue. The thread first starts the process `child`, if given."""
        thread = threading.Thread(
            target=self._run, args=(jobs, child), name="graft-compile", daemon=True
        )
        jobs.threads.append(thread)
        with _stack_size_lock:
            default = threading.stack_size(_THREAD_STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(default)

    def _run(self, jobs: _CompileQueue, first: ChildProcess | None) -> None:
        """Compile the jobs of a queue until the service is closed. Compile threads run this."""
        if first is not None and isinstance(self.backend, BoundedBackend):
            with _log_errors("start of a child process"):
                first.start()  # the child process starts while the engine loads its models
        while True:
            job = jobs.get()
            if job is None:
                return
            with _log_errors("compile thread"):
                self._run_job(job, jobs)
            del job  # otherwise, a waiting thread keeps the last grammar alive

    def _run_job(self, job: _Compilation, jobs: _CompileQueue) -> None:
        """Compile the grammar of a job and complete the job's future."""
        kind = job.spec.kind
        try:
            if self._closed:
                raise ChildLost("the compile service was closed")
            child = jobs.idle.pop()
            try:
                compiled = self._compile(job.spec, child, jobs.timeout_s)
            finally:
                jobs.idle.append(child)
            _require_output(compiled)
        except ChildLost as error:
            self._handle_lost_child(job, jobs, error)
        except GrammarError as error:
            self._finish(job, error, "refused")
        except OptionError as error:
            self._finish(job, GrammarError(f"{kind}: {error}"), "refused", keep=False)
        except BaseException as error:
            # Requests wait for the future, so it must be completed whatever the exception is.
            self._finish(job, GrammarBackendError.of(kind, error), "failed", keep=False)
        else:
            self._finish(job, compiled, "compiled")

    def _handle_lost_child(self, job: _Compilation, jobs: _CompileQueue, error: ChildLost) -> None:
        """Handle a compilation that its child process did not finish.

        In the fast queue, a job that timed out or had no usable child process moves to the slow
        queue. The futures of all other jobs are completed with an error.
        """
        crashed = isinstance(error, ChildCrashed)  # the call would crash in the slow queue, too
        unavailable = isinstance(error, ChildUnavailable) and not crashed
        timed_out = isinstance(error, ChildTimeout)
        has_more_time = timed_out and jobs.timeout_s < self._timeout_s
        if jobs is self._fast_queue and (unavailable or has_more_time) and not self._closed:
            if timed_out:
                with self._lock:
                    self._slow.append(hash(job.spec))
            self._slow_queue.put(job)
            return
        if self._closed:
            error = ChildLost("the compile service was closed")
        self._finish(job, call_error(job.spec.kind, error), "killed_or_crashed", keep=False)

    def _compile(self, spec: Spec, child: ChildProcess, timeout_s: float) -> CompiledGrammar:
        """Compile a grammar with the first of its `candidate_backends` that supports it.

        Each attempt is one call of the child process. All attempts together have the time limit
        `timeout_s`.
        """
        limit = TimeLimit(timeout_s)
        names: tuple[str, ...] = ("",)
        if spec.backend or self._choice:
            names = candidate_backends(spec, self._choice)
        if spec.kind == "ebnf" and not spec.backend and self._choice == "auto":
            warn_if_unusable("xgrammar")
        reasons = []
        for name in names:
            try:
                backend = self._shared.backend(name) if name else self.backend
            except OptionError as error:
                if len(names) == 1:
                    raise
                reasons.append(str(error))
                continue
            assert backend is not None  # candidate_backends has raised an error if no library works
            if not isinstance(backend, BoundedBackend):
                return backend.compile(spec)
            try:
                result = child.call(backend.compile_call(spec), limit)
            except UnsupportedFormatError as error:
                reasons.append(str(error))
            else:
                return backend.load(spec, result)
        raise GrammarError("; ".join(dict.fromkeys(reasons)))

    def _finish(
        self,
        job: _Compilation,
        result: CompiledGrammar | GrammarError,
        outcome: str,
        *,
        keep: bool = True,
    ) -> None:
        """Complete the future of a job.

        Parameters
        ----------
        job
            The finished job.
        result
            The compiled grammar, or the exception of the future.
        outcome
            Name of the counter to increment.
        keep
            Whether to cache the result. False for an error that may not occur again.
        """
        if keep:
            self._keep(job.spec, str(result) if isinstance(result, GrammarError) else result)
        with self._lock:
            self._counts[outcome] += 1
            self._pending.pop(job.spec, None)
        if isinstance(result, GrammarError):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)

    def _keep(self, spec: Spec, outcome: Outcome) -> None:
        try:
            self._shared.cache.put(spec, outcome)
        except BaseException as error:  # the `nbytes` of a user-defined backend may be invalid
            _log.warning("compiled grammar not cached: %s: %s", type(error).__name__, error)


@contextmanager
def _log_errors(subject: str) -> Iterator[None]:
    """Return a context manager that logs an exception instead of raising it.

    The log message begins with `subject`. A compile thread must survive every exception, even a
    SystemExit that a done callback or a user-defined backend raises. Otherwise, later grammars
    would never be compiled.
    """
    try:
        yield
    except BaseException as error:
        _log.error("%s: %s: %s", subject, type(error).__name__, clean_message(error))


def _completed(outcome: Outcome) -> Future[CompiledGrammar]:
    """Return a new future that has already completed with a cached outcome.

    Callers do not share a future, because a future keeps alive its callbacks, the traceback of its
    exception, and all objects to which these refer.
    """
    future: Future[CompiledGrammar] = Future()
    future.set_running_or_notify_cancel()
    if isinstance(outcome, CompiledGrammar):
        future.set_result(outcome)
    else:
        future.set_exception(GrammarError(outcome))
    return future


def _require_output(compiled: CompiledGrammar) -> None:
    """Raise `GrammarError` if the grammar allows no first token.

    If the vocabulary cannot spell every text, the absence of a legal token may be caused by the
    vocabulary instead of the grammar. The grammar is then accepted, and the request ends when no
    token is legal.
    """
    vocabulary = compiled.backend.vocabulary
    if not (vocabulary.spells_everything and vocabulary.stop_ids):
        return
    import numpy as np

    row = np.zeros(vocabulary.words, np.int32)
    if compiled.matcher().fill(row) and not row.any():
        raise GrammarError(f"{compiled.spec.kind}: allows no output")
