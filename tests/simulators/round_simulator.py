"""Simulated rounds of speculative decoding, for tests without a model or without kernels.

`RoundSimulator` does what the sampling kernels of a round do: it verifies drafts against the mask
rows of the grammar, commits tokens and adds drafts. The rules are those of `reference_round`. The
exchange memory, through which kernels and grammar communicate, is the one that engines use. A
test's `Decision` chooses the tokens in place of the target model and the drafter.

Two simulated devices are built on it: `guide_device` checks the guided decoder, and
`stepping_device` checks the engine's host code.

The functions of this module write and read the data that host, kernels and grammar exchange in a
round: draft trees in the slots' state, mask rows, the records of committed tokens and of drafts,
and the slots and results of a replay. Tests that run the real kernels use these functions as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import reference_round as ref
from reference_round import FREE, NOT_READY, READY

from graft.cudagraph.device import open_device
from graft.cudagraph.driver.pinned import Ring
from graft.sampling.exchange import Exchange
from graft.sampling.mode import DraftMode
from graft.sampling.results import ROUND_ROW

_HEADER_WORDS = ROUND_ROW.itemsize // 4

#: States of mask rows that allow tokens to be committed or drafted.
USABLE = (FREE, READY)


def exchange_for(slots: int, vocab_size: int, mode: DraftMode) -> Exchange:
    """Return exchange memory. The tests write the data that the device would write."""
    return Exchange(open_device(), slots, vocab_size, mode)


def run_work(work: Any) -> None:
    """Run a host step without the GIL, like a thread of the CUDA driver."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work.address)(work.data)


def mix(*values: int) -> int:
    """Return a hash of the values."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ value) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state


def write_draft_tree(record: Any, tree: ref.Tree) -> None:
    """Write the drafts of a tree to a slot's state, a record of dtype `SLOT`."""
    count = len(tree.token) - 1
    record["draft_len"] = count
    record["drafts"][:count] = tree.token[1:]
    record["parent"][:count] = tree.parent[1:]
    record["path"][:count] = [tree.route(node) for node in range(1, count + 1)]


def read_draft_tree(record: Any) -> ref.Tree:
    """Return the last committed token and the drafts of a slot's state as a tree."""
    count = int(record["draft_len"])
    drafts = record["drafts"][:count].tolist()
    parents = record["parent"][:count].tolist()
    return ref.Tree((int(record["last"]), *drafts), (-1, *parents))


def write_mask_row(exchange: Exchange, slot: int | slice, j: int, row: ref.MaskRow) -> None:
    """Write mask row `j` of a slot to exchange memory, as the grammar does.

    With a slice of slots, the values of `row` may be arrays with one entry per slot.
    """
    if row.legal is not None:
        exchange.masks[slot, j] = ref.pack_bits(row.legal)
    stamps = exchange.stamps
    for name in ("state", "epoch", "position", "detail"):
        stamps[name][slot, j] = getattr(row, name)


def read_mask_stamp(exchange: Exchange, slot: int, j: int) -> ref.MaskRow:
    """Return the fields of mask row `j` of a slot in exchange memory, without the token bitmask."""
    state, epoch, position, detail = exchange.stamps[slot, j].tolist()
    return ref.MaskRow(state, epoch, position, detail=detail)


def write_committed(exchange: Exchange, slot: int, replay: int, tokens: Sequence[int]) -> None:
    """Write a slot's record of committed tokens. If there are any, clear the slot's drafts."""
    exchange.committed[slot, : 2 + len(tokens)] = (replay, len(tokens), *tokens)
    if len(tokens):
        write_drafted(exchange, slot, replay, ())


def read_committed(exchange: Exchange, slot: int) -> tuple[int, tuple[int, ...]]:
    """Return the replay number and the tokens of a slot's record of committed tokens."""
    replay, count, *tokens = exchange.committed[slot].tolist()
    return replay, tuple(tokens[:count])


