"""Arrays of other libraries: DLPack, ``__cuda_array_interface__`` and the buffer protocol."""

from __future__ import annotations

import math
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

#: Values of CUmemorytype that cuPointerGetAttribute returns.
HOST_MEMORY = 1
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

    def check_contiguous(self, user: str) -> None:
        """Raise ShapeError, which names the function `user`, unless the array is C-contiguous."""
        if self.strides is not None:
            raise ShapeError(
                f"{user} needs a C-contiguous array, but this array of shape {self.shape} "
                f"{self.dtype} has strides of {self.strides} bytes; make a contiguous copy first"
            )


def read_foreign(array: Any, user: str, stream: int | None = None) -> ForeignArray | None:
    """Describe an array of another library; return None if the object is not an array.

    The ordering with earlier work on the array is as follows. If the array exports a stream
    (``__cuda_array_interface__``, version 3) or orders itself after one (DLPack), the work that is
    enqueued there precedes the work on the CUstream `stream`. Without `stream`, the call returns
    after that work has finished.

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
    interface = getattr(array, "__cuda_array_interface__", None)
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
    kind = _attribute("MEMORY_TYPE", address)
    on_host = kind != DEVICE_MEMORY
    device_address = None
    if kind is not None:
        device_address = _attribute("DEVICE_POINTER", address)
    memory = ForeignMemory(address, source)
    return ForeignArray(on_host, address, device_address, shape, strides, dtype, writable, memory)


def _from_dlpack(array: Any, user: str, stream: int | None) -> ForeignArray:
    device, _ = array.__dlpack_device__()
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
    except (BufferError, RuntimeError) as error:
        raise ShapeError(f"{user}: {type(array).__name__} cannot be exported: {error}") from error
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
    address, read_only = interface["data"]
    shape = tuple(interface["shape"])
    dtype = _dtype_of(interface["typestr"], user)
    if interface.get("mask") is not None:
        raise ShapeError(f"{user} takes no masked array")
    producer = interface.get("stream")
    if producer is not None:
        if producer == 0:
            raise ShapeError(f"{user}: stream 0 is not allowed in __cuda_array_interface__")
        if stream is None:
            wait_streams([producer], None, "the stream of an array")
        elif producer != (stream or 1):
            _order(producer, stream)
    address = _device_address(address or 0, shape, user, array)
    strides = _strides(shape, interface.get("strides"), dtype)
    memory = ForeignMemory(address, array)
    return ForeignArray(False, address, address, shape, strides, dtype, not read_only, memory)


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
    kind = _attribute("MEMORY_TYPE", address)
    if kind is None:
        raise ShapeError(
            f"{user}: {type(array).__name__} is at {address:#x}, which is not memory of this device"
        )
    ordinal = _attribute("DEVICE_ORDINAL", address)
    current = int(call(cu.cuCtxGetDevice))
    if kind == DEVICE_MEMORY and ordinal != current:
        raise ShapeError(
            f"{user}: {type(array).__name__} is on device {ordinal}, and this process uses device "
            f"{current}"
        )
    if kind == HOST_MEMORY:
        return int(_attribute("DEVICE_POINTER", address) or address)
    return address


def _attribute(name: str, address: int) -> int | None:
    """Return an attribute of a pointer, or None if the driver does not know the memory."""
    kind = getattr(cu.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    call(cu.cuCtxGetDevice)  # makes the context current, and raises errors of the device
    code, value = cu.cuPointerGetAttribute(kind, cu.CUdeviceptr(address))
    if int(code) != 0 or value is None:
        return None
    return int(value)


def _order(producer: int, consumer: int) -> None:
    """Make later work on the stream `consumer` wait for the work on the stream `producer`."""
    event = new_event()
    call(cu.cuEventRecord, event.handle, producer)
    call(cu.cuStreamWaitEvent, consumer, event.handle, 0)
