"""What the ranks other than 0 do: hold their share of the target and run its layers when told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from graft.cudagraph.device import open_device
from graft.cudagraph.errors import GraftError
from graft.cudagraph.exec import GraphExec
from graft.cudagraph.graph import Graph
from graft.cudagraph.lanes import Lane, StreamLane
from graft.cudagraph.memory import DeviceArray, PinnedArray
from graft.cudagraph.ranks import HEADER_WORDS, RankGroup
from graft.models.cache.kv import PagedKV
from graft.models.errors import ConfigError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.layers import Layers
from graft.models.llm.llama import DecoderLayer, Scratch, run_layers
from graft.models.llm.rows import Rows
from graft.models.llm.sharding import (
    ANSWER,
    BEGIN,
    CLOSE,
    COMPACT,
    END,
    Shard,
    ShardedWeights,
    make_sums,
    split,
)


def follow(ranks: RankGroup) -> None:
    """Follow the engines of rank 0, one after another, until rank 0 is over.

    Raises
    ------
    DeadlineError, HostWorkError
        Another rank was late or is gone. Whatever is raised, all processes end with this one.
    DeviceError
        The device of this one failed.
    """
    head = np.zeros(HEADER_WORDS, np.int64)
    follower = None
    try:
        while True:
            ranks.receive(0, head)
            if head[0] in (CLOSE, END, BEGIN):
                follower = None
            if head[0] == CLOSE:
                return
            if head[0] == BEGIN:
                follower = _begin(ranks, int(head[1]))
            elif follower is not None:
                follower.run(tuple(int(n) for n in head))
    except BaseException:
        ranks.abort_on_close()
        raise


def _begin(ranks: RankGroup, size: int) -> TensorParallelWorker | None:
    """Load what an engine asks for, and answer; None where that failed."""
    text = np.zeros(size, np.uint8)
    answer = np.zeros(ANSWER, np.uint8)
    ranks.receive(0, text, timeout_s=ranks.deadline_s)
    made = None
    said = b""
    try:
        made = TensorParallelWorker(ranks, **json.loads(text.tobytes()))
    except GraftError as error:
        said = str(error).encode()[:ANSWER]
    answer[: len(said)] = np.frombuffer(said, np.uint8)
    ranks.send([0], answer)
    if made is not None:
        made.sums.connect()
    return made


class TensorParallelWorker:
    """A rank's share of one engine's target.

    Parameters
    ----------
    model : the target's folder, which is called so for every rank.
    config : the model's, in words; it must be the same here.
    kv : shape of the cache of whole layers, see `PagedKV`.
    device, ordinal : which kind, and which one rank 0 has; on CUDA this rank has one behind.
    max_rows, activations, weights : see `LlamaModel`.

    Raises
    ------
    GraftError
        The model is not the same, or cannot be loaded.
    """

    def __init__(
        self,
        ranks: RankGroup,
        *,
        model: str,
        config: str,
        kv: dict[str, Any],
        device: str,
        ordinal: int,
        max_rows: int,
        activations: str,
        weights: str,
    ) -> None:
        folder = Path(model)
        whole = LlamaConfig.from_dir(folder)
        if str(asdict(whole)) != config:
            raise ConfigError(f"{folder}: its config is another one than rank 0's")
        self._device = open_device(device, ordinal + ranks.rank if device == "cuda" else ordinal)
        self._ranks = ranks
        hidden = whole.hidden_size
        share = Shard.of(whole, ranks.rank, ranks.size)
        self._config = own = share.own
        self._kv = PagedKV(self._device, **{**kv, "kv_heads": own.num_key_value_heads})
        self._layers = Layers(self._device, activations=activations)
        self.sums = sums = make_sums(self._device, ranks, max_rows * hidden)
        tensors = ShardedWeights(self._device, Checkpoint(folder), weights, share, sums)
        self._decoder = [
            DecoderLayer.load(tensors, f"model.layers.{i}", whole, hidden, self._layers)
            for i in range(whole.num_hidden_layers)
        ]
        self._turn = self._device.from_host(whole.rope.table(self._kv.positions, whole.head_dim))
        self._scratch = Scratch(self._layers, own, max_rows, hidden)
        self._layers.attention_parts(max_rows, own.num_attention_heads, self._kv)
        slot, pos = (self._device.zeros((max_rows,), "int32") for _ in range(2))
        self._rows = Rows(pos, slot, pos, self._device.zeros((max_rows,), "uint64"))
        self._words = self._pinned(1)
        self._kept: dict[tuple[int, ...], tuple[PinnedArray, GraphExec]] = {}
        self._stream = self._device.stream("follower")

    def run(self, head: tuple[int, ...]) -> None:
        """Receive what follows a head, and do what it says: again in a graph, or on the stream."""
        kind, *numbers, again = head
        if head in self._kept:
            words, graph = self._kept[head]
        else:
            arrays, work = (self._compact if kind == COMPACT else self._forward)(*numbers)
            count = sum(array.nbytes for array in arrays) // 4
            if again:
                words = self._pinned(count)
                made = Graph(self._device, f"share of {numbers}")
                self._add(made.lane("model"), words, arrays, work)
                graph = made.instantiate()
                self._kept[head] = words, graph
            else:
                if count > self._words.shape[0]:
                    self._words = self._pinned(count)
                words = self._words.view(0, (count,))
        self._ranks.receive(0, words, timeout_s=self._ranks.deadline_s)
        if again:
            graph.launch(self._stream)
            graph.synchronize()
        else:
            self._add(StreamLane(self._stream), words, arrays, work)
            self._stream.synchronize()

    def _pinned(self, count: int) -> PinnedArray:
        words = self._device.pinned((count,), "int32")
        self._ranks.keep_alive(words)
        return words

    @staticmethod
    def _add(
        lane: Lane, words: PinnedArray, arrays: list[DeviceArray], work: Callable[[Lane], None]
    ) -> None:
        for array, part in zip(arrays, split(words, arrays), strict=True):
            lane.copy(array, part, name="rows")
        work(lane)

    def _forward(
        self, count: int, run: int, tree: int, *_: int
    ) -> tuple[list[DeviceArray], Callable[[Lane], None]]:
        rows = self._rows.first(count, run)
        stream = self._scratch.stream[:count]
        arrays = [rows.slot, rows.pos, self._kv.page_table, stream]
        if tree and rows.tree is not None:
            arrays.append(rows.tree)
        else:
            rows = replace(rows, tree=None)
        return arrays, partial(self._run_layers, rows, stream)

    def _run_layers(self, rows: Rows, stream: DeviceArray, lane: Lane) -> None:
        first = self._decoder[0]
        layers = self._layers
        x = self._scratch.norm(rows.count, first.input_norm, first.qkv)
        layers.norm(lane, stream, x.weight, x.eps, x.out)
        run_layers(
            lane, layers, self._config, self._decoder, self._scratch, self._kv, self._turn, rows, x
        )

    def _compact(
        self, batch: int, width: int, *_: int
    ) -> tuple[list[DeviceArray], Callable[[Lane], None]]:
        row_slot = self._device.zeros((batch,), "int32")
        result = self._device.zeros((batch, width), "int32")

        def work(lane: Lane) -> None:
            self._layers.compact(lane, self._kv, row_slot, result, None, row_slot)

        return [row_slot, result], work
