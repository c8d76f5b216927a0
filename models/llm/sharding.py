"""One model on several ranks: what each holds of a layer, and how rank 0 leads the others.

Rank 0 is the engine. Where its target's forward begins it sends the others which rows these are and
the embedding of each; they run the same layers with their own heads and columns, and the partial
products of attention and MLP are added up on every rank, in rank order. They see no grammar, mask
or sample: what was verified comes as the rows of the next forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import GraphLane
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray, PinnedArray
from graft.cudagraph.nccl import NcclAllGather
from graft.cudagraph.ranks import HEADER_WORDS, AllGather, MpiAllGather, RankGroup
from graft.models.cache.kv import PagedKV
from graft.models.errors import EngineError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.rows import Rows
from graft.models.llm.weights import Matrix, ScaledMatrix, Weights

#: What rank 0 says first, before numbers.
CLOSE, END, BEGIN, FORWARD, COMPACT = range(5)
#: Bytes of what another rank says when it has loaded its share, and seconds that it may take.
ANSWER = 512
LOAD_S = 900.0
#: Columns of the MLP that stay together, of the first size that leaves each rank some.
_UNITS = (128, 16, 1)


@dataclass(frozen=True)
class Shard:
    """What a rank holds of every layer: some key heads with their query heads, and some columns of
    the MLP, each from the first to behind the last.

    Attributes
    ----------
    own : the model's shape with these sizes.
    """

    config: LlamaConfig
    keys: tuple[int, int]
    inner: tuple[int, int]

    @staticmethod
    def of(config: LlamaConfig, rank: int, size: int) -> Shard:
        """Of so many ranks. Raises OptionError where there are more than there is to share."""
        keys = config.num_key_value_heads
        inner = config.intermediate_size
        if size > min(keys, inner):
            raise OptionError(
                f"{size} ranks are too many for a model of {keys} key heads and an MLP of {inner} "
                "columns: each holds at least one of both"
            )
        unit = next(u for u in _UNITS if inner % u == 0 and inner // u >= size)
        first, last = _cut(inner // unit, rank, size)
        return Shard(config, _cut(keys, rank, size), (first * unit, last * unit))

    @property
    def own(self) -> LlamaConfig:
        config = self.config
        keys = self.keys[1] - self.keys[0]
        group = config.num_attention_heads // config.num_key_value_heads
        return replace(
            config,
            num_attention_heads=keys * group,
            num_key_value_heads=keys,
            intermediate_size=self.inner[1] - self.inner[0],
        )

    def slices(self) -> dict[str, tuple[slice, slice]]:
        """Rows and columns of each matrix of a layer."""
        dim = self.config.head_dim
        config = self.config
        whole = slice(None)
        group = config.num_attention_heads // config.num_key_value_heads
        queries, keys, inner = (
            slice(*(n * size for n in ends))
            for ends, size in ((self.keys, group * dim), (self.keys, dim), (self.inner, 1))
        )
        return {
            "q_proj": (queries, whole),
            "k_proj": (keys, whole),
            "v_proj": (keys, whole),
            "o_proj": (whole, queries),
            "gate_proj": (inner, whole),
            "up_proj": (inner, whole),
            "down_proj": (whole, inner),
        }


def _cut(count: int, rank: int, size: int) -> tuple[int, int]:
    """Of `count` things those of a rank; the first ranks have one more where it does not divide."""
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


class ShardedWeights(Weights):
    """The matrices of layers by `Share`, everything else whole."""

    def __init__(
        self, device: Device, checkpoint: Checkpoint, weights: str, share: Shard, sums: AllGather
    ) -> None:
        super().__init__(device, checkpoint, weights)
        self._slices = share.slices()
        self._sums = sums

    def stacked(
        self,
        parts: dict[str, int],
        columns: int,
        woven: Callable[[str, int, int], int] | None = None,
    ) -> Matrix:
        made = super().stacked(parts, columns, woven)
        halved = any(name.endswith(("o_proj.weight", "down_proj.weight")) for name in parts)
        if halved:
            made = replace(
                made if isinstance(made, ScaledMatrix) else ScaledMatrix(made), sums=self._sums
            )
        return made

    def _rows(self, name: str, rows: int, columns: int) -> tuple[np.ndarray, str, np.ndarray]:
        array, dtype, scale = super()._rows(name, rows, columns)
        own, across = self._slices[name.split(".")[-2]]
        return array[own, across], dtype, scale[own]


def make_sums(device: Device, ranks: RankGroup, most: int) -> AllGather:
    """How partial products of at most so many elements come to all ranks. Raises OptionError where
    the device is CUDA's and nccl4py is missing."""
    kind = NcclAllGather if device.kind == "cuda" else MpiAllGather
    return kind(device, ranks, most)


