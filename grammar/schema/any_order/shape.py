"""Schemas as conjunctions: what a set of subschemas says together about objects and arrays."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graft.grammar.errors import GrammarError
from graft.grammar.schema.terms import Cannot, required_of, word_set
from graft.grammar.validate import search_pattern

__all__ = ["ARRAYS", "OBJECTS", "Array", "Object", "Parts", "array_of", "object_of"]

OBJECTS = word_set(
    "properties patternProperties additionalProperties required minProperties maxProperties"
)
ARRAYS = word_set("items prefixItems additionalItems minItems maxItems")
_NO_CHARACTERS = re.compile(r"\\[pPux]\{")

Parts = tuple[Any, ...]  # schemas that all hold


@dataclass
class Object:
    """What an object has to look like."""

    names: dict[str, Parts] = field(default_factory=dict)
    patterns: dict[str, Parts] = field(default_factory=dict)  # found in keys without a name
    rest: Parts = ()  # of all other keys
    required: frozenset[str] = frozenset()


class Array(NamedTuple):
    """What an array has to look like: its items, and how many there are."""

    items: Parts
    low: int
    high: int | None


def object_of(parts: Parts) -> Object:
    """What the schemas say together about objects.

    `Cannot` if patterns of two of them would have to be intersected, or keys are counted.
    """
    parts = tuple(part for part in parts if OBJECTS & part.keys())
    for part in parts:
        for keyword in part.keys() & {"minProperties", "maxProperties"}:
            raise Cannot(keyword, "keys are counted")
    patterned = [part for part in parts if part.get("patternProperties")]
    if len({tuple(part["patternProperties"]) for part in patterned}) > 1:
        raise Cannot("patternProperties", "of several schemas that hold together")
    needed = [name for part in parts for name in required_of(part)]
    made = Object(required=frozenset(needed))
    listed = [name for part in parts for name in part.get("properties", ())]
    for name in dict.fromkeys(listed + needed):
        made.names[name] = tuple(s for part in parts for s in _of_name(part, name))
    for pattern in patterned[0]["patternProperties"] if patterned else ():
        made.patterns[pattern] = tuple(
            part["patternProperties"][pattern]
            if part.get("patternProperties")
            else part.get("additionalProperties", True)
            for part in parts
        )
    made.rest = tuple(p["additionalProperties"] for p in parts if "additionalProperties" in p)
    return made


def _of_name(part: dict[str, Any], name: str) -> list[Any]:
    """Schemas of one named property in one schema."""
    found = [part["properties"][name]] if name in part.get("properties", ()) else []
    for pattern, schema in part.get("patternProperties", {}).items():
        if _found(pattern, name):
            found.append(schema)
    return found or [part.get("additionalProperties", True)]


def _found(pattern: str, name: str) -> bool:
    try:
        if _NO_CHARACTERS.search(pattern):
            raise Cannot("patternProperties", f"pattern {pattern!r} cannot be compared with a name")
        return search_pattern(pattern if name.isascii() else f"(?a){pattern}", name)
    except (re.error, GrammarError) as error:
        raise Cannot("patternProperties", f"pattern {pattern!r}: {error}") from None


def array_of(parts: Parts) -> Array:
    """What the schemas say together about arrays; `Cannot` if first items have their own."""
    parts = tuple(part for part in parts if ARRAYS & part.keys())
    for part in parts:
        if "prefixItems" in part or isinstance(part.get("items"), list):
            raise Cannot("prefixItems" if "prefixItems" in part else "items", "first items")
    highs = [int(part["maxItems"]) for part in parts if "maxItems" in part]
    return Array(
        tuple(part.get("items", True) for part in parts),
        max((int(part.get("minItems", 0)) for part in parts), default=0),
        min(highs) if highs else None,
    )
