"""How LLGuidance is told: strings of its Lark dialect, and options of ``%json``."""

from __future__ import annotations

import json
from typing import Any

from .options import Whitespace

__all__ = ["json_options", "literal"]


def literal(text: str) -> str:
    """A Lark string."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if "\x7f" <= c <= "\x9f" else c for c in quoted)


def json_options(whitespace: Whitespace) -> dict[str, Any]:
    """LLGuidance's options for a schema."""
    if whitespace == "any":
        return {"whitespace_flexible": True}
    if isinstance(whitespace, int):
        return {"whitespace_pattern": f"[\\x20\\x0A\\x0D\\x09]{{1,{whitespace}}}"}
    comma, colon = (", ", ": ") if whitespace == "line" else (",", ":")
    return {"whitespace_flexible": False, "item_separator": comma, "key_separator": colon}
