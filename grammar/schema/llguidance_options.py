"""Convert options of `Spec`, and strings, to the notation of LLGuidance."""

from __future__ import annotations

import json
import re
from typing import Any

from graft.grammar.spec import Whitespace

__all__ = ["OPTIONS", "PLAIN_ESCAPES", "json_options", "literal", "with_options"]

#: Keyword of a schema document that holds LLGuidance's options.
OPTIONS = "x-guidance"

#: Options that forbid ``\u`` escapes in all strings.
PLAIN_ESCAPES = {"json_allowed_escapes": 'nrbtf"\\'}


def json_options(whitespace: Whitespace) -> dict[str, Any]:
    """Return the options of LLGuidance's ``%json`` for a value of `Spec.whitespace`."""
    if whitespace == "any":
        return {"whitespace_flexible": True}
    if isinstance(whitespace, int):
        return {"whitespace_pattern": f"[\\x20\\x0A\\x0D\\x09]{{1,{whitespace}}}"}
    comma, colon = (", ", ": ") if whitespace == "line" else (",", ":")
    return {"whitespace_flexible": False, "item_separator": comma, "key_separator": colon}


def with_options(schema: Any, whitespace: Whitespace) -> dict[str, Any]:
    """Return the document that LLGuidance compiles for a schema that graft has rewritten.

    The document contains the options for `whitespace`, and the options (keyword `OPTIONS`) that
    were added to the schema when it was rewritten.
    """
    keywords = schema if isinstance(schema, dict) else {}
    return {**keywords, OPTIONS: {**keywords.get(OPTIONS, {}), **json_options(whitespace)}}


def literal(text: str) -> str:
    """Return a text as a string literal of LLGuidance's Lark dialect."""
    quoted = json.dumps(text, ensure_ascii=False)

    def escape(match: re.Match[str]) -> str:
        return f"\\u{ord(match[0]):04x}"

    # json.dumps does not escape these control characters.
    return re.sub("[\x7f-\x9f]", escape, quoted)
