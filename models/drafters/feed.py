"""Data of a round that a drafter reads and writes, and the arrays that all rounds share."""

from __future__ import annotations

from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.llm.rows import Rows
from graft.sampling.sampler import RowMap, Sampler
from graft.sampling.state import SlotState

__all__ = ["Feed", "RoundScratch"]

_THREADS = 128
_KERNELS = Path(__file__).parent / "kernels" / "feed.cu"


class RoundScratch:
    """Row-indexed arrays of the largest batch bucket; smaller buckets use views of them.

    Replays of all buckets run on one stream, one after another, so they can share the arrays.

    Parameters
    ----------
    device
        Device of the arrays.
    max_batch
        Maximum number of requests per replay.
    width
        Maximum number of target rows per request.
    vocab
        Vocabulary size of the target.
    branch
        Maximum number of draft nodes per level and request.
    features
        Columns of the features; 0 if no drafter reads them.
    draft_vocab
        Columns of the draft logits.
    """

    def __init__(
        self,
        device: Device,
        max_batch: int,
        width: int,
        vocab: int,
        *,
        branch: int,
        features: int,
        draft_vocab: int,
    ):
        rows = max_batch * width
        nodes = max_batch * branch
        is_tree = branch > 1

        def ints(*shape: int) -> DeviceArray:
            return device.zeros(shape, "int32")

        self.row_slot = ints(max_batch)
        self.first = ints(max_batch)
        self.map = ints(rows)
        target_ancestors = device.zeros((rows,), "uint64") if is_tree else None
        self.target_rows = Rows(ints(rows), ints(rows), ints(rows), target_ancestors)
        self.committed = Rows(ints(rows), ints(rows), ints(rows))
        draft_ancestors = device.zeros((nodes,), "uint64") if is_tree else None
        self.drafts = Rows(ints(nodes), ints(nodes), ints(nodes), draft_ancestors)
        self.origin = ints(nodes)
        self.last = ints(max_batch)
        self.logits = device.zeros((rows, vocab), "float32")
        self.proposal = ints(max_batch, max(width - 1, 1))
        self.parents = ints(max_batch, max(width - 1, 1)) if is_tree else None
        # Only drafters read the features and write the draft logits.
        self.features = device.zeros((rows, features), "float32") if features else None
        self.draft_logits = device.zeros((nodes, max(draft_vocab, 1)), "float32")


class Feed:
    """The round of one batch bucket as its drafter sees it.

    Attributes
    ----------
    batch
        Number B of requests per replay.
    count
        Number R of rows of the target's forward pass.
    width
        Maximum number of tokens per request that the next target forward pass verifies: at most
        width - 1 drafts are needed, none if it is 1.
    branch
        Number of rows per request of a draft level; 1 for a chain.
    state
        ``Slot`` of every request, for kernels.
    sampler
        Sampler of the round, with the ``RoundRow`` of every batch row.
    rows
        Maps forward rows to batch rows and draft indices.
    row_slot
        int32[B], slot of each batch row; -1 for padding.
    first
        int32[B], first forward row of each batch row.
    features
        float32[R, layers * hidden], features of the target; row first[b] + j is position n + j
        before the commit. None if the drafter reads none.
    last
        int32[B], after `committed`: the row of the last token of each request.
    logits
        float32[B * branch, Vd], output buffer for draft logits.
    origin
        int32[B * branch], after `drafts`: the row of the parent in the previous level.
    proposal
        int32[B, drafts], output buffer for drafts that are made all at once; -1 for none.
    parents
        int32[B, drafts], parents of `proposal` in a tree: 0 for the last token, j for draft j
        before it. None in a chain.
    """

    def __init__(
        self,
        device: Device,
        batch: int,
        count: int,
        width: int,
        branch: int,
        state: SlotState,
        sampler: Sampler,
        scratch: RoundScratch,
    ):
        self.device = device
        self.batch = batch
        self.count = count
        self.width = width
        self.state = state
        self.sampler = sampler
        self.scratch = scratch
        self.row_slot = scratch.row_slot[:batch]
        self.first = scratch.first[:batch]
        self.rows = RowMap(self.row_slot, self.first, scratch.map[:count])
        self.last = scratch.last[:batch]
        self.branch = branch
        self.logits = scratch.draft_logits[: batch * branch]
        self.origin = scratch.origin[: batch * branch]
        self.proposal = scratch.proposal[:batch]
        self.parents = None if scratch.parents is None else scratch.parents[:batch]
        features = scratch.features
        self.features = None if features is None else features[:count]

    def committed(self, lane: Lane, shift: int = 0) -> Rows:
        """Lay out the tokens that this round committed as rows [R].

        Token i is at position ``old_n + shift + i``.

        Parameters
        ----------
        lane
            Lane that the kernel is added to.
        shift
            0: a token has the position of the previous token, with whose feature it is paired. 1:
            it has its own position.
        """
        rows = self.scratch.committed.first(self.count, self.count // self.batch)
        args = [
            *self._round_args,
            self.rows.map,
            self.count,
            shift,
            rows.token,
            rows.slot,
            rows.pos,
            self.last,
        ]
        self._launch(lane, "committed_rows", args, "committed rows")
        return rows

    def drafts(self, lane: Lane, level: int, shift: int = 0) -> Rows:
        """Lay out the drafts of `level` (from 1) as rows, at position ``n + shift + level - 1``.

        Returns
        -------
        Rows
            [B] in a chain. [B * branch] in a tree, where not every row has a draft; `origin` then
            has the parents.
        """
        rows = self.scratch.drafts.first(self.batch * self.branch, self.branch)
        if rows.ancestors is None:
            args = [*self._round_args, self.batch, level, shift, rows.token, rows.slot, rows.pos]
            self._launch(lane, "draft_rows", args, f"draft {level} rows")
            return rows
        args = [
            *self._round_args,
            self.batch,
            self.branch,
            level + 1,
            shift,
            rows.token,
            rows.slot,
            rows.pos,
            rows.ancestors,
            self.origin,
        ]
        self._launch(lane, "node_rows", args, f"nodes {level} rows")
        return rows

    @property
    def _round_args(self) -> list[object]:
        sampler = self.sampler
        return [self.row_slot, self.state.array, sampler.rows, sampler.row_words]

    def _launch(self, lane: Lane, kernel: str, args: list[object], name: str) -> None:
        lane.kernel(self.device.load(_KERNELS)[kernel], 1, _THREADS, args, name=name)
