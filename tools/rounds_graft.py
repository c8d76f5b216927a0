"""A round's grammar work by graft's native worker, its steps called directly or in a graph.

The rows that are filled while drafting are those that verification reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from graft.cudagraph.device import Device, open_device
from graft.cudagraph.errors import GraftError
from graft.cudagraph.graph import Graph
from graft.grammar import GrammarBackend, GuidedDecoder, GuidedRequest
from graft.tools.rounds_streams import Episode, Move

__all__ = ["Graft", "GraftInGraph"]

_DEADLINE_S = 120.0


class Graft:
    """graft's native worker, its steps called one after the other, timed by its own clock.

    What kernels would write between the steps is copied there: the recorded tokens.
    """

    name = "graft"

    def __init__(self, backend: GrammarBackend, slots: int, draft_length: int, *, threads: int = 1):
        size, words = backend.vocabulary.size, backend.vocabulary.words
        self._backend, self._length = backend, draft_length
        device = self._device = open_device()
        shapes = {
            "mask": (draft_length + 1, words), "row_state": (draft_length + 1, 4),
            "committed": (draft_length + 3,), "drafted": (draft_length + 2,),
        }  # fmt: skip
        self._fields = {name: _Field(device, slots, shape) for name, shape in shapes.items()}
        committed, drafted = self._fields["committed"], self._fields["drafted"]
        self._committed = _Staged(device, committed)
        self._drafted = [_Staged(device, drafted) for _ in range(draft_length + 1)]
        self._kept = [_Staged(device, self._fields["mask"]) for _ in range(2)]
        self.verify, self.draft = (kept.array for kept in self._kept)
        self._decoder = GuidedDecoder(
            self, slots=slots, draft_length=draft_length, vocab_size=size, masked_drafts=True,
            threads=threads,
        )  # fmt: skip
        self.keep = True  # copies of rows between the steps drive the matchers out of the caches
        self.fills = self._replay = self._epoch = 0
        self._requests: dict[int, GuidedRequest] = {}

    def field(self, name: str) -> _Field:
        """What steps and kernels exchange."""
        return self._fields[name]

    def begin(self, episode: Episode) -> None:
        self._epoch += 1
        for slot, (document, prefix) in enumerate(
            zip(episode.documents, episode.prefixes, strict=True)
        ):
            matcher = self._backend.matcher(document.compiled)
            for token in prefix:
                matcher.accept(token)
            self._requests[slot] = GuidedRequest(slot, self._epoch, matcher, len(prefix))

    def play(self, moves: Sequence[Move]) -> int:
        decoder, committed = self._decoder, self._committed.array
        before = decoder.counters()
        self._replay += 1
        for move in moves:
            count = len(move.tokens)
            committed[move.slot, : 2 + count] = (self._replay, count, *move.tokens)
            for j, drafted in enumerate(self._drafted):
                made = move.drafts[:j]
                drafted.array[move.slot, : 2 + len(made)] = (self._replay, len(made), *made)
        decoder.publish(self._replay, [self._requests[move.slot] for move in moves])
        self._run()
        decoder.retire(self._replay)
        after = decoder.counters()
        if after["desyncs"] or after["errors"] or after["refused_drafts"]:
            raise GraftError(f"grammar rounds: the worker failed: {decoder.first_error()} {after}")
        self.fills += after["fills"] - before["fills"]
        return sum(after[f"{s}_ns"] - before[f"{s}_ns"] for s in ("open", "commit", "draft"))

    def _run(self) -> None:
        d, fields = self._decoder, self._fields
        _call(d.open_work())
        if self.keep:
            np.copyto(self.verify, fields["mask"].array)
        np.copyto(fields["committed"].array, self._committed.array)
        np.copyto(fields["drafted"].array, self._drafted[0].array)
        _call(d.commit_work())
        for j in range(1, self._length + 1):
            np.copyto(fields["drafted"].array, self._drafted[j].array)
            if j < self._length:
                _call(d.draft_work(j))
        if self.keep:
            np.copyto(self.draft, fields["mask"].array)

    def close(self) -> None:
        """Let go of matchers and memory."""
        self._decoder.close()


def _call(work: Any) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work.address)(work.data)


class GraftInGraph(Graft):
    """The steps as host nodes of a replayed graph, with copy nodes between: none waits for Python.

    On the soft device a thread of the driver's runs them, as on a GPU.
    """

    name = "graft, in a graph"

    def __init__(self, backend: GrammarBackend, slots: int, draft_length: int, *, threads: int = 1):
        super().__init__(backend, slots, draft_length, threads=threads)
        self._stream = self._device.stream("rounds")
        self._graphs = [self._graph(keep) for keep in (False, True)]
        self._executables = [graph.instantiate() for graph in self._graphs]

    def _graph(self, keep: bool) -> Graph:
        """One round; with `keep`, copies of the rows are made at both stages."""
        d, mask, drafted = self._decoder, self._fields["mask"].memory, self._fields["drafted"]
        graph = Graph(self._device, "round")
        lane = graph.lane("grammar")
        d.add(lane, d.open_work(), name="open")
        if keep:
            lane.copy(self._kept[0].memory, mask)
        lane.copy(self._fields["committed"].memory, self._committed.memory)
        lane.copy(drafted.memory, self._drafted[0].memory)
        d.add(lane, d.commit_work(), name="commit")
        for j in range(1, self._length + 1):
            lane.copy(drafted.memory, self._drafted[j].memory)
            if j < self._length:
                d.add(lane, d.draft_work(j), name=f"draft {j}")
        if keep:
            lane.copy(self._kept[1].memory, mask)
        return graph

    def _run(self) -> None:
        for staged in (self._committed, *self._drafted):
            staged.upload()
        executable = self._executables[self.keep]
        executable.launch(self._stream)
        executable.synchronize(_DEADLINE_S)
        for kept in self._kept if self.keep else ():
            kept.download()

    def close(self) -> None:
        """Drop the graphs, then what their steps use."""
        for executable in self._executables:
            executable.close()
        for graph in self._graphs:
            graph.close()
        self._stream.close()
        super().close()


class _Field:
    """A field of the exchange in pinned memory, slot rows padded to 64 bytes."""

    def __init__(self, device: Device, slots: int, shape: tuple[int, ...]):
        used = int(np.prod(shape))
        self.stride = -(-used // 16) * 16
        self.memory = device.pinned((slots, self.stride), "int32")
        self.memory.array[...] = 0
        self.host_ptr = self.memory.host_ptr
        self.array = self.memory.array[:, :used].reshape(slots, *shape)


class _Staged:
    """As much device memory as a field has, and what it holds as an array on the host."""

    def __init__(self, device: Device, field: _Field):
        slots, *shape = field.array.shape
        self.memory = device.zeros(field.memory.shape, "int32")
        self._host = np.zeros(field.memory.shape, np.int32)
        self.array = self._host[:, : int(np.prod(shape))].reshape(slots, *shape)

    def upload(self) -> None:
        self.memory.copy_from(self._host)

    def download(self) -> None:
        self._host[...] = self.memory.to_host()
