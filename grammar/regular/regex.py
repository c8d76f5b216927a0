"""Lowering of regular expressions to the expressions of `graft.grammar.regular.expression`.

LLGuidance reads patterns with Rust's ``regex`` crate. The supported syntax is the part of that
crate's syntax whose meaning does not depend on Unicode tables or flags. For any other pattern,
`lower_regex` raises `NotRegular`, and the request uses the matcher of the grammar library instead
of an automaton.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from graft.grammar.regular.expression import (
    EMPTY,
    Expression,
    Ranges,
    characters,
    complement,
    concat,
    repeat,
    union,
)

__all__ = ["NotRegular", "has_alternatives", "lower_regex"]

#: Maximum nesting of groups.
MAX_NESTING = 100

#: Maximum count of a repetition such as ``{1000}``.
MAX_COUNT = 4096

_CONTROL_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_PUNCTUATION = frozenset("\\.+*?()|[]{}^$#&-~/")
#: Number of hexadecimal digits of an escape, by letter.
_HEXADECIMAL = {"x": 2, "u": 4}
_LINE_FEED = [(0x0A, 0x0A)]


class NotRegular(ValueError):
    """A grammar has no automaton: its language is not regular, or graft cannot lower it."""


def lower_regex(
    pattern: str,
    one_of: Callable[[Ranges], Expression] = characters,
    classes: Mapping[str, Ranges] | None = None,
) -> Expression:
    """Return the expression of the texts that match a pattern from start to end.

    `one_of` returns the expression of one character of the given ranges. It is called for each
    character, class and escape of the pattern, and can add, for example, the escape sequences of
    JSON strings. `classes` contains the characters of class escapes such as ``\\d``, by letter.
    Raise `NotRegular` if the pattern has unsupported syntax.
    """
    return _Parser(pattern, one_of, classes or {}).parse()


def has_alternatives(pattern: str) -> bool:
    """Return whether a pattern has a ``|`` outside groups, escapes and classes."""
    outside_classes = re.sub(r"\\.|\[(\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)
    nesting = 0
    for character in outside_classes:
        if character == "|" and nesting == 0:
            return True
        nesting += (character == "(") - (character == ")")
    return False


class _Parser:
    """Recursive-descent parser of a pattern."""

    def __init__(
        self, pattern: str, one_of: Callable[[Ranges], Expression], classes: Mapping[str, Ranges]
    ):
        self._pattern = pattern
        self._one_of = one_of
        self._classes = classes
        self._position = 0
        self._nesting = 0

    def parse(self) -> Expression:
        expression = self._alternatives()
        if self._position < len(self._pattern):
            raise NotRegular(f"unexpected {self._peek()!r}")
        return expression

    def _peek(self) -> str:
        """Return the next character, or an empty string at the end."""
        return self._pattern[self._position : self._position + 1]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise NotRegular("the pattern ends too early")
        self._position += 1
        return character

    def _skip(self, text: str) -> bool:
        """Skip a text if it comes next, and return whether it did."""
        found = self._pattern.startswith(text, self._position)
        if found:
            self._position += len(text)
        return found

    def _alternatives(self) -> Expression:
        options = [self._sequence()]
        while self._skip("|"):
            options.append(self._sequence())
        return union(options)

    def _sequence(self) -> Expression:
        parts = []
        while self._peek() and self._peek() not in "|)":
            parts.append(self._repeated())
        return concat(parts)

    def _repeated(self) -> Expression:
        part = self._atom()
        while True:
            if self._skip("*"):
                part = repeat(part, 0, None)
            elif self._skip("+"):
                part = repeat(part, 1, None)
            elif self._skip("?"):
                part = repeat(part, 0, 1)
            elif self._skip("{"):
                part = repeat(part, *self._counts())
            else:
                return part
            if self._peek() in ("?", "+"):
                raise NotRegular("lazy and possessive repetitions are not supported")

    def _counts(self) -> tuple[int, int | None]:
        """Read ``{n}``, ``{n,}`` or ``{n,m}`` after the ``{``; return the minimum and maximum."""
        low = self._number()
        high: int | None = low
        if self._skip(","):
            high = None if self._peek() == "}" else self._number()
        if not self._skip("}") or (high is not None and high < low):
            raise NotRegular("invalid repetition count")
        return low, high

    def _number(self) -> int:
        digits = ""
        while self._peek().isascii() and self._peek().isdigit():
            digits += self._take()
        if not digits or int(digits) > MAX_COUNT:
            raise NotRegular("repetition count is missing or too large")
        return int(digits)

    def _atom(self) -> Expression:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return self._one_of(self._class())
        if character == ".":
            return self._one_of(complement(_LINE_FEED))
        if character == "\\":
            return self._one_of(self._escape())
        if character in "^$*+?{}])":
            raise NotRegular(f"{character!r} is not supported here")
        return self._one_of([(ord(character), ord(character))])

    def _group(self) -> Expression:
        if self._peek() == "?" and not self._skip("?:"):
            raise NotRegular("flags, names and assertions of groups are not supported")
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise NotRegular("groups are nested too deeply")
        expression = EMPTY if self._peek() == ")" else self._alternatives()
        if not self._skip(")"):
            raise NotRegular("a group is not closed")
        self._nesting -= 1
        return expression

    def _escape(self) -> Ranges:
        """Read an escape after its backslash and return the characters that it matches."""
        character = self._take()
        if character in self._classes:
            return self._classes[character]
        if character.lower() in self._classes:
            return complement(self._classes[character.lower()])
        if character in _CONTROL_ESCAPES:
            code = ord(_CONTROL_ESCAPES[character])
        elif character in _PUNCTUATION:
            code = ord(character)
        elif character in _HEXADECIMAL:
            code = self._hexadecimal(_HEXADECIMAL[character])
        else:
            raise NotRegular(f"the escape \\{character} is not supported")
        return [(code, code)]

    def _hexadecimal(self, digits: int) -> int:
        text = "".join(self._take() for _ in range(digits))
        if not set(text) <= set("0123456789abcdefABCDEF"):
            raise NotRegular(f"{text!r} is not a hexadecimal number")
        return int(text, 16)

    def _class(self) -> Ranges:
        """Read a character class after its ``[`` and return its characters."""
        negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        if self._peek() in ("]", "-"):
            raise NotRegular("']' and '-' at the start of a class are not supported")
        while not self._skip("]"):
            part = self._class_part()
            following = self._pattern[self._position : self._position + 2]
            if not following.startswith("-") or following == "-]":
                ranges += part
                continue
            self._take()
            end = self._class_part()
            if not (_is_one_character(part) and _is_one_character(end)) or end[0] < part[0]:
                raise NotRegular("invalid range in a class")
            ranges.append((part[0][0], end[0][0]))
        return complement(ranges) if negated else ranges

    def _class_part(self) -> Ranges:
        """Read one character or escape of a character class and return its characters."""
        character = self._take()
        # Rust has nested classes, and the operators &&, -- and ~~.
        if character == "[" or (character in "&-~" and self._peek() == character):
            raise NotRegular("operators in classes are not supported")
        if character == "\\":
            return self._escape()
        return [(ord(character), ord(character))]


def _is_one_character(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
