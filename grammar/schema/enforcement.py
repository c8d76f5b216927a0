"""JSON schema keywords that each backend enforces by itself.

LLGuidance refuses unsupported keywords (see `schema_error`). XGrammar ignores many of them without
an error: it uses the first of ``$ref``, ``const``, ``enum``, ``anyOf``, ``oneOf``, ``allOf`` and
``type`` that a schema has, and only the keywords that belong to it. This module therefore knows
what XGrammar ignores.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from graft.grammar.schema.terms import (
    Reason,
    common_types,
    required_of,
    subschemas,
    types_of,
    values_of,
    word_set,
)
from graft.grammar.validate import search_pattern

__all__ = ["BACKENDS", "KEYWORDS", "available_backends", "ignored_keywords"]

#: Backends in order of preference. LLGuidance compiles in a millisecond and refuses unsupported
#: keywords. XGrammar precompiles masks, which bounds of strings and arrays can make very slow.
BACKENDS = ("llguidance", "xgrammar")


_BY_TREATMENT = (
    (
        "exact",
        "exact",
        """type enum const properties required additionalProperties items minItems
     maxItems minimum maximum exclusiveMinimum exclusiveMaximum anyOf $ref""",
    ),
    # XGrammar's length bounds allow unescaped control characters, its patterns quotes as well.
    (
        "exact",
        "loose",
        """multipleOf prefixItems additionalItems allOf minLength maxLength
     pattern""",
    ),
    ("loose", "loose", "format contentEncoding contentMediaType"),
    (
        "refused",
        "loose",
        """oneOf propertyNames patternProperties minProperties maxProperties
     uniqueItems unevaluatedItems unevaluatedProperties then else minContains maxContains""",
    ),
    (
        "refused",
        "dropped",
        """not if dependencies dependentRequired dependentSchemas contains
     $dynamicRef $recursiveRef""",
    ),
)
#: Treatment of each keyword by LLGuidance and XGrammar, without the router. ``exact``: enforced.
#: ``loose``: violations are possible. ``refused``: an error. ``dropped``: ignored.
KEYWORDS: dict[str, list[str]] = {
    keyword: [llguidance, xgrammar]
    for llguidance, xgrammar, keywords in _BY_TREATMENT
    for keyword in keywords.split()
}
_DROPPED = frozenset(
    keyword for keyword, (_, xgrammar) in KEYWORDS.items() if xgrammar == "dropped"
)
_MEANINGLESS_ALONE = word_set("format contentEncoding contentMediaType minContains maxContains")
_ASSERTIONS = KEYWORDS.keys() - _DROPPED - _MEANINGLESS_ALONE - word_set("then else uniqueItems")
#: Keywords of which XGrammar uses the first one only.
_EXCLUSIVE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
#: Types that XGrammar infers from keywords.
_INFERRED_TYPES = {
    "object": word_set("properties additionalProperties unevaluatedProperties"),
    "array": word_set("items prefixItems unevaluatedItems"),
}
_OLD_DRAFT = re.compile(r"draft-0[3467]")


def available_backends() -> tuple[str, ...]:
    """Return the installed backends, in order of preference."""
    return tuple(name for name in BACKENDS if importlib.util.find_spec(name))


def ignored_keywords(schema: Any) -> list[Reason]:
    """Return the keywords of a schema that XGrammar is known to ignore without an error."""
    uri = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    old_draft = _OLD_DRAFT.search(uri) is not None
    dropped: list[str] = []  # pointers of subschemas that XGrammar does not read
    found = []
    for pointer, part in subschemas(schema):
        if pointer.startswith(tuple(dropped)):
            continue
        dropped += [f"{pointer}/{keyword}" for keyword in _DROPPED & part.keys()]
        found += [
            Reason(pointer, what.split(" ")[0], f"XGrammar ignores {what}")
            for what in _ignored_keywords(part, old_draft)
        ]
    return found


def _ignored_keywords(schema: dict[str, Any], old_draft: bool) -> Iterator[str]:
    """Yield a description of each keyword of one subschema that XGrammar ignores.

    The first word is the keyword.
    """
    yield from sorted(_DROPPED & schema.keys())
    if schema.get("uniqueItems") is True:
        yield "uniqueItems"
    if {"pattern", "format"} <= schema.keys():
        yield "pattern next to format"
    assertions = _ASSERTIONS & schema.keys()
    used = next((keyword for keyword in _EXCLUSIVE if keyword in schema), None)
    if used is not None:
        if used == "$ref" and old_draft:
            return  # before draft 2019-09, the standard ignores keywords next to $ref
        for keyword in sorted(assertions - {used}):
            if not (keyword == "type" and _type_is_redundant(schema, used)):
                yield f"{keyword} next to {used}"
        return
    inferred = {
        json_type for json_type, keywords in _INFERRED_TYPES.items() if keywords & schema.keys()
    }
    if "type" not in schema and not inferred:
        yield from (f"{keyword} without type" for keyword in sorted(assertions))
    elif "object" in (types_of(schema) if "type" in schema else inferred):
        yield from _ignored_of_object(schema)


def _type_is_redundant(schema: dict[str, Any], used: str) -> bool:
    """Return whether ``type`` excludes no value that the used keyword allows."""
    types = types_of({"type": schema["type"]})
    if used in ("const", "enum"):
        return all(_has_type(value, types) for value in values_of(schema) or ())
    return used != "$ref" and all(
        isinstance(part, dict) and "type" in part and types_of(part) <= types
        for part in schema[used]
    )


def _has_type(value: Any, types: frozenset[str]) -> bool:
    """Return whether a value has one of the types."""
    own_types = types_of({"const": value})
    if not common_types(own_types, types):
        return False
    if "integer" not in types or own_types != {"number"}:
        return True
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _ignored_of_object(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the ignored keywords of an object schema, as `_ignored_keywords`."""
    names = set(schema.get("properties", ()))
    missing = sorted(set(required_of(schema)) - names)
    if missing:
        yield f"required {missing[0]!r}, which is not in properties"
    if names and "propertyNames" in schema:
        yield "propertyNames next to properties"
    for pattern in schema.get("patternProperties", ()):
        try:
            matched = sorted(name for name in names if search_pattern(pattern, name))
        except re.error:
            matched = sorted(names)
        if matched:
            yield f"patternProperties {pattern!r} for the property {matched[0]!r}"
    if "unevaluatedProperties" in schema and "additionalProperties" not in schema:
        yield "unevaluatedProperties"
