"""Worker ranks of tensor parallelism.

Every rank except rank 0 is a worker. A worker holds a shard of the target model and runs the layers
of this shard when rank 0, which runs the engine, sends a command. The messages are defined in
sharding.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from graft.cudagraph.device import open_device
from graft.cudagraph.driver.memory import DeviceArray, PinnedArray
from graft.cudagraph.errors import DeadlineError, GraftError
from graft.cudagraph.graph.exec import GraphExec
from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.lanes import Lane, StreamLane
from graft.cudagraph.ranks.ranks import HEADER_WORDS, RankGroup
from graft.cudagraph.streams import Stream
from graft.models.cache.kv import PagedKV
from graft.models.errors import ConfigError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.rows import Rows
from graft.models.llm.sharding import (
    REPLY_BYTES,
    Command,
    Shard,
    ShardedWeights,
    make_all_gather,
    split_payload,
)
from graft.models.llm.stack import DecoderLayer, DecoderStack


def run_worker(ranks: RankGroup) -> None:
    """Serve the engines of rank 0, one after another, until rank 0 closes the group.

    DeadlineError or HostWorkError is raised if another rank did not answer in time or has exited,
    and DeviceError if the device of this rank failed. After any error, the exit of this process
    aborts the group, which terminates the processes of all ranks.
    """
    header = np.zeros(HEADER_WORDS, np.int64)
    worker = None
    try:
        while True:
            ranks.receive_header(header)
            command = int(header[0])
            if command in (Command.CLOSE, Command.UNLOAD, Command.LOAD):
                worker = None
            if command == Command.CLOSE:
                return
            if command == Command.LOAD:
                worker = _load(ranks, int(header[1]))
            elif worker is not None:
                worker.run(tuple(int(word) for word in header))
    except BaseException:
        ranks.abort_on_close()
        raise


def _load(ranks: RankGroup, size: int) -> TensorParallelWorker | None:
    """Load the shard of the model that rank 0 asks for, and send the reply. Return None on failure.

    The message's payload of `size` bytes contains the JSON arguments of `TensorParallelWorker`.
    """
    text = np.zeros(size, np.uint8)
    reply = np.zeros(REPLY_BYTES, np.uint8)
    ranks.receive(0, text, timeout_s=ranks.deadline_s)
    worker = None
    message = b""
    try:
        worker = TensorParallelWorker(ranks, **json.loads(text.tobytes()))
    except GraftError as error:
        message = str(error).encode()[:REPLY_BYTES]
    reply[: len(message)] = np.frombuffer(message, np.uint8)
    ranks.send([0], reply)
    if worker is not None:
        worker.all_gather.connect()
    return worker


@dataclass(frozen=True)
class _Task:
    """Work that a worker does for one message from rank 0.

    The payload of the message is copied to `arrays`; `launch` adds the work to a lane.
    """

    arrays: list[DeviceArray]
    launch: Callable[[Lane], None]

    @property
    def words(self) -> int:
        """Size of the payload, in int32 words."""
        return sum(array.nbytes for array in self.arrays) // 4

    def add(self, lane: Lane, payload: PinnedArray) -> None:
        """Copy the payload to `arrays` in `lane`, and then `launch` the work that reads them."""
        for array, view in zip(self.arrays, split_payload(payload, self.arrays), strict=True):
            lane.copy(array, view, name="rows")
        self.launch(lane)


class TensorParallelWorker:
    """The shard of one engine's target on a worker rank.

    Parameters
    ----------
    model
        Folder of the target, at the same path on every rank.
    config
        Rank 0's model config as text; it must equal the config in `model`.
    max_length
        Maximum length of a sequence.
    kv
        Arguments of `PagedKV`, except the number of KV heads, which depends on the shard.
    device
        Kind of rank 0's device.
    ordinal
        Ordinal of rank 0's device. On CUDA devices rank r uses device ``ordinal + r``.
    max_rows, activations, weights
        As in `LlamaModel`.

    Raises
    ------
    GraftError
        If the model differs from rank 0's or cannot be loaded.
    """

    def __init__(
        self,
        ranks: RankGroup,
        *,
        model: str,
        config: str,
        max_length: int,
        kv: dict[str, Any],
        device: str,
        ordinal: int,
        max_rows: int,
        activations: str,
        weights: str,
    ) -> None:
        folder = Path(model)
        whole = LlamaConfig.from_dir(folder).for_length(max_length, folder)
        if repr(whole) != config:
            raise ConfigError(
                f"{folder}: config.json differs from rank 0's; all ranks must load the same model"
            )
        if device == "cuda":
            ordinal += ranks.rank
        self._device = open_device(device, ordinal)
        self._ranks = ranks
        hidden = whole.hidden_size
        shard = Shard.of(whole, ranks.rank, ranks.size)
        local = shard.local_config
        cache = PagedKV(self._device, **{**kv, "kv_heads": local.num_key_value_heads})
        kernels = ModelKernels(self._device, activations=activations)
        self.all_gather = make_all_gather(self._device, ranks, max_rows * hidden)
        tensors = ShardedWeights(self._device, Checkpoint(folder), weights, shard, self.all_gather)
        layers = [
            DecoderLayer.load(tensors, f"model.layers.{i}", whole, hidden, kernels)
            for i in range(whole.num_hidden_layers)
        ]
        self._stack = DecoderStack(kernels, local, layers, cache, max_rows=max_rows)
        self._stack.reserve_attention(max_rows)
        slot = self._device.zeros((max_rows,), "int32")
        pos = self._device.zeros((max_rows,), "int32")
        # The embeddings come from rank 0, so the token ids are not read. `pos` is passed as a
        # placeholder for the array of token ids.
        self._rows = Rows(pos, slot, pos, self._device.zeros((max_rows,), "uint64"))
        self._payload = self._pinned(1)
        self._graphs: dict[tuple[int, ...], tuple[PinnedArray, GraphExec]] = {}
        self._stream = self._device.stream("tensor parallel worker")

    def run(self, header: tuple[int, ...]) -> None:
        """Receive the payload that belongs to a header and run the header's command.

        The last word of a header is 1 if a CUDA graph of rank 0 sends the message. Such a message
        arrives with every launch of the graph, so the worker builds a CUDA graph for the command
        once and launches it for every equal header. Other commands run on the stream.
        """
        command, *arguments, is_replayed = header
        if is_replayed:
            if header not in self._graphs:
                task = self._task(command, arguments)
                self._graphs[header] = self._build_graph(arguments, task)
            payload, graph = self._graphs[header]
            self._receive(payload)
            graph.launch(self._stream)
            self._finish(graph)
            return
        task = self._task(command, arguments)
        if task.words > self._payload.shape[0]:
            self._payload = self._pinned(task.words)
        payload = self._payload.view(0, (task.words,))
        self._receive(payload)
        task.add(StreamLane(self._stream), payload)
        self._finish(self._stream)

    def _finish(self, work: GraphExec | Stream) -> None:
        """Wait until `work` is complete.

        If this takes longer than the all-gather's `forward_limit_s`, raise DeadlineError.
        """
        limit_s = self.all_gather.forward_limit_s
        try:
            work.synchronize(limit_s)
        except DeadlineError as error:
            raise DeadlineError(
                f"rank {self._ranks.rank}: a forward pass did not finish within {limit_s:g} s; "
                "another rank may have stopped"
            ) from error

    def _receive(self, payload: PinnedArray) -> None:
        self._ranks.receive(0, payload, timeout_s=self._ranks.deadline_s)

    def _pinned(self, count: int) -> PinnedArray:
        words = self._device.pinned((count,), "int32")
        self._ranks.keep_alive(words)
        return words

    def _build_graph(self, arguments: list[int], task: _Task) -> tuple[PinnedArray, GraphExec]:
        """Build a graph of a task; return its payload buffer and its executable."""
        payload = self._pinned(task.words)
        graph = Graph(self._device, f"shard of {arguments}")
        task.add(graph.lane("model"), payload)
        return payload, graph.instantiate()

    def _task(self, command: int, arguments: list[int]) -> _Task:
        """Return the task that a message header requests: a forward pass or a KV compaction."""
        if command == Command.COMPACT:
            return self._compact_task(*arguments)
        return self._forward_task(*arguments)

    def _forward_task(self, count: int, rows_per_slot: int, has_ancestors: int, *_: int) -> _Task:
        rows = self._rows.first(count, rows_per_slot)
        residual = self._stack.buffers.residual[:count]
        arrays = [rows.slot, rows.pos, self._stack.kv.page_table, residual]
        if has_ancestors and rows.ancestors is not None:
            arrays.append(rows.ancestors)
        else:
            rows = replace(rows, ancestors=None)
        return _Task(arrays, partial(self._forward, rows, residual))

    def _forward(self, rows: Rows, residual: DeviceArray, lane: Lane) -> None:
        x = self._stack.input_norm(rows.count)
        self._stack.kernels.norms.rms_norm(lane, residual, x.weight, x.eps, x.out)
        self._stack.run(lane, rows, x)

    def _compact_task(self, batch: int, width: int, *_: int) -> _Task:
        row_slot = self._device.zeros((batch,), "int32")
        result = self._device.zeros((batch, width), "int32")

        def launch(lane: Lane) -> None:
            stack = self._stack
            stack.kernels.attention.compact(lane, stack.kv, row_slot, result, None, row_slot)

        return _Task([row_slot, result], launch)
