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
from numpy.typing import DTypeLike, NDArray

from graft.cudagraph.driver import dlpack
from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.dtypes import E4M3, dtype_name, from_float32, itemsize, numpy_dtype
from graft.cudagraph.driver.foreign import read_foreign
from graft.cudagraph.driver.held import ForeignMemory
from graft.cudagraph.errors import DeviceError, ShapeError
from graft.native import _native

_NO_ARRAY = (
    "needs a DeviceArray, a PinnedArray, or an array of another library with __dlpack__, "
    "__cuda_array_interface__, __array_interface__ or the buffer protocol, not {}"
)
CLOSE_LIMIT_S = 10.0
OUT_OF_MEMORY = 2
#: Types of the integers that describe shapes and launches.
INTEGERS = (int, np.integer)
#: Every array must have fewer bytes than this.
MAX_BYTES = 1 << 63
HostBuffer = ctypes.Array[ctypes.c_ubyte]


class Span(NamedTuple):
    """Host memory or device memory that a copy reads or writes.

    `address` is a host address if `on_host`, otherwise a device address. `owner` keeps the memory
    alive. The memory consists of `rows` rows of ``nbytes // rows`` bytes at a distance of `pitch`
    bytes; a contiguous range has one row.
    """

    on_host: bool
    address: int
    nbytes: int
    owner: object
    rows: int = 1
    pitch: int = 0


