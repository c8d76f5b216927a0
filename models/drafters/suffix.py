"""Suffix decoding (Oliaro et al., "SuffixDecoding", 2024).

The maximum number of drafts grows with the length of the matched suffix.
"""

from __future__ import annotations

from graft.models.drafters.base import DrafterContext
from graft.models.drafters.lookup import PromptLookup

__all__ = ["Suffix"]


class Suffix(PromptLookup):
    """Drafter that proposes the most frequent continuation of the request's last tokens.

    The suffix is the longest sequence of the request's last tokens that also occurs earlier. Its
    continuations are the tokens after its earlier occurrences.

    Parameters
    ----------
    longest, shortest, drafts, public, kept
        As in `PromptLookup`.
    factor
        Maximum number of drafts per token of the matched suffix.
    threshold
        Minimum estimated probability, 0 to 1, that all drafts on a path are accepted. A draft whose
        path has a lower probability is not proposed. The probability of one draft is estimated as
        the fraction of the found continuations that have this token at its position.
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
