"""Sampling of target tokens."""

from __future__ import annotations

from typing import Any

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.sampling.arrays import SamplingArrays
from graft.sampling.checks import expect
from graft.sampling.kernels.loader import load, step_ranges
from graft.sampling.rows import RowMap

__all__ = ["TargetSampler"]


class TargetSampler:
    """Samples a token for each row of the target's logits.

    Logits are filtered in the order: adjustments of `SamplingParams`, vocabulary bound, mask,
    temperature, top-k, top-p, min-p, renormalization. Ties go to the smaller id. A NaN or +inf
    logit of a legal token fails the row (``REASON_ERROR``).
    """

    def __init__(self, arrays: SamplingArrays) -> None:
        self._arrays = arrays
        self._adjust = load(arrays.device, "adjust", arrays.block)["adjust_logits"]
        self._sample = load(arrays.device, "sample", arrays.block)["sample_target"]

    def sample(self, lane: Lane, logits: DeviceArray, rows: RowMap) -> None:
        """Adjust, mask and filter the target's logits, and sample a token for each row.

        A row gets no token if verification tests the draft after it by rejection sampling. `logits`
        float32 [R, V] is changed in place for requests with logit adjustments.
        """
        arrays = self._arrays
        arrays.check_rows(rows)
        expect("logits", logits, "float32", R=rows.count, V=arrays.vocab_size)
        grid = (rows.count, arrays.parts, 1)
        exchange = arrays.exchange
        inputs: list[Any] = [
            logits,
            arrays.vocab_size,
            arrays.token_limit,
            rows.slot,
            rows.map,
            arrays.state.array,
            exchange.device_masks,
            exchange.layout,
        ]
        states = (arrays.mask_states, arrays.cross_block)
        args = [*inputs, exchange.memory, *states, arrays.state.tables, arrays.raw_logits]
        lane.kernel(self._adjust, grid, arrays.block, args, name="adjust logits")
        results = (arrays.probs, arrays.target_tokens, arrays.row_status)
        for first, last in step_ranges(arrays.parts):
            args = [*inputs, *states, first, last, *results]
            lane.kernel(self._sample, grid, arrays.block, args, name=f"target rows {first}")
