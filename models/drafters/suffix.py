"""Suffix decoding (Oliaro et al., "SuffixDecoding", 2024): drafts as long as what is repeated."""

from __future__ import annotations

from graft.models.drafters.base import DrafterContext
from graft.models.drafters.lookup import PromptLookup

__all__ = ["Suffix"]


class Suffix(PromptLookup):
    """Drafts what mostly followed the longest suffix that stood before, the longer the more.

    Parameters
    ----------
    longest, shortest, drafts, public, kept : see `Texts`.
    factor : at most so many drafts per token of the suffix.
    threshold : drafting ends where the estimated probability of all drafts, the product of their
        shares of what followed suffix and drafts before, would fall below it.

    Raises
    ------
    OptionError
        Naming the option that is out of range.
    """

    def __init__(
        self,
        room: DrafterContext,
        *,
        longest: int = 24,
        shortest: int = 1,
        drafts: int | None = None,
        public: bool = False,
        kept: int = 16,
        factor: float = 1.0,
        threshold: float = 0.1,
    ):
        super().__init__(
            room,
            longest=longest,
            shortest=shortest,
            drafts=drafts,
            public=public,
            kept=kept,
            oldest=False,
            vote="LONGEST",
            factor=factor,
            threshold=threshold,
        )
