"""Arrays of other libraries: DLPack, ``__cuda_array_interface__`` and the buffer protocol."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graft.cudagraph.driver import dlpack
from graft.cudagraph.driver.context import wait_streams
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.dtypes import dtype_name, itemsize
from graft.cudagraph.driver.held import ForeignMemory, new_event
from graft.cudagraph.errors import ShapeError
from graft.native import _native

#: The CUmemorytype of device memory and managed memory.
DEVICE_MEMORY = 2


class ForeignArray(NamedTuple):
    """An array of another library.

    Attributes
    ----------
    on_host
        Whether the memory is pinned or pageable host memory.
    address
        Host address if `on_host`, otherwise device address.
    device_address
        Address for kernels; None for pageable host memory.
    strides
        Strides in bytes; None if the array is C-contiguous.
    writable
        Whether the array may be written.
    memory
        Owner of the memory.
    """

    on_host: bool
    address: int
    device_address: int | None
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    writable: bool
    memory: ForeignMemory

    @property
    def nbytes(self) -> int:
        """Number of bytes of the elements."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def rows(self, user: str) -> tuple[int, int]:
        """Return the number of rows, each contiguous, and their distance in bytes.

        A C-contiguous array has one row. ShapeError, which names the function `user`, is raised if
        the array does not consist of rows of the same distance, as a part of a matrix does.
        """
        if self.strides is None:
            return 1, self.nbytes
        width = itemsize(self.dtype)
        rows = 1
        pitch = 0
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size == 1 or (pitch == 0 and stride == width):
                width *= size
            elif pitch == 0 and stride > width:
                rows = size
                pitch = stride
            elif pitch and stride == rows * pitch:
                rows *= size
            else:
                raise ShapeError(
                    f"{user} cannot be an array of shape {self.shape} {self.dtype} with strides "
                    f"of {self.strides} bytes: only contiguous arrays and parts of matrices; make "
                    "a contiguous copy first"
                )
        return rows, pitch

    def check_contiguous(self, user: str) -> None:
        """Raise ShapeError, which names the function `user`, unless the array is C-contiguous."""
        if self.strides is not None:
            raise ShapeError(
                f"{user} needs a C-contiguous array, but this array of shape {self.shape} "
                f"{self.dtype} has strides of {self.strides} bytes; make a contiguous copy first"
            )


def read_foreign(array: Any, user: str, stream: int | None = None) -> ForeignArray | None:
    """Describe an array of another library; return None if the object is not an array.

    If the array names a stream (``__cuda_array_interface__``, version 3), or its library makes
    consumers wait for a stream (DLPack), later work on the CUstream `stream` runs after the work
    that is enqueued there. Without `stream`, the call returns after the work that is enqueued there
    has finished.

    Parameters
    ----------
    user
        Function that takes the array, for error messages.
    stream
        CUstream on which the array will be used; None if that is not known.
    """
    if isinstance(array, np.ndarray):
        return _from_numpy(array, user)
    if hasattr(type(array), "__dlpack__") and hasattr(type(array), "__dlpack_device__"):
        return _from_dlpack(array, user, stream)
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
    except Exception as error:  # such as that of a tensor that requires gradients
        raise ShapeError(f"{user}: {_unreadable(array)}: {error}") from error
    if interface is not None:
        return _from_interface(array, interface, user, stream)
    if not hasattr(array, "__array_interface__"):
        try:
            array = memoryview(array)
        except TypeError:
            return None
    return _from_numpy(np.asarray(array), user)


def _from_numpy(array: NDArray, user: str) -> ForeignArray:
    if isinstance(array, np.ma.MaskedArray):
        raise ShapeError(f"{user} takes no masked array")
    address = array.ctypes.data
    strides = None if array.flags.c_contiguous else array.strides
    dtype = _dtype_of(array.dtype, user)
    return _on_host(address, array.shape, strides, dtype, array.flags.writeable, array)


def _on_host(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: str,
    writable: bool,
    source: object,
) -> ForeignArray:
    """Describe an array at a host address, whose memory may be pageable, pinned or managed."""
    pointer = _query(address)
    on_host = pointer.memory_type != DEVICE_MEMORY
    device_address = pointer.device_address if pointer.memory_type else None
    memory = ForeignMemory(address, source)
    return ForeignArray(on_host, address, device_address, shape, strides, dtype, writable, memory)