def check_shape(shape: int | tuple[int, ...], subject: str) -> tuple[int, ...]:
    """Return a shape as a tuple of positive ints. An int is the size of a one-dimensional array.

    An invalid size raises ShapeError; `subject` names the array or function in the message.
    """
    try:
        dims = (shape,) if isinstance(shape, INTEGERS) else tuple(shape)
    except TypeError:
        raise ShapeError(
            f"{subject}: shape must be a positive integer or a tuple of them, not {shape!r}"
        ) from None
    for axis, size in enumerate(dims):
        if not isinstance(size, INTEGERS) or size < 1:
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
    """One memory allocation: DEVICE_MEMORY or PINNED_MEMORY of `nbytes` bytes."""

    __slots__ = ("_resource", "address", "description", "nbytes")

    def __init__(self, kind: _native.ResourceKind, nbytes: int, description: str) -> None:
        try:
            address = _allocate(kind, nbytes)
        except DeviceError as error:
            # The reaper may not have freed the memory of dropped arrays yet. Wait for it and retry.
            if error.code != OUT_OF_MEMORY or not _native.flush(CLOSE_LIMIT_S):
                raise
            address = _allocate(kind, nbytes)
        self._resource: _native.Resource | ForeignMemory | None = _native.Resource(kind, address)
        self.address = address
        self.nbytes = nbytes
        self.description = description

    @classmethod
    def of_other_library(cls, memory: ForeignMemory, nbytes: int, description: str) -> Allocation:
        """Describe memory that another library allocated; closing it drops the owner."""
        allocation = object.__new__(cls)
        allocation._resource = memory
        allocation.address = memory.handle
        allocation.nbytes = nbytes
        allocation.description = description
        return allocation

    @property
    def resource(self) -> _native.Resource | ForeignMemory:
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

    Created by :meth:`Device.empty`, :meth:`Device.zeros`, :meth:`Device.from_host` and
    :meth:`Device.wrap`. Indexing and slicing the leading axis and :meth:`reshape` return views that
    share the memory. `dtype` is the name of the element type, see
    :mod:`graft.cudagraph.driver.dtypes`.
    """

    __slots__ = ("__weakref__", "_allocation", "_is_base", "_offset", "context", "dtype", "shape")

    def __init__(
        self,
        context: Context,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        allocation: Allocation | None = None,
        offset: int = 0,
    ) -> None:
        self.shape = check_shape(shape, "DeviceArray")
        self.dtype = dtype_name(dtype)
        self.context = context
        nbytes = _checked_nbytes(self.shape, self.dtype, "DeviceArray")
        self._is_base = allocation is None
        self._allocation = allocation or Allocation(
            _native.ResourceKind.DEVICE_MEMORY, nbytes, f"DeviceArray {self.shape} {self.dtype}"
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
        """Description of the array for CuPy, numba-cuda and torch.

        It names no stream, because graft does not record on which streams an array is used. Before
        another library uses the array, wait for these streams, or make the stream of that library
        wait for an :class:`Event`. Types that NumPy lacks are described as the unsigned integers
        that store their bits.
        """
        return {
            "shape": self.shape,
            "typestr": numpy_dtype(self.dtype).str,
            "data": (self.ptr, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (kDLCUDA, ordinal)."""
        return (dlpack.CUDA, self.context.ordinal)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Wait until the device is idle, then export the array without a copy.

        Work on all streams that was enqueued before the call has therefore finished, whatever
        `stream` the consumer uses. With ``stream=-1``, the consumer asks for no synchronization.
        The capsule is unversioned, which consumers of every `max_version` accept.
        """
        _check_export(self, dl_device, copy)
        if stream != -1:
            self.context.synchronize()
        device = self.__dlpack_device__()
        return dlpack.export(device, self.ptr, self.shape, self.dtype, self.owner)

    def __array__(self, *_: Any, **options: Any) -> NDArray:
        """Raise DeviceError: NumPy cannot read device memory."""
        raise DeviceError(f"{self!r} is in device memory: copy it with to_host()")

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


def zeros(context: Context, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
    """Allocate an array of zeros."""
    name = dtype_name(dtype)
    array = DeviceArray(context, check_shape(shape, "zeros"), name)
    array._set(0)
    return array


def from_host(context: Context, array: NDArray, dtype: DTypeLike | None = None) -> DeviceArray:
    """Copy a host array to the device; see :meth:`Device.from_host`."""
    name = dtype_name(np.asarray(array).dtype if dtype is None else dtype)
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
    if source.dtype.name == dtype and source.dtype.isnative:
        source = source.view(numpy_dtype(dtype))  # of a type of the package ml_dtypes
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

    Created by :meth:`Device.pinned`, which zeroes the array, and by :meth:`Device.wrap`. `dtype` is
    the name of the element type, see :mod:`graft.cudagraph.driver.dtypes`.
    """

    __slots__ = (
        "__weakref__",
        "_allocation",
        "_array",
        "_buffer",
        "_device_pointer",
        "_offset",
        "context",
        "dtype",
        "shape",
    )

    def __init__(
        self,
        context: Context,
        shape: int | tuple[int, ...],
        dtype: DTypeLike,
        allocation: Allocation | None = None,
    ) -> None:
        self.context = context
        self.shape = check_shape(shape, "PinnedArray")
        self.dtype = dtype_name(dtype)
        nbytes = _checked_nbytes(self.shape, self.dtype, "PinnedArray")
        self._allocation = allocation or Allocation(
            _native.ResourceKind.PINNED_MEMORY, nbytes, f"PinnedArray {self.shape} {self.dtype}"
        )
        host = self._allocation.address
        self._device_pointer = int(call(cu.cuMemHostGetDevicePointer, host, 0))
        self._offset = 0
        buffer = _host_buffer(host, nbytes, self._allocation.resource)
        elements = np.frombuffer(memoryview(buffer), numpy_dtype(self.dtype))
        self._buffer: ctypes.Array[ctypes.c_ubyte] | None = buffer
        self._array: NDArray | None = elements.reshape(self.shape)
        if allocation is None:
            self.array.fill(0)

    @property
    def buffer(self) -> ctypes.Array[ctypes.c_ubyte]:
        """Bytes of the array.

        `buffer`, `array` and everything that is created from them keep the memory alive, even after
        :meth:`close`. Reading one of the two attributes of a closed array raises DeviceError.
        """
        if self._buffer is None:
            raise DeviceError(f"{self._allocation.description} is closed")
        return self._buffer

    @property
    def array(self) -> NDArray:
        """NumPy view of the array's memory; see `buffer`."""
        if self._array is None:
            raise DeviceError(f"{self._allocation.description} is closed")
        return self._array

    def view(self, first: int, shape: tuple[int, ...]) -> PinnedArray:
        """Return a view of the elements from index `first` of the flattened array.

        Closing a view closes the whole array.
        """
        view = copy(self)
        offset = first * itemsize(self.dtype)
        view.shape = shape
        view._offset += offset
        view._device_pointer += offset
        view._buffer = (ctypes.c_ubyte * view.nbytes).from_buffer(self.buffer, offset)
        elements = self.array.reshape(-1)[first : first + math.prod(shape)]
        view._array = elements.reshape(shape)
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

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray:
        """Return `array`, or a copy of it, for NumPy."""
        return np.array(self.array, dtype=dtype, copy=copy)

    def __buffer__(self, flags: int) -> memoryview:
        """Return the memory of `array`. Python 3.12 and later call this for the buffer protocol."""
        return self.array.data

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (kDLCPU, 0)."""
        return (dlpack.CPU, 0)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Export the array as host memory, without a copy and without waiting for the device."""
        _check_export(self, dl_device, copy)
        if stream is not None:
            raise BufferError("host memory has no stream")
        return dlpack.export((dlpack.CPU, 0), self.host_ptr, self.shape, self.dtype, self.owner)

    def close(self) -> None:
        """Release the memory. It is freed once no view of the host buffer and no graph uses it."""
        self._buffer = self._array = None
        self._allocation.close()

    def __repr__(self) -> str:
        return f"<PinnedArray {self.shape} {self.dtype}>"


