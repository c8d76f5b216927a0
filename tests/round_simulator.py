"""Simulated rounds of speculative decoding, for tests that replace the model or the kernels.

`RoundSimulator` does what the sampling kernels of a round do: it verifies drafts against the mask
rows of the grammar, commits tokens and adds drafts. The slots are those of `reference_round`, and
the exchange memory is real. A `Decision` chooses the tokens that target and drafter would choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import reference_round as ref
from reference_round import FREE, NOT_READY, READY

#: States of mask rows that allow tokens to be committed or drafted.
USABLE = (FREE, READY)


class Decision:
    """Chooses the tokens of a simulated round. A test implements it with its model."""

    def legal_ids(self, mask: np.ndarray | None) -> Any:
        """Return the ids that a mask row allows, or all ids if there is no mask."""
        raise NotImplementedError

    def is_late(self, slot: Any, node: int, state: int) -> bool:
        """Return whether the mask row of a node is treated as not ready while verifying.

        Simulates a grammar that exceeds its time budget. `state` is the true state of the row.
        """
        return False

    def target(self, slot: Any, node: int, position: int, legal: Any) -> int:
        """Return the token that the target samples after a node, for the next position."""
        raise NotImplementedError

    def draft(self, slot: Any, j: int, legal: Any) -> int | None:
        """Return draft `j` of a chain, or None to end the chain.

        `legal` contains the ids that the mask row allows; None if drafts are not masked.
        """
        raise NotImplementedError


class RoundSimulator:
    """Verifies, commits and drafts as the sampling kernels do.

    Parameters
    ----------
    exchanges
        Exchange memories. Mask rows are read from the first one, and all of them get the records
        of committed tokens and drafts.
    slots
        The slots, `reference_round.Slot` or a subclass. The caller replaces an entry when a request
        joins.
    decision
        Chooses the tokens.

    Attributes
    ----------
    replay
        Number of the replay that runs. The caller counts it.
    """

    def __init__(self, exchanges: Sequence[Any], slots: list[Any], decision: Decision):
        self.exchanges = exchanges
        self.slots = slots
        self.decision = decision
        self.replay = 0

    def row_state(self, index: int, j: int, position: int) -> int:
        """Return the state of mask row `j` of a slot, as a kernel reads it for a position."""
        row = ref.row_at(self.exchanges[0], index, j)
        return row.counts_as(self.slots[index], position)

    def legal_ids(self, index: int, j: int, state: int) -> Any:
        """Return the ids that mask row `j` of a slot allows in a usable state."""
        mask = self.exchanges[0].masks[index, j] if state == READY else None
        return self.decision.legal_ids(mask)

    def verify(self, index: int, max_drafts: int | None = None) -> ref.Outcome:
        """Verify the drafts of a slot and commit tokens; all drafts or the first `max_drafts`."""
        slot = self.slots[index]
        tree = slot.tree if max_drafts is None else slot.tree.first(max_drafts)

        def row(node: int, position: int) -> tuple[int, Any]:
            state = self.row_state(index, node, position)
            is_late = self.decision.is_late(slot, node, state)
            if state not in USABLE:
                return state, None
            if is_late:
                return NOT_READY, None
            return state, self.legal_ids(index, node, state)

        def decide(node: int, position: int, legal: Any) -> tuple[int, int | None]:
            token = self.decision.target(slot, node, position, legal)
            return token, tree.child(node, token)

        outcome = ref.walk(slot, row, decide, tree)
        ref.commit(slot, outcome)
        for exchange in self.exchanges:
            ref.record(exchange, index, self.replay, outcome.tokens)
        return outcome

    def draft(self, index: int, j: int, *, masked: bool) -> bool:
        """Add draft `j` to the chain of a slot and return whether it was added.

        With `masked`, the mask row of the preceding token must be usable.
        """
        slot = self.slots[index]
        if not ref.is_drafting(slot, j):
            return False
        legal = None
        if masked:
            state = self.row_state(index, j - 1, slot.n + j - 1)
            if state not in USABLE:
                return False
            legal = self.legal_ids(index, j - 1, state)
        token = self.decision.draft(slot, j, legal)
        if token is None:
            return False
        self.add_draft(index, token)
        return True

    def add_draft(self, index: int, token: int, parent: int | None = None) -> None:
        """Add a draft below a node, by default the last one, and record all drafts of the slot."""
        slot = self.slots[index]
        ref.keep(slot, token, parent=parent)
        for exchange in self.exchanges:
            ref.record_drafts(exchange, index, self.replay, slot.drafts, slot.tree.parent[1:])
