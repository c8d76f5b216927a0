"""Exceptions of calls into child processes."""

from __future__ import annotations

__all__ = ["ChildCrashed", "ChildLost", "ChildTimeout", "ChildUnavailable", "Refusal"]


class Refusal(Exception):
    """Base class of the exceptions that are passed from a child process to the calling process.

    If the called function raises a subclass of `Refusal` in the child process,
    `ChildProcess.call` raises an exception of the same type with the same message in the parent
    process. The type must be importable, and its constructor must accept the message as its only
    argument. If the function raises any other exception, `ChildProcess.call` raises `ChildLost`.
    """


class ChildLost(Exception):
    """The call ended without a result of the function.

    The child process exited or ran out of memory, or the function raised an exception that
    is not a `Refusal`. The message states the reason and does not name the function.
    """


class ChildTimeout(ChildLost):
    """The call exceeded its time limit, and the process was killed."""


class ChildUnavailable(ChildLost):
    """No child process could finish the call, for a reason that lies outside the call.

    Processes could not be started, were killed or stopped by other processes or by the kernel, or
    got no processor time. The same call may succeed later.
    """


class ChildCrashed(ChildUnavailable):
    """Each process that ran the call ended with a signal such as SIGSEGV.

    The signal may be caused by the call or sent by another process. The parent process cannot
    distinguish these cases.
    """
