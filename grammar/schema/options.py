"""How the output of a JSON schema is to be written: order of keys, white space, formats."""

from __future__ import annotations

from typing import Any, Literal, get_args

from ..errors import GrammarError

__all__ = ["KEY_ORDERS", "KeyOrder", "Whitespace", "check_options"]

KeyOrder = Literal["schema", "any"]
KEY_ORDERS = get_args(KeyOrder)
Whitespace = Literal["line", "compact", "any"] | int

_MOST_SPACE = 1000


def check_options(key_order: Any, whitespace: Any, assert_formats: Any) -> None:
    """Refuses by name and value what `GrammarSpec` does not know."""
    if key_order not in KEY_ORDERS:
        raise GrammarError(f"key order {key_order!r} is unknown; use {' or '.join(KEY_ORDERS)}")
    counted = isinstance(whitespace, int) and not isinstance(whitespace, bool)
    if not (0 < whitespace <= _MOST_SPACE if counted else whitespace in ("line", "compact", "any")):
        raise GrammarError(
            f"whitespace {whitespace!r} is unknown; use line, compact, any or a number of "
            f"characters from 1 to {_MOST_SPACE}"
        )
    if counted and key_order == "any":
        raise GrammarError("key order any goes with whitespace line, compact or any, not a number")
    if assert_formats not in (None, True, False):
        raise GrammarError(f"assert_formats is {assert_formats!r}, must be a bool or None")
