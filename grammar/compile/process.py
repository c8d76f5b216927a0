"""Questions asked of processes that can be killed: started when first needed, again after a loss.

One bound of time and memory holds for whatever a user's grammar is read, routed, compiled or judged
with, since neither Python's ``re`` nor a grammar library can be stopped from within.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, cast

from graft.grammar.errors import GrammarError

__all__ = [
    "LIMIT_S", "MEMORY_BYTES", "Child", "ChildLost", "Question", "TooSlow", "ask", "leave", "take"
]  # fmt: skip

#: Seconds that one question may take, and bytes of address space that its process may add.
LIMIT_S, MEMORY_BYTES = 30.0, 4 << 30
_START_S = 120.0  # for a process to import graft, or to learn a vocabulary
_IDLE = 2  # processes kept for whoever asks next: to start one costs a good part of a second
_RUN = "import sys; from graft.grammar.compile.child import main; main(*map(int, sys.argv[1:]))"


class ChildLost(GrammarError):
    """There is no answer, but another attempt may have one; the text says why, without a name."""


class TooSlow(ChildLost):
    """The time was up, and the process has been killed."""


@dataclass(frozen=True)
class Question:
    """A function of graft by name (``"package.module:function"``) and its arguments, picklable.

    Attributes
    ----------
    first
        A name and a question: asked once of each process before this one, outside its time.
    """

    function: str
    arguments: tuple[Any, ...]
    first: tuple[str, Question] | None = None


class Child:
    """One process at a time, which answers one question after the other; any thread may ask.

    Parameters
    ----------
    memory_bytes
        Address space that the process may take beyond that of its start.
    doing
        What it is there for, as a verb: ``"compile"`` or ``"check"``.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES, doing: str = "compile"):
        self.memory_bytes, self._doing = memory_bytes, doing
        self._name = f"the {doing.removesuffix('e')}ing process"
        self._turn = threading.Lock()
        self._guard = threading.Lock()  # guards the two below
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._knows: set[str] = set()
        _children.add(self)

    @property
    def pid(self) -> int | None:
        """Id of the process, if there is one."""
        process = self._process
        return None if process is None else process.pid

    def ask(self, question: Question, limit_s: float = LIMIT_S) -> Any:
        """The function's result.

        Raises
        ------
        GrammarError
            As the function raised it.
        ChildLost
            If the process was killed, died, ran out of memory, or the function raised what it
            should not. `TooSlow` if it took longer than ``limit_s``.
        """
        with self._turn:
            try:
                if self._process is None:
                    self._start()
                if question.first is not None and question.first[0] not in self._knows:
                    self._answer(question.first[1], _START_S)
                    self._knows.add(question.first[0])
                return self._answer(question, limit_s)
            except (TimeoutError, EOFError, OSError) as error:
                raise self._lost(error, limit_s) from error

    def warm(self) -> None:
        """Start the process, if it is not there; one that will not start says so when asked."""
        with self._turn, contextlib.suppress(ChildLost, TimeoutError, EOFError, OSError):
            if self._process is None:
                self._start()

    @property
    def resting(self) -> bool:
        """Whether it has a process that nobody is asking."""
        if not self._turn.acquire(blocking=False):
            return False
        self._turn.release()
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Kill the process, from any thread; whoever waits for its answer gets `ChildLost`."""
        with self._guard:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        with self._turn:
            self._reap(kill=True)

    def _start(self) -> None:
        with self._guard:
            if self._closed:
                raise EOFError
            self._process = _spawn(self.memory_bytes)
        self._knows.clear()
        self._read(time.monotonic() + _START_S)

    def _answer(self, question: Question, limit_s: float) -> Any:
        deadline = time.monotonic() + limit_s
        self._write((question.function, question.arguments), deadline)
        outcome, value = self._read(deadline)
        if outcome == "value":
            return value
        if outcome == "refused":
            raise GrammarError(value)
        if outcome == "memory":
            raise ChildLost(f"needs more than {self._limit()} to {self._doing}")
        raise ChildLost(value)

    def _limit(self) -> str:
        return f"{self.memory_bytes / (1 << 30):.3g} GiB of memory"

    def _lost(self, error: Exception, limit_s: float) -> ChildLost:
        late = isinstance(error, TimeoutError)
        code = self._reap(kill=late or self._closed)
        if late:
            return TooSlow(f"took longer than {limit_s:g} s to {self._doing}")
        if self._closed:
            return ChildLost(f"{self._name} was stopped")
        return ChildLost(f"{self._name}, limited to {self._limit()}, ended with status {code}")

    def _reap(self, *, kill: bool) -> int | None:
        with self._guard:
            process, self._process = self._process, None
        if process is None:
            return None
        if kill:
            process.kill()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                cast(IO[bytes], stream).close()
        return process.wait()

    def _write(self, message: Any, deadline: float) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        left = memoryview(len(data).to_bytes(8, "little") + data)
        file = self._file("stdin")
        os.set_blocking(file, False)
        while left:
            _await(file, select.POLLOUT, deadline)
            left = left[os.write(file, left) :]

    def _read(self, deadline: float) -> Any:
        file = self._file("stdout")
        size = int.from_bytes(_take(file, 8, deadline), "little")
        return pickle.loads(_take(file, size, deadline))

    def _file(self, name: str) -> int:
        process = self._process
        if process is None:
            raise EOFError
        return cast(int, getattr(process, name).fileno())


def _await(file: int, event: int, deadline: float) -> None:
    waiting = select.poll()
    waiting.register(file, event)
    if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _take(file: int, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        _await(file, select.POLLIN, deadline)
        part = os.read(file, size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# A process is told to die with the thread that started it, so a thread that stays starts them all.
_starter = ThreadPoolExecutor(1, thread_name_prefix="graft-children")
_children: weakref.WeakSet[Child] = weakref.WeakSet()
_idle: list[Child] = []


def _spawn(memory_bytes: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [sys.executable, "-P", "-c", _RUN, str(os.getpid()), str(memory_bytes)]
    # binding symbols lazily would end the child when its memory is used up
    environment = {**os.environ, "PYTHONPATH": path, "LD_BIND_NOW": "1"}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip

    try:
        return _starter.submit(start).result()
    except RuntimeError:
        raise ChildLost("it is too late: Python ends") from None


def take(memory_bytes: int = MEMORY_BYTES) -> Child:
    """A process that somebody has left, or a new one."""
    if memory_bytes == MEMORY_BYTES:
        with contextlib.suppress(IndexError):
            return _idle.pop()
    return Child(memory_bytes)


def leave(child: Child) -> None:
    """Keep a process for the next one; what it is doing ends with it."""
    if len(_idle) < _IDLE and child.resting and child.memory_bytes == MEMORY_BYTES:
        _idle.append(child)
    else:
        child.close()


def ask(question: Question, limit_s: float | None = None) -> Any:
    """`Child.ask` of a process shared by all who ask so: nobody waits for another's answer."""
    child = take()
    try:
        return child.ask(question, LIMIT_S if limit_s is None else limit_s)
    finally:
        leave(child)


@atexit.register
def _close_all() -> None:
    """Leave no process behind, of engines that nobody closed either."""
    for child in list(_children):
        child.close()
