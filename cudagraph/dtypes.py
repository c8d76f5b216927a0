"""Element types by name, and the 16-bit floats that NumPy lacks or stores as bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graft.cudagraph.errors import ShapeError

#: Name -> NumPy storage. bfloat16 is stored as the 16 bits it consists of.
DTYPES: dict[str, np.dtype] = {
    name: np.dtype("uint16" if name == "bfloat16" else name)
    for name in ("float32", "float16", "bfloat16", "int32", "uint32", "int64", "uint64", "uint8")
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
    return array.astype(np.float32)


def from_float32(array: NDArray, dtype: str) -> NDArray:
    """Return float32 values in the storage of ``dtype``, rounded to nearest, ties to even.

    A NaN stays a NaN; magnitudes beyond the dtype's range become infinite.
    """
    values = np.ascontiguousarray(array, np.float32).reshape(np.shape(array))
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(numpy_dtype(dtype))
    bits = values.view(np.uint32)
    # Adding 0x7fff plus the lowest kept bit carries into the kept half exactly when nearest-even
    # rounds up. It would carry a NaN into infinity or zero, so a NaN is truncated, made quiet.
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)
