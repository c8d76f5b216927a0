"""Drafter for forced tokens: positions where the grammar allows exactly one token."""

from __future__ import annotations

from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, TreeShape
from graft.models.drafters.feed import Feed


class Forced(Drafter):
    """Drafter that proposes the forced tokens that follow the last committed token.

    A token is forced if the row of the grammar's token bitmask for its position allows no other
    token. When a round commits tokens, the grammar advances through the forced tokens that follow
    and fills a mask row after each of them. The drafter then reads the allowed token of mask rows
    0, 1, and so on, until a row allows several tokens.
    """

    lookahead = 1
    reads_mask_rows = True

    def __init__(self, max_drafts: int) -> None:
        self.shape = TreeShape(max_drafts)

    def start(self, lane: Lane, feed: Feed) -> None:
        feed.sampler.forced(lane, feed.row_slot, feed.proposal)
