"""Rewrite numeric bounds, multiples and listed values so that LLGuidance enforces them exactly.

LLGuidance 1.9 reads all numbers of a schema as doubles, and some numbers with 16 or more digits as
a neighbor of the nearest double. It converts bounds to 64-bit integers. For ``integer``, it makes
an exclusive bound inclusive by adding or subtracting 1. With a bound beyond 2**53, it can therefore
allow a number outside the bounds. LLGuidance also treats an exclusive whole bound as inclusive if
the other bound has the same whole part, for example 0 and 0.5.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any, NamedTuple

from graft.grammar.schema.documents import JsonTypes, SchemaObject, can_combine
from graft.grammar.schema.reasons import NoExactForm

__all__ = ["BOUNDS", "Numbers", "Restricted", "has_many_digits"]

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
#: All integers up to this number are exactly representable as doubles.
_MAX_EXACT = 1 << 53
_MAX_INTEGER = (1 << 63) - 1  # largest number in LLGuidance's patterns of numbers
_LARGEST_DOUBLE = (1 << 63) - 1024  # largest double below 2**63
_LARGEST = "9.22e18"
#: If a lower bound is at least _MANY_DIGITS, LLGuidance needs an upper bound, too. Similarly, an
#: upper bound of at most -_MANY_DIGITS needs a lower bound. `_within_64_bits` adds these bounds.
_MANY_DIGITS = 10**18
_DOUBLE_DIGITS = 15  # number of decimal digits that every double represents exactly
_MAX_EXPONENT = 300  # LLGuidance is assumed to read numbers with a larger exponent inexactly
#: Smallest absolute value of a bound. LLGuidance nests the pattern of a bound once per digit, so
#: smaller bounds would be nested too deeply.
_SMALLEST = 1e-22

# LLGuidance reads a multipleOf as an integer divided by a power of 10. This is the largest integer.
_MAX_COEFFICIENT = (1 << 32) - 1
_MAX_MULTIPLES = 16  # maximum number of multiples between bounds that are written as an enum
_NOT_BELOW_0 = "not all numbers between -1 and 0 are produced"


class _Bound(NamedTuple):
    """A lower or upper bound."""

    value: Fraction
    strict: bool  # whether the bound itself is excluded
    keyword: str


class Restricted(NamedTuple):
    """The numeric keywords of one subschema in a form that LLGuidance enforces exactly.

    Attributes
    ----------
    keywords
        Keywords that replace the bounds and the ``multipleOf`` of the subschema.
    narrowed
        Descriptions of the valid numbers that the new keywords exclude, by keyword.
    empty
        Whether no number is valid.
    """

    keywords: SchemaObject
    narrowed: dict[str, str]
    empty: bool = False


class Numbers:
    """Rewrites the numeric keywords of the subschemas of one document, `parts`."""

    def __init__(self, parts: list[tuple[str, SchemaObject]]):
        self._has_integers = False
        #: Bounds of the current subschema and of those that LLGuidance may combine with it.
        self._bounds: set[Fraction] = set()
        self._multiples: list[Fraction] = []
        self._combines = can_combine(parts)
        for _, part in parts:
            json_type = part.get("type")
            self._has_integers |= json_type == "integer" or (
                isinstance(json_type, list) and "integer" in json_type
            )
            if self._combines:
                self._bounds |= _named_numbers(part)

    def values(self, values: list[Any]) -> list[Any]:
        """Return those values of an ``enum`` whose numbers LLGuidance writes exactly."""
        return [value for value in values if self._is_written_exactly(value)]

    def restrict(self, schema: SchemaObject, types: JsonTypes) -> Restricted:
        """Return the bounds and the ``multipleOf`` of a schema in a form that is enforced exactly.

        The schema may follow any draft. `types` are the JSON types of the schema's values. Raise
        `NoExactForm` if no exact form is known.
        """
        keywords = {key: schema[key] for key in (*BOUNDS, "multipleOf") if key in schema}
        if not keywords:
            return Restricted({}, {})
        step = None
        if "multipleOf" in schema:
            step = self._step(schema["multipleOf"])
        low, high = _bounds(schema)
        own_bounds = _named_numbers(schema)
        if self._combines:
            self._bounds |= own_bounds
        else:
            self._bounds = own_bounds
        is_integer = "integer" in types
        narrowed: dict[str, str] = {}
        if step is not None and step.denominator > 1 and "number" in types:
            for bound in self._bounds - own_bounds:
                if bound.denominator > 1:
                    why = f"LLGuidance cannot combine it with the bound {_text(bound)}"
                    raise NoExactForm("multipleOf", why)
                if step < 1 and not _is_power_of_ten(step):
                    narrowed["multipleOf"] = _NOT_BELOW_0
        if step is not None and (low or high):
            return self._multiples_between(keywords, step, low, high, is_integer, narrowed)
        is_read = all(_is_read_exactly(bound.value) for bound in (low, high) if bound)
        if is_read and (
            is_integer
            or not (self._may_become_inclusive(low) or self._may_become_inclusive(high, -1))
        ):
            # Bounds that are whole numbers are written without ".0". LLGuidance would read
            # 9007199254740991.0 as 90071992547409910 / 10, and a double cannot represent this
            # dividend exactly (`_read_double`).
            whole = {
                key: _json(_exact(keywords[key])) for key in BOUNDS if _is_number(keywords.get(key))
            }
            return Restricted({**keywords, **whole}, narrowed)
        if is_integer:
            low = _whole(low, 1)
            high = _whole(high, -1)
        if low and high and (low.value > high.value or (low.value == high.value and low.strict)):
            return Restricted({}, {}, empty=True)
        low, high = _within_64_bits(low, high, is_integer, narrowed)
        low = self._representable(low, 1, is_integer, narrowed)
        high = self._representable(high, -1, is_integer, narrowed)
        if low and high and low.value > high.value:
            raise NoExactForm(low.keyword, "LLGuidance reads no number between the bounds exactly")
        return Restricted(_keywords(low, high), narrowed)

    def _step(self, value: Any) -> Fraction:
        """Return the value of a ``multipleOf`` as a fraction.

        Raise `NoExactForm` if LLGuidance cannot read it exactly, cannot combine it with the
        ``multipleOf`` of another subschema, or would take too long to compile it.
        """
        step = _exact(value)
        if step > _MAX_COEFFICIENT or _read_multiple(float(value)) != step:
            raise NoExactForm("multipleOf", f"LLGuidance cannot read {str(value)[:40]} exactly")
        for other in self._multiples:
            scale = max(step.denominator, other.denominator)
            if step != other and step * other * scale * scale > _MAX_COEFFICIENT:
                why = f"LLGuidance cannot combine it with the multiples of {float(other)}"
                raise NoExactForm("multipleOf", why)
        common = math.lcm(*(one.numerator for one in (step, *self._multiples)))
        if _takes_long(common):
            raise NoExactForm("multipleOf", f"LLGuidance takes too long for multiples of {common}")
        if self._combines:
            self._multiples.append(step)
        return step

    def _multiples_between(
        self,
        keywords: SchemaObject,
        step: Fraction,
        low: _Bound | None,
        high: _Bound | None,
        is_integer: bool,
        narrowed: dict[str, str],
    ) -> Restricted:
        """Return a form of a ``multipleOf`` with bounds that LLGuidance enforces exactly.

        `keywords` are the schema's numeric keywords, and `step` is the value of ``multipleOf``.
        `is_integer` is True if all valid numbers are integers. Each bound is replaced with the
        nearest multiple of `step` that satisfies it. If the new form excludes valid numbers, the
        method adds a description of these numbers to `narrowed`.
        """
        if is_integer:
            step = Fraction(step.numerator)  # least common multiple of step and 1
        low = _multiple(low, step, 1)
        high = _multiple(high, step, -1)
        if low and high and low.value > high.value:
            return Restricted({}, {}, empty=True)
        low, high = _within_64_bits(low, high, is_integer, narrowed)
        # Near a fractional bound, and between -1 and 0, LLGuidance may allow only one decimal. It
        # would then exclude some of the multiples of a ``multipleOf`` such as 0.25, which need two
        # decimals. If a bound is fractional and there are few multiples between the bounds, an enum
        # lists them. Otherwise, the bounds are replaced with whole numbers.
        is_split = any(bound.value.denominator > 1 for bound in (low, high) if bound)
        is_listed = low and high and high.value - low.value < _MAX_MULTIPLES * step
        if not _is_power_of_ten(step) and not (is_split and is_listed):
            low = _inner_whole(low, 1, narrowed)
            high = _inner_whole(high, -1, narrowed)
            if low and high and low.value > high.value:
                raise NoExactForm("multipleOf", "LLGuidance cannot write all multiples")
            is_below_0 = (not low or low.value < 0) and (not high or high.value >= 0)
            if step < 1 and is_below_0:
                narrowed["multipleOf"] = _NOT_BELOW_0
        low = self._representable(low, 1, is_integer, narrowed)
        high = self._representable(high, -1, is_integer, narrowed)
        if low and high:
            count = high.value // step - math.ceil(low.value / step) + 1
            if count < 1:
                raise NoExactForm("multipleOf", "LLGuidance reads no multiple exactly")
            found = _finds_multiple(low, high, float(keywords["multipleOf"]), is_integer)
            if not found or (is_split and is_listed):
                if count > _MAX_MULTIPLES:
                    raise NoExactForm("multipleOf", "LLGuidance finds no multiple between bounds")
                first = math.ceil(low.value / step)
                listed = [_json((first + index) * step) for index in range(count)]
                return Restricted({"enum": listed}, narrowed)
        return Restricted({"multipleOf": keywords["multipleOf"], **_keywords(low, high)}, narrowed)

    def _may_become_inclusive(self, bound: _Bound | None, sign: int = 1) -> bool:
        """Return whether LLGuidance may treat an exclusive bound as inclusive.

        `sign` is 1 for lower bounds and -1 for upper bounds.
        """
        if bound is None or not bound.strict or bound.value.denominator > 1:
            return False
        return sign * bound.value >= 0 and self._gap(bound, sign) < 1

    def _gap(self, bound: _Bound, sign: int) -> Fraction:
        """Return the distance from a bound to the nearest other bound that satisfies it.

        The other bounds are those of subschemas that LLGuidance may combine with the current one
        (`_bounds`). Return 1 if none of them satisfies the bound. `sign` is 1 for lower bounds and
        -1 for upper bounds.
        """
        distances = [sign * (value - bound.value) for value in self._bounds]
        return min((distance for distance in distances if distance > 0), default=Fraction(1))

    def _representable(
        self, bound: _Bound | None, sign: int, is_integer: bool, narrowed: dict[str, str]
    ) -> _Bound | None:
        """Return the closest bound that LLGuidance reads exactly and that allows no invalid number.

        `sign` is 1 for lower bounds and -1 for upper bounds. `is_integer` is True if all valid
        numbers are integers. If the new bound excludes valid numbers, the method adds a description
        of these numbers to `narrowed`.
        """
        if bound is None:
            return None
        if _is_read_exactly(bound.value):
            if is_integer or not self._may_become_inclusive(bound, sign):
                return bound
            return self._bound_inside(bound, sign, narrowed)
        if is_integer and bound.value == _MAX_INTEGER and sign < 0:
            return bound  # LLGuidance reads this number as 2**63 and reduces it to 2**63 - 1
        found = float(bound.value)
        if 0 < abs(found) < _SMALLEST:
            near = (sign * value for value in (-_SMALLEST, 0.0, _SMALLEST))
            found = sign * min(value for value in near if value > sign * bound.value)
        while True:
            # `read` contains the values that LLGuidance may use for the bound `found`, a double.
            # The pattern that it builds for integers uses the exact value of the double. The
            # pattern for other numbers uses the double's shortest decimal form (4611686018427388000
            # for 2**62).
            read = [Fraction(found)] if is_integer else [Fraction(found), _exact(found)]
            inside = [sign * (value - bound.value) for value in read]
            is_inside = min(inside) > 0 or (min(inside) == 0 and not bound.strict)
            if is_inside and _read_double(_json(Fraction(found))) == found:
                break
            found = math.nextafter(found, sign * math.inf)
        value = read[-1]
        if max(inside) > 0:
            narrowed.setdefault(bound.keyword, _not_produced(bound.value, value))
        return _Bound(value, False, bound.keyword)

    def _bound_inside(self, bound: _Bound, sign: int, narrowed: dict[str, str]) -> _Bound:
        """Return the inclusive bound that replaces an exclusive bound, a whole number.

        LLGuidance may treat the exclusive bound as inclusive (`_may_become_inclusive`). The new
        bound is therefore greater than a lower bound (`sign` 1), or less than an upper bound
        (`sign` -1), by a power of 1/10. The numbers between the two bounds are then not produced;
        the method describes them in `narrowed`.
        """
        digits = max(1, 15 - len(str(abs(bound.value.numerator)).lstrip("0")))
        gap = self._gap(bound, sign)
        while Fraction(1, 10**digits) * 10 > gap:
            digits += 1
        value = bound.value + sign * Fraction(1, 10**digits)
        if _exact(float(value)) != value:
            raise NoExactForm(bound.keyword, f"LLGuidance allows {bound.value}")
        narrowed[bound.keyword] = _not_produced(bound.value, value)
        return _Bound(value, False, bound.keyword)

    def _is_written_exactly(self, value: Any) -> bool:
        """Return whether LLGuidance writes the numbers in a value of an ``enum`` exactly."""
        if isinstance(value, list):
            return all(map(self._is_written_exactly, value))
        if isinstance(value, dict):
            return all(map(self._is_written_exactly, value.values()))
        if not _is_number(value):
            return True
        if isinstance(value, float) and _read_double(value) != value:
            return False
        if abs(value) < _MAX_EXACT:
            return True
        if isinstance(value, int) and value in (_MAX_INTEGER, -_MAX_INTEGER - 1):
            return value > 0  # the smallest integer of 64 bits makes LLGuidance crash
        if abs(value) > _MAX_INTEGER and self._has_integers:
            return False
        try:
            number = float(value)
        except OverflowError:
            return False
        if isinstance(value, int) and abs(value) <= _MAX_INTEGER:
            return int(number) == value
        return _exact(number) == _exact(value)


def has_many_digits(value: Any) -> bool:
    """Return whether a number has more digits than doubles represent exactly."""
    if not _is_number(value):
        return False
    return abs(value) >= _MAX_EXACT or len(Decimal(repr(value)).as_tuple().digits) > _DOUBLE_DIGITS


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _exact(value: Any) -> Fraction:
    """Return the number that the JSON text of a value denotes."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def _named_numbers(schema: SchemaObject) -> set[Fraction]:
    return {_exact(schema[key]) for key in BOUNDS if key in schema and _is_number(schema[key])}


