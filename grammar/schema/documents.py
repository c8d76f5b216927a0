"""Helpers that read JSON schema documents: subschemas, types, values, drafts, property names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

__all__ = [
    "DATA",
    "JSON_TYPES",
    "MAPS",
    "SCHEMA_KEYWORDS",
    "ForAutomata",
    "JsonTypes",
    "Parts",
    "SchemaObject",
    "any_of",
    "can_combine",
    "common_types",
    "copy_json",
    "dialect",
    "equal_values",
    "escape",
    "has_orders",
    "required_of",
    "subschemas",
    "texts_of_keys",
    "type_of_value",
    "types_of",
    "values_of",
    "without_duplicates",
    "word_set",
]

JsonTypes = frozenset[str]
#: A JSON schema that is an object. A schema can also be a boolean.
SchemaObject = dict[str, Any]
#: Subschemas of a document with their JSON pointers; see `subschemas`.
Parts = list[tuple[str, SchemaObject]]


def word_set(text: str) -> frozenset[str]:
    """Split a text at white space and return the set of its words."""
    return frozenset(text.split())


class ForAutomata(NamedTuple):
    """The value of a keyword that rewriting adds to a schema and that only automata can enforce.

    The keywords are ``notPattern``, whose value is a pattern that no string matches, and
    ``notMultipleOf``, whose value is a whole number of which no number is a multiple.
    """

    value: Any


#: The JSON types. A set of types contains ``integer`` only if it does not contain ``number``.
JSON_TYPES = word_set("null boolean number string array object")
_YEARS = {"03": 3, "04": 4, "06": 6, "07": 7, "2019-09": 2019, "2020-12": 2020}
_DRAFT = re.compile(r"draft[-/](03|04|06|07|2019-09|2020-12)\b")


def dialect(schema: Any, default: int) -> int:
    """Return the draft that a schema declares: 3, 4, 6, 7, 2019 or 2020.

    Return `default` if the schema declares none.
    """
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(uri, str):
        return default
    found = _DRAFT.search(uri)
    return _YEARS[found[1]] if found else default


def copy_json(value: Any) -> Any:
    """Return a copy of a JSON value. This is several times as fast as ``copy.deepcopy``."""
    if isinstance(value, dict):
        return {key: copy_json(part) for key, part in value.items()}
    if isinstance(value, list):
        return [copy_json(part) for part in value]
    return value


def texts_of_keys(value: Any, keys: Collection[str]) -> Iterator[str]:
    """Yield each string that any object in a JSON value stores under one of `keys`."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending.extend(part)
        elif isinstance(part, dict):
            for key in keys:
                if isinstance(part.get(key), str):
                    yield part[key]
            pending.extend(part.values())


def escape(name: object) -> str:
    """Return a name in the escaped form that JSON pointers use."""
    text = str(name)
    if "~" in text or "/" in text:
        return text.replace("~", "~0").replace("/", "~1")
    return text


#: Keywords whose value is an object with a schema per key.
MAPS = word_set("properties patternProperties $defs definitions dependentSchemas dependencies")

#: Keywords whose value is data, not a schema.
DATA = word_set("enum const default examples example")
#: Keywords whose value is a schema or a list of schemas.
SCHEMA_KEYWORDS = word_set(
    """allOf anyOf oneOf prefixItems items additionalItems additionalProperties propertyNames
    contains not if then else unevaluatedItems unevaluatedProperties"""
)
#: Keywords whose values contain schemas.
_SCHEMAS = MAPS | SCHEMA_KEYWORDS


def subschemas(schema: Any, at: str = "#") -> Parts:
    """Return all subschemas that are dicts, with their JSON pointers. Parents precede children.

    `at` is the pointer of `schema`.
    """
    found: Parts = []
    pending = [(at, schema)]
    while pending:
        pointer, part = pending.pop()
        if not isinstance(part, dict):
            continue
        found.append((pointer, part))
        for keyword, value in part.items():
            if keyword not in _SCHEMAS:
                continue
            base = f"{pointer}/{keyword}"
            if isinstance(value, dict):
                if keyword in MAPS:
                    for name, inner in reversed(value.items()):
                        pending.append((f"{base}/{escape(name)}", inner))
                else:
                    pending.append((base, value))
            elif isinstance(value, list) and keyword not in MAPS:
                for i in reversed(range(len(value))):
                    pending.append((f"{base}/{i}", value[i]))
    return found


