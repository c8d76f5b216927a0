"""Suffix decoding (Oliaro et al., "SuffixDecoding", 2024): longer matches give longer drafts."""

from __future__ import annotations

from graft.models.drafters.base import DrafterContext
from graft.models.drafters.lookup import PromptLookup

__all__ = ["Suffix"]


class Suffix(PromptLookup):
    """Drafts the most frequent continuation of the longest suffix that occurred before.

    Parameters
    ----------
    longest, shortest, drafts, public, kept
        As in `PromptLookup`.
    factor
        Maximum number of drafts per token of the matched suffix.
    threshold
        Drafting stops before the estimated probability of all drafts falls below this value. The
        probability of a draft is its share of the continuations.

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