def _json(value: Fraction) -> int | float:
    """Return a number as an int if it is whole, and as a float otherwise."""
    return value.numerator if value.denominator == 1 else float(value)


def _bounds(schema: SchemaObject) -> tuple[_Bound | None, _Bound | None]:
    """Return the lower and the upper bound of a schema of any draft."""
    found: list[_Bound | None] = []
    for name, sign in (("inimum", 1), ("aximum", -1)):
        bounds = []
        strict = schema.get(f"exclusiveM{name}")
        if _is_number(schema.get(f"m{name}")):
            value = _exact(schema[f"m{name}"])
            bounds.append(_Bound(value, strict is True, f"m{name}"))
        if _is_number(strict):
            bounds.append(_Bound(_exact(strict), True, f"exclusiveM{name}"))
        key = {bound: (sign * bound.value, bound.strict) for bound in bounds}
        found.append(max(bounds, key=key.__getitem__) if bounds else None)
    return found[0], found[1]


def _keywords(low: _Bound | None, high: _Bound | None) -> SchemaObject:
    """Return the JSON schema keywords that express two bounds."""
    keywords: SchemaObject = {}
    for bound, name in ((low, "inimum"), (high, "aximum")):
        if bound:
            prefix = "exclusiveM" if bound.strict else "m"
            keywords[prefix + name] = _json(bound.value)
    return keywords


