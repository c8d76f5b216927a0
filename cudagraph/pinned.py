"""Pinned memory by slot and by replay: what host and device exchange at fixed addresses.

Every row of a field starts on a cache line of its own, so that two slots written by different
threads, or a stamp beside its data, never share one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.context import Context
from graft.cudagraph.dtypes import itemsize, numpy_dtype
from graft.cudagraph.errors import DeadlineError, OptionError
from graft.cudagraph.memory import PinnedArray, check_shape
from graft.cudagraph.stacks import describe_running
from graft.native import _native

LINE_BYTES = 64
STAMP = "stamp"


class PinnedField:
    """One named field of all slots.

    ``array`` is the NumPy view [slots, *shape], its rows ``stride`` elements apart; ``ptr`` and
    ``host_ptr`` are the addresses of slot 0's row.
    """

    __slots__ = ("_memory", "array", "dtype", "host_ptr", "ptr", "shape", "stride")

    def __init__(self, context: Context, slots: int, dtype: str, shape: tuple[int, ...]) -> None:
        elements = math.prod(shape)
        per_line = LINE_BYTES // itemsize(dtype)
        self.stride = -(-elements // per_line) * per_line
        self.dtype = dtype
        self.shape = shape
        self._memory = PinnedArray(context, (slots, self.stride), dtype)
        self.ptr = self._memory.ptr
        self.host_ptr = self._memory.host_ptr
        self.array = self._memory.array[:, :elements].reshape((slots, *shape))

    @property
    def owner(self) -> object:
        """What must be kept alive while the address is in use."""
        return self._memory.owner

    def argument(self) -> tuple[int, object]:
        """Return device address and owner, for a kernel's pointer parameter."""
        return self._memory.argument()

    def close(self) -> None:
        """Drop the memory."""
        self.array = np.empty(0, numpy_dtype(self.dtype))
        self._memory.close()

    def __repr__(self) -> str:
        return f"<PinnedField {self.shape} {self.dtype}, stride {self.stride}>"


class PinnedSlots:
    """Named fields of pinned memory, one row per slot, at fixed addresses.

    ``fields`` gives (dtype, shape) of one slot's row by name.
    """

    def __init__(
        self, context: Context, slots: int, fields: Mapping[str, tuple[str, int | tuple[int, ...]]]
    ) -> None:
        if not isinstance(slots, int) or slots < 1:
            raise OptionError(f"slots must be a positive integer, not {slots!r}")
        self.slots = slots
        self._fields = {
            name: PinnedField(context, slots, dtype, check_shape(shape, f"field {name!r}"))
            for name, (dtype, shape) in fields.items()
        }

    def field(self, name: str) -> PinnedField:
        """Return a field; OptionError when there is none of that name."""
        try:
            return self._fields[name]
        except KeyError:
            raise OptionError(f"no field {name!r}; there are {', '.join(self._fields)}") from None

    def close(self) -> None:
        """Drop the memory of all fields."""
        for field in self._fields.values():
            field.close()


class Ring(PinnedSlots):
    """Pinned fields by replay: entry ``replay % entries``, with a stamp that says which replay.

    Whoever fills an entry writes the stamp last (release); whoever reads it polls the stamp first
    (acquire). The stamp is the replay number, from 1; 0 is an entry never written.

    An entry is live from :meth:`publish` or :meth:`reserve` to :meth:`consumed`. Filling a live
    entry for another replay is refused: the host never laps.
    """

    def __init__(
        self,
        context: Context,
        entries: int,
        fields: Mapping[str, tuple[str, int | tuple[int, ...]]],
    ) -> None:
        if STAMP in fields:
            raise OptionError(f"the field name {STAMP!r} is taken by the ring")
        super().__init__(context, entries, {**fields, STAMP: ("int32", (1,))})
        self._live = [0] * entries

    @property
    def entries(self) -> int:
        """Number of entries."""
        return self.slots

    @property
    def stamp(self) -> PinnedField:
        """The stamp words, int32 [entries, 1], one cache line each."""
        return self._fields[STAMP]

    def reserve(self, replay: int) -> int:
        """Claim the entry of a replay and return its index, before the device may fill it."""
        entry = self._entry(replay)
        if self._live[entry] not in (0, replay):
            raise OptionError(
                f"replay {replay} would overwrite entry {entry}, which replay {self._live[entry]} "
                f"holds and nobody consumed (the ring has {self.entries} entries)"
            )
        self._live[entry] = replay
        return entry

    def publish(self, replay: int) -> None:
        """Stamp an entry that the host has filled; later readers see its data."""
        entry = self.reserve(replay)
        _native.store_release_i32(self._stamp_address(entry), replay)

    def poll(self, replay: int, timeout_s: float | None = None) -> None:
        """Wait until the entry carries the stamp of ``replay``; its data may be read then.

        DeadlineError after ``timeout_s`` seconds names the host steps that are running.
        """
        if not self.stamped(replay, timeout_s):
            stamp = _native.load_acquire_i32(self._stamp_address(self._entry(replay)))
            raise DeadlineError(
                f"replay {replay} was not stamped within {timeout_s:g} s (the entry has {stamp})"
                f"{describe_running()}"
            )

    def stamped(self, replay: int, timeout_s: float | None = None) -> bool:
        """Do what :meth:`poll` does, but return False after ``timeout_s`` seconds."""
        entry = self._entry(replay)
        return bool(_native.poll_i32_eq(self._stamp_address(entry), replay, timeout_s))

    def consumed(self, replay: int) -> None:
        """Give an entry free for a later replay."""
        entry = self._entry(replay)
        if self._live[entry] not in (0, replay):
            raise OptionError(
                f"replay {replay} cannot be consumed: its entry holds replay {self._live[entry]}"
            )
        self._live[entry] = 0

    def row(self, name: str, replay: int) -> NDArray:
        """Return the NumPy view of a field's row for a replay."""
        return self.field(name).array[self._entry(replay)]

    def _entry(self, replay: int) -> int:
        if not 1 <= replay < 1 << 31:
            raise OptionError(f"replay numbers are 1 to 2**31 - 1, not {replay}")
        return replay % self.entries

    def _stamp_address(self, entry: int) -> int:
        field = self.stamp
        return field.host_ptr + entry * field.stride * 4