Array = DeviceArray | PinnedArray


def _check_export(array: Array, device: tuple[int, int] | None, copy: bool | None) -> None:
    """Raise BufferError if the consumer of a DLPack export wants a copy or another device."""
    if copy:
        raise BufferError(f"{array!r} cannot be copied by __dlpack__: copy the exported array")
    if device is not None and tuple(device) != array.__dlpack_device__():
        raise BufferError(f"{array!r} is not on the DLPack device {tuple(device)}")


def wrap(context: Context, array: Any) -> Array:
    """Return a view of an array of another library; see :meth:`Device.wrap`."""
    if isinstance(array, DeviceArray | PinnedArray):
        return array
    user = "wrap()"
    found = read_foreign(array, user)
    if found is None:
        raise ShapeError(f"{user} {_NO_ARRAY.format(type(array).__name__)}")
    found.check_contiguous(user)
    if not found.writable:
        raise ShapeError(
            f"{user} cannot protect a read-only array from writes; pass it to kernel() as the "
            "argument of a const pointer, or to copy() as the source"
        )
    shape = check_shape(found.shape, user)
    if found.on_host and found.device_address is None:
        raise ShapeError(
            f"{user}: {type(array).__name__} is in pageable host memory, which kernels cannot use; "
            "copy it with from_host(), or to an array of pinned()"
        )
    description = f"wrapped {type(array).__name__}"
    allocation = Allocation.of_other_library(found.memory, found.nbytes, description)
    if found.on_host:
        return PinnedArray(context, shape, found.dtype, allocation)
    wrapped = DeviceArray(context, shape, found.dtype, allocation)
    wrapped._is_base = True
    return wrapped


def copy_span(array: Any, role: str, writes: bool, stream: int | None) -> Span:
    """Return the memory of an array that a copy or fill reads or writes.

    Parameters
    ----------
    array
        Array of graft or of another library; pageable host memory is allowed.
    role
        Function and parameter, for error messages.
    writes
        Whether the operation writes to the array.
    stream
        CUstream of the operation, or None, see
        :func:`~graft.cudagraph.driver.foreign.read_foreign`.
    """
    if isinstance(array, DeviceArray | PinnedArray):
        return array.span()
    found = read_foreign(array, role, stream)
    if found is None:
        raise ShapeError(f"{role} {_NO_ARRAY.format(type(array).__name__)}")
    check_shape(found.shape, role)
    rows, pitch = found.rows(role)
    if writes and not found.writable:
        raise ShapeError(f"{role} must be writable, but this {type(array).__name__} is read-only")
    return Span(found.on_host, found.address, found.nbytes, found.memory, rows, pitch)


def check_byte(byte: int) -> int:
    """Return a fill value as an int; raise ShapeError unless it is 0 to 255."""
    if not isinstance(byte, int | np.integer) or not 0 <= byte <= 255:
        raise ShapeError(f"a fill value must be one byte, 0 to 255, not {byte!r}")
    return int(byte)
