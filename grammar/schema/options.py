"""How the output of a JSON schema is written: what users choose, and how LLGuidance is told."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

from graft.grammar.errors import GrammarError

__all__ = ["KEY_ORDERS", "KeyOrder", "Whitespace", "check_options", "json_options", "literal"]

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


def json_options(whitespace: Whitespace) -> dict[str, Any]:
    """LLGuidance's options of ``%json``."""
    if whitespace == "any":
        return {"whitespace_flexible": True}
    if isinstance(whitespace, int):
        return {"whitespace_pattern": f"[\\x20\\x0A\\x0D\\x09]{{1,{whitespace}}}"}
    comma, colon = (", ", ": ") if whitespace == "line" else (",", ":")
    return {"whitespace_flexible": False, "item_separator": comma, "key_separator": colon}


def literal(text: str) -> str:
    """A string of LLGuidance's Lark dialect."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if "\x7f" <= c <= "\x9f" else c for c in quoted)
