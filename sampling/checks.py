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
    """Require dtype and shape of a device array.

    Parameters
    ----------
    name : str
        The argument, as the message names it.
    array : DeviceArray or PinnedArray
        What was given.
    dtype : str or sequence of str
        The dtype, or those that are allowed.
    dims : sequence of str or int
        Dimension names in order (an int stands for itself).
    sizes : mapping of str to int
        The size each name must have.

    Raises
    ------
    ShapeError
        Naming the argument, the wanted dimensions and what it is.
    """
    allowed = (dtype,) if isinstance(dtype, str) else tuple(dtype)
    if array.dtype not in allowed:
        raise ShapeError(f"{name}: dtype {array.dtype}, expected {' or '.join(allowed)}")
    wanted = tuple(d if isinstance(d, int) else sizes[d] for d in dims)
    if tuple(array.shape) != wanted:
        text = ", ".join(str(d) if isinstance(d, int) else f"{d}={sizes[d]}" for d in dims)
        raise ShapeError(f"{name}: shape {tuple(array.shape)}, expected [{text}]")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Require ``low <= value <= high``.

    Raises
    ------
    OptionError
        Naming the option, the value and the bounds (NaN never passes).
    """
    if not low <= value <= high:
        raise OptionError(f"{name} must be from {low} to {high}, got {value}")