#: Keywords whose subschemas apply to the same value as the schema that contains the keyword.
_COMBINING = word_set(
    """allOf anyOf oneOf not if $ref dependencies dependentSchemas contains unevaluatedProperties
    unevaluatedItems"""
)


def can_combine(parts: Parts) -> bool:
    """Return whether several subschemas of a document may apply to the same value.

    `parts` are all subschemas of the document; see `subschemas`.
    """
    return not all(_COMBINING.isdisjoint(part) for _, part in parts)


def common_types(one: JsonTypes, other: JsonTypes) -> JsonTypes:
    """Return the types that two sets have in common.

    If one set contains ``number`` and the other ``integer``, they have ``integer`` in common.
    """
    if one is JSON_TYPES:
        return other
    both = set(one & other)
    if "integer" in one and "number" in other:
        both.add("integer")
    if "number" in one and "integer" in other:
        both.add("integer")
    if "number" in both:
        both.discard("integer")
    return frozenset(both)


def type_of_value(value: Any) -> str:
    """Return the JSON type of a parsed value; ``number`` for every number."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    names = {str: "string", type(None): "null", list: "array", dict: "object"}
    return names[type(value)]


def types_of(schema: Any) -> JsonTypes:
    """Return the JSON types that the ``type``, ``const`` and ``enum`` of a schema allow."""
    if not isinstance(schema, dict):
        return JSON_TYPES if schema is not False else frozenset()
    types = JSON_TYPES
    if "type" in schema:
        named = schema["type"]
        types = frozenset([named] if isinstance(named, str) else named)
        if "number" in types:
            types = types - {"integer"}
    if "const" in schema:
        types = common_types(types, frozenset([type_of_value(schema["const"])]))
    if "enum" in schema:
        types = common_types(types, frozenset(map(type_of_value, schema["enum"])))
    return types


def values_of(schema: SchemaObject) -> list[Any] | None:
    """Return the values that the schema's ``const`` or ``enum`` allows; None if it has neither."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def required_of(schema: SchemaObject) -> list[str]:
    """Return the names of required properties; none in draft 3, where ``required`` is a boolean."""
    required = schema.get("required")
    return required if isinstance(required, list) else []


def has_orders(part: SchemaObject) -> bool:
    """Return whether objects that satisfy the schema can have their keys in several orders.

    The result is an estimate. The schema is assumed to allow one key for each required name, for
    each property, for each pattern, and, if additional properties are allowed, for all other names
    together. The result is True if there are at least two such keys.
    """
    values = values_of(part)
    if values is not None:
        return _contains_several_keys(values)
    names = set(required_of(part))
    for name, schema in part.get("properties", {}).items():
        if schema is not False:
            names.add(name)
    patterns = len(part.get("patternProperties", ()))
    if not names and not patterns:
        return False
    kinds = len(names) + patterns
    if part.get("additionalProperties") is not False:
        kinds += 1
    return kinds > 1


def _contains_several_keys(value: Any) -> bool:
    """Return whether a value contains an object with at least two keys."""
    if isinstance(value, list):
        return any(map(_contains_several_keys, value))
    if isinstance(value, dict):
        return len(value) > 1 or any(map(_contains_several_keys, value.values()))
    return False


def any_of(options: list[Any]) -> Any:
    """Return the union of schemas. Duplicates and ``false`` are removed."""
    if any(option is True for option in options):
        return True
    kept = without_duplicates([option for option in options if option is not False])
    if not kept:
        return False
    return kept[0] if len(kept) == 1 else {"anyOf": kept}


def without_duplicates(values: list[Any]) -> list[Any]:
    """Return the values without those that equal an earlier value according to JSON Schema."""
    return list({_equality_key(value): value for value in reversed(values)}.values())[::-1]


def equal_values(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal according to JSON Schema."""
    return bool(_equality_key(one) == _equality_key(other))


def _equality_key(value: Any) -> Any:
    """Return a key that two JSON values share if and only if they are equal.

    In JSON Schema, 1 equals 1.0, but in contrast to Python, 1 does not equal true.
    """
    if isinstance(value, dict):
        return dict, frozenset((name, _equality_key(part)) for name, part in value.items())
    if isinstance(value, list):
        return list, tuple(map(_equality_key, value))
    return isinstance(value, bool), value
