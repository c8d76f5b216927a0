"""Device arrays and pinned host arrays: contiguous, typed, reference-counted.

Memory is freed after its last user is gone. Its users are the array, its views, and the graphs
whose nodes use its address. Garbage collection may run in a host function, where the driver must
not be called. Finalizers therefore do not free memory but pass it to a reaper thread.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.dtypes import E4M3, dtype_name, from_float32, itemsize, numpy_dtype
from graft.cudagraph.errors import DeviceError, ShapeError
from graft.native import _native

CLOSE_LIMIT_S = 10.0
OUT_OF_MEMORY = 2
#: Every array must have fewer bytes than this.
MAX_BYTES = 1 << 63
HostBuffer = ctypes.Array[ctypes.c_ubyte]


class Span(NamedTuple):
    """A contiguous range of pinned host memory or device memory that a copy reads or writes.

    `address` is a host address for pinned memory, otherwise a device address. `owner` keeps the
    memory alive.
    """

    pinned: bool
    address: int
    nbytes: int
    owner: object


def check_shape(shape: int | tuple[int, ...], subject: str) -> tuple[int, ...]:
    """Return a shape as a tuple of positive ints. An int is the size of a one-dimensional array.

    An invalid size raises ShapeError; `subject` names the array or function in the message.
    """
    dims = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    for axis, size in enumerate(dims):
        if not isinstance(size, int | np.integer) or size < 1:
            raise ShapeError(
                f"{subject}: dimension {axis} of shape {dims} must be a positive integer"
            )
    return tuple(int(size) for size in dims)


def _checked_nbytes(shape: tuple[int, ...], dtype: str, subject: str) -> int:
    nbytes = math.prod(shape) * itemsize(dtype)
    if nbytes >= MAX_BYTES:
        raise ShapeError(f"{subject} {shape} of {dtype} has {nbytes} bytes, more than any device")
    return nbytes


class Allocation:
    """One memory allocation of the driver: DEVICE_MEMORY or PINNED_MEMORY of `nbytes` bytes."""

    __slots__ = ("_resource", "address", "description", "nbytes")

    def __init__(self, kind: _native.ResourceKind, nbytes: int, description: str) -> None:
        try:
            address = _allocate(kind, nbytes)
        except DeviceError as error:
            # The reaper may not have freed the memory of dropped arrays yet. Wait for it and retry.
            if error.code != OUT_OF_MEMORY or not _native.flush(CLOSE_LIMIT_S):
                raise
            address = _allocate(kind, nbytes)
        self._resource: _native.Resource | None = _native.Resource(kind, address)
        self.address = address
        self.nbytes = nbytes
        self.description = description

    @property
    def resource(self) -> _native.Resource:
        """Owner of the memory; users of the address must keep it alive."""
        if self._resource is None:
            raise DeviceError(f"{self.description} is closed")
        return self._resource

    def close(self) -> None:
        """Release the memory. Wait until it is freed, unless a graph still uses it."""
        self._resource = None
        _native.flush(CLOSE_LIMIT_S)


def _allocate(kind: _native.ResourceKind, nbytes: int) -> int:
    if kind == _native.ResourceKind.PINNED_MEMORY:
        flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
        return int(call(cu.cuMemHostAlloc, nbytes, flags))
    return int(call(cu.cuMemAlloc, nbytes))


class DeviceArray:
    """A C-contiguous array in device memory.

    Created by :meth:`Device.empty`, :meth:`Device.zeros` and :meth:`Device.from_host`. Indexing and
    slicing the leading axis and :meth:`reshape` return views that share the memory. `dtype` is the
    name of the element type, see :mod:`graft.cudagraph.driver.dtypes`.
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
        nbytes = _checked_nbytes(self.shape, dtype, "DeviceArray")
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
        """Owner of the memory; users of the address must keep it alive."""
        return self._allocation.resource

    def argument(self) -> tuple[int, object]:
        """Return the device address to pass to a kernel, and the object that owns the memory."""
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
        """Return the address range of this array, for a copy node or a copy call."""
        return Span(False, self.ptr, self.nbytes, self.owner)

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("a DeviceArray without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[DeviceArray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: int | slice) -> DeviceArray:
        """Return a view of one entry along the leading axis, or of a slice with step 1."""
        length = len(self)
        row = self.nbytes // length
        if isinstance(key, slice):
            start, stop, step = key.indices(length)
            if step != 1 or stop <= start:
                raise ShapeError(
                    f"slice {key} of an axis of {length} is empty or its step is not 1"
                )
            shape = (stop - start, *self.shape[1:])
        else:
            try:
                index = operator.index(key)
            except TypeError:
                raise ShapeError(
                    f"index {key!r} is not an int or a slice: only the leading axis can be indexed"
                ) from None
            if not -length <= index < length:
                raise ShapeError(f"index {index} is out of range for an axis of {length}")
            start = index % length
            shape = self.shape[1:]
        return self._view(shape, self._offset + start * row)

    def reshape(self, *shape: int | tuple[int, ...]) -> DeviceArray:
        """Return a view with another shape; one dimension may be -1."""
        requested = shape
        if len(shape) == 1 and isinstance(shape[0], tuple):
            requested = shape[0]
        dims = [operator.index(size) for size in requested]  # type: ignore[arg-type]
        if dims.count(-1) == 1:
            known = math.prod(size for size in dims if size != -1)
            dims[dims.index(-1)] = self.size // known if known > 0 else 0
        if math.prod(dims) != self.size or any(size < 1 for size in dims):
            raise ShapeError(
                f"{self.size} elements of shape {self.shape} cannot be reshaped to {requested}"
            )
        return self._view(tuple(dims), self._offset)

    def _view(self, shape: tuple[int, ...], offset: int) -> DeviceArray:
        return DeviceArray(self.context, shape, self.dtype, self._allocation, offset)

    def to_host(self) -> NDArray:
        """Wait until the device is idle, then return a host copy in the storage type of `dtype`."""
        out = np.empty(self.shape, numpy_dtype(self.dtype))
        self.context.synchronize()
        self.context.transfer(
            (self.owner, out), cu.cuMemcpyDtoHAsync, out.ctypes.data, self.ptr, self.nbytes
        )
        return out

    def copy_from(self, array: NDArray) -> None:
        """Wait until the device is idle, then overwrite this array with a host array.

        The host array must have the shape of this array and the storage type of its dtype. If the
        dtype is an 8- or 16-bit float, the host array may also be float32; its values are then
        rounded to nearest even.
        """
        source = _to_storage(array, self.dtype)
        if source.shape != self.shape:
            raise ShapeError(f"host array has shape {source.shape}, device array {self.shape}")
        self.context.synchronize()
        self._write(source)

    def _write(self, source: NDArray) -> None:
        self.context.transfer(
            (self.owner, source), cu.cuMemcpyHtoDAsync, self.ptr, source.ctypes.data, self.nbytes
        )

    def fill(self, byte: int = 0) -> None:
        """Wait until the device is idle, then set every byte of the array to `byte`."""
        value = check_byte(byte)
        self.context.synchronize()
        self._set(value)

    def _set(self, value: int) -> None:
        self.context.transfer((self.owner,), cu.cuMemsetD8Async, self.ptr, value, self.nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Description of the array for CuPy, Numba and torch.

        Types that NumPy lacks are described as the unsigned integers that store their bits.
        """
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
        """Wait until the device is idle, then export the array through CuPy without a copy.

        Types that NumPy lacks are exported as the unsigned integers that store their bits. Memory
        of the soft device cannot be exported and raises BufferError.
        """
        if self.context.kind == "soft":
            raise BufferError("soft-device memory cannot be exported: use DeviceArray.to_host()")
        import cupy

        self.context.synchronize()
        return cupy.asarray(self).__dlpack__(**options)

    def close(self) -> None:
        """Close the array and its views, and free the memory.

        Memory that a graph still uses is freed after the graph. A view cannot be closed; close the
        array that allocated the memory.
        """
        if not self._is_base:
            raise ShapeError("a view cannot be closed; close the array that allocated the memory")
        self._allocation.close()

    def __repr__(self) -> str:
        return f"<DeviceArray {self.shape} {self.dtype}>"


def zeros(context: Context, shape: int | tuple[int, ...], dtype: str) -> DeviceArray:
    """Allocate an array of zeros."""
    numpy_dtype(dtype)
    array = DeviceArray(context, check_shape(shape, "zeros"), dtype)
    array._set(0)
    return array


def from_host(context: Context, array: NDArray, dtype: str | None = None) -> DeviceArray:
    """Copy a host array to the device; see :meth:`Device.from_host`."""
    name = dtype or dtype_name(np.asarray(array).dtype)
    source = _to_storage(array, name)
    out = DeviceArray(context, check_shape(source.shape, "from_host"), name)
    out._write(source)
    return out


def _to_storage(array: NDArray, dtype: str) -> NDArray:
    """Return a contiguous host array in the storage type of ``dtype``.

    float32 values are rounded if ``dtype`` is a smaller float type.
    """
    source = np.asarray(array)
    if source.dtype == np.float32 and dtype in ("float16", "bfloat16", E4M3):
        source = from_float32(source, dtype)
    if source.dtype != numpy_dtype(dtype):
        raise ShapeError(f"host array is {source.dtype}; {dtype} is stored as {numpy_dtype(dtype)}")
    return np.ascontiguousarray(source).reshape(source.shape)


def _host_buffer(address: int, nbytes: int, owner: object) -> HostBuffer:
    """Return a ctypes array over `nbytes` bytes of host memory that keeps ``owner`` alive."""
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]
    return buffer


class PinnedArray:
    """An array in page-locked host memory that the device can read and write.

    The array is zeroed when it is allocated. The ctypes array `buffer` contains its bytes, and
    `array` is a NumPy view of them. Both, and everything that is created from them, keep the memory
    alive, even after :meth:`close`. `dtype` is the name of the element type, see
    :mod:`graft.cudagraph.driver.dtypes`.
    """

    __slots__ = (
        "__weakref__",
        "_allocation",
        "_device_pointer",
        "_offset",
        "array",
        "buffer",
        "context",
        "dtype",
        "shape",
    )

    def __init__(self, context: Context, shape: int | tuple[int, ...], dtype: str) -> None:
        self.context = context
        self.shape = check_shape(shape, "PinnedArray")
        self.dtype = dtype
        nbytes = _checked_nbytes(self.shape, dtype, "PinnedArray")
        self._allocation = Allocation(
            _native.ResourceKind.PINNED_MEMORY, nbytes, f"PinnedArray {self.shape} {dtype}"
        )
        host = self._allocation.address
        self._device_pointer = int(call(cu.cuMemHostGetDevicePointer, host, 0))
        self._offset = 0
        self.buffer = _host_buffer(host, nbytes, self._allocation.resource)
        self.array = np.frombuffer(memoryview(self.buffer), numpy_dtype(dtype)).reshape(self.shape)
        self.array.fill(0)

    def view(self, first: int, shape: tuple[int, ...]) -> PinnedArray:
        """Return a view of the elements from index `first` of the flattened array.

        Closing a view closes the whole array.
        """
        view = copy(self)
        offset = first * itemsize(self.dtype)
        view.shape = shape
        view._offset += offset
        view._device_pointer += offset
        view.buffer = (ctypes.c_ubyte * view.nbytes).from_buffer(self.buffer, offset)
        elements = self.array.reshape(-1)[first : first + math.prod(shape)]
        view.array = elements.reshape(shape)
        return view

    @property
    def host_ptr(self) -> int:
        """Host address of the first element."""
        return self._allocation.resource.handle + self._offset

    @property
    def ptr(self) -> int:
        """Device address of the first element."""
        _ = self._allocation.resource
        return self._device_pointer

    @property
    def owner(self) -> object:
        """Owner of the memory; users of the address must keep it alive."""
        return self._allocation.resource

    def argument(self) -> tuple[int, object]:
        """Return the device address to pass to a kernel, and the object that owns the memory."""
        return self._device_pointer, self._allocation.resource

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def span(self) -> Span:
        """Return the address range of this array, for a copy node or a copy call."""
        return Span(True, self.host_ptr, self.nbytes, self.owner)

    def close(self) -> None:
        """Release the memory. It is freed once no view of the host buffer and no graph uses it."""
        self.buffer = (ctypes.c_ubyte * 0)()
        self.array = np.empty(0, numpy_dtype(self.dtype))
        self._allocation.close()

    def __repr__(self) -> str:
        return f"<PinnedArray {self.shape} {self.dtype}>"


def check_byte(byte: int) -> int:
    """Return a fill value as an int; raise ShapeError unless it is 0 to 255."""
    if not isinstance(byte, int | np.integer) or not 0 <= byte <= 255:
        raise ShapeError(f"a fill value must be one byte, 0 to 255, not {byte!r}")
    return int(byte)
