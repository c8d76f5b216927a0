"""The parent's side of a compiling process: started when first needed, killed when too slow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any, BinaryIO, cast

from . import compile_child

__all__ = ["ChildLost", "CompileProcess"]

START_S = 120.0  # for a child to import its library and sort the vocabulary


class ChildLost(Exception):
    """The child died or was killed; the text says why. It takes one grammar with it."""


class CompileProcess:
    """One compiling process: one request at a time, from one thread.

    Parameters
    ----------
    setup
        First message of `compile_child`: backend, vocabulary, address space in bytes.
    doing
        What its user calls its work: ``"compile"`` or ``"check"``.
    """

    def __init__(self, setup: Any, doing: str = "compile"):
        # The child finds the same packages; -P keeps its own folder out of the way.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", compile_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # binding symbols lazily would end the child when its memory is used up
            env={**os.environ, "PYTHONPATH": path, "LD_BIND_NOW": "1"},
        )
        self.pid = self._process.pid
        self._setup: Any = setup
        self._doing, self._name = doing, f"the {doing.removesuffix('e')}ing process"
        self._memory_gib = setup[2] / (1 << 30)
        self._expired = self._stopped = False

    def ask(self, request: Any, timeout_s: float) -> Any:
        """One request, one answer; the child is killed when the time is up.

        Raises
        ------
        ChildLost
            If the child was killed or died.
        """
        if self._setup is not None:
            self._exchange(self._setup, START_S, f"start {self._name}")
            self._setup = None
        return self._exchange(request, timeout_s, self._doing)

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
                raise ChildLost(f"took longer than {timeout_s:g} s to {doing}") from error
            if self._stopped:
                raise ChildLost(f"{self._name} was stopped") from error
            limit = f"{self._memory_gib:.3g} GiB of memory"
            said = f"{self._name}, limited to {limit}, ended with status {code}"
            raise ChildLost(said) from error
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()

    def stop(self) -> None:
        """Kill the child, from any thread; what it compiles is lost."""
        self._stopped = True
        self._process.kill()

    def wait(self) -> None:
        """Reap the child that was stopped."""
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
