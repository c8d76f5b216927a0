"""Verification of drafts, and publication of the results of a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graft.cudagraph.driver.pinned import Ring
from graft.cudagraph.lanes import Lane
from graft.sampling.arrays import SamplingArrays
from graft.sampling.checks import check_range
from graft.sampling.kernels.loader import load
from graft.sampling.results import output_layout
from graft.sampling.rows import RowMap

__all__ = ["Verifier"]


class Verifier:
    """Verifies drafts, given the tokens of the `TargetSampler`, and publishes the results."""

    def __init__(self, arrays: SamplingArrays) -> None:
        self._arrays = arrays
        verify = load(arrays.device, "verify", arrays.block)
        self._test = verify["test_drafts"]
        self._verify = verify["verify_drafts"]
        self._publish = load(arrays.device, "adjust", arrays.block)["publish_round"]

    def verify(
        self,
        lane: Lane,
        rows: RowMap,
        out_ring: Ring,
        *,
        before_publishing: Callable[[], None] | None = None,
    ) -> None:
        """Verify the drafts, commit tokens to the slots and publish the results to the host.

        The results are written to entry ``replay % entries`` of `out_ring`, see `output_ring`.
        `before_publishing` may add nodes between verification and publication.
        """
        arrays = self._arrays
        batch = arrays.check_rows(rows)
        results = out_ring["rows"]
        check_range("words of an output row", results.shape[1], arrays.row_words, arrays.row_words)
        check_range("output rows", results.shape[0], batch, 1 << 16)
        self.commit(lane, rows)
        if before_publishing is not None:
            before_publishing()
        self._publish_results(lane, rows, out_ring, batch)

    def commit(self, lane: Lane, rows: RowMap) -> None:
        """Verify the drafts and commit tokens to the slots, without publishing the results.

        The results are written to ``SamplingArrays.results``, a ``RoundRow`` for each batch row.
        """
        arrays = self._arrays
        batch = arrays.check_rows(rows)
        inputs: list[Any] = [
            arrays.vocab_size,
            arrays.draft_vocab.size,
            arrays.draft_vocab.t2d,
            arrays.probs,
            arrays.row_status,
            arrays.state.array,
            arrays.draft_probs,
            arrays.draft_probs.shape[1],
            arrays.test_weights,
            arrays.test_results,
        ]
        if arrays.draft_vocab.size > 0 and rows.count > batch:
            self._test_by_rejection(lane, rows, inputs)
        args = [
            rows.slot,
            rows.first,
            *inputs,
            arrays.cross_block,
            arrays.target_tokens,
            *arrays.exchange_args,
            arrays.results,
            arrays.row_words,
        ]
        lane.kernel(self._verify, (batch, arrays.parts, 1), arrays.block, args, name="verify")

    def _test_by_rejection(self, lane: Lane, rows: RowMap, inputs: list[Any]) -> None:
        """Add the kernel that tests drafts by rejection sampling."""
        arrays = self._arrays
        args = [rows.slot, rows.map, *inputs, arrays.cross_block, arrays.faults]
        grid = (rows.count, arrays.parts, 1)
        lane.kernel(self._test, grid, arrays.block, args, name="test drafts")

    def _publish_results(self, lane: Lane, rows: RowMap, out_ring: Ring, batch: int) -> None:
        """Add the kernel that writes log probabilities and the entry of the output ring."""
        arrays = self._arrays
        results = out_ring["rows"]
        logprobs = out_ring["logprobs"]
        stamp = out_ring["stamp"]
        args = [
            arrays.raw_logits,
            arrays.vocab_size,
            rows.slot,
            rows.map,
            arrays.state.array,
            arrays.results,
            arrays.row_words,
            arrays.state.tables,
            batch,
            arrays.replay,
            logprobs,
            output_layout(out_ring, logprobs),
            results,
            output_layout(out_ring, results),
            arrays.cross_block,
            stamp,
            stamp.stride,
        ]
        lane.kernel(self._publish, rows.count, arrays.block, args, name="publish tokens")
