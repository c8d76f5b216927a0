"""Argument checks with named dimensions, made before any launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graft.cudagraph.errors import OptionError, ShapeError

__all__ = ["check_array", "check_range"]


def check_array(
    name: str,
    array: Any,
    dtype: str | Sequence[str],
    dims: Sequence[str | int],
    sizes: Mapping[str, int],
) -> None:
    """Raise ShapeError, by name, unless an array has this dtype (or one of these) and shape.

    Dimensions are names whose size is in `sizes`, or ints that stand for themselves.
    """
    allowed = (dtype,) if isinstance(dtype, str) else tuple(dtype)
    if array.dtype not in allowed:
        raise ShapeError(f"{name}: dtype {array.dtype}, expected {' or '.join(allowed)}")
    wanted = tuple(d if isinstance(d, int) else sizes[d] for d in dims)
    if tuple(array.shape) != wanted:
        text = ", ".join(str(d) if isinstance(d, int) else f"{d}={sizes[d]}" for d in dims)
        raise ShapeError(f"{name}: shape {tuple(array.shape)}, expected [{text}]")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise OptionError, with name, value and bounds, unless low <= value <= high; NaN never is."""
    if not low <= value <= high:
        raise OptionError(f"{name} must be from {low} to {high}, got {value}")
