"""Suffix decoding (Oliaro et al., "SuffixDecoding", 2024).

A longer match gives a longer sequence of drafts.
"""

from __future__ import annotations

from graft.models.drafters.base import DrafterContext
from graft.models.drafters.lookup import PromptLookup

__all__ = ["Suffix"]


class Suffix(PromptLookup):
    """Drafts the most frequent continuation of the longest suffix that occurred before.

    Parameters
    ----------
    context
        Arguments from the engine.
    longest, shortest, drafts, public, kept
        As in `PromptLookup`.
    factor
        Maximum number of drafts per token of the matched suffix.
    threshold
        Minimum estimated probability that all drafts of a path are right, 0 to 1; no draft is
        added that would fall below it. The probability of one draft is estimated as its share of
        the continuations found.

    Raises
    ------
    OptionError
        If an option is out of range.
    """

    def __init__(
        self,
        context: DrafterContext,
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
            context,
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
