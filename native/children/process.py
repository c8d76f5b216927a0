"""Calls in child processes that can be killed.

A search with Python's ``re``, a call of a grammar library and the rendering of a chat template
cannot be interrupted. Work whose running time depends on a user's input therefore runs in a child
process with limits of time and memory. This applies to reading, routing, compiling and checking
grammars, and to rendering chat templates. A child process is started on first use and reused for
later calls. If the process was killed or has exited, the next call starts a new process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from graft.native.children.errors import ChildLost, ChildTimeout, Refusal

__all__ = [
    "MEMORY_BYTES",
    "TIMEOUT_S",
    "Call",
    "ChildProcess",
    "ProcessPool",
    "Setup",
]

#: Default time limit of one call, in seconds.
TIMEOUT_S = 30.0
#: Default address space that the calls of one process may add, in bytes.
MEMORY_BYTES = 4 << 30
# Time limit for starting Python and importing graft, and for the setup of a call, in seconds.
_START_TIMEOUT_S = 120.0
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
    """

    function: str
    arguments: tuple[Any, ...]
    setup: Setup | None = None


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
        self._finished_setups: set[str] = set()
        _children.add(self)

    def call(self, call: Call, timeout_s: float = TIMEOUT_S) -> Any:
        """Run a call in the process and return its result.

        The process is started if it is not running. If other threads have calls under way in this
        process, this call first waits for their end. `timeout_s` does not include the waiting time.

        Raises
        ------
        Refusal
            The function raised a subclass of `Refusal`; the exception is of the same type.
        ChildTimeout
            The call took longer than `timeout_s`; the process was killed.
        ChildLost
            The process could not be started, was killed, exited or ran out of memory, or the
            function raised an exception that is not a `Refusal`.
        """
        with self._call_lock:
            try:
                return self._call(call, timeout_s)
            except (TimeoutError, EOFError, OSError) as error:
                raise self._lost(error, timeout_s) from error

    def start(self) -> None:
        """Start the process if it is not running, without waiting until the process is ready.

        If the process cannot be started, the next `call` raises the error.
        """
        with self._call_lock, contextlib.suppress(ChildLost, EOFError, OSError):
            if self._process is None:
                self._spawn()

    @property
    def idle(self) -> bool:
        """Whether the process runs and serves no call."""
        if not self._call_lock.acquire(blocking=False):
            return False
        self._call_lock.release()
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Kill the process. A call that another thread has under way raises `ChildLost`."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        with self._call_lock:
            self._reap(kill=True)

    def _call(self, call: Call, timeout_s: float) -> Any:
        if self._process is None:
            self._spawn()
        try:
            if not self._ready:
                self._read(_START_TIMEOUT_S)
                self._ready = True
            setup = call.setup
            if setup is not None and setup.key not in self._finished_setups:
                self._exchange(setup.function, setup.arguments, _START_TIMEOUT_S)
                self._finished_setups.add(setup.key)
            return self._exchange(call.function, call.arguments, timeout_s)
        except (Refusal, ChildLost, EOFError, OSError):  # TimeoutError is an OSError
            raise
        except BaseException:
            # An exception such as KeyboardInterrupt ended the call before the reply was read. Kill
            # the process, because the next call would otherwise receive this reply.
            self._reap(kill=True)
            raise

    def _exchange(self, function: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """Send a call to the process and return the result from the reply.

        If the reply contains an exception, raise this exception.
        """
        # Sending does not block, because an idle process waits for data on the pipe.
        self._pipe.send((function, arguments))
        outcome, value = self._read(timeout_s)
        if outcome == "value":
            return value
        if outcome == "refused":
            refusal_type, message = value
            raise refusal_type(message)
        if outcome == "memory":
            raise ChildLost(f"needs more than {self._memory_limit()}")
        raise ChildLost(value)

    def _read(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError
        return self._pipe.recv()

    def _memory_limit(self) -> str:
        return f"{self.memory_bytes / (1 << 30):.3g} GiB of memory"

    def _lost(self, error: Exception, timeout_s: float) -> ChildLost:
        """Reap the process after a call without a reply, and return the exception to raise."""
        timed_out = isinstance(error, TimeoutError)
        status = self._reap(kill=timed_out or self._closed)
        if timed_out:
            return ChildTimeout(f"took longer than {timeout_s:g} s")
        if self._closed:
            return ChildLost("the process was stopped")
        return ChildLost(
            f"the process, limited to {self._memory_limit()}, ended with status {status}"
        )

    def _spawn(self) -> None:
        with self._lock:
            if self._closed:
                raise EOFError
            self._process, self._pipe = _spawn(self.memory_bytes, self.preload)
        self._finished_setups.clear()
        self._ready = False

    def _reap(self, *, kill: bool) -> int | None:
        """Wait until the process exits and return its exit status; None if there is no process."""
        with self._lock:
            process = self._process
            self._process = None
        if process is None:
            return None
        if kill:
            process.kill()
        self._pipe.close()
        return process.wait()


# With PR_SET_PDEATHSIG, the kernel kills a child when the thread that started the child ends, even
# if the parent process continues. One thread therefore starts all children. This thread lives as
# long as the Python interpreter.
_starter = ThreadPoolExecutor(1, thread_name_prefix="graft-children")
_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _spawn(
    memory_bytes: int, preload: tuple[str, ...]
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a child process and return the process and the parent's end of the pipe."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    parent_end, child_end = Pipe()
    pipe_fd = child_end.fileno()
    numbers = map(str, (os.getpid(), memory_bytes, pipe_fd))
    command = [sys.executable, "-P", "-c", _COMMAND, *numbers, *preload]
    # With lazy binding, the dynamic linker would terminate the process if it had to resolve a
    # symbol after the memory of the process is exhausted.
    environment = {**os.environ, "PYTHONPATH": path, "LD_BIND_NOW": "1"}

    def start() -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        return subprocess.Popen(
            command,
            env=environment,
            stdin=null,
            stdout=null,
            stderr=null,
            pass_fds=[pipe_fd],
        )

    with child_end:
        try:
            return _starter.submit(start).result(), parent_end
        except RuntimeError:
            raise ChildLost("no process can be started while Python shuts down") from None


class ProcessPool:
    """A pool of reusable child processes. Thread-safe.

    Parameters
    ----------
    preload
        As in `ChildProcess`.
    """

    def __init__(self, preload: tuple[str, ...] = ()):
        self._preload = preload
        self._idle: list[ChildProcess] = []

    def new(self, memory_bytes: int = MEMORY_BYTES) -> ChildProcess:
        """Return a process that is not started yet. The caller must pass it to `release` later."""
        return ChildProcess(memory_bytes, self._preload)

    def acquire(self, memory_bytes: int = MEMORY_BYTES) -> ChildProcess:
        """Return an idle process, or a new one if none is idle.

        The caller must pass it to `release`.
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
        """Run a call in a process of the pool and return its result.

        Concurrent calls run in different processes.

        Parameters
        ----------
        call
            The function and its arguments.
        timeout_s
            Time limit in seconds; None for `TIMEOUT_S`.

        Raises
        ------
        Refusal, ChildTimeout, ChildLost
            As `ChildProcess.call`.
        """
        child = self.acquire()
        try:
            return child.call(call, TIMEOUT_S if timeout_s is None else timeout_s)
        finally:
            self.release(child)


def _reset_after_fork() -> None:
    """Forget all child processes of the parent. Called in a process that `os.fork` has created.

    The forked process does not have the starter thread, and it shares the pipes with its parent.
    The forked process must therefore start child processes of its own.
    """
    global _starter
    _starter = ThreadPoolExecutor(1, thread_name_prefix="graft-children")
    for child in list(_children):
        child.__init__(child.memory_bytes, child.preload)  # type: ignore[misc]


os.register_at_fork(after_in_child=_reset_after_fork)


@atexit.register
def _close_all() -> None:
    """Kill all processes, including those of engines that were not closed."""
    for child in list(_children):
        child.close()
