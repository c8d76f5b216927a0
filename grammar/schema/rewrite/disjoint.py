"""Proofs that two schemas have no value in common."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from typing import Any

from graft.grammar.schema.llguidance_errors import is_unsatisfiable
from graft.grammar.schema.terms import (
    JSON_TYPES,
    JsonTypes,
    NoExactForm,
    References,
    common_types,
    required_of,
    types_of,
    values_of,
)
from graft.grammar.validate import search_pattern

__all__ = ["Disjointness"]

_MAX_DEPTH = 6
_MAX_QUERIES = 60  # of LLGuidance, per document
_MAX_QUERY_CHARACTERS = 15_000  # LLGuidance takes half a second for some larger documents
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')


class Disjointness:
    """Proofs within one document. A pair that is not proved disjoint may still be.

    Types, constants and required properties are compared first. LLGuidance is queried about the
    rest.

    Parameters
    ----------
    root
        The document.
    references
        Its references.
    """

    def __init__(self, root: Any, references: References):
        shared = ("$schema", "$defs", "definitions")
        self._references = references
        self._definitions = {k: root[k] for k in shared if k in root}
        self._remaining_queries = _MAX_QUERIES

    def proved(self, one: Any, other: Any, base: Any = True, types: JsonTypes = JSON_TYPES) -> bool:
        """Return whether provably no value of the types satisfies `base` and both schemas."""
        if self._are_apart(one, other, types, _MAX_DEPTH):
            return True
        if self._remaining_queries <= 0:
            return False
        self._remaining_queries -= 1
        typed = True if types == JSON_TYPES else {"type": sorted(types)}
        document = self._intersection([base, one, other, typed])
        small = len(json.dumps(document)) <= _MAX_QUERY_CHARACTERS
        return small and is_unsatisfiable(document)

    def _intersection(self, parts: list[Any]) -> dict[str, Any]:
        """Return the intersection of schemas, with the definitions that it refers to."""
        document: dict[str, Any] = {"allOf": parts}
        if "$schema" in self._definitions:
            document["$schema"] = self._definitions["$schema"]
        pending = set(_REFERENCE.findall(json.dumps(parts)))
        done: set[str] = set()
        while pending - done:
            reference = (pending - done).pop()
            done.add(reference)
            home, _, name = reference.removeprefix("#/").partition("/")
            if home not in ("$defs", "definitions") or name not in self._definitions.get(home, {}):
                return {**self._definitions, "allOf": parts}
            target = self._definitions[home][name]
            document.setdefault(home, {})[name] = target
            pending |= set(_REFERENCE.findall(json.dumps(target)))
        return document

    def _are_apart(self, one: Any, other: Any, types: JsonTypes, depth: int) -> bool:
        """Return whether two schemas are disjoint, without querying LLGuidance."""
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or depth == 0:
            return False
        if self._part_is_apart(one, other, types, depth):
            return True
        if self._part_is_apart(other, one, types, depth):
            return True
        values = values_of(one)
        other_values = values_of(other)
        if values is not None and other_values is not None:
            return not _have_common_value(values, other_values)
        shared_types = common_types(types, common_types(types_of(one), types_of(other)))
        if not shared_types:
            return True
        if shared_types == {"object"}:
            return self._objects_are_apart(one, other, depth)
        if shared_types == {"string"}:
            return _strings_are_apart(one, other)
        return False

    def _part_is_apart(
        self, one: dict[str, Any], other: dict[str, Any], types: JsonTypes, depth: int
    ) -> bool:
        """Return whether a conjunct, or all options of a union, of `one` exclude `other`."""
        for part in self._conjuncts(one):
            if self._are_apart(part, other, types, depth - 1):
                return True
        for keyword in ("anyOf", "oneOf"):
            if keyword in one and all(
                self._are_apart(part, other, types, depth - 1) for part in one[keyword]
            ):
                return True
        return False

    def _conjuncts(self, schema: dict[str, Any]) -> list[Any]:
        parts = list(schema.get("allOf", ()))
        if "$ref" in schema:
            with contextlib.suppress(NoExactForm):
                parts.append(self._references.resolve(schema["$ref"]))
        return parts

    def _objects_are_apart(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Return whether the schemas of a required property are disjoint."""
        return any(
            self._are_apart(
                _property_schema(one, name), _property_schema(other, name), JSON_TYPES, depth - 1
            )
            for name in dict.fromkeys((*required_of(one), *required_of(other)))
        )


def _have_common_value(values: list[Any], others: list[Any]) -> bool:
    """Return whether two lists have an equal value; ``True`` and ``1`` differ."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool)
        for value in values
        for other in others
    )


def _strings_are_apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether no string satisfies two schemas."""
    values = values_of(one)
    if values is not None and _all_refused(values, other):
        return True
    other_values = values_of(other)
    if other_values is not None and _all_refused(other_values, one):
        return True
    if one.get("minLength", 0) > other.get("maxLength", math.inf):
        return True
    return bool(other.get("minLength", 0) > one.get("maxLength", math.inf))


def _property_schema(schema: dict[str, Any], name: str) -> Any:
    """Return a schema that the property of this name must satisfy, possibly not all of it."""
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    if schema.get("patternProperties"):
        return True
    return schema.get("additionalProperties", True)


def _all_refused(words: list[Any], schema: dict[str, Any]) -> bool:
    """Return whether the schema's own string keywords refuse every one of the words."""
    min_length = schema.get("minLength", 0)
    max_length = schema.get("maxLength", math.inf)
    matches = None
    with contextlib.suppress(re.error, KeyError):
        re.compile(schema["pattern"])
        matches = functools.partial(search_pattern, schema["pattern"])
    return all(
        not isinstance(word, str)
        or not min_length <= len(word) <= max_length
        or (matches and word.isascii() and not matches(word))
        for word in words
    )
