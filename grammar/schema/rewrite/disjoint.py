"""Proofs that two schemas have no value in common."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from typing import Any

from graft.grammar.schema.documents import (
    DATA,
    JSON_TYPES,
    MAPS,
    JsonTypes,
    SchemaObject,
    common_types,
    required_of,
    texts_of_keys,
    types_of,
    values_of,
)
from graft.grammar.schema.llguidance_check import is_unsatisfiable
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.schema.references import References
from graft.grammar.schema.rewrite.patterns import have_common_string
from graft.grammar.validate import python_pattern, search_pattern

__all__ = ["Disjointness"]

_MAX_DEPTH = 6
_MAX_QUERIES = 60  # maximum number of schemas that LLGuidance checks for one document
# Maximum length of a schema to check. LLGuidance takes half a second for some longer schemas.
_MAX_QUERY_CHARACTERS = 15_000


class Disjointness:
    """Proofs that schemas of one document are disjoint.

    Two schemas are first compared by their types, constants and required properties. If this
    comparison does not prove that they are disjoint, LLGuidance checks whether their intersection
    is unsatisfiable. The proofs are incomplete, so schemas that are not proved disjoint may still
    be disjoint.
    """

    def __init__(self, root: Any, references: References):
        self._references = references
        self._definitions: dict[str, Any] = {}
        for keyword in ("$schema", "$defs", "definitions"):
            if keyword in root:
                self._definitions[keyword] = root[keyword]
        self._remaining_queries = _MAX_QUERIES

    def proved(self, one: Any, other: Any, base: Any = True, types: JsonTypes = JSON_TYPES) -> bool:
        """Return whether two schemas are provably disjoint.

        Only values of the JSON types `types` that satisfy the schema `base` are considered.
        """
        if self._are_apart(one, other, types, _MAX_DEPTH):
            return True
        if self._remaining_queries <= 0:
            return False
        self._remaining_queries -= 1
        typed = True if types == JSON_TYPES else {"type": sorted(types)}
        document = _without_optional(self._intersection([base, one, other, typed]))
        small = len(json.dumps(document)) <= _MAX_QUERY_CHARACTERS
        return small and not _has_inexact_numbers(document) and is_unsatisfiable(document)

    def _intersection(self, parts: list[Any]) -> SchemaObject:
        """Return the intersection of schemas, with the definitions that the schemas refer to."""
        document: SchemaObject = {"allOf": parts}
        if "$schema" in self._definitions:
            document["$schema"] = self._definitions["$schema"]
        pending = _references_in(parts)
        done: set[str] = set()
        while pending:
            reference = pending.pop()
            done.add(reference)
            keyword, _, name = reference.removeprefix("#/").partition("/")
            known = keyword in ("$defs", "definitions")
            definitions = self._definitions.get(keyword, {}) if known else {}
            if name not in definitions:
                return {**self._definitions, "allOf": parts}
            target = definitions[name]
            document.setdefault(keyword, {})[name] = target
            pending |= _references_in(target) - done
        return document

    def _are_apart(self, one: Any, other: Any, types: JsonTypes, depth: int) -> bool:
        """Return whether a comparison proves two schemas disjoint, without LLGuidance.

        `depth` is the number of levels of subschemas to compare.
        """
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
        self, one: SchemaObject, other: SchemaObject, types: JsonTypes, depth: int
    ) -> bool:
        """Return whether a part of `one` proves that `one` and `other` are disjoint.

        This is the case if a schema in the ``allOf`` of `one` or the target of its ``$ref`` is
        disjoint from `other`, or if all options of its ``anyOf`` or ``oneOf`` are.
        """

        def is_apart(part: Any) -> bool:
            return self._are_apart(part, other, types, depth - 1)

        if any(map(is_apart, self._conjuncts(one))):
            return True
        for keyword in ("anyOf", "oneOf"):
            if keyword in one and all(map(is_apart, one[keyword])):
                return True
        return False

    def _conjuncts(self, schema: SchemaObject) -> list[Any]:
        """Return the schemas in a schema's ``allOf``, and the target of its ``$ref``."""
        parts = list(schema.get("allOf", ()))
        if "$ref" in schema:
            with contextlib.suppress(NoExactForm):
                parts.append(self._references.resolve(schema["$ref"]))
        return parts

    def _objects_are_apart(self, one: SchemaObject, other: SchemaObject, depth: int) -> bool:
        """Return whether two object schemas have disjoint schemas for some required property."""
        for name in dict.fromkeys(required_of(one) + required_of(other)):
            schema = _property_schema(one, name)
            other_schema = _property_schema(other, name)
            if self._are_apart(schema, other_schema, JSON_TYPES, depth - 1):
                return True
        return False


