"""What a round hands to its drafter, and the arrays that rounds of all buckets share."""

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
    """Row-indexed arrays of the largest bucket; every smaller bucket uses their beginnings.

    Replays of all buckets run on one stream, one after another, so they may share scratch.
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
        tree = branch > 1

        def ints(*shape: int) -> DeviceArray:
            return device.zeros(shape, "int32")

        self.row_slot = ints(max_batch)
        self.first = ints(max_batch)
        self.map = ints(rows)
        paths = device.zeros((rows,), "uint64") if tree else None
        self.target_rows = Rows(ints(rows), ints(rows), ints(rows), paths)
        self.committed = Rows(ints(rows), ints(rows), ints(rows))
        fed = device.zeros((nodes,), "uint64") if tree else None
        self.drafts = Rows(ints(nodes), ints(nodes), ints(nodes), fed)
        self.origin = ints(nodes)
        self.last = ints(max_batch)
        self.logits = device.zeros((rows, vocab), "float32")
        self.proposal = ints(max_batch, max(width - 1, 1))
        self.parents = ints(max_batch, max(width - 1, 1)) if tree else None
        # Without a drafter that wants them nobody reads these two.
        self.features = device.zeros((rows, features), "float32") if features else None
        self.draft_logits = device.zeros((nodes, max(draft_vocab, 1)), "float32")


class Feed:
    """One bucket's round, as its drafter sees it.

    Attributes
    ----------
    batch, count : requests per replay, and rows of the target's forward.
    width : tokens that a round tests per request at most, if its drafts are those made now: no more
        than width - 1 are wanted, which with 1 are none.
    branch : rows of a level of drafts, per request; 1 in a chain.
    state, sampler : ``Slot`` of every request and ``RoundRow`` of every batch row, for kernels.
    rows : which row of whom each row is.
    row_slot : int32 [B], slot of each batch row; -1: padding.
    first : int32 [B], the first row of each.
    features : float32 [R, taps * hidden]; row first[b] + j is of position n + j before.
    last : int32 [B], after `committed`: the row that holds a request's last token.
    logits : float32 [B * branch, Vd], where a drafter may leave its logits.
    origin : int32 [B * branch], after `drafts`: the row of the level before that each hangs on.
    proposal : int32 [B, drafts], for drafts that come all at once; -1 for none.
    parents : int32 [B, drafts], of a tree: what each hangs on, 0 for the last token, j for draft j
        of those before it. None: each hangs on the one before.
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
        """Rows [R] of the tokens this round committed, token i at ``old_n + shift + i``.

        With shift 0 a token stands at the position of the one before it, whose feature it is
        paired with; with 1 at its own.
        """
        rows = self.scratch.committed.first(self.count, self.count // self.batch)
        args = [*self._reads, self.rows.map, self.count, shift, rows.token, rows.slot, rows.pos]
        self._launch(lane, "committed_rows", [*args, self.last], "committed rows")
        return rows

    def drafts(self, lane: Lane, level: int, shift: int = 0) -> Rows:
        """Rows of the drafts of `level` (from 1), at position ``n + shift + level - 1``.

        [B], or [B * branch] of a tree, where not every row has a draft; see `origin`.
        """
        rows = self.scratch.drafts.first(self.batch * self.branch, self.branch)
        if rows.ancestors is not None:
            nodes = [
                *self._reads,
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
            self._launch(lane, "node_rows", nodes, f"nodes {level} rows")
            return rows
        args = [*self._reads, self.batch, level, shift, rows.token, rows.slot, rows.pos]
        self._launch(lane, "draft_rows", args, f"draft {level} rows")
        return rows

    @property
    def _reads(self) -> list[object]:
        sampler = self.sampler
        return [self.row_slot, self.state.array, sampler.rows, sampler.row_words]

    def _launch(self, lane: Lane, kernel: str, args: list[object], name: str) -> None:
        lane.kernel(self.device.load(_KERNELS)[kernel], 1, _THREADS, args, name=name)
