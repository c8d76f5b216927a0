"""Errors of the grammar room."""

from __future__ import annotations

import re

from graft.cudagraph.errors import GraftError

__all__ = ["GrammarError", "GuideError", "clean_message"]


class GrammarError(GraftError):
    """A grammar, or the vocabulary it is compiled for, was refused; the request fails alone."""


class GuideError(GraftError):
    """The guided decoder was used against its protocol (lapping, a foreign matcher, closed)."""


def clean_message(error: BaseException | str) -> str:
    """A backend's sentence without time, source file, check, parser state and backtrace."""
    lines = str(error).strip().splitlines()
    text = lines[-1] if lines and lines[0].startswith("Traceback") else " ".join(lines)
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Warning: )?", "", text)
    text = re.sub(r"Check failed: \(.*?\) is false: ", "", text)
    text = re.sub(r"<(state|backtrace)>.*", "", text, flags=re.DOTALL)
    text = re.sub(r" The JSON string is:.*", "", text, flags=re.DOTALL)
    text = re.sub(r";? following special tokens are available: \W*$", "", text)
    text = re.sub(r"\s*(Stack backtrace:|<backtrace>|\s0: ).*", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text).strip()[:500]
