"""Element types by name, including bfloat16 and float8, which NumPy lacks.

Host arrays of these two types have an unsigned integer dtype and contain the bits of the values.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graft.cudagraph.errors import ShapeError

#: 8-bit float with four exponent and three mantissa bits. It has no infinity, one NaN per sign, and
#: a maximum of 448.
E4M3 = "float8_e4m3fn"
#: Unsigned integer types that store the bits of types that NumPy lacks.
_STORED_AS_BITS = {"bfloat16": "uint16", E4M3: "uint8"}
_NAMES = (
    *("float16", "bfloat16", E4M3, "float32", "float64", "complex64", "bool"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
)
#: NumPy storage type by name.
DTYPES: dict[str, np.dtype] = {name: np.dtype(_STORED_AS_BITS.get(name, name)) for name in _NAMES}


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy storage type of a dtype name; raise ShapeError for an unknown name."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise ShapeError(f"dtype {name!r} is not one of {', '.join(DTYPES)}") from None


def itemsize(name: str) -> int:
    """Return the size of one element in bytes."""
    return numpy_dtype(name).itemsize


def ctypes_type(name: str) -> Any:
    """Return the ctypes type of one element.

    For a float type that ctypes lacks, this is the unsigned integer of the same size. A complex
    number is an array of two floats.
    """
    dtype = numpy_dtype(name)
    if dtype == np.float16:
        return ctypes.c_uint16
    if dtype == np.complex64:
        return ctypes.c_float * 2
    return np.ctypeslib.as_ctypes_type(dtype)


def dtype_name(dtype: DTypeLike) -> str:
    """Return graft's name of an element type, which is given by this name or as a NumPy dtype.

    NumPy dtypes of the package ml_dtypes, such as ``ml_dtypes.bfloat16``, have graft's names.
    ShapeError is raised if the type is not supported or has swapped bytes.
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    try:
        found = None if dtype is None else np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES or not found.isnative:
        given = str(dtype) if isinstance(dtype, np.dtype) else dtype
        allowed = f"one of {', '.join(DTYPES)}"
        if found is not None and found.name in DTYPES:
            allowed = "in native byte order"
        raise ShapeError(f"dtype {given!r} is not {allowed}")
    return found.name


def to_float32(array: NDArray, dtype: str) -> NDArray[np.float32]:
    """Convert an array in the storage type of ``dtype`` to float32; exact for all float types."""
    if array.dtype != numpy_dtype(dtype):
        raise ShapeError(f"a {dtype} array is stored as {numpy_dtype(dtype)}, not {array.dtype}")
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == E4M3:
        return _E4M3_VALUES[array]
    return array.astype(np.float32)


def from_float32(array: NDArray, dtype: str) -> NDArray:
    """Convert float32 values to the storage type of ``dtype``, rounding to nearest even.

    NaN stays NaN. Magnitudes beyond the range become infinity, or NaN if the type has no infinity.
    """
    values = np.ascontiguousarray(array, np.float32).reshape(np.shape(array))
    if dtype == E4M3:
        return _to_e4m3(values)
    if dtype == "bfloat16":
        return _to_bfloat16(values)
    with np.errstate(over="ignore"):
        return values.astype(numpy_dtype(dtype))


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    # The upper 16 bits are kept. Adding 0x7fff plus the lowest kept bit carries into the kept bits
    # exactly if rounding to nearest even rounds up. For a NaN the carry could produce infinity or
    # zero. A NaN is therefore truncated and made quiet.
    kept_bits = bits >> 16
    lowest_kept_bit = kept_bits & 1
    rounded = (bits.astype(np.uint64) + 0x7FFF + lowest_kept_bit) >> 16
    quiet_nan = kept_bits | 0x40
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def _to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    bits = values.view(np.uint32)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Subnormal E4M3 values are multiples of 2^-9. Adding 2^14 rounds a float32 to such a multiple,
    # and the low bits of the sum are then the E4M3 code.
    smallest_normal = 121 << 23
    shifted = np.minimum(magnitude, smallest_normal).view(np.float32) + np.float32(1 << 14)
    subnormal = shifted.view(np.uint32) - (141 << 23)
    # Normal values are rounded to nearest even as in _to_bfloat16(), and the exponent is rebased.
    lowest_kept_bit = (magnitude >> 20) & 1
    rounded = magnitude + 0x7FFFF + lowest_kept_bit
    normal = np.minimum((rounded - (120 << 23)) >> 20, 0x7F)
    code = np.where(magnitude < smallest_normal, subnormal, normal)
    return (code | sign).astype(np.uint8)


def _e4m3_values() -> NDArray[np.float32]:
    """Return the float32 values of all 256 E4M3 codes."""
    code = np.arange(256)
    exponent = (code >> 3) & 15
    mantissa = code & 7
    significand = np.where(exponent > 0, 8 + mantissa, mantissa)
    sign = np.where(code & 128, -1.0, 1.0)
    values = sign * np.ldexp(significand, np.maximum(exponent, 1) - 10)
    return np.where(code & 127 == 127, np.nan, values).astype(np.float32)


_E4M3_VALUES = _e4m3_values()
