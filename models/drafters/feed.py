"""Arrays of a decoding round that a drafter reads and writes.

There is one CUDA graph of a round for each batch bucket, which is a batch size to which smaller
batches are padded. One launch of a graph is a replay.
"""

from __future__ import annotations

from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.models.llm.rows import Rows
from graft.sampling.rows import RowMap
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotState

__all__ = ["Feed", "RoundScratch"]

_THREADS = 128
_KERNELS = Path(__file__).parent / "kernels" / "feed.cu"


class RoundScratch:
    """Device arrays that rounds read and write, allocated for the largest batch bucket.

    Smaller buckets use views of the arrays. The replays of all buckets run one after another on one
    stream, so they can share the arrays.

    A replay has at most `max_batch` requests, each with at most `width` target rows and `branch`
    draft nodes per level. The features have `features` columns (0 if no drafter reads features),
    and the draft logits have `draft_vocab` columns.
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
        # Arrays that only draft models use: features of the target and draft logits.
        self.features = device.zeros((rows, features), "float32") if features else None
        self.draft_logits = device.zeros((nodes, max(draft_vocab, 1)), "float32")


class Feed:
    """Inputs and output buffers of a drafter in the rounds of one batch bucket.

    A batch row is one request, or padding. Each batch row has several forward rows, the rows of the
    target's forward pass: one for its last token and one for each draft to verify. The tokens that
    verification committed are not in these arrays: the sampler stores them (``RoundRow``).

    Attributes
    ----------
    batch, count
        Number B of batch rows, and number R of forward rows.
    width
        Maximum number of rows per request in the next target forward pass. The drafter makes at
        most ``width - 1`` drafts; if the width is 1 it makes none.
    branch
        Number of rows that each request has in a draft level; 1 for a chain.
    row_map
        Maps forward rows to batch rows and draft indices.
    row_slot
        int32[B], slot of each batch row; -1 for padding.
    first
        int32[B], first forward row of each batch row.
    features
        float32[R, layers * hidden], features of the target. Row ``first[b] + j`` belongs to
        position n + j, where n is the position of the request's last token before the commit. None
        if the drafter reads no features.
    last
        int32[B], row of the last committed token of each request. The method `committed` fills this
        array.
    logits
        float32[B * branch, Vd], output buffer for draft logits.
    origin
        int32[B * branch], row of each draft's parent in the previous level. The method `drafts`
        fills this array.
    proposal
        int32[B, drafts], output buffer for drafts that are made all at once; -1 for no draft.
    parents
        int32[B, drafts], output buffer for the parents of the drafts in `proposal`: 0 for the last
        committed token, or the number of an earlier draft, from 1. None for a chain.
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
        self.row_map = RowMap(self.row_slot, self.first, scratch.map[:count])
        self.last = scratch.last[:batch]
        self.branch = branch
        self.logits = scratch.draft_logits[: batch * branch]
        self.origin = scratch.origin[: batch * branch]
        self.proposal = scratch.proposal[:batch]
        self.parents = None if scratch.parents is None else scratch.parents[:batch]
        features = scratch.features
        self.features = None if features is None else features[:count]

    def committed(self, lane: Lane, shift: int = 0) -> Rows:
        """Add a kernel that writes the tokens that this round committed as input rows.

        The kernel writes token, slot and position of `count` rows; rows without a committed token
        are padding. With a `shift` of 1, each token gets its own position. With a shift of 0, each
        token gets the position of the previous token, for heads that combine a token with the
        feature of the previous token.
        """
        rows = self.scratch.committed.first(self.count, self.count // self.batch)
        args = [
            *self.round_args,
            self.row_map.map,
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
        """Add a kernel that writes the drafts of a level as input rows of the drafter.

        The first level is 1. The drafts get position ``n + shift + level - 1``, where n is the
        position of the request's last committed token and `shift` is as in `committed`. There are B
        rows for a chain and B * branch rows for a tree. In a tree, some rows may be padding, and
        the kernel also fills the array `origin` of this object: the row of each draft's parent.
        """
        rows = self.scratch.drafts.first(self.batch * self.branch, self.branch)
        if rows.ancestors is None:
            args = [*self.round_args, self.batch, level, shift, rows.token, rows.slot, rows.pos]
            self._launch(lane, "draft_rows", args, f"draft {level} rows")
            return rows
        args = [
            *self.round_args,
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
    def round_args(self) -> list[object]:
        """First arguments of each kernel of ``feed.cu``: slots of the batch rows, round results."""
        sampler = self.sampler
        return [self.row_slot, self.state.array, sampler.arrays.results, sampler.arrays.row_words]

    def _launch(self, lane: Lane, kernel: str, args: list[object], name: str) -> None:
        lane.kernel(self.device.load(_KERNELS)[kernel], 1, _THREADS, args, name=name)
