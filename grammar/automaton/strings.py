r"""Expressions of JSON strings, by their length and the patterns that they match.

The strings contain escapes of their characters as follows.

* Where a set of characters is possible that contains control characters or characters outside
  ASCII, all characters of the set may be written as escapes. This is the case, for example, in
  strings without a pattern.
* Where only printable ASCII characters are possible, for example in the date ``"2024-01-31"``, no
  character is written as an escape unless JSON requires it. Models do not write such escapes, and
  they would multiply the states of a pattern's automaton.
* Names of properties are compared by value; see `NameWriter`.

LLGuidance allows ``\u`` escapes for control characters only. After ``\u00``, a model that was
trained to write ``ü`` as ``\u00fc`` could then only write a control character.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from graft.grammar.automaton.escapes import spelled
from graft.grammar.regular.expression import (
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

__all__ = ["ANY_STRING", "NamePatterns", "NameWriter", "StringSet", "write_string"]

_QUOTE = text('"')
_NOT_PRINTABLE_ASCII = complement([(0x20, 0x7E)])
#: ASCII characters that names never contain as escapes in an object with listed names, and a
#: pattern of the other ASCII characters.
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_OTHER_ASCII = re.compile("[^0-9A-Z_a-z\x80-\U0010ffff]")
#: Maximum number of cached expressions of patterns.
_MAX_CACHED = 256
#: Maximum number of states of the automaton of a pattern of property names.
_MAX_STATES = 32767
#: Maximum number of elementary steps for all patterns of property names in a schema (about 0.1 s).
_MAX_STEPS = 20_000_000


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


class NamePatterns:
    """The patterns of property names of one schema document, as automata.

    Automata match the names, because Python's ``re`` takes exponential time for some patterns. The
    total work for all patterns of a document is limited. The methods raise `NoAutomaton` if it
    would take too long, or if an automaton is too large.
    """

    def __init__(self) -> None:
        self._work = _native.guide.Work(_MAX_STEPS)
        self._automata: dict[str, _native.guide.Pattern] = {}
        self._disjoint: set[tuple[str, str]] = set()

    def matches(self, pattern: str, name: str) -> bool:
        """Return whether a pattern matches a property name."""
        if pattern == EVERY_NAME:
            return True
        return bool(self._automaton(pattern).matches(name.encode("utf-8", "surrogatepass")))

    def are_disjoint(self, one: str, other: str) -> bool:
        """Return whether no property name matches two different patterns."""
        pair = min(one, other), max(one, other)
        if pair in self._disjoint:
            return True
        automata = [self._automaton(pattern) for pattern in pair]
        with _limits(f"patterns {one!r} and {other!r}"):
            if automata[0].has_common_text(automata[1], self._work):
                return False
        self._disjoint.add(pair)
        return True

    def _automaton(self, pattern: str) -> _native.guide.Pattern:
        if pattern not in self._automata:
            names = lower_search(pattern, characters, JSON_CLASSES)[0]
            with _limits(f"pattern {pattern!r}"):
                self._automata[pattern] = _native.guide.Pattern(names, _MAX_STATES, self._work)
        return self._automata[pattern]


@contextlib.contextmanager
def _limits(subject: str) -> Iterator[None]:
    """Turn an error of native code into `NoAutomaton`, whose message begins with `subject`.

    Native code raises ValueError if a limit is exceeded.
    """
    try:
        yield
    except ValueError as error:
        raise NoAutomaton(f"{subject}: {error}") from None


def _in_any_spelling(ranges: Ranges) -> Expression:
    """Return the expression of one character of the ranges, in all its spellings."""
    return spelled(tuple(ranges), tuple(ranges))


def _in_string(ranges: Ranges) -> Expression:
    """Return the expression of one character of the ranges, as a string may contain it.

    The docstring of this module says which characters may also be written as escapes.
    """
    escaped = ranges if intersection(ranges, _NOT_PRINTABLE_ASCII) else ()
    return spelled(tuple(ranges), tuple(escaped))


_ANY_CHARACTER = _in_string(ANY)
_ANY_TEXT = repeat(_ANY_CHARACTER, 0, None)
#: Expression of all JSON strings.
ANY_STRING = concat([_QUOTE, _ANY_TEXT, _QUOTE])


def write_string(strings: StringSet) -> Expression:
    """Return the expression of the strings of a set, with their quotation marks."""
    if not strings.patterns:
        if strings.low == 0 and strings.high is None:
            return ANY_STRING
        return concat([_QUOTE, _length(strings.low, strings.high), _QUOTE])
    if len(strings.patterns) == 1 and strings.patterns[0][0] == "text":
        return _write_patterns(strings)
    # The same patterns and formats often occur several times.
    return _write_patterns_once(strings)


def _write_patterns(strings: StringSet) -> Expression:
    low, high = strings.low, strings.high
    parts = []
    within = False
    for way, pattern in strings.patterns:
        if not isinstance(pattern, str):
            raise NoAutomaton("a pattern must be a string")
        if way == "text":
            if len(pattern) < low or (high is not None and len(pattern) > high):
                return characters([])
            parts.append(_text(pattern))
            within = True
        elif way == "match":
            parts.append(lower_regex(pattern, _in_string, JSON_CLASSES))
        elif way == "exclude":
            excluded, _ = lower_search(pattern, _in_any_spelling, JSON_CLASSES)
            parts.append(minus(_ANY_TEXT, excluded))
        else:
            part, fits = lower_search(pattern, _in_string, JSON_CLASSES, low, high)
            parts.append(part)
            within |= fits
    if not within and (low > 0 or high is not None):
        parts.append(_length(low, high))
    return concat([_QUOTE, functools.reduce(both, parts), _QUOTE])


_write_patterns_once = functools.lru_cache(_MAX_CACHED)(_write_patterns)


def _length(low: int, high: int | None) -> Expression:
    if max(low, high or 0) > MAX_COUNT:
        raise NoAutomaton("a length is too large")
    if high is not None and low > high:
        return characters([])
    return repeat(_ANY_CHARACTER, low, high)


def _text(value: str) -> Expression:
    if _has_one_spelling(value):
        return text(value)
    return concat(_in_string([(ord(char), ord(char))]) for char in value)


def _has_one_spelling(value: str) -> bool:
    """Return whether all characters of a text are written as themselves only."""
    return value.isascii() and value.isprintable() and '"' not in value and "\\" not in value


class NameWriter:
    r"""Writes the names of the properties of an object as expressions.

    The names ``"a"`` and ``"\u0061"`` are equal, so an escape must not turn a listed name into one
    that is not listed. If the object has listed names or patterns of names, ASCII letters, digits,
    the underscore and the ASCII characters of listed names are therefore not written as escapes
    unless JSON requires it. All other characters can be written as escapes.

    Parameters
    ----------
    listed
        The listed names.

    Attributes
    ----------
    listed
        The expressions of the listed names.
    """

    def __init__(self, listed: Collection[str]):
        self._escaped = _escaped_in_names(frozenset(_OTHER_ASCII.findall("".join(listed))))
        self.listed = list(map(self._name, listed))

    def matching(self, pattern: str) -> Expression:
        """Return the expression of the names that match a pattern and are not listed."""
        return _without(self._matching(pattern), self.listed)

    def others(self, patterns: Collection[str]) -> Expression:
        """Return the expression of the names that are not listed and match none of the patterns."""
        if not self.listed and not patterns:
            return ANY_STRING
        return _without(self._matching(EVERY_NAME), [*self.listed, *map(self._matching, patterns)])

    def _name(self, name: str) -> Expression:
        if _has_one_spelling(name):
            return text(f'"{name}"')
        return concat([_QUOTE, *(self._one_of([(ord(char), ord(char))]) for char in name), _QUOTE])

    def _matching(self, pattern: str) -> Expression:
        if pattern == EVERY_NAME:
            name = repeat(self._one_of(ANY), 0, None)
        else:
            name, _ = lower_search(pattern, self._one_of, JSON_CLASSES)
        return concat([_QUOTE, name, _QUOTE])

    def _one_of(self, ranges: Ranges) -> Expression:
        return spelled(tuple(ranges), self._escaped)


@functools.lru_cache(_MAX_CACHED)
def _escaped_in_names(listed: frozenset[str]) -> tuple[tuple[int, int], ...]:
    """Return the characters that names may contain as escapes in an object with listed names.

    `listed` are the characters of the listed names that are neither in `_WORD` nor outside ASCII.
    """
    return tuple(complement([*_WORD, *((ord(char), ord(char)) for char in listed)]))


def _without(names: Expression, excluded: list[Expression]) -> Expression:
    return minus(names, union(excluded)) if excluded else names
