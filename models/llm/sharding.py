"""Tensor parallelism: the shard of each rank, and rank 0, which leads the group.

Attention is split by KV heads and the MLP by columns, as in Megatron-LM: q, k, v, gate and up
projections are column parallel, o and down projections are row parallel. Embedding, norms and LM
head are not split.

Rank 0 runs the engine. At the start of a target forward pass it sends the rows and their embeddings
to the worker ranks (worker_rank.py), which run the same layers on their shards. Every rank gathers
the partial products of the row-parallel projections and adds them in rank order. This all-reduce
gives the same bits on all ranks. Grammar, masks and sampling run on rank 0 only. The workers
receive the results of verification as the rows of the next forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray, PinnedArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph.graph import GraphLane
from graft.cudagraph.lanes import Lane
from graft.cudagraph.ranks.nccl import NcclAllGather
from graft.cudagraph.ranks.ranks import HEADER_WORDS, AllGather, MpiAllGather, RankGroup
from graft.models.cache.kv import PagedKV
from graft.models.errors import EngineError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.rows import Rows
from graft.models.llm.weights import Interleave, Matrix, ScaledMatrix, Weights


class Command(IntEnum):
    """Commands that rank 0 sends to the worker ranks as the first word of a message header.

    LOAD makes the worker load a shard of the model in place of its current shard, and UNLOAD makes
    it release the shard. FORWARD runs the layers of the shard, and COMPACT compacts its KV cache.
    CLOSE stops the worker. After the header, a LOAD message has JSON as its payload; FORWARD and
    COMPACT messages have the contents of device arrays.
    """

    CLOSE = 0
    UNLOAD = 1
    LOAD = 2
    FORWARD = 3
    COMPACT = 4


#: Size of a worker's reply to LOAD, in bytes. The reply is an error message or zeros.
REPLY_BYTES = 512
#: Time limit of LOAD, in seconds.
LOAD_TIMEOUT_S = 900.0
#: MLP columns are assigned to ranks in units of adjacent columns. The unit is the first of these
#: sizes that divides the number of columns and gives every rank at least one unit.
_COLUMN_UNITS = (128, 16, 1)
_ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class Shard:
    """The part of every decoder layer that one rank holds.

    `config` is the shape of the whole model. The ranges `kv_heads` and `mlp_columns` are [begin,
    end). The query heads that share a KV head belong to its rank.
    """

    config: LlamaConfig
    kv_heads: tuple[int, int]
    mlp_columns: tuple[int, int]

    @staticmethod
    def of(config: LlamaConfig, rank: int, size: int) -> Shard:
        """Return the shard of a rank.

        More ranks than KV heads or MLP columns raise OptionError.
        """
        kv_heads = config.num_key_value_heads
        columns = config.intermediate_size
        if size > min(kv_heads, columns):
            raise OptionError(
                f"{size} ranks are too many for a model with {kv_heads} KV heads and {columns} MLP "
                "columns: each rank needs at least one of each"
            )
        unit = _column_unit(columns, size)
        begin, end = _split_evenly(columns // unit, rank, size)
        mlp_columns = (begin * unit, end * unit)
        return Shard(config, _split_evenly(kv_heads, rank, size), mlp_columns)

    @property
    def local_config(self) -> LlamaConfig:
        """Shape of the model with the head and column counts of this rank."""
        config = self.config
        kv_heads = self.kv_heads[1] - self.kv_heads[0]
        group = config.num_attention_heads // config.num_key_value_heads
        return replace(
            config,
            num_attention_heads=kv_heads * group,
            num_key_value_heads=kv_heads,
            intermediate_size=self.mlp_columns[1] - self.mlp_columns[0],
        )

    def slices(self) -> dict[str, tuple[slice, slice]]:
        """Return the rows and columns of each matrix of a layer that belong to this rank."""
        config = self.config
        dim = config.head_dim
        group = config.num_attention_heads // config.num_key_value_heads
        begin, end = self.kv_heads
        queries = slice(begin * group * dim, end * group * dim)
        keys = slice(begin * dim, end * dim)
        mlp = slice(*self.mlp_columns)
        everything = slice(None)
        return {
            "q_proj": (queries, everything),
            "k_proj": (keys, everything),
            "v_proj": (keys, everything),
            "o_proj": (everything, queries),
            "gate_proj": (mlp, everything),
            "up_proj": (mlp, everything),
            "down_proj": (everything, mlp),
        }


def _column_unit(columns: int, size: int) -> int:
    """Return the number of adjacent MLP columns that are always assigned to the same rank."""
    for unit in _COLUMN_UNITS:
        if columns % unit == 0 and columns // unit >= size:
            return unit
    raise ValueError(f"{columns} columns cannot be split over {size} ranks")


def _split_evenly(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range (begin, end) of the items that `rank` gets of `count` items.

    If `count` is not a multiple of `size`, the number of ranks, the first ranks get one item more.
    """
    each, remainder = divmod(count, size)
    begin = rank * each + min(rank, remainder)
    end = begin + each + (rank < remainder)
    return begin, end


