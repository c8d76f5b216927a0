"""Check that a document is a JSON schema that some finite value can satisfy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from graft.grammar.errors import GrammarError
from graft.grammar.schema.documents import Parts, SchemaObject, required_of, subschemas, word_set
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.schema.references import References

__all__ = ["check_schema", "finite_values"]

_TYPES = word_set("null boolean integer number string array object any")
#: Keywords that identify a document as a schema.
_SCHEMA_KEYWORDS = word_set(
    """type properties items $ref anyOf oneOf allOf enum const not if $defs definitions format
    pattern additionalProperties patternProperties"""
)

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
#: Keywords that may exclude every finite value; see `_endless_keyword`.
_REQUIRING = word_set("$ref anyOf oneOf allOf required minItems")


class _Wrapper(NamedTuple):
    """A kind of document that contains a JSON schema but is not a JSON schema itself.

    An example is the description of a tool.

    Attributes
    ----------
    keys
        Keys that identify the kind of document.
    schema_key
        Key of the schema in the document.
    name
        Name of the kind of document, for error messages.
    """

    keys: tuple[str, ...]
    schema_key: str
    name: str


_WRAPPERS = (
    _Wrapper(("json_schema",), "json_schema", "OpenAI's response_format"),
    _Wrapper(("schema",), "schema", "OpenAI's response_format"),
    _Wrapper(("response_schema",), "response_schema", "a generation config of Gemini's"),
    _Wrapper(("responseSchema",), "responseSchema", "a generation config of Gemini's"),
    _Wrapper(("input_schema",), "input_schema", "a tool of Anthropic's"),
    _Wrapper(("function",), "function", "a tool of OpenAI's"),
    _Wrapper(("parameters", "name"), "parameters", "a function of OpenAI's"),
)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_number(value: Any) -> bool:
    # Python reads numbers such as 1e400 as infinite.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) != math.inf


def _is_number_or_boolean(value: Any) -> bool:
    return isinstance(value, bool) or _is_number(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _is_schema_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_items(value: Any) -> bool:
    return _is_schema(value) or value == [] or _is_schema_list(value)


def _is_name_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_string, value))


def _is_required(value: Any) -> bool:
    return _is_name_list(value) or isinstance(value, bool)  # a boolean in draft 3


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) and value else [value]
    return all(isinstance(name, str) and name in _TYPES for name in names)


def _is_dependency(value: Any) -> bool:
    return _is_name_list(value) or _is_schema(value) or isinstance(value, str)


def _is_map_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_map(value: Any) -> bool:
        return isinstance(value, dict) and all(map(is_valid, value.values()))

    return is_map


#: Required forms of the values of keywords. Each element is a description of the form for error
#: messages, a predicate, and the keywords whose values must have the form.
_FORMS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("a number", _is_number, "minimum maximum"),
    (
        "a number or, in draft 4, a boolean",
        _is_number_or_boolean,
        "exclusiveMinimum exclusiveMaximum",
    ),
    ("a number above 0", _is_positive, "multipleOf divisibleBy"),
    (
        "a whole number, not negative",
        _is_count,
        """minLength maxLength minItems maxItems minProperties maxProperties minContains
        maxContains""",
    ),
    (
        "a string",
        _is_string,
        "pattern format $ref $dynamicRef $recursiveRef contentEncoding contentMediaType",
    ),
    ("a boolean", _is_boolean, "uniqueItems"),
    ("a type of JSON or a list of them", _is_type, "type"),
    ("a list of names", _is_required, "required"),
    ("a list", _is_list, "enum"),
    (
        "a schema",
        _is_schema,
        """additionalProperties additionalItems propertyNames contains not if then else
        unevaluatedItems unevaluatedProperties""",
    ),
    ("a schema or a list of schemas", _is_items, "items"),
    ("a list of schemas", _is_schema_list, "allOf anyOf oneOf prefixItems"),
    (
        "a map of schemas",
        _is_map_of(_is_schema),
        "properties patternProperties $defs definitions dependentSchemas",
    ),
    ("a map of names", _is_map_of(_is_name_list), "dependentRequired"),
    ("a map of names or schemas", _is_map_of(_is_dependency), "dependencies"),
)
_FORM_OF_KEYWORD = {
    keyword: (description, is_valid)
    for description, is_valid, keywords in _FORMS
    for keyword in keywords.split()
}


def check_schema(schema: Any) -> Parts:
    """Check that a parsed document is a JSON schema that a finite value can satisfy.

    Return all subschemas of the document.

    Raise `GrammarError` if a keyword has an invalid value, if a reference has no target, or if
    references make the schema unsatisfiable. The message contains the JSON pointer and the keyword.
    """
    if not _is_schema(schema):
        raise GrammarError(
            f"JSON schema: must be an object or a boolean, not {type(schema).__name__}"
        )
    if schema is False:
        raise GrammarError("JSON schema: the schema false allows no output")
    _check_wrapper(schema)
    references = References(schema)
    parts = subschemas(schema)
    known = {id(part) for _, part in parts}
    # A reference may refer to a subschema that is not the value of a known keyword. Such subschemas
    # are appended to `reached` during the loop, so that they are checked too.
    reached = [*parts]
    for pointer, part in reached:
        _check_keywords(pointer, part)
        for keyword in _REFERENCES:
            reference: Any = part.get(keyword)
            if reference is None or references.pointer(reference) is None:
                continue
            target = _resolve(references, pointer, keyword, reference)
            if id(target) in known:
                continue
            for new_pointer, new_part in subschemas(target, reference):
                if id(new_part) not in known:
                    known.add(id(new_part))
                    reached.append((new_pointer, new_part))
    if isinstance(schema, dict) and any("$ref" in part for _, part in reached):
        _check_finite(schema, reached, references)
    return parts


def _check_wrapper(schema: Any) -> None:
    """Raise `GrammarError` for a document that contains a schema but is not one itself.

    `_WRAPPERS` lists the kinds of such documents.
    """
    if not isinstance(schema, dict) or _SCHEMA_KEYWORDS & (schema.keys() - {"type"}):
        return
    for wrapper in _WRAPPERS:
        holds_schema = isinstance(schema.get(wrapper.schema_key), dict)
        if holds_schema and all(key in schema for key in wrapper.keys):
            raise GrammarError(
                f"JSON schema: this is {wrapper.name}; pass the value of its key "
                f"{wrapper.schema_key!r}"
            )


def _check_keywords(pointer: str, part: SchemaObject) -> None:
    """Raise `GrammarError` if a keyword of a subschema has an invalid value."""
    for keyword in _FORM_OF_KEYWORD.keys() & part.keys():
        description, is_valid = _FORM_OF_KEYWORD[keyword]
        if not is_valid(part[keyword]):
            value = str(part[keyword])[:40]
            raise GrammarError(
                f"JSON schema: {pointer}: {keyword}: must be {description}, not {value!r}"
            )


def _resolve(references: References, pointer: str, keyword: str, reference: Any) -> Any:
    """Return the target of a local reference; raise `GrammarError` if it is not a schema.

    The error message names `pointer` and `keyword`, the place of the reference.
    """
    try:
        target = references.resolve(reference)
    except NoExactForm as error:
        raise GrammarError(f"JSON schema: {pointer}: {error}") from None
    if not _is_schema(target):
        raise GrammarError(
            f"JSON schema: {pointer}: {keyword}: {str(target)[:40]!r} is not a schema"
        )
    return target


def finite_values(parts: Parts, references: References) -> Callable[[Any], bool]:
    """Return a predicate: whether a given schema of a document allows any finite value.

    `parts` are all subschemas of the document; parents precede children. The function computes a
    least fixed point over them. A subschema has a finite value if everything that it requires has a
    finite value: the target of its reference, the required properties and items, every part of
    ``allOf``, and at least one part of ``anyOf`` and of ``oneOf``. All other keywords are assumed
    to be satisfied.
    """
    finite = {id(part): False for _, part in parts}

    def is_finite(part: Any) -> bool:
        return finite.get(id(part), True) if isinstance(part, dict) else part is not False

    changed = True
    while changed:
        changed = False
        for _, part in reversed(parts):  # children first
            if finite[id(part)]:
                continue
            if _REQUIRING.isdisjoint(part) or _endless_keyword(part, is_finite, references) is None:
                finite[id(part)] = True
                changed = True
    return is_finite


def _check_finite(schema: SchemaObject, parts: Parts, references: References) -> None:
    """Raise `GrammarError` if recursive references exclude every finite value."""
    is_finite = finite_values(parts, references)
    pointers = {id(part): pointer for pointer, part in parts}
    visited: set[int] = set()
    endless: Any = schema
    while not is_finite(endless):
        found = _endless_keyword(endless, is_finite, references)
        assert found is not None
        keyword, inner = found
        at = f"JSON schema: {pointers[id(endless)]}: {keyword}: allows no output"
        if not isinstance(inner, dict):
            raise GrammarError(f"{at}, because it requires a value of the schema false")
        if keyword == "$ref" and id(endless) in visited:
            raise GrammarError(f"{at}, because the reference leads back to itself in every value")
        visited.add(id(endless))
        endless = inner


def _endless_keyword(
    part: SchemaObject, is_finite: Callable[[Any], bool], references: References
) -> tuple[str, Any] | None:
    """Return a keyword of `part` that no finite value satisfies, and the subschema responsible.

    The subschema is part of the keyword's value, or the target of the reference. Return None if a
    finite value satisfies `part`. `is_finite` returns whether a finite value satisfies the schema
    that it gets.
    """
    if "$ref" in part:  # older drafts ignore the keywords next to $ref
        reference = part["$ref"]
        if references.pointer(reference) is None:
            return None  # a reference to another document
        target = references.resolve(reference)
        return None if is_finite(target) else ("$ref", target)
    for keyword in ("anyOf", "oneOf"):
        if keyword in part and not any(map(is_finite, part[keyword])):
            return keyword, next(iter(part[keyword]), False)
    conjunctions = {"allOf": part.get("allOf", []), **_required_parts(part)}
    for keyword, conjuncts in conjunctions.items():
        for conjunct in conjuncts:
            if not is_finite(conjunct):
                return keyword, conjunct
    return None


def _required_parts(part: SchemaObject) -> dict[str, list[Any]]:
    """Return the schemas of required properties and items, by the keyword that requires them."""
    json_type = part.get("type")
    min_items = int(part.get("minItems", 0))
    if json_type in ("object", ["object"]):
        properties = part.get("properties", {})
        names = [name for name in required_of(part) if name in properties]
        return {"required": [properties[name] for name in names]}
    if json_type in ("array", ["array"]) and min_items > 0:
        items = part.get("items", True)
        prefix = part.get("prefixItems", items if isinstance(items, list) else [])
        rest = part.get("additionalItems", True) if isinstance(items, list) else items
        required = prefix[:min_items]
        if min_items > len(prefix):
            required = [*required, rest]
        return {"minItems": required}
    return {}
