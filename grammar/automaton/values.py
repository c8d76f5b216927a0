"""Reading of JSON schemas as sets of JSON values, as LLGuidance reads them.

`SchemaReader` converts a schema, in the form that `graft.grammar.schema.router.route` returns, to a
set of values (`Values`), and intersects the sets of keywords that apply to the same value. The
sets keep the order of properties. LLGuidance intersects the keywords of a schema in the order in
which they occur, so this order decides the order of the properties.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from graft.grammar.automaton.formats import FORMATS
from graft.grammar.automaton.numbers import NumberRange, divisor_of
from graft.grammar.automaton.strings import NamePatterns, StringSet
from graft.grammar.regular.regex import NoAutomaton
from graft.grammar.schema.documents import dialect, word_set
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.schema.references import References

__all__ = [
    "ANYTHING",
    "NOTHING",
    "NULL",
    "Anything",
    "Arrays",
    "Booleans",
    "Null",
    "Objects",
    "Reference",
    "SchemaReader",
    "Union",
    "Values",
    "merged_objects",
]

#: Maximum number of sets that reading a schema may create, plus the number of values in enums.
MAX_SETS = 50_000
#: Number of matches of property names against patterns that take as long as creating a set.
_MATCHES_PER_SET = 5
#: Maximum number of items of an array that keywords such as ``contains`` require.
MAX_CONTAINED = 3
#: Maximum nesting of intersections, as in LLGuidance.
_MAX_NESTING = 100


@dataclass(frozen=True, slots=True)
class Anything:
    """All JSON values."""


@dataclass(frozen=True, slots=True)
class Null:
    """The value null."""


@dataclass(frozen=True, slots=True)
class Booleans:
    """Both booleans or, if `value` is not None, one of them."""

    value: bool | None = None


@dataclass(eq=False, slots=True)
class Arrays:
    """Arrays whose first items are in the sets `prefix`, and whose other items are in `items`.

    Each set in `contained` contains an item of the array. If a set is in the list n times, it
    contains n items of the array. If `unique` is True, no two items are equal; the rules of an
    automaton do not enforce this, see `graft.grammar.automaton.unique_items`.
    """

    prefix: list[Values] = field(default_factory=list)
    items: Values | None = None
    low: int = 0
    high: int | None = None
    contained: list[Values] = field(default_factory=list)
    unique: bool = False


@dataclass(eq=False, slots=True)
class Objects:
    """Objects whose properties are in sets by name, or by a pattern that the name matches.

    Attributes
    ----------
    properties
        Sets of values by name.
    patterns
        Sets of values by pattern. No name matches several patterns.
    additional
        Set of the values of all other properties; None if they may have any value.
    required
        Names of required properties, as the keys of a dictionary, in order.
    any_of
        Names of properties of which at least one is required; empty if none is. Only
        `merged_objects` sets it.
    low, high
        Minimum and maximum number of properties; no maximum if `high` is None.
    """

    properties: dict[str, Values] = field(default_factory=dict)
    patterns: dict[str, Values] = field(default_factory=dict)
    additional: Values | None = None
    required: dict[str, None] = field(default_factory=dict)
    low: int = 0
    high: int | None = None
    any_of: frozenset[str] = frozenset()


@dataclass(eq=False, slots=True)
class Union:
    """Values that are in at least one of several sets; no values without `options`."""

    options: list[Values]


@dataclass(frozen=True, slots=True)
class Reference:
    """A set of values that `SchemaReader.resolve` looks up by its name `target`.

    `target` is the target of a ``$ref``, or a name that the reader gave to an intersection of which
    one set is a `Reference`. References are resolved only when the values are lowered, so
    intersections may be recursive.
    """

    target: str


Values = Anything | Null | Booleans | NumberRange | StringSet | Arrays | Objects | Union | Reference

ANYTHING = Anything()
NULL = Null()
NOTHING = Union([])
_BOOLEANS = Booleans()
_TYPES = ("null", "boolean", "number", "string", "array", "object")
#: Keywords that list the allowed values, or contain further schemas for the same value.
_APPLICATORS = frozenset(["const", "enum", "allOf", "anyOf", "oneOf", "$ref"])
_ASSERTIONS = word_set(
    """type items additionalItems prefixItems minItems maxItems properties additionalProperties
    patternProperties required minProperties maxProperties minLength maxLength pattern format
    minimum maximum exclusiveMinimum exclusiveMaximum multipleOf
    contains minContains uniqueItems notPattern notMultipleOf"""
)
#: Keywords for which no lowering is known.
_REFUSED = word_set(
    """oneOf not if maxContains propertyNames dependencies dependentRequired
    dependentSchemas unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef"""
)
#: Keywords that list the properties or items to which a keyword does not apply.
_LISTED = {"additionalProperties": "properties", "items": "prefixItems"}
#: Keywords that LLGuidance ignores in older drafts, with the first draft in which it knows them. A
#: schema of only unknown keywords and annotations allows any value.
_SINCE = {"const": 6, "prefixItems": 2019}


class SchemaReader:
    """Reads the subschemas of one document; `root` is the document.

    Raise `NoAutomaton` if a keyword is not supported, or if the schema is too large.
    """

    def __init__(self, root: Any):
        self._references: References | None = None
        self._root = root
        draft = dialect(root, 2020)
        unknown = frozenset(key for key, since in _SINCE.items() if draft < since)
        self._known = (_APPLICATORS | _ASSERTIONS) - unknown
        self._has_prefix_items = draft >= 2020
        self._targets: dict[str, Values] = {}
        # References to intersections: the sets to intersect by the target of the reference, and the
        # reference by the keys of the sets. The key of a set is the target of a reference, and the
        # identity of any other set.
        self._parts: dict[str, list[Values]] = {}
        self._intersections: dict[tuple[str | int, ...], Reference] = {}
        self._resolving: set[str] = set()
        self._names = NamePatterns()
        self._count = 0

    def resolve(self, reference: Reference) -> Values:
        """Return the set of values of a reference's target."""
        target = reference.target
        values = self._targets.get(target)
        if values is not None:
            return values
        if target in self._parts:
            values = ANYTHING
            for part in self._parts[target]:
                values = self.intersect(values, self._dereferenced(part))
        else:
            if self._references is None:
                self._references = References(self._root)
            try:
                schema = self._references.resolve(target)
            except NoExactForm as error:
                raise NoAutomaton(str(error)) from None
            values = self.read(schema)
        self._targets[target] = values
        return values

    def values_of(self, objects: Objects, name: str) -> Values:
        """Return the set of the values that a property of some objects may have."""
        if name in objects.properties:
            return objects.properties[name]
        for pattern, values in objects.patterns.items():
            if self._names.matches(pattern, name):
                return values
        return objects.additional or ANYTHING

    def _dereferenced(self, values: Values) -> Values:
        """Follow references to other definitions, and return the set of values at the end."""
        targets = []
        while isinstance(values, Reference):
            if values.target in self._resolving:
                raise NoAutomaton("a reference leads to itself")
            targets.append(values.target)
            self._resolving.add(values.target)
            values = self.resolve(values)
        self._resolving.difference_update(targets)
        return values

    def _intersect_later(self, one: Values, other: Values) -> Values:
        """Return a reference to the intersection of two sets, at least one of them a reference."""
        parts: dict[str | int, Values] = {}
        for values in (one, other):
            if isinstance(values, Reference) and values.target in self._parts:
                inner = self._parts[values.target]
            else:
                inner = [values]
            for part in inner:
                parts.setdefault(part.target if isinstance(part, Reference) else id(part), part)
        if len(parts) == 1:
            return one
        key = tuple(parts)
        if key not in self._intersections:
            reference = self._intersections[key] = Reference(f"intersection {len(self._parts)}")
            self._parts[reference.target] = list(parts.values())
        return self._intersections[key]

    def read(self, schema: Any) -> Values:
        """Return the set of values that a schema allows."""
        if isinstance(schema, bool):
            return ANYTHING if schema else NOTHING
        if not isinstance(schema, dict):
            raise NoAutomaton("a schema must be an object or a boolean")
        self._count += 1
        if self._count > MAX_SETS:
            raise NoAutomaton("the schema is too large")
        if self._known.isdisjoint(schema):
            return ANYTHING
        result: Values = ANYTHING
        assertions: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _REFUSED:
                raise NoAutomaton(f"keyword {key!r} is not supported")
            if key in _APPLICATORS:
                result = self.intersect(result, self._read_assertions(schema, assertions))
                assertions = {}
                result = self._apply(result, key, value)
            elif key in _ASSERTIONS:
                assertions[key] = value
                # The schema of additional properties depends on the names of the listed ones, and
                # the schema of further items on the number of the first ones.
                listed = _LISTED.get(key)
                if listed is not None and listed in schema and listed not in assertions:
                    parts = schema[listed]
                    if isinstance(parts, dict):
                        assertions[listed] = dict.fromkeys(parts, True)
                    else:
                        assertions[listed] = [True] * len(parts)
        return self.intersect(result, self._read_assertions(schema, assertions))

    def _apply(self, values: Values, key: str, argument: Any) -> Values:
        """Return the values that also satisfy a keyword in `_APPLICATORS`."""
        if key == "$ref":
            return self.intersect(values, Reference(argument))
        if key == "const":
            return self.intersect(values, _constant(argument))
        if key == "enum":
            self._count += len(argument)
            return self.intersect(values, Union(list(map(_constant, argument))))
        if key == "anyOf":
            return self.intersect(values, _union(list(map(self.read, argument))))
        if key == "allOf":
            for part in argument:
                values = self.intersect(values, self.read(part))
            return values
        raise NoAutomaton(f"keyword {key!r} is not supported")

    def _read_assertions(self, schema: dict[str, Any], assertions: dict[str, Any]) -> Values:
        """Return the values that satisfy `assertions`.

        These are the keywords of `schema` except for those that combine schemas, such as ``allOf``.
        """
        if not assertions:
            return ANYTHING
        types = schema.get("type", _TYPES)
        if isinstance(types, str):
            return self._read_type(types, assertions)
        options = [self._read_type(name, assertions) for name in types]
        return options[0] if len(options) == 1 else Union(options)

    def _read_type(self, name: str, assertions: dict[str, Any]) -> Values:
        if name == "string":
            return _read_string(assertions)
        if name == "object":
            return self._read_object(assertions)
        if name == "array":
            return self._read_array(assertions)
        if name in ("integer", "number"):
            return _read_number(assertions, name == "integer")
        if name == "boolean":
            return _BOOLEANS
        if name == "null":
            return NULL
        raise NoAutomaton(f"type {name!r} is not supported")

    def _read_array(self, assertions: dict[str, Any]) -> Arrays:
        prefix = assertions.get("prefixItems")
        items = assertions.get("items")
        additional = assertions.get("additionalItems")
        if isinstance(items, list):
            prefix, items = items, additional
        elif not self._has_prefix_items or additional is not None:
            prefix = None
        return Arrays(
            [self.read(item) for item in prefix or ()],
            None if items is None else self.read(items),
            _count(assertions, "minItems") or 0,
            _count(assertions, "maxItems"),
            self._read_contained(assertions),
            assertions.get("uniqueItems") is True,
        )

    def _read_contained(self, assertions: dict[str, Any]) -> list[Values]:
        if "contains" not in assertions:
            return []
        count = assertions.get("minContains", 1)
        if count > MAX_CONTAINED:
            raise NoAutomaton("contains requires too many items")
        return [self.read(assertions["contains"])] * count

    def _read_object(self, assertions: dict[str, Any]) -> Values:
        read = self.read
        properties = {
            name: read(part) for name, part in (assertions.get("properties") or {}).items()
        }
        patterns = {
            name: read(part) for name, part in (assertions.get("patternProperties") or {}).items()
        }
        required = dict.fromkeys(assertions.get("required") or ())
        self._count_matches(len({*properties, *required}), len(patterns))
        self._require_disjoint(patterns, patterns)
        for name in properties if patterns else ():
            for pattern, values in patterns.items():
                if self._names.matches(pattern, name):
                    properties[name] = self.intersect(properties[name], values)
                    break
        additional = assertions.get("additionalProperties")
        return _objects(
            Objects(
                properties,
                patterns,
                None if additional is None else read(additional),
                required,
                _count(assertions, "minProperties") or 0,
                _count(assertions, "maxProperties"),
            )
        )

    def _count_matches(self, num_names: int, num_patterns: int) -> None:
        """Count the matches of property names against patterns as sets.

        Raise `NoAutomaton` if they would take too long.
        """
        self._count += num_names * num_patterns // _MATCHES_PER_SET
        if self._count > MAX_SETS:
            raise NoAutomaton("the schema has too many property names and patterns")

    def _require_disjoint(self, patterns: Iterable[str], others: Iterable[str]) -> None:
        """Raise `NoAutomaton` if a name matches two different patterns, one of each list.

        Also raise it if the comparisons would take too long.
        """
        for one, other in itertools.product(patterns, others):
            if one != other and not self._names.are_disjoint(one, other):
                raise NoAutomaton(f"a name matches the patterns {one!r} and {other!r}")

    def intersect(self, one: Values, other: Values, nesting: int = 0) -> Values:
        """Return the values that are in both sets. Properties keep the order of `one`."""
        if one is ANYTHING:
            return other
        if other is ANYTHING:
            return one
        self._count += 1
        if nesting > _MAX_NESTING or self._count > MAX_SETS:
            raise NoAutomaton("the schema is too large, or combined with itself")
        nesting += 1
        if isinstance(one, Reference) or isinstance(other, Reference):
            return self._intersect_later(one, other)
        if isinstance(one, Union):
            return _union([self.intersect(option, other, nesting) for option in one.options])
        if isinstance(other, Union):
            return _union([self.intersect(one, option, nesting) for option in other.options])
        if isinstance(one, Objects) and isinstance(other, Objects):
            return self._intersect_objects(one, other, nesting)
        if isinstance(one, Arrays) and isinstance(other, Arrays):
            return self._intersect_arrays(one, other, nesting)
        if isinstance(one, StringSet) and isinstance(other, StringSet):
            return one.intersect(other)
        if isinstance(one, NumberRange) and isinstance(other, NumberRange):
            return one.intersect(other)
        if isinstance(one, Booleans) and isinstance(other, Booleans):
            if one.value is None or one.value == other.value:
                return other
            return one if other.value is None else NOTHING
        if isinstance(one, Null) and isinstance(other, Null):
            return NULL
        return NOTHING

    def _intersect_optional(
        self, one: Values | None, other: Values | None, nesting: int
    ) -> Values | None:
        if one is None or other is None:
            return other if one is None else one
        return self.intersect(one, other, nesting)

    def _intersect_arrays(self, one: Arrays, other: Arrays, nesting: int) -> Arrays:
        length = max(len(one.prefix), len(other.prefix))
        prefixes = []
        for part in (one, other):
            rest = part.items or ANYTHING
            prefixes.append([*part.prefix, *[rest] * (length - len(part.prefix))])
        return Arrays(
            [self.intersect(a, b, nesting) for a, b in zip(*prefixes, strict=True)],
            self._intersect_optional(one.items, other.items, nesting),
            max(one.low, other.low),
            _smaller(one.high, other.high),
            [*one.contained, *other.contained],
            one.unique or other.unique,
        )

    def _intersect_objects(self, one: Objects, other: Objects, nesting: int) -> Values:
        num_names = len({*one.properties, *other.properties, *one.required, *other.required})
        self._count_matches(num_names, len(one.patterns) + len(other.patterns))
        self._require_disjoint(one.patterns, other.patterns)
        properties = {}
        for name, values in one.properties.items():
            properties[name] = self.intersect(values, self.values_of(other, name), nesting)
        for name, values in other.properties.items():
            if name not in properties:
                properties[name] = self.intersect(self.values_of(one, name), values, nesting)
        patterns: dict[str, Values] = {}
        for pattern, values in one.patterns.items():
            there = other.patterns.get(pattern, other.additional)
            patterns[pattern] = self.intersect(
                values, ANYTHING if there is None else there, nesting
            )
        for pattern, values in other.patterns.items():
            if pattern not in patterns:
                here = one.additional or ANYTHING
                patterns[pattern] = self.intersect(values, here, nesting)
        return _objects(
            Objects(
                properties,
                patterns,
                self._intersect_optional(one.additional, other.additional, nesting),
                {**one.required, **other.required},
                max(one.low, other.low),
                _smaller(one.high, other.high),
            )
        )