class ShardedWeights(Weights):
    """Uploads the rank's shard of every decoder layer matrix, and all other tensors completely.

    `all_gather` becomes the collective of the row-parallel shards (`ScaledMatrix`).
    """

    def __init__(
        self,
        device: Device,
        checkpoint: Checkpoint,
        weights: str,
        shard: Shard,
        all_gather: AllGather,
    ) -> None:
        super().__init__(device, checkpoint, weights)
        self._slices = shard.slices()
        self._all_gather = all_gather

    def stacked(
        self,
        parts: dict[str, int],
        columns: int,
        interleave: Interleave | None = None,
        *,
        bias: bool = False,
    ) -> Matrix:
        matrix = super().stacked(parts, columns, interleave, bias=bias)
        if not any(name.endswith(_ROW_PARALLEL) for name in parts):
            return matrix
        if not isinstance(matrix, ScaledMatrix):
            matrix = ScaledMatrix(matrix)
        return replace(matrix, all_gather=self._all_gather)

    def _rows(self, name: str, rows: int, columns: int) -> tuple[np.ndarray, str, np.ndarray]:
        array, dtype, scale = super()._rows(name, rows, columns)
        own_rows, own_columns = self._slices[name.split(".")[-2]]
        return array[own_rows, own_columns], dtype, scale[own_rows]

    def _bias(self, name: str, rows: int) -> np.ndarray:
        own_rows, _ = self._slices[name.split(".")[-2]]
        return super()._bias(name, rows)[own_rows]


def make_all_gather(device: Device, ranks: RankGroup, max_elements: int) -> AllGather:
    """Create the collective that gathers partial products of at most `max_elements` elements.

    The collective uses NCCL on CUDA devices, which requires nccl4py, and MPI on the soft device.
    """
    kind = NcclAllGather if device.kind == "cuda" else MpiAllGather
    return kind(device, ranks, max_elements)


def split_payload(words: PinnedArray, arrays: Sequence[DeviceArray]) -> list[PinnedArray]:
    """Split the payload of a message, int32, into one view per device array.

    The payload holds the contents of the arrays in this order.
    """
    views = []
    begin = 0
    for array in arrays:
        count = array.nbytes // 4
        views.append(words.view(begin, (count,)))
        begin += count
    return views


