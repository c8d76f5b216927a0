"""Prompt lookup (Saxena, 2023): the n-grams at a request's end, and what followed them before."""

from __future__ import annotations

from graft.cudagraph.errors import OptionError
from graft.models.drafters.base import DrafterContext
from graft.models.drafters.lookup import PromptLookup

__all__ = ["NGram"]

_VOTES = {"longest": "NONE", "all": "ALL"}


class NGram(PromptLookup):
    """Drafts what followed the last tokens where they stood before.

    Parameters
    ----------
    longest, shortest, drafts, public, kept, oldest : see `Texts`.
    match : "longest" follows the one place that fits with most tokens; with "all" every suffix of
        `shortest` to `longest` tokens is looked up, and each draft is what followed most of them.

    Raises
    ------
    OptionError
        Naming the option that is out of range.
    """

    def __init__(
        self,
        room: DrafterContext,
        *,
        longest: int = 4,
        shortest: int = 1,
        drafts: int | None = None,
        public: bool = False,
        kept: int = 16,
        oldest: bool = False,
        match: str = "longest",
    ):
        if match not in _VOTES:
            raise OptionError(f"NGram: match must be one of {', '.join(_VOTES)}, got {match!r}")
        super().__init__(
            room,
            longest=longest,
            shortest=shortest,
            drafts=drafts,
            public=public,
            kept=kept,
            oldest=oldest,
            vote=_VOTES[match],
            factor=1e6,
            threshold=0.0,
        )
