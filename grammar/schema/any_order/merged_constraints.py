"""Merge the constraints that several schemas impose on objects and arrays."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graft.grammar.errors import GrammarError
from graft.grammar.schema.documents import SchemaObject, required_of, word_set
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.validate import search_pattern

__all__ = [
    "ARRAYS",
    "OBJECTS",
    "ArrayShape",
    "Conjuncts",
    "ObjectShape",
    "merge_arrays",
    "merge_objects",
]

#: Keywords that constrain objects (`OBJECTS`) and arrays (`ARRAYS`).
OBJECTS = word_set(
    "properties patternProperties additionalProperties required minProperties maxProperties"
)
ARRAYS = word_set("items prefixItems additionalItems minItems maxItems contains minContains")
#: Escape sequences that Python's ``re`` does not support.
_UNSUPPORTED_ESCAPE = re.compile(r"\\[pPux]\{")

#: A conjunction: schemas that must all hold for a value.
Conjuncts = tuple[Any, ...]


@dataclass
class ObjectShape:
    """Constraints that a conjunction of schemas imposes on an object.

    Attributes
    ----------
    names
        For each property that one of the schemas names: the schemas that its value must satisfy.
    patterns
        For each pattern of ``patternProperties``: the schemas that a property must satisfy if its
        name contains a match of the pattern and is not in `names`.
    rest
        Schemas for the values of all other properties.
    required
        Names of the required properties.
    low, high
        Minimum and maximum number of properties; `high` is None if there is no maximum.
    """

    names: dict[str, Conjuncts] = field(default_factory=dict)
    patterns: dict[str, Conjuncts] = field(default_factory=dict)
    rest: Conjuncts = ()
    required: frozenset[str] = frozenset()
    low: int = 0
    high: int | None = None


class ArrayShape(NamedTuple):
    """Constraints that a conjunction of schemas imposes on an array.

    Attributes
    ----------
    items
        Schemas that every item must satisfy.
    low, high
        Minimum and maximum number of items; `high` is None if there is no maximum.
    contained
        Schema that some item must satisfy; True if there is no such requirement.
    """

    items: Conjuncts
    low: int
    high: int | None
    contained: Any = True


def merge_objects(parts: Conjuncts) -> ObjectShape:
    """Return the constraints that the schemas in `parts` together impose on objects.

    Raise `NoExactForm` if two schemas have different patterns.
    """
    parts = tuple(part for part in parts if OBJECTS & part.keys())
    lows = [int(part.get("minProperties", 0)) for part in parts]
    highs = [int(part["maxProperties"]) for part in parts if "maxProperties" in part]
    pattern_lists = [tuple(part.get("patternProperties", ())) for part in parts]
    distinct_lists = {patterns for patterns in pattern_lists if patterns}
    if len(distinct_lists) > 1:
        raise NoExactForm("patternProperties", "several schemas have different patterns")
    listed: list[str] = []
    required: list[str] = []
    rest = []
    for part in parts:
        listed += part.get("properties", ())
        required += required_of(part)
        if "additionalProperties" in part:
            rest.append(part["additionalProperties"])
    shape = ObjectShape(
        rest=tuple(rest),
        required=frozenset(required),
        low=max(lows, default=0),
        high=min(highs, default=None),
    )
    for name in dict.fromkeys(listed + required):
        schemas: list[Any] = []
        for part in parts:
            schemas += _property_schemas(part, name)
        shape.names[name] = tuple(schemas)
    for patterns in distinct_lists:
        for pattern in patterns:
            shape.patterns[pattern] = tuple(_pattern_schema(part, pattern) for part in parts)
    return shape


def _pattern_schema(part: SchemaObject, pattern: str) -> Any:
    """Return the schema of `part` for unlisted properties whose name matches `pattern`."""
    if part.get("patternProperties"):
        return part["patternProperties"][pattern]
    return part.get("additionalProperties", True)


def _property_schemas(part: SchemaObject, name: str) -> list[Any]:
    """Return the schemas that `part` has for the property `name`."""
    schemas: list[Any] = []
    properties = part.get("properties", {})
    if name in properties:
        schemas.append(properties[name])
    for pattern, schema in part.get("patternProperties", {}).items():
        if _matches(pattern, name):
            schemas.append(schema)
    return schemas or [part.get("additionalProperties", True)]


def _matches(pattern: str, name: str) -> bool:
    """Return whether a property name contains a match of `pattern`.

    Raise `NoExactForm` if the pattern is not valid for Python's ``re``, or if the search takes too
    long.
    """
    try:
        if _UNSUPPORTED_ESCAPE.search(pattern):
            raise NoExactForm(
                "patternProperties", f"pattern {pattern!r} cannot be compared with a name"
            )
        return search_pattern(pattern if name.isascii() else f"(?a){pattern}", name)
    except (re.error, GrammarError) as error:
        raise NoExactForm("patternProperties", f"pattern {pattern!r}: {error}") from None


def merge_arrays(parts: Conjuncts) -> ArrayShape:
    """Return the constraints that the schemas in `parts` together impose on arrays.

    Raise `NoExactForm` if a schema has separate schemas for the first items (``prefixItems``), or
    if several items are required by their schemas.
    """
    parts = tuple(part for part in parts if ARRAYS & part.keys())
    for part in parts:
        if "prefixItems" in part:
            raise NoExactForm("prefixItems", "the first items have schemas of their own")
        if isinstance(part.get("items"), list):
            raise NoExactForm("items", "the first items have schemas of their own")
    items = tuple(part.get("items", True) for part in parts)
    lows = [int(part.get("minItems", 0)) for part in parts]
    highs = [int(part["maxItems"]) for part in parts if "maxItems" in part]
    contained = [part["contains"] for part in parts if "contains" in part]
    if len(contained) > 1 or any(part.get("minContains", 1) != 1 for part in parts):
        raise NoExactForm("contains", "several items are required")
    shape = ArrayShape(items, max(lows, default=0), min(highs) if highs else None)
    return shape._replace(contained=contained[0]) if contained else shape
