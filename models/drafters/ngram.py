"""Prompt lookup decoding (Saxena, 2023), which drafts the continuation of an earlier n-gram."""

from __future__ import annotations

from graft.cudagraph.errors import OptionError
from graft.models.drafters.base import DrafterContext
from graft.models.drafters.lookup import PromptLookup

__all__ = ["NGram"]

_VOTES = {"longest": "NONE", "all": "ALL"}


class NGram(PromptLookup):
    """Drafter that proposes the tokens after an earlier occurrence of the request's last tokens.

    With ``match="longest"``, it proposes the continuation of the occurrence that matches the most
    tokens. With ``match="all"``, it searches for every suffix of `shortest` to `longest` tokens and
    proposes the most frequent continuations. The other options are those of `PromptLookup`.
    """

    def __init__(
        self,
        context: DrafterContext,
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
            context,
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
