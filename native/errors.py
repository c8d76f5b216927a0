"""Exceptions that all packages of graft use, and a function that formats values for messages.

Every message names the object and the value that caused it. Grammar compilers import this module
instead of `graft.cudagraph.errors`, so that child processes that compile grammars need not load the
CUDA bindings.
"""

from __future__ import annotations

__all__ = ["GraftError", "OptionError", "short_repr"]


class GraftError(Exception):
    """Base class of all errors that graft raises deliberately.

    `param` names the argument or the field of the request that is at fault; None if the error does
    not belong to a single one.
    """

    param: str | None = None


class OptionError(GraftError):
    """An argument has an invalid value, or the state of the object does not allow the call."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def short_repr(value: object, max_length: int = 80) -> str:
    """Return the repr of a value, truncated to `max_length` characters.

    If `repr` raises an exception, for example for an integer with thousands of digits, return a
    description of the type.
    """
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} without a printable value"
    if len(text) > max_length:
        return f"{text[:max_length]}..."
    return text
