"""Read the parameters of a tool from its JSON schema.

The tool-call formats that write each argument by itself, not as one JSON object, need them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.grammar.schema.documents import subschemas, word_set
from graft.tools.serve.errors import ApiError
from graft.tools.serve.tool_formats.arguments import (
    DEFINITIONS,
    arguments_schema,
    constraints,
    definitions_of,
    document_of,
)
from graft.tools.serve.tool_formats.base import NAME, is_strict

__all__ = ["Parameter", "is_plain", "read_parameters", "union"]

#: Keywords of an object schema that cannot be enforced if each argument is written separately.
_OBJECT_KEYWORDS = word_set(
    """$ref $dynamicRef allOf anyOf oneOf not if const enum patternProperties propertyNames
    minProperties maxProperties dependencies dependentRequired dependentSchemas
    unevaluatedProperties"""
)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function."""

    #: Name of the parameter.
    key: str

    #: JSON schema of the argument. It is a separate document with the definitions of the function's
    #: schema.
    schema: dict[str, Any]
    #: Whether each call must have the argument.
    required: bool
    #: Whether objects in the argument forbid properties that the schema does not list.
    strict: bool
    #: Name of the schema in error messages.
    place: str

    @property
    def alternatives(self) -> list[dict[str, Any]]:
        """List of schemas. The argument must satisfy at least one of them.

        The schemas are the members of ``anyOf``. If the schema only lists types, there is one
        schema per type. Otherwise, the only element is the schema itself.
        """
        keywords = constraints(self.schema)
        definitions = definitions_of(self.schema)
        if keywords == {"anyOf"}:
            members = self.schema["anyOf"]
        elif keywords == {"type"} and isinstance(self.schema["type"], list):
            members = [{"type": name} for name in self.schema["type"]]
        else:
            members = [self.schema]
        return [document_of(member, definitions) for member in members]

    @property
    def texts(self) -> list[str] | None:
        """Strings that ``enum`` or ``const`` allows; None if other values are allowed as well."""
        values = self.schema.get("enum")
        if "const" in self.schema:
            values = [self.schema["const"]]
        keywords = constraints(self.schema) - {"type"}
        is_string = self.schema.get("type", "string") == "string"
        if len(keywords) != 1 or not values or not is_string:
            return None
        return values if all(isinstance(value, str) for value in values) else None


def union(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of the values that satisfy at least one of several schemas."""
    if len(schemas) == 1:
        return schemas[0]
    members = []
    for schema in schemas:
        members.append({key: part for key, part in schema.items() if key not in DEFINITIONS})
    return {"anyOf": members, **definitions_of(schemas[0])}


def is_plain(schema: Mapping[str, Any], type_name: str) -> bool:
    """Return whether a schema allows all values of a type, and no others."""
    return constraints(schema) == {"type"} and schema["type"] == type_name


def read_parameters(
    function: Mapping[str, Any], format_name: str, names: re.Pattern[str] = NAME
) -> list[Parameter]:
    """Return the parameters of a function in the order of its schema.

    `names` matches the names of parameters that the notation `format_name` can express. Raise
    ApiError if the notation cannot express the schema of the arguments.
    """
    schema = arguments_schema(function)
    definitions = definitions_of(schema)

    def refusal(reason: str) -> ApiError:
        return ApiError(
            f"function {function['name']!r}: parameters: {reason}, which the tool-call format "
            f"{format_name} cannot express",
            param="tools",
        )

    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if isinstance(required, bool):
        required = []  # in draft 3, `required` does not list properties
    keywords = sorted(_OBJECT_KEYWORDS & schema.keys())
    if keywords:
        raise refusal(f"the schema of the object has the keyword {keywords[0]}")
    parameters = []
    strict = is_strict(function)
    for key, value in properties.items():
        if not names.fullmatch(key):
            raise refusal(f"a property is named {key!r}")
        document = document_of(value, definitions)
        place = f"function {function['name']!r}: parameter {key!r}"
        parameters.append(Parameter(key, document, key in required, strict, place))
    for key in required:
        if key not in properties:
            raise refusal(f"{key!r} is required, but is none of the properties")
    for parameter in parameters:
        for pointer, part in subschemas(parameter.schema):
            target = part.get("$ref", "")
            if target == "#" or target.startswith(("#/properties", "#/items")):
                raise refusal(f"{parameter.key}: {pointer} refers to {target!r}")
    return parameters
