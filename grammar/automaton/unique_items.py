"""Shapes of JSON documents, with which native code enforces ``uniqueItems``.

Automata and LLGuidance cannot compare the items of an array. The rules of a schema therefore ignore
``uniqueItems``, and a native matcher (native/guide/unique/) removes from the mask rows the tokens
that repeat an item, and those after which every completion repeats an item. For this, the native
matcher must know which arrays must have different items, and which values their items can have. The
shapes that `unique_shapes` returns describe both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from graft.grammar.automaton.schema import Document, Rules, SchemaLowering
from graft.grammar.automaton.strings import NameWriter
from graft.grammar.automaton.values import ANYTHING, Arrays, Objects, Reference, Union, Values
from graft.grammar.regular.expression import Expression, union
from graft.grammar.regular.regex import NoAutomaton
from graft.grammar.schema.documents import subschemas
from graft.grammar.schema.reasons import NoExactForm
from graft.native import _native

__all__ = ["NoUniqueItems", "Shape", "UniqueShapes", "unique_shapes"]

#: Maximum number of shapes of a schema.
_MAX_SHAPES = 20_000
#: Maximum number of states of the automaton of an item.
_MAX_STATES = 32767
#: LLGuidance's grammars with keys in any order may repeat the properties of larger objects.
_MAX_UNORDERED = 64
#: Maximum number of alternatives of an object; see `Shape`.
_MAX_ALTERNATIVES = 64
#: Native code does not count exactly from this number on.
_MANY = 1 << 30
#: Maximum nesting of the values in which a finite value is searched.
_MAX_NESTING = 50
#: Maximum size of all automata of a schema.
_MAX_AUTOMATA_BYTES = 8 << 20


class NoUniqueItems(NoExactForm):
    """Raised if native code cannot enforce ``uniqueItems`` exactly for an array."""

    def __init__(self, why: str):
        super().__init__("uniqueItems", why)


class Shape(NamedTuple):
    """The values at a place of a document.

    ``Shape`` in native/guide/unique/shapes.h says which shapes are counted, and what open arrays
    and objects are. Shapes and automata are numbered by their index in `UniqueShapes`. The shape -1
    is that of values that are not counted and contain no array whose items must differ.

    Attributes
    ----------
    counted
        Whether the shape describes the values exactly, except for open arrays and objects.
    scalars
        Number of the automaton of the strings, numbers, booleans and null; -1 if there are none or
        if the shape is not counted.
    has_arrays, has_objects
        Whether a value can be an array or an object.
    unique
        Whether the items of an array must differ.
    open_arrays, open_objects
        Whether every incomplete array or object can be completed to infinitely many values.
    items, prefix
        Shapes of the items of an array, and of its first items.
    low, high
        Minimum and maximum number of items; -1 for no maximum.
    alternatives
        Number of alternatives of an object. Each of them allows and requires some of the names.
    names
        Listed names in the order of the schema: name, shape, and the alternatives that allow and
        those that require the property, as bits.
    patterns
        Patterns of other names: number of the automaton of the names, and shape.
    additional
        Shape of all other properties.
    """

    counted: bool = False
    scalars: int = -1
    has_arrays: bool = False
    unique: bool = False
    open_arrays: bool = False
    items: int = -1
    prefix: tuple[int, ...] = ()
    low: int = 0
    high: int = -1
    has_objects: bool = False
    open_objects: bool = False
    alternatives: int = 1
    names: tuple[tuple[bytes, int, int, int], ...] = ()
    patterns: tuple[tuple[int, int], ...] = ()
    additional: int = -1


class UniqueShapes(NamedTuple):
    """The shapes of a schema.

    Attributes
    ----------
    shapes
        The shapes; the first one is that of the document.
    automata
        Serialized automata to which the shapes refer.
    any_order
        Whether the properties of an object have any order.
    """

    shapes: list[Shape]
    automata: list[bytes]
    any_order: bool


def unique_shapes(schema: Any, any_order: bool) -> UniqueShapes | None:
    """Return the shapes of a schema; None if it has no ``uniqueItems``.

    `schema` is the result of `graft.grammar.schema.router.automaton_form` or `Route.unique`. The
    function can take long, and should run in a child process. Raise `NoUniqueItems` if native code
    cannot enforce a keyword ``uniqueItems`` exactly.
    """
    if not any("uniqueItems" in part for _, part in subschemas(schema)):
        return None
    try:
        document = SchemaLowering(Rules(), "line").document(schema)
        builder = _Builder(document, any_order)
        root = document.reader.read(schema)
        if not builder.find_unique_arrays(root):
            return None
        builder.shape([root], counted=False)
        return builder.finish()
    except NoAutomaton as error:
        raise NoUniqueItems(str(error)) from None


class _Builder:
    """Builds the shapes of a document."""

    def __init__(self, document: Document, any_order: bool):
        self._document = document
        self._reader = document.reader
        self._any_order = any_order
        self._shapes: list[Any] = []
        self._automata: list[bytes] = []
        self._numbers_of_shapes: dict[tuple[int, ...], int] = {}
        self._numbers_of_automata: dict[tuple[int, ...], int] = {}
        self._kept: list[Values] = []  # keeps identities unique
        # Identities of the sets whose values may contain an array with different items.
        self._tracked: set[int] = set()

    def finish(self) -> UniqueShapes:
        """Return the shapes, and check that every array can have enough different items."""
        try:
            _native.guide.Shapes(self._shapes, self._automata, self._any_order)
        except ValueError as error:
            raise NoUniqueItems(str(error)) from None
        return UniqueShapes(self._shapes, self._automata, self._any_order)

    # Sets of values -------------------------------------------------------------------------------

    def find_unique_arrays(self, root: Values) -> bool:
        """Find the arrays whose items must differ; return whether there are any."""
        parents: dict[int, list[int]] = {id(root): []}
        found = []
        pending = [root]
        while pending:
            values = pending.pop()
            self._kept.append(values)
            if isinstance(values, Arrays) and _is_unique(values):
                found.append(id(values))
            for part in self._parts(values):
                if id(part) not in parents:
                    parents[id(part)] = []
                    pending.append(part)
                parents[id(part)].append(id(values))
        while found:
            key = found.pop()
            if key not in self._tracked:
                self._tracked.add(key)
                found += parents[key]
        return bool(self._tracked)

    def _parts(self, values: Values) -> Iterable[Values]:
        if isinstance(values, Reference):
            return [self._reader.resolve(values)]
        if isinstance(values, Union):
            return values.options
        if isinstance(values, Arrays):
            return [*values.prefix, values.items or ANYTHING, *values.contained]
        if isinstance(values, Objects):
            others = [*values.patterns.values(), values.additional or ANYTHING]
            return [*values.properties.values(), *others]
        return []

    def _options(self, values: Iterable[Values]) -> list[Values]:
        """Return sets, none of which is a union or a reference, with the same union."""
        found: dict[int, Values] = {}
        targets: set[str] = set()
        pending = list(values)[::-1]
        while pending:
            part = pending.pop()
            if isinstance(part, Union):
                pending += part.options[::-1]
            elif not isinstance(part, Reference):
                found[id(part)] = part
            elif part.target not in targets:
                targets.add(part.target)
                pending.append(self._reader.resolve(part))
        return list(found.values())

    def _is_tracked(self, values: Iterable[Values]) -> bool:
        return any(id(part) in self._tracked for part in values)

    def _has_value(self, values: Values, above: frozenset[int] = frozenset()) -> bool:
        """Return whether a set has a finite value. The result is False if this is not certain.

        `above` contains the identities of the arrays and objects around the values.
        """
        if len(above) > _MAX_NESTING:
            return False
        for option in self._options([values]):
            if isinstance(option, Arrays | Objects):
                if id(option) in above or not _may_have_value(option):
                    continue
                if isinstance(option, Arrays):
                    needed = [*option.prefix, option.items or ANYTHING][: option.low]
                else:
                    needed = [self._reader.values_of(option, name) for name in option.required]
                inner = above | {id(option)}
                if all(self._has_value(part, inner) for part in needed):
                    return True
            elif option is ANYTHING or self._scalars([option]) >= 0:
                return True
        return False

    def _scalars(self, options: Sequence[Values]) -> int:
        """Return the number of the automaton of some scalars; -1 if it matches no text."""
        return self._automaton(union([self._document.lower(option) for option in options]))

    def _automaton(self, expression: Expression) -> int:
        """Return the number of the automaton of an expression; -1 if it matches no text."""
        key = tuple(expression)
        if key not in self._numbers_of_automata:
            self._numbers_of_automata[key] = len(self._automata)
            rule = (0, 0, expression)
            try:
                data = _native.guide.compile_automaton([rule], _MAX_STATES, max_unrolled=2**31 - 1)
                self._automata.append(bytes(data))
            except ValueError as error:
                if "allows no text" not in str(error):
                    raise NoUniqueItems(f"the values of an item: {error}") from None
                self._numbers_of_automata[key] = -1
            if sum(map(len, self._automata)) > _MAX_AUTOMATA_BYTES:
                raise NoUniqueItems("the automata of the items are too large")
        return self._numbers_of_automata[key]

    # Shapes ---------------------------------------------------------------------------------------

    def shape(self, values: Iterable[Values], counted: bool) -> int:
        """Return the number of the shape of the union of some sets."""
        options = self._options(values)
        if not counted and not self._is_tracked(options):
            return -1
        key = (int(counted), *sorted(map(id, options)))
        if key not in self._numbers_of_shapes:
            number = self._numbers_of_shapes[key] = len(self._shapes)
            if number == _MAX_SHAPES:
                raise NoUniqueItems("the schema is too large")
            self._shapes.append(None)  # a part of the values may have the same shape
            self._kept += options
            self._shapes[number] = self._new_shape(options, counted)
        return self._numbers_of_shapes[key]

    def _new_shape(self, options: list[Values], counted: bool) -> Shape:
        if ANYTHING in options:
            if self._is_tracked(options):
                raise NoUniqueItems("only some of the options for the same array have the keyword")
            return Shape(
                counted=True,
                scalars=self._automaton(self._document.any_scalar),
                has_arrays=True,
                open_arrays=True,
                has_objects=True,
                open_objects=True,
            )
        shape = Shape(counted)
        scalars = [option for option in options if not isinstance(option, Arrays | Objects)]
        if counted and scalars:
            shape = shape._replace(scalars=self._scalars(scalars))
        if arrays := [option for option in options if isinstance(option, Arrays)]:
            shape = self._with_arrays(shape, arrays)
        if objects := [option for option in options if isinstance(option, Objects)]:
            shape = self._with_objects(shape, objects)
        return shape

    def _with_arrays(self, shape: Shape, arrays: list[Arrays]) -> Shape:
        if not shape.counted and len(arrays) > 1:
            arrays = [option for option in arrays if option.high != 0] or arrays[:1]
        first = arrays[0]
        is_unique = _is_unique(first)
        if any(_is_unique(option) != is_unique for option in arrays):
            raise NoUniqueItems("only some of the options for the same array have the keyword")
        if is_unique and any(option.contained for option in arrays):
            raise NoUniqueItems("is combined with contains")
        is_open = not is_unique and all(
            option.high is None
            and all(map(self._has_value, [*option.prefix, option.items or ANYTHING]))
            for option in arrays
        )
        is_limited = shape.counted and not is_open
        if is_limited and (len(arrays) > 1 or first.contained or not _may_have_value(first)):
            raise NoUniqueItems("items may be several kinds of arrays of limited size")
        length = max(len(option.prefix) for option in arrays)
        if is_unique and len(arrays) > 1 and length:
            raise NoUniqueItems("several options for the same array list its first items")
        counts_items = is_unique or is_limited
        prefix = []
        for index in range(length):
            parts = []
            for option in arrays:
                is_listed = index < len(option.prefix)
                parts.append(option.prefix[index] if is_listed else option.items or ANYTHING)
            prefix.append(self.shape(parts, counts_items))
        rests = [option.items or ANYTHING for option in arrays]
        if is_unique and len({self.shape([rest], counted=True) for rest in rests}) > 1:
            raise NoUniqueItems("several options for the same array have different items")
        return shape._replace(
            has_arrays=True,
            unique=is_unique,
            open_arrays=is_open,
            items=self.shape(rests[:1] if is_unique else rests, counts_items),
            prefix=tuple(prefix),
            low=max(option.low for option in arrays),
            high=-1 if first.high is None else first.high,
        )

    def _with_objects(self, shape: Shape, objects: list[Objects]) -> Shape:
        is_open = all(map(self._takes_any_property, objects))
        shape = shape._replace(has_objects=True, open_objects=is_open)
        if shape.counted and not is_open:
            return self._with_limited_objects(shape, objects)
        names = dict.fromkeys(
            name for option in objects for name in (*option.properties, *option.required)
        )
        listed = []
        for name in names:
            child = self.shape(
                [self._reader.values_of(option, name) for option in objects], counted=False
            )
            listed.append((_name_bytes(name), child, 1, 0))
        patterns = []
        for pattern, values in objects[0].patterns.items() if len(objects) == 1 else ():
            if self._is_tracked([values, objects[0].additional or ANYTHING]):
                number = self._automaton(NameWriter([]).matching(pattern))
                if number >= 0:
                    patterns.append((number, self.shape([values], counted=False)))
        additional = [option.additional or ANYTHING for option in objects]
        if len(objects) > 1 and any(option.patterns for option in objects):
            others = [part for option in objects for part in option.patterns.values()]
            if self._is_tracked([*others, *additional]):
                raise NoUniqueItems("several options for the same object have patternProperties")
        return shape._replace(
            names=tuple(listed),
            patterns=tuple(patterns),
            additional=self.shape(additional, counted=False),
        )

    def _with_limited_objects(self, shape: Shape, objects: list[Objects]) -> Shape:
        """Describe objects whose properties are listed. The options become alternatives."""
        if len(objects) > _MAX_ALTERNATIVES:
            raise NoUniqueItems("items may be too many kinds of objects")
        allowed: dict[str, int] = {}
        required: dict[str, int] = {}
        children: dict[str, int] = {}
        for index, option in enumerate(objects):
            names = self._names_of_limited(option)
            known = [name for name in children if name in names]
            if not self._any_order and known != [name for name in names if name in children]:
                raise NoUniqueItems("items may be objects with several orders of properties")
            order = _merged(list(children), names)
            for name in names:
                child = self.shape([self._reader.values_of(option, name)], counted=True)
                if children.setdefault(name, child) != child:
                    raise NoUniqueItems("items may be several kinds of objects")
                allowed[name] = allowed.get(name, 0) | 1 << index
                if name in option.required:
                    required[name] = required.get(name, 0) | 1 << index
            children = {name: children[name] for name in order}
        return shape._replace(
            alternatives=len(objects),
            names=tuple(
                (_name_bytes(name), child, allowed[name], required.get(name, 0))
                for name, child in children.items()
            ),
        )

    def _names_of_limited(self, objects: Objects) -> list[str]:
        """Return the names of the properties that objects may have, in the order of the schema."""
        others = [*objects.patterns.values(), objects.additional or ANYTHING]
        if any(map(self._has_value, others)):
            raise NoUniqueItems("items have a limited number of additional properties")
        names = list(objects.properties)
        names += [name for name in objects.required if name not in objects.properties]
        names = [
            name
            for name in names
            if name in objects.required or self._has_value(self._reader.values_of(objects, name))
        ]
        most = len(names) if objects.high is None else objects.high
        if objects.low > len(objects.required) or most < len(names):
            raise NoUniqueItems("items have a limited number of properties")
        if self._any_order and len(names) > _MAX_UNORDERED:
            raise NoUniqueItems(f"items have more than {_MAX_UNORDERED} properties in any order")
        for name in names:
            if not (name.isascii() and name.isprintable()) or '"' in name or "\\" in name:
                raise NoUniqueItems(f"the name {name!r} of a property has several spellings")
        return names

    def _takes_any_property(self, objects: Objects) -> bool:
        """Return whether infinitely many properties can be added to every object of a set."""
        if objects.high is not None or not self._has_value(objects):
            return False
        if self._has_value(objects.additional or ANYTHING):
            return True
        for pattern, values in objects.patterns.items():
            if self._has_value(values):
                number = self._automaton(NameWriter([]).matching(pattern))
                if number >= 0 and _native.guide.count_scalars(self._automata[number]) == _MANY:
                    return True
        return False


def _is_unique(arrays: Arrays) -> bool:
    """Return whether ``uniqueItems`` has an effect on a set of arrays."""
    return arrays.unique and (arrays.high is None or arrays.high > 1)


def _may_have_value(values: Arrays | Objects) -> bool:
    """Return False if the limits of a set may exclude all arrays or objects."""
    if isinstance(values, Arrays):
        return not values.contained and (values.high is None or values.low <= values.high)
    return values.low <= len(values.required)


def _name_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _merged(known: list[str], names: list[str]) -> list[str]:
    """Return the union of two lists in an order that agrees with both.

    The names that are in both lists must have the same order.
    """
    merged: list[str] = []
    rest = iter(known)
    for name in names:
        if name in known and name not in merged:
            for other in rest:
                merged.append(other)
                if other == name:
                    break
        elif name not in merged:
            merged.append(name)
    return [*merged, *rest]
