"""Argument checks. Every error names the argument, its value and the allowed values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from graft.cudagraph.errors import OptionError, ShapeError

__all__ = [
    "check_ids",
    "check_integer",
    "check_range",
    "check_real",
    "expect",
    "short_repr",
]


def expect(name: str, array: Any, dtype: str | tuple[str, ...], **dims: int) -> None:
    """Check dtype and shape of an array.

    Parameters
    ----------
    name
        Name of the array in the error message.
    array
        Array with the attributes ``dtype`` and ``shape``.
    dtype
        Allowed dtype or dtypes.
    **dims
        Expected size of each dimension, in order, by the name of the dimension.

    Raises
    ------
    ShapeError
        If dtype or shape differs.
    """
    allowed = (dtype,) if isinstance(dtype, str) else dtype
    if array.dtype not in allowed or tuple(array.shape) != tuple(dims.values()):
        wanted = ", ".join(f"{dim}={size}" for dim, size in dims.items())
        raise ShapeError(
            f"{name} is {array.dtype}{list(array.shape)}, expected {' or '.join(allowed)}[{wanted}]"
        )


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise OptionError unless ``low <= value <= high``. NaN is out of every range."""
    if not low <= value <= high:
        raise OptionError(f"{name} must be from {low} to {high}, got {value}")


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise OptionError unless `value` is an int, not a bool, from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(
            f"{name} must be an integer from {low} to {high}, got {short_repr(value)}"
        )


def check_real(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raise OptionError unless `value` is an int or float from `low` to `high`.

    With `open_low`, `low` itself is not allowed either.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and isinstance(value, float) and math.isnan(value):
        is_number = False
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise OptionError(f"{name} must be a number from {low} to {high}, got {short_repr(value)}")
    if open_low and value == low:
        raise OptionError(f"{name} must be above {low}, got {value!r}")


def check_ids(name: str, ids: Iterable[object], vocab_size: int) -> None:
    """Raise OptionError unless all `ids` are token ids of a vocabulary of `vocab_size` ids."""
    for token in ids:
        check_integer(f"each of {name}", token, 0, vocab_size - 1)


def short_repr(value: object, max_length: int = 80) -> str:
    """Return the repr of a value, truncated to `max_length` characters.

    If the repr cannot be computed, such as that of an integer with thousands of digits, a
    description of the type is returned.
    """
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} without a printable value"
    return text if len(text) <= max_length else f"{text[:max_length]}..."
