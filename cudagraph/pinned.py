"""Pinned memory by slot or by replay, for data that host and device exchange in every replay.

Every row of a field starts on its own cache line, so that neither two slots that different threads
write nor a stamp and its data share a line.
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
MAX_REPLAY = 1 << 31


class PinnedField:
    """One field of all slots.

    Attributes
    ----------
    array : ndarray [slots, *shape]
        NumPy view.
    dtype : str
        Name of the element type.
    shape : tuple of int
        Shape of one row.
    stride : int
        Distance between two rows in elements.
    ptr, host_ptr : int
        Device and host address of row 0.
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
        """Object to keep alive while the address is in use."""
        return self._memory.owner

    def argument(self) -> tuple[int, object]:
        """Return device address and owner, for a pointer parameter of a kernel."""
        return self._memory.argument()

    def close(self) -> None:
        """Release the memory."""
        self.array = np.empty(0, numpy_dtype(self.dtype))
        self._memory.close()

    def __repr__(self) -> str:
        return f"<PinnedField {self.shape} {self.dtype}, stride {self.stride}>"


class PinnedSlots:
    """Named fields of pinned memory with one row per slot, at fixed addresses.

    Parameters
    ----------
    context
        Device.
    slots
        Number of slots.
    fields
        By name: dtype and shape of one row.
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
        """Return a field; raise OptionError if there is none with this name."""
        try:
            return self._fields[name]
        except KeyError:
            raise OptionError(
                f"there is no field {name!r}; the fields are {', '.join(self._fields)}"
            ) from None

    def close(self) -> None:
        """Release the memory of all fields."""
        for field in self._fields.values():
            field.close()


class Ring(PinnedSlots):
    """Pinned fields by replay: replay n uses entry ``n % entries``.

    A stamp in each entry identifies the replay. The writer of an entry stores the stamp last, with
    release order. The reader polls the stamp first, with acquire order. A stamp is a replay number,
    from 1; 0 is an entry that was never written.

    An entry is in use from :meth:`publish` or :meth:`reserve` until :meth:`release`. Using an entry
    for another replay in between raises an error, so the host cannot overwrite unread data.

    Parameters
    ----------
    context
        Device.
    entries
        Number of entries.
    fields
        By name: dtype and shape of one row. The name "stamp" is reserved.
    """

    def __init__(
        self,
        context: Context,
        entries: int,
        fields: Mapping[str, tuple[str, int | tuple[int, ...]]],
    ) -> None:
        if STAMP in fields:
            raise OptionError(f"the field name {STAMP!r} is reserved by the ring")
        super().__init__(context, entries, {**fields, STAMP: ("int32", (1,))})
        self._in_use = [0] * entries  # replay number of each entry; 0: free

    @property
    def entries(self) -> int:
        """Number of entries."""
        return self.slots

    @property
    def stamp(self) -> PinnedField:
        """Stamps, int32 [entries, 1], one per cache line."""
        return self._fields[STAMP]

    def reserve(self, replay: int) -> int:
        """Reserve the entry of a replay and return its index, before the device may fill it."""
        entry = self._entry(replay)
        if self._in_use[entry] not in (0, replay):
            raise OptionError(
                f"replay {replay} would overwrite entry {entry}, which is in use by replay "
                f"{self._in_use[entry]} (the ring has {self.entries} entries)"
            )
        self._in_use[entry] = replay
        return entry

    def publish(self, replay: int) -> None:
        """Stamp the entry of a replay after the host has filled it."""
        entry = self.reserve(replay)
        _native.store_release_i32(self._stamp_address(entry), replay)

    def synchronize(self, replay: int, timeout_s: float | None = None) -> None:
        """Wait until the entry of a replay is stamped. Its data may then be read.

        Raises
        ------
        DeadlineError
            The entry was not stamped within ``timeout_s`` seconds. The message names the host steps
            that are running.
        """
        if not self.wait(replay, timeout_s):
            stamp = _native.load_acquire_i32(self._stamp_address(self._entry(replay)))
            raise DeadlineError(
                f"replay {replay} was not stamped within {timeout_s:g} s (the stamp is {stamp})"
                f"{describe_running()}"
            )

    def wait(self, replay: int, timeout_s: float | None = None) -> bool:
        """Wait like :meth:`synchronize`, but return False after ``timeout_s`` seconds."""
        entry = self._entry(replay)
        return bool(_native.poll_i32_eq(self._stamp_address(entry), replay, timeout_s))

    def release(self, replay: int) -> None:
        """Make the entry of a replay available to a later replay."""
        entry = self._entry(replay)
        if self._in_use[entry] not in (0, replay):
            raise OptionError(
                f"replay {replay} cannot be released: its entry is in use by replay "
                f"{self._in_use[entry]}"
            )
        self._in_use[entry] = 0

    def row(self, name: str, replay: int) -> NDArray:
        """Return a NumPy view of the row of a field for a replay."""
        return self.field(name).array[self._entry(replay)]

    def _entry(self, replay: int) -> int:
        if not 1 <= replay < MAX_REPLAY:
            raise OptionError(f"replay numbers must be 1 to 2**31 - 1, not {replay}")
        return replay % self.entries

    def _stamp_address(self, entry: int) -> int:
        field = self.stamp
        return field.host_ptr + entry * field.stride * 4
