"""Copies of mask rows from host to device memory."""

from __future__ import annotations

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.sampling.arrays import SamplingArrays
from graft.sampling.checks import check_range
from graft.sampling.kernels.loader import load

__all__ = ["MaskRows"]


class MaskRows:
    """Copies the mask rows of a batch, which the grammar fills on the host, to device memory."""

    def __init__(self, arrays: SamplingArrays) -> None:
        self._arrays = arrays
        self._copy = load(arrays.device, "mask_rows", arrays.block)["copy_mask_rows"]

    def copy_to_device(self, lane: Lane, row_slot: DeviceArray, first: int, end: int) -> None:
        """Copy mask rows from `Exchange.host_masks` to `Exchange.device_masks`.

        Rows that the grammar has not filled, and all rows of requests without a grammar, are
        skipped.

        Parameters
        ----------
        lane
            Lane, ordered after the grammar step that fills the rows.
        row_slot
            int32 [B], slot of each batch row; -1: padding.
        first, end
            Mask rows of each slot to copy; `end` is exclusive.
        """
        arrays = self._arrays
        batch = arrays.check_slots(row_slot)
        check_range("first", first, 0, arrays.draft_length)
        check_range("end", end, first + 1, arrays.draft_length + 1)
        exchange = arrays.exchange
        records = (exchange.memory, exchange.layout)
        args = [row_slot, first, *records, exchange.host_masks, exchange.device_masks]
        name = f"mask rows {first} to {end - 1}"
        lane.kernel(self._copy, (batch, end - first, 1), arrays.block, args, name=name)
