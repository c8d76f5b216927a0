"""Exceptions of the grammar package."""

from __future__ import annotations

import re

from graft.native.children.errors import Refusal
from graft.native.errors import GraftError

__all__ = [
    "GrammarBackendError",
    "GrammarError",
    "GrammarUnavailableError",
    "GuideError",
    "MatcherError",
    "UnsupportedFormatError",
    "clean_message",
    "describe",
]

_MAX_MESSAGE = 500
#: Parts of the backends' error messages that are removed, in this order.
_NOISE = (
    re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Warning: )?"),
    re.compile(r"Check failed: \(.*?\) is false: "),
    re.compile(r"<(state|backtrace)>.*", re.DOTALL),
    re.compile(r" The JSON string is:.*", re.DOTALL),
    re.compile(r";? following special tokens are available: \W*$"),
    re.compile(r"\s*(Stack backtrace:|<backtrace>|\s0: ).*", re.DOTALL),
)


class GrammarError(GraftError, Refusal):
    """A grammar or a vocabulary is invalid or not supported.

    In an engine, the error ends only the requests that use the grammar. If a call in a child
    process raises the error, the parent process raises it again (see `Refusal`).
    """

    param = "grammar"


class GrammarBackendError(GrammarError):
    """A grammar backend failed with an unexpected exception, which is the `__cause__`.

    The grammar itself may be valid.
    """

    @classmethod
    def of(cls, subject: str, cause: BaseException) -> GrammarBackendError:
        """Return the error with the given cause. Its message begins with `subject`."""
        error = cls(f"{subject}: {describe(cause)}")
        error.__cause__ = cause
        return error


class GrammarUnavailableError(GrammarError):
    """A grammar could not be checked or compiled, although it may be valid. Try again later.

    The child processes that work on grammars could not be started, were killed or got no processor
    time.
    """


class UnsupportedFormatError(GrammarError):
    """One backend cannot enforce a structural format. Another backend may support the format."""


class MatcherError(GrammarError):
    """The matcher of a grammar failed during generation.

    For example, it exceeded its limit of time or memory, because the grammar is too ambiguous.
    """


class GuideError(GraftError):
    """A method of the guided decoder was called in a state that does not allow it.

    For example, replays were published out of order, one matcher was used for two requests, or the
    decoder is closed.
    """


def describe(error: BaseException) -> str:
    """Return the type and the message of an exception from user code, as one line."""
    message = clean_message(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def clean_message(error: BaseException | str) -> str:
    """Return a backend's error message as one line of at most 500 characters.

    Time stamps, source locations, the text of failed C++ checks, parser states and backtraces are
    removed. Of a Python traceback, only the last line is kept.
    """
    lines = str(error).strip().splitlines()
    is_traceback = bool(lines) and re.match(r"(\w+: )?Traceback", lines[0]) is not None
    text = lines[-1] if is_traceback else " ".join(lines)
    for noise in _NOISE:
        text = noise.sub("", text)
    text = re.sub(r"\s+", " ", text).strip()
    return text[:_MAX_MESSAGE]
