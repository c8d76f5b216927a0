"""Drafter for forced tokens: positions where the grammar allows exactly one token."""

from __future__ import annotations

from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, TreeShape
from graft.models.drafters.feed import Feed


class Forced(Drafter):
    """Drafter that proposes the forced tokens that follow the last committed token.

    A token is forced if the grammar allows no other token at its position. After a round has
    committed tokens, the grammar fills a mask row for the next position. If this row allows a
    single token, the grammar advances through the token and fills a row for the position after it,
    and so on. The drafter proposes the tokens of these rows, up to the first row that allows
    several tokens.
    """

    lookahead = 1
    reads_mask_rows = True

    def __init__(self, max_drafts: int) -> None:
        self.shape = TreeShape(max_drafts)

    def start(self, lane: Lane, feed: Feed) -> None:
        feed.sampler.proposals.forced(lane, feed.row_slot, feed.proposal)
