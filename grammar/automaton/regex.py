"""Lowering of regular expressions to expressions over characters.

The syntax is the part of Rust's ``regex`` crate, which LLGuidance uses, whose meaning does not
depend on Unicode tables or flags. Every other pattern raises `NotRegular`, and the request's
matcher remains the one of the grammar library.
"""

from __future__ import annotations

from graft.grammar.automaton.expression import (
    EMPTY,
    Expression,
    characters,
    complement,
    concat,
    repeat,
    union,
)

__all__ = ["NotRegular", "lower_regex"]

#: Maximum nesting of groups.
MAX_NESTING = 100
#: Maximum count of a repetition such as ``{1000}``.
MAX_COUNT = 4096

_CONTROL_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_PUNCTUATION = frozenset("\\.+*?()|[]{}^$#&-~/")
_LINE_FEED = [(0x0A, 0x0A)]


class NotRegular(ValueError):
    """A grammar has no automaton: its language is not regular, or its lowering is not known."""


def lower_regex(pattern: str) -> Expression:
    """Return the expression of the texts that match a pattern from start to end.

    Raises
    ------
    NotRegular
        The pattern has syntax outside the supported part.
    """
    return _Parser(pattern).parse()


class _Parser:
    """Recursive-descent parser of a pattern."""

    def __init__(self, pattern: str):
        self._pattern = pattern
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
        """Read the rest of ``{n}``, ``{n,}`` or ``{n,m}``."""
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
            return characters(self._class())
        if character == ".":
            return characters(complement(_LINE_FEED))
        if character == "\\":
            code = self._escape()
            return characters([(code, code)])
        if character in "^$*+?{}])":
            raise NotRegular(f"{character!r} is not supported here")
        return characters([(ord(character), ord(character))])

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

    def _escape(self) -> int:
        """Read the rest of an escape and return the code of its character."""
        character = self._take()
        if character in _CONTROL_ESCAPES:
            return ord(_CONTROL_ESCAPES[character])
        if character in _PUNCTUATION:
            return ord(character)
        raise NotRegular(f"the escape \\{character} is not supported")

    def _class(self) -> list[tuple[int, int]]:
        """Read the rest of a character class and return its characters."""
        negated = self._skip("^")
        ranges = []
        if self._peek() in ("]", "-"):
            raise NotRegular("']' and '-' at the start of a class are not supported")
        while not self._skip("]"):
            low = self._class_character()
            high = low
            if self._peek() == "-" and self._pattern[self._position + 1 :][:1] != "]":
                self._take()
                high = self._class_character()
            if high < low:
                raise NotRegular("invalid range in a class")
            ranges.append((low, high))
        return complement(ranges) if negated else ranges

    def _class_character(self) -> int:
        character = self._take()
        # Rust has nested classes, and the operators &&, -- and ~~.
        if character == "[" or (character in "&-~" and self._peek() == character):
            raise NotRegular("operators in classes are not supported")
        if character == "\\":
            return self._escape()
        return ord(character)
