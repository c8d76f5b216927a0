"""Device arrays and pinned host arrays: contiguous, typed, owned.

Memory is freed when its last user goes: the array, its views, the graphs whose nodes carry its
address. Finalisers only hand the memory to a reaper thread, because garbage collection may run in
a host function, where the driver must not be called.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.context import Context
from graft.cudagraph.driver import call, cu
from graft.cudagraph.dtypes import E4M3, dtype_name, from_float32, itemsize, numpy_dtype
from graft.cudagraph.errors import DeviceError, ShapeError
from graft.native import _native

CLOSE_LIMIT_S = 10.0
OUT_OF_MEMORY = 2
#: Bytes of an array that no driver can be asked for.
MOST_BYTES = 1 << 63


class Span(NamedTuple):
    """A contiguous run of bytes that a copy or fill may name."""

    pinned: bool
    address: int
    nbytes: int
    owner: object


def check_shape(shape: int | tuple[int, ...], what: str) -> tuple[int, ...]:
    """Return a shape as a tuple of positive ints, or raise ShapeError."""
    dims = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    for axis, size in enumerate(dims):
        if not isinstance(size, int | np.integer) or size < 1:
            raise ShapeError(f"{what}: dimension {axis} of shape {dims} must be a positive integer")
    return tuple(int(size) for size in dims)


def _nbytes(shape: tuple[int, ...], dtype: str, what: str) -> int:
    nbytes = math.prod(shape) * itemsize(dtype)
    if nbytes >= MOST_BYTES:
        raise ShapeError(f"{what} {shape} of {dtype} has {nbytes} bytes, more than any device")
    return nbytes


class Allocation:
    """One allocation of the driver and whether its maker closed it."""

    __slots__ = ("_resource", "address", "nbytes", "what")

    def __init__(self, kind: _native.ResourceKind, nbytes: int, what: str) -> None:
        pinned = kind == _native.ResourceKind.PINNED_MEMORY
        flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP

        allocate = (cu.cuMemHostAlloc, nbytes, flags) if pinned else (cu.cuMemAlloc, nbytes)
        try:
            address = int(call(*allocate))
        except DeviceError as error:
            # Memory that was dropped may still wait for the reaper.
            if error.code != OUT_OF_MEMORY or not _native.flush(CLOSE_LIMIT_S):
                raise
            address = int(call(*allocate))
        self._resource: _native.Resource | None = _native.Resource(kind, address)
        self.address = address
        self.nbytes = nbytes
        self.what = what

    @property
    def resource(self) -> _native.Resource:
        """The owner to keep for as long as the address is in use."""
        if self._resource is None:
            raise DeviceError(f"{self.what} is closed")
        return self._resource

    def close(self) -> None:
        """Drop this reference; the memory is free on return unless a graph still carries it."""
        self._resource = None
        _native.flush(CLOSE_LIMIT_S)


class DeviceArray:
    """A C-contiguous array in device memory.

    Made by :meth:`Device.empty`, :meth:`Device.zeros` and :meth:`Device.from_host`. Indexing and
    slicing the leading axis and :meth:`reshape` give views that share the memory.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
    context : Context
    """

    __slots__ = ("__weakref__", "_allocation", "_is_base", "_offset", "context", "dtype", "shape")

    def __init__(
        self,
        context: Context,
        shape: tuple[int, ...],
        dtype: str,
        allocation: Allocation | None = None,
        offset: int = 0,
    ) -> None:
        self.shape = check_shape(shape, "DeviceArray")
        self.dtype = dtype
        self.context = context
        nbytes = _nbytes(self.shape, dtype, "DeviceArray")
        self._is_base = allocation is None
        self._allocation = allocation or Allocation(
            _native.ResourceKind.DEVICE_MEMORY, nbytes, f"DeviceArray {self.shape} {dtype}"
        )
        self._offset = offset

    @property
    def ptr(self) -> int:
        """Device address of the first element."""
        return self._allocation.resource.handle + self._offset

    @property
    def owner(self) -> object:
        """What must be kept alive while the address is in use."""
        return self._allocation.resource

    def argument(self) -> tuple[int, object]:
        """Return address and owner, for a kernel's pointer parameter."""
        resource = self._allocation.resource
        return resource.handle + self._offset, resource

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * itemsize(self.dtype)

    def span(self) -> Span:
        """Return the bytes of this array, for copies and fills."""
        return Span(False, self.ptr, self.nbytes, self.owner)

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("an array without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[DeviceArray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: int | slice) -> DeviceArray:
        """View one entry or a step-1 range of the leading axis."""
        length = len(self)
        row = self.nbytes // length
        if isinstance(key, slice):
            start, stop, step = key.indices(length)
            if step != 1 or stop <= start:
                raise ShapeError(f"slice {key} of an axis of {length} is empty or has a step")
            shape = (stop - start, *self.shape[1:])
        else:
            try:
                index = operator.index(key)
            except TypeError:
                raise ShapeError(f"only the leading axis can be indexed, not {key!r}") from None
            if not -length <= index < length:
                raise ShapeError(f"index {index} is outside of an axis of {length}")
            start = index % length
            shape = self.shape[1:]
        return self._view(shape, self._offset + start * row)

    def reshape(self, *shape: int | tuple[int, ...]) -> DeviceArray:
        """View the same elements in another shape; one dimension may be -1."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        dims = [operator.index(size) for size in wanted]  # type: ignore[arg-type]
        if dims.count(-1) == 1:
            known = math.prod(size for size in dims if size != -1)
            dims[dims.index(-1)] = self.size // known if known > 0 else 0
        if math.prod(dims) != self.size or any(size < 1 for size in dims):
            raise ShapeError(f"{self.size} elements of shape {self.shape} cannot take {wanted}")
        return self._view(tuple(dims), self._offset)

    def _view(self, shape: tuple[int, ...], offset: int) -> DeviceArray:
        return DeviceArray(self.context, shape, self.dtype, self._allocation, offset)

    def to_host(self) -> NDArray:
        """Wait until the device is idle and return a copy in the storage dtype."""
        out = np.empty(self.shape, numpy_dtype(self.dtype))
        self.context.synchronize()
        pointer = self.ptr
        self.context.transfer(
            lambda s: call(cu.cuMemcpyDtoHAsync, out.ctypes.data, pointer, self.nbytes, s),
            (self.owner, out),
        )
        return out

    def copy_from(self, array: NDArray) -> None:
        """Wait until the device is idle and overwrite this array with a host array.

        The host array must have this shape and either the storage dtype, or float32 when this is
        a 16-bit float (it is then rounded to nearest even).
        """
        source = _stored(array, self.dtype)
        if source.shape != self.shape:
            raise ShapeError(f"host array has shape {source.shape}, device array {self.shape}")
        self.context.synchronize()
        self._write(source)

    def _write(self, source: NDArray) -> None:
        pointer = self.ptr
        self.context.transfer(
            lambda s: call(cu.cuMemcpyHtoDAsync, pointer, source.ctypes.data, self.nbytes, s),
            (self.owner, source),
        )

    def fill(self, byte: int = 0) -> None:
        """Wait until the device is idle and set every byte."""
        value = check_byte(byte)
        self.context.synchronize()
        self._set(value)

    def _set(self, value: int) -> None:
        pointer = self.ptr
        self.context.transfer(
            lambda s: call(cu.cuMemsetD8Async, pointer, value, self.nbytes, s), (self.owner,)
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array for CuPy, Numba and torch; what NumPy lacks appears as its bits."""
        return {
            "shape": self.shape,
            "typestr": numpy_dtype(self.dtype).str,
            "data": (self.ptr, False),
            "strides": None,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (kDLCUDA, ordinal)."""
        return (2, self.context.ordinal)

    def __dlpack__(self, **options: Any) -> object:
        """Export by CuPy, without a copy; the device is idle on return. What NumPy lacks appears as
        its bits. BufferError on the soft device."""
        if self.context.kind == "soft":
            raise BufferError("soft-device memory cannot be exported: use DeviceArray.to_host()")
        import cupy

        self.context.synchronize()
        return cupy.asarray(self).__dlpack__(**options)

    def close(self) -> None:
        """Free the memory now, for all views; memory that a graph carries goes with the graph.

        Only the array that allocated it may do so.
        """
        if not self._is_base:
            raise ShapeError("a view cannot close the array it shares memory with")
        self._allocation.close()

    def __repr__(self) -> str:
        return f"<DeviceArray {self.shape} {self.dtype}>"


def zeros(context: Context, shape: int | tuple[int, ...], dtype: str) -> DeviceArray:
    """Allocate an array of zeros."""
    numpy_dtype(dtype)
    made = DeviceArray(context, check_shape(shape, "zeros"), dtype)
    made._set(0)
    return made


def from_host(context: Context, array: NDArray, dtype: str | None = None) -> DeviceArray:
    """Copy a host array to the device; see :meth:`Device.from_host`."""
    name = dtype or dtype_name(np.asarray(array).dtype)
    source = _stored(array, name)
    made = DeviceArray(context, check_shape(source.shape, "from_host"), name)
    made._write(source)
    return made


def _stored(array: NDArray, dtype: str) -> NDArray:
    """A host array in the storage of a dtype, contiguous; float32 is rounded to smaller floats."""
    source = np.asarray(array)
    if source.dtype == np.float32 and dtype in ("float16", "bfloat16", E4M3):
        source = from_float32(source, dtype)
    if source.dtype != numpy_dtype(dtype):
        raise ShapeError(f"host array is {source.dtype}; {dtype} is stored as {numpy_dtype(dtype)}")
    return np.ascontiguousarray(source).reshape(source.shape)


class _HostView:
    """Lets NumPy see pinned memory and keeps the owner alive for as long as NumPy does."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "shape": shape,
            "typestr": numpy_dtype(dtype).str,
            "data": (address, False),
            "version": 3,
        }


class PinnedArray:
    """Page-locked host memory that the device reads and writes at a fixed address.

    Attributes
    ----------
    array : ndarray
        NumPy view, zeroed at first. It keeps the memory alive, also after :meth:`close`.
    shape : tuple of int
    dtype : str
    """

    __slots__ = (
        "__weakref__",
        "_allocation",
        "_device_pointer",
        "_offset",
        "array",
        "context",
        "dtype",
        "shape",
    )

    def __init__(self, context: Context, shape: int | tuple[int, ...], dtype: str) -> None:
        self.context = context
        self.shape = check_shape(shape, "PinnedArray")
        self.dtype = dtype
        nbytes = _nbytes(self.shape, dtype, "PinnedArray")
        self._allocation = Allocation(
            _native.ResourceKind.PINNED_MEMORY, nbytes, f"PinnedArray {self.shape} {dtype}"
        )
        host = self._allocation.address
        self._device_pointer = int(call(cu.cuMemHostGetDevicePointer, host, 0))
        self._offset = 0
        self.array = np.asarray(_HostView(host, self.shape, dtype, self._allocation.resource))
        self.array.fill(0)

    def part(self, first: int, shape: tuple[int, ...]) -> PinnedArray:
        """View the elements from `first` on, of all that there are; closing closes all."""
        seen = copy(self)
        seen.shape = shape
        seen._offset = self._offset + first * itemsize(self.dtype)
        seen._device_pointer += seen._offset - self._offset
        seen.array = self.array.reshape(-1)[first : first + math.prod(shape)].reshape(shape)
        return seen

    @property
    def host_ptr(self) -> int:
        """Host address."""
        return self._allocation.resource.handle + self._offset

    @property
    def ptr(self) -> int:
        """Device address of the same memory."""
        _ = self._allocation.resource
        return self._device_pointer

    @property
    def owner(self) -> object:
        """What must be kept alive while the address is in use."""
        return self._allocation.resource

    def argument(self) -> tuple[int, object]:
        """Return device address and owner, for a kernel's pointer parameter."""
        return self._device_pointer, self._allocation.resource

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def span(self) -> Span:
        """Return the bytes of this array, for copies and fills."""
        return Span(True, self.host_ptr, self.nbytes, self.owner)

    def close(self) -> None:
        """Drop the memory; it is freed once no NumPy view and no graph uses it."""
        self.array = np.empty(0, numpy_dtype(self.dtype))
        self._allocation.close()

    def __repr__(self) -> str:
        return f"<PinnedArray {self.shape} {self.dtype}>"


def check_byte(byte: int) -> int:
    """Return a fill value as an int in 0..255, or raise ShapeError."""
    if not isinstance(byte, int | np.integer) or not 0 <= byte <= 255:
        raise ShapeError(f"a fill value is one byte, 0 to 255, not {byte!r}")
    return int(byte)