def _objects(objects: Objects) -> Values:
    most = objects.high
    is_empty = most is not None and (objects.low > most or len(objects.required) > most)
    return NOTHING if is_empty else objects


def merged_objects(options: list[Values]) -> list[Values]:
    """Return fewer sets with the same union: sets of objects that differ in `required` are merged.

    An example is ``{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}`` next to properties. The
    automaton of the union would have a state for each set of options that a text may still match.
    """
    groups: dict[Any, list[Values]] = {}
    for option in options:
        key: Any = id(option)
        if isinstance(option, Objects) and option.low == 0 and option.high is None:
            properties = tuple((name, id(part)) for name, part in option.properties.items())
            patterns = tuple((name, id(part)) for name, part in option.patterns.items())
            key = properties, patterns, id(option.additional)
        groups.setdefault(key, []).append(option)
    found: list[Values] = []
    for group in groups.values():
        objects = [option for option in group if isinstance(option, Objects)]
        merged = _merged(objects) if len(objects) > 1 else None
        found += group if merged is None else [merged]
    return found


def _merged(group: list[Objects]) -> Objects | None:
    """Return the union of sets of objects that differ in `required`; None if it has no form."""
    first = group[0]
    common = dict.fromkeys(
        name for name in first.required if all(name in one.required for one in group)
    )
    # Required names that are not listed as properties follow the others in this order.
    last = [name for name in first.required if name not in first.properties]
    any_of = set()
    for one in group:
        others = [name for name in one.required if name not in common]
        if [name for name in one.required if name not in one.properties] != last:
            return None
        if not others:
            return one  # the other sets are parts of it
        if len(others) > 1 or others[0] not in one.properties:
            return None
        any_of.add(others[0])
    return dataclasses.replace(first, required=common, any_of=frozenset(any_of))


