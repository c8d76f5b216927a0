"""Decide whether single values satisfy a schema, for schemas that list all their values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from graft.grammar.errors import GrammarError
from graft.grammar.schema.documents import (
    SchemaObject,
    equal_values,
    required_of,
    type_of_value,
    values_of,
    without_duplicates,
    word_set,
)
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.schema.references import References
from graft.grammar.schema.rewrite.strings import FORMATS, KNOWN_FORMATS
from graft.grammar.validate import search_pattern

__all__ = ["ListedValues"]

_MAX_DEPTH = 64  # maximum nesting of subschemas that apply to a value or to its parts
_MAX_SEARCHED = 3  # maximum nesting of the allOf in which a list of values is searched
_UNKNOWN = word_set(
    """unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef extends disallow
    divisibleBy"""
)
_BOUNDS = {
    "minLength": ("string", True),
    "maxLength": ("string", False),
    "minItems": ("array", True),
    "maxItems": ("array", False),
    "minProperties": ("object", True),
    "maxProperties": ("object", False),
}


class ListedValues:
    """Finds the values that satisfy a schema among those that the schema lists.

    `draft` is the JSON schema draft of the document, and `assert_formats` says whether ``format``
    is enforced.
    """

    def __init__(self, references: References, draft: int, assert_formats: bool):
        self._references = references
        self._draft = draft
        self._assert_formats = assert_formats

    def satisfying(self, schema: SchemaObject) -> list[Any] | None:
        """Return all values that satisfy a schema; None if the schema does not list its values.

        Raise `NoExactForm` if it is unknown whether a listed value satisfies the schema.
        """
        values = self._listed(schema, _MAX_SEARCHED)
        if values is None:
            return None
        return [value for value in values if self._allows(schema, value, _MAX_DEPTH)]

    def _listed(self, schema: Any, depth: int) -> list[Any] | None:
        """Return values among which are all that satisfy a schema; None if none are listed."""
        schema = self._references.follow(schema)
        if not isinstance(schema, dict) or depth == 0:
            return None
        values = values_of(schema)
        if values is not None:
            return values
        for part in schema.get("allOf", ()):
            values = self._listed(part, depth - 1)
            if values is not None:
                return values
        return None

    def _allows(self, schema: Any, value: Any, depth: int) -> bool:
        """Return whether a value satisfies a schema."""
        if isinstance(schema, bool):
            return schema
        if depth == 0:
            raise NoExactForm("$ref", "the schema is nested too deeply")
        return all(
            self._keyword(keyword, argument, schema, value, depth - 1)
            for keyword, argument in schema.items()
        )

    def _keyword(
        self, keyword: str, argument: Any, schema: SchemaObject, value: Any, depth: int
    ) -> bool:
        """Return whether a value satisfies one keyword of a schema."""

        def allows(part: Any) -> bool:
            return self._allows(part, value, depth)

        if keyword in _UNKNOWN:
            raise NoExactForm(keyword, "cannot be enforced")
        if keyword == "type":
            names = [argument] if isinstance(argument, str) else argument
            return any(self._has_type(value, name) for name in names)
        if keyword == "const":
            return equal_values(argument, value)
        if keyword == "enum":
            return any(equal_values(other, value) for other in argument)
        if keyword == "$ref":
            return allows(self._references.resolve(argument))
        if keyword == "allOf":
            return all(map(allows, argument))
        if keyword == "anyOf":
            return any(map(allows, argument))
        if keyword == "oneOf":
            return sum(map(allows, argument)) == 1
        if keyword == "not":
            return not allows(argument)
        if keyword == "if":
            return allows(schema.get("then" if allows(argument) else "else", True))
        json_type = type_of_value(value)
        if keyword in _BOUNDS:
            bounded, is_minimum = _BOUNDS[keyword]
            if json_type != bounded:
                return True
            return len(value) >= argument if is_minimum else len(value) <= argument
        if json_type == "string":
            return self._string(keyword, argument, value)
        if json_type == "number":
            return _number(keyword, argument, schema, value)
        if json_type == "array":
            return self._array(keyword, argument, schema, value, depth)
        if json_type == "object":
            return self._object(keyword, argument, schema, value, depth)
        return True

    def _has_type(self, value: Any, name: str) -> bool:
        if name != "integer":
            return type_of_value(value) == name
        if isinstance(value, float) and value.is_integer() and self._draft <= 4:
            raise NoExactForm("type", "validators disagree on whether 1.0 is an integer")
        is_number = type_of_value(value) == "number"
        return is_number and (isinstance(value, int) or value.is_integer())

    def _string(self, keyword: str, argument: Any, value: str) -> bool:
        pattern = argument
        if keyword == "format" and self._assert_formats and argument in KNOWN_FORMATS:
            if argument not in FORMATS:
                raise NoExactForm("format", f"whether {value!r} is valid is unknown")
            pattern = FORMATS[argument]
        elif keyword != "pattern":
            return True
        return _matches(pattern, value)

    def _array(
        self, keyword: str, argument: Any, schema: SchemaObject, value: list[Any], depth: int
    ) -> bool:
        if keyword == "uniqueItems":
            return argument is not True or len(without_duplicates(value)) == len(value)
        if keyword == "contains":
            count = sum(self._allows(argument, item, depth) for item in value)
            return schema.get("minContains", 1) <= count <= schema.get("maxContains", math.inf)
        first: list[Any] = []
        rest: Any = True
        if keyword == "items" and isinstance(argument, list):
            first, rest = argument, schema.get("additionalItems", True)
        elif keyword == "items":
            first = [True] * len(schema.get("prefixItems", ()))
            rest = argument
        elif keyword == "prefixItems":
            first = argument
        parts = [*first, *[rest] * (len(value) - len(first))]
        return all(
            self._allows(part, item, depth) for part, item in zip(parts, value, strict=False)
        )

    def _object(
        self, keyword: str, argument: Any, schema: SchemaObject, value: dict[str, Any], depth: int
    ) -> bool:
        if keyword == "required":
            return all(name in value for name in required_of(schema))
        if keyword == "propertyNames":
            return all(self._allows(argument, name, depth) for name in value)
        if keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            return all(
                self._dependency(part, value, depth)
                for name, part in argument.items()
                if name in value
            )
        return all(
            self._allows(part, value[name], depth)
            for name, part in _property_schemas(keyword, argument, schema, value)
        )

    def _dependency(self, part: Any, value: dict[str, Any], depth: int) -> bool:
        if isinstance(part, str):  # draft 3
            return part in value
        if isinstance(part, list):
            return all(name in value for name in part)
        return self._allows(part, value, depth)


def _property_schemas(
    keyword: str, argument: Any, schema: SchemaObject, value: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the properties of a value to which a keyword applies, each with its schema."""
    for name in value:
        if keyword == "properties":
            if name in argument:
                yield name, argument[name]
        elif keyword == "patternProperties":
            for pattern, part in argument.items():
                if _matches(pattern, name):
                    yield name, part
        elif keyword == "additionalProperties" and not _is_listed(name, schema):
            yield name, argument


