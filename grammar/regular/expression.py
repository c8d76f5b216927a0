"""Expressions of grammar rules as lists of integers, which native code compiles to automata.

An expression matches a set of texts. It is written in postfix notation;
``native/guide/automaton/expression.h`` defines the operations. The functions of this module build
expressions from smaller ones.

A grammar is a list of rules. The root is rule 0. Every other rule has an opening byte, a closing
byte and the expression of the texts between these two bytes. The function `call` builds the
expression that matches the texts of a rule with their two bytes, so rules may be recursive.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence

__all__ = [
    "EMPTY",
    "MAX_CHARACTER",
    "MAX_EXPRESSION",
    "MAX_SIZE",
    "Expression",
    "NoAutomaton",
    "Ranges",
    "both",
    "call",
    "characters",
    "complement",
    "concat",
    "intersection",
    "members",
    "minus",
    "multiple",
    "optional",
    "repeat",
    "text",
    "union",
    "words",
]

Expression = list[int]
#: Ranges of character codes, as pairs of the first and the last code.
Ranges = Sequence[tuple[int, int]]

MAX_CHARACTER = 0x10FFFF
#: Maximum number of integers in an expression. It limits the time and memory that the conversion of
#: a grammar takes.
MAX_EXPRESSION = 1 << 17
#: Maximum number of integers in a grammar, that is, in the expressions of all rules.
MAX_SIZE = 1 << 19
_SET, _CONCAT, _UNION, _REPEAT = 1, 2, 3, 4
_CALL, _MEMBERS, _BOTH, _MINUS, _MULTIPLE, _MEMBERS_WITH_ANY = 5, 6, 7, 8, 9, 10

#: Expression that matches only the empty text.
EMPTY: Expression = [0]


class NoAutomaton(ValueError):
    """A grammar has no automaton, because graft cannot lower it to rules."""


def characters(ranges: Ranges) -> Expression:
    """Return the expression that matches one character of the given ranges.

    It never matches surrogates (U+D800 to U+DFFF), because UTF-8 cannot encode them.
    """
    codes = [code for pair in ranges for code in pair]
    return [_SET, len(ranges), *codes]


def complement(ranges: Ranges) -> list[tuple[int, int]]:
    """Return the characters outside the given ranges, as ascending ranges."""
    out = []
    first = 0
    for low, high in sorted(ranges):
        if low > first:
            out.append((first, low - 1))
        first = max(first, high + 1)
    if first <= MAX_CHARACTER:
        out.append((first, MAX_CHARACTER))
    return out


def intersection(first: Ranges, second: Ranges) -> list[tuple[int, int]]:
    """Return the characters that are in both lists of ranges, as ascending ranges."""
    out = []
    for low, high in sorted(first):
        for other_low, other_high in sorted(second):
            if max(low, other_low) <= min(high, other_high):
                out.append((max(low, other_low), min(high, other_high)))
    return out


def text(value: str) -> Expression:
    """Return the expression that matches exactly one text."""
    out: Expression = []
    for code in map(ord, value):
        out += (_SET, 1, code, code)
    if len(value) != 1:
        out += (_CONCAT, len(value)) if value else EMPTY
    return out


def concat(parts: Iterable[Expression]) -> Expression:
    """Return the concatenation of expressions.

    Raise `NoAutomaton` if it would have more than `MAX_SIZE` integers. References in a small
    grammar can multiply the size of its expressions.
    """
    return _combine(_CONCAT, list(parts))


def union(options: Iterable[Expression]) -> Expression:
    """Return the union of expressions. There must be at least one option.

    Raise `NoAutomaton` as `concat` does.
    """
    return _combine(_UNION, list(options))


def repeat(part: Expression, low: int, high: int | None) -> Expression:
    """Return the expression of `low` to `high` repetitions; without a maximum if `high` is None."""
    return [*part, _REPEAT, low, -1 if high is None else high]


def optional(part: Expression) -> Expression:
    """Return the expression that matches the texts of `part` and the empty text."""
    return repeat(part, 0, 1)


def call(rule: int) -> Expression:
    """Return the expression of a rule's opening byte, a text of the rule, and its closing byte.

    `rule` is the rule's index in the list of rules, at least 1.
    """
    return [_CALL, rule]


def members(
    separator: Expression,
    items: Iterable[tuple[Expression, int, int | None]],
    any_of: Collection[int] = (),
) -> Expression:
    """Return the expression of items in order, with a separator between every two neighbours.

    Parameters
    ----------
    separator
        Expression between an item and the next one.
    items
        Expression of each item, and how often the item occurs: the minimum and the maximum, which
        is None if there is no maximum.
    any_of
        Indices of items of which at least one must occur. If there are none, all items that may be
        absent may be absent together.

    Notes
    -----
    An item with a minimum of 0 may be absent, and then has no separator. The automaton contains
    each item only a few times, so an object with n optional properties has O(n) states.
    """
    out: Expression = [*separator]
    counts = []
    for index, (item, low, high) in enumerate(items):
        out += item
        counts += [low, -1 if high is None else high]
        if any_of:
            counts.append(int(index in any_of))
    if any_of:
        return [*out, _MEMBERS_WITH_ANY, len(counts) // 3, *counts]
    return [*out, _MEMBERS, len(counts) // 2, *counts]


def both(first: Expression, second: Expression) -> Expression:
    """Return the expression of the texts that both expressions match.

    Neither expression may contain a `call`.
    """
    return [*first, *second, _BOTH]


def minus(first: Expression, second: Expression) -> Expression:
    """Return the expression of the texts that `first` matches and `second` does not.

    Neither expression may contain a `call`.
    """
    return [*first, *second, _MINUS]


def multiple(divisor: int, places: int = 0) -> Expression:
    """Return the expression of decimal digits with `places` digits after a point.

    The number of the digits, read without the point, is a multiple of `divisor`. There is at least
    one digit before the point, and no point if `places` is 0. Raise `NoAutomaton` if the divisor is
    large, because the automaton has a state for each remainder.
    """
    if divisor > MAX_EXPRESSION:
        raise NoAutomaton("a divisor is too large")
    return [_MULTIPLE, divisor, places]


def words(expression: Expression, max_words: int) -> list[str] | None:
    """Return all texts that an expression matches; None if there are more than `max_words`.

    The result is also None if the expression contains operations of `call`, `members`, `both`,
    `minus` or `multiple`.
    """
    stack: list[list[str]] = []
    at = 0
    while at < len(expression):
        operation, *rest = expression[at : at + 3]
        at += 1
        if operation == EMPTY[0]:
            stack.append([""])
        elif operation == _SET:
            bounds = expression[at + 1 : at + 1 + 2 * rest[0]]
            pairs = list(zip(bounds[::2], bounds[1::2], strict=True))
            if sum(high - low + 1 for low, high in pairs) > max_words:
                return None
            stack.append([chr(code) for low, high in pairs for code in range(low, high + 1)])
            at += 1 + 2 * rest[0]
        elif operation == _REPEAT:
            low, high = rest
            at += 2
            part = stack.pop()
            if high < 0 or high > max_words:
                return None
            found: list[str] = []
            for count in range(low, high + 1):
                power = _products([part] * count, max_words - len(found))
                if power is None:
                    return None
                found += power
            stack.append(found)
        elif operation not in (_CONCAT, _UNION):
            return None
        else:
            parts = stack[len(stack) - rest[0] :]
            del stack[len(stack) - rest[0] :]
            at += 1
            joined: list[str] | None = [text for part in parts for text in part]
            if operation == _CONCAT:
                joined = _products(parts, max_words)
            if joined is None or len(joined) > max_words:
                return None
            stack.append(joined)
    return list(dict.fromkeys(stack[0]))


def _products(parts: list[list[str]], max_words: int) -> list[str] | None:
    """Return all concatenations of one text of each part; None if they exceed `max_words`."""
    if math.prod(map(len, parts)) > max_words:
        return None
    return ["".join(texts) for texts in itertools.product(*parts)]


def _combine(operation: int, parts: list[Expression]) -> Expression:
    if not parts:
        return EMPTY
    if len(parts) == 1:
        return parts[0]
    if sum(map(len, parts)) > MAX_SIZE:
        raise NoAutomaton("the grammar is too large")
    out = []
    for part in parts:
        out += part
    return [*out, operation, len(parts)]
