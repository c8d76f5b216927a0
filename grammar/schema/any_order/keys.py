"""Regular expressions over keys as JSON spells them.

A key has one spelling here: an escape only where JSON needs one, the short form where there is one,
else ``\\u00xx`` in lower case. So a key that a schema names cannot come again in another spelling.
"""

from __future__ import annotations

import re

from ..terms import Cannot

__all__ = ["ANY_KEY", "PLAIN_KEY", "key", "pattern_key"]

_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_PLAIN = r"[\x20-\x21\x23-\x5b\x5d-\x7e\x{80}-\x{10ffff}]"
_ESCAPED = r'\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f]|7f))'
_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_ANY = r"(?s:.)*"

#: Any key, and any that needs no escape.
ANY_KEY, PLAIN_KEY = f'"(?:{_PLAIN}|{_ESCAPED})*"', f'"{_PLAIN}*"'


def key(name: str) -> str:
    """The spelling of one name, as a text."""
    return '"' + "".join(map(_spelled, name)) + '"'


def _spelled(char: str) -> str:
    code = ord(char)
    if code in _SHORT:
        return "\\" + _SHORT[code]
    return char if code >= 32 and code != 127 else f"\\u{code:04x}"


def pattern_key(pattern: str) -> str:
    """An expression of all keys in which a pattern is found, of those that need no escape.

    Raises
    ------
    Cannot
        If the pattern has anchors elsewhere than at the ends of its alternatives.
    """
    options, depth = [""], 0
    for piece in _PIECE.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            options.append("")
        else:
            options[-1] += piece
    return f'"(?:{"|".join(_found(option, pattern) for option in options)})"'


def _found(option: str, pattern: str) -> str:
    pieces = _PIECE.findall(option)
    start, end = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    inner = pieces[start : len(pieces) - end]
    if "^" in inner or "$" in inner:
        raise Cannot("patternProperties", f"pattern {pattern[:40]!r} has anchors inside")
    return ("" if start else _ANY) + "".join(inner) + ("" if end else _ANY)