class TensorParallelLeader:
    """Rank 0 of a tensor-parallel group, for one engine.

    The collective `all_gather` gathers the partial products of row-parallel projections.
    OptionError is raised if the model has fewer KV heads or MLP columns than the group has ranks,
    or if this process is not rank 0.
    """

    def __init__(
        self, device: Device, ranks: RankGroup, config: LlamaConfig, max_rows: int
    ) -> None:
        if ranks.rank:
            raise OptionError(
                f"rank {ranks.rank} cannot create an engine: call run_worker() on all ranks but 0"
            )
        self.ranks = ranks
        self.shard = Shard.of(config, 0, ranks.size)
        self.all_gather = make_all_gather(device, ranks, max_rows * config.hidden_size)
        self._device = device
        self._max_rows = max_rows
        self._headers: dict[tuple[int, ...], np.ndarray] = {}
        self._payload = device.pinned((1,), "int32")

    def load_workers(self, model: Path, kv: PagedKV, **options: Any) -> None:
        """Send the command to load a shard to every worker rank, without waiting for the result.

        `model` is the folder of the target, at the same path on every rank, and `kv` the KV cache
        of rank 0. The options are further arguments of `TensorParallelWorker`.
        """
        kv_shape = {
            "layers": kv.layers,
            "pages": kv.scratch_page,
            "page_size": kv.page_size,
            "head_dim": kv.head_dim,
            "dtype": kv.dtype,
            "slots": kv.slots,
            "max_pages_per_slot": kv.max_pages,
        }
        arguments = {
            "model": str(model.resolve()),
            "config": repr(self.shard.config),
            "kv": kv_shape,
            "device": self._device.kind,
            "ordinal": self._device.ordinal,
            "max_rows": self._max_rows,
            **options,
        }
        text = np.frombuffer(json.dumps(arguments).encode(), np.uint8)
        self.ranks.send(self.ranks.peers, self._header(Command.LOAD, len(text)), text)

    def wait_for_workers(self) -> None:
        """Wait until every worker rank has loaded its shard.

        If a worker fails to load its shard, EngineError has the rank and the worker's error.
        """
        for rank in self.ranks.peers:
            reply = np.zeros(REPLY_BYTES, np.uint8)
            self.ranks.receive(rank, reply, timeout_s=LOAD_TIMEOUT_S)
            error = reply.tobytes().rstrip(b"\0").decode(errors="replace")
            if error:
                raise EngineError(f"rank {rank}: {error}")
        self.all_gather.connect()

    def forward(self, lane: Lane, rows: Rows, embeddings: DeviceArray, kv: PagedKV) -> None:
        """Send the rows of a forward pass to the worker ranks, which run their layers over them.

        This method must be called before the kernels of rank 0's first layer are added to the lane.
        `embeddings` float32[R, hidden] contains the embeddings of the rows' tokens. The workers
        receive a copy of the page table of `kv`, the KV cache of rank 0.
        """
        ancestors = () if rows.ancestors is None else (rows.ancestors,)
        header = (Command.FORWARD, rows.count, rows.rows_per_slot, len(ancestors))
        arrays = (rows.slot, rows.pos, kv.page_table, embeddings, *ancestors)
        self._send(lane, header, arrays)

    def compact(self, lane: Lane, row_slot: DeviceArray, result: DeviceArray) -> None:
        """Make the worker ranks move the KV entries of accepted tree drafts.

        The parameters are those of `Attention.compact`.
        """
        self._send(lane, (Command.COMPACT, *result.shape), (row_slot, result))

    def release_workers(self) -> None:
        """Make the worker ranks release their shards, unless the group has failed."""
        if self.ranks.failure is None:
            self.ranks.send(self.ranks.peers, self._header(Command.UNLOAD))
            self.ranks.release_buffers()

    def _send(self, lane: Lane, header: tuple[int, ...], arrays: tuple[DeviceArray, ...]) -> None:
        """Add nodes to a lane that send a message, a header and device arrays, to all worker ranks.

        The last word of the header is 1 if the lane belongs to a CUDA graph. Every launch of the
        graph then sends the message, and each worker builds a CUDA graph for its own part of the
        work.
        """
        count = sum(array.nbytes for array in arrays) // 4
        if count > self._payload.shape[0]:
            self._payload = self._device.pinned((count,), "int32")
            self.ranks.keep_alive(self._payload)
        payload = self._payload.view(0, (count,))
        for view, array in zip(split_payload(payload, arrays), arrays, strict=True):
            lane.copy(view, array, name="rows")
        padding = (0,) * (HEADER_WORDS - 1 - len(header))
        message = self._header(*header, *padding, isinstance(lane, GraphLane))
        sends: list[tuple[int, np.ndarray | PinnedArray]] = []
        for rank in self.ranks.peers:
            sends += [(rank, message), (rank, payload)]
        self.ranks.exchange(lane, sends, name="rows to ranks")

    def _header(self, *words: int) -> np.ndarray:
        """Return a message header: `words`, padded with zeros.

        Equal headers share one array. It must never be modified, because an asynchronous send may
        still read it.
        """
        if words not in self._headers:
            padded = (*words, *(0,) * (HEADER_WORDS - len(words)))
            self._headers[words] = np.array(padded, np.int64)
            self.ranks.keep_alive(self._headers[words])
        return self._headers[words]
