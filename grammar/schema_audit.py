"""Which parts of a JSON schema XGrammar would drop without a word.

XGrammar looks at the first of ``$ref``, ``const``, ``enum``, ``anyOf``, ``oneOf``, ``allOf`` and
``type`` that a schema has and takes only the keywords that belong to it; what stands beside it, and
some keywords altogether, are ignored. (Features that it ignores with a warning are refused when the
grammar is compiled.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .judge import found_in

__all__ = ["unenforced_keywords"]

def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEVER = _words(
    """not if contains dependentRequired dependentSchemas dependencies $dynamicRef $recursiveRef"""
)
_ASSERTIONS = _words(
    """type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength
    minLength pattern items prefixItems additionalItems maxItems minItems maxProperties
    minProperties required properties patternProperties additionalProperties propertyNames
    unevaluatedItems unevaluatedProperties allOf anyOf oneOf $ref"""
)
_DISPATCH = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_MAKES_OBJECT = _words("properties additionalProperties unevaluatedProperties")
_MAKES_ARRAY = _words("items prefixItems unevaluatedItems")
_OLD_DRAFT = re.compile(r"draft-0[3467]")


def unenforced_keywords(schema: dict[str, Any] | bool) -> list[str]:
    """Keywords that would be ignored, each with its JSON pointer and the reason.

    Parameters
    ----------
    schema
        A JSON schema as parsed JSON.

    Returns
    -------
    list of str
        Empty if XGrammar takes all of the schema, as far as is known.
    """
    old = isinstance(schema, dict) and bool(_OLD_DRAFT.search(str(schema.get("$schema", ""))))
    return [
        f"{pointer}: {why}"
        for pointer, part in _walk(schema, "#")
        for why in _ignored(part, old)
    ]


def _walk(schema: Any, pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every subschema that is an object, with its pointer."""
    if not isinstance(schema, dict):
        return
    yield pointer, schema
    for keyword, value in schema.items():
        here = f"{pointer}/{keyword}"
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(value, dict):
                for name, part in value.items():
                    yield from _walk(part, f"{here}/{name.replace('~', '~0').replace('/', '~1')}")
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            for index, part in enumerate(value):
                yield from _walk(part, f"{here}/{index}")
        elif keyword in (
            "items", "additionalItems", "additionalProperties", "propertyNames",
            "unevaluatedItems", "unevaluatedProperties",
        ):  # fmt: skip
            yield from _walk(value, here)


def _ignored(schema: dict[str, Any], old_draft: bool) -> Iterator[str]:
    yield from sorted(_NEVER & schema.keys())
    if schema.get("uniqueItems") is True:
        yield "uniqueItems"
    beside = _ASSERTIONS & schema.keys()
    chosen = next((keyword for keyword in _DISPATCH if keyword in schema), None)
    if chosen is not None:
        # Before draft 2019-09 the standard itself ignores what stands beside $ref.
        if not (chosen == "$ref" and old_draft):
            for keyword in sorted(beside - {chosen}):
                if not (keyword == "type" and _same_type(schema, chosen)):
                    yield f"{keyword} beside {chosen}"
        return
    kinds = _kinds(schema)
    if kinds is None:
        for keyword in sorted(beside - {"type"}):
            yield f"{keyword} without type"
        return
    if "object" in kinds:
        yield from _ignored_of_object(schema)


def _kinds(schema: dict[str, Any]) -> frozenset[str] | None:
    """Types that XGrammar takes the schema for; None: anything."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(str(k) for k in kind)
    if _MAKES_OBJECT & schema.keys():
        return frozenset(("object",))
    if _MAKES_ARRAY & schema.keys():
        return frozenset(("array",))
    return None


def _same_type(schema: dict[str, Any], chosen: str) -> bool:
    """Whether `type` says nothing that the chosen keyword does not say already."""
    kinds = _kinds(schema) or frozenset()
    if chosen in ("const", "enum"):
        values = [schema["const"]] if chosen == "const" else schema["enum"]
        return isinstance(values, list) and all(_is_a(value, kinds) for value in values)
    if chosen == "$ref":
        return False
    parts = schema[chosen]
    return isinstance(parts, list) and all(
        isinstance(part, dict) and "type" in part and (_kinds(part) or frozenset()) <= kinds
        for part in parts
    )


def _is_a(value: Any, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, (int, float)):
        whole = isinstance(value, int) or value.is_integer()
        return "number" in kinds or ("integer" in kinds and whole)
    names = {str: "string", type(None): "null", list: "array", dict: "object"}
    return names[type(value)] in kinds


def _ignored_of_object(schema: dict[str, Any]) -> Iterator[str]:
    properties = schema.get("properties")
    names = set(properties) if isinstance(properties, dict) else set()
    required = schema.get("required")
    missing = sorted(set(required) - names) if isinstance(required, list) else []
    if missing:
        yield f"required {missing[0]!r}, which is not in properties"
    if names and "propertyNames" in schema:
        yield "propertyNames beside properties"
    patterns = schema.get("patternProperties")
    for pattern in patterns if isinstance(patterns, dict) else ():
        try:
            matched = sorted(name for name in names if found_in(pattern, name))
        except re.error:
            matched = sorted(names)
        if matched:
            yield f"patternProperties {pattern!r} for the property {matched[0]!r}"
    if "unevaluatedProperties" in schema and "additionalProperties" not in schema:
        yield "unevaluatedProperties"
