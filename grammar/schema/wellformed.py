"""Whether a document is a JSON schema at all: read when it is stated, whoever compiles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import GrammarError
from .endless import is_endless
from .terms import Cannot, References, subschemas, word_set

__all__ = ["check_schema"]

_TYPES = word_set("null boolean integer number string array object any")
_OWN_WORDS = word_set(
    """type properties items $ref anyOf oneOf allOf enum const not if $defs definitions format
    pattern additionalProperties patternProperties"""
)
#: Descriptions of tools that hold a schema: the keys that give them away, the schema's, the name.
_WRAPPED = (
    (("json_schema",), "json_schema", "OpenAI's response_format"),
    (("schema", "name"), "schema", "OpenAI's response_format"),
    (("schema", "strict"), "schema", "OpenAI's response_format"),
    (("input_schema",), "input_schema", "a tool of Anthropic's"),
    (("function",), "function", "a tool of OpenAI's"),
    (("parameters", "name"), "parameters", "a function of OpenAI's"),
)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return _number(value) and value >= 0 and value == int(value)


def _schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_schema, value))


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _types(value: Any) -> bool:
    names = value if isinstance(value, list) and value else [value]
    return all(isinstance(name, str) and name in _TYPES for name in names)


def _map_of(form: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(form, value.values()))


_FORMS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("a number", _number, "minimum maximum"),
    ("a number or, in draft 4, a boolean", lambda v: _number(v) or isinstance(v, bool),
     "exclusiveMinimum exclusiveMaximum"),
    ("a number above 0", lambda v: _number(v) and v > 0, "multipleOf divisibleBy"),
    ("a whole number, not negative", _count, """minLength maxLength minItems maxItems
     minProperties maxProperties minContains maxContains"""),
    ("a string", lambda v: isinstance(v, str),
     "pattern format $ref $dynamicRef $recursiveRef contentEncoding contentMediaType"),
    ("a boolean", lambda v: isinstance(v, bool), "uniqueItems"),
    ("a type of JSON or a list of them", _types, "type"),
    ("a list of names", lambda v: _names(v) or isinstance(v, bool), "required"),  # draft 3
    ("a list", lambda v: isinstance(v, list), "enum"),
    ("a schema", _schema, """additionalProperties additionalItems propertyNames contains not if
     then else unevaluatedItems unevaluatedProperties"""),
    ("a schema or a list of schemas", lambda v: _schema(v) or v == [] or _schemas(v), "items"),
    ("a list of schemas", _schemas, "allOf anyOf oneOf prefixItems"),
    ("a map of schemas", _map_of(_schema),
     "properties patternProperties $defs definitions dependentSchemas"),
    ("a map of names", _map_of(_names), "dependentRequired"),
    ("a map of names or schemas",
     _map_of(lambda v: _names(v) or _schema(v) or isinstance(v, str)), "dependencies"),
)  # fmt: skip
_FORM = {word: (said, form) for said, form, words in _FORMS for word in words.split()}


def check_schema(schema: Any) -> None:
    """Refuses what is no schema, and what is one of nothing.

    Raises
    ------
    GrammarError
        With the JSON pointer and the keyword of what has the wrong form.
    """
    if not _schema(schema):
        raise GrammarError(
            f"JSON schema: must be an object or a boolean, not {type(schema).__name__}"
        )
    if schema is False:
        raise GrammarError("JSON schema: the schema false allows no output")
    if isinstance(schema, dict) and not _OWN_WORDS & (schema.keys() - {"type"}):
        for keys, holder, what in _WRAPPED:
            if isinstance(schema.get(holder), dict) and all(key in schema for key in keys):
                raise GrammarError(f"JSON schema: this is {what}: give what is in its {holder!r}")
    for pointer, part in subschemas(schema):
        for keyword in _FORM.keys() & part.keys():
            said, form = _FORM[keyword]
            if not form(part[keyword]):
                value = str(part[keyword])[:40]
                raise GrammarError(
                    f"JSON schema: {pointer}: {keyword}: must be {said}, not {value!r}"
                )
    references = References(schema)
    for pointer, part in subschemas(schema):
        if references.pointer(part.get("$ref")) is not None:
            try:
                references.resolve(part["$ref"])
            except Cannot as error:
                raise GrammarError(f"JSON schema: {pointer}: {error}") from None
    if is_endless(schema):
        raise GrammarError(
            "JSON schema: allows no output: a $ref leads back to itself in all that fits"
        )
