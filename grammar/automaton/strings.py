"""Expressions of the JSON strings that LLGuidance allows for lengths and patterns."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from graft.grammar.regular.expression import (
    EMPTY,
    Expression,
    Ranges,
    both,
    characters,
    complement,
    concat,
    intersection,
    minus,
    repeat,
    text,
    union,
)
from graft.grammar.regular.regex import (
    ANY,
    JSON_CLASSES,
    MAX_COUNT,
    NoAutomaton,
    lower_regex,
    lower_search,
)
from graft.grammar.schema.name_spelling import EVERY_NAME
from graft.native import _native

__all__ = ["StringSet", "StringWriter", "has_common_text", "matches_name", "names_of"]

#: Letters of the short escapes of JSON strings, by the code of the escaped character.
_SHORT_ESCAPES = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_ESCAPED = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)]
_PLAIN = complement(_ESCAPED)
_QUOTE = text('"')
#: Writes a JSON value; ``json.dumps`` would create an encoder for each call.
_write_json = json.JSONEncoder(ensure_ascii=False).encode
#: Maximum numbers of cached expressions of patterns, and of sets of characters.
_MAX_CACHED = 256
#: Maximum number of states of the automaton of a pattern and a name.
_MAX_STATES = 32767


@dataclass(frozen=True)
class StringSet:
    """The strings of `low` to `high` characters that match all of some patterns.

    Attributes
    ----------
    low, high
        Minimum and maximum number of characters; no maximum if `high` is None.
    patterns
        Patterns, each with the way in which it applies: ``"search"`` if it matches some part of the
        string, ``"exclude"`` if it matches no part, ``"match"`` if it matches the whole string, and
        ``"text"`` if it is the string.
    """

    low: int = 0
    high: int | None = None
    patterns: tuple[tuple[str, str], ...] = ()

    def intersect(self, other: StringSet) -> StringSet:
        """Return the strings that are in both sets."""
        bounds = [bound for bound in (self.high, other.high) if bound is not None]
        patterns = dict.fromkeys((*self.patterns, *other.patterns))
        return StringSet(max(self.low, other.low), min(bounds, default=None), tuple(patterns))


def matches_name(pattern: str, name: str) -> bool:
    """Return whether the pattern of a JSON schema matches a property name.

    An automaton matches the name, because Python's ``re`` takes exponential time for some patterns.
    Raise `NoAutomaton` if the automaton is too large.
    """
    if pattern == EVERY_NAME:
        return True
    automaton = _name_automaton(pattern)
    return automaton is not None and automaton.matches(name.encode("utf-8", "surrogatepass"))


def has_common_text(one: Expression, other: Expression) -> bool:
    """Return whether two expressions match a common text.

    Raise `NoAutomaton` if the automaton is too large.
    """
    return _automaton(both(one, other), "two patterns") is not None


@functools.lru_cache(_MAX_CACHED)
def names_of(pattern: str) -> Expression:
    """Return the expression of the names that the pattern of a JSON schema matches."""
    return lower_search(pattern, characters, JSON_CLASSES)[0]


@functools.lru_cache(_MAX_CACHED)
def _name_automaton(pattern: str) -> _native.guide.Pattern | None:
    """Return the automaton of the pattern of a JSON schema; None if it matches no text."""
    return _automaton(names_of(pattern), f"pattern {pattern!r}")


def _automaton(expression: Expression, subject: str) -> _native.guide.Pattern | None:
    """Return the automaton of an expression; None if it matches no text.

    `subject` begins the message of the error for an automaton that is too large.
    """
    try:
        return _native.guide.Pattern(expression, _MAX_STATES)
    except ValueError as error:
        if "allows no text" in str(error):
            return None
        raise NoAutomaton(f"{subject}: {error}") from None


class StringWriter:
    r"""Writes strings of a JSON text as expressions.

    If `unicode_escapes` is False, strings contain no ``\u`` escapes, and therefore no control
    characters without a short escape.
    """

    def __init__(self, unicode_escapes: bool):
        self._unicode_escapes = unicode_escapes
        self._cached = functools.lru_cache(_MAX_CACHED)(self._escaped)
        self._any_character = self._one_of(ANY)
        self._any = repeat(self._any_character, 0, None)
        self.anything = concat([_QUOTE, self._any, _QUOTE])
        # The same patterns and formats often occur several times.
        self._write_patterns = functools.lru_cache(_MAX_CACHED)(self._patterns)

    def write(self, strings: StringSet) -> Expression:
        """Return the expression of the strings of a set, with their quotation marks."""
        if not strings.patterns:
            if strings.low == 0 and strings.high is None:
                return self.anything
            return concat([_QUOTE, self._length(strings.low, strings.high), _QUOTE])
        if len(strings.patterns) == 1 and strings.patterns[0][0] == "text":
            return self._patterns(strings)
        return self._write_patterns(strings)

    def _patterns(self, strings: StringSet) -> Expression:
        parts = []
        within = False
        for way, pattern in strings.patterns:
            if way == "text":
                if not strings.low <= len(pattern) <= _limit(strings.high):
                    return characters([])
                parts.append(self._text(pattern))
                within = True
            elif way == "match":
                parts.append(lower_regex(pattern, self._one_of, JSON_CLASSES))
            elif way == "exclude":
                parts.append(minus(self._any, self._search(pattern, 0, None)[0]))
            else:
                part, fits = self._search(pattern, strings.low, strings.high)
                parts.append(part)
                within |= fits
        if not within and (strings.low > 0 or strings.high is not None):
            parts.append(self._length(strings.low, strings.high))
        return concat([_QUOTE, functools.reduce(both, parts), _QUOTE])

    def name(self, name: str) -> Expression:
        """Return the expression of a listed property name, which has only one spelling."""
        return text(_write_json(name))

    def name_pattern(self, pattern: str, listed: list[Expression]) -> Expression:
        """Return the expression of the names that match a pattern and are not listed."""
        name = self.anything
        if pattern != EVERY_NAME:
            name = concat([_QUOTE, self._search(pattern, 0, None)[0], _QUOTE])
        return minus(name, union(listed)) if listed else name

    def other_names(self, listed: list[Expression], patterns: list[str]) -> Expression:
        """Return the expression of the names that are neither listed nor match a pattern."""
        excluded = [*listed]
        for pattern in patterns:
            excluded.append(self.name_pattern(pattern, []))
        return minus(self.anything, union(excluded)) if excluded else self.anything

    def _search(self, pattern: str, low: int, high: int | None) -> tuple[Expression, bool]:
        if not isinstance(pattern, str):
            raise NoAutomaton("a pattern must be a string")
        return lower_search(pattern, self._one_of, JSON_CLASSES, low, high)

    def _length(self, low: int, high: int | None) -> Expression:
        if max(low, high or 0) > MAX_COUNT:
            raise NoAutomaton("a length is too large")
        if high is not None and low > high:
            return characters([])
        return repeat(self._any_character, low, high)

    def _text(self, value: str) -> Expression:
        if value.isascii() and value.isprintable() and '"' not in value and "\\" not in value:
            return text(value)
        return concat(self._one_of([(ord(char), ord(char))]) for char in value) if value else EMPTY

    def _one_of(self, ranges: Ranges) -> Expression:
        """Return the expression of one character of the ranges, as JSON strings may contain it."""
        return self._cached(tuple(ranges))

    def _escaped(self, ranges: Ranges) -> Expression:
        """Implement `_one_of`.

        A character that must be escaped may have several forms: a short escape such as ``\\n``, and
        the escape ``\\u`` with four hexadecimal digits.
        """
        options = []
        plain = intersection(ranges, _PLAIN)
        if plain:
            options.append(characters(plain))
        codes = {
            code for low, high in intersection(ranges, _ESCAPED) for code in range(low, high + 1)
        }
        letters = sorted(ord(_SHORT_ESCAPES[code]) for code in codes & _SHORT_ESCAPES.keys())
        escapes = []
        if letters:
            escapes.append(characters([(letter, letter) for letter in letters]))
        if self._unicode_escapes:
            by_digit: dict[int, list[int]] = {}
            for code in sorted(codes - {0x22, 0x5C}):
                by_digit.setdefault(code >> 4, []).append(code & 15)
            digits = [
                concat([text(f"{first:x}"), _hexadecimal_digits(second)])
                for first, second in by_digit.items()
            ]
            if digits:
                escapes.append(concat([text("u00"), union(digits)]))
        if escapes:
            options.append(concat([text("\\"), union(escapes)]))
        return union(options) if options else characters([])


def _hexadecimal_digits(values: list[int]) -> Expression:
    """Return the expression of one hexadecimal digit, in lower or upper case, of some values."""
    letters = sorted({ord(case) for value in values for case in (f"{value:x}", f"{value:X}")})
    return characters([(letter, letter) for letter in letters])


def _limit(high: int | None) -> float:
    return float("inf") if high is None else high
