"""Drafter for forced tokens: positions where the grammar allows exactly one token."""

from __future__ import annotations

from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, TreeShape
from graft.models.drafters.feed import Feed


class Forced(Drafter):
    """Drafts the run of forced tokens after the last committed token.

    A token is forced if it is the only one in its row of the grammar's token bitmask. At the commit
    the grammar advances along forced tokens and fills the mask row after each of them. The drafter
    then reads one token from each of the mask rows 0, 1, ... until a row allows several tokens.
    """

    lookahead = 1
    reads_mask_rows = True

    def __init__(self, max_drafts: int) -> None:
        self.shape = TreeShape(max_drafts)

    def start(self, lane: Lane, feed: Feed) -> None:
        feed.sampler.forced(lane, feed.row_slot, feed.proposal)
