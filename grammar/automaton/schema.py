"""Lowering of JSON schemas to rules in brackets; see `graft.grammar.regular.expression`.

Each object and each array of a schema is a rule, so schemas may be recursive, and the size of the
rules grows with the schema and not with its nesting. For a schema that has no exact lowering,
`SchemaLowering.lower` raises `NoAutomaton`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from graft.grammar.automaton.numbers import NOTHING, NumberRange, lower_number
from graft.grammar.automaton.strings import ANY_STRING, NameWriter, StringSet, write_string
from graft.grammar.automaton.values import (
    ANYTHING,
    NULL,
    Arrays,
    Booleans,
    Objects,
    Reference,
    SchemaReader,
    Union,
    Values,
    merged_objects,
)
from graft.grammar.regular.expression import (
    EMPTY,
    MAX_SIZE,
    Expression,
    NoAutomaton,
    call,
    characters,
    concat,
    members,
    optional,
    repeat,
    text,
    union,
)
from graft.grammar.regular.regex import MAX_COUNT
from graft.grammar.schema.llguidance_options import OPTIONS, PLAIN_ESCAPES, json_options
from graft.grammar.spec import Whitespace

__all__ = ["Document", "Rule", "Rules", "SchemaLowering"]

#: A rule: its opening and closing byte, and the expression of the text between them. The root of a
#: grammar has no brackets; its bytes are 0.
Rule = tuple[int, int, Expression]

#: Maximum number of rules.
MAX_RULES = 1 << 14
#: Maximum number of integers in the expressions of all items and members that are built for a
#: schema. Rules with equal expressions are merged, so it is larger than `MAX_SIZE`.
MAX_BUILT = 4 * MAX_SIZE
#: Maximum number of items of an array that may be absent although their schemas are listed. Each of
#: them is nested in the one before it, and expressions cannot be nested more deeply.
MAX_ABSENT_ITEMS = 256

_OBJECT = (ord("{"), ord("}"))
_ARRAY = (ord("["), ord("]"))
_WHITE_SPACE = characters([(0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20)])
_TRUE = text("true")
_FALSE = text("false")
_BOTH = union([_TRUE, _FALSE])
_NULL = text("null")


class Rules:
    """The rules of a grammar. Rule 0 is its root."""

    def __init__(self) -> None:
        self._rules: list[Rule] = [(0, 0, EMPTY)]
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}
        self._size = 0

    def add(self, brackets: tuple[int, int], body: Expression) -> int:
        """Add a rule, unless an equal rule exists, and return its index."""
        new = len(self._rules)
        rule = self._known.setdefault((brackets[0], tuple(body)), new)
        if rule == new:
            self.reserve(brackets)
            self.set(rule, body)
        return rule

    def reserve(self, brackets: tuple[int, int]) -> int:
        """Add a rule whose expression `set` will define, and return its index."""
        if len(self._rules) == MAX_RULES:
            raise NoAutomaton("the grammar is too large")
        self._rules.append((*brackets, NOTHING))
        return len(self._rules) - 1

    def set(self, rule: int, body: Expression) -> None:
        """Define the expression of a rule."""
        self._size += len(body)
        if self._size > MAX_SIZE:
            raise NoAutomaton("the grammar is too large")
        self._rules[rule] = (*self._rules[rule][:2], body)

    def finish(self, root: Expression) -> list[Rule]:
        """Define the root of the grammar and return all rules."""
        self.set(0, root)
        return self._rules


def _ordered_partitions(elements: list[int]) -> Iterator[list[list[int]]]:
    """Yield the divisions of some elements into groups, in every order of the groups."""
    if not elements:
        yield []
        return
    first, *others = elements
    for groups in _ordered_partitions(others):
        for index in range(len(groups) + 1):
            yield [*groups[:index], [first], *groups[index:]]
        for index in range(len(groups)):
            yield [*groups[:index], [first, *groups[index]], *groups[index + 1 :]]


class _Layout:
    """The separators and the white space of JSON texts for a value of `Spec.whitespace`.

    Attributes
    ----------
    comma, colon
        Expressions of the separators between members, and between a name and its value.
    space
        Expression of the white space after an opening bracket and after each member.
    """

    def __init__(self, whitespace: Whitespace):
        options = json_options(whitespace)
        comma = text(options.get("item_separator", ","))
        colon = text(options.get("key_separator", ":"))
        self.space = EMPTY
        if options.get("whitespace_flexible", True):
            high = whitespace if isinstance(whitespace, int) else None
            self.space = repeat(_WHITE_SPACE, 0, high)
            comma = concat([comma, self.space])
            colon = concat([self.space, colon, self.space])
        self.comma = comma
        self.colon = colon


@functools.cache
def _layout(whitespace: Whitespace) -> _Layout:
    return _Layout(whitespace)


class SchemaLowering:
    """Lowers schemas to rules that allow the JSON texts that LLGuidance allows, with more escapes.

    `graft.grammar.automaton.strings` describes the escapes of strings.

    Parameters
    ----------
    rules
        Rules to which the rules of the schemas are added.
    whitespace
        Value of `Spec.whitespace`.
    """

    def __init__(self, rules: Rules, whitespace: Whitespace):
        self._rules = rules
        self._layout = _layout(whitespace)

    def lower(self, schema: Any) -> Expression:
        """Return the expression of a schema, in the form that the router returns.

        Raise `NoAutomaton` if the schema is not supported.
        """
        document = self.document(schema)
        return document.lower(document.reader.read(schema))

    def document(self, schema: Any) -> Document:
        """Return the lowering of the values of a schema; see `lower`."""
        options = schema.get(OPTIONS) if isinstance(schema, dict) else None
        if options not in (None, PLAIN_ESCAPES):
            raise NoAutomaton("these options of LLGuidance are not supported")
        return Document(self._rules, self._layout, schema)


class Document:
    """Lowers the values of one schema document; see `SchemaLowering`."""

    def __init__(self, rules: Rules, layout: _Layout, schema: Any):
        self.reader = SchemaReader(schema)
        self._rules = rules
        self._layout = layout
        self._size = 0  # size of all results of `_item`, which raises an error if it is too large
        self._anything: Expression | None = None
        # Rules of objects and arrays by identity; None while the rule is built, unless a part of it
        # refers to it.
        self._by_identity: dict[int, int | None] = {}
        self._merged: dict[int, list[Values]] = {}  # results of `_options`, by identity
        self._kept: list[Values] = []
        # Targets of the references that are being resolved inside the innermost bracket. Another
        # reference to one of them would never end.
        self._open: set[str] = set()
        self._targets: dict[str, Expression] = {}

    def lower(self, values: Values) -> Expression:
        """Return the expression of the JSON texts of a set of values."""
        if isinstance(values, Objects | Arrays):
            return call(self._rule(values))
        if isinstance(values, StringSet):
            return write_string(values)
        if isinstance(values, NumberRange):
            return lower_number(values)
        if isinstance(values, Reference):
            return self._reference(values)
        if isinstance(values, Union):
            if not values.options:
                return NOTHING
            return union(map(self.lower, self._options(values)))
        if isinstance(values, Booleans):
            if values.value is None:
                return _BOTH
            return _TRUE if values.value else _FALSE
        return _NULL if values is NULL else self._any_value()

    def _options(self, values: Union) -> list[Values]:
        """Return the options of a union after `merged_objects`; the same ones for each call."""
        key = id(values)
        if key not in self._merged:
            self._kept.append(values)  # keeps the identity unique
            self._merged[key] = merged_objects(values.options)
        return self._merged[key]

    @property
    def any_scalar(self) -> Expression:
        """The expression of all strings, numbers and literals."""
        return union([_NULL, _BOTH, lower_number(NumberRange()), ANY_STRING])

    def _any_value(self) -> Expression:
        if self._anything is None:
            array = self._rules.reserve(_ARRAY)
            thing = self._rules.reserve(_OBJECT)
            self._anything = union([self.any_scalar, call(array), call(thing)])
            self._rules.set(array, self._members([(self._anything, 0, None)]))
            member = [ANY_STRING, self._layout.colon, self._anything]
            self._rules.set(thing, self._members([(concat(member), 0, None)]))
        return self._anything

    def _item(self, parts: list[Expression]) -> Expression:
        """Return the concatenation of the parts of an item or member.

        Raise `NoAutomaton` if the results of all calls together are too large.
        """
        item = concat(parts)
        self._size += len(item)
        if self._size > MAX_BUILT:
            raise NoAutomaton("the grammar is too large")
        return item

    def _reference(self, reference: Reference) -> Expression:
        """Return the expression of a reference's target.

        Raise `NoAutomaton` if the reference leads to itself without a bracket in between.
        """
        target = reference.target
        if target in self._targets:
            return self._targets[target]
        if target in self._open:
            raise NoAutomaton("a reference leads to itself")
        self._open.add(target)
        expression = self.lower(self.reader.resolve(reference))
        self._open.remove(target)
        self._targets[target] = expression
        return expression

    def _rule(self, values: Objects | Arrays) -> int:
        """Return the rule of a set of objects or arrays."""
        key = id(values)
        brackets = _OBJECT if isinstance(values, Objects) else _ARRAY
        if key in self._by_identity:
            rule = self._by_identity[key]
            if rule is None:
                rule = self._by_identity[key] = self._rules.reserve(brackets)
            return rule
        self._by_identity[key] = None
        self._kept.append(values)  # keeps the identity unique
        outside = self._open
        self._open = set()
        body = self._object(values) if isinstance(values, Objects) else self._array(values)
        self._open = outside
        rule = self._by_identity[key]
        if rule is None:
            rule = self._by_identity[key] = self._rules.add(brackets, body)
        else:
            self._rules.set(rule, body)
        return rule

    def _members(
        self, items: list[tuple[Expression, int, int | None]], any_of: Collection[int] = ()
    ) -> Expression:
        """Return the expression between two brackets, with white space where it may be."""
        layout = self._layout
        if layout.space is EMPTY:
            return members(layout.comma, items, any_of) if items else EMPTY
        spaced = [(concat([item, layout.space]), low, high) for item, low, high in items]
        written = members(layout.comma, spaced, any_of)
        return concat([layout.space, written]) if items else layout.space

    def _object(self, objects: Objects) -> Expression:
        """Lower a set of objects. Their keys have the order of the schema."""
        names = list(objects.properties)
        names += [name for name in objects.required if name not in objects.properties]
        writer = NameWriter(names)
        items: list[tuple[Expression, int, int | None]] = []
        any_of = []  # indices of items
        num_optional = 0
        for name, key in zip(names, writer.listed, strict=True):
            value = self.lower(self.reader.values_of(objects, name))
            is_required = name in objects.required
            if value == NOTHING and not is_required:
                continue
            num_optional += not is_required
            if name in objects.any_of:
                any_of.append(len(items))
            items.append((self._item([key, self._layout.colon, value]), int(is_required), 1))
        num_required = len(items) - num_optional
        low = max(objects.low - num_required, 0)
        high = None if objects.high is None else max(objects.high - num_required, 0)
        others = []
        for pattern, values in objects.patterns.items():
            key = writer.matching(pattern)
            others.append(self._item([key, self._layout.colon, self.lower(values)]))
        value = self.lower(objects.additional or ANYTHING)
        if value != NOTHING:
            key = writer.others(objects.patterns)
            others.append(self._item([key, self._layout.colon, value]))
        if max(low, high or 0) > MAX_COUNT:
            raise NoAutomaton("the number of properties is too large")
        if objects.any_of and not any_of:
            return NOTHING
        if num_optional and low == 1 and high is None:
            any_of = [index for index, (_, least, _) in enumerate(items) if not least]
            any_of += [len(items)] * bool(others)
            low = 0
        elif num_optional and (low > 0 or high is not None):
            if others or low > 1 or high != 1:
                raise NoAutomaton("the number of properties is limited")
            return self._limited(items, low)
        if others and high != 0:
            items.append((union(others), low, high))
        elif low > 0:
            return NOTHING
        return self._members(items, any_of)

    def _limited(self, items: list[tuple[Expression, int, int | None]], low: int) -> Expression:
        """Return the members of objects with at least `low` and at most one optional property."""
        choices = []
        for chosen, (_, is_required, _) in enumerate(items):
            if is_required:
                continue
            kept = []
            for index, (item, least, most) in enumerate(items):
                if index == chosen:
                    kept.append((item, 1, most))
                elif least:
                    kept.append((item, least, most))
            choices.append(self._members(kept))
        if low == 0:
            choices.append(self._members([item for item in items if item[1]]))
        return union(choices)

    def _containing(self, arrays: Arrays) -> Expression:
        """Return the expression between the brackets of arrays with required items.

        The required items can have any order, and an item can meet several requirements.
        """
        item = arrays.items or ANYTHING
        rest = self.lower(item)
        options = []
        for groups in _ordered_partitions(list(range(len(arrays.contained)))):
            required = []
            for group in groups:
                parts = [arrays.contained[index] for index in group]
                if len({id(part) for part in parts}) < len(parts):
                    break  # one item would count twice
                required.append(self.lower(functools.reduce(self.reader.intersect, parts, item)))
            else:
                options.append(self._with_others(required, rest, arrays.low, arrays.high))
        if arrays.prefix:
            raise NoAutomaton("contains has no lowering next to a list of schemas")
        return union(options) if options else NOTHING

    def _with_others(
        self, required: list[Expression], other: Expression, low: int, high: int | None
    ) -> Expression:
        """Return the expression of the items in `required`, in this order, among other items.

        `low` and `high` are the minimum and the maximum number of all items.
        """
        low -= len(required)
        high = None if high is None else high - len(required)
        if high is not None and high < 0:
            return NOTHING
        if low <= 0 and high is None:
            counts: Iterable[list[tuple[int, int | None]]] = [[(0, None)] * (len(required) + 1)]
        elif len(required) > 1:
            raise NoAutomaton("the number of items is limited next to several required items")
        elif high is None:
            counts = itertools.chain(
                ([(before, before), (low - before, None)] for before in range(low)),
                [[(low, None), (0, None)]],
            )
        else:
            counts = (
                [(before, before), (max(low - before, 0), high - before)]
                for before in range(high + 1)
            )
        options = []
        for gaps in counts:  # `_item` raises NoAutomaton if there are too many
            items = [(other, *gaps[0])]
            for expression, gap in zip(required, gaps[1:], strict=True):
                items += [(expression, 1, 1), (other, *gap)]
            options.append(self._item([self._members(items)]))
        return union(options)

    def _array(self, arrays: Arrays) -> Expression:
        low, high = arrays.low, arrays.high
        if high is not None and high < low:
            return NOTHING
        if low > MAX_COUNT or (high or 0) > MAX_COUNT:
            raise NoAutomaton("the number of items is too large")
        if arrays.contained:
            return self._containing(arrays)
        rest = self.lower(arrays.items or ANYTHING)
        prefix = arrays.prefix if high is None else arrays.prefix[:high]
        if not prefix:
            return self._members([(rest, low, high)])
        layout = self._layout
        spaced = [self._item([self.lower(item), layout.space]) for item in prefix]
        count = len(prefix)
        if count - low > MAX_ABSENT_ITEMS:
            raise NoAutomaton("too many items of an array may be absent")
        tail = repeat(
            concat([layout.comma, rest, layout.space]),
            max(low - count, 0),
            None if high is None else high - count,
        )
        parts = [spaced[0], *(concat([layout.comma, item]) for item in spaced[1:])]
        # The first `low` items are required; each later one may end the array.
        body = tail
        for part in reversed(parts[low:]):
            body = optional(concat([part, body]))
        body = concat([*parts[:low], body])
        return concat([layout.space, body])
