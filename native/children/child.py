"""Main loop of a child process.

The parent (`process.ChildProcess`) sends ``(function, arguments)`` through a pipe, where
``function`` is ``"package.module:function"``. The child replies with a pair:

``("value", result)``
    The function returned.
``("refused", (type, message))``
    The function raised a `Refusal`.
``("memory", "")``
    The function ran out of memory.
``("failed", "Type: message")``
    The function raised another exception.

In the child, file descriptors 1 and 2 (standard output and standard error) refer to the same
in-memory file. The child truncates the file before each call. A called function can therefore read
from the file what a library has printed during the call.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from graft.native.children.errors import Refusal

__all__ = ["STACK_BYTES", "main"]

#: Maximum size of the stack on which calls run, in bytes.
STACK_BYTES = 8 << 20

_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 10_000  # maximum length of the message of an unexpected exception


def _run(function: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """Call a function by name and return the reply for the parent."""
    module_name, _, function_name = function.partition(":")
    os.ftruncate(1, 0)
    os.lseek(1, 0, os.SEEK_SET)
    try:
        module = importlib.import_module(module_name)
        result = getattr(module, function_name)(*arguments)
    except Refusal as error:
        return "refused", (type(error), str(error))
    except BaseException as error:  # a Rust panic in LLGuidance is raised as a BaseException
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return "memory", ""
        message = f"{type(error).__name__}: {error}"
        return "failed", message[:_MAX_MESSAGE]
    return "value", result


def _limit_memory(additional_bytes: int) -> None:
    """Limit the address space of this process to its present size plus `additional_bytes`.

    If the process has inherited a lower hard limit (``RLIMIT_AS``), the lower limit applies.
    """
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limit = mapped + additional_bytes
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def _limit_stack() -> None:
    """Limit the stack of the main thread, which runs the calls, to `STACK_BYTES`.

    If the process has inherited a lower hard limit (``RLIMIT_STACK``), the lower limit applies.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_STACK)
    limit = STACK_BYTES
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_STACK, (limit, hard_limit))


def main(arguments: Sequence[str]) -> None:
    """Serve calls until the parent closes the pipe or dies.

    Parameters
    ----------
    arguments
        In order: process id of the parent; address space that the calls may add, in bytes; file
        descriptor of the child's end of the pipe; names of modules that are imported before the
        address space is limited.
    """
    parent, memory_bytes, pipe_fd = map(int, arguments[:3])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    printed = os.memfd_create("printed")
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    for module in arguments[3:]:
        importlib.import_module(module)
    _limit_stack()
    _limit_memory(memory_bytes)
    pipe = Connection(pipe_fd)
    pipe.send("ready")
    while True:
        try:
            function, function_arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(function, function_arguments))
