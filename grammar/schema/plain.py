"""Recognize schemas that LLGuidance certainly accepts, so that they need not be checked with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from graft.grammar.schema.documents import (
    JSON_TYPES,
    Parts,
    SchemaObject,
    required_of,
    type_of_value,
    word_set,
)
from graft.grammar.schema.keyword_support import KEYWORDS
from graft.grammar.schema.rewrite.strings import FORMATS

__all__ = ["is_plain"]

#: Limits of plain schemas, all far below those of LLGuidance: the length of the text, the number of
#: subschemas, the nesting of subschemas and of annotations, and the value of a keyword that counts.
_MAX_TEXT = 1 << 18
_MAX_PARTS = 4_000
_MAX_NESTING = 40
_MAX_DATA_NESTING = 4
_MAX_COUNT = 1_000
_MAX_BOUND = 1 << 53  # absolute value of a bound

_TYPES = JSON_TYPES | {"integer"}
_ALONE = word_set("$ref anyOf")
_STRING_KEYWORDS = word_set("format pattern minLength maxLength")
_DIALECT = re.compile(
    r"https?://json-schema\.org/(draft-0[467]/schema#?|draft/(2019-09|2020-12)/schema)"
)
_REFERENCE = re.compile(r"#/(\$defs|definitions)/[A-Za-z0-9_.:-]+")
_URL = re.compile(r"https?://[A-Za-z0-9_./-]+#?")
#: Patterns of characters, classes, repetitions and groups. `_GROUP` matches an innermost group.
_ATOM = (
    r"(?:[A-Za-z0-9_ @#:/,;=%-]|\\[.dw/-]|\[\^\\n\\r\\u2028\\u2029\]"
    r"|\[\^?(?:a-z|A-Z|a-f|A-F|0-[1-9]|1-[2-9]|[2-8]-9|[A-Za-z0-9_ .:@/]|\\[.dw/-])+-?\])"
)
_SEQUENCE = rf"(?:(?:{_ATOM}(?:\{{[0-9]{{1,2}},?\}}|[*+?])?|\x00[*+?]?)+)"
_GROUP = re.compile(rf"\((?:\?:)?{_SEQUENCE}(?:\|{_SEQUENCE})*\)")
_PATTERN = re.compile(rf"\^?{_SEQUENCE}\$?")
_MAX_PATTERN = 200
_COUNTS = (("minLength", "maxLength"), ("minItems", "maxItems"))


def is_plain(parts: Parts, text: str) -> bool:
    """Return whether LLGuidance certainly accepts a rewritten schema.

    LLGuidance refuses keywords that it does not support, keywords that contradict each other, and
    schemas that are too large. A plain schema is small and has few kinds of keywords, of which no
    two apply to the same value and can contradict each other. Most schemas are plain.

    `parts` are all subschemas of the schema, and `text` is the text that LLGuidance would read.
    """
    if not 0 < len(parts) <= _MAX_PARTS or len(text) > _MAX_TEXT:  # a boolean has no parts
        return False
    if any("$id" in part or "id" in part for _, part in parts[1:]):
        return False
    return all(
        pointer.count("/") <= _MAX_NESTING and _is_plain_part(part) for pointer, part in parts
    )


def _is_plain_part(part: SchemaObject) -> bool:
    keywords = _CONSTRAINTS & part.keys()
    for keyword, value in part.items():
        if not _VALUES.get(keyword, _is_annotation)(value):
            return False
    if keywords & _ALONE:
        return len(keywords) == 1
    if "enum" in part:
        return keywords <= {"enum", "type"} and _have_types(part["enum"], part.get("type"))
    if len(keywords & _STRING_KEYWORDS) > 1 and not keywords.isdisjoint(("format", "pattern")):
        return False
    for low, high in _COUNTS:
        if low in part and high in part and part[low] > part[high]:
            return False
    if keywords & {"minimum", "maximum"}:
        is_number = part.get("type") in ("integer", "number")
        return is_number and part.get("minimum", -_MAX_BOUND) < part.get("maximum", _MAX_BOUND)
    if "patternProperties" in part:
        return keywords.isdisjoint(("properties", "required"))
    if part.get("additionalProperties") is False:
        return part.get("properties", {}).keys() >= set(required_of(part))
    return True


def _have_types(values: list[Any], types: Any) -> bool:
    names = [types] if isinstance(types, str) else types
    return names is None or all(type_of_value(value) in names for value in values)


def _is_annotation(value: Any) -> bool:
    return _is_nested(value, _MAX_DATA_NESTING)


def _is_nested(value: Any, levels: int) -> bool:
    """Return whether a JSON value has at most `levels` levels of objects and arrays."""
    if not isinstance(value, (dict, list)):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_nested(part, levels - 1) for part in parts)


def _is_type(value: Any) -> bool:
    return value in _TYPES if isinstance(value, str) else _TYPES.issuperset(value)


def _is_constant(value: Any) -> bool:
    # Numbers and containers are left to LLGuidance. Some characters may need escapes.
    return value is None or isinstance(value, bool) or _is_printable(value)


def _is_printable(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _are_constants(value: list[Any]) -> bool:
    return bool(value) and all(map(_is_constant, value))


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, dict)) and all(map(_is_printable, value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= _MAX_COUNT


def _is_bound(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < _MAX_BOUND


def _is_schema(value: Any) -> bool:
    return value is True or isinstance(value, dict)


def _are_properties(value: dict[str, Any]) -> bool:
    return len(value) <= _MAX_COUNT and _are_names(value) and all(map(_is_schema, value.values()))


def _is_pattern(value: Any) -> bool:
    if value in FORMATS.values():
        return True
    if not isinstance(value, str) or len(value) > _MAX_PATTERN or "\0" in value:
        return False
    for _ in range(_MAX_NESTING):
        value, count = _GROUP.subn("\0", value)
        if count == 0:
            break
    return _PATTERN.fullmatch(value) is not None


def _are_patterns(value: dict[str, Any]) -> bool:
    return len(value) == 1 and all(map(_is_pattern, value)) and all(map(_is_schema, value.values()))


def _matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


#: Predicates for the values of keywords. Keywords that are not listed are annotations, which
#: LLGuidance ignores.
_VALUES: dict[str, Callable[[Any], bool]] = {
    # Keywords that a plain schema does not have.
    **dict.fromkeys(KEYWORDS, lambda value: False),
    **dict.fromkeys(("$anchor", "$dynamicAnchor", "$recursiveAnchor"), lambda value: False),
    **dict.fromkeys(("$id", "id"), _matches(_URL)),  # of the root only, see `is_plain`
    "$schema": _matches(_DIALECT),
    "$ref": _matches(_REFERENCE),
    "type": _is_type,
    "format": _is_printable,  # the rewritten schema has only formats that LLGuidance supports
    "pattern": _is_pattern,
    "patternProperties": _are_patterns,
    "enum": _are_constants,
    "anyOf": lambda options: all(map(_is_schema, options)),
    "properties": _are_properties,
    "required": _are_names,
    "additionalProperties": lambda value: isinstance(value, (bool, dict)),
    "items": _is_schema,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_count),
    **dict.fromkeys(("minimum", "maximum"), _is_bound),
    **dict.fromkeys(
        ("$defs", "definitions"), lambda schemas: all(map(_is_schema, schemas.values()))
    ),
}
_CONSTRAINTS = KEYWORDS.keys() & _VALUES.keys()
