"""Lowering of JSON schemas to the expressions of `graft.grammar.regular.expression`.

A schema is lowered if it is not recursive and consists of strings, numbers, enumerations, arrays,
objects without additional properties, and unions of these. For such schemas, it is known exactly
which JSON texts LLGuidance allows. For any other schema, `lower_schema` raises `NotRegular`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from graft.grammar.regular.expression import (
    EMPTY,
    MAX_EXPRESSION,
    Expression,
    Ranges,
    characters,
    complement,
    concat,
    intersection,
    optional,
    repeat,
    text,
    union,
)
from graft.grammar.regular.regex import NotRegular, has_alternatives, lower_regex
from graft.grammar.schema.keyword_support import KEYWORDS

__all__ = ["lower_schema"]

#: Maximum nesting of schemas. Deeper schemas, such as recursive ones, are not lowered.
MAX_NESTING = 32

#: Separators in JSON text by the value of the option `whitespace`: the separator between values or
#: properties, and the separator between a key and its value.
SEPARATORS = {"line": (", ", ": "), "compact": (",", ":")}

#: Supported keywords of a schema of each type, besides ``type``. Annotations such as ``title``, and
#: keywords that JSON Schema does not define, are ignored.
_TYPE_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
}
_INTEGER = lower_regex("-?(0|[1-9][0-9]*)")
_NUMBER = lower_regex(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?")
#: Letters of the short escapes of JSON strings, by the code of the escaped character.
_SHORT_ESCAPES = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_ESCAPED = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)]
_PLAIN = complement(_ESCAPED)
#: Any character of a JSON string, in the forms that LLGuidance allows.
_ANY_CHARACTER = union(
    [characters(_PLAIN), lower_regex(r'\\(["\\bfnrt]|u00([01][0-9a-fA-F]|7[fF]))')]
)
#: Characters of the class escapes ``\d`` and ``\w``, which match only ASCII characters in patterns
#: of JSON schemas.
_CLASSES = {"d": [(0x30, 0x39)], "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]}
_PRINTABLE = re.compile(r"[ !#-\[\]-~]*")


def lower_schema(schema: Any, whitespace: object) -> Expression:
    """Return the expression of the JSON texts that LLGuidance allows for a schema.

    The schema is in the form that `graft.grammar.schema.router.route` returns. `whitespace` is the
    value of `Spec.whitespace`. Raise `NotRegular` if the schema or this value is not supported.
    """
    if not isinstance(whitespace, str) or whitespace not in SEPARATORS:
        raise NotRegular(f"whitespace {whitespace!r} is not supported")
    return _Lowering(schema, *SEPARATORS[whitespace]).lower(schema, 0)


class _Lowering:
    def __init__(self, root: Any, comma: str, colon: str):
        self._root = root
        self._comma = text(comma)
        self._colon = colon

    def lower(self, schema: Any, nesting: int) -> Expression:
        if not isinstance(schema, dict):
            raise NotRegular("a boolean schema is not supported")
        if nesting > MAX_NESTING:
            raise NotRegular("the schema is recursive or nested too deeply")
        if any(keyword.startswith("x-guidance") for keyword in schema):
            raise NotRegular("options of LLGuidance are not supported")
        keywords = schema.keys() & KEYWORDS.keys()
        if "$ref" in keywords:
            return self._lower_reference_or_union(schema, keywords, {"$ref"}, nesting)
        if "anyOf" in keywords:
            return self._lower_reference_or_union(schema, keywords, {"anyOf"}, nesting)
        if "const" in keywords or "enum" in keywords:
            return _lower_values(schema, keywords)
        types = schema.get("type")
        names: list[str] = []
        allowed = {"type"}
        for name in types if isinstance(types, list) else [types]:
            if not isinstance(name, str) or name not in _TYPE_KEYWORDS:
                raise NotRegular("a schema without types is not supported")
            names.append(name)
            allowed |= _TYPE_KEYWORDS[name]
        if keywords - allowed:
            raise NotRegular(f"keyword {sorted(keywords - allowed)[0]!r} is not supported")
        expression = union([self._lower_type(name, schema, nesting) for name in names])
        if len(expression) > MAX_EXPRESSION:
            raise NotRegular("the schema is too large")
        return expression

    def _lower_reference_or_union(
        self, schema: dict[str, Any], keywords: set[str], allowed: set[str], nesting: int
    ) -> Expression:
        """Return the expression of a schema with ``$ref`` or ``anyOf``.

        `keywords` are the schema's keywords, without annotations. Raise `NotRegular` if one of them
        is not in `allowed`. `nesting` is the nesting depth of the schema.
        """
        if keywords - allowed:
            raise NotRegular(f"keywords beside {sorted(allowed)[0]!r} are not supported")
        if "$ref" in keywords:
            return self.lower(self._resolve(schema["$ref"]), nesting + 1)
        return union([self.lower(option, nesting + 1) for option in schema["anyOf"]])

    def _resolve(self, reference: Any) -> Any:
        match = re.fullmatch(r"#/(\$defs|definitions)/([A-Za-z0-9_]+)", str(reference))
        if match is None:
            raise NotRegular("this $ref is not supported")
        try:
            return self._root[match[1]][match[2]]
        except (KeyError, TypeError):
            raise NotRegular("this $ref is not supported") from None

    def _lower_type(self, name: str, schema: dict[str, Any], nesting: int) -> Expression:
        if name == "object":
            return self._lower_object(schema, nesting)
        if name == "array":
            return self._lower_array(schema, nesting)
        if name == "string":
            return concat([text('"'), _lower_string(schema), text('"')])
        if name == "boolean":
            return union([text("true"), text("false")])
        if name == "null":
            return text("null")
        return _INTEGER if name == "integer" else _NUMBER

    def _lower_object(self, schema: dict[str, Any], nesting: int) -> Expression:
        """Lower an object schema. The keys of the objects have the order of the schema.

        Optional properties may be absent, so an object may begin with any of the properties up to
        and including the first required one. The result is the union of the texts that begin with
        each of these properties. A comma precedes each later property.
        """
        if schema.get("additionalProperties") is not False:
            raise NotRegular("additional properties are not supported")
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if set(required) - set(properties):
            raise NotRegular("a required property has no schema")
        members = []
        for key, value in properties.items():
            member = concat([text(f"{_quote(key)}{self._colon}"), self.lower(value, nesting + 1)])
            members.append((key in required, member))
        bodies = []
        for index, (is_required, member) in enumerate(members):
            rest = []
            for follows_required, following in members[index + 1 :]:
                part = concat([self._comma, following])
                rest.append(part if follows_required else optional(part))
            bodies.append(concat([member, *rest]))
            if is_required:
                break
        else:
            bodies.append(EMPTY)
        expression = concat([text("{"), union(bodies), text("}")])
        if len(expression) > MAX_EXPRESSION:
            raise NotRegular("the schema is too large")
        return expression

    def _lower_array(self, schema: dict[str, Any], nesting: int) -> Expression:
        if "items" not in schema:
            raise NotRegular("an array of any items is not supported")
        low, high = _bounds(schema, "minItems", "maxItems")
        if high == 0:
            return text("[]")
        item = self.lower(schema["items"], nesting + 1)
        more_high = None if high is None else high - 1
        following = repeat(concat([self._comma, item]), max(0, low - 1), more_high)
        items = concat([item, following])
        return concat([text("["), items if low > 0 else optional(items), text("]")])


def _lower_values(schema: dict[str, Any], keywords: set[str]) -> Expression:
    """Lower a schema that lists its values with ``enum`` or ``const``.

    `keywords` are the schema's keywords, without annotations.
    """
    if keywords - {"const", "enum", "type"} or {"const", "enum"} <= keywords:
        raise NotRegular("keywords beside 'enum' are not supported")
    values = [schema["const"]] if "const" in keywords else schema["enum"]
    types = {"str": "string", "bool": "boolean", "NoneType": "null", "int": "integer"}
    for value in values:
        name = types.get(type(value).__name__)
        if name is None or schema.get("type", name) != name:
            raise NotRegular("this value of an enum is not supported")
    return union([text(_literal(value)) for value in values])


def _literal(value: str | int | bool | None) -> str:
    return _quote(value) if isinstance(value, str) else json.dumps(value)


def _quote(value: str) -> str:
    """Return a text as a JSON string; raise `NotRegular` if it may need escape sequences."""
    if not _PRINTABLE.fullmatch(value):
        raise NotRegular("a key or value with escapes is not supported")
    return f'"{value}"'


def _lower_string(schema: dict[str, Any]) -> Expression:
    """Return the expression of the content of a string, without the quotation marks."""
    pattern = schema.get("pattern")
    if pattern is None:
        return repeat(_ANY_CHARACTER, *_bounds(schema, "minLength", "maxLength"))
    if {"minLength", "maxLength"} & schema.keys() or not isinstance(pattern, str):
        raise NotRegular("a pattern beside a length is not supported")
    starts = pattern.startswith("^")
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern[starts : len(pattern) - ends]
    if (starts or ends) and has_alternatives(body):
        raise NotRegular("an anchor of one alternative is not supported")
    anything = repeat(_ANY_CHARACTER, 0, None)
    parts = [lower_regex(body, _json_character, _CLASSES)]
    if not starts:
        parts.insert(0, anything)
    if not ends:
        parts.append(anything)
    return concat(parts)


def _json_character(ranges: Ranges) -> Expression:
    """Return the expression of one character of the ranges, as it may appear in a JSON string.

    A character that must be escaped may have several forms: a short escape such as ``\\n``, and the
    escape ``\\u`` with four hexadecimal digits.
    """
    options = [characters(intersection(ranges, _PLAIN))]
    for low, high in intersection(ranges, _ESCAPED):
        for code in range(low, high + 1):
            if code in _SHORT_ESCAPES:
                options.append(text(f"\\{_SHORT_ESCAPES[code]}"))
            if code not in (0x22, 0x5C):
                digits = map(_hexadecimal_digit, f"{code:02x}")
                options.append(concat([text("\\u00"), *digits]))
    return union(options)


def _hexadecimal_digit(digit: str) -> Expression:
    """Return the expression of a hexadecimal digit in lower or upper case."""
    return characters([(ord(case), ord(case)) for case in sorted({digit, digit.upper()})])


def _bounds(schema: dict[str, Any], low: str, high: str) -> tuple[int, int | None]:
    bounds = schema.get(low, 0), schema.get(high)
    for bound in bounds:
        if bound is not None and (type(bound) is not int or not 0 <= bound <= 4096):
            raise NotRegular(f"{low} or {high} is too large")
    if bounds[1] is not None and bounds[1] < bounds[0]:
        raise NotRegular(f"{low} is larger than {high}")
    return bounds
