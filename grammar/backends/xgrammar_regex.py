"""Convert regular expressions to equivalent ones that XGrammar interprets correctly.

XGrammar misreads some escape sequences and ignores anchors inside a pattern. It raises no error in
these cases and at most prints a warning to the standard output. This module converts the patterns,
or refuses them.
"""

from __future__ import annotations

import re
from typing import Any

from graft.grammar.errors import GrammarError
from graft.grammar.schema.documents import subschemas

__all__ = ["convert_pattern", "convert_patterns"]

_TOKEN = re.compile(r"\\x\{[0-9A-Fa-f]{1,6}\}|\\x[0-9A-Fa-f]{2}|\\.|.", re.DOTALL)
#: Letters and digits that may follow a backslash. After a backslash, XGrammar matches all other
#: letters and digits literally.
_ESCAPES = "dDwWsSpPbBkucxtnvfr0123456789"
_CONTROL_ESCAPES = "ae"  # XGrammar reads \a and \e as control characters; ECMA-262 does not


def convert_pattern(pattern: str, *, ecma: bool = False) -> str:
    """Return a regular expression, equivalent to `pattern`, that XGrammar interprets correctly.

    ``\\xHH`` becomes ``\\u{HH}``, because XGrammar would read more than two digits. `ecma` says
    that the pattern belongs to a JSON schema, where ECMA-262 defines its meaning. Raise
    `GrammarError` if the pattern has an escape sequence that XGrammar would match literally, or an
    anchor that XGrammar would ignore.
    """
    escapes = _ESCAPES if ecma else _ESCAPES + _CONTROL_ESCAPES
    pieces = _TOKEN.findall(pattern)
    in_class = False
    caret = ""  # escaped circumflex at the start of a class; XGrammar would read [\^a] as [^a]
    out: list[str] = []
    for index, piece in enumerate(pieces):
        if piece.startswith("\\"):
            piece = _convert_escape(piece, pattern, escapes)
            if in_class and piece == r"\^" and out[-1] == "[":
                if pieces[index + 1 : index + 2] == ["-"]:
                    raise GrammarError(
                        f"pattern {pattern[:60]!r}: XGrammar does not support '[\\^-'"
                    )
                caret = piece
                continue
        elif in_class:
            in_class = piece != "]"
            if caret and not in_class:
                if out[-1] == "[":  # the class is [\^]
                    out.pop()
                    piece = ""
                elif out[-1] == "-":
                    out[-1] = r"\-"
                out.append(caret)
                caret = ""
        elif piece == "[":
            in_class = True
        elif piece == "^" and index > 0:
            raise GrammarError(f"pattern {pattern[:60]!r}: '^' is supported only at the start")
        elif piece == "$" and index < len(pieces) - 1:
            raise GrammarError(f"pattern {pattern[:60]!r}: '$' is supported only at the end")
        out.append(piece)
    return "".join(out)


def _convert_escape(piece: str, pattern: str, escapes: str) -> str:
    digits = piece[2:].strip("{}")
    if piece.startswith("\\x") and digits:
        return f"\\u{{{digits}}}"
    letter = piece[1:]
    if letter == "\n":  # XGrammar prints a warning about an escaped line feed
        return r"\n"
    if letter.isascii() and letter.isalnum() and letter not in escapes:
        raise GrammarError(
            f"pattern {pattern[:60]!r}: XGrammar does not support the escape sequence {piece}"
        )
    return piece


def convert_patterns(schema: Any) -> None:
    """Convert all patterns of a JSON schema in place; see `convert_pattern`."""
    for _, part in subschemas(schema):
        if isinstance(part.get("pattern"), str):
            part["pattern"] = convert_pattern(part["pattern"], ecma=True)
        named = part.get("patternProperties")
        if isinstance(named, dict):
            converted = {}
            for pattern, value in named.items():
                converted[convert_pattern(pattern, ecma=True)] = value
            part["patternProperties"] = converted
