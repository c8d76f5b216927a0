"""Sampling of draft chains."""

from __future__ import annotations

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.sampling.arrays import SamplingArrays
from graft.sampling.checks import check_range, expect
from graft.sampling.kernels.loader import load, step_ranges

__all__ = ["ChainSampler"]


class ChainSampler:
    """Samples the drafts of a chain one after another.

    If the grammar tests candidates, call `candidates` before `draft`.
    """

    def __init__(self, arrays: SamplingArrays) -> None:
        self._arrays = arrays
        self._draft = load(arrays.device, "sample", arrays.block)["sample_draft"]
        self._candidates = load(arrays.device, "candidates", arrays.block)["draft_candidates"]

    def draft(self, lane: Lane, draft_logits: DeviceArray, row_slot: DeviceArray, j: int) -> None:
        """Sample draft `j` of every slot that committed tokens in this replay and has j - 1 drafts.

        A slot whose chain ended earlier has fewer drafts. `DraftMode.masking` decides which drafts
        are legal. With "fill", only tokens that mask row ``j - 1`` of the slot (the token bitmask
        after draft j - 1) allows are sampled. With "probe" and "lattice-probe", the draft is the
        first of the slot's `candidates` that the grammar accepted; if it accepted none, the draft
        is sampled as with "fill". Without masking, drafts may be illegal, and verification rejects
        them.

        Parameters
        ----------
        draft_logits
            float32 [B, Vd]; changed in place for requests with logit adjustments.
        row_slot
            int32 [B], slot of each batch row; -1: padding.
        j
            Number of the draft, from 1 to K.
        """
        arrays = self._arrays
        batch = self._check(draft_logits, row_slot, j)
        args = [
            draft_logits,
            *arrays.draft_vocab_args,
            row_slot,
            j,
            arrays.exchange.device_masks,
            arrays.state.tables,
            arrays.vocab_size,
            *arrays.drafting_args,
            *arrays.exchange_args,
        ]
        grid = (batch, arrays.draft_parts, 1)
        for first, last in step_ranges(arrays.draft_parts):
            name = f"draft {j}" if first == 0 else f"draft {j}, step {first}"
            own_args = [*args, arrays.draft_inputs, first, last]
            lane.kernel(self._draft, grid, arrays.block, own_args, name=name)

    def candidates(
        self, lane: Lane, draft_logits: DeviceArray, row_slot: DeviceArray, j: int
    ) -> None:
        """Write the candidates for draft `j` to the exchange, for the grammar step that tests them.

        Parameters
        ----------
        draft_logits
            float32 [B, Vd]. With masking "lattice-probe", where the grammar tests the candidates of
            all levels in one step, [levels * B, Vd], ordered by level; levels after the first
            `DraftMode.levels` are not used. The kernel changes the logits of requests with logit
            adjustments in place, so `draft` must get the same array.
        row_slot
            int32 [B], slot of each batch row; -1: padding.
        j
            Number of the draft, from 1 to K; with masking "lattice-probe", the maximum number of
            drafts.
        """
        arrays = self._arrays
        mode = arrays.mode
        if not mode.probes:
            raise OptionError(
                f"candidates() requires masking 'probe' or 'lattice-probe', not {mode.masking!r}"
            )
        batch = arrays.check_slots(row_slot)
        levels = 1
        if mode.is_lattice:
            levels = min(max(draft_logits.shape[0] // batch, 1), mode.levels)
        self._check(draft_logits, row_slot, j, levels)
        args = [
            draft_logits,
            *arrays.draft_vocab_args,
            row_slot,
            batch,
            j,
            arrays.state.tables,
            arrays.vocab_size,
            *arrays.drafting_args,
            *arrays.exchange_args,
        ]
        grid = (levels * batch, arrays.draft_parts, 1)
        lane.kernel(self._candidates, grid, arrays.block, args, name=f"candidates {j}")

    def _check(
        self, draft_logits: DeviceArray, row_slot: DeviceArray, j: int, levels: int = 1
    ) -> int:
        arrays = self._arrays
        batch = arrays.check_slots(row_slot)
        check_range("j", j, 1, arrays.draft_length)
        rows = "B" if levels == 1 else "levels*B"
        sizes = {rows: levels * batch, "Vd": arrays.draft_vocab.size}
        expect("draft_logits", draft_logits, "float32", **sizes)
        return batch
