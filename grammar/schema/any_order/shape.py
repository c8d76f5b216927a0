"""Object and array constraints of a conjunction of schemas."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graft.grammar.errors import GrammarError
from graft.grammar.schema.terms import NoExactForm, required_of, word_set
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

#: Keywords that constrain objects, and arrays.
OBJECTS = word_set(
    "properties patternProperties additionalProperties required minProperties maxProperties"
)
ARRAYS = word_set("items prefixItems additionalItems minItems maxItems")
#: Escapes that ``re`` does not support.
_UNSUPPORTED_ESCAPE = re.compile(r"\\[pPux]\{")

#: Schemas that all hold.
Conjuncts = tuple[Any, ...]


@dataclass
class ObjectShape:
    """Constraints of an object.

    Attributes
    ----------
    names
        Schemas of each named property.
    patterns
        Schemas of the properties without a name in which a pattern is found.
    rest
        Schemas of all other properties.
    required
        Names of the required properties.
    """

    names: dict[str, Conjuncts] = field(default_factory=dict)
    patterns: dict[str, Conjuncts] = field(default_factory=dict)
    rest: Conjuncts = ()
    required: frozenset[str] = frozenset()


class ArrayShape(NamedTuple):
    """Constraints of an array.

    Attributes
    ----------
    items
        Schemas of each item.
    low, high
        Minimum and maximum number of items; `high` is None if there is no maximum.
    """

    items: Conjuncts
    low: int
    high: int | None


def merge_objects(parts: Conjuncts) -> ObjectShape:
    """Return the constraints that schemas together impose on objects.

    Raises
    ------
    NoExactForm
        A schema counts properties, or patterns of several schemas would have to be intersected.
    """
    parts = tuple(part for part in parts if OBJECTS & part.keys())
    for part in parts:
        for keyword in part.keys() & {"minProperties", "maxProperties"}:
            raise NoExactForm(keyword, "keys are counted")
    with_patterns = [part for part in parts if part.get("patternProperties")]
    if len({tuple(part["patternProperties"]) for part in with_patterns}) > 1:
        raise NoExactForm("patternProperties", "of several schemas that hold together")
    required = [name for part in parts for name in required_of(part)]
    shape = ObjectShape(required=frozenset(required))
    listed = [name for part in parts for name in part.get("properties", ())]
    for name in dict.fromkeys(listed + required):
        shape.names[name] = tuple(
            schema for part in parts for schema in _property_schemas(part, name)
        )
    for pattern in with_patterns[0]["patternProperties"] if with_patterns else ():
        shape.patterns[pattern] = tuple(_pattern_schema(part, pattern) for part in parts)
    shape.rest = tuple(p["additionalProperties"] for p in parts if "additionalProperties" in p)
    return shape


def _pattern_schema(part: dict[str, Any], pattern: str) -> Any:
    """Return the schema of properties in which a pattern is found, but which have no name."""
    if part.get("patternProperties"):
        return part["patternProperties"][pattern]
    return part.get("additionalProperties", True)


def _property_schemas(part: dict[str, Any], name: str) -> list[Any]:
    """Return the schemas that one schema has for a named property."""
    schemas = [part["properties"][name]] if name in part.get("properties", ()) else []
    for pattern, schema in part.get("patternProperties", {}).items():
        if _matches(pattern, name):
            schemas.append(schema)
    return schemas or [part.get("additionalProperties", True)]


def _matches(pattern: str, name: str) -> bool:
    try:
        if _UNSUPPORTED_ESCAPE.search(pattern):
            raise NoExactForm(
                "patternProperties", f"pattern {pattern!r} cannot be compared with a name"
            )
        return search_pattern(pattern if name.isascii() else f"(?a){pattern}", name)
    except (re.error, GrammarError) as error:
        raise NoExactForm("patternProperties", f"pattern {pattern!r}: {error}") from None


def merge_arrays(parts: Conjuncts) -> ArrayShape:
    """Return the constraints that schemas together impose on arrays.

    Raises
    ------
    NoExactForm
        Individual items have different schemas.
    """
    parts = tuple(part for part in parts if ARRAYS & part.keys())
    for part in parts:
        if "prefixItems" in part:
            raise NoExactForm("prefixItems", "first items")
        if isinstance(part.get("items"), list):
            raise NoExactForm("items", "first items")
    items = tuple(part.get("items", True) for part in parts)
    lows = [int(part.get("minItems", 0)) for part in parts]
    highs = [int(part["maxItems"]) for part in parts if "maxItems" in part]
    return ArrayShape(items, max(lows, default=0), min(highs) if highs else None)