def _without_optional(document: SchemaObject) -> SchemaObject:
    """Return a document with fewer requirements for properties and items that may be absent.

    If no schema requires a property, its value may be any value; if no schema has ``minItems``, all
    items may be. A document that no value satisfies remains so, and takes LLGuidance less time.
    """
    required: set[str] = set()
    keywords: set[str] = set()
    pending: list[Any] = [document]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            keywords.update(part)
            required.update(required_of(part))
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)
    keeps_properties = "minProperties" in keywords
    keeps_items = "minItems" in keywords

    def weakened(part: Any, keyword: str = "") -> Any:
        if isinstance(part, list):
            return [weakened(item) for item in part]
        if not isinstance(part, dict) or keyword in DATA:
            return part
        if keyword == "items" and not keeps_items:
            return True
        if keyword == "properties" and not keeps_properties:
            return {
                name: weakened(value) if name in required else True for name, value in part.items()
            }
        if keyword in MAPS:
            return {name: weakened(value) for name, value in part.items()}
        return {key: weakened(value, key) for key, value in part.items()}

    found: SchemaObject = weakened(document)
    return found


def _references_in(schemas: Any) -> set[str]:
    """Return the values of all ``$ref`` in schemas."""
    return set(texts_of_keys(schemas, ("$ref",)))


def _has_inexact_numbers(part: Any, keyword: str = "") -> bool:
    """Return whether `part`, the value of `keyword`, has numbers that LLGuidance may round."""
    if isinstance(part, dict):
        return any(_has_inexact_numbers(value, key) for key, value in part.items())
    if isinstance(part, list):
        return any(map(_has_inexact_numbers, part))
    if isinstance(part, float) and keyword == "multipleOf":
        return not part.is_integer()
    return isinstance(part, (int, float)) and abs(part) >= 1 << 53


def _have_common_value(values: list[Any], others: list[Any]) -> bool:
    """Return whether two lists have a JSON value in common. In JSON, ``true`` and 1 differ."""
    for value, other in itertools.product(values, others):
        if value == other and isinstance(value, bool) == isinstance(other, bool):
            return True
    return False


def _strings_are_apart(one: SchemaObject, other: SchemaObject) -> bool:
    """Return whether it is certain that no string satisfies both schemas."""
    values = values_of(one)
    if values is not None and _all_refused(values, other):
        return True
    other_values = values_of(other)
    if other_values is not None and _all_refused(other_values, one):
        return True
    if one.get("minLength", 0) > other.get("maxLength", math.inf):
        return True
    if other.get("minLength", 0) > one.get("maxLength", math.inf):
        return True
    patterns = [part["pattern"] for part in (one, other) if "pattern" in part]
    return len(patterns) == 2 and not have_common_string(patterns)


def _property_schema(schema: SchemaObject, name: str) -> Any:
    """Return a schema that the property with this name must satisfy.

    The result may be incomplete: the property may have to satisfy further schemas.
    """
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    if schema.get("patternProperties"):
        return True
    return schema.get("additionalProperties", True)


def _all_refused(words: list[Any], schema: SchemaObject) -> bool:
    """Return whether a schema's ``minLength``, ``maxLength`` or ``pattern`` excludes each word.

    Values in `words` that are not strings count as excluded.
    """
    min_length = schema.get("minLength", 0)
    max_length = schema.get("maxLength", math.inf)
    pattern = schema.get("pattern")
    if pattern is not None:
        try:
            re.compile(python_pattern(pattern))
        except re.error:
            pattern = None

    def is_refused(word: Any) -> bool:
        if not isinstance(word, str):
            return True
        if not min_length <= len(word) <= max_length:
            return True
        # For non-ASCII characters, Python's ``re`` may differ from the backend's patterns.
        return pattern is not None and word.isascii() and not search_pattern(pattern, word)

    return all(map(is_refused, words))