def _whole(bound: _Bound | None, sign: int) -> _Bound | None:
    """Return the inclusive whole bound that is equivalent to `bound` for integers.

    `sign` is 1 for lower bounds and -1 for upper bounds.
    """
    return _multiple(bound, Fraction(1), sign)


def _multiple(bound: _Bound | None, step: Fraction, sign: int) -> _Bound | None:
    """Return the first multiple of `step` inside a bound, as an inclusive bound.

    `sign` is 1 for lower bounds and -1 for upper bounds.
    """
    if bound is None:
        return None
    count = sign * math.ceil(sign * bound.value / step)
    if bound.strict and count * step == bound.value:
        count += sign
    return _Bound(count * step, False, bound.keyword)


def _inner_whole(bound: _Bound | None, sign: int, narrowed: dict[str, str]) -> _Bound | None:
    """Return the closest inclusive whole bound that allows no number that `bound` excludes.

    `sign` is 1 for lower bounds and -1 for upper bounds. If the new bound differs, the function
    adds a description of the numbers between the two bounds to `narrowed`.
    """
    inner = _whole(bound, sign)
    if bound and inner and inner.value != bound.value:
        narrowed.setdefault(bound.keyword, _not_produced(bound.value, inner.value))
    return inner


def _is_power_of_ten(step: Fraction) -> bool:
    """Return whether a decimal fraction is 1, 0.1, 0.01 and so on."""
    return step.numerator == 1 and str(step.denominator).rstrip("0") == "1"


