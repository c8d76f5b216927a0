"""Target rows, verification and draft sampling of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from graft.cudagraph.cstruct import read_struct
from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.cudagraph.pinned import PinnedField, Ring
from graft.sampling.checks import check_range, expect
from graft.sampling.exchange import HEADER, Exchange
from graft.sampling.loading import KERNELS, load, row_block, row_parts
from graft.sampling.state import LOGPROBS, MAX_DRAFTS, SlotState

__all__ = ["ROUND_ROW", "RowMap", "Sampler", "output_ring", "row_words"]

#: ``struct RoundRow`` of native/records/exchange.h, where its fields are explained.
ROUND_ROW = read_struct(HEADER, "RoundRow")
_HEAD = ROUND_ROW.itemsize // 4
_PLACE_BLOCK = 64


def row_words(draft_length: int) -> int:
    """32-bit words of a batch row's result: ``RoundRow``, K+1 tokens, and as many rows."""
    return _HEAD + 2 * (draft_length + 1)


def output_ring(device: Device, entries: int, max_batch: int, draft_length: int) -> Ring:
    """Ring by which rounds hand their results to the host.

    int32 ``rows`` [B, row words], and ``logprobs`` [B, (K+1) words of LOGPROBS], which holds
    something for the tokens of requests that ask for it.
    """
    told = (draft_length + 1) * (LOGPROBS.itemsize // 4)
    return Ring(
        device,
        entries,
        {
            "rows": ("int32", (max_batch, row_words(draft_length))),
            "logprobs": ("int32", (max_batch, told)),
        },
    )


def _layout(ring: Ring, field: PinnedField) -> Any:
    """``OutputLayout`` of one of the fields."""
    layout = np.zeros((), read_struct(HEADER, "OutputLayout"))
    layout["entries"] = ring.entries
    layout["stride"] = field.stride
    layout["rows"], layout["row"] = field.shape
    return layout[()]


@dataclass(frozen=True)
class RowMap:
    """Which row of whom each row of the target's forward is: written on the device, every round.

    Row j of batch row b follows draft j of its slot, or its last token (j = 0), and stands at
    ``first[b] + j``. Rows that are left over, and those of slot -1, are padding.

    Attributes
    ----------
    slot : int32 [B], of each batch row; -1: nobody.
    first : int32 [B], where its rows begin.
    map : int32 [R], ``b << 16 | j`` of each row; R is B or more.
    """

    slot: DeviceArray
    first: DeviceArray
    map: DeviceArray

    @property
    def count(self) -> int:
        """Number of rows R."""
        return self.map.shape[0]


class Sampler:
    """Writes the sampling kernels of a round on lanes.

    A round calls ``target``, ``verify``, and then ``draft`` for j = 1..K or ``place``, each once
    per batch; before mask rows are read, `Exchange.bring` copies them to the device. The order of
    filters is what `Adjust` says, vocabulary bound, mask, temperature, top-k, top-p, min-p,
    renormalise; ties go to the smaller id. A NaN or +inf logit at a legal id fails the row (reason
    error).

    Methods take the lane, a `RowMap` or its slots alone as row_slot int32 [B] and, where they stand
    for one, the number j of a draft, from 1 to K. Before any launch they raise
    OptionError or ShapeError for a size or array that does not fit, by name; so does the sampler.

    Parameters
    ----------
    state : per-slot state that the kernels read and advance.
    exchange : of as many slots; its drafts are K, its vocabulary V (columns of the target's logits,
        below 2**24), its candidates what the grammar is asked about before a draft is drawn (up to
        64; 0: drafts are drawn under mask rows).
    replay : int32 [1], the number of the replay.
    token_limit : ids at or above it are illegal, also on unconstrained rows.
    draft_vocab : Vd, columns of the drafter's logits; 0 if it has none.
    d2t : int32 [Vd], target id of each drafter column; None when they are the same.
    t2d : int32 [V], drafter column of each target id or -1. Given exactly when ``d2t`` is.
    max_batch : most batch rows of a call.
    block : threads per row; 1 or a multiple of 32 up to 1024. Default: what suits the device.
        Results do not depend on it.
    parts : blocks that share a row, up to 32, alike.

    Attributes
    ----------
    probs : float32 [max_batch * (K+1), V], filtered distribution of the sampled rows (those with
        temperature >= 1e-5) of the last call.
    raw : float32 [max_batch * (K+1), V], the logits of rows whose request asks for log
        probabilities, as the model gave them or as adjustments and mask leave them.
    target_tok, row_ok : int32 [max_batch * (K+1)], the token of each row, -1 where `verify` is to
        find it by tests; 1 usable, 0 not ready, 2 no legal token, 3 error.
    rows : int32 [max_batch, row words], result of each batch row, see `row_words`.
    q : float32 [S, max(K, 1), max(Vd, 1)], the table that each dense draft was drawn from
        (draft-vocabulary columns); of a tree [S, 1, max(Vd, 1)].
    faults : int32 [1], drafts whose own table gave them probability zero; always 0 unless something
        is broken.
    """

    def __init__(
        self,
        device: Device,
        state: SlotState,
        exchange: Exchange,
        replay: DeviceArray,
        *,
        token_limit: int,
        max_batch: int,
        draft_vocab: int = 0,
        d2t: DeviceArray | None = None,
        t2d: DeviceArray | None = None,
        block: int | None = None,
        parts: int | None = None,
    ) -> None:
        vocab_size = exchange.vocab_size
        draft_length = exchange.drafts
        check_range("vocab_size", vocab_size, 1, (1 << 24) - 1)
        check_range("token_limit", token_limit, 1, vocab_size)
        check_range("max_batch", max_batch, 1, min(state.slots, (1 << 15) - 1))  # see `RowMap.map`
        check_range("parts", 1 if parts is None else parts, 1, 32)
        check_range("draft_length", draft_length, 0, MAX_DRAFTS)
        check_range("candidates", int(exchange.layout["candidates"]), 0, 64)
        check_range("exchange slots", exchange.slots, state.slots, state.slots)
        check_range("vocab_size of the state", state.vocab_size, vocab_size, vocab_size)
        expect("replay", replay, "int32", N=1)
        if (d2t is None) != (t2d is None):
            raise OptionError("d2t and t2d come together: give both or neither")
        if d2t is not None and t2d is not None:
            expect("d2t", d2t, "int32", Vd=draft_vocab)
            expect("t2d", t2d, "int32", V=vocab_size)
        else:
            check_range("draft_vocab", draft_vocab, 0, vocab_size)
        width = draft_length + 1
        self.device = device
        self.state = state
        self.exchange = exchange
        self.vocab_size = vocab_size
        self.token_limit = token_limit
        self.draft_length = draft_length
        self.draft_vocab = draft_vocab
        self.d2t = d2t
        self.t2d = t2d
        self.max_batch = max_batch
        rows = max_batch * width
        self.probs = device.zeros((rows, vocab_size), "float32")
        self.raw = device.zeros((rows, vocab_size), "float32")
        self.target_tok = device.zeros((rows,), "int32")
        self.row_ok = device.zeros((rows,), "int32")
        self.row_words = row_words(draft_length)
        self.rows = device.zeros((max_batch, self.row_words), "int32")
        dense = 1 if exchange.layout["branch"] > 1 else max(draft_length, 1)
        dense = exchange.layout["levels"] or dense
        self.q = device.zeros((state.slots, dense, max(draft_vocab, 1)), "float32")
        self.faults = device.zeros((1,), "int32")
        self._weights = device.zeros((rows,), "float32")
        self._passed = device.zeros((rows,), "int32")
        self._replay = replay
        self._state = device.zeros((rows,), "int32")
        shared = max(width, int(exchange.layout["branch"]), int(exchange.layout["levels"]))
        meeting = read_struct(KERNELS / "row.cuh", "Meeting").itemsize
        self.meetings = device.zeros((max_batch * shared, meeting), "uint8")
        self.block = row_block(device) if block is None else block
        self._parts = row_parts(device, vocab_size) if parts is None else parts
        self.draft_parts = row_parts(device, draft_vocab) if parts is None else parts
        sample = load(device, "sample", self.block)
        verify = load(device, "verify", self.block)
        self._target = sample["sample_target"]
        self._draft = sample["sample_draft"]
        self._test = verify["test_drafts"]
        self._verify = verify["verify_drafts"]
        adjust = load(device, "adjust", self.block)
        self._adjust = adjust["adjust_logits"]
        self._publish = adjust["publish_round"]
        self._candidates = load(device, "candidates", self.block)["draft_candidates"]
        place = load(device, "place", _PLACE_BLOCK)
        self._place = place["place_drafts"]
        self._forced = place["propose_forced"]

    def target(self, lane: Lane, logits: DeviceArray, rows: RowMap) -> None:
        """Adjust, mask and filter the target's rows; decide the token of each that no test decides.

        From logits float32 [R, V]; those of requests with an `Adjust` are changed in place.
        """
        self._check_rows(rows)
        expect("logits", logits, "float32", R=rows.count, V=self.vocab_size)
        grid = (rows.count, self._parts, 1)
        reads = [
            logits,
            self.vocab_size,
            self.token_limit,
            rows.slot,
            rows.map,
            self.state.array,
            self.exchange.device_masks,
            self.exchange.layout,
        ]
        args = [
            *reads,
            self.exchange.memory,
            self._state,
            self.meetings,
            self.state.tables,
            self.raw,
        ]
        lane.kernel(self._adjust, grid, self.block, args, name="adjust logits")
        # Blocks share a step of a launch alone; one block needs no more than one launch.
        steps = [(0, 2)] if self._parts == 1 else [(step, step) for step in range(3)]
        for first, last in steps:
            args = [
                *reads,
                self._state,
                self.meetings,
                first,
                last,
                self.probs,
                self.target_tok,
                self.row_ok,
            ]
            lane.kernel(self._target, grid, self.block, args, name=f"target rows {first}")

    def verify(self, lane: Lane, rows: RowMap, out_ring: Ring) -> None:
        """Test and walk the drafts, commit, write the output entry and publish its stamp.

        `out_ring` was made by `output_ring`; its entry ``replay % entries`` is written.
        """
        batch = self._check_rows(rows)
        out, told, stamp = (out_ring.field(name) for name in ("rows", "logprobs", "stamp"))
        check_range("words of an output row", out.shape[1], self.row_words, self.row_words)
        check_range("output rows", out.shape[0], batch, 1 << 16)
        reads: list[Any] = [
            self.vocab_size,
            self.draft_vocab,
            self.t2d,
            self.probs,
            self.row_ok,
            self.state.array,
            self.q,
            self.q.shape[1],
            self._weights,
            self._passed,
        ]
        if self.draft_vocab > 0 and rows.count > batch:
            args = [rows.slot, rows.map, *reads, self.meetings, self.faults]
            lane.kernel(
                self._test, (rows.count, self._parts, 1), self.block, args, name="test drafts"
            )
        args = [
            rows.slot,
            rows.first,
            *reads,
            self.meetings,
            self.target_tok,
            *self.shared,
            self.rows,
            self.row_words,
        ]
        lane.kernel(self._verify, (batch, self._parts, 1), self.block, args, name="verify")
        args = [
            self.raw,
            self.vocab_size,
            rows.slot,
            rows.map,
            self.state.array,
            self.rows,
            self.row_words,
            self.state.tables,
            batch,
            self._replay,
            told,
            _layout(out_ring, told),
            out,
            _layout(out_ring, out),
            self.meetings,
            stamp,
            stamp.stride,
        ]
        lane.kernel(self._publish, rows.count, self.block, args, name="publish tokens")

    def draft(
        self, lane: Lane, draft_logits: DeviceArray, row_slot: DeviceArray, j: int, masked: bool
    ) -> None:
        """Draw draft ``j`` of every slot that committed tokens in this replay and still drafts.

        From float32 [B, Vd]. `masked` applies the slot's mask row ``j - 1``; otherwise drafts may
        be illegal (and are refused by the next verification). With candidates the row counts only
        where there is no answer.
        """
        batch = self._check_draft(draft_logits, row_slot, j)
        probed = masked and self.exchange.layout["candidates"] > 0
        # A probe that found nothing has filled a row, now and then: it is not worth a copy.
        masks = self.exchange.host_masks if probed else self.exchange.device_masks
        args = [
            draft_logits,
            self.draft_vocab,
            self.token_limit,
            self.d2t,
            row_slot,
            j,
            int(masked),
            int(probed),
            masks,
            *self._drafting(),
            *self.shared,
        ]
        grid = (batch, self.draft_parts, 1)
        lane.kernel(self._draft, grid, self.block, args, name=f"draft {j}")

    def candidates(
        self, lane: Lane, draft_logits: DeviceArray, row_slot: DeviceArray, j: int
    ) -> None:
        """Write what the grammar is to test for draft ``j``, before ``draft`` takes the answer.

        Where an exchange has levels, for ``j`` drafts at once from float32 [levels * B, Vd], a
        level's rows together, or of fewer levels; ``place`` takes the answer.
        """
        if self.exchange.layout["candidates"] == 0:
            raise OptionError("the exchange was made without candidates")
        batch = self._batch(row_slot)
        most = int(self.exchange.layout["levels"]) or 1
        levels = min(max(draft_logits.shape[0] // batch, 1), most)
        self._check_draft(draft_logits, row_slot, j, levels)
        args = [
            draft_logits,
            self.draft_vocab,
            self.token_limit,
            self.d2t,
            row_slot,
            batch,
            j,
            *self._drafting(),
            *self.shared,
        ]
        grid = (levels * batch, self.draft_parts, 1)
        lane.kernel(self._candidates, grid, self.block, args, name=f"candidates {j}")

    def place(
        self,
        lane: Lane,
        proposal: DeviceArray | None,
        row_slot: DeviceArray,
        parents: DeviceArray | None = None,
        most: int | None = None,
    ) -> None:
        """Take drafts that came all at once, as point masses, for slots as in ``draft``.

        Target ids, int32 [B, K]; what is no id is left out. `parents`, alike, say what each hangs
        on: 0 is the last token, j the proposal's j-th id; without them each hangs on the last.
        None: what the grammar answered about all levels. The first `most` of what is left are
        taken, K by default.
        """
        if proposal is None and self.exchange.layout["levels"] == 0:
            raise OptionError("the exchange was made without levels")
        batch = self._batch(row_slot)
        if proposal is not None:
            self._check_proposal(proposal, row_slot)
        if parents is not None:
            self._check_proposal(parents, row_slot)
        most = self.draft_length if most is None else most
        args = [
            batch,
            row_slot,
            proposal,
            parents,
            self.draft_length,
            most,
            self.vocab_size,
            self.state.array,
            self.rows,
            self.row_words,
            *self.shared,
        ]
        lane.kernel(self._place, *self._threads(batch), args, name="place drafts")

    def forced(self, lane: Lane, row_slot: DeviceArray, proposal: DeviceArray) -> None:
        """Propose, int32 [B, K], what mask rows 0, 1, .. force; -1 where a row forces nothing."""
        batch = self._check_proposal(proposal, row_slot)
        args = [batch, row_slot, self.draft_length, self.state.array, *self._exchange, proposal]
        lane.kernel(self._forced, *self._threads(batch), args, name="forced drafts")

    @property
    def shared(self) -> tuple[object, ...]:
        """Kernel arguments: what is exchanged, and the number of the replay."""
        return (*self._exchange, self._replay)

    @property
    def _exchange(self) -> tuple[object, ...]:
        return (self.exchange.memory, self.exchange.layout)

    def _drafting(self) -> tuple[object, ...]:
        return (self.meetings, self.state.array, self.rows, self.row_words, self.q, self.q.shape[1])

    @staticmethod
    def _threads(batch: int) -> tuple[int, int]:
        return -(-batch // _PLACE_BLOCK), _PLACE_BLOCK

    def _check_draft(
        self, draft_logits: DeviceArray, row_slot: DeviceArray, j: int, levels: int = 1
    ) -> int:
        batch = self._batch(row_slot)
        check_range("j", j, 1, self.draft_length)
        rows = "B" if levels == 1 else "levels*B"
        sizes = {rows: levels * batch, "Vd": self.draft_vocab}
        expect("draft_logits", draft_logits, "float32", **sizes)
        return batch

    def _check_proposal(self, proposal: DeviceArray, row_slot: DeviceArray) -> int:
        batch = self._batch(row_slot)
        expect("proposal", proposal, "int32", B=batch, K=self.draft_length)
        return batch

    def _check_rows(self, rows: RowMap) -> int:
        batch = self._batch(rows.slot)
        expect("first", rows.first, "int32", B=batch)
        check_range("rows R", rows.count, batch, batch * (self.draft_length + 1))
        expect("map", rows.map, "int32", R=rows.count)
        return batch

    def _batch(self, row_slot: DeviceArray) -> int:
        """Check the row map and return its length."""
        batch = row_slot.shape[0] if len(row_slot.shape) == 1 else -1
        expect("row_slot", row_slot, "int32", B=batch)
        check_range("batch rows B", batch, 1, self.max_batch)
        return int(batch)
