"""Forced tokens as drafts: tokens that are the only ones that the grammar accepts."""

from __future__ import annotations

from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, TreeShape
from graft.models.drafters.feed import Feed


class Forced(Drafter):
    """Drafts the tokens that mask rows 0, 1, ... force.

    At the commit the grammar advances along forced tokens and fills the mask rows after them.
    """

    lookahead = 1
    reads_mask_rows = True

    def __init__(self, max_drafts: int) -> None:
        self.shape = TreeShape(max_drafts)

    def start(self, lane: Lane, feed: Feed) -> None:
        feed.sampler.forced(lane, feed.row_slot, feed.proposal)
