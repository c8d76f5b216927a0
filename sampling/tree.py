"""Trees of drafts that grow level by level: what is fed next, and which drafts are verified."""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.cstruct import read_struct
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.sampling.checks import check_range, expect
from graft.sampling.loading import KERNELS, load
from graft.sampling.sampler import Sampler
from graft.sampling.state import MAX_DRAFTS

__all__ = ["TREE_CANDIDATES", "TreePlan", "TreeSampler"]

#: Ids that the grammar may be asked about for the children of one node; a bit of a word each.
TREE_CANDIDATES = 32
_MOST_BRANCH = 16


class TreePlan(NamedTuple):
    """What a tree of drafts may become.

    Attributes
    ----------
    branch, levels : see `TreeSampler`.
    paths : of a tree whose shape is given: for every draft the ranks, from 0, of the children down
        to it, by level and then by rank. Empty: the likeliest are drafted.
    """

    branch: int
    levels: int
    paths: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, tree: Any) -> TreePlan:
        """Read an option: (branch, levels), or paths in any order. Raises OptionError."""
        given = list(tree) if isinstance(tree, (tuple, list)) else []
        plan = cls(0, 0)
        if len(given) == 2 and all(type(number) is int for number in given):
            plan = cls(*given)
        elif given and all(_is_path(path) for path in given):
            paths = sorted(map(tuple, given), key=lambda path: (len(path), path))
            parents = {path[:-1] for path in paths}
            if len({*paths}) == len(paths) and parents <= {(), *paths}:
                fed = Counter(map(len, parents))
                branch = max(2, *fed.values(), *(path[-1] + 1 for path in paths))
                plan = cls(branch, len(paths[-1]), tuple(paths))
        if not (2 <= plan.branch <= _MOST_BRANCH and plan.levels >= 1):
            raise OptionError(
                f"draft_tree must be (branch, levels), a branch from 2 to {_MOST_BRANCH} and a "
                "level or more, or paths of ranks that need no larger one, each once and with its "
                f"parent's, got {tree!r}"
            )
        return plan

    def table(self) -> NDArray:
        """Of each child that is seen which node of the next level it is, see ``tree_grow``."""
        branch = self.branch
        at: dict[tuple[int, ...], int] = {(): 0}
        found = np.full(branch + (self.levels - 1) * branch**2, -1, np.int32)
        for level in range(1, self.levels + 1):
            first = max(branch + (level - 2) * branch**2, 0)
            feeding = dict.fromkeys(path[:-1] for path in self.paths if len(path) == level + 1)
            fed = {path: f for f, path in enumerate(feeding)}
            for path in (path for path in self.paths if len(path) == level):
                found[first + at[path[:-1]] * branch + path[-1]] = fed.get(path, branch)
            at = fed
        return found


def _is_path(path: Any) -> bool:
    ranks = path if isinstance(path, (tuple, list)) else ()
    return len(ranks) > 0 and all(type(rank) is int and rank >= 0 for rank in ranks)