def _from_dlpack(array: Any, user: str, stream: int | None) -> ForeignArray:
    try:
        device, _ = array.__dlpack_device__()
    except Exception as error:
        raise ShapeError(f"{user}: {_not_exported(array)}: {error}") from error
    on_device = device in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    waiting = None
    if not on_device:
        stream = None
    elif stream is None:
        # The exporter makes this stream wait for its own work, and the host waits for this stream.
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        waiting = _native.Resource(_native.ResourceKind.STREAM, int(call(cu.cuStreamCreate, flags)))
        stream = waiting.handle
    try:
        found = dlpack.request(array, stream)
    except ShapeError:
        raise
    except Exception as error:  # of the exporter
        raise ShapeError(f"{user}: {_not_exported(array)}: {error}") from error
    if waiting is not None:
        wait_streams([waiting.handle], None, "the stream of an array")
    strides = _strides(found.shape, found.strides, found.dtype)
    source = found.capsule
    if not on_device:
        if found.device not in (dlpack.CPU, dlpack.CUDA_HOST):
            raise ShapeError(
                f"{user}: {type(array).__name__} is on device type {found.device} of DLPack, not "
                "on a CUDA device or in host memory"
            )
        return _on_host(found.address, found.shape, strides, found.dtype, found.writable, source)
    address = _device_address(found.address, found.shape, user, array)
    memory = ForeignMemory(address, source)
    return ForeignArray(
        False, address, address, found.shape, strides, found.dtype, found.writable, memory
    )


def _from_interface(array: Any, interface: Any, user: str, stream: int | None) -> ForeignArray:
    try:
        address, read_only = interface["data"]
        address = operator.index(address or 0)
        shape = tuple(interface["shape"])
        typestr = interface["typestr"]
        strides = interface.get("strides")
        if strides is not None:
            strides = tuple(map(operator.index, strides))
        producer = interface.get("stream")
        if producer is not None:
            producer = operator.index(producer)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ShapeError(
            f"{user}: {_unreadable(array)}: {type(error).__name__}: {error}"
        ) from error
    if not 0 <= address < 1 << 64:
        raise ShapeError(f"{user}: {_unreadable(array)}: the address is {address:#x}")
    if strides is not None and len(strides) != len(shape):
        raise ShapeError(
            f"{user}: {_unreadable(array)}: shape {shape} has {len(shape)} axes, strides {strides} "
            f"have {len(strides)}"
        )
    dtype = _dtype_of(typestr, user)
    if interface.get("mask") is not None:
        raise ShapeError(f"{user} takes no masked array")
    if producer is not None:
        if producer == 0:
            raise ShapeError(f"{user}: stream 0 is not allowed in __cuda_array_interface__")
        if stream is None:
            wait_streams([producer], None, "the stream of an array")
        elif producer != (stream or 1):
            _order(producer, stream)
    address = _device_address(address, shape, user, array)
    strides = _strides(shape, strides, dtype)
    memory = ForeignMemory(address, array)
    return ForeignArray(False, address, address, shape, strides, dtype, not read_only, memory)


def _unreadable(array: object) -> str:
    return f"the __cuda_array_interface__ of {type(array).__name__} cannot be read"


def _not_exported(array: object) -> str:
    return f"{type(array).__name__} cannot be exported with DLPack"


def _dtype_of(dtype: DTypeLike, user: str) -> str:
    try:
        return dtype_name(dtype)
    except ShapeError as error:
        raise ShapeError(f"{user}: {error}") from None


def _strides(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: str
) -> tuple[int, ...] | None:
    """Return strides in bytes, or None if they are those of a C-contiguous array."""
    if strides is None:
        return None
    expected = itemsize(dtype)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return tuple(strides)
        expected *= size
    return None


def _device_address(address: int, shape: tuple[int, ...], user: str, array: Any) -> int:
    """Return the address for kernels; raise ShapeError unless the driver knows the address."""
    if 0 in shape:
        return address  # arrays without elements may have no memory; the caller refuses them
    pointer = _query(address)
    if not pointer.memory_type:
        raise ShapeError(
            f"{user}: {type(array).__name__} is at {address:#x}, which is not memory of this device"
        )
    current = int(call(cu.cuCtxGetDevice))
    if pointer.memory_type == DEVICE_MEMORY and pointer.ordinal != current:
        raise ShapeError(
            f"{user}: {type(array).__name__} is on device {pointer.ordinal}, and this process uses "
            f"device {current}"
        )
    return pointer.device_address or address


class _Pointer(NamedTuple):
    """Attributes of an address. `memory_type` is 0 if the driver does not know the memory."""

    memory_type: int
    device_address: int
    ordinal: int


def _query(address: int) -> _Pointer:
    attributes = cu.CUpointer_attribute
    names = [
        attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        attributes.CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
        attributes.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    ]
    values = call(cu.cuPointerGetAttributes, len(names), names, cu.CUdeviceptr(address))
    return _Pointer(*map(int, values))


def _order(producer: int, consumer: int) -> None:
    """Make later work on the stream `consumer` wait for the work on the stream `producer`."""
    event = new_event()
    call(cu.cuEventRecord, event.handle, producer)
    call(cu.cuStreamWaitEvent, consumer, event.handle, 0)
