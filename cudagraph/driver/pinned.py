"""Pinned host memory for data that host and device exchange in every replay.

:class:`PinnedSlots` holds named arrays, called fields, with one row per slot. :class:`Ring` holds
fields with one row, called an entry, per replay in flight.

Every row starts on its own cache line. Rows that different threads write never share a cache line.

A field is backed by one ctypes array over the pinned memory. Its NumPy view and the ctypes objects
of its rows share this memory and keep it alive.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.driver import check_timeout, prepare_driver_call
from graft.cudagraph.driver.dtypes import ctypes_type, dtype_name, itemsize, numpy_dtype
from graft.cudagraph.driver.handles import StreamLike, stream_handle
from graft.cudagraph.driver.memory import PinnedArray, check_shape
from graft.cudagraph.driver.stacks import describe_running
from graft.cudagraph.errors import DeadlineError, OptionError, ShapeError
from graft.native import _native

LINE_BYTES = 64
STAMP = "stamp"
_CTYPES_BASES = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._SimpleCData)


class PinnedField:
    """One named array of a :class:`PinnedSlots`, with one row per slot.

    Attributes
    ----------
    slots
        Number of rows.
    array
        NumPy view [slots, *shape], where `shape` is the shape of one row.
    stride
        Distance between two rows in elements.
    ptr, host_ptr
        Device and host address of row 0.
    """

    __slots__ = ("_memory", "array", "dtype", "host_ptr", "ptr", "shape", "slots", "stride")

    def __init__(
        self, context: Context, slots: int, dtype: DTypeLike, shape: tuple[int, ...]
    ) -> None:
        self.dtype = dtype_name(dtype)
        elements = math.prod(shape)
        per_line = LINE_BYTES // itemsize(self.dtype)
        self.slots = slots
        self.stride = -(-elements // per_line) * per_line
        self.shape = shape
        self._memory = PinnedArray(context, (slots, self.stride), self.dtype)
        self.ptr = self._memory.ptr
        self.host_ptr = self._memory.host_ptr
        self.array = self._memory.array[:, :elements].reshape((slots, *shape))

    def ctypes(self, slot: int, layout: Any = None) -> Any:
        """Return the row of a slot as a ctypes object that shares the memory.

        The object keeps the memory alive, even after :meth:`close`.

        Parameters
        ----------
        layout
            ctypes type of the object, such as a ``ctypes.Structure``, or a structured NumPy dtype.
            Default: an array of the field's element type with the shape of a row, or a scalar if
            the shape is (). Elements of float16, bfloat16 and float8 are given as the unsigned
            integers that store their bits.

        Raises
        ------
        OptionError
            There is no such slot, or ``layout`` is not a type of ctypes or NumPy.
        ShapeError
            The type is larger than a row.
        DeviceError
            The field is closed.
        """
        _ = self.owner  # raises DeviceError if the field is closed
        if not isinstance(slot, int | np.integer) or not 0 <= slot < self.slots:
            raise OptionError(f"slot must be 0 to {self.slots - 1}, not {slot!r}")
        kind = self._row_type() if layout is None else _as_ctypes_type(layout)
        row_bytes = math.prod(self.shape) * itemsize(self.dtype)
        if ctypes.sizeof(kind) > row_bytes:
            raise ShapeError(
                f"{kind.__name__} has {ctypes.sizeof(kind)} bytes, but a row has {row_bytes}"
            )
        return kind.from_buffer(self._memory.buffer, slot * self.stride * itemsize(self.dtype))

    def _row_type(self) -> Any:
        kind: Any = ctypes_type(self.dtype)
        for size in reversed(self.shape):
            kind = kind * size
        return kind

    @property
    def owner(self) -> object:
        """Owner of the memory; users of the address must keep it alive."""
        return self._memory.owner

    def argument(self) -> tuple[int, object]:
        """Return the device address to pass to a kernel, and the object that owns the memory."""
        return self._memory.argument()

    def close(self) -> None:
        """Release the memory."""
        self.array = np.empty(0, numpy_dtype(self.dtype))
        self._memory.close()

    def __repr__(self) -> str:
        return f"<PinnedField {self.shape} {self.dtype}, stride {self.stride}>"


def _as_ctypes_type(layout: Any) -> Any:
    if isinstance(layout, np.dtype):
        return np.ctypeslib.as_ctypes_type(layout)
    if not isinstance(layout, type) or not issubclass(layout, _CTYPES_BASES):
        raise OptionError(f"layout must be a ctypes type or a NumPy dtype, not {layout!r}")
    return layout


class PinnedSlots:
    """Named arrays in pinned memory with one row per slot, at fixed addresses.

    ``slots[name]`` returns a field, ``slots[name].array[slot]`` the row of a slot as a NumPy view,
    and ``slots[name].ctypes(slot)`` the same row as a ctypes object. `fields` gives the dtype and
    the shape of one row by field name.
    """

    def __init__(
        self,
        context: Context,
        slots: int,
        fields: Mapping[str, tuple[DTypeLike, int | tuple[int, ...]]],
    ) -> None:
        if not isinstance(slots, int) or slots < 1:
            raise OptionError(f"slots must be a positive integer, not {slots!r}")
        self.slots = slots
        self._fields = {
            name: PinnedField(context, slots, dtype, check_shape(shape, f"field {name!r}"))
            for name, (dtype, shape) in fields.items()
        }

    def __getitem__(self, name: str) -> PinnedField:
        """Return a field; raise OptionError if no field has this name."""
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


def replay_word(replay: int) -> int:
    """Return the lower 32 bits of a replay number as a signed integer, as kernels store it."""
    return (replay + (1 << 31)) % (1 << 32) - (1 << 31)


class Ring(PinnedSlots):
    """Pinned fields with one entry per replay in flight: replay n uses entry ``n % entries``.

    The stamp of an entry is the number of the replay that its data belongs to (its lower 32 bits,
    see `replay_word`), or 0 if the entry was never written. Either the host or a kernel writes an
    entry. The writer fills the fields first and then stores the stamp with release order; on the
    host, :meth:`publish` stores it. The reader polls the stamp with acquire order before it reads
    the fields; on the host, :meth:`synchronize` and :meth:`wait` poll it.

    On the host, an entry is in use from :meth:`reserve` or :meth:`publish` until :meth:`release`.
    Using an entry for another replay before its release raises an error, so the host cannot
    overwrite unread data.

    Replay numbers have no limit if the number of entries is a power of two. Otherwise, they must be
    less than 2**32, because devices compute the entry from the lower 32 bits. `fields` gives the
    dtype and the shape of one row by field name; the name "stamp" is reserved.
    """

    def __init__(
        self,
        context: Context,
        entries: int,
        fields: Mapping[str, tuple[DTypeLike, int | tuple[int, ...]]],
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
        """Stamps of the entries, int32 [entries, 1], each on its own cache line."""
        return self._fields[STAMP]

    def reserve(self, replay: int) -> int:
        """Reserve the entry of a replay and return its index.

        If a kernel fills the entry, reserve the entry before the launch of the replay.
        """
        entry = self._entry(replay)
        if self._in_use[entry] not in (0, replay):
            raise OptionError(
                f"replay {replay} would overwrite entry {entry}, which is in use by replay "
                f"{self._in_use[entry]} (the ring has {self.entries} entries); "
                "call release() for that replay first"
            )
        self._in_use[entry] = replay
        return entry

    def publish(self, replay: int) -> None:
        """Store the replay number as the stamp of its entry, so that the device reads the entry.

        The caller must have filled the fields of the entry. If the entry is not reserved yet, this
        method reserves it.
        """
        entry = self.reserve(replay)
        _native.store_release_i32(self._stamp_address(entry), replay_word(replay))

    def synchronize(self, replay: int, timeout_s: float | None = None) -> None:
        """Wait until the stamp of the replay's entry shows that its fields can be read.

        If the writer does not store the stamp within ``timeout_s`` seconds, DeadlineError names the
        host steps that are running.
        """
        if not self.wait(replay, timeout_s):
            stamp = _native.load_acquire_i32(self._stamp_address(self._entry(replay)))
            raise DeadlineError(
                f"replay {replay} was not stamped within {timeout_s:g} s (the stamp is {stamp})"
                f"{describe_running()}"
            )

    def wait(
        self, replay: int, timeout_s: float | None = None, stream: StreamLike | None = None
    ) -> bool:
        """Wait like :meth:`synchronize`, but return False after ``timeout_s`` seconds.

        If a kernel stores the stamp, pass the stream on which the kernel runs as `stream`. The wait
        then queries it every millisecond, because platforms such as WSL2 may pass the device's
        stores to host memory on only when the driver is called.
        """
        check_timeout(timeout_s)
        handle = 0
        if stream is not None:
            handle = stream_handle(stream, "Ring.wait()")
            prepare_driver_call("cuStreamQuery")
        address = self._stamp_address(self._entry(replay))
        return bool(_native.poll_i32_eq(address, replay_word(replay), timeout_s, handle))

    def release(self, replay: int) -> None:
        """Free the entry of a replay, so that a later replay can use the entry."""
        entry = self._entry(replay)
        if self._in_use[entry] not in (0, replay):
            raise OptionError(
                f"replay {replay} cannot be released: its entry is in use by replay "
                f"{self._in_use[entry]}"
            )
        self._in_use[entry] = 0

    def row(self, name: str, replay: int) -> NDArray:
        """Return a NumPy view of a field's row in the entry of a replay."""
        return self[name].array[self._entry(replay)]

    def _entry(self, replay: int) -> int:
        if replay < 1:
            raise OptionError(f"replay numbers begin with 1, got {replay}")
        if replay >= 1 << 32 and self.entries & (self.entries - 1):
            raise OptionError(
                f"replay {replay}: a ring with {self.entries} entries supports replay numbers less "
                "than 2**32; greater numbers require that the number of entries is a power of two"
            )
        return replay % self.entries

    def _stamp_address(self, entry: int) -> int:
        field = self.stamp
        return field.host_ptr + entry * field.stride * 4
