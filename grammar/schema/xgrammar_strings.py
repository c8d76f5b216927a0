"""String keywords of JSON schemas with which XGrammar would allow text that is not JSON.

In a string with a length bound, XGrammar allows raw control characters. In a string with a pattern,
it allows the characters of the pattern unchanged, which can be raw quotes and backslashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from graft.grammar.schema.documents import SchemaObject, dialect, subschemas, types_of
from graft.grammar.schema.reasons import Reason

__all__ = ["unsafe_strings", "without_unsafe_strings"]

_PIECE = re.compile(
    r"\[(?P<set>(?:\\.|[^\]\\])*)(?:\]|\\?\Z)"
    r"|\\(?P<code>x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]+\})"
    r"|\\c(?P<control>.)|\\(?P<escape>.)|(?P<character>.)",
    re.DOTALL,
)
_CONTROL_LETTERS = "nrtfv0ae"
#: Content of a character class without characters that need an escape.
_PLAIN_SET = re.compile(
    r"(?:[A-Z]-[A-Z]|[a-z]-[a-z]|[0-9]-[0-9]|[A-Za-z0-9_]|[^\x00-\x7f](?:-[^\x00-\x7f])?)*"
)
#: JSON pointers of the properties of the outermost object. In a structural format with a style such
#: as XML, a property whose value is a string is written as plain text, not as a JSON string.
_RAW = re.compile(r"#/(properties/[^/]*|additionalProperties)")
_CALENDAR = "XGrammar allows dates that do not exist, such as 2024-02-30"


class UnsafeString(NamedTuple):
    """A keyword with which XGrammar would allow strings that are not JSON or not valid.

    Attributes
    ----------
    schema, keyword
        The subschema and its keyword.
    pattern
        Pattern in the value of ``patternProperties``; empty for other keywords.
    reason
        Why the strings would be wrong.
    """

    schema: SchemaObject
    keyword: str
    pattern: str
    reason: Reason


def unsafe_strings(
    schema: Any, assert_formats: bool | None, *, raw: bool = False
) -> Iterator[UnsafeString]:
    """Yield the keywords with which XGrammar would allow strings that it should not allow.

    Such strings are not JSON, or do not have the required ``format``. With `raw`, the properties of
    the outermost object are not checked: it is written in a style of a structural format, such as
    XML, in which their strings are plain text and not JSON.
    """
    if assert_formats is None:
        assert_formats = dialect(schema, 7) <= 7
    for pointer, part in subschemas(schema):
        if raw and _RAW.fullmatch(pointer):
            continue
        for pattern in part.get("patternProperties", ()):
            if why := _unsafe_pattern(pattern):
                reason = Reason(pointer, "patternProperties", why)
                yield UnsafeString(part, "patternProperties", pattern, reason)
        if "string" not in types_of(part):
            continue
        if "maxLength" in part or part.get("minLength"):
            bound = "maxLength" if "maxLength" in part else "minLength"
            why = "XGrammar allows raw control characters in strings with a length bound"
            yield UnsafeString(part, bound, "", Reason(pointer, bound, why))
        if why := _unsafe_pattern(part.get("pattern")):
            yield UnsafeString(part, "pattern", "", Reason(pointer, "pattern", why))
        if why := _unsafe_format(part.get("format"), assert_formats):
            yield UnsafeString(part, "format", "", Reason(pointer, "format", why))


def without_unsafe_strings(schema: Any, assert_formats: bool | None) -> Any:
    """Remove the keywords with which XGrammar would allow text that is not JSON.

    A length bound becomes a pattern, which allows no characters that need an escape. The schema is
    modified in place and returned.
    """
    for part, keyword, pattern, reason in list(unsafe_strings(schema, assert_formats)):
        if keyword == "patternProperties":
            del part["patternProperties"][pattern]
        elif keyword in ("minLength", "maxLength"):
            low = part.pop("minLength", 0)
            high = part.pop("maxLength", "")
            part.setdefault("pattern", f"^.{{{low},{high}}}$")
        elif reason.why != _CALENDAR:
            del part[keyword]
    return schema


def _unsafe_format(name: Any, assert_formats: bool) -> str:
    if name in ("json-pointer", "relative-json-pointer"):
        return f"XGrammar allows raw control characters in the format {name}"
    return _CALENDAR if assert_formats and name in ("date", "date-time") else ""


def _unsafe_pattern(pattern: Any) -> str:
    """Return why XGrammar would allow text that is not JSON for a pattern; empty if it would not.

    XGrammar removes the characters that need an escape from classes such as ``[ -~]`` and ``.``,
    but not from a class of only one character, and not from a class in a pattern with a character
    that is not ASCII. In such a pattern, XGrammar also reads ``[\\^a]`` as ``[^a]``.
    """
    if not isinstance(pattern, str):
        return ""
    for match in _PIECE.finditer(pattern):
        if not pattern.isascii() and _class_needs_escape(match):
            return (
                f"XGrammar would write characters of the class {match[0]!r} without an escape, "
                "because the pattern has a character that is not ASCII"
            )
        inner = match if match["set"] is None else _PIECE.fullmatch(match["set"])
        if inner is not None and _needs_escape(inner):
            return f"XGrammar would write the character {match[0]!r} of a pattern without an escape"
    return ""


def _class_needs_escape(match: re.Match[str]) -> bool:
    """Return whether a piece of a pattern is a class with characters that JSON must escape.

    These are quotes, backslashes and control characters.
    """
    if match["set"] is not None:
        return not _PLAIN_SET.fullmatch(match["set"])
    return match[0] == "." or match["escape"] in ("s", "S", "D", "W")


def _needs_escape(match: re.Match[str]) -> bool:
    if match["control"]:
        return True
    if match["code"]:
        code = int(match["code"].strip("xu{}"), 16)
    elif match["escape"]:
        if match["escape"] in _CONTROL_LETTERS:
            return True
        code = ord(match["escape"])
    else:
        code = ord(match["character"] or " ")
    return code < 0x20 or chr(code) in '"\\'
