"""Element types by name, and the floats that NumPy lacks or stores as bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graft.cudagraph.errors import ShapeError

#: Four exponent bits, three of mantissa; no infinity, one NaN of each sign, 448 at most.
E4M3 = "float8_e4m3fn"
#: Name -> NumPy storage. What NumPy lacks is stored as the bits it consists of.
DTYPES: dict[str, np.dtype] = {
    name: np.dtype({"bfloat16": "uint16", E4M3: "uint8"}.get(name, name))
    for name in (
        "float32",
        "float16",
        "bfloat16",
        E4M3,
        "int32",
        "uint32",
        "int64",
        "uint64",
        "uint8",
    )
}


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy storage of a dtype name; ShapeError when the name is unknown."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise ShapeError(f"dtype {name!r} is not one of {', '.join(DTYPES)}") from None


def itemsize(name: str) -> int:
    """Return the bytes of one element."""
    return numpy_dtype(name).itemsize


def dtype_name(dtype: DTypeLike) -> str:
    """Return graft's name of a NumPy dtype; ShapeError when there is none."""
    found = np.dtype(dtype)
    if found.name in DTYPES:
        return found.name
    raise ShapeError(f"NumPy dtype {found.name} is not one of {', '.join(DTYPES)}")


def to_float32(array: NDArray, dtype: str) -> NDArray[np.float32]:
    """Return the values of a storage array as float32; exact for every float dtype here."""
    if array.dtype != numpy_dtype(dtype):
        raise ShapeError(f"a {dtype} array is stored as {numpy_dtype(dtype)}, not {array.dtype}")
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == E4M3:
        return _E4M3_VALUES[array]
    return array.astype(np.float32)


def from_float32(array: NDArray, dtype: str) -> NDArray:
    """Return float32 values in the storage of ``dtype``, rounded to nearest, ties to even.

    A NaN stays a NaN; magnitudes beyond the dtype's range become infinite, or NaN without infinity.
    """
    values = np.ascontiguousarray(array, np.float32).reshape(np.shape(array))
    if dtype == E4M3:
        return _to_e4m3(values)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(numpy_dtype(dtype))
    bits = values.view(np.uint32)
    # Adding 0x7fff plus the lowest kept bit carries into the kept half exactly when nearest-even
    # rounds up. It would carry a NaN into infinity or zero, so a NaN is truncated, made quiet.
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)


def _to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    bits = values.view(np.uint32)
    size = bits & 0x7FFFFFFF
    # Subnormals are multiples of 2^-9, to which adding 2^14 rounds: what it adds to are their bits.
    small = np.minimum(size, 121 << 23).view(np.float32) + np.float32(1 << 14)
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
    code = np.where(size < 121 << 23, small.view(np.uint32) - (141 << 23), np.minimum(normal, 0x7F))
    return (code | (bits >> 24) & 0x80).astype(np.uint8)


def _e4m3_values() -> NDArray[np.float32]:
    code = np.arange(256)
    exponent = (code >> 3) & 15
    mantissa = code & 7
    fraction = np.where(exponent > 0, 8 + mantissa, mantissa)
    values = np.where(code & 128, -1.0, 1.0) * np.ldexp(fraction, np.maximum(exponent, 1) - 10)
    return np.where(code & 127 == 127, np.nan, values).astype(np.float32)


_E4M3_VALUES = _e4m3_values()