class TreeSampler:
    """Draws dynamic trees (Li et al., "EAGLE-2", 2024), where a `Sampler` draws chains.

    For each level there are ``candidates``, where the grammar is asked, and then ``draft``. Level
    1 reads logits of one row per request, the others of `branch` rows. A node's score is the sum
    of the log probabilities down to it; the best `branch` of a level are fed, and the best K of all
    that were seen are the drafts, the best first. Of equal scores the earlier is
    better. Coupled requests rank by the race that the target's draw will run with its noise.

    With `paths` neither is so: a node's child of rank c is the c-th of its likeliest, and those
    that are there of the ones in `TreePlan` are the drafts, in its order.

    A log probability is that among all ids but those that the grammar was asked about and refused:
    where it leaves one, that one is certain. A node without a legal one among its first 32 has no
    children, so a request may have fewer drafts.

    Parameters
    ----------
    sampler : of the round; its exchange was made with this branch.
    branch : children of a node that are kept, and nodes of a level that are fed.
    levels : how many there are.
    paths : of a `TreePlan`, K of them.

    Raises
    ------
    OptionError
        When more nodes are fed than have a bit each, or none is left to be verified.
    """

    def __init__(
        self, sampler: Sampler, branch: int, levels: int, paths: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        check_range("branch", branch, 2, TREE_CANDIDATES)
        check_range("levels", levels, 1, sampler.draft_length)
        check_range("nodes that are fed", (levels - 1) * branch, 0, MAX_DRAFTS)
        device = sampler.device
        batch = sampler.max_batch
        vocab = sampler.draft_vocab
        self._sampler = sampler
        self._branch = branch
        self._levels = levels
        self._probes = int(sampler.exchange.layout["candidates"]) > 0
        if self._probes:
            check_range(
                "branch of the exchange", int(sampler.exchange.layout["branch"]), branch, branch
            )
            check_range(
                "candidates",
                int(sampler.exchange.layout["candidates"]),
                TREE_CANDIDATES,
                TREE_CANDIDATES,
            )
        most = branch + (levels - 1) * branch * branch
        seen = np.zeros((), read_struct(KERNELS / "tree.cu", "Seen"))
        seen["branch"] = branch
        seen["levels"] = levels
        seen["most"] = most
        seen["candidates"] = TREE_CANDIDATES if self._probes else branch
        seen["nodes"] = sampler.draft_length
        self._seen: Any = seen[()]
        plan = TreePlan(branch, levels, paths)
        self._plan = device.from_host(plan.table()) if paths else None
        best = (batch * branch, int(seen["candidates"]))
        self._work = device.zeros((batch * branch, vocab), "float32")
        self._best = (
            device.zeros(best, "int32"),
            device.zeros(best, "float32"),
            device.zeros(best[:1], "float32"),
        )
        self._children = (
            device.zeros((batch, most), "int32"),
            device.zeros((batch, most), "int32"),
            device.zeros((batch, most), "float32"),
            device.zeros((batch, MAX_DRAFTS), "int32"),
            device.zeros((batch, most), "int32"),
        )
        kernels = load(device, "tree", sampler.block)
        self._candidates = kernels["tree_candidates"]
        self._grow = kernels["tree_grow"]

    def of(self, nodes: int) -> TreeSampler:
        """The same, of at most so many drafts, hence levels; it shares its arrays."""
        check_range("nodes", nodes, 1, self._sampler.draft_length)
        fewer = copy(self)
        fewer._levels = min(self._levels, nodes)
        fewer._seen = self._seen.copy()
        fewer._seen["nodes"] = nodes
        fewer._seen["levels"] = fewer._levels
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
        args = [
            row_slot,
            level,
            int(masked),
            self._seen,
            s.state.array,
            s.rows,
            s.row_words,
            *self._best,
            *self._children,
            self._plan,
            *s.shared,
        ]
        lane.kernel(self._grow, row_slot.shape[0], s.block, args, name=f"tree level {level}")

    def _rank(
        self, lane: Lane, logits: DeviceArray, row_slot: DeviceArray, level: int, *, probed: bool
    ) -> None:
        s = self._sampler
        check_range("level", level, 1, self._levels)
        rows = row_slot.shape[0] * (1 if level == 1 else self._branch)
        expect("logits", logits, "float32", R=rows, Vd=s.draft_vocab)
        args = [
            logits,
            s.draft_vocab,
            s.token_limit,
            s.d2t,
            row_slot,
            level,
            int(probed),
            self._seen,
            s.meetings,
            s.state.array,
            s.rows,
            s.row_words,
            self._work,
            *self._best,
            *s.shared,
        ]
        grid = (rows, s.draft_parts, 1)
        lane.kernel(self._candidates, grid, s.block, args, name=f"candidates {level}")
