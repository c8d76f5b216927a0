"""Kernels that grow draft trees level by level.

They choose the nodes of each level that the drafter reads next, and finally the drafts that the
target verifies.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.driver.cstruct import read_struct
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.native.errors import short_repr
from graft.sampling.arrays import SamplingArrays
from graft.sampling.checks import check_range, expect
from graft.sampling.kernels.loader import KERNELS, load
from graft.sampling.state import MAX_DRAFTS

__all__ = ["TreePlan", "TreeSampler"]

#: Maximum value of `branch` in the option ``draft_tree``.
_MAX_PLAN_BRANCH = 16


class TreePlan(NamedTuple):
    """Maximum sizes of a draft tree or, with `paths`, its exact shape.

    A node has at most `branch` children, and the drafter reads at most `branch` nodes of each
    level. `levels` is the maximum depth of a draft.

    `paths` is the exact shape of a fixed tree. It has one path per draft: the ranks of the nodes
    from level 1 to the draft, where rank 0 is the most likely child of its parent. Paths are sorted
    by length, then by rank. Without paths, the most likely nodes become drafts.
    """

    branch: int
    levels: int
    paths: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, tree: Any) -> TreePlan:
        """Parse the option ``draft_tree``: (branch, levels), or a fixed tree's paths in any order.

        Anything else raises OptionError.
        """
        plan = cls._parse(tree)
        if plan is None or not 2 <= plan.branch <= _MAX_PLAN_BRANCH or plan.levels < 1:
            raise OptionError(
                f"draft_tree must be (branch, levels) with a branch from 2 to {_MAX_PLAN_BRANCH} "
                "and at least one level, or distinct paths of ranks that contain the parent of "
                f"each path and need no larger branch, got {short_repr(tree)}"
            )
        return plan

    @classmethod
    def _parse(cls, tree: Any) -> TreePlan | None:
        """Return the plan without checking its bounds, or None if `tree` is malformed."""
        if not isinstance(tree, (tuple, list)):
            return None
        if len(tree) == 2 and all(type(number) is int for number in tree):
            return cls(*tree)
        if not tree or not all(_is_path(path) for path in tree):
            return None
        paths = sorted(map(tuple, tree), key=lambda path: (len(path), path))
        distinct = set(paths)
        parents = {path[:-1] for path in paths}
        has_all_parents = parents <= distinct | {()}
        if len(distinct) < len(paths) or not has_all_parents:
            return None
        # Nodes with children are fed to the drafter.
        fed_per_level = Counter(map(len, parents))
        highest_rank = max(path[-1] for path in paths)
        branch = max(2, *fed_per_level.values(), highest_rank + 1)
        return cls(branch, len(paths[-1]), tuple(paths))

    def table(self) -> NDArray:
        """Return the ``plan`` argument of the kernel ``tree_grow`` for a fixed tree.

        It has one int32 entry for each child that a tree with `branch` and `levels` can have, in
        the order of ``struct TreeSize`` in kernels/tree.cu. For a draft that has children, and is
        therefore fed to the drafter, the entry is its index among the fed drafts of its level. The
        entry is `branch` for a draft without children, and -1 for all other children.
        """
        branch = self.branch
        children_per_level = branch**2  # at level 2 and deeper; level 1 has `branch` children
        table = np.full(branch + (self.levels - 1) * children_per_level, -1, np.int32)
        # Maps the path of each node of the previous level that is fed to the drafter to its index
        # among these nodes. Only fed nodes have children.
        node_of: dict[tuple[int, ...], int] = {(): 0}
        for level in range(1, self.levels + 1):
            first = 0
            if level > 1:
                first = branch + (level - 2) * children_per_level
            fed = self._fed_nodes(level)
            for path in self.paths:
                if len(path) != level:
                    continue
                parent = node_of[path[:-1]]
                child = first + parent * branch + path[-1]
                table[child] = fed.get(path, branch)
            node_of = fed
        return table

    def _fed_nodes(self, level: int) -> dict[tuple[int, ...], int]:
        """Number the nodes of a level that have children, and return the numbers by path."""
        nodes: dict[tuple[int, ...], int] = {}
        for path in self.paths:
            if len(path) == level + 1:
                nodes.setdefault(path[:-1], len(nodes))
        return nodes


def _is_path(path: Any) -> bool:
    """Return whether a value is a path: a non-empty sequence of ranks, as in `TreePlan.paths`."""
    if not isinstance(path, (tuple, list)) or not path:
        return False
    return all(type(rank) is int and rank >= 0 for rank in path)


class TreeSampler:
    """Grows draft trees level by level.

    For each level, call `candidates` if the grammar tests candidates, then `draft`. Level 1 reads
    one row of logits per request, later levels read `branch` rows.

    The score of a node is the sum of the log probabilities on its path. The `branch` nodes of a
    level with the highest scores are fed to the drafter. The K nodes of all levels with the highest
    scores become drafts, in descending order (EAGLE-2, Li et al., 2024). Of nodes with equal
    scores, the earlier one is preferred. In a fixed tree, the ranks of the paths determine which
    nodes are fed and which become drafts.

    For sampled requests, probabilities are weighted with random numbers: the weight of a token is
    p / E, where E is the exponential variate that the target will use for the same token and
    position. A token with a high weight is therefore likely to be sampled by the target.

    Probabilities are renormalized after the grammar has rejected candidates, so a single legal
    candidate has probability 1. A node without a legal token among its candidates has no
    children, so a request may have fewer than K drafts.

    OptionError is raised if the draft mode has no tree that grows level by level.
    """

    def __init__(self, arrays: SamplingArrays) -> None:
        mode = arrays.mode
        if not mode.grows_tree:
            raise OptionError(
                f"TreeSampler requires a tree that grows level by level, got {mode.kind} drafts "
                f"with masking {mode.masking!r}"
            )
        branch = mode.branch
        self._arrays = arrays
        self._branch = branch
        self._levels = mode.levels
        self._probes = mode.probes
        num_children = branch + (mode.levels - 1) * branch * branch
        shape = np.zeros((), read_struct(KERNELS / "tree.cu", "TreeSize"))
        shape["branch"] = branch
        shape["levels"] = mode.levels
        shape["children"] = num_children
        shape["candidates"] = mode.candidates if mode.probes else branch
        shape["drafts"] = arrays.draft_length
        self._shape: Any = shape[()]
        plan = TreePlan(branch, mode.levels, mode.paths)
        self._plan = arrays.device.from_host(plan.table()) if mode.paths else None
        self._allocate(num_children, int(shape["candidates"]))
        kernels = load(arrays.device, "tree", arrays.block)
        self._candidates = kernels["tree_candidates"]
        self._grow = kernels["tree_grow"]

    def _allocate(self, num_children: int, candidates: int) -> None:
        """Allocate the arrays of the kernels.

        `num_children` is the number of children per request over all levels of the draft tree, and
        `candidates` the maximum number of candidate ids per node.
        """
        device = self._arrays.device
        batch = self._arrays.max_batch
        nodes = batch * self._branch
        self._work = device.zeros((nodes, self._arrays.draft_vocab.size), "float32")
        self._candidate_arrays = (
            device.zeros((nodes, candidates), "int32"),
            device.zeros((nodes, candidates), "float32"),
            device.zeros((nodes,), "float32"),
        )
        self._child_arrays = (
            device.zeros((batch, num_children), "int32"),
            device.zeros((batch, num_children), "int32"),
            device.zeros((batch, num_children), "float32"),
            device.zeros((batch, MAX_DRAFTS), "int32"),
            device.zeros((batch, num_children), "int32"),
        )

    def limited_to(self, drafts: int) -> TreeSampler:
        """Return a sampler of at most `drafts` drafts that shares the arrays of this one.

        Its number of levels is at most `drafts`, too.
        """
        check_range("drafts", drafts, 1, self._arrays.draft_length)
        smaller = copy(self)
        smaller._levels = min(self._levels, drafts)
        smaller._shape = self._shape.copy()
        smaller._shape["drafts"] = drafts
        smaller._shape["levels"] = smaller._levels
        return smaller

    def candidates(
        self, lane: Lane, logits: DeviceArray, row_slot: DeviceArray, level: int
    ) -> None:
        """Write the candidates for the nodes of a level, which the grammar then tests.

        Levels are counted from 1. `logits` is float32 [B, Vd] at level 1 and [B * branch, Vd] at
        later levels; it is changed in place for requests with logit adjustments. `row_slot` int32
        [B] is the slot of each batch row; -1: padding.
        """
        if not self._probes:
            raise OptionError("candidates() requires masking 'probe', not 'none'")
        self._rank(lane, logits, row_slot, level)

    def draft(self, lane: Lane, logits: DeviceArray, row_slot: DeviceArray, level: int) -> None:
        """Choose the nodes of a level that are fed to the drafter.

        At the last level, choose the drafts from the nodes of all levels instead. The arguments
        have the same meaning as in `candidates`.
        """
        if not self._probes:
            self._rank(lane, logits, row_slot, level)
        arrays = self._arrays
        args = [
            row_slot,
            level,
            self._shape,
            arrays.state.array,
            arrays.results,
            arrays.row_words,
            *self._candidate_arrays,
            *self._child_arrays,
            self._plan,
            *arrays.exchange_args,
        ]
        name = f"tree level {level}"
        lane.kernel(self._grow, row_slot.shape[0], arrays.block, args, name=name)

    def _rank(self, lane: Lane, logits: DeviceArray, row_slot: DeviceArray, level: int) -> None:
        """Add the kernel that finds each node's candidates: the tokens most likely to follow it."""
        arrays = self._arrays
        check_range("level", level, 1, self._levels)
        rows = row_slot.shape[0]
        if level > 1:
            rows *= self._branch
        expect("logits", logits, "float32", R=rows, Vd=arrays.draft_vocab.size)
        args = [
            logits,
            *arrays.draft_vocab_args,
            row_slot,
            level,
            self._shape,
            arrays.state.tables,
            arrays.vocab_size,
            arrays.cross_block,
            arrays.state.array,
            arrays.results,
            arrays.row_words,
            self._work,
            *self._candidate_arrays,
            *arrays.exchange_args,
        ]
        grid = (rows, arrays.draft_parts, 1)
        lane.kernel(self._candidates, grid, arrays.block, args, name=f"candidates {level}")
