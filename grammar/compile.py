"""Compilation off the critical path, in processes that can be killed, with a cache."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any, BinaryIO, cast

from graft.cudagraph.errors import OptionError

from . import compile_child
from .backend import GrammarBackend
from .errors import GrammarError, clean_message
from .matcher import CompiledGrammar
from .spec import GrammarSpec

__all__ = ["CompileService"]

START_S = 60.0  # for a child to import its library and sort the vocabulary


class CompileService:
    """Compiles grammars for one backend without ever blocking its callers.

    Each of ``threads`` daemon threads owns one child process, started with the service. A
    grammar that takes too long is stopped by killing the child, and a crash kills the child only:
    either fails that one grammar, and the next one gets a new child.

    Parameters
    ----------
    backend
        The vocabulary to compile for; compiled grammars belong to it.
    threads
        Grammars compiled at once.
    cache_entries, cache_bytes
        Bounds of the cache of compiled grammars and refusals; least recently used goes first.
    timeout_s
        Seconds one grammar may take, from the moment a running child takes it up.
    memory_bytes
        Address space of one child.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        threads: int = 1,
        cache_entries: int = 256,
        cache_bytes: int = 1 << 30,
        timeout_s: float = 30.0,
        memory_bytes: int = 4 << 30,
    ):
        for name, value in (
            ("threads", threads),
            ("cache_entries", cache_entries),
            ("cache_bytes", cache_bytes),
            ("timeout_s", timeout_s),
            ("memory_bytes", memory_bytes),
        ):
            if not value > 0:
                raise OptionError(f"compile service: {name} is {value}, must be positive")
        self._backend = backend
        self._bounds = (cache_entries, cache_bytes)
        self._timeout_s, self._memory_bytes = timeout_s, memory_bytes
        self._lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._jobs: queue.SimpleQueue[tuple[GrammarSpec, Future[CompiledGrammar]] | None] = (
            queue.SimpleQueue()
        )
        self._closed = False
        self._children: set[_Child] = set()
        self._warm = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._work, name=f"graft-compile-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """A future of the compiled grammar, shared by all who ask for an equal ``spec``.

        The future raises ``GrammarError``, in one sentence, if the backend refuses the grammar,
        cannot enforce part of it, takes longer than ``timeout_s`` or dies of it. It cannot be
        cancelled.
        """
        with self._lock:
            if self._closed:
                raise GrammarError("compile service: is closed")
            future = self._cache.get(spec)
            if future is not None:
                self._cache.move_to_end(spec)
                return future
            future = Future()
            future.set_running_or_notify_cancel()  # others may wait for it: nobody cancels it
            self._cache[spec] = future
            self._trim()
        self._jobs.put((spec, future))
        return future

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until every child has been started; False when that takes longer."""
        deadline = time.monotonic() + timeout_s
        for taken in range(len(self._threads)):
            if not self._warm.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
                for _ in range(taken):
                    self._warm.release()
                return False
        for _ in self._threads:
            self._warm.release()
        return True

    def close(self) -> None:
        """Kill the children; what has not been compiled fails with ``GrammarError``."""
        with self._lock:
            self._closed = True
            children = list(self._children)
        for child in children:
            child.stop()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        child = self._warm_child()
        self._warm.release()
        while (job := self._jobs.get()) is not None:
            spec, future = job
            try:
                if self._backend.child is None:
                    compiled = self._backend.compile(spec)
                else:
                    if child is None:
                        child = self._start_child()
                    compiled = self._compile(child, spec)
            except _ChildLost as error:
                self._drop(child)
                child = None
                self._forget(spec, future)  # another attempt may have more luck
                future.set_exception(GrammarError(f"{spec.kind}: {error}"))
            except GrammarError as error:
                future.set_exception(error)
            except BaseException as error:  # whoever waits must hear of it
                self._drop(child)
                child = None
                self._forget(spec, future)
                future.set_exception(error)
            else:
                future.set_result(compiled)
        self._drop(child)

    def _compile(self, child: _Child, spec: GrammarSpec) -> CompiledGrammar:
        outcome, text, printed = child.ask(self._backend.request(spec), self._timeout_s)
        if outcome != "compiled":
            raise GrammarError(f"{spec.kind}: {clean_message(text)}")
        ignored = list(dict.fromkeys(clean_message(line) for line in printed.splitlines()))
        if ignored and not spec.partial:
            raise GrammarError(f"{spec.kind}: cannot be enforced as a whole: {'; '.join(ignored)}")
        return self._backend.load(spec, text)

    def _warm_child(self) -> _Child | None:
        """A child that is ready before the first grammar asks; None leaves it to that grammar."""
        if self._backend.child is None:
            return None
        try:
            child = self._start_child()
            child.start()
        except (_ChildLost, OSError):
            return None  # the first grammar tries again and hears why
        return child

    def _start_child(self) -> _Child:
        vocabulary = self._backend.vocabulary
        parts = (vocabulary.tokens, vocabulary.size, vocabulary.stop_ids, vocabulary.names)
        child = _Child((self._backend.child, parts, self._memory_bytes))
        with self._lock:
            self._children.add(child)
            closed = self._closed
        if closed:
            child.stop()
        return child

    def _drop(self, child: _Child | None) -> None:
        if child is not None:
            child.stop()
            child.wait()
            with self._lock:
                self._children.discard(child)

    def _forget(self, spec: GrammarSpec, future: Future[CompiledGrammar]) -> None:
        with self._lock:
            if self._cache.get(spec) is future:
                del self._cache[spec]

    def _trim(self) -> None:
        """Drop least recently used entries that are done until the bounds hold. Lock held."""
        entries, limit = self._bounds
        sizes = {
            spec: 0 if future.exception() else future.result().nbytes
            for spec, future in self._cache.items()
            if future.done()
        }
        total = sum(sizes.values())
        for spec, size in sizes.items():
            if len(self._cache) <= entries and total <= limit:
                break
            del self._cache[spec]
            total -= size


class _ChildLost(Exception):
    """The child died or was killed; the text says why."""


class _Child:
    """One compiling process."""

    def __init__(self, setup: Any):
        # The child finds the same packages; -P keeps its own folder out of the way.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", compile_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._setup: Any = setup
        self._expired = self._stopped = False

    def start(self) -> None:
        """Give the child its vocabulary, once; it then answers without further preparation."""
        if self._setup is not None:
            self._exchange(self._setup, START_S, "start the compiling process")
            self._setup = None

    def ask(self, request: Any, timeout_s: float) -> Any:
        """One request, one answer; the child is killed when the time is up."""
        self.start()
        return self._exchange(request, timeout_s, "compile")

    def _exchange(self, message: Any, timeout_s: float, doing: str) -> Any:
        timer = threading.Timer(timeout_s, self._expire)
        timer.daemon = True
        timer.start()
        to_child = cast(BinaryIO, self._process.stdin)
        from_child = cast(BinaryIO, self._process.stdout)
        try:
            compile_child.send(to_child, message)
            return compile_child.receive(from_child)
        except (EOFError, OSError) as error:
            code = self._process.wait()
            if self._expired:
                raise _ChildLost(f"took longer than {timeout_s:g} s to {doing}") from error
            if self._stopped:
                raise _ChildLost("the compile service was closed") from error
            raise _ChildLost(f"the compiling process ended with status {code}") from error
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()

    def stop(self) -> None:
        self._stopped = True
        self._process.kill()

    def wait(self) -> None:
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
