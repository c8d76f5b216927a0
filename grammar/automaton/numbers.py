"""Expressions of the JSON numbers that LLGuidance allows for bounds and divisors.

LLGuidance allows only some spellings of the numbers in a range. For example, next to the bound
16.87, it allows 16.80 and not 16.8. The functions of this module describe the same spellings.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, floor, gcd, lcm

from graft.grammar.regular.expression import (
    EMPTY,
    Expression,
    both,
    characters,
    concat,
    minus,
    multiple,
    optional,
    repeat,
    text,
    union,
)
from graft.grammar.regular.regex import NoAutomaton, lower_regex

__all__ = ["NOTHING", "NumberRange", "divisor_of", "lower_number"]

#: Expression that matches no text.
NOTHING: Expression = characters([])

#: Bounds that do not fit into 64 bits are not supported.
_MAX_INTEGER = (1 << 63) - 1
#: Maximum number of last digits that decide whether a number is a multiple of the divisor. For
#: other divisors, the automaton has a state for each remainder.
_MAX_DIGITS = 4

_DIGIT = lower_regex("[0-9]")
_DIGITS = repeat(_DIGIT, 0, None)
_FRACTION = optional(lower_regex(r"\.[0-9]+"))
_MINUS = text("-")
# The digits with the remainders 0, 1 and 2 when divided by 3 are 0369, 147 and 258. The pattern
# reads digits from one multiple of 3 to the next one.
_MULTIPLES_OF_3 = lower_regex(
    "([0369]|[258][0369]*[147]|([147]|[258][0369]*[258])([0369]|[147][0369]*[258])*"
    "([258]|[147][0369]*[147]))+"
)
_INTEGER = lower_regex("-?(0|[1-9][0-9]*)")
#: Numbers that are no integers.
_FRACTIONAL = lower_regex(r"-?(0|[1-9][0-9]*)\.[0-9]*[1-9][0-9]*")
_NUMBER = lower_regex(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?")


@dataclass(frozen=True)
class NumberRange:
    """The numbers between two bounds that are multiples of a divisor.

    Attributes
    ----------
    integer
        Whether the numbers are integers.
    low, high
        Inclusive bounds; None if there is none.
    above, below
        Exclusive bounds; None if there is none.
    divisor
        Divisor as a pair of integers: a coefficient, and the number of its digits after the decimal
        point. None if there is none.
    excluded
        Integers of which no number is a multiple; 1 excludes all integers.
    """

    integer: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    divisor: tuple[int, int] | None = None
    excluded: frozenset[int] = frozenset()

    def intersect(self, other: NumberRange) -> NumberRange:
        """Return the numbers that both ranges contain."""
        divisor = self.divisor or other.divisor
        if self.divisor and other.divisor:
            digits = max(self.divisor[1], other.divisor[1])
            scaled = [d[0] * 10 ** (digits - d[1]) for d in (self.divisor, other.divisor)]
            divisor = _reduced(lcm(*scaled), digits)
        return NumberRange(
            self.integer or other.integer,
            _max(self.low, other.low),
            _min(self.high, other.high),
            _max(self.above, other.above),
            _min(self.below, other.below),
            divisor,
            self.excluded | other.excluded,
        )


def lower_number(numbers: NumberRange) -> Expression:
    """Return the expression of the JSON texts that LLGuidance allows for the numbers of a range."""
    low, high = numbers.low, numbers.high
    low_inclusive = numbers.above is None or (low is not None and numbers.above < low)
    high_inclusive = numbers.below is None or (high is not None and numbers.below > high)
    low = low if low_inclusive else numbers.above
    high = high if high_inclusive else numbers.below
    includes_both = low_inclusive and high_inclusive
    if low is not None and high is not None and (low > high or (low == high and not includes_both)):
        return NOTHING
    if numbers.integer:
        expression = _integers(
            _first_integer(low, low_inclusive),
            None if high is None else _negated(_first_integer(-high, high_inclusive)),
        )
    else:
        expression = _fractions(low, high, low_inclusive, high_inclusive)
    if numbers.divisor is not None:
        expression = both(expression, _multiples(*numbers.divisor))
    for divisor in sorted(numbers.excluded):
        others = minus(_INTEGER, _multiples(divisor, 0)) if divisor > 1 else NOTHING
        if not numbers.integer:
            others = union([others, _FRACTIONAL])
        expression = both(expression, others)
    return expression


def _first_integer(bound: float | None, inclusive: bool) -> int | None:
    """Return the smallest integer that is at least `bound` or, if exclusive, larger than it."""
    if bound is None:
        return None
    integer = ceil(bound) if inclusive or bound != floor(bound) else floor(bound) + 1
    if abs(integer) > _MAX_INTEGER:
        raise NoAutomaton("a bound does not fit into 64 bits")
    return integer


def _negated(value: int | None) -> int | None:
    return None if value is None else -value


def _max(one: float | None, other: float | None) -> float | None:
    return one if other is None or (one is not None and one >= other) else other


def _min(one: float | None, other: float | None) -> float | None:
    return one if other is None or (one is not None and one <= other) else other


# Integers -----------------------------------------------------------------------------------------


def _integers(low: int | None, high: int | None) -> Expression:
    """Return the expression of the integers from `low` to `high`.

    If a range includes 0 and negative integers, and has two bounds or none, it includes ``-0``.
    """
    if low is None and high is None:
        return _INTEGER
    if low is not None and high is not None:
        if low > high:
            return NOTHING
        if high < 0:
            return concat([_MINUS, _whole(-high, -low)])
        if low < 0:
            return union([concat([_MINUS, _whole(0, -low)]), _whole(0, high)])
        return _whole(low, high)
    if low is not None:
        if low >= 0:
            return _whole(low, None)
        return union([concat([_MINUS, _whole(1, -low)]), _whole(0, None)])
    assert high is not None
    if high < 0:
        return concat([_MINUS, _whole(-high, None)])
    return union([concat([_MINUS, _whole(1, None)]), _whole(0, high)])


def _whole(low: int, high: int | None) -> Expression:
    """Return the expression of the integers from `low` to `high`, which are not negative."""
    options = []
    for length in range(len(str(low)), len(str(high if high is not None else low)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        last = 10**length - 1 if high is None else min(high, 10**length - 1)
        options.append(_same_length(str(first), str(last)))
    if high is None:
        more = len(str(low))
        options.append(concat([_digits(1, 9), repeat(_DIGIT, more, None)]))
    return union(options)


def _same_length(low: str, high: str) -> Expression:
    """Return the expression of the digit strings from `low` to `high`, which have equal lengths."""
    if not low:
        return EMPTY
    first, last = int(low[0]), int(high[0])
    if set(low) == {"0"} and set(high) == {"9"}:
        return repeat(_DIGIT, len(low), len(low))
    rest = len(low) - 1
    if first == last:
        return concat([text(low[0]), _same_length(low[1:], high[1:])])
    options = []
    if set(low[1:]) - {"0"}:
        options.append(concat([text(low[0]), _same_length(low[1:], "9" * rest)]))
        first += 1
    if set(high[1:]) - {"9"}:
        options.append(concat([text(high[0]), _same_length("0" * rest, high[1:])]))
        last -= 1
    if first <= last:
        options.append(concat([_digits(first, last), repeat(_DIGIT, rest, rest)]))
    return union(options)


def _digits(low: int, high: int) -> Expression:
    """Return the expression of one digit from `low` to `high`."""
    return characters([(0x30 + low, 0x30 + high)])


# Fractions ----------------------------------------------------------------------------------------


def _fractions(
    low: float | None, high: float | None, low_inclusive: bool, high_inclusive: bool
) -> Expression:
    """Return the expression of the numbers between two bounds; None: no bound."""
    if low is None and high is None:
        return _NUMBER
    if high is None:
        assert low is not None
        if low < 0:
            negative = _fractions(low, 0.0, low_inclusive, False)
            return union([negative, _fractions(0.0, None, True, False)])
        digits = len(str(int(low)))
        larger = concat([_digits(1, 9), repeat(_DIGIT, digits, None), _FRACTION])
        return union([_fractions(low, 10.0**digits, low_inclusive, False), larger])
    if low is None:
        if high < 0:
            return concat([_MINUS, _fractions(-high, None, high_inclusive, False)])
        negative = concat([_MINUS, _fractions(0.0, None, False, False)])
        if high > 0:
            return union([negative, _fractions(0.0, high, True, high_inclusive)])
        return union([negative, text("0")]) if high_inclusive else negative
    if low == high:
        return text(_decimal(low))
    if low < 0:
        if high < 0:
            return concat([_MINUS, _fractions(-high, -low, high_inclusive, low_inclusive)])
        options = [concat([_MINUS, _fractions(0.0, -low, False, low_inclusive)])]
        if high > 0 or high_inclusive:
            options.append(_fractions(0.0, high, True, high_inclusive))
            if low > -1:
                options.append(text("-0"))
        return union(options)
    return _between(_decimal(low), _decimal(high), low_inclusive, high_inclusive)


def _between(low: str, high: str, low_inclusive: bool, high_inclusive: bool) -> Expression:
    """Return the expression of the numbers between two bounds that are not negative.

    The bounds are decimal numbers without an exponent, and `low` is less than `high`.
    """
    low_whole, _, low_digits = low.partition(".")
    high_whole, _, high_digits = high.partition(".")
    first, last = int(low_whole), int(high_whole)
    if last > _MAX_INTEGER:
        raise NoAutomaton("a bound does not fit into 64 bits")
    point = text(".")
    if first == last:
        length = max(len(low_digits), len(high_digits))
        low_digits = low_digits.ljust(length, "0")
        high_digits = high_digits.ljust(length, "0")
        fraction = concat(
            [point, _digits_between(low_digits, high_digits, low_inclusive, high_inclusive)]
        )
        if int(low_digits) == 0 and low_inclusive:
            fraction = optional(fraction)
        return concat([text(low_whole), fraction])
    options = []
    if low_digits or not low_inclusive:
        options.append(concat([text(low_whole), point, _at_least(low_digits, low_inclusive)]))
        first += 1
    if last > first:
        options.append(concat([_whole(first, last - 1), _FRACTION]))
    if high_digits:
        fraction = concat([point, _at_most(high_digits, high_inclusive)])
        options.append(concat([text(high_whole), optional(fraction)]))
    elif high_inclusive:
        zeros = concat([point, repeat(text("0"), 1, None)])
        options.append(concat([text(high_whole), optional(zeros)]))
    return union(options) if options else NOTHING


def _digits_between(low: str, high: str, low_inclusive: bool, high_inclusive: bool) -> Expression:
    """Return the expression of the fraction digits from `low` to `high`, of equal lengths."""
    if low == high:
        return text(low) if low_inclusive and high_inclusive else NOTHING
    if low[0] == high[0]:
        rest = _digits_between(low[1:], high[1:], low_inclusive, high_inclusive)
        return concat([text(low[0]), rest])
    first, last = int(low[0]), int(high[0])
    options = [concat([text(low[0]), _at_least(low[1:].rstrip("0"), low_inclusive)])]
    if first + 1 < last:
        options.append(concat([_digits(first + 1, last - 1), _DIGITS]))
    rest_of_high = high[1:].rstrip("0")
    if rest_of_high or high_inclusive:
        options.append(concat([text(high[0]), _at_most(rest_of_high, high_inclusive)]))
    return union(options)


def _at_least(digits: str, inclusive: bool) -> Expression:
    """Return the expression of the digits of fractions that are at least `digits`.

    If the bound is exclusive, digits that begin with the bound match only if they continue it and
    do not end with 0.
    """
    if not digits:
        return _DIGITS if inclusive else concat([_DIGITS, _digits(1, 9)])
    if inclusive and len(digits) == 1:
        return concat([_digits(int(digits), 9), _DIGITS])
    options = [concat([text(digits[0]), _at_least(digits[1:], inclusive)])]
    if digits[0] != "9":
        options.append(concat([_digits(int(digits[0]) + 1, 9), _DIGITS]))
    return union(options)


def _at_most(digits: str, inclusive: bool) -> Expression:
    """Return the expression of the digits of fractions that are at most `digits`.

    Digits that are a proper prefix of the bound, or that continue the bound, do not match: with the
    bound 25, neither 2 nor 250 matches.
    """
    if not digits:
        return EMPTY
    first = int(digits[0])
    if not inclusive and len(digits) == 1:
        return concat([_digits(0, first - 1), _DIGITS]) if first else NOTHING
    options = [concat([text(digits[0]), _at_most(digits[1:], inclusive)])]
    if first > 0:
        options.append(concat([_digits(0, first - 1), _DIGITS]))
    return union(options)


def _decimal(value: float) -> str:
    """Return the shortest decimal notation without an exponent that converts back to `value`."""
    shortest = format(Decimal(repr(value)), "f")
    return shortest.rstrip("0").rstrip(".") if "." in shortest else shortest


# Multiples ----------------------------------------------------------------------------------------


def divisor_of(value: float) -> tuple[int, int]:
    """Return a divisor as LLGuidance reads it: a coefficient and a number of digits."""
    scaled = abs(float(value))
    digits = 0
    while scaled != floor(scaled):
        scaled *= 10.0
        digits += 1
    return _reduced(int(scaled), digits)


def _reduced(coefficient: int, digits: int) -> tuple[int, int]:
    while digits > 0 and coefficient % 10 == 0:
        coefficient //= 10
        digits -= 1
    return coefficient, digits


def _multiples(coefficient: int, digits: int) -> Expression:
    """Return the expression of the multiples of ``coefficient / 10**digits``.

    They have no exponent and at most `digits` digits after the point. Expressions of the last
    digits are preferred, because their automata are small. Raise `NoAutomaton` if a fraction has
    too many digits.
    """
    sign = optional(_MINUS)
    if coefficient == 0:
        return concat([sign, repeat(text("0"), 1, None)])
    if digits:
        ends_decide = 10 ** min(digits, _MAX_DIGITS) % coefficient == 0
        if digits > _MAX_DIGITS and not ends_decide:
            raise NoAutomaton("multipleOf is not supported for this fraction")
        fractions = []
        for length in range(1, digits + 1):
            if length < digits and 10 ** (digits - length) <= coefficient:
                continue  # LLGuidance allows no fewer digits here
            divisor = coefficient // gcd(coefficient, 10 ** (digits - length))
            if ends_decide:
                fractions.append(_with_remainder(length, divisor, 0))
            else:
                fractions.append(multiple(divisor, length))
        if not ends_decide:
            whole = multiple(coefficient // gcd(coefficient, 10**digits))
            return concat([sign, union([whole, *fractions])])
        fraction = optional(concat([text("."), union(fractions)]))
        return concat([sign, repeat(_DIGIT, 1, None), fraction])
    if coefficient % 3 == 0 and coefficient % 9:
        by_3 = concat([sign, _MULTIPLES_OF_3])
        return by_3 if coefficient == 3 else both(by_3, _multiples(coefficient // 3, 0))
    length = 0
    while 10**length % coefficient:
        length += 1
        if length > _MAX_DIGITS:
            return concat([sign, multiple(coefficient)])
    if length == 0:
        return concat([sign, repeat(_DIGIT, 1, None)])
    options = [concat([_DIGITS, _with_remainder(length, coefficient, 0)])]
    options += [_with_remainder(shorter, coefficient, 0) for shorter in range(1, length)]
    return concat([sign, union(options)])


@functools.cache
def _with_remainder(length: int, divisor: int, remainder: int) -> Expression:
    """Return the expression of the strings of `length` digits that leave a remainder."""
    if length == 0:
        return NOTHING if remainder else EMPTY
    if divisor == 1:
        return repeat(_DIGIT, length, length)
    by_rest: dict[int, list[int]] = {}
    for digit in range(10):
        rest = (remainder - digit * 10 ** (length - 1)) % divisor
        by_rest.setdefault(rest, []).append(digit)
    options = []
    for rest, first in by_rest.items():
        following = _with_remainder(length - 1, divisor, rest)
        if following != NOTHING:
            codes = [(0x30 + digit, 0x30 + digit) for digit in first]
            options.append(concat([characters(codes), following]))
    return union(options) if options else NOTHING
