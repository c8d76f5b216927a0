"""Regular expressions over keys as JSON spells them, for the rules of `json_lark`.

A key has one spelling here: an escape only where JSON needs one, the short form where there is one,
else ``\\u00xx`` in lower case. So a key that a schema names cannot come again in another spelling.
"""

from __future__ import annotations

import re
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from ..terms import Cannot

__all__ = ["ANY_KEY", "key", "pattern_key"]

_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_ESCAPED = [*range(0x20), 34, 92, 127]
_LAST = 0x10FFFF
_PLAIN = [(32, 33), (35, 91), (93, 126), (128, _LAST)]
_DIGITS, _WORDS = [(48, 57)], [(48, 57), (65, 90), (95, 95), (97, 122)]
_MOST = 20_000  # characters of one expression

Ranges = list[tuple[int, int]]


def _spelled(code: int) -> str:
    """A character that JSON escapes, as an expression of its spelling."""
    if code in _SHORT:
        return "\\\\" + ("\\" if _SHORT[code] in '"\\' else "") + _SHORT[code]
    return f"\\\\u{code:04x}"


def _set(ranges: Ranges) -> str:
    """One character of these, spelled."""
    plain = [
        (max(low, first), min(high, last))
        for low, high in ranges for first, last in _PLAIN if low <= last and high >= first
    ]  # fmt: skip
    options = [_spelled(code) for code in _ESCAPED if any(a <= code <= b for a, b in ranges)]
    if plain:
        options.insert(0, "[" + "".join(f"{_char(a)}-{_char(b)}" for a, b in plain) + "]")
    if not options:
        raise Cannot("patternProperties", "an empty class of characters")
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _char(code: int) -> str:
    return f"\\x{{{code:x}}}"


_ANY = _set([(0, _LAST)])
#: Any key.
ANY_KEY = f'"{_ANY}*"'


def key(name: str) -> str:
    """The spelling of one name, as a text."""
    inner = "".join(
        char if ord(char) not in _ESCAPED
        else "\\" + _SHORT[ord(char)] if ord(char) in _SHORT else f"\\u{ord(char):04x}"
        for char in name
    )  # fmt: skip
    return f'"{inner}"'


def pattern_key(pattern: str) -> str:
    """An expression of the spellings of all keys in which a pattern is found.

    Raises
    ------
    Cannot
        If the pattern needs more than classes, groups, repetitions and anchors at its ends.
    """
    try:
        tree = list(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise Cannot("patternProperties", f"pattern {pattern!r}: {error}") from None
    text = f'"{_searched(tree, pattern)}"'
    if len(text) > _MOST:
        raise Cannot("patternProperties", f"pattern {pattern[:40]!r} is too long")
    return text


def _searched(tree: list[Any], pattern: str) -> str:
    """What is found anywhere unless it is anchored; a union's options each by themselves."""
    if len(tree) == 1 and tree[0][0] is _constants.BRANCH:
        return "(?:" + "|".join(_searched(list(o), pattern) for o in tree[0][1][1]) + ")"
    if len(tree) == 1 and tree[0][0] is _constants.SUBPATTERN and not any(tree[0][1][1:3]):
        return f"(?:{_searched(list(tree[0][1][3]), pattern)})"
    start = bool(tree) and tree[0] == (_constants.AT, _constants.AT_BEGINNING)
    end = len(tree) > start and tree[-1] == (_constants.AT, _constants.AT_END)
    inner = "".join(_node(node, pattern) for node in tree[start : len(tree) - end])
    return ("" if start else f"{_ANY}*") + inner + ("" if end else f"{_ANY}*")


def _node(node: Any, pattern: str) -> str:
    kind, value = node
    if kind is _constants.LITERAL:
        return _set([(value, value)])
    if kind is _constants.NOT_LITERAL:
        return _set(_others([(value, value)]))
    if kind is _constants.ANY:
        return _set(_others([(10, 10)]))
    if kind is _constants.IN:
        return _set(_ranges(value, pattern))
    if kind is _constants.BRANCH:
        options = ["".join(_node(n, pattern) for n in option) for option in value[1]]
        return f"(?:{'|'.join(options)})"
    if kind is _constants.SUBPATTERN and not any(value[1:3]):
        return "(?:" + "".join(_node(n, pattern) for n in value[3]) + ")"
    if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
        low, high, what = value
        most = "" if high is _constants.MAXREPEAT else str(high)
        inner = "".join(_node(n, pattern) for n in what)
        return f"(?:{inner})" + ("*" if (low, most) == (0, "") else f"{{{low},{most}}}")
    raise Cannot("patternProperties", f"pattern {pattern!r} cannot be enforced in any order")


def _ranges(items: Any, pattern: str) -> Ranges:
    found: Ranges = []
    negated = False
    for kind, value in items:
        if kind is _constants.NEGATE:
            negated = True
        elif kind is _constants.LITERAL:
            found.append((value, value))
        elif kind is _constants.RANGE:
            found.append(value)
        elif kind is _constants.CATEGORY and value in _CATEGORIES:
            found += _CATEGORIES[value]
        else:
            raise Cannot("patternProperties", f"pattern {pattern!r}: an unknown class")
    return _others(found) if negated else found


def _others(ranges: Ranges) -> Ranges:
    found, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            found.append((at, low - 1))
        at = max(at, high + 1)
    if at <= _LAST:
        found.append((at, _LAST))
    return found


_CATEGORIES: dict[Any, Ranges] = {
    _constants.CATEGORY_DIGIT: _DIGITS,
    _constants.CATEGORY_NOT_DIGIT: _others(_DIGITS),
    _constants.CATEGORY_WORD: _WORDS,
    _constants.CATEGORY_NOT_WORD: _others(_WORDS),
}
