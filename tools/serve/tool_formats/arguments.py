"""Adapt the schema of a function's arguments: its type, and its references to definitions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from graft.grammar.errors import GrammarError
from graft.grammar.schema.documents import word_set
from graft.grammar.schema.wellformed import check_schema
from graft.native.errors import short_repr
from graft.tools.serve.errors import ApiError
from graft.tools.serve.tool_calls import NO_ARGUMENTS

__all__ = ["DEFINITIONS", "arguments_schema", "constraints", "definitions_of", "document_of"]

DEFINITIONS = ("$schema", "$defs", "definitions")
_ANNOTATIONS = word_set("title description default examples deprecated")
#: A reference to a definition whose name has no escaped characters.
_TARGET = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_MAX_REFERENCES = 8
#: Maximum depth of unions that are searched for the type of arguments.
_MAX_NESTING = 4


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, which allows objects only.

    Clients expect arguments to be an object. If the schema ``parameters`` also allows other values,
    the type "object" is therefore added to it. Otherwise, it is not added, because XGrammar refuses
    a type next to a union. Raise ApiError if ``parameters`` is not a JSON schema, or allows no
    objects.
    """
    given = function.get("parameters") or NO_ARGUMENTS
    try:
        check_schema(given)
    except GrammarError as error:
        message = f"function {function['name']!r}: parameters: {error}"
        raise ApiError(message, param="tools") from error
    definitions = definitions_of(given)
    schema = document_of(given, definitions)
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise ApiError(
            f"function {function['name']!r}: parameters must be the schema of an object, got the "
            f"type {short_repr(types)}",
            param="tools",
        )
    if _allows_only_objects(schema, definitions, _MAX_NESTING):
        return schema
    return {**schema, "type": "object"}


def _allows_only_objects(schema: Any, definitions: Mapping[str, Any], depth: int) -> bool:
    """Return whether ``type`` and unions show that the schema allows objects only.

    References are resolved with `definitions`, and unions are searched down to `depth` levels.
    """
    if not isinstance(schema, (dict, bool)) or depth == 0:
        return False
    schema = document_of(schema, definitions)
    if schema.get("type") == "object":
        return True
    for keyword, combine in (("anyOf", all), ("oneOf", all), ("allOf", any)):
        members = schema.get(keyword)
        if not isinstance(members, list) or not members:
            continue
        if combine(_allows_only_objects(one, definitions, depth - 1) for one in members):
            return True
    return False


def constraints(schema: Mapping[str, Any]) -> Set[str]:
    """Return the keywords of a schema except for annotations and definitions."""
    return schema.keys() - _ANNOTATIONS - set(DEFINITIONS)


def definitions_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a schema that contains definitions to which references can point."""
    return {key: schema[key] for key in DEFINITIONS if key in schema}


def document_of(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a subschema as a separate document that includes `definitions`.

    If the subschema consists of a reference only, it is replaced with the reference's target.
    """
    for _ in range(_MAX_REFERENCES):
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        target = _TARGET.fullmatch(str(schema.get("$ref", "")))
        if target is None or constraints(schema) != {"$ref"}:
            break
        section = definitions.get(target[1])
        found = section.get(target[2]) if isinstance(section, dict) else None
        if not isinstance(found, (dict, bool)):
            break  # the backend reports that the reference points to nothing
        schema = found
    return {**schema, **definitions}