def _is_listed(name: str, schema: SchemaObject) -> bool:
    """Return whether ``properties`` or ``patternProperties`` of a schema apply to a property."""
    if name in schema.get("properties", {}):
        return True
    return any(_matches(pattern, name) for pattern in schema.get("patternProperties", {}))


def _number(keyword: str, argument: Any, schema: SchemaObject, value: float) -> bool:
    """Return whether a number satisfies one keyword.

    In draft 4, ``exclusiveMinimum`` is a boolean that modifies ``minimum``.
    """
    if keyword == "minimum":
        return value > argument if schema.get("exclusiveMinimum") is True else value >= argument
    if keyword == "maximum":
        return value < argument if schema.get("exclusiveMaximum") is True else value <= argument
    if isinstance(argument, bool):
        return True
    if keyword == "exclusiveMinimum":
        return value > argument
    if keyword == "exclusiveMaximum":
        return value < argument
    if keyword == "multipleOf":
        return (Fraction(str(value)) / Fraction(str(argument))).denominator == 1
    return True


def _matches(pattern: str, text: str) -> bool:
    """Return whether a pattern matches some part of a text."""
    if not text.isascii():  # for these, Python's ``re`` may differ from the backend's patterns
        raise NoExactForm("pattern", f"whether {pattern!r} matches {text!r} is unknown")
    try:
        return search_pattern(pattern, text)
    except (re.error, GrammarError) as error:
        raise NoExactForm("pattern", f"{pattern!r}: {error}") from None
