"""Trees of drafts that grow level by level: what is fed next, and which drafts are verified."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from graft.cudagraph.cstruct import read_struct
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.sampling.checks import check_array, check_range
from graft.sampling.loading import KERNELS, load
from graft.sampling.sampler import Sampler
from graft.sampling.state import MAX_DRAFTS

__all__ = ["TREE_CANDIDATES", "TreeSampler"]

#: Ids that the grammar may be asked about for the children of one node; a bit of a word each.
TREE_CANDIDATES = 32


class TreeSampler:
    """Draws dynamic trees (Li et al., "EAGLE-2", 2024), where a `Sampler` draws chains.

    For each level there are ``candidates``, where the grammar is asked, and then ``draft``. Level
    1 reads logits of one row per request, the others of `branch` rows. A node's score is the sum
    of the log probabilities down to it; the best `branch` of a level are fed, and the best K of all
    that were seen are the drafts, numbered as they were seen. Of equal scores the earlier is
    better. Coupled requests rank by the race that the target's draw will run with its noise.

    A log probability is that among all ids but those that the grammar was asked about and refused:
    where it leaves one, that one is certain. A node without a legal one among its first 32 has no
    children, so a request may have fewer drafts.

    Parameters
    ----------
    sampler : of the round; its exchange was made with this branch.
    branch : children of a node that are kept, and nodes of a level that are fed.
    levels : how many there are.

    Raises
    ------
    OptionError
        When more nodes are fed than have a bit each, or none is left to be verified.
    """

    def __init__(self, sampler: Sampler, branch: int, levels: int) -> None:
        check_range("branch", branch, 2, TREE_CANDIDATES)
        check_range("levels", levels, 1, sampler.draft_length)
        check_range("nodes that are fed", (levels - 1) * branch, 0, MAX_DRAFTS)
        device, batch, vocab = sampler.device, sampler.max_batch, sampler.draft_vocab
        self._sampler, self._branch, self._levels = sampler, branch, levels
        self._probes = int(sampler.exchange.layout["candidates"]) > 0
        if self._probes:
            check_range("branch of the exchange", int(sampler.exchange.layout["branch"]),
                        branch, branch)  # fmt: skip
            check_range("candidates", int(sampler.exchange.layout["candidates"]), TREE_CANDIDATES,
                        TREE_CANDIDATES)  # fmt: skip
        most = branch + (levels - 1) * branch * branch
        seen = np.zeros((), read_struct(KERNELS / "tree.cu", "Seen"))
        seen["branch"], seen["levels"], seen["most"] = branch, levels, most
        seen["candidates"] = TREE_CANDIDATES if self._probes else branch
        seen["nodes"] = sampler.draft_length
        self._seen: Any = seen[()]
        best = (batch * branch, int(seen["candidates"]))
        self._work = device.zeros((batch * branch, vocab), "float32")
        self._best = device.zeros(best, "int32"), device.zeros(best, "float32")
        self._children = (
            device.zeros((batch, most), "int32"), device.zeros((batch, most), "int32"),
            device.zeros((batch, most), "float32"), device.zeros((batch, MAX_DRAFTS), "int32"),
            device.zeros((batch, most), "int32"),
        )  # fmt: skip
        kernels = load(device, "tree", sampler.block)
        self._candidates, self._grow = kernels["tree_candidates"], kernels["tree_grow"]

    def of(self, nodes: int) -> TreeSampler:
        """The same, of at most so many drafts, hence levels; it shares its arrays."""
        check_range("nodes", nodes, 1, self._sampler.draft_length)
        fewer = copy(self)
        fewer._levels, fewer._seen = min(self._levels, nodes), self._seen.copy()
        fewer._seen["nodes"], fewer._seen["levels"] = nodes, fewer._levels
        return fewer

    def candidates(
        self, lane: Lane, logits: DeviceArray, row_slot: DeviceArray, level: int
    ) -> None:
        """Write what the grammar is to test for the children of a level's nodes.

        Parameters
        ----------
        logits : float32 [B, Vd] at level 1, [B * branch, Vd] at others.
        """
        if not self._probes:
            raise OptionError("the exchange was made without candidates")
        self._rank(lane, logits, row_slot, level, probed=True)

    def draft(
        self, lane: Lane, logits: DeviceArray, row_slot: DeviceArray, level: int, masked: bool
    ) -> None:
        """Choose a level's nodes, and at the last level the drafts, of slots as `Sampler.draft`."""
        if not masked:
            self._rank(lane, logits, row_slot, level, probed=False)
        s = self._sampler
        args = [row_slot, level, int(masked), self._seen, s.state.array, s.rows, s.row_words,
                *self._best, *self._children, *s.shared]  # fmt: skip
        lane.kernel(self._grow, row_slot.shape[0], s.block, args, name=f"tree level {level}")

    def _rank(
        self, lane: Lane, logits: DeviceArray, row_slot: DeviceArray, level: int, *, probed: bool
    ) -> None:
        s = self._sampler
        check_range("level", level, 1, self._levels)
        rows = row_slot.shape[0] * (1 if level == 1 else self._branch)
        check_array("logits", logits, "float32", ("R", "Vd"), {"R": rows, "Vd": s.draft_vocab})
        args = [logits, s.draft_vocab, s.token_limit, s.d2t, row_slot, level, int(probed),
                self._seen, s.state.array, s.rows, s.row_words, self._work, *self._best,
                *s.shared]  # fmt: skip
        lane.kernel(self._candidates, rows, s.block, args, name=f"candidates {level}")
