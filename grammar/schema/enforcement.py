"""What becomes of each JSON schema keyword in the hands of each backend, left to itself.

LLGuidance refuses what it does not know, and is asked (`trial`). XGrammar drops much without a
word: it looks at the first of ``$ref``, ``const``, ``enum``, ``anyOf``, ``oneOf``, ``allOf`` and
``type`` that a schema has and takes only the keywords that belong to it. Hence the knowledge here.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from graft.grammar.schema.terms import (
    Reason,
    kinds_of,
    meet,
    required_of,
    subschemas,
    values_of,
    word_set,
)
from graft.grammar.validate import search_pattern

__all__ = ["BACKENDS", "KEYWORDS", "available_backends", "ignored_keywords"]

#: Backends in order of preference: LLGuidance compiles in a millisecond and refuses what it does
#: not know; XGrammar precompiles masks, which string and array bounds can make very slow.
BACKENDS = ("llguidance", "xgrammar")


_BY_TREATMENT = (
    (
        "exact",
        "exact",
        """type enum const properties required additionalProperties items minItems
     maxItems minimum maximum exclusiveMinimum exclusiveMaximum anyOf $ref""",
    ),
    # XGrammar's lengths admit control characters in JSON as they are, its patterns quotes too.
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
#: What LLGuidance and XGrammar by themselves do with a keyword; the router may rewrite it all the
#: same. ``loose``: violations may get through without a word; ``dropped``: they do.
KEYWORDS: dict[str, list[str]] = {
    keyword: by for *by, keywords in _BY_TREATMENT for keyword in keywords.split()
}
_DROPPED = frozenset(keyword for keyword, by in KEYWORDS.items() if by[1] == "dropped")
_NO_MEANING_ALONE = word_set("format contentEncoding contentMediaType minContains maxContains")
_ASSERTIONS = KEYWORDS.keys() - _DROPPED - _NO_MEANING_ALONE - word_set("then else uniqueItems")
_DISPATCH = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_MAKES = {
    "object": word_set("properties additionalProperties unevaluatedProperties"),
    "array": word_set("items prefixItems unevaluatedItems"),
}
_OLD_DRAFT = re.compile(r"draft-0[3467]")


def available_backends() -> tuple[str, ...]:
    """Backends that are installed, in order of preference."""
    return tuple(name for name in BACKENDS if importlib.util.find_spec(name))


def ignored_keywords(schema: Any) -> list[Reason]:
    """Keywords that XGrammar would drop without a word, as far as is known."""
    old = isinstance(schema, dict) and bool(_OLD_DRAFT.search(str(schema.get("$schema", ""))))
    dropped: list[str] = []
    found = []
    for pointer, part in subschemas(schema):
        if pointer.startswith(tuple(dropped)):
            continue
        dropped += [f"{pointer}/{keyword}" for keyword in _DROPPED & part.keys()]
        found += [
            Reason(pointer, what.split(" ")[0], f"XGrammar ignores {what}")
            for what in _ignored_keywords(part, old)
        ]
    return found


def _ignored_keywords(schema: dict[str, Any], old_draft: bool) -> Iterator[str]:
    yield from sorted(_DROPPED & schema.keys())
    if schema.get("uniqueItems") is True:
        yield "uniqueItems"
    if {"pattern", "format"} <= schema.keys():
        yield "pattern beside format"
    beside = _ASSERTIONS & schema.keys()
    chosen = next((keyword for keyword in _DISPATCH if keyword in schema), None)
    if chosen is not None:
        # Before draft 2019-09 the standard itself ignores what stands beside $ref.
        if not (chosen == "$ref" and old_draft):
            for keyword in sorted(beside - {chosen}):
                if not (keyword == "type" and _same_type(schema, chosen)):
                    yield f"{keyword} beside {chosen}"
        return
    kinds = {kind for kind, keywords in _MAKES.items() if keywords & schema.keys()}
    if "type" not in schema and not kinds:
        yield from (f"{keyword} without type" for keyword in sorted(beside))
    elif "object" in (kinds_of(schema) if "type" in schema else kinds):
        yield from _ignored_of_object(schema)


def _same_type(schema: dict[str, Any], chosen: str) -> bool:
    """Whether ``type`` says nothing that the chosen keyword does not say already."""
    kinds = kinds_of({"type": schema["type"]})
    if chosen in ("const", "enum"):
        return all(_is_a(value, kinds) for value in values_of(schema) or ())
    return chosen != "$ref" and all(
        isinstance(part, dict) and "type" in part and kinds_of(part) <= kinds
        for part in schema[chosen]
    )


def _is_a(value: Any, kinds: frozenset[str]) -> bool:
    own = kinds_of({"const": value})
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return bool(meet(own, kinds)) and (whole or "integer" not in kinds or own != {"number"})


def _ignored_of_object(schema: dict[str, Any]) -> Iterator[str]:
    names = set(schema.get("properties", ()))
    missing = sorted(set(required_of(schema)) - names)
    if missing:
        yield f"required {missing[0]!r}, which is not in properties"
    if names and "propertyNames" in schema:
        yield "propertyNames beside properties"
    for pattern in schema.get("patternProperties", ()):
        try:
            matched = sorted(name for name in names if search_pattern(pattern, name))
        except re.error:
            matched = sorted(names)
        if matched:
            yield f"patternProperties {pattern!r} for the property {matched[0]!r}"
    if "unevaluatedProperties" in schema and "additionalProperties" not in schema:
        yield "unevaluatedProperties"
