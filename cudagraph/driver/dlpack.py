"""DLPack: export of graft's arrays as capsules, and reading of the capsules of other libraries.

The structures are those of ``dlpack.h``, version 1.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

from graft.cudagraph.driver.dtypes import E4M3
from graft.cudagraph.errors import ShapeError
from graft.native import _native

CPU = 1
CUDA = 2
CUDA_HOST = 3
CUDA_MANAGED = 13
#: Version that :func:`request` asks for, as (major, minor).
VERSION = (1, 0)
READ_ONLY = 1

#: Type codes of DLPack: signed int, unsigned int, float, bfloat16, complex, bool and float8_e4m3fn.
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL, _E4M3 = 0, 1, 2, 4, 5, 6, 10
#: Type code and bits by dtype name.
_TYPES = {
    "bool": (_BOOL, 8),
    "int8": (_INT, 8),
    "int16": (_INT, 16),
    "int32": (_INT, 32),
    "int64": (_INT, 64),
    "uint8": (_UINT, 8),
    "uint16": (_UINT, 16),
    "uint32": (_UINT, 32),
    "uint64": (_UINT, 64),
    "float16": (_FLOAT, 16),
    "float32": (_FLOAT, 32),
    "float64": (_FLOAT, 64),
    "bfloat16": (_BFLOAT, 16),
    "complex64": (_COMPLEX, 64),
    E4M3: (_E4M3, 8),
}
_NAMES = {code: name for name, code in _TYPES.items()}
_CAPSULE = b"dltensor"
_CAPSULE_VERSIONED = b"dltensor_versioned"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _VersionedTensor(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def _python_function(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_capsule_is_valid = _python_function(
    "PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p
)
_capsule_pointer = _python_function(
    "PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p
)

# Exported tensors by the address of their structure: the structure, its sizes, and the owner of the
# memory. The call of the deleter removes the entry.
_exported: dict[int, tuple[object, ...]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int, exported: dict[int, tuple[object, ...]] = _exported) -> None:
    exported.pop(address, None)


def export(
    device: tuple[int, int], address: int, shape: tuple[int, ...], dtype: str, owner: object
) -> object:
    """Return a DLPack capsule of a C-contiguous array.

    `device` is the pair of device type and ordinal. `owner` is kept alive until the consumer calls
    the deleter, or until the capsule is freed without having been consumed.
    """
    code, bits = _TYPES[dtype]
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    strides = (ctypes.c_int64 * len(shape))(
        *(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    )
    managed = _ManagedTensor()
    tensor = managed.tensor
    tensor.data = address
    tensor.device = _Device(*device)
    tensor.ndim = len(shape)
    tensor.dtype = _DataType(code, bits, 1)
    tensor.shape = sizes
    tensor.strides = strides
    managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
    key = ctypes.addressof(managed)
    _exported[key] = (managed, sizes, strides, owner)
    return _native.new_dltensor_capsule(key)


class Contents(NamedTuple):
    """Contents of a DLPack capsule. `strides` are in bytes."""

    device: int
    ordinal: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    writable: bool
    capsule: object


def request(array: Any, stream: int | None) -> Contents:
    """Return the contents of the capsule that an array exports.

    The capsule keeps the memory alive: it is not consumed, and calls the exporter's deleter when it
    is freed. `stream` is the CUstream on which the memory is used next; None for host memory.
    """
    options: dict[str, Any] = {}
    if stream is not None:
        options["stream"] = stream or 1  # 0 is not allowed; 1 is the legacy default stream
    try:
        capsule = array.__dlpack__(max_version=VERSION, **options)
    except TypeError:  # the exporter implements DLPack before version 1
        capsule = array.__dlpack__(**options)
    writable = True
    if _capsule_is_valid(capsule, _CAPSULE_VERSIONED):
        address = _capsule_pointer(capsule, _CAPSULE_VERSIONED)
        versioned = _VersionedTensor.from_address(address)
        tensor = versioned.tensor
        writable = not versioned.flags & READ_ONLY
    elif not _capsule_is_valid(capsule, _CAPSULE):
        raise BufferError(f"__dlpack__ returned no unused capsule, but {capsule!r}")
    else:
        tensor = _ManagedTensor.from_address(_capsule_pointer(capsule, _CAPSULE)).tensor
    element = tensor.dtype
    dtype = _NAMES.get((element.code, element.bits))
    if dtype is None or element.lanes != 1:
        raise ShapeError(
            f"DLPack type {element.code} of {element.bits} bits and {element.lanes} lanes is not "
            f"one of {', '.join(_TYPES)}"
        )
    strides = None
    if tensor.strides:
        strides = tuple(tensor.strides[axis] * element.bits // 8 for axis in range(tensor.ndim))
    return Contents(
        tensor.device.kind,
        tensor.device.ordinal,
        (tensor.data or 0) + tensor.byte_offset,
        tuple(tensor.shape[axis] for axis in range(tensor.ndim)),
        strides,
        dtype,
        writable,
        capsule,
    )
