"""Argument checks. Every error names the argument, its value and the allowed values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graft.cudagraph.errors import OptionError, ShapeError
from graft.native.errors import short_repr

__all__ = ["check_ids", "check_integer", "check_range", "check_real", "expect"]


def expect(name: str, array: Any, dtype: str | tuple[str, ...], **dims: int) -> None:
    """Raise ShapeError unless an array, called `name` in the message, has the dtype and dimensions.

    `dtype` is the allowed dtype or a tuple of them; `dims` gives the expected sizes in order, by
    the name of the dimension.
    """
    dtypes = (dtype,) if isinstance(dtype, str) else dtype
    sizes = tuple(dims.values())
    if array.dtype in dtypes and tuple(array.shape) == sizes:
        return
    found = f"{array.dtype}{list(array.shape)}"
    expected_dtype = " or ".join(dtypes)
    expected_shape = ", ".join(f"{dim}={size}" for dim, size in dims.items())
    raise ShapeError(f"{name} is {found}, expected {expected_dtype}[{expected_shape}]")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise OptionError unless ``low <= value <= high``. NaN is out of every range."""
    if not low <= value <= high:
        raise OptionError(
            f"{name} must be from {low} to {high}, got {short_repr(value)}", param=name
        )


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise OptionError unless `value` is an int, not a bool, from `low` to `high`."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and low <= value <= high:  # type: ignore[operator]
        return
    raise OptionError(
        f"{name} must be an integer from {low} to {high}, got {short_repr(value)}", param=name
    )


def check_real(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    param: str | None = None,
) -> None:
    """Raise OptionError unless `value` is an int or float from `low` to `high`.

    With `open_low`, `low` itself is not allowed either. `param` becomes the attribute `param` of
    the error; None: `name`.
    """
    param = param or name
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN is out of every range, because comparisons with NaN are false.
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise OptionError(
            f"{name} must be a number from {low} to {high}, got {short_repr(value)}", param=param
        )
    if open_low and value == low:
        raise OptionError(f"{name} must be above {low}, got {short_repr(value)}", param=param)


def check_ids(name: str, ids: Iterable[object], vocab_size: int) -> None:
    """Raise OptionError unless all `ids` are ints from 0 to `vocab_size` - 1."""
    for token in ids:
        is_integer = isinstance(token, int) and not isinstance(token, bool)
        if not is_integer or not 0 <= token < vocab_size:  # type: ignore[operator]
            raise OptionError(
                f"{name} contains {short_repr(token)}, which is out of vocabulary: a token id must "
                f"be an integer from 0 to {vocab_size - 1} ({vocab_size} tokens)",
                param=name,
            )
