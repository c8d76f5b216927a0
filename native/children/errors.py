"""Exceptions of calls into child processes."""

from __future__ import annotations

__all__ = ["ChildLost", "ChildTimeout", "Refusal"]


class Refusal(Exception):
    """Base class of the exceptions that a child process passes on to its caller.

    A function that raises a subclass in the child makes the call raise the same type with the same
    message in the parent. The type must be importable and constructible from the message alone.
    Every other exception becomes a `ChildLost`.
    """


class ChildLost(Exception):
    """The call has no result, but another attempt may have one.

    The child process was killed, died, ran out of memory, could not be started, or the function
    raised an exception that is not a `Refusal`. The message states the reason and does not name
    the function.
    """


class ChildTimeout(ChildLost):
    """The call exceeded its time limit, and the process was killed."""
