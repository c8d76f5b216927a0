"""Options of the layout of JSON outputs, and their representation in LLGuidance."""

from __future__ import annotations

import json
import re
import reprlib
from types import NoneType
from typing import Any, Literal, get_args

from graft.grammar.errors import GrammarError

__all__ = [
    "KEY_ORDERS",
    "OPTIONS",
    "PLAIN_ESCAPES",
    "KeyOrder",
    "Whitespace",
    "check_options",
    "check_type",
    "json_options",
    "literal",
    "with_options",
]

KeyOrder = Literal["schema", "any"]
KEY_ORDERS = get_args(KeyOrder)
Whitespace = Literal["line", "compact", "any"] | int

#: Keyword of a schema document that holds LLGuidance's options.
OPTIONS = "x-guidance"
#: Options that forbid ``\u`` escapes in all strings.
PLAIN_ESCAPES = {"json_allowed_escapes": 'nrbtf"\\'}
_MAX_WHITESPACE = 1000


def check_options(key_order: Any, whitespace: Any, assert_formats: Any) -> None:
    """Raise `GrammarError` for an unknown value of an option of `Spec`."""
    check_type("key_order", key_order, str)
    check_type("whitespace", whitespace, str, int)
    check_type("assert_formats", assert_formats, bool, NoneType)
    if key_order not in KEY_ORDERS:
        raise GrammarError(f"key_order {key_order!r} is unknown; use {' or '.join(KEY_ORDERS)}")
    is_number = isinstance(whitespace, int) and not isinstance(whitespace, bool)
    if is_number:
        known = 0 < whitespace <= _MAX_WHITESPACE
    else:
        known = whitespace in ("line", "compact", "any")
    if not known:
        raise GrammarError(
            f"whitespace {whitespace!r} is unknown; use line, compact, any or a number of "
            f"characters from 1 to {_MAX_WHITESPACE}"
        )
    if is_number and key_order == "any":
        raise GrammarError("key_order 'any' requires whitespace line, compact or any, not a number")


def check_type(name: str, value: object, *types: type) -> None:
    """Raise `GrammarError` unless a value has one of the types."""
    if not isinstance(value, types):
        names = " or ".join("None" if t is NoneType else t.__name__ for t in types)
        # Unlike repr, reprlib never raises an exception, whatever the object is.
        raise GrammarError(f"{name} is {reprlib.repr(value)}, must be {names}")


def json_options(whitespace: Whitespace) -> dict[str, Any]:
    """Return the options of LLGuidance's ``%json`` for a value of `Spec.whitespace`."""
    if whitespace == "any":
        return {"whitespace_flexible": True}
    if isinstance(whitespace, int):
        return {"whitespace_pattern": f"[\\x20\\x0A\\x0D\\x09]{{1,{whitespace}}}"}
    comma, colon = (", ", ": ") if whitespace == "line" else (",", ":")
    return {"whitespace_flexible": False, "item_separator": comma, "key_separator": colon}


def with_options(schema: Any, whitespace: Whitespace) -> dict[str, Any]:
    """Return the document that LLGuidance compiles for a routed schema.

    The options that the router has added to the schema are kept.
    """
    keywords = schema if isinstance(schema, dict) else {}
    return {**keywords, OPTIONS: {**keywords.get(OPTIONS, {}), **json_options(whitespace)}}


def literal(text: str) -> str:
    """Return a string literal of LLGuidance's Lark dialect."""
    quoted = json.dumps(text, ensure_ascii=False)

    def escape(match: re.Match[str]) -> str:
        return f"\\u{ord(match[0]):04x}"

    # json.dumps does not escape these control characters.
    return re.sub("[\x7f-\x9f]", escape, quoted)