def _union(options: list[Values]) -> Values:
    """Return the union of sets; `ANYTHING` if it is one of them."""
    found: list[Values] = []
    for option in options:
        if option is ANYTHING:
            return ANYTHING
        if isinstance(option, Union):
            found += option.options
        else:
            found.append(option)
    return found[0] if len(found) == 1 else Union(found)


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((bound for bound in (one, other) if bound is not None), default=None)


def _count(assertions: dict[str, Any], keyword: str) -> int | None:
    value = assertions.get(keyword)
    if value is not None and (type(value) is not int or value < 0):
        raise NoAutomaton(f"{keyword} is not a number of values")
    return value


def _read_string(assertions: dict[str, Any]) -> StringSet:
    patterns: list[tuple[str, str]] = []
    if "pattern" in assertions:
        patterns.append(("search", assertions["pattern"]))
    if "format" in assertions:
        if assertions["format"] not in FORMATS:
            raise NoAutomaton(f"format {assertions['format']!r} is not supported")
        patterns.append(("match", FORMATS[assertions["format"]]))
    if "notPattern" in assertions:
        patterns.append(("exclude", assertions["notPattern"].value))
    return StringSet(
        _count(assertions, "minLength") or 0, _count(assertions, "maxLength"), tuple(patterns)
    )


