"""How keys, arrays and objects are written in a Lark grammar.

A key has one spelling here: an escape only where JSON needs one, the short form where there is one,
else ``\\u00xx`` in lower case. So a key that a schema names cannot come again in another spelling.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from graft.grammar.schema.options import literal
from graft.grammar.schema.terms import Cannot

__all__ = [
    "ANY_KEY",
    "BITS",
    "PLAIN_KEY",
    "Pairs",
    "array_body",
    "key",
    "object_rules",
    "pattern_key",
    "regex",
    "separators",
]

BITS = 64  # of a rule's parameter
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_PLAIN = r"[\x20-\x21\x23-\x5b\x5d-\x7e\x{80}-\x{10ffff}]"
_ESCAPED = r'\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f]|7f))'
_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_ANY = r"(?s:.)*"

#: Any key, and any that needs no escape.
ANY_KEY = f'"(?:{_PLAIN}|{_ESCAPED})*"'
PLAIN_KEY = f'"{_PLAIN}*"'


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

    `Cannot` if the pattern has anchors elsewhere than at the ends of its alternatives.
    """
    options = [""]
    depth = 0
    for piece in _PIECE.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            options.append("")
        else:
            options[-1] += piece
    return f'"(?:{"|".join(_found(option, pattern) for option in options)})"'


def _found(option: str, pattern: str) -> str:
    pieces = _PIECE.findall(option)
    start = pieces[:1] == ["^"]
    end = pieces[-1:] == ["$"]
    inner = pieces[start : len(pieces) - end]
    if "^" in inner or "$" in inner:
        raise Cannot("patternProperties", f"pattern {pattern[:40]!r} has anchors inside")
    return ("" if start else _ANY) + "".join(inner) + ("" if end else _ANY)


def regex(expression: str) -> str:
    """A Lark regular expression."""
    return "/" + expression.replace("/", "\\/") + "/"


def separators(options: dict[str, Any]) -> str:
    """The terminals between values; a ``%json`` skips no white space before it, so they do."""
    space = r"[\x20\x0A\x0D\x09]"
    if options["whitespace_flexible"]:
        texts = {"COMMA": f"/,{space}*/", "COLON": f"/:{space}*/", "OPEN": f"/\\[{space}*/"}
        return "\n".join([*(f"{k}: {v}" for k, v in texts.items()), f"%ignore /{space}+/"])
    texts = {"COMMA": options["item_separator"], "COLON": options["key_separator"], "OPEN": "["}
    return "\n".join(f"{name}: {literal(text)}" for name, text in texts.items())


def array_body(item: str | None, low: int, high: int | None) -> str:
    """The body of an array's rule: between ``low`` and ``high`` items; none if ``item`` is None."""
    if item is None or high == 0:
        return 'OPEN "]"'
    most = "" if high is None else max(0, high - 1)
    body = f"{item} (COMMA {item}){{{max(0, low - 1)},{most}}}"
    return f'OPEN {body if low else f"({body})?"} "]"'


class Pairs(NamedTuple):
    """What is in an object."""

    names: tuple[tuple[str, str], ...]  # and the rules of their values, the required ones first
    needed: int  # how many of them are required
    others: str | None  # rule of a pair with any other key


def object_rules(name: str, pairs: Pairs) -> dict[str, str]:
    """The rules of an object, by their heads.

    A run of other keys is followed by a named one, if anything, so that each text is read in one
    way. The brace ends the rule of what follows a pair, and not that of the object, so that the
    parser has nothing to complete at the end of each pair.
    """
    count = len(pairs.names)
    needed = pairs.needed
    others = pairs.others
    if not pairs.names:
        return {name: f'"{{" ({others} (COMMA {others})*)? "}}"' if others else '"{" "}"'}
    end = '"}"' + (f" %if is_ones([0:{needed}])" if needed else "")
    more = f"COMMA {name}-named::_ %if not(is_ones([0:{count}]))"
    rules = {name: f'"{{" {name}-first::0', f"{name}-first::_": f"{end} | {name}-named::_"}
    rules[f"{name}-more::_"] = f"{end} | {more}"
    if others is not None:
        run = f"{others} (COMMA {others})* {name}-after::_"
        rules[f"{name}-after::_"] = f"{end} | {more}"
        rules[f"{name}-first::_"] += f" | {run}"
        rules[f"{name}-more::_"] = f"{end} | COMMA {name}-named::_ | COMMA {run}"
    rules[f"{name}-named::_"] = " | ".join(
        f"{literal(key(text))} COLON {value} {name}-more::set_bit({bit}) %if bit_clear({bit})"
        for bit, (text, value) in enumerate(pairs.names)
    )
    return rules
