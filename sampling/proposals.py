"""Drafts that are not sampled: proposed token ids, and tokens that the grammar forces."""

from __future__ import annotations

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.sampling.arrays import SamplingArrays
from graft.sampling.checks import expect
from graft.sampling.kernels.loader import load
from graft.sampling.state import MAX_DRAFTS

__all__ = ["Proposals"]


class Proposals:
    """Makes proposed token ids the drafts of a round."""

    def __init__(self, arrays: SamplingArrays) -> None:
        self._arrays = arrays
        self._block = min(arrays.block, MAX_DRAFTS)
        kernels = load(arrays.device, "proposals", self._block)
        self._add_drafts = kernels["add_proposed_drafts"]
        self._forced = kernels["propose_forced"]

    def add_drafts(
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
        proposal
            int32 [B, K], target ids; ids outside the vocabulary are skipped. None: the drafts that
            the grammar has chosen (masking "lattice-probe").
        row_slot
            int32 [B], slot of each batch row; -1: padding.
        parents
            int32 [B, K], parent of each proposed id: 0 is the last token, j the j-th proposed id.
            None: each id follows the previous one.
        max_drafts
            Maximum number of drafts, K by default; further proposed ids are dropped.
        """
        arrays = self._arrays
        if proposal is None and not arrays.mode.is_lattice:
            raise OptionError(
                "add_drafts() without a proposal requires masking 'lattice-probe', "
                f"not {arrays.mode.masking!r}"
            )
        batch = arrays.check_slots(row_slot)
        for array in (proposal, parents):
            if array is not None:
                self._check(array, batch)
        args = [
            row_slot,
            proposal,
            parents,
            arrays.draft_length,
            arrays.draft_length if max_drafts is None else max_drafts,
            arrays.vocab_size,
            arrays.state.array,
            arrays.results,
            arrays.row_words,
            *arrays.exchange_args,
        ]
        lane.kernel(self._add_drafts, batch, self._block, args, name="proposed drafts")

    def forced(self, lane: Lane, row_slot: DeviceArray, proposal: DeviceArray) -> None:
        """Write to `proposal`, an argument of `add_drafts`, the tokens that the grammar forces.

        The grammar steps record the forced token of each mask row. `proposal` int32 [B, K] receives
        the tokens that mask rows 0, 1, .. of the slots `row_slot` int32 [B] force; -1 for a row
        that forces no token.
        """
        arrays = self._arrays
        batch = arrays.check_slots(row_slot)
        self._check(proposal, batch)
        exchange = arrays.exchange
        records = (arrays.state.array, exchange.memory, exchange.layout)
        args = [row_slot, arrays.draft_length, *records, proposal]
        lane.kernel(self._forced, batch, self._block, args, name="forced drafts")

    def _check(self, proposal: DeviceArray, batch: int) -> None:
        expect("proposal", proposal, "int32", B=batch, K=self._arrays.draft_length)
