"""DLPack export of device arrays: a minimal producer of versioned-less capsules.

Layout of DLManagedTensor as published in dlpack.h (version 0.x, which every consumer accepts).
"""

from __future__ import annotations

import ctypes

DL_CUDA = 2
#: (type code, bits) of DLDataType: 0 int, 1 unsigned, 2 IEEE float, 4 bfloat, 10 E4M3.
_TYPES = {
    "float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32),
    "uint32": (1, 32), "int64": (0, 64), "uint64": (1, 64), "uint8": (1, 8),
    "float8_e4m3fn": (10, 8),
}  # fmt: skip
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


#: Exported tensors by address: what keeps the struct, the shape and the memory alive.
_exported: dict[int, tuple[_Managed, object, object]] = {}


@_Deleter
def _delete(address: int) -> None:
    _exported.pop(address, None)


_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _capsule_dropped(capsule: int) -> None:
    # A consumer renames the capsule and calls the deleter itself; nobody consumed this one.
    if _is_valid(capsule, _NAME):
        _delete(_pointer(capsule, _NAME))


def export(
    address: int, shape: tuple[int, ...], dtype: str, ordinal: int, owner: object
) -> object:
    """Return a ``dltensor`` capsule of contiguous device memory, which keeps ``owner``."""
    ndim = len(shape)
    sizes = (ctypes.c_int64 * ndim)(*shape)
    code, bits = _TYPES[dtype]
    managed = _Managed()
    managed.tensor = _Tensor(address, DL_CUDA, ordinal, ndim, code, bits, 1, sizes, None, 0)
    managed.deleter = _delete
    key = ctypes.addressof(managed)
    _exported[key] = (managed, sizes, owner)
    return _new(key, _NAME, ctypes.cast(_capsule_dropped, ctypes.c_void_p))
