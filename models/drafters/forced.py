"""Drafts without a model: the tokens that the grammar forces, as far as the mask rows say so."""

from __future__ import annotations

from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, TreeShape
from graft.models.drafters.feed import Feed


class Forced(Drafter):
    """Drafts what mask rows 0, 1, .. force; the guide follows forced tokens at the commit."""

    lookahead = 1
    reads_rows = True

    def __init__(self, drafts: int) -> None:
        self.shape = TreeShape(drafts)

    def start(self, lane: Lane, feed: Feed) -> None:
        feed.sampler.forced(lane, feed.row_slot, feed.proposal)
