"""Questions asked of processes that can be killed: started when first needed, again after a loss.

One bound of time and memory holds for whatever a user's grammar is read, routed, compiled or judged
with, and for chat templates, since neither Python's ``re``, a grammar library nor a template can be
stopped from within.
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

from graft.grammar.errors import GrammarError

__all__ = [
    "LIMIT_S",
    "MEMORY_BYTES",
    "Child",
    "ChildLost",
    "Question",
    "TooSlow",
    "ask",
    "leave",
    "take",
]

#: Seconds that one question may take, and bytes of address space that its process may add.
LIMIT_S = 30.0
MEMORY_BYTES = 4 << 30
_START_S = 120.0  # for a process to import graft, or to learn a vocabulary
_IDLE = 3  # processes kept for whoever asks next, as many as an engine has; half a second each
_RUN = "import sys; from graft.native.children.child import main; main(*map(int, sys.argv[1:]))"


class ChildLost(GrammarError):
    """There is no answer, but another attempt may have one; the text says why, without a name."""


class TooSlow(ChildLost):
    """The time was up, and the process has been killed."""


class Question(NamedTuple):
    """A function of graft by name (``"package.module:function"``) and its arguments, picklable."""

    function: str
    arguments: tuple[Any, ...]
    #: A name and a question: asked once of each process before this one, outside its time.
    first: tuple[str, Question] | None = None


class Child:
    """One process at a time, which answers one question after the other; any thread may ask.

    Beyond what it has at its start it may take ``memory_bytes`` of address space.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES):
        self.memory_bytes = memory_bytes
        self._turn = threading.Lock()
        self._guard = threading.Lock()  # guards the three below
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._ready = False  # whether the process has said that it reads
        self._closed = False
        self._knows: set[str] = set()
        _children.add(self)

    def ask(self, question: Question, limit_s: float = LIMIT_S) -> Any:
        """The function's result, or the ``GrammarError`` that it raised.

        `ChildLost` if the process was killed, died, ran out of memory, or the function raised what
        it should not; `TooSlow` if it took longer than ``limit_s``.
        """
        with self._turn:
            try:
                if self._process is None:
                    self._start()
                if not self._ready:
                    self._read(_START_S)
                    self._ready = True
                if question.first is not None and question.first[0] not in self._knows:
                    self._answer(question.first[1], _START_S)
                    self._knows.add(question.first[0])
                return self._answer(question, limit_s)
            except (TimeoutError, EOFError, OSError) as error:
                raise self._lost(error, limit_s) from error
            except GrammarError:
                raise
            except BaseException:  # Ctrl-C: the next question is not to get this one's answer
                self._reap(kill=True)
                raise

    def warm(self) -> None:
        """Start the process, if it is not there, and do not wait for it; one that will not start
        says so when asked."""
        with self._turn, contextlib.suppress(ChildLost, EOFError, OSError):
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
            self._process, self._pipe = _spawn(self.memory_bytes)
        self._knows.clear()
        self._ready = False

    def _answer(self, question: Question, limit_s: float) -> Any:
        self._pipe.send(question[:2])  # it is not at work, so it reads
        outcome, value = self._read(limit_s)
        if outcome == "value":
            return value
        if outcome == "refused":
            raise GrammarError(value)
        raise ChildLost(value or f"needs more than {self._limit()}")

    def _read(self, limit_s: float) -> Any:
        if not self._pipe.poll(limit_s):
            raise TimeoutError
        return self._pipe.recv()

    def _limit(self) -> str:
        return f"{self.memory_bytes / (1 << 30):.3g} GiB of memory"

    def _lost(self, error: Exception, limit_s: float) -> ChildLost:
        late = isinstance(error, TimeoutError)
        code = self._reap(kill=late or self._closed)
        if late:
            return TooSlow(f"took longer than {limit_s:g} s")
        if self._closed:
            return ChildLost("the process was stopped")
        return ChildLost(f"the process, limited to {self._limit()}, ended with status {code}")

    def _reap(self, *, kill: bool) -> int | None:
        with self._guard:
            process = self._process
            self._process = None
        if process is None:
            return None
        if kill:
            process.kill()
        self._pipe.close()
        return process.wait()


# A process is told to die with the thread that started it, so a thread that stays starts them all.
_starter = ThreadPoolExecutor(1, thread_name_prefix="graft-children")
_children: weakref.WeakSet[Child] = weakref.WeakSet()
_idle: list[Child] = []


def _spawn(memory_bytes: int) -> tuple[subprocess.Popen[bytes], Connection]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    ours, theirs = Pipe()
    file = theirs.fileno()
    command = [sys.executable, "-P", "-c", _RUN, *map(str, (os.getpid(), memory_bytes, file))]
    # binding symbols lazily would end the child when its memory is used up
    environment = {**os.environ, "PYTHONPATH": path, "LD_BIND_NOW": "1"}

    def start() -> subprocess.Popen[bytes]:
        none = subprocess.DEVNULL
        return subprocess.Popen(
            command, env=environment, stdin=none, stdout=none, stderr=none, pass_fds=[file]
        )

    with theirs:
        try:
            return _starter.submit(start).result(), ours
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


def _forget() -> None:
    """In a forked process, which has its parent's thread and pipes not, or not to itself."""
    global _starter
    _starter = ThreadPoolExecutor(1, thread_name_prefix="graft-children")
    _idle.clear()
    for child in list(_children):
        child.__init__(child.memory_bytes)  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _close_all() -> None:
    """Leave no process behind, of engines that nobody closed either."""
    for child in list(_children):
        child.close()
