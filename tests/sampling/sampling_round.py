"""A decoding round without a model: the test provides the logits, and the real kernels sample."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import reference_round as ref
from round_simulator import (
    pack_even_rows,
    publish_slots,
    read_committed,
    read_draft_tree,
    read_drafted,
    read_results,
    write_draft_tree,
    write_mask_row,
)

from graft.cudagraph.device import Device, Stream
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.driver.pinned import Ring
from graft.cudagraph.lanes import StreamLane
from graft.models.round.round import ROUND_KERNELS
from graft.models.round.timing import make_timeline, timeline_args
from graft.sampling.arrays import SamplingArrays
from graft.sampling.exchange import Exchange
from graft.sampling.mode import DraftMode
from graft.sampling.params import VERIFY_MODES, SamplingParams
from graft.sampling.results import output_ring
from graft.sampling.rows import DraftVocab, RowMap
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotRequest, SlotState


def even_rows(device: Device, row_slot: DeviceArray, width: int) -> RowMap:
    """Return the row map of a round with `width` forward rows for each batch row."""
    first, packed = pack_even_rows(len(row_slot), width)
    return RowMap(row_slot, device.from_host(first), device.from_host(packed))


@functools.cache
def _timeline(device: Device) -> Any:
    return make_timeline(device, 1, 0)


def open_round(
    device: Device,
    lane: Any,
    state: SlotState,
    exchange: Exchange,
    replay: DeviceArray,
    ring: Ring,
    row_slot: DeviceArray,
    count: int,
) -> tuple[RowMap, tuple[DeviceArray, ...]]:
    """Add the kernel that begins a round of `count` rows.

    Returns the row map, and token, slot, position and path of each row.
    """
    batch = len(row_slot)
    rows = RowMap(row_slot, device.zeros((batch,), "int32"), device.zeros((count,), "int32"))
    laid = *(device.zeros((count,), "int32") for _ in range(3)), device.zeros((count,), "uint64")
    slots = ring["slot"]
    stamp = ring.stamp
    args = [
        replay,
        slots,
        slots.stride,
        stamp,
        stamp.stride,
        ring.entries,
        state.array,
        state.slots,
        batch,
        count,
        exchange.memory,
        exchange.layout,
        rows.slot,
        rows.first,
        rows.map,
        *laid,
        *timeline_args(_timeline(device)),
    ]
    lane.kernel(device.load(ROUND_KERNELS)["round_begin"], 1, 128, args, name="begin")
    return rows, laid


class TableRound:
    """Sampler and slot state for ``slots`` requests with a vocabulary of ``vocab`` tokens.

    The draft mode is `mode`, or a chain of `draft_length` drafts under mask rows.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        *,
        slots: int,
        vocab: int,
        draft_length: int = 0,
        mode: DraftMode | None = None,
        token_limit: int | None = None,
        d2t: np.ndarray | None = None,
        block: int | None = None,
        parts: int | None = None,
        places: int | None = None,
    ) -> None:
        self.device = device
        self.stream = stream
        self.lane = StreamLane(stream)
        mode = mode or DraftMode.chain(draft_length)
        self.slots = slots
        self.draft_length = mode.drafts
        self.vocab = vocab
        self.width = mode.drafts + 1
        self.token_limit = vocab if token_limit is None else token_limit
        self.d2t = d2t
        self.draft_vocab = vocab if d2t is None else len(d2t)
        self.state = SlotState(device, slots, vocab)
        self.exchange = Exchange(device, slots, vocab, mode)
        self.ring = output_ring(device, 2, slots, mode.drafts)
        # Whether `verify` waits for the kernels before it reads the results.
        self.waits_for_kernels = True
        self.replay_ptr = device.zeros((1,), "int32")
        if parts is None:
            # With several threads, several blocks share each row.
            parts = 1 if block in (None, 1) else 3
        arrays = SamplingArrays(
            self.state,
            self.exchange,
            self.replay_ptr,
            token_limit=self.token_limit,
            draft_vocab=self._make_draft_vocab(),
            max_batch=slots,
            block=block,
            parts=parts,
        )
        self.sampler = Sampler(arrays)
        self.replay = 0
        self.places = places
        self.inputs = Ring(device, 2, {"slot": ("int32", (slots,))})
        self.row_slot = device.from_host(np.arange(slots, dtype=np.int32), "int32")

    def _make_draft_vocab(self) -> DraftVocab:
        """Return the drafter's vocabulary: all target ids, or those of `d2t`."""
        if self.d2t is None:
            return DraftVocab(self.vocab)
        d2t = self.d2t.astype(np.int32)
        t2d = np.full(self.vocab, -1, np.int32)
        inside = (d2t >= 0) & (d2t < self.vocab)
        t2d[d2t[inside]] = np.flatnonzero(inside)
        arrays = [self.device.from_host(array) for array in (d2t, t2d)]
        return DraftVocab(len(d2t), *arrays)

    def rows(self, row_slot: Sequence[int] | np.ndarray) -> None:
        """Set the slot of each batch row (-1: padding) for the following rounds."""
        self.row_slot = self.device.from_host(np.asarray(row_slot, np.int32), "int32")

    def put(self, slot: int, s: ref.Slot, capacity: int | None = None) -> None:
        """Put a request into a slot, and write the drafts that a previous round would have written.

        `capacity` is the number of positions with pages, by default the slot's limit.
        """
        adjust = s.adjust or ref.Adjustment(SamplingParams())
        params = replace(
            adjust.params,
            stop_ids=s.stop_ids,
            seed=s.seed,
            temperature=s.filter.temperature,
            top_k=s.filter.top_k,
            top_p=s.filter.top_p,
            min_p=s.filter.min_p,
            verify=VERIFY_MODES[s.verify],
            sample=s.sample,
            relaxed=s.relaxed,
        )
        request = SlotRequest(
            params=params,
            position=s.n,
            last=s.last,
            epoch=s.epoch,
            limit=s.limit,
            capacity=capacity,
            prompt=adjust.prompt,
            output=adjust.output,
        )
        self.state.join(self.lane, slot, request)
        self.stream.synchronize()
        state = self.state.to_host()
        write_draft_tree(state[slot], s.tree)
        state["q_kind"][slot, : len(s.drafts)] = s.kinds
        for j, kind in enumerate(s.kinds):
            if kind == ref.POINT:
                continue
            columns = np.arange(self.vocab) if self.d2t is None else self.d2t
            inside = (columns >= 0) & (columns < self.vocab)
            table = np.zeros(self.draft_vocab, np.float32)
            table[inside] = s.q[j][columns[inside]]
            self.sampler.arrays.draft_probs[slot][j : j + 1].copy_from(table[None])
        state["active"][slot] = s.active
        self.state.copy_from(state)

    def write_mask(self, slot: int | slice, j: int, row: ref.MaskRow) -> None:
        """Write mask row j of a slot with its stamp; see `write_mask_row`."""
        write_mask_row(self.exchange, slot, j, row)

    def verify(self, logits: np.ndarray) -> dict[str, np.ndarray]:
        """Run target sampling and verification on logits [B, width, V]; return the results.

        If `places` is set, the kernel that begins an engine's rounds distributes this number of
        forward rows among the drafts of all slots. Otherwise, every slot has `width` rows, and
        drafts beyond these rows are dropped.
        """
        self.replay += 1
        batch, width, _ = logits.shape
        self.replay_ptr.copy_from(np.array([self.replay], np.int32))
        if width <= self.draft_length:
            slots = self.state.to_host()
            slots["draft_len"] = np.minimum(slots["draft_len"], width - 1)
            self.state.copy_from(slots)
        placed = even_rows(self.device, self.row_slot, width)
        b, j = np.indices((batch, width))
        if self.places is not None:
            placed = self._begin(batch + self.places)
            b, j = np.divmod(placed.map.to_host(), 1 << 16)
        chosen = logits[b.ravel(), np.minimum(j, width - 1).ravel()]
        self.sampler.mask_rows.copy_to_device(self.lane, self.row_slot, 0, width)
        self.sample(self.upload(chosen), placed)
        self.sampler.verifier.verify(self.lane, placed, self.ring)
        if self.waits_for_kernels:
            # Raise the error of a kernel's fault; the ring would wait for the results in vain.
            self.stream.synchronize()
        self.ring.synchronize(self.replay, 30.0)
        out = self.results(self.replay)
        self.ring.release(self.replay)
        return out

    def sample(self, logits: DeviceArray, rows: RowMap) -> None:
        """Sample the token of each row."""
        self.sampler.target.sample(self.lane, logits, rows)

    def _begin(self, count: int) -> RowMap:
        """Begin a round of all slots with `count` rows."""
        self.replay_ptr.copy_from(np.array([self.replay - 1], np.int32))
        publish_slots(self.inputs, self.replay, self.row_slot.to_host())
        named = self.device.zeros(self.row_slot.shape, "int32")
        placed, _ = open_round(
            self.device,
            self.lane,
            self.state,
            self.exchange,
            self.replay_ptr,
            self.inputs,
            named,
            count,
        )
        self.stream.synchronize()
        self.inputs.release(self.replay)
        return placed

    def play(
        self,
        slots: list[ref.Slot],
        logits: np.ndarray,
        masks: list[list[ref.MaskRow]],
        order: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Run a round of these slots with kernels and with the reference, and compare the results.

        The slots of the reference are updated. `order` is the order of the batch rows. The return
        value is that of `verify`.
        """
        for i, (slot, rows) in enumerate(zip(slots, masks, strict=True)):
            self.put(i, slot)
            for j, row in enumerate(rows):
                self.write_mask(i, j, row)
        order = np.arange(len(slots)) if order is None else order
        self.rows(order)
        out = self.verify(logits[order])
        for b, i in enumerate(order):
            outcome = ref.verify(slots[i], logits[i], masks[i], self.token_limit)
            self._check_outcome(i, outcome, {name: values[b] for name, values in out.items()})
        self.compare(slots)
        return out

    def _check_outcome(self, slot: int, expected: ref.Outcome, result: dict[str, Any]) -> None:
        """Compare the result of a slot and its record of committed tokens with the reference."""
        count = len(expected.tokens)
        assert result["slot"] == slot
        assert result["count"] == count
        assert result["accepted"] == expected.accepted
        assert result["reason"] == expected.reason
        assert result["tested"] == expected.tested
        assert result["relaxed"] == expected.relaxed
        assert tuple(result["tokens"][:count]) == expected.tokens
        assert read_committed(self.exchange, slot) == (self.replay, expected.tokens)
        if count:
            assert read_drafted(self.exchange, slot) == (self.replay, (), ())

    def compare(self, slots: list[ref.Slot]) -> None:
        """Assert that the state of the slots on the device equals the state in the reference."""
        state = self.state.to_host()
        for i, s in enumerate(slots):
            count = len(s.drafts)
            assert (state["n"][i], state["active"][i]) == (s.n, s.active)
            assert read_draft_tree(state[i]) == s.tree
            routes = [s.tree.route(j) for j in range(1, count + 1)]
            assert state["path"][i, :count].tolist() == routes
            assert tuple(state["q_kind"][i, :count]) == s.kinds

    def take(self, i: int, s: ref.Slot) -> None:
        """Copy the drafts that the kernels generated to a slot of the reference."""
        state = self.state.to_host()
        s.tree = read_draft_tree(state[i])
        count = len(s.drafts)
        s.q = (None,) * count
        s.kinds = tuple(state["q_kind"][i, :count].tolist())

    def results(self, replay: int) -> dict[str, np.ndarray]:
        """Return copies of a replay's results: the fields of ROUND_ROW, and tokens."""
        return read_results(self.ring.row("rows", replay), self.width)

    def draft(self, j: int, logits: np.ndarray | DeviceArray) -> None:
        """Sample draft j from logits [B, Vd]. After `candidates`, pass the same device array."""
        self.sampler.mask_rows.copy_to_device(self.lane, self.row_slot, j - 1, j)
        self.sampler.chain.draft(self.lane, self.upload(logits), self.row_slot, j)
        self.stream.synchronize()

    def candidates(self, j: int, logits: np.ndarray | DeviceArray) -> None:
        """Write the candidates for draft j from logits [B, Vd]."""
        self.sampler.chain.candidates(self.lane, self.upload(logits), self.row_slot, j)
        self.stream.synchronize()

    def add_drafts(self, proposal: np.ndarray) -> None:
        """Add the proposed ids [B, K] as drafts."""
        self.sampler.proposals.add_drafts(
            self.lane, self.device.from_host(proposal, "int32"), self.row_slot
        )
        self.stream.synchronize()

    def upload(self, logits: np.ndarray | DeviceArray) -> DeviceArray:
        """Copy logits to the device as float32. A device array is returned unchanged."""
        if isinstance(logits, DeviceArray):
            return logits
        return self.device.from_host(np.ascontiguousarray(logits, np.float32), "float32")