def _within_64_bits(
    low: _Bound | None, high: _Bound | None, is_integer: bool, narrowed: dict[str, str]
) -> tuple[_Bound | None, _Bound | None]:
    """Return the bounds, limited to 64 bits where LLGuidance requires it.

    `is_integer` is True if all valid numbers are integers. If the new bounds exclude valid numbers,
    the function adds a description of these numbers to `narrowed`.
    """
    largest = Fraction(_MAX_INTEGER if is_integer else _LARGEST_DOUBLE)
    smallest = Fraction(-_LARGEST_DOUBLE)
    if high and high.value > _MAX_INTEGER:
        high = _Bound(largest, False, high.keyword)
        narrowed[high.keyword] = f"numbers above {_LARGEST} are not produced"
    elif low and not high and low.value >= _MANY_DIGITS:
        high = _Bound(largest, False, low.keyword)
        narrowed[low.keyword] = f"numbers above {_LARGEST} are not produced"
    if low and low.value < smallest:
        low = _Bound(smallest, False, low.keyword)
        narrowed[low.keyword] = f"numbers below -{_LARGEST} are not produced"
    elif high and not low and high.value <= -_MANY_DIGITS:
        low = _Bound(smallest, False, high.keyword)
        narrowed[high.keyword] = f"numbers below -{_LARGEST} are not produced"
    if low and high and low.value > high.value:
        raise NoExactForm(low.keyword, "LLGuidance writes no number between the bounds")
    return low, high


