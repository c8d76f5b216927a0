"""Runs the kernels of `DeviceAutomata` without an engine, and reads the rows that they write."""

from __future__ import annotations

from typing import Any

import numpy as np
from reference_round import Tree
from round_simulator import result_row, write_committed, write_draft_tree

from graft.cudagraph.device import Device, Stream
from graft.cudagraph.driver.cstruct import read_struct
from graft.cudagraph.lanes import StreamLane
from graft.grammar import Matcher, Vocabulary
from graft.grammar.automaton.device import KERNELS, DeviceAutomata
from graft.sampling.arrays import SamplingArrays
from graft.sampling.exchange import Exchange
from graft.sampling.mode import DraftMode
from graft.sampling.params import SamplingParams
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotRequest, SlotState

LIMIT = 1 << 20
_ITEM = read_struct(KERNELS / "automaton.cuh", "FillItem")
_CACHED_ROW = read_struct(KERNELS / "automaton.cuh", "CachedRow")
_TABLE = read_struct(KERNELS / "automaton.cuh", "AutomatonTable")


class AutomatonRig:
    """Slots, exchanged records and automata on a device; batch row b has slot b.

    Parameters
    ----------
    device, stream
        Device, and stream of the kernels.
    vocabulary
        Vocabulary of the grammars.
    slots
        Number of slots and batch rows.
    mode
        Draft mode.
    options
        Options of `DeviceAutomata`.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        vocabulary: Vocabulary,
        slots: int,
        mode: DraftMode,
        **options: Any,
    ):
        self.stream = stream
        self.lane = StreamLane(stream)
        self.exchange = Exchange(device, slots, vocabulary.size, mode)
        self.state = SlotState(device, slots, vocabulary.size)
        self.replay = device.zeros((1,), "int32")
        arrays = SamplingArrays(
            self.state, self.exchange, self.replay, token_limit=vocabulary.size, max_batch=slots
        )
        self.sampler = Sampler(arrays)
        self.row_slot = device.from_host(np.arange(slots, dtype=np.int32))
        options = {"row_bytes": 1 << 20, **options}  # clearing 64 MiB would take most of the time
        self.automata = DeviceAutomata(
            self.state, self.exchange, self.sampler, self.replay, vocabulary, **options
        )

    def join(
        self, slot: int, epoch: int, matcher: Matcher, position: int = 10, closing_end: int = -1
    ) -> bool:
        """Assign a slot to a request whose last token has the given position."""
        request = SlotRequest(
            params=SamplingParams(), position=position, last=0, epoch=epoch, limit=LIMIT
        )
        self.state.join(self.lane, slot, request)
        self.automata.release(slot)
        return self.automata.join(self.lane, slot, epoch, matcher, closing_end)

    def begin(self) -> int:
        """Begin the next replay and return its number."""
        self.stream.synchronize()
        number = int(self.replay.to_host()[0]) + 1
        self.replay.copy_from(np.array([number], np.int32))
        return number

    def write_drafts(self, slot: int, tree: Tree) -> None:
        """Make the drafts of a tree the drafts of a slot."""
        self.stream.synchronize()
        slots = self.state.to_host().copy()
        write_draft_tree(slots[slot], tree)
        self.state.copy_from(slots)

    def write_commit(self, slot: int, ids: list[int]) -> None:
        """Write what verification writes for a slot: its result, its record and its position."""
        self.stream.synchronize()
        slots = self.state.to_host().copy()
        slots[slot]["n"] += len(ids)
        if ids:
            slots[slot]["draft_len"] = 0
        self.state.copy_from(slots)
        write_committed(self.exchange, slot, int(self.replay.to_host()[0]), ids)
        result = result_row(ids, slot=slot)
        rows = self.sampler.arrays.results.to_host().copy()
        rows[slot, : len(result)] = result
        self.sampler.arrays.results.copy_from(rows)

    def check_cache(self) -> None:
        """Check that tables and row cache agree (invariant 4 of RowCache in automaton.cuh)."""
        self.stream.synchronize()
        automata = self.automata
        memory = automata._memory.to_host()
        cached = automata._cached.to_host().view(_CACHED_ROW)
        expected = {}
        for table in automata._tables.values():
            num_states = int(memory[table.offset :][:4].view(np.int32)[0])
            rows = memory[table.offset + _TABLE.itemsize + 256 :][: 4 * num_states].view(np.int32)
            for state, row in enumerate(rows.tolist()):
                if row != -1:
                    expected[row] = (table.offset, state)
        found = {}
        for row, entry in enumerate(cached):
            if entry["table"] >= 0:
                found[row] = (int(entry["table"]), int(entry["state"]))
        assert found == expected

    def items(self) -> np.ndarray:
        """Return the work items of the last kernel that advanced states."""
        self.stream.synchronize()
        return self.automata._items.to_host().view(_ITEM)[:, 0]

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mask rows, int32 [rows, slots, words], and the stamps [slots, rows]."""
        self.stream.synchronize()
        return self.exchange.device_masks.to_host(), self.exchange.stamps.copy()
