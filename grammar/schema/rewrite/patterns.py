"""Patterns of JSON schemas as sets of strings, and patterns of their combinations.

ECMA-262 patterns may contain look-ahead, and anchors at any place, which the backends' patterns
lack. A complement, too, has no notation as a pattern. This module computes equivalent patterns
without look-ahead.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

from graft.grammar.regular.expression import (
    EMPTY,
    Expression,
    both,
    characters,
    concat,
    minus,
    repeat,
    union,
)
from graft.grammar.regular.pattern_text import matching_pattern
from graft.grammar.regular.regex import ANY, CHARACTER_CLASS, JSON_CLASSES, NoAutomaton, lower_regex
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.schema.rewrite.strings import PIECE, QUANTIFIER, ecma_pattern
from graft.native import _native

__all__ = ["DisjointPatterns", "complement_of", "have_common_string", "plain_pattern"]

_MAX_NESTING = 20
_MAX_PATTERNS = 40  # maximum number of patterns that replace patterns with common strings
_MAX_STATES = 2000  # maximum number of states of an automaton that finds common strings
# Work of writing the parts of a pattern: integers in expressions, and as many for each call.
_CALL_WORK = 100
_MAX_WORK = 2_000_000
_ANY_CHARACTER = characters(ANY)
_ANY_STRING = repeat(_ANY_CHARACTER, 0, None)
_NO_STRING = characters([])


class _Text(NamedTuple):
    """A part of a pattern without anchors and look-ahead."""

    pattern: str


class _Anchor(NamedTuple):
    """The start or the end of the string."""

    at_end: bool


class _Group(NamedTuple):
    """A group with an anchor or look-ahead in it."""

    options: list[list[_Part]]


class _Look(NamedTuple):
    """A look-ahead."""

    negative: bool
    options: list[list[_Part]]


_Part = _Text | _Anchor | _Group | _Look


def plain_pattern(pattern: str) -> str | None:
    """Convert an ECMA-262 pattern to a pattern that LLGuidance enforces; see `ecma_pattern`.

    Return None if no string matches `pattern`. Raise `NoExactForm` if no conversion is known.
    """
    outside = re.sub(rf"\\.|{CHARACTER_CLASS}", "", pattern, flags=re.DOTALL)
    if "(?" not in outside and "^" not in outside[1:] and "$" not in outside[:-1]:
        return ecma_pattern(pattern)
    try:
        options = _Reader(pattern).read()
    except NoAutomaton:
        options = []
    if not _is_beyond_llguidance(options, True, True):
        return ecma_pattern(pattern)
    written = _written(pattern, _strings_of(pattern))
    return None if written is None else ecma_pattern(written)


@functools.lru_cache(maxsize=256)
def complement_of(pattern: str) -> str | None:
    """Return a pattern of the strings that a pattern does not match; None if there are none.

    Raise `NoExactForm` if the complement is too complex.
    """
    return _written(pattern, minus(_ANY_STRING, _strings_of(pattern)))


class _Cell(NamedTuple):
    """Some of the strings that patterns match.

    Attributes
    ----------
    pattern
        Pattern of the strings; empty if it has not been written.
    strings, automaton
        Expression and automaton of the strings.
    matching
        The patterns that match the strings.
    """

    pattern: str
    strings: Expression
    automaton: _native.guide.Pattern
    matching: list[str]


class DisjointPatterns:
    """Replaces patterns of one schema document with patterns that have no common strings.

    The total work is limited.
    """

    def __init__(self) -> None:
        self._work = _native.guide.Work()

    def divide(self, patterns: Iterable[str]) -> dict[str, list[str]] | None:
        """Return patterns without common strings that together match the strings of some patterns.

        The list of a resulting pattern contains the given patterns that match all of its strings;
        the others match none of them. The result is None if the given patterns have no common
        strings, or if patterns without common strings are not known.
        """
        cells: list[_Cell] = []
        has_common = False
        try:
            for pattern in patterns:
                new = self._cell(pattern, _strings_of(pattern), [pattern])
                rest = new.strings
                new_cells = []
                for cell in cells:
                    if not self._have_common(cell, new):
                        new_cells.append(cell)
                        continue
                    has_common = True
                    rest = minus(rest, cell.strings)
                    common = both(cell.strings, new.strings)
                    new_cells.append(self._cell("", common, [*cell.matching, pattern]))
                    other = minus(cell.strings, new.strings)
                    new_cells.append(self._cell("", other, cell.matching))
                if rest is not new.strings:
                    new = self._cell("", rest, [pattern])
                cells = [*new_cells, new]
                if len(cells) > _MAX_PATTERNS:
                    return None
            if not has_common:
                return None
            found = {}
            for cell in cells:
                written = cell.pattern or matching_pattern(cell.strings)
                if written is not None:
                    found[written] = cell.matching
            return found
        except (NoAutomaton, NoExactForm):
            return None

    def _cell(self, pattern: str, strings: Expression, matching: list[str]) -> _Cell:
        return _Cell(pattern, strings, _automaton_of(strings, self._work), matching)

    def _have_common(self, one: _Cell, other: _Cell) -> bool:
        try:
            return bool(one.automaton.has_common_text(other.automaton, self._work))
        except ValueError as error:
            raise NoAutomaton(str(error)) from None


def _automaton_of(strings: Expression, work: _native.guide.Work) -> _native.guide.Pattern:
    try:
        return _native.guide.Pattern(strings, _MAX_STATES, work)
    except ValueError as error:
        raise NoAutomaton(str(error)) from None


def have_common_string(patterns: Iterable[str]) -> bool:
    """Return whether a string may match several of some patterns."""
    work = _native.guide.Work()
    try:
        automata = [_automaton_of(_strings_of(pattern), work) for pattern in patterns]
        pairs = itertools.combinations(automata, 2)
        return any(one.has_common_text(other, work) for one, other in pairs)
    except (ValueError, NoExactForm):  # NoAutomaton, or the comparisons take too long
        return True


def _is_empty(strings: Expression) -> bool:
    """Return whether an expression matches no string."""
    return bool(_automaton_of(strings, _native.guide.Work()).is_empty())


def _written(pattern: str, strings: Expression) -> str | None:
    """Return a pattern of the strings of an expression that was derived from `pattern`.

    Return None if `strings` is empty. Raise `NoExactForm` if the pattern is too long.
    """
    try:
        return matching_pattern(strings)
    except NoAutomaton as error:
        raise NoExactForm("pattern", f"{pattern!r}: {error}") from None


def _is_beyond_llguidance(options: list[list[_Part]], at_start: bool, at_end: bool) -> bool:
    """Return whether a pattern with these alternatives has look-ahead or anchors inside it.

    `at_start` and `at_end` say whether the alternatives are at the start and the end of a pattern.
    """
    for parts in options:
        for index, part in enumerate(parts):
            first = at_start and index == 0
            last = at_end and index == len(parts) - 1
            if isinstance(part, _Look):
                return True
            if isinstance(part, _Anchor) and not (last if part.at_end else first):
                return True
            if isinstance(part, _Group) and _is_beyond_llguidance(part.options, first, last):
                return True
    return False


@functools.lru_cache(maxsize=256)
def _strings_of(pattern: str) -> Expression:
    """Return the expression of the strings in which an ECMA-262 pattern matches some part."""
    writer = _Writer()
    try:
        found = []
        for option in _Reader(pattern).read():
            found.append(writer.following(option, _ANY_STRING, True))
            if not (option and option[0] == _Anchor(False)):
                later = writer.following(option, _ANY_STRING, False)
                found.append(concat([repeat(_ANY_CHARACTER, 1, None), later]))
        return union(found)
    except NoAutomaton as error:
        raise NoExactForm("pattern", f"{pattern!r}: {error}") from None


class _Writer:
    """Writes the parts of one pattern as expressions.

    The parts after a group are written once for each of its options, so the time that a pattern
    takes can be exponential in its length. `following` raises `NoAutomaton` after `_MAX_WORK`.
    """

    def __init__(self) -> None:
        self._work = 0

    def following(self, parts: list[_Part], rest: Expression, at_start: bool) -> Expression:
        """Return the expression of the strings that begin with a match of parts and then `rest`.

        If `at_start` is False, other characters precede these strings.
        """
        if not parts:
            return rest
        expression = self._with_first(parts[0], parts[1:], rest, at_start)
        self._work += _CALL_WORK + len(expression)
        if self._work > _MAX_WORK:
            raise NoAutomaton("the groups with anchors or look-ahead have too many options")
        return expression

    def _with_first(
        self, part: _Part, others: list[_Part], rest: Expression, at_start: bool
    ) -> Expression:
        """Implement `following` for a first part and the `others`."""
        if isinstance(part, _Anchor):
            following = self.following(others, rest, at_start)
            if part.at_end:
                return both(following, EMPTY)
            return following if at_start else _NO_STRING
        if isinstance(part, _Look):
            following = self.following(others, rest, at_start)
            looked = union([self.following(p, _ANY_STRING, at_start) for p in part.options])
            return minus(following, looked) if part.negative else both(following, looked)
        if isinstance(part, _Group):
            return union([self.following([*p, *others], rest, at_start) for p in part.options])
        text = ecma_pattern(part.pattern, without_nul=False)
        matched = lower_regex(text, classes=JSON_CLASSES)
        if at_start and _has_start(others) and not _is_empty(both(matched, EMPTY)):
            raise NoAutomaton("^ may follow other characters")
        return concat([matched, self.following(others, rest, False)])


def _has_start(parts: list[_Part]) -> bool:
    """Return whether parts contain the start of the string."""
    for part in parts:
        if part == _Anchor(False):
            return True
        if isinstance(part, _Group | _Look) and any(map(_has_start, part.options)):
            return True
    return False


class _Reader:
    """Reads the structure of an ECMA-262 pattern."""

    def __init__(self, pattern: str):
        self._pieces = PIECE.findall(pattern)
        self._at = 0

    def read(self) -> list[list[_Part]]:
        """Return the alternatives of the pattern."""
        options = self._alternatives(0)
        if self._at < len(self._pieces):
            raise NoAutomaton("a parenthesis is not closed")
        return options

    def _alternatives(self, nesting: int) -> list[list[_Part]]:
        if nesting > _MAX_NESTING:
            raise NoAutomaton("groups are nested too deeply")
        options: list[list[_Part]] = [[]]
        while self._at < len(self._pieces) and self._pieces[self._at] != ")":
            piece = self._pieces[self._at]
            self._at += 1
            if piece == "|":
                options.append([])
            elif piece in ("^", "$"):
                self._require_no_quantifier()
                options[-1].append(_Anchor(piece == "$"))
            elif piece.startswith("("):
                self._group(piece, nesting, options[-1])
            else:
                _append_text(options[-1], piece)
        return options

    def _group(self, piece: str, nesting: int, parts: list[_Part]) -> None:
        """Read the rest of a group, whose first piece has been read, and append it to `parts`."""
        start = self._at - 1
        kind = self._pieces[self._at] if piece == "(?" and self._at < len(self._pieces) else ""
        if kind == "<" and self._pieces[self._at + 1 : self._at + 2] in (["="], ["!"]):
            raise NoAutomaton("look-behind cannot be enforced")
        self._at += kind in ("=", "!", ":")
        options = self._alternatives(nesting + 1)
        if self._at == len(self._pieces):
            raise NoAutomaton("a parenthesis is not closed")
        self._at += 1
        if kind in ("=", "!"):
            self._require_no_quantifier()
            parts.append(_Look(kind == "!", options))
        elif all(isinstance(part, _Text) for option in options for part in option):
            _append_text(parts, "".join(self._pieces[start : self._at]))
        elif kind not in ("", ":"):
            raise NoAutomaton("a named group has an anchor or look-ahead in it")
        else:
            if self._pieces[self._at : self._at + 1] == ["?"]:
                self._at += 1
                options.append([])
            self._require_no_quantifier()
            parts.append(_Group(options))

    def _require_no_quantifier(self) -> None:
        """Raise `NoAutomaton` if a quantifier follows."""
        if self._at < len(self._pieces) and QUANTIFIER.fullmatch(self._pieces[self._at]):
            raise NoAutomaton("an anchor or look-ahead is repeated")


def _append_text(parts: list[_Part], text: str) -> None:
    if parts and isinstance(parts[-1], _Text):
        parts[-1] = _Text(parts[-1].pattern + text)
    else:
        parts.append(_Text(text))
