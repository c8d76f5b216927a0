"""JSON schema keywords that each backend enforces in a schema that graft has not rewritten.

LLGuidance refuses schemas with unsupported keywords (see `schema_error`). XGrammar ignores many
keywords without an error. It uses the first of ``$ref``, ``const``, ``enum``, ``anyOf``, ``oneOf``,
``allOf`` and ``type`` that a schema has. If this keyword is ``type``, XGrammar also reads the
keywords for that type. Otherwise, it reads no further keywords. `ignored_keywords` finds the
keywords of a schema that XGrammar ignores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from graft.grammar.schema.documents import (
    SchemaObject,
    common_types,
    required_of,
    subschemas,
    types_of,
    values_of,
    word_set,
)
from graft.grammar.schema.reasons import Reason
from graft.grammar.schema.rewrite.numbers import BOUNDS, has_many_digits
from graft.grammar.validate import search_pattern

__all__ = ["BACKENDS", "KEYWORDS", "ignored_keywords"]

#: Backends in order of preference. LLGuidance compiles in a millisecond and refuses unsupported
#: keywords. XGrammar computes masks in advance, which can be very slow if the schema has bounds for
#: strings or arrays.
BACKENDS = ("llguidance", "xgrammar")


#: Each element: treatment by LLGuidance, treatment by XGrammar, and the keywords that are treated
#: in this way; see `KEYWORDS`.
_BY_TREATMENT = (
    (
        "exact",
        "exact",
        """type enum const properties required additionalProperties items minItems
     maxItems minimum maximum exclusiveMinimum exclusiveMaximum anyOf $ref""",
    ),
    # With minLength and maxLength, XGrammar allows unescaped control characters in strings. With
    # pattern, it also allows unescaped quotes.
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
#: Treatment of each keyword by LLGuidance and by XGrammar, in schemas that graft has not rewritten.
#: ``"exact"``: the keyword is enforced. ``"loose"``: violations are possible without an error.
#: ``"refused"``: some or all uses are errors. ``"dropped"``: the keyword is ignored without an
#: error.
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
#: If a schema has several of these keywords, XGrammar uses only the first one in this order.
_EXCLUSIVE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")

#: Keywords from which XGrammar infers the type of a schema without ``type``.
_INFERRED_TYPES = {
    "object": word_set("properties additionalProperties unevaluatedProperties"),
    "array": word_set("items prefixItems unevaluatedItems"),
}
_OLD_DRAFT = re.compile(r"draft-0[3467]")


def ignored_keywords(schema: Any) -> list[Reason]:
    """Return the keywords of a schema that XGrammar is known to ignore without an error."""
    uri = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    old_draft = _OLD_DRAFT.search(uri) is not None
    dropped: list[str] = []  # pointers of subschemas that XGrammar does not read
    reasons = []
    for pointer, part in subschemas(schema):
        if pointer.startswith(tuple(dropped)):
            continue
        dropped += [f"{pointer}/{keyword}" for keyword in _DROPPED & part.keys()]
        for description in _ignored_keywords(part, old_draft):
            keyword, *_ = description.split(" ")
            reasons.append(Reason(pointer, keyword, f"XGrammar ignores {description}"))
    return reasons


def _ignored_keywords(schema: SchemaObject, old_draft: bool) -> Iterator[str]:
    """Yield a description of each keyword of one subschema that XGrammar ignores.

    The first word of a description is the keyword. `old_draft` is True if the schema's draft is
    older than 2019-09.
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
            return  # before draft 2019-09, keywords next to $ref have no effect
        for keyword in sorted(assertions - {used}):
            if not (keyword == "type" and _type_is_redundant(schema, used)):
                yield f"{keyword} next to {used}"
        return
    if "type" in schema:
        types = types_of(schema)
    else:
        types = _inferred_types(schema)
        if not types:
            yield from (f"{keyword} without type" for keyword in sorted(assertions))
    if "object" in types:
        yield from _ignored_of_object(schema)
    if "number" in types:
        for keyword in BOUNDS:
            if has_many_digits(schema.get(keyword)):
                yield f"{keyword} as far as it has more digits than a double"


def _inferred_types(schema: SchemaObject) -> frozenset[str]:
    """Return the types that XGrammar infers from the keywords of a schema without ``type``."""
    return frozenset(
        json_type for json_type, keywords in _INFERRED_TYPES.items() if keywords & schema.keys()
    )


def _type_is_redundant(schema: SchemaObject, used: str) -> bool:
    """Return whether all values that the keyword `used` allows have a type that ``type`` lists.

    The keyword ``type`` then has no effect. `used` is one of `_EXCLUSIVE`.
    """
    types = types_of({"type": schema["type"]})
    if used in ("const", "enum"):
        return all(_has_type(value, types) for value in values_of(schema) or ())
    if used == "$ref":
        return False
    for part in schema[used]:
        if not isinstance(part, dict) or "type" not in part or not types_of(part) <= types:
            return False
    return True


def _has_type(value: Any, types: frozenset[str]) -> bool:
    """Return whether a value has one of the types."""
    own_types = types_of({"const": value})
    if not common_types(own_types, types):
        return False
    if "integer" not in types or own_types != {"number"}:
        return True
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _ignored_of_object(schema: SchemaObject) -> Iterator[str]:
    """Yield descriptions of the keywords of an object schema that XGrammar ignores."""
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
    is_open = schema.get("additionalProperties", False) is not False
    if is_open and (names or schema.get("patternProperties")):
        yield "additionalProperties for a listed name that is spelled with escape sequences"
    if schema.get("minProperties", 0) > 1 and (is_open or schema.get("patternProperties")):
        yield "minProperties for a name that occurs twice"
    if "unevaluatedProperties" in schema and "additionalProperties" not in schema:
        yield "unevaluatedProperties"
