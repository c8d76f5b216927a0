"""Sampling of target tokens, verification, and sampling of draft chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.driver.cstruct import read_struct
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.driver.pinned import PinnedField, Ring
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.sampling.checks import check_range, expect
from graft.sampling.exchange import Exchange
from graft.sampling.loading import KERNELS, load, row_block, row_parts
from graft.sampling.mode import RECORDS_HEADER
from graft.sampling.state import LOGPROBS, MAX_DRAFTS, SlotState

__all__ = ["ROUND_ROW", "DraftVocab", "RowMap", "Sampler", "output_ring", "row_words"]

#: dtype of ``struct RoundRow`` in native/records/exchange.h, which documents its fields.
ROUND_ROW = read_struct(RECORDS_HEADER, "RoundRow")
_HEADER_WORDS = ROUND_ROW.itemsize // 4
_PLACE_BLOCK = 64


def row_words(draft_length: int) -> int:
    """Return the size of a batch row's result in 32-bit words.

    The result consists of a ``RoundRow``, K + 1 tokens, and for each token the index of the forward
    row whose logits decided it.
    """
    return _HEADER_WORDS + 2 * (draft_length + 1)


def output_ring(device: Device, entries: int, max_batch: int, draft_length: int) -> Ring:
    """Create the ring through which rounds return their results.

    Parameters
    ----------
    device
        Device of the rounds.
    entries
        Number of entries; replay ``r`` uses entry ``r % entries``.
    max_batch
        Maximum number of batch rows B.
    draft_length
        Maximum number of drafts K.

    Returns
    -------
    Ring
        Fields ``rows``, int32 [B, row words], and ``logprobs``, int32 [B, (K + 1) words of
        LOGPROBS], which is written only for requests that ask for log probabilities.
    """
    logprobs_words = (draft_length + 1) * (LOGPROBS.itemsize // 4)
    return Ring(
        device,
        entries,
        {
            "rows": ("int32", (max_batch, row_words(draft_length))),
            "logprobs": ("int32", (max_batch, logprobs_words)),
        },
    )


def _layout(ring: Ring, field: PinnedField) -> Any:
    """Return the ``OutputLayout`` of a field of the output ring."""
    layout = np.zeros((), read_struct(RECORDS_HEADER, "OutputLayout"))
    layout["entries"] = ring.entries
    layout["stride"] = field.stride
    layout["rows"], layout["row"] = field.shape
    return layout[()]


@dataclass(frozen=True)
class RowMap:
    """Maps each row of the target forward pass to its batch row and draft index.

    The device writes it in every round. Row j of batch row b is fed draft j, or the last token if
    j = 0, and has the index ``first[b] + j``. Excess rows, and the rows of slot -1, are padding.

    Attributes
    ----------
    slot : DeviceArray
        int32 [B], slot of each batch row; -1: padding.
    first : DeviceArray
        int32 [B], index of the first forward row of each batch row.
    map : DeviceArray
        int32 [R], ``b << 16 | j`` of each forward row, R >= B.
    """

    slot: DeviceArray
    first: DeviceArray
    map: DeviceArray

    @property
    def count(self) -> int:
        """Number of forward rows R."""
        return self.map.shape[0]


@dataclass(frozen=True)
class DraftVocab:
    """Mapping between the columns of a drafter's logits and the token ids of the target.

    Attributes
    ----------
    size : int
        Number of columns Vd of the logits; 0 if the drafter computes no logits.
    d2t : DeviceArray or None
        int32 [Vd], target id of each column. None if column i belongs to token id i.
    t2d : DeviceArray or None
        int32 [V], column of each target id, or -1 if it has none. None exactly if `d2t` is None.
    """

    size: int
    d2t: DeviceArray | None = None
    t2d: DeviceArray | None = None

    def check(self, vocab_size: int) -> None:
        """Check the sizes against the target's vocabulary of `vocab_size` ids.

        Raises
        ------
        OptionError, ShapeError
            If a size or an array does not fit, with its name.
        """
        if (self.d2t is None) != (self.t2d is None):
            raise OptionError("d2t and t2d must be given together")
        if self.d2t is not None and self.t2d is not None:
            expect("d2t", self.d2t, "int32", Vd=self.size)
            expect("t2d", self.t2d, "int32", V=vocab_size)
        else:
            check_range("size of the draft vocabulary", self.size, 0, vocab_size)


class Sampler:
    """Adds the sampling kernels of a round to lanes.

    A round calls `target` and `verify`, and then either `draft` for j = 1 .. K or `place`. The lane
    must be ordered after the `Exchange.copy_masks_to_device` of the mask rows that a kernel reads.

    Logits are filtered in the order: adjustments of `SamplingParams`, vocabulary bound, mask,
    temperature, top-k, top-p, min-p, renormalization. Ties go to the smaller id. A NaN or +inf
    logit of a legal token fails the row (``REASON_ERROR``).

    All methods check sizes before a launch and raise OptionError or ShapeError with the name of the
    argument.

    Parameters
    ----------
    state
        State of all slots. The kernels run on its device.
    exchange
        Exchanged records of the same number of slots. It determines the draft mode, the maximum
        number of drafts K, and the number of target ids V, which must be less than 2**24.
    replay
        int32 [1], number of the replay.
    token_limit
        Upper bound of legal ids (exclusive). It also applies to requests without a grammar.
    max_batch
        Maximum number of batch rows.
    draft_vocab
        Vocabulary of the drafter's logits; None if the drafter computes no logits.
    block
        Threads per row: 1 or a multiple of 32, at most 1024. Default: by device. Results do not
        depend on it.
    parts
        Blocks per row, at most 32. Default: by device. Results do not depend on it.

    Attributes
    ----------
    mode : DraftMode
        Draft mode.
    probs : DeviceArray
        float32 [max_batch * (K+1), V], filtered distribution of each row of the last `target`
        call. Rows of greedy requests (temperature < 1e-5) are undefined.
    raw : DeviceArray
        float32 [max_batch * (K+1), V], logits of the rows of requests with log probabilities, as
        the model computed them or, with ``logprobs_masked``, adjusted and masked.
    target_tok : DeviceArray
        int32 [max_batch * (K+1)], token of each row; -1 if a test in `verify` determines it.
    row_ok : DeviceArray
        int32 [max_batch * (K+1)], 1: usable, 0: not ready, 2: no legal token, 3: error, 4: usable,
        and relaxed acceptance has replaced the sampled token.
    rows : DeviceArray
        int32 [max_batch, row words], result of each batch row, see `row_words`.
    q : DeviceArray
        float32 [S, mode.tables, max(Vd, 1)], distribution that each draft was sampled from.
    faults : DeviceArray
        int32 [1], number of drafts with probability 0 in their own table; 0 unless there is a bug.
    cross_block : DeviceArray
        Scratch of the blocks that share a row; zero between rounds.
    """

    def __init__(
        self,
        state: SlotState,
        exchange: Exchange,
        replay: DeviceArray,
        *,
        token_limit: int,
        max_batch: int,
        draft_vocab: DraftVocab | None = None,
        block: int | None = None,
        parts: int | None = None,
    ) -> None:
        self.device = state.device
        self.state = state
        self.exchange = exchange
        self.mode = exchange.mode
        self.vocab_size = exchange.vocab_size
        self.token_limit = token_limit
        self.draft_length = exchange.drafts
        self.draft_vocab = DraftVocab(0) if draft_vocab is None else draft_vocab
        self.max_batch = max_batch
        self._replay = replay
        check_range("parts", 1 if parts is None else parts, 1, 32)
        self._check_sizes()
        self.block = row_block(self.device) if block is None else block
        self._parts = parts or row_parts(self.device, self.vocab_size)
        self.draft_parts = parts or row_parts(self.device, self.draft_vocab.size)
        self._allocate()
        self._load_kernels()

    def _check_sizes(self) -> None:
        state = self.state
        vocab_size = self.vocab_size
        check_range("vocab_size", vocab_size, 1, (1 << 24) - 1)
        check_range("token_limit", self.token_limit, 1, vocab_size)
        # `RowMap.map` stores the batch row in the upper half of an int32.
        max_batch_limit = min(state.slots, (1 << 15) - 1)
        check_range("max_batch", self.max_batch, 1, max_batch_limit)
        check_range("draft_length", self.draft_length, 0, MAX_DRAFTS)
        check_range("exchange slots", self.exchange.slots, state.slots, state.slots)
        check_range("vocab_size of the state", state.vocab_size, vocab_size, vocab_size)
        expect("replay", self._replay, "int32", N=1)
        self.draft_vocab.check(vocab_size)

    def _allocate(self) -> None:
        """Allocate the arrays that kernels exchange."""
        device = self.device
        rows = self.max_batch * (self.draft_length + 1)
        self.probs = device.zeros((rows, self.vocab_size), "float32")
        self.raw = device.zeros((rows, self.vocab_size), "float32")
        self.target_tok = device.zeros((rows,), "int32")
        self.row_ok = device.zeros((rows,), "int32")
        self.row_words = row_words(self.draft_length)
        self.rows = device.zeros((self.max_batch, self.row_words), "int32")
        table_shape = (self.state.slots, self.mode.tables, max(self.draft_vocab.size, 1))
        self.q = device.zeros(table_shape, "float32")
        self.faults = device.zeros((1,), "int32")
        self._weights = device.zeros((rows,), "float32")
        self._passed = device.zeros((rows,), "int32")
        self._row_state = device.zeros((rows,), "int32")
        scratch_bytes = read_struct(KERNELS / "row.cuh", "CrossBlockScratch").itemsize
        scratch_rows = self.max_batch * self.mode.rows_per_request
        self.cross_block = device.zeros((scratch_rows, scratch_bytes), "uint8")

    def _load_kernels(self) -> None:
        device = self.device
        sample = load(device, "sample", self.block)
        self._target = sample["sample_target"]
        self._draft = sample["sample_draft"]
        verify = load(device, "verify", self.block)
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
        """Adjust, mask and filter the target's logits, and sample a token for each row.

        A row gets no token if `verify` tests its draft by rejection sampling.

        Parameters
        ----------
        lane
            Lane that the kernels are added to.
        logits
            float32 [R, V]; changed in place for requests with logit adjustments.
        rows
            Rows of the forward pass.
        """
        self._check_rows(rows)
        expect("logits", logits, "float32", R=rows.count, V=self.vocab_size)
        grid = (rows.count, self._parts, 1)
        inputs = [
            logits,
            self.vocab_size,
            self.token_limit,
            rows.slot,
            rows.map,
            self.state.array,
            self.exchange.device_masks,
            self.exchange.layout,
        ]
        self._add_adjust(lane, grid, inputs)
        self._add_target_steps(lane, grid, inputs)

    def _add_adjust(self, lane: Lane, grid: tuple[int, int, int], inputs: list[Any]) -> None:
        """Add the kernel that adjusts the logits and reads the states of the mask rows."""
        args = [
            *inputs,
            self.exchange.memory,
            self._row_state,
            self.cross_block,
            self.state.tables,
            self.raw,
        ]
        lane.kernel(self._adjust, grid, self.block, args, name="adjust logits")

    def _add_target_steps(self, lane: Lane, grid: tuple[int, int, int], inputs: list[Any]) -> None:
        """Add the launches of the kernel that filters the logits and samples the tokens."""
        # Several blocks can share only the first step of a launch, because the later steps of the
        # launch run in the last block. Several blocks per row therefore need one launch per step,
        # while a single block runs all steps in one launch.
        steps = [(0, 2)] if self._parts == 1 else [(step, step) for step in range(3)]
        for first, last in steps:
            args = [
                *inputs,
                self._row_state,
                self.cross_block,
                first,
                last,
                self.probs,
                self.target_tok,
                self.row_ok,
            ]
            lane.kernel(self._target, grid, self.block, args, name=f"target rows {first}")

    def verify(
        self,
        lane: Lane,
        rows: RowMap,
        out_ring: Ring,
        *,
        before_publishing: Callable[[], None] | None = None,
    ) -> None:
        """Verify the drafts, commit tokens to the slots and publish the results to the host.

        Parameters
        ----------
        lane
            Lane that the kernels are added to.
        rows
            Rows of the forward pass.
        out_ring
            Created by `output_ring`; entry ``replay % entries`` is written.
        before_publishing
            Function that adds nodes between verification and publication; None: no nodes.
        """
        batch = self._check_rows(rows)
        results = out_ring["rows"]
        check_range("words of an output row", results.shape[1], self.row_words, self.row_words)
        check_range("output rows", results.shape[0], batch, 1 << 16)
        inputs: list[Any] = [
            self.vocab_size,
            self.draft_vocab.size,
            self.draft_vocab.t2d,
            self.probs,
            self.row_ok,
            self.state.array,
            self.q,
            self.q.shape[1],
            self._weights,
            self._passed,
        ]
        if self.draft_vocab.size > 0 and rows.count > batch:
            self._add_tests(lane, rows, inputs)
        args = [
            rows.slot,
            rows.first,
            *inputs,
            self.cross_block,
            self.target_tok,
            *self.shared,
            self.rows,
            self.row_words,
        ]
        lane.kernel(self._verify, (batch, self._parts, 1), self.block, args, name="verify")
        if before_publishing is not None:
            before_publishing()
        self._add_publish(lane, rows, out_ring, batch)

    def _add_tests(self, lane: Lane, rows: RowMap, inputs: list[Any]) -> None:
        """Add the kernel that tests drafts by rejection sampling."""
        args = [rows.slot, rows.map, *inputs, self.cross_block, self.faults]
        lane.kernel(self._test, (rows.count, self._parts, 1), self.block, args, name="test drafts")

    def _add_publish(self, lane: Lane, rows: RowMap, out_ring: Ring, batch: int) -> None:
        """Add the kernel that writes log probabilities and the entry of the output ring."""
        results = out_ring["rows"]
        logprobs = out_ring["logprobs"]
        stamp = out_ring["stamp"]
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
            logprobs,
            _layout(out_ring, logprobs),
            results,
            _layout(out_ring, results),
            self.cross_block,
            stamp,
            stamp.stride,
        ]
        lane.kernel(self._publish, rows.count, self.block, args, name="publish tokens")

    def draft(self, lane: Lane, draft_logits: DeviceArray, row_slot: DeviceArray, j: int) -> None:
        """Sample draft `j` of every slot that committed tokens in this replay and still drafts.

        With masking "fill", the draft is sampled under mask row ``j - 1`` of the slot. With the
        probing modes, the draft is the candidate that the grammar accepted. If no candidate was
        legal, the draft is sampled under the mask row instead. Without masking, drafts may be
        illegal, and verification rejects them.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        draft_logits
            float32 [B, Vd]; changed in place for requests with logit adjustments.
        row_slot
            int32 [B], slot of each batch row; -1: padding.
        j
            Number of the draft, from 1 to K.
        """
        batch = self._check_draft(draft_logits, row_slot, j)
        # The mask row is needed only if the grammar rejected all candidates. This is rare, so the
        # kernel reads the row from host memory and no copy to the device is added.
        exchange = self.exchange
        masks = exchange.host_masks if self.mode.probes else exchange.device_masks
        args = [
            draft_logits,
            self.draft_vocab.size,
            self.token_limit,
            self.draft_vocab.d2t,
            self.draft_vocab.t2d,
            row_slot,
            j,
            masks,
            self.state.tables,
            self.vocab_size,
            *self._drafting_args,
            *self.shared,
        ]
        grid = (batch, self.draft_parts, 1)
        lane.kernel(self._draft, grid, self.block, args, name=f"draft {j}")

    def candidates(
        self, lane: Lane, draft_logits: DeviceArray, row_slot: DeviceArray, j: int
    ) -> None:
        """Write the candidates that the grammar tests.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        draft_logits
            float32 [B, Vd]; for a lattice [levels * B, Vd], level by level, for up to the mode's
            number of levels. Changed in place for requests with logit adjustments, so `draft` must
            get the same array.
        row_slot
            int32 [B], slot of each batch row; -1: padding.
        j
            Number of the draft, from 1 to K; for a lattice, the maximum number of drafts.
        """
        if not self.mode.probes:
            raise OptionError(f"candidates requires a probe mode, masking is {self.mode.masking!r}")
        batch = self._batch(row_slot)
        levels = 1
        if self.mode.is_lattice:
            levels = min(max(draft_logits.shape[0] // batch, 1), self.mode.levels)
        self._check_draft(draft_logits, row_slot, j, levels)
        args = [
            draft_logits,
            self.draft_vocab.size,
            self.token_limit,
            self.draft_vocab.d2t,
            self.draft_vocab.t2d,
            row_slot,
            batch,
            j,
            self.state.tables,
            self.vocab_size,
            *self._drafting_args,
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
        max_drafts: int | None = None,
    ) -> None:
        """Make proposed token ids the drafts of the slots that committed tokens in this replay.

        The drafts are point masses: they were not sampled from a stored distribution.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        proposal
            int32 [B, K], target ids; ids outside the vocabulary are skipped. None: the answers of
            the grammar to a lattice probe.
        row_slot
            int32 [B], slot of each batch row; -1: padding.
        parents
            int32 [B, K], parent of each proposed id: 0 is the last token, j the j-th proposed id.
            None: each id follows the previous one.
        max_drafts
            Maximum number of drafts, K by default; the first ones are kept.
        """
        if proposal is None and not self.mode.is_lattice:
            raise OptionError(
                "place without a proposal requires masking 'lattice-probe', "
                f"masking is {self.mode.masking!r}"
            )
        batch = self._batch(row_slot)
        for array in (proposal, parents):
            if array is not None:
                self._check_proposal(array, row_slot)
        args = [
            batch,
            row_slot,
            proposal,
            parents,
            self.draft_length,
            self.draft_length if max_drafts is None else max_drafts,
            self.vocab_size,
            self.state.array,
            self.rows,
            self.row_words,
            *self.shared,
        ]
        lane.kernel(self._place, *self._threads(batch), args, name="place drafts")

    def forced(self, lane: Lane, row_slot: DeviceArray, proposal: DeviceArray) -> None:
        """Propose the tokens that the grammar forces, as drafts.

        A mask row forces a token if it allows no other one.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        row_slot
            int32 [B], slot of each batch row; -1: padding.
        proposal
            int32 [B, K], receives the tokens that mask rows 0, 1, .. force; -1 for a row that
            forces no token.
        """
        batch = self._check_proposal(proposal, row_slot)
        args = [
            batch,
            row_slot,
            self.draft_length,
            self.state.array,
            self.exchange.memory,
            self.exchange.layout,
            proposal,
        ]
        lane.kernel(self._forced, *self._threads(batch), args, name="forced drafts")

    @property
    def shared(self) -> tuple[object, ...]:
        """Kernel arguments: exchanged records, their layout and the number of the replay."""
        return (self.exchange.memory, self.exchange.layout, self._replay)

    @property
    def _drafting_args(self) -> tuple[object, ...]:
        return (
            self.cross_block,
            self.state.array,
            self.rows,
            self.row_words,
            self.q,
            self.q.shape[1],
        )

    @staticmethod
    def _threads(batch: int) -> tuple[int, int]:
        """Return grid and block of kernels with one thread per batch row."""
        return -(-batch // _PLACE_BLOCK), _PLACE_BLOCK

    def _check_draft(
        self, draft_logits: DeviceArray, row_slot: DeviceArray, j: int, levels: int = 1
    ) -> int:
        batch = self._batch(row_slot)
        check_range("j", j, 1, self.draft_length)
        rows = "B" if levels == 1 else "levels*B"
        sizes = {rows: levels * batch, "Vd": self.draft_vocab.size}
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
        """Check the slots of the batch rows and return their number."""
        batch = row_slot.shape[0] if len(row_slot.shape) == 1 else -1
        expect("row_slot", row_slot, "int32", B=batch)
        check_range("batch rows B", batch, 1, self.max_batch)
        return int(batch)
