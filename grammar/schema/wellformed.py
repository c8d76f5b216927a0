"""Whether a document is a JSON schema at all, and one of something, whoever compiles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graft.grammar.errors import GrammarError
from graft.grammar.schema.terms import Cannot, References, required_of, subschemas, word_set

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
    (
        "a number or, in draft 4, a boolean",
        lambda v: _number(v) or isinstance(v, bool),
        "exclusiveMinimum exclusiveMaximum",
    ),
    ("a number above 0", lambda v: _number(v) and v > 0, "multipleOf divisibleBy"),
    (
        "a whole number, not negative",
        _count,
        """minLength maxLength minItems maxItems
     minProperties maxProperties minContains maxContains""",
    ),
    (
        "a string",
        lambda v: isinstance(v, str),
        "pattern format $ref $dynamicRef $recursiveRef contentEncoding contentMediaType",
    ),
    ("a boolean", lambda v: isinstance(v, bool), "uniqueItems"),
    ("a type of JSON or a list of them", _types, "type"),
    ("a list of names", lambda v: _names(v) or isinstance(v, bool), "required"),  # draft 3
    ("a list", lambda v: isinstance(v, list), "enum"),
    (
        "a schema",
        _schema,
        """additionalProperties additionalItems propertyNames contains not if
     then else unevaluatedItems unevaluatedProperties""",
    ),
    ("a schema or a list of schemas", lambda v: _schema(v) or v == [] or _schemas(v), "items"),
    ("a list of schemas", _schemas, "allOf anyOf oneOf prefixItems"),
    (
        "a map of schemas",
        _map_of(_schema),
        "properties patternProperties $defs definitions dependentSchemas",
    ),
    ("a map of names", _map_of(_names), "dependentRequired"),
    (
        "a map of names or schemas",
        _map_of(lambda v: _names(v) or _schema(v) or isinstance(v, str)),
        "dependencies",
    ),
)
_FORM = {word: (said, form) for said, form, words in _FORMS for word in words.split()}


def check_schema(schema: Any) -> None:
    """Refuses what is no schema, and what is one of nothing, by JSON pointer and keyword."""
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
    references = References(schema)
    parts = subschemas(schema)
    known = {id(part) for _, part in parts}
    for pointer, part in parts:  # it grows: references may lead to where no keyword does
        for keyword in _FORM.keys() & part.keys():
            said, form = _FORM[keyword]
            if not form(part[keyword]):
                value = str(part[keyword])[:40]
                raise GrammarError(
                    f"JSON schema: {pointer}: {keyword}: must be {said}, not {value!r}"
                )
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            reference: Any = part.get(keyword)
            if references.pointer(reference) is None:
                continue
            try:
                target = references.resolve(reference)
            except Cannot as error:
                raise GrammarError(f"JSON schema: {pointer}: {error}") from None
            if not _schema(target):
                raise GrammarError(
                    f"JSON schema: {pointer}: {keyword}: {str(target)[:40]!r} is no schema"
                )
            if id(target) not in known:
                more = [one for one in subschemas(target, reference) if id(one[1]) not in known]
                known.update(id(found) for _, found in more)
                parts += more
    if _is_endless(schema, [part for _, part in parts], references):
        raise GrammarError(
            "JSON schema: allows no output: a $ref leads back to itself in all that fits"
        )


def _is_endless(schema: Any, parts: list[dict[str, Any]], references: References) -> bool:
    """Whether no finite value satisfies a schema, because of references within it.

    The least fixed point: a subschema has a finite value if what it needs (the target of its
    reference, required properties, items that must be there, every part of ``allOf``, some part of
    ``anyOf`` and ``oneOf``) has one. Whatever else it says counts as satisfied.
    """
    if not any("$ref" in part for part in parts):
        return False
    finite = {id(part): False for part in parts}

    def ends(part: Any) -> bool:
        return finite[id(part)] if isinstance(part, dict) else part is not False

    def has_end(part: dict[str, Any]) -> bool:
        if "$ref" in part:  # older drafts ignore what stands beside it
            known = references.pointer(part["$ref"]) is not None
            return not known or ends(references.resolve(part["$ref"]))
        for keyword in ("anyOf", "oneOf"):
            if keyword in part and not any(map(ends, part[keyword])):
                return False
        return all(map(ends, [*part.get("allOf", ()), *_needed(part)]))

    changed = True
    while changed:
        changed = False
        for part in reversed(parts):  # children first
            if not finite[id(part)] and has_end(part):
                finite[id(part)] = changed = True
    return isinstance(schema, dict) and not finite[id(schema)]


def _needed(part: dict[str, Any]) -> list[Any]:
    """Schemas of properties and items without which nothing fits."""
    kind = part.get("type")
    least = int(part.get("minItems", 0))
    if kind in ("object", ["object"]):
        known = part.get("properties", {})
        return [known[name] for name in required_of(part) if name in known]
    if kind in ("array", ["array"]) and least > 0:
        items = part.get("items", True)
        first = part.get("prefixItems", items if isinstance(items, list) else [])
        rest = part.get("additionalItems", True) if isinstance(items, list) else items
        return first[:least] + [rest] * (least > len(first))
    return []
