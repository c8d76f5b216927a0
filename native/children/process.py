"""Calls in child processes that can be killed.

A search with Python's ``re``, a call of a grammar library and the rendering of a chat template
cannot be interrupted. Work whose running time depends on a user's input therefore runs in a child
process with limits of time and memory. This applies to reading, rewriting, compiling and checking
grammars, and to rendering chat templates. A child process is started on first use and reused for
later calls. If the process was killed or has exited, the next call starts a new process. If the
process dies during a call, the call is repeated in a new process. A killed process therefore does
not turn a valid call into an error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from graft.native.children.errors import (
    ChildCrashed,
    ChildLost,
    ChildTimeout,
    ChildUnavailable,
    Refusal,
)
from graft.native.children.usage import ProcessClock, TimeLimit, memory_of

__all__ = ["MEMORY_BYTES", "TIMEOUT_S", "Call", "ChildProcess", "ProcessPool", "Setup"]

#: Default time limit of one call, in seconds.
TIMEOUT_S = 30.0
#: Default limit of the address space that calls may allocate in a process, in bytes.
MEMORY_BYTES = 4 << 30
# Time limit for starting Python and importing graft, and for the setup of a call, in seconds.
_START_TIMEOUT_S = 120.0
# A process is killed if its resident memory exceeds this size after a call. Otherwise, the idle
# process would keep the memory, because the C library returns little of it to the system.
_MAX_RESIDENT_BYTES = 1 << 29
# Maximum time that a signal may stop a process during a call, in seconds.
_MAX_STOPPED_S = 0.5
# Maximum time that sending a part of a call, or receiving a part of a reply, may block, in seconds.
# An idle process waits for data, and a process that has begun a reply sends the rest at once, so
# the pipe blocks only if the process is stopped by a signal.
_PIPE_TIMEOUT_S = 10
# Seconds that a process may take to exit after its pipe was closed.
_EXIT_TIMEOUT_S = 5.0
# Seconds between two samples of the state of a process that runs a call.
_SAMPLE_INTERVAL_S = 0.05
# Maximum number of attempts to run a call, each in a new process. _MAX_CRASHES applies if the
# process crashes or exits, _MAX_KILLS if it is killed or stopped from outside.
_MAX_CRASHES = 2
_MAX_KILLS = 3
# Signals that a process causes itself, for example by an invalid memory access.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
# Maximum number of idle processes that are kept for reuse. An engine uses three processes, and
# starting one takes 0.5 s.
_MAX_IDLE = 3
_COMMAND = "import sys; from graft.native.children.child import main; main(sys.argv[1:])"


class Setup(NamedTuple):
    """A function that a process runs once before the calls that require it.

    Attributes
    ----------
    key
        Identifier of the setup. A process runs the setup with a given key only once.
    function, arguments
        As in `Call`.
    """

    key: str
    function: str
    arguments: tuple[Any, ...]


class Call(NamedTuple):
    """A function to run in a child process, and its arguments.

    Attributes
    ----------
    function
        Name in the form ``"package.module:function"``.
    arguments
        Positional arguments. They and the result of the function must be picklable.
    setup
        Setup that the call requires; None if the call requires no setup. If the process has not
        run this setup yet, the process runs it before the call. The time of the setup does not
        count towards the time limit of the call.

    The function must have no lasting effect, because a call is repeated if its process dies.
    """

    function: str
    arguments: tuple[Any, ...]
    setup: Setup | None = None


class _Interrupted(Exception):
    """The process of a call died, was stopped or got no processor time; the message says which."""


class ChildProcess:
    """A child process that runs one call after another. Thread-safe.

    Parameters
    ----------
    memory_bytes
        Limit of the address space that calls may allocate, in bytes, in addition to the address
        space of the process after its imports.
    preload
        Names of modules that the process imports at start. The limits of calls do not apply to
        these imports.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES, preload: tuple[str, ...] = ()):
        self.memory_bytes = memory_bytes
        self.preload = preload
        self._call_lock = threading.Lock()  # held during a call
        self._lock = threading.Lock()  # guards the fields below
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._ready = False  # whether the process has reported that it has started
        self._closed = False
        self._mapped_bytes = 0  # address space of the process when it was ready
        self._peak_bytes = 0  # maximum growth of the address space after that
        self._finished_setups: set[str] = set()
        with _children_lock:
            _children.add(self)

    def call(self, call: Call, limit: float | TimeLimit = TIMEOUT_S) -> Any:
        """Run a call in the process and return its result.

        The process is started if it is not running. If calls of other threads are under way in the
        process, this call first waits for their end. If the process ends or is stopped by a signal
        before it has returned a result, the call is repeated in a new process, at most twice.

        Parameters
        ----------
        call
            The function and its arguments.
        limit
            Time limit of the call in seconds, or a limit that several calls share. The time in
            which the process waits for a processor does not count; see
            `graft.native.children.usage`.

        Raises
        ------
        Refusal
            The function raised a subclass of `Refusal`; the exception is of the same type.
        ChildTimeout
            The call took longer than its limit; the process was killed.
        ChildUnavailable
            A process could not be started, or the processes that ran the call crashed, were killed,
            stopped or got no processor time. The same call may succeed later.
        ChildLost
            The call itself failed: each process that ran it exited, it ran out of memory, or the
            function raised an exception that is not a `Refusal`.
        """
        _reap_dead()
        time_limit = limit if isinstance(limit, TimeLimit) else TimeLimit(limit)
        with self._call_lock:
            used_before_s = time_limit.used_s
            attempts = 0
            while True:
                attempts += 1
                time_limit.used_s = used_before_s
                try:
                    return self._call(call, time_limit)
                except (_Interrupted, EOFError, OSError) as error:
                    lost = self._lost(error)
                    crashed = not isinstance(lost, ChildUnavailable) or isinstance(
                        lost, ChildCrashed
                    )
                    most = _MAX_CRASHES if crashed else _MAX_KILLS
                    if self._closed or attempts >= most or time_limit.is_over:
                        raise lost from error

    def start(self) -> None:
        """Start the process if it is not running, without waiting until the process is ready.

        If the process cannot be started, the next `call` raises the error.
        """
        with self._call_lock, contextlib.suppress(ChildLost, EOFError, OSError):
            self._ensure_running()

    @property
    def idle(self) -> bool:
        """Whether the process runs and no call is under way."""
        if not self._call_lock.acquire(blocking=False):
            return False
        try:  # close() changes the process while it holds the lock
            return self._process is not None and self._process.poll() is None
        finally:
            self._call_lock.release()

    def close(self) -> None:
        """Kill the process. A call that another thread has under way raises `ChildLost`."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        with self._call_lock:
            self._reap(kill=True)

    def _call(self, call: Call, limit: TimeLimit) -> Any:
        self._ensure_running()
        try:
            self._prepare(call.setup)
            try:
                return self._exchange(call.function, call.arguments, limit)
            except TimeoutError as error:
                self._reap(kill=True)
                raise ChildTimeout(f"took longer than {limit.seconds:g} s") from error
            finally:
                self._end_if_large()
        except (Refusal, ChildLost, _Interrupted, EOFError, OSError):
            raise
        except BaseException:
            # An exception such as KeyboardInterrupt ended the call before the reply was read. Kill
            # the process, because the next call would otherwise receive this reply.
            self._reap(kill=True)
            raise

    def _prepare(self, setup: Setup | None) -> None:
        """Wait until the process has started, and run `setup` if the process has not run it yet."""
        limit = TimeLimit(_START_TIMEOUT_S)
        try:
            if not self._ready:
                self._read(limit)
                self._ready = True
                assert self._process is not None
                self._mapped_bytes, _ = memory_of(self._process.pid)
                self._peak_bytes = 0
            if setup is not None and setup.key not in self._finished_setups:
                self._exchange(setup.function, setup.arguments, limit)
                self._finished_setups.add(setup.key)
        except TimeoutError as error:
            raise _Interrupted(f"did not start within {limit.seconds:g} s") from error

    def _exchange(self, function: str, arguments: tuple[Any, ...], limit: TimeLimit) -> Any:
        """Send a call to the process and return the result from the reply.

        If the reply contains an exception, raise this exception.
        """
        try:
            self._pipe.send((function, arguments))
        except BlockingIOError as error:
            raise _Interrupted(f"read no data for {_PIPE_TIMEOUT_S} s") from error
        outcome, value = self._read(limit)
        if outcome == "value":
            return value
        if outcome == "refused":
            refusal_type, message = value
            raise refusal_type(message)
        if outcome == "memory":
            self._reap(kill=True)  # an idle process would keep the memory
            raise ChildLost(f"needs more than {self._memory_limit()}")
        raise ChildLost(value)

    def _read(self, limit: TimeLimit) -> Any:
        """Return the next message of the process; raise TimeoutError if the limit is exceeded."""
        assert self._process is not None
        clock = ProcessClock(self._process.pid)
        start_s = time.monotonic() - limit.elapsed_s
        while not self._pipe.poll(min(_SAMPLE_INTERVAL_S, max(0.0, limit.remaining_s))):
            limit.used_s += clock.sample()
            limit.elapsed_s = time.monotonic() - start_s
            mapped, _ = memory_of(self._process.pid)
            self._peak_bytes = max(self._peak_bytes, mapped - self._mapped_bytes)
            if clock.stopped_s > _MAX_STOPPED_S:
                raise _Interrupted("was stopped by a signal")
            if limit.is_over and limit.used_s < limit.seconds / 2:
                raise _Interrupted("got no processor time")
            if limit.is_over:
                raise TimeoutError
        limit.used_s += clock.sample()
        limit.elapsed_s = time.monotonic() - start_s
        try:
            return self._pipe.recv()
        except BlockingIOError as error:
            raise _Interrupted(f"sent no data for {_PIPE_TIMEOUT_S} s") from error

    def _end_if_large(self) -> None:
        """Kill the process if its resident memory exceeds `_MAX_RESIDENT_BYTES` after a call."""
        if self._process is not None and memory_of(self._process.pid)[1] > _MAX_RESIDENT_BYTES:
            self._reap(kill=True)

    def _memory_limit(self) -> str:
        return f"{self.memory_bytes / (1 << 30):.3g} GiB of memory"

    def _lost(self, error: Exception) -> ChildLost:
        """Reap the process after a call without a reply, and return the exception to raise.

        `error` is the exception with which the exchange of messages ended.
        """
        interrupted = isinstance(error, _Interrupted)
        status = self._reap(kill=interrupted or self._closed)
        if self._closed:
            return ChildLost("the process was stopped")
        if interrupted:
            return ChildUnavailable(f"the child process {error}")
        if status is None:
            return ChildUnavailable(f"no child process can be started: {error}")
        if status < 0 and -status not in _CRASHES:
            name = signal.Signals(-status).name
            return ChildUnavailable(f"the child process was killed by another process ({name})")
        if self._peak_bytes > self.memory_bytes / 2:
            # The process has probably ended because its memory was exhausted. Such a process need
            # not end by a signal of `_CRASHES`: the dynamic linker exits with a status instead, and
            # some libraries call abort().
            return ChildLost(f"needs more than {self._memory_limit()}")
        if status < 0 and status != -signal.SIGABRT:  # SIGABRT: a library has called abort()
            name = signal.Signals(-status).name
            return ChildCrashed(f"the child processes ended with {name}")
        return ChildLost(
            f"the process, limited to {self._memory_limit()}, ended with status {status}"
        )

    def _ensure_running(self) -> None:
        """Start a process if there is none or if it has ended since the last call."""
        if self._process is not None and self._process.poll() is not None:
            self._reap(kill=False)
        if self._process is None:
            self._spawn()

    def _spawn(self) -> None:
        with self._lock:
            if self._closed:
                raise EOFError
            self._process, self._pipe = _spawn(self.memory_bytes, self.preload)
        self._finished_setups.clear()
        self._ready = False
        self._peak_bytes = 0

    def _reap(self, *, kill: bool) -> int | None:
        """Wait until the process exits and return its status; None if no process is running.

        With `kill`, or if the process does not exit within `_EXIT_TIMEOUT_S`, kill the process.
        """
        with self._lock:
            process = self._process
            self._process = None
        if process is None:
            return None
        self._pipe.close()
        if not kill:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_EXIT_TIMEOUT_S)
        process.kill()
        return process.wait()


# With PR_SET_PDEATHSIG, the kernel kills a child when the thread that started the child ends, even
# if the parent process continues. One thread therefore starts all children. This thread lives as
# long as the Python interpreter.
_starter = ThreadPoolExecutor(1, thread_name_prefix="graft-children")
_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()
_children_lock = threading.Lock()  # held while `_children` is changed or read


def _all_children() -> list[ChildProcess]:
    with _children_lock:
        return list(_children)


def _reap_dead() -> None:
    """Reap idle processes that have been killed. Until then, they remain as zombies."""
    for child in _all_children():
        process = child._process
        if process is not None:
            process.poll()


def _spawn(
    memory_bytes: int, preload: tuple[str, ...]
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a child process and return the process and the parent's end of the pipe."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    parent_end, child_end = Pipe()
    pipe_fd = child_end.fileno()
    with socket.socket(fileno=os.dup(parent_end.fileno())) as parent_socket:
        timeout = struct.pack("ll", _PIPE_TIMEOUT_S, 0)  # struct timeval
        parent_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        parent_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    numbers = map(str, (os.getpid(), memory_bytes, pipe_fd))
    command = [sys.executable, "-P", "-c", _COMMAND, *numbers, *preload]
    # With lazy binding, the dynamic linker would terminate the process if it had to resolve a
    # symbol after the memory of the process is exhausted. On a machine with many processors, the
    # threads of NumPy's OpenBLAS would take 2.6 GB of the address space that calls may allocate.
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "LD_BIND_NOW": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }

    def start() -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        return subprocess.Popen(
            command, env=environment, stdin=null, stdout=null, stderr=null, pass_fds=[pipe_fd]
        )

    with child_end:
        try:
            return _starter.submit(start).result(), parent_end
        except RuntimeError:
            raise ChildUnavailable("no process can be started while Python exits") from None


class ProcessPool:
    """A thread-safe pool of child processes that import the modules `preload` when they start."""

    def __init__(self, preload: tuple[str, ...] = ()):
        self._preload = preload
        self._idle: list[ChildProcess] = []

    def new(self, memory_bytes: int = MEMORY_BYTES) -> ChildProcess:
        """Return a process that is not started yet; see `ChildProcess` for `memory_bytes`.

        The caller must pass the process to `release` later.
        """
        return ChildProcess(memory_bytes, self._preload)

    def acquire(self, memory_bytes: int = MEMORY_BYTES) -> ChildProcess:
        """Return an idle process, or a new one if no idle process has this memory limit.

        The pool keeps only processes with the default limit. The caller must pass the process to
        `release` later.
        """
        if memory_bytes == MEMORY_BYTES:
            with contextlib.suppress(IndexError):
                return self._idle.pop()
        return self.new(memory_bytes)

    def release(self, child: ChildProcess) -> None:
        """Return a process to the pool.

        The pool kills the process instead of keeping it if a call is under way, if the memory
        limit of the process is not the default limit, or if the pool already has enough idle
        processes.
        """
        reusable = child.memory_bytes == MEMORY_BYTES and child.idle
        if reusable and len(self._idle) < _MAX_IDLE:
            self._idle.append(child)
        else:
            child.close()

    def call(self, call: Call, timeout_s: float | None = None) -> Any:
        """Run a call in a process of the pool and return its result; see `ChildProcess.call`.

        Concurrent calls run in different processes. Without `timeout_s`, the time limit is
        `TIMEOUT_S`.
        """
        child = self.acquire()
        try:
            return child.call(call, TIMEOUT_S if timeout_s is None else timeout_s)
        finally:
            self.release(child)


def _reset_after_fork() -> None:
    """Forget all child processes of the parent. Called in a process that `os.fork` has created.

    The forked process does not have the starter thread, and it shares the pipes with its parent.
    The forked process must therefore start child processes of its own. Another thread of the parent
    may have held the lock during the fork.
    """
    global _starter, _children_lock
    _starter = ThreadPoolExecutor(1, thread_name_prefix="graft-children")
    _children_lock = threading.Lock()
    for child in _all_children():
        child.__init__(child.memory_bytes, child.preload)  # type: ignore[misc]


os.register_at_fork(after_in_child=_reset_after_fork)


@atexit.register
def _close_all() -> None:
    """Kill all processes, including those of engines that were not closed."""
    for child in _all_children():
        child.close()
