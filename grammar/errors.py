"""Exceptions of the grammar package."""

from __future__ import annotations

import re

from graft.cudagraph.errors import GraftError
from graft.native.children.errors import Refusal

__all__ = ["GrammarError", "GuideError", "clean_message"]


class GrammarError(GraftError, Refusal):
    """A grammar or a vocabulary is not valid or not supported.

    In an engine it fails only the request that the grammar belongs to. A child process passes it on
    to its caller (see `Refusal`).
    """


class GuideError(GraftError):
    """The guided decoder was used against its protocol.

    For example, replays were published out of order, one matcher was used for two requests, or the
    decoder is closed.
    """


def clean_message(error: BaseException | str) -> str:
    """Return a backend's error message as one line of at most 500 characters.

    Times, source files, failed checks, parser states and backtraces are removed.
    """
    lines = str(error).strip().splitlines()
    traceback = bool(lines) and re.match(r"(\w+: )?Traceback", lines[0]) is not None
    text = lines[-1] if traceback else " ".join(lines)
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Warning: )?", "", text)
    text = re.sub(r"Check failed: \(.*?\) is false: ", "", text)
    text = re.sub(r"<(state|backtrace)>.*", "", text, flags=re.DOTALL)
    text = re.sub(r" The JSON string is:.*", "", text, flags=re.DOTALL)
    text = re.sub(r";? following special tokens are available: \W*$", "", text)
    text = re.sub(r"\s*(Stack backtrace:|<backtrace>|\s0: ).*", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text).strip()[:500]