def split(words: PinnedArray, arrays: Sequence[DeviceArray]) -> list[PinnedArray]:
    """Where each array stands in the int32 words that follow a head."""
    ends = list(accumulate((array.nbytes // 4 for array in arrays), initial=0))
    return [words.view(begin, (end - begin,)) for begin, end in pairwise(ends)]


class TensorParallelLeader:
    """Rank 0 of several, for one engine.

    Raises
    ------
    OptionError
        The model cannot be shared by so many ranks, or this is not rank 0.
    """

    def __init__(
        self, device: Device, ranks: RankGroup, config: LlamaConfig, max_rows: int
    ) -> None:
        if ranks.rank:
            raise OptionError(f"rank {ranks.rank} has no engine: it follows rank 0 by follow()")
        self.ranks = ranks
        self.share = Shard.of(config, 0, ranks.size)
        self._device = device
        self._max_rows = max_rows
        self.sums = make_sums(device, ranks, max_rows * config.hidden_size)
        self._heads = dict[tuple[int, ...], np.ndarray]()
        self._words = device.pinned((1,), "int32")

    def begin(self, model: Path, kv: PagedKV, **options: Any) -> None:
        """Let the others load their shares; `options` are what else a `Follower` must know."""
        shape = {
            "layers": kv.layers,
            "pages": kv.scratch_page,
            "page_size": kv.page_size,
            "head_dim": kv.head_dim,
            "dtype": kv.dtype,
            "slots": kv.slots,
            "max_pages_per_slot": kv.max_pages,
        }
        said = {
            "model": str(model.resolve()),
            "config": str(asdict(self.share.config)),
            "kv": shape,
            "device": self._device.kind,
            "ordinal": self._device.ordinal,
            "max_rows": self._max_rows,
            **options,
        }
        text = np.frombuffer(json.dumps(said).encode(), np.uint8)
        self.ranks.send(self.ranks.peers, self._head(BEGIN, len(text)), text)

    def wait(self) -> None:
        """Wait until every rank has loaded its share. Raises EngineError with what one says."""
        for rank in self.ranks.peers:
            answer = np.zeros(ANSWER, np.uint8)
            self.ranks.receive(rank, answer, timeout_s=LOAD_S)
            if said := answer.tobytes().rstrip(b"\0").decode(errors="replace"):
                raise EngineError(f"rank {rank}: {said}")
        self.sums.connect()

    def forward(self, lane: Lane, rows: Rows, stream: DeviceArray, kv: PagedKV) -> None:
        """Let the others run these rows: their embeddings, before the first layer."""
        tree = () if rows.tree is None else (rows.tree,)
        self._say(
            lane,
            (FORWARD, rows.count, rows.run, len(tree)),
            rows.slot,
            rows.pos,
            kv.page_table,
            stream,
            *tree,
        )

    def compact(self, lane: Lane, row_slot: DeviceArray, result: DeviceArray) -> None:
        """Let the others compact their caches, see `Layers.compact`."""
        self._say(lane, (COMPACT, *result.shape), row_slot, result)

    def end(self) -> None:
        """Let the others drop their shares, unless they have failed."""
        if self.ranks.failure is None:
            self.ranks.send(self.ranks.peers, self._head(END))
            self.ranks.release_buffers()

    def _say(self, lane: Lane, head: tuple[int, ...], *arrays: DeviceArray) -> None:
        """Send a head, whether the others will be told the same again, and arrays."""
        count = sum(array.nbytes for array in arrays) // 4
        if count > self._words.shape[0]:
            self._words = self._device.pinned((count,), "int32")
            self.ranks.keep_alive(self._words)
        words = self._words.view(0, (count,))
        for part, array in zip(split(words, arrays), arrays, strict=True):
            lane.copy(part, array, name="rows")
        first = self._head(
            *head, *(0,) * (HEADER_WORDS - 1 - len(head)), isinstance(lane, GraphLane)
        )
        sent = [(rank, buffer) for rank in self.ranks.peers for buffer in (first, words)]
        self.ranks.exchange(lane, sent, name="rows to ranks")

    def _head(self, *numbers: int) -> np.ndarray:
        """The same array for the same numbers: a message may still be sent from it."""
        if numbers not in self._heads:
            padded = (*numbers, *(0,) * (HEADER_WORDS - len(numbers)))
            self._heads[numbers] = np.array(padded, np.int64)
            self.ranks.keep_alive(self._heads[numbers])
        return self._heads[numbers]
