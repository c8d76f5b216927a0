"""Drafter for forced tokens: tokens at positions where the grammar allows only one text."""

from __future__ import annotations

from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, TreeShape
from graft.models.drafters.feed import Feed


class Forced(Drafter):
    """Drafter that proposes the forced tokens that follow the last committed token.

    The longest legal token at a position is forced if all other legal tokens are prefixes of it
    (`graft.grammar.forced.ForcedTokens`). After a round has committed tokens, the grammar fills a
    mask row for the next position. If this row forces a token, the grammar advances by the token
    and fills a row for the position after it, and so on. The drafter proposes the tokens of these
    rows, up to the first row that forces none.
    """

    lookahead = 1
    reads_mask_rows = True

    def __init__(self, max_drafts: int) -> None:
        self.shape = TreeShape(max_drafts)

    def start(self, lane: Lane, feed: Feed) -> None:
        feed.sampler.proposals.forced(lane, feed.row_slot, feed.proposal)