def _read_number(assertions: dict[str, Any], integer: bool) -> NumberRange:
    bounds = {}
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        value = assertions.get(keyword)
        if isinstance(value, bool):  # draft 4
            value = assertions.get(keyword.removeprefix("exclusive").lower()) if value else None
        bounds[keyword] = None if value is None else _double(value)
    divisor = assertions.get("multipleOf")
    return NumberRange(
        integer,
        bounds["minimum"],
        bounds["maximum"],
        bounds["exclusiveMinimum"],
        bounds["exclusiveMaximum"],
        None if divisor is None else divisor_of(divisor),
        frozenset([assertions["notMultipleOf"].value] if "notMultipleOf" in assertions else ()),
    )


def _double(value: float) -> float:
    """Return the double that LLGuidance reads for a number."""
    try:
        double = float(value)
    except OverflowError:
        double = math.inf
    if not math.isfinite(double):
        raise NoAutomaton("a number is too large")
    return double


def _constant(value: Any) -> Values:
    """Return the set of one value. An object's properties have the order of the value."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return Booleans(value)
    if isinstance(value, str):
        return StringSet(patterns=(("text", value),))
    if isinstance(value, int | float):
        integer = isinstance(value, int) and -(1 << 63) <= value < 1 << 63
        return NumberRange(integer, _double(value), _double(value))
    if isinstance(value, list):
        return Arrays(list(map(_constant, value)), NOTHING, len(value), len(value))
    properties = {name: _constant(part) for name, part in value.items()}
    return Objects(properties, additional=NOTHING, required=dict.fromkeys(properties))