def write_drafted(
    exchange: Exchange,
    slot: int,
    replay: int,
    drafts: Sequence[int],
    parents: Sequence[int] | None = None,
) -> None:
    """Write the record of drafts. Without `parents`, the drafts form a chain."""
    count = len(drafts)
    words = exchange.drafted[slot]
    words[: 2 + count] = (replay, count, *drafts)
    first_parent = 2 + exchange.layout["drafts"]
    words[first_parent : first_parent + count] = range(count) if parents is None else parents


def read_drafted(exchange: Exchange, slot: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the replay number, the drafts and their parents in a slot's record of drafts."""
    replay, count, *words = exchange.drafted[slot].tolist()
    parents = words[exchange.layout["drafts"] :]
    return replay, tuple(words[:count]), tuple(parents[:count])


def publish_slots(ring: Ring, replay: int, slots: Sequence[int] | np.ndarray) -> None:
    """Publish the slot of each batch row of a replay, as the host does before the launch."""
    ring.reserve(replay)
    ring.row("slot", replay)[: len(slots)] = slots
    ring.publish(replay)


def pack_even_rows(batch: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row map of a round with `width` forward rows per batch row.

    The first array, int32 [batch], has the first forward row of each batch row. The second one,
    int32 [batch * width], has the batch row and the draft index of each forward row, packed as in
    `RowMap.map`.
    """
    b, j = np.divmod(np.arange(batch * width, dtype=np.int32), width)
    return np.arange(batch, dtype=np.int32) * width, b << 16 | j


def result_row(tokens: Sequence[int], **header: int) -> np.ndarray:
    """Return the result of a batch row as verification writes it: header and committed tokens.

    `header` contains fields of `ROUND_ROW`. `count` is the number of tokens; other fields that are
    not given are 0.
    """
    fields = np.zeros(1, ROUND_ROW)
    fields["count"] = len(tokens)
    for name, value in header.items():
        fields[name] = value
    return np.array([*fields.view(np.int32), *tokens], np.int32)


def read_results(rows: np.ndarray, width: int) -> dict[str, np.ndarray]:
    """Return copies of the fields and the tokens [B, width] of result rows [B, words]."""
    fields = rows[:, :_HEADER_WORDS].copy().view(ROUND_ROW)[:, 0]
    results = {name: fields[name] for name in ROUND_ROW.names}
    results["tokens"] = rows[:, _HEADER_WORDS : _HEADER_WORDS + width].copy()
    return results


class Decision:
    """Chooses the tokens of a simulated round. Tests implement the methods of this class."""

    def legal_ids(self, mask: np.ndarray | None) -> Any:
        """Return the ids that a mask row allows, or all ids if there is no mask."""
        raise NotImplementedError

    def is_late(self, slot: Any, node: int, state: int) -> bool:
        """Return whether verification treats the mask row of a node as not ready.

        This simulates a grammar that exceeds its time budget. `state` is the state in exchange
        memory.
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
    """Verifies drafts, commits tokens and adds drafts in the same way as the sampling kernels.

    Mask rows are read from the first of the exchange memories. The records of committed tokens and
    drafts are written to all of them. The slots are objects of `reference_round.Slot` or of a
    subclass. The caller replaces the object of a slot when a request joins, and counts the replays
    in the attribute `replay`.
    """

    def __init__(self, exchanges: Sequence[Any], slots: list[Any], decision: Decision):
        self.exchanges = exchanges
        self.slots = slots
        self.decision = decision
        self.replay = 0

    def row_state(self, index: int, j: int, position: int) -> int:
        """Return the state that mask row `j` of a slot has for a position."""
        row = read_mask_stamp(self.exchanges[0], index, j)
        return row.counts_as(self.slots[index], position)

    def legal_ids(self, index: int, j: int, state: int) -> Any:
        """Return the ids that mask row `j` of a slot allows; the row must be in a usable state."""
        mask = self.exchanges[0].masks[index, j] if state == READY else None
        return self.decision.legal_ids(mask)

    def verify(self, index: int, max_drafts: int | None = None) -> ref.Outcome:
        """Verify all drafts of a slot, or only the first `max_drafts`, and commit tokens."""
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
            write_committed(exchange, index, self.replay, outcome.tokens)
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
            write_drafted(exchange, index, self.replay, slot.drafts, slot.tree.parent[1:])
