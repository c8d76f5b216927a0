"""The process that answers questions which may run away, crash, or take all memory.

The parent (`process.Child`) sends questions through a pipe: the name of a function
(``"package.module:function"``) and its arguments. Answers are ``("value", result)``,
``("refused", message)`` of a ``GrammarError``, ``("memory", message)`` and ``("failed", message)``.
What a library prints lands in file 1, a file in memory that is empty when a question begins.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
from multiprocessing.connection import Connection
from typing import Any

from graft.grammar.errors import GrammarError, clean_message

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def _answer(function: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    module, _, name = function.partition(":")
    os.ftruncate(1, 0)
    os.lseek(1, 0, os.SEEK_SET)
    try:
        return "value", getattr(importlib.import_module(module), name)(*arguments)
    except GrammarError as error:
        return "refused", str(error)
    except BaseException as error:  # a panic of LLGuidance is no Exception
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return "memory", ""
        return "failed", f"{type(error).__name__}: {clean_message(error)}"


def _limit_memory(more: int) -> None:
    """Let this process map so many bytes beyond what it has; a limit it came with stays one."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = mapped + more if hard == resource.RLIM_INFINITY else min(mapped + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def main(parent: int, memory_bytes: int, file: int) -> None:
    """Serve until the parent closes the pipe, which is this file, or dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    printed = os.memfd_create("printed")
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    _limit_memory(memory_bytes)
    pipe = Connection(file)
    pipe.send("ready")
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(*question))
