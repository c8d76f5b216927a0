"""Argument checks with named dimensions, made before any launch."""

from __future__ import annotations

from typing import Any

from graft.cudagraph.errors import OptionError, ShapeError

__all__ = ["check_range", "expect"]


def expect(what: str, array: Any, dtype: str | tuple[str, ...], **dims: int) -> None:
    """Raise ShapeError unless an array has this dtype, or one of these, and these named dimensions,
    in order."""
    allowed = (dtype,) if isinstance(dtype, str) else dtype
    if array.dtype not in allowed or tuple(array.shape) != tuple(dims.values()):
        wanted = ", ".join(f"{name}={size}" for name, size in dims.items())
        raise ShapeError(
            f"{what} is {array.dtype}{list(array.shape)}, expected {' or '.join(allowed)}[{wanted}]"
        )


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise OptionError, with name, value and bounds, unless low <= value <= high; NaN never is."""
    if not low <= value <= high:
        raise OptionError(f"{name} must be from {low} to {high}, got {value}")
