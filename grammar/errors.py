"""Errors of the grammar room."""

from __future__ import annotations

from graft.cudagraph.errors import GraftError

__all__ = ["GrammarError", "GuideError"]


class GrammarError(GraftError):
    """A grammar, or the vocabulary it is compiled for, was refused; the request fails alone."""


class GuideError(GraftError):
    """The guided decoder was used against its protocol (lapping, a foreign matcher, closed)."""