def _not_produced(bound: Fraction, value: Fraction) -> str:
    low, high = sorted((_text(bound), _text(value)), key=Decimal)
    return f"numbers between {low} and {high} are not produced"


def _text(value: Fraction) -> str:
    with localcontext() as context:
        context.prec = 30
        return str(Decimal(value.numerator) / Decimal(value.denominator))


def _is_read_exactly(value: Fraction) -> bool:
    """Return whether LLGuidance reads a bound exactly.

    The absolute value of a whole number must be below 2**53. The absolute value of another number
    must be at least `_SMALLEST`. Python's decimal form of its double must equal the number, and
    LLGuidance must read this form as the same double.
    """
    if value.denominator == 1:
        return abs(value) < _MAX_EXACT
    number = float(value)
    return abs(number) >= _SMALLEST and _exact(number) == value and _read_double(number) == number


def _read_double(value: int | float) -> float:
    """Return the double that LLGuidance reads for a number.

    LLGuidance divides or multiplies the digits by a power of 10. Each of the two factors and the
    result may be rounded to a double, so the value may differ from the nearest double.
    """
    if isinstance(value, int):
        return float(value)
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    magnitude = float(int("".join(map(str, digits))))
    if abs(exponent) > _MAX_EXPONENT:
        return math.nan
    if exponent < 0:
        magnitude /= float(10**-exponent)
    else:
        magnitude *= float(10**exponent)
    return -magnitude if sign else magnitude


def _takes_long(divisor: int) -> bool:
    """Return whether LLGuidance may compile multiples of `divisor` for more than about a second.

    LLGuidance computes the remainders of numbers when it compiles a schema, without a limit. The
    bounds of this function were measured. A few more zeros at the end of a divisor cost little.
    """
    digits = divisor
    while digits % 10 == 0:
        digits //= 10
    coprime = digits  # without the factors 2 and 5
    for factor in (2, 5):
        while coprime % factor == 0:
            coprime //= factor
    return digits > 100 and (divisor > 100_000 or coprime > 1 << 15)


def _read_multiple(value: float) -> Fraction | None:
    """Return a value of ``multipleOf`` as LLGuidance reads it; None if LLGuidance refuses it."""
    digits = 0
    while value != math.floor(value):
        value *= 10
        digits += 1
    if value > _MAX_COEFFICIENT:
        return None
    return Fraction(int(value), 10**digits)


def _finds_multiple(low: _Bound, high: _Bound, step: float, is_integer: bool) -> bool:
    """Return whether LLGuidance finds a multiple of `step` between two bounds.

    LLGuidance calculates with doubles, so rounding errors may hide the only multiple. `is_integer`
    is True if all valid numbers are integers.
    """
    first = math.ceil(float(low.value) / step) * step
    last = math.floor(float(high.value) / step) * step
    if is_integer:
        first = math.ceil(first)
        last = math.floor(last)
    return first <= last
