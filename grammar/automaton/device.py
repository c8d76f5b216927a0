"""Automata on the device: mask rows of grammars with an automaton, without host work.

A request whose grammar has an automaton can be *promoted*: instead of the grammar worker
(native/guide/worker.h), kernels advance the request's grammar state by drafts and committed tokens,
fill its mask rows and write the stamp of each row, which says for which position the row is valid.
They write the same rows and stamps as the worker would.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.driver.cstruct import read_numbers, read_struct
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.grammar.matcher import CompiledGrammar, Matcher
from graft.grammar.vocabulary import Vocabulary
from graft.native import _native
from graft.sampling.exchange import Exchange
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotState

__all__ = ["ROW_BYTES", "TABLE_BYTES", "DeviceAutomata"]

LOG = logging.getLogger("graft")

KERNELS = Path(__file__).parent / "kernels"
_HEADER = KERNELS / "automaton.cuh"
_NUMBERS = read_numbers(_HEADER)
_MAX_STOPS = _NUMBERS["AUTOMATON_STOPS"]
_MAX_DEPTH = _NUMBERS["AUTOMATON_DEPTH"]
_MAX_PUSHES = _NUMBERS["AUTOMATON_PUSHES"]
#: Bytes that may push and pop entries of a stack: the brackets of JSON. A request stays on the host
#: if another byte does so in its automaton.
_OPENING_BYTES = b"[{"
_CLOSING_BYTES = b"]}"
_POP = _NUMBERS["ACTION_POP"]
_NO_LIMIT = _NUMBERS["NO_LIMIT"]
#: dtype of ``struct AutomatonSlot`` in kernels/automaton.cuh, which documents its fields.
AUTOMATON_SLOT = read_struct(_HEADER, "AutomatonSlot")
_REQUEST = read_struct(_HEADER, "AutomatonRequest")
_TABLE = read_struct(_HEADER, "AutomatonTable")
_ITEM = read_struct(_HEADER, "FillItem")
_CACHED_ROW = read_struct(_HEADER, "CachedRow")
_ROW_CACHE = read_struct(_HEADER, "RowCache")
#: Fields of ``struct RowCache`` that `DeviceAutomata.counters` returns under the same names.
_COUNTS = ("hits", "misses", "stored", "evicted", "narrowed_rows", "closed")

#: Memory for the tables of automata, in bytes.
TABLE_BYTES = 64 << 20

#: Memory for the cached mask rows of automaton states, in bytes.
ROW_BYTES = 64 << 20

#: Tables begin at multiples of this number of bytes.
_ALIGNMENT = 256

#: Threads of a kernel block on GPUs and on the soft device, and blocks per mask row on GPUs.
_GPU_BLOCK = 128
_CPU_BLOCK = 1
_GPU_PARTS = 64


@dataclass
class _Table:
    """Table of an automaton in device memory.

    Attributes
    ----------
    grammar
        Native grammar whose automaton the table holds.
    offset, nbytes
        Location in `DeviceAutomata._memory`, in bytes.
    costs
        int32 array, cost of each entry that the automaton pushes onto its stack.
    users
        Number of slots whose requests use the table. A table with users is not evicted.
    """

    grammar: Any
    offset: int
    nbytes: int
    costs: NDArray[np.int32]
    users: int = 0


def _aligned(offset: int) -> int:
    """Round an offset up to a multiple of `_ALIGNMENT`; tables begin at such offsets."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class DeviceAutomata:
    """Moves the grammar state of requests to the device, which is called promoting a request.

    For promoted requests, the methods ``add_*`` add kernels to a lane that do the work of the
    grammar steps: the kernels advance the grammar states and fill the mask rows.

    Parameters
    ----------
    state
        Sampling state of all slots, which the kernels read. It determines their device.
    exchange
        Memory with the records and mask rows of the same slots. Its draft mode must fill mask rows.
        Modes that probe (test the drafter's candidates with the matcher) are not supported.
    sampler
        Sampler whose kernels verify the drafts of each round. The kernels of this class read the
        committed tokens from the results of the verification.
    replay
        int32 [1], number of the current replay, which kernels read.
    vocabulary
        Vocabulary of the grammars.
    table_bytes
        Memory for the tables of automata, in bytes. If a new table does not fit, tables that no
        request uses are evicted, preferably the least recently used ones. A request whose table
        still does not fit is not promoted.
    row_bytes
        Memory for cached mask rows of automaton states, in bytes. If the row of a state is in the
        cache, it is copied instead of computed. Rows that have not been used for some time are
        evicted.
    finds_forced
        Whether forced tokens are drafted. If a mask row allows only one token, the kernel that
        fills the row also writes this token to the row's stamp, where the sampling kernels find it.
    block, parts
        Threads per block, 1 or a multiple of 32, and blocks per mask row. The defaults depend on
        the device. The results are the same for all values.

    Attributes
    ----------
    slots : DeviceArray
        ``AutomatonSlot`` of each slot, as uint8 [S, AUTOMATON_SLOT.itemsize].

    Raises
    ------
    OptionError
        The draft mode of `exchange` probes candidates.
    """

    def __init__(
        self,
        state: SlotState,
        exchange: Exchange,
        sampler: Sampler,
        replay: DeviceArray,
        vocabulary: Vocabulary,
        *,
        table_bytes: int = TABLE_BYTES,
        row_bytes: int = ROW_BYTES,
        finds_forced: bool = False,
        block: int | None = None,
        parts: int | None = None,
    ):
        if exchange.mode.probes:
            raise OptionError("automata on the device cannot test the candidates of drafts")
        device = state.device
        on_gpu = device.runs_gpu_code
        self._device = device
        self._state = state
        self._exchange = exchange
        self._sampler = sampler
        self._replay = replay
        self._finds_forced = finds_forced
        self._block = block or (_GPU_BLOCK if on_gpu else _CPU_BLOCK)
        self._parts = parts or (_GPU_PARTS if on_gpu else 1)
        self.slots = device.zeros((state.slots, AUTOMATON_SLOT.itemsize), "uint8")
        self._memory = device.empty((table_bytes,), "uint8")
        self._allocate_cache(row_bytes)
        self._upload_tokens(vocabulary)
        max_rows = sampler.arrays.max_batch * (exchange.drafts + 1)
        self._items = device.zeros((max_rows, _ITEM.itemsize), "uint8")
        self._kernels = device.load(KERNELS / "automaton.cu", {"BLOCK": str(self._block)})
        # Tables by native grammar, the least recently used table first.
        self._tables: dict[Any, _Table] = {}
        self._counts: Counter[str] = Counter()
        # Sizes of the tables that did not fit, and 0 for grammars with other brackets than JSON's.
        self._refused_sizes: weakref.WeakKeyDictionary[CompiledGrammar, int] = (
            weakref.WeakKeyDictionary()
        )
        self._slot_tables: dict[int, _Table] = {}

    def _upload_tokens(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.automaton_tokens
        closing = [any(byte in token for byte in _CLOSING_BYTES) for token in tokens]
        row = np.zeros(32 * vocabulary.words, np.uint8)
        row[: len(closing)] = closing
        self._closing = self._device.from_host(np.packbits(row, bitorder="little").view(np.uint32))
        # A token pushes at most one stack entry per opening bracket in its text.
        self._most_pushes = max(sum(map(token.count, _OPENING_BYTES)) for token in tokens)
        lengths = np.array([len(token) for token in tokens], np.int32)
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        text = np.frombuffer(b"".join(tokens), np.uint8)
        self._offsets = self._device.from_host(offsets)
        self._bytes = self._device.from_host(text)
        self._num_tokens = len(lengths)
        # Upper bound of the number of characters whose last byte is in a token. One character may
        # have begun before the token.
        begun = np.concatenate([np.zeros(1, np.int32), np.cumsum(text & 0xC0 != 0x80)])
        self._most_characters = 1 + int(np.diff(begun[offsets]).max(initial=0))

    def _allocate_cache(self, row_bytes: int) -> None:
        words = self._exchange.layout["words"].item()
        self._num_cached = row_bytes // (4 * words)
        self._cached_words = self._device.empty((max(self._num_cached, 1), words), "int32")
        cached = np.zeros(max(self._num_cached, 1), _CACHED_ROW)
        cached["table"] = -1
        self._cached = self._device.from_host(_as_bytes(cached))
        self._cache = self._device.zeros((_ROW_CACHE.itemsize,), "uint8")

    def counters(self) -> dict[str, int]:
        """Return memory usage and event counts by name. The call waits for the device.

        ``hits``, ``misses``, ``stored`` and ``evicted`` count mask rows of the row cache.
        ``narrowed_rows`` counts the rows from which a budget has excluded legal tokens, and
        ``closed`` the requests with such rows.
        ``row_bytes`` is the size of the rows in the cache. ``tables`` and ``table_bytes`` are the
        number and the total size of the tables on the device (one per automaton).
        ``tables_evicted`` counts the tables that were evicted, and ``tables_refused`` the requests
        whose table did not fit. ``forced_tokens`` counts the accepted drafts that the grammar
        forced.
        """
        cache = self._cache.to_host().view(_ROW_CACHE)[0]
        counts = {name: int(cache[name]) for name in _COUNTS}
        cached = self._cached.to_host().view(_CACHED_ROW)
        num_rows = int(np.count_nonzero(cached["table"] >= 0))
        return counts | {
            "row_bytes": num_rows * self._cached_words.nbytes // len(cached),
            "tables": len(self._tables),
            "table_bytes": sum(table.nbytes for table in self._tables.values()),
            "tables_evicted": self._counts["evicted"],
            "tables_refused": self._counts["refused"],
            "forced_tokens": int(cache["forced"]),
        }

    # Requests -----------------------------------------------------------------------------------

    def join(
        self, lane: Lane, slot: int, epoch: int, matcher: Matcher, closing_end: int = -1
    ) -> bool:
        """Move the grammar state of a slot's request to the device (promote it), if possible.

        Parameters
        ----------
        lane
            Lane on which the rounds run. The kernel that stores the request's state is added to it.
        slot
            Index of the slot. `release` must have been called for its previous request.
        epoch
            Epoch of the request, as in `GuidedRequest`.
        matcher
            Matcher of the request, which has accepted all of the request's tokens.
        closing_end
            As in `GuidedRequest`.

        Returns
        -------
        bool
            Whether the request is promoted. If not, the grammar worker must serve the request.
        """
        if not self._is_supported(matcher):
            return False
        table = self._acquire(lane, matcher)
        if table is None:
            return False
        self._slot_tables[slot] = table
        stack = matcher.native.stack
        record = np.zeros((), _REQUEST)
        record["table"] = table.offset
        record["cost"] = sum(int(table.costs[entry]) for entry in stack)
        record["epoch"] = epoch
        record["closing_end"] = closing_end
        record["num_stop_ids"] = len(matcher.stop_ids)
        record["stop_ids"][: len(matcher.stop_ids)] = matcher.stop_ids
        record["state"] = matcher.native.state
        record["count"] = matcher.native.count
        record["depth"] = len(stack)
        record["stack"][: len(stack)] = stack
        lane.kernel(
            self._kernels["automaton_join"],
            1,
            1,
            [
                self.slots,
                slot,
                self._replay,
                self._exchange.memory,
                self._exchange.layout,
                record[()],
            ],
            name=f"join automaton of slot {slot}",
        )
        return True

    def outgrew(self, matcher: Matcher, tokens: Iterable[int]) -> bool:
        """Return whether the stack of a promoted request has become too deep for the kernels.

        Parameters
        ----------
        matcher
            Matcher with which the request has joined. The method advances it.
        tokens
            Tokens that the kernels have committed since then.
        """
        for token in tokens:
            if not matcher.accept(token):
                return False
            if len(matcher.native.stack) > _MAX_DEPTH:
                return True
        return False

    def _is_supported(self, matcher: Matcher) -> bool:
        """Return whether kernels can run the automaton of a matcher from its current state on.

        The matcher must run an automaton that never reads the text of a stop id, and must not have
        terminated. Its stop ids and its stack must fit into `AUTOMATON_SLOT`, and no token of the
        vocabulary may push more than `_MAX_PUSHES` entries.
        """
        native = matcher.native
        if not isinstance(native, _native.guide.AutomatonMatcher) or native.names_stop:
            return False
        if self._most_pushes > _MAX_PUSHES or len(matcher.stop_ids) > _MAX_STOPS:
            return False
        return not matcher.is_terminated() and len(matcher.native.stack) <= _MAX_DEPTH

    def release(self, slot: int) -> None:
        """Release the table of a slot's request. No replay that uses the slot may be in flight."""
        table = self._slot_tables.pop(slot, None)
        if table is not None:
            table.users -= 1

    def _acquire(self, lane: Lane, matcher: Matcher) -> _Table | None:
        """Return the table of a matcher's automaton, and increment the table's number of users.

        If the table is not on the device, its upload is added to `lane`. The result is None if the
        kernels do not support the automaton's brackets, or if the device memory for tables has no
        room for the table.
        """
        grammar = matcher.native.grammar
        table = self._tables.pop(grammar, None)
        if table is None:
            nbytes = self._refused_sizes.get(matcher.compiled)
            if nbytes == 0:
                return None
            if nbytes is not None and self._find_place(nbytes) is None:
                self._refuse(matcher, nbytes)
                return None
            arrays = grammar.table()
            if not _has_json_brackets(arrays):
                self._refused_sizes[matcher.compiled] = 0
                return None
            data = table_data(arrays, self._most_pushes, self._most_characters)
            offset = self._allocate(lane, len(data))
            if offset is None:
                self._refuse(matcher, len(data))
                return None
            staged = self._device.pinned((len(data),), "uint8")
            staged.array[:] = data
            lane.copy(self._memory[offset : offset + len(data)], staged, name="automaton")
            table = _Table(grammar, offset, len(data), arrays["cost"])
        self._tables[grammar] = table
        table.users += 1
        return table

    def _refuse(self, matcher: Matcher, nbytes: int) -> None:
        """Record that the table of a matcher's automaton, of `nbytes` bytes, does not fit.

        Building a large table takes long, so the table is not built again before it fits.
        """
        self._refused_sizes[matcher.compiled] = nbytes
        self._counts["refused"] += 1
        if self._counts["refused"] == 1:  # later refusals are only counted
            LOG.warning(
                "no memory for an automaton of %d bytes on the device (the option automaton_bytes "
                "is %d); requests with this or a later automaton that does not fit run their "
                "grammar steps on the host",
                nbytes,
                self._memory.nbytes,
            )

    def _allocate(self, lane: Lane, nbytes: int) -> int | None:
        """Make room for a table of `nbytes` bytes and return its offset.

        The method evicts the unused tables in the range that `_find_place` chooses. If every range
        of this size contains a table in use, it evicts none and returns None.
        """
        place = self._find_place(nbytes)
        if place is None:
            return None
        offset, evicted = place
        for table in evicted:
            del self._tables[table.grammar]
            self._counts["evicted"] += 1
            lane.kernel(
                self._kernels["automaton_forget"],
                1,
                self._block,
                [self._memory, table.offset, self._cached],
                name="forget automaton",
            )
        return offset

    def _find_place(self, nbytes: int) -> tuple[int, list[_Table]] | None:
        """Return the offset of a range for a new table, and the tables to evict from this range.

        A range without tables is preferred. Otherwise, the method chooses the range whose most
        recently used table has been unused for the longest time. It returns None if every range
        contains a table with users.
        """
        age = {table.grammar: number for number, table in enumerate(self._tables.values())}
        tables = sorted(self._tables.values(), key=lambda table: table.offset)
        best: tuple[int, list[_Table]] | None = None
        best_age = len(tables)
        starts = [0, *(_aligned(table.offset + table.nbytes) for table in tables)]
        end = 0
        for first, start in enumerate(starts):
            if start + nbytes > self._memory.nbytes:
                break
            end = max(end, first)
            while end < len(tables) and tables[end].offset < start + nbytes:
                end += 1
            occupied = tables[first:end]
            if any(table.users for table in occupied):
                continue
            newest = max((age[table.grammar] for table in occupied), default=-1)
            if newest < best_age:
                best, best_age = (start, occupied), newest
            if newest < 0:
                break
        return best

    # Grammar steps ------------------------------------------------------------------------------

    def add_open(self, lane: Lane, row_slot: DeviceArray, num_rows: int, *, copied: bool) -> None:
        """Add the kernels that fill the missing mask rows before verification.

        Parameters
        ----------
        lane
            Lane, ordered after the kernel that writes `row_slot`.
        row_slot
            int32 [B], slot of each batch row; -1: padding.
        num_rows
            Maximum number of mask rows that verification needs per request: one per draft, and row
            0.
        copied
            Whether an earlier node of the round copies the host's mask rows to the device. The copy
            also overwrites the rows that earlier kernels have filled, so all rows are filled again.
        """
        self._add_kernel(lane, "open", row_slot, [num_rows, int(copied)])
        self._add_fill(lane, "open", row_slot, num_rows)

    def add_commit(self, lane: Lane, row_slot: DeviceArray, *, fill: bool) -> None:
        """Add the kernels that advance the grammar states by the committed tokens.

        Parameters
        ----------
        lane
            Lane, ordered after verification.
        row_slot
            int32 [B], slot of each batch row; -1: padding.
        fill
            Whether to fill mask row 0, under which the first draft is sampled.
        """
        args = [int(fill), *self._results, int(self._finds_forced)]
        self._add_kernel(lane, "commit", row_slot, args)
        if fill:
            self._add_fill(lane, "commit", row_slot)

    def add_draft(self, lane: Lane, row_slot: DeviceArray, j: int) -> None:
        """Add the kernels that advance the grammar states by draft `j` and fill mask row `j`."""
        self._add_kernel(lane, "draft", row_slot, [j, *self._results])
        self._add_fill(lane, "draft", row_slot)

    @property
    def _results(self) -> tuple[object, ...]:
        return self._sampler.arrays.results, self._sampler.arrays.row_words

    @property
    def _tables_args(self) -> tuple[object, ...]:
        return self._memory, self._offsets, self._bytes, self._closing, self._num_tokens

    def _add_kernel(
        self, lane: Lane, step: str, row_slot: DeviceArray, args: Sequence[object]
    ) -> None:
        """Add the kernel ``automaton_{step}``, which advances the grammar states.

        `args` are the kernel's arguments after those that the kernels of all steps have in common.
        """
        exchange = self._exchange
        batch = row_slot.shape[0]
        common = [
            row_slot,
            batch,
            self._state.array,
            self.slots,
            exchange.memory,
            exchange.layout,
            *self._tables_args,
            self._replay,
            self._items,
            self._cache,
            self._cached,
            self._num_cached,
        ]
        lane.kernel(
            self._kernels[f"automaton_{step}"],
            1,
            self._block,
            [*common, *args],
            name=f"{step}: automaton states",
        )

    def _add_fill(self, lane: Lane, step: str, row_slot: DeviceArray, num_rows: int = 1) -> None:
        """Add the kernel that fills the mask rows of a step.

        The kernel of the step, which `_add_kernel` has added before, writes a list of these rows to
        `_items`. The list has up to `num_rows` mask rows for each batch row, that is, for each
        element of `row_slot`.
        """
        args = [
            self._items,
            self.slots,
            self._exchange.device_masks,
            self._exchange.memory,
            self._exchange.layout,
            *self._tables_args,
            self._cached_words,
            self._cache,
            int(self._finds_forced),
        ]
        lane.kernel(
            self._kernels["automaton_fill"],
            (row_slot.shape[0] * num_rows, self._parts, 1),
            self._block,
            args,
            name=f"{step}: automaton rows",
        )


def _as_bytes(array: NDArray) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


def _has_json_brackets(arrays: Mapping[str, NDArray]) -> bool:
    """Return whether only JSON's opening brackets push entries, and only closing ones pop them.

    `arrays` are those of ``AutomatonGrammar.table()``.
    """
    classes, following, actions = arrays["classes"], arrays["next"], arrays["actions"]
    states, byte_classes = np.nonzero(following < -1)
    entries = actions[-2 - following[states, byte_classes], 0]
    pushing = np.isin(classes, byte_classes[entries >= 0])
    popping = np.isin(classes, byte_classes[entries == _POP])
    return {*np.flatnonzero(pushing)} <= {*_OPENING_BYTES} and (
        {*np.flatnonzero(popping)} <= {*_CLOSING_BYTES}
    )


def table_data(
    arrays: Mapping[str, NDArray], most_pushes: int, most_characters: int
) -> NDArray[np.uint8]:
    """Convert an automaton to the device's table (``struct AutomatonTable``).

    `arrays` are those of ``AutomatonGrammar.table()``. A token of the vocabulary can push at most
    `most_pushes` entries, and contains the last bytes of at most `most_characters` characters.
    """
    states, classes = arrays["next"].shape
    limits = arrays["limits"]
    largest_step = int(arrays["distance"].max())
    largest_step += most_pushes * int(arrays["cost"].max(initial=0))
    header = np.zeros((), _TABLE)
    header["states"], header["classes"] = states, classes
    header["entries"] = len(arrays["cost"])
    header["actions"], header["returns"] = len(arrays["actions"]), len(arrays["returns"])
    header["counts"] = len(arrays["counts"])
    header["pops"] = (arrays["actions"][:, 0] == _POP).any()
    header["largest_step"] = min(largest_step, np.iinfo(np.int32).max)
    parts = [
        header[None],
        arrays["classes"],
        np.full(states, -1, np.int32),
        arrays["distance"],
        arrays["cost"],
        arrays["returns_begin"],
        arrays["counts"],
        np.where(limits == _NO_LIMIT, limits, limits - most_characters),
        arrays["next"],
        arrays["actions"],
        arrays["returns"],
        arrays["accepting"],
    ]
    return np.concatenate([_as_bytes(part).ravel() for part in parts])
