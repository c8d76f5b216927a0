"""Normalization of a schema before it is rewritten.

Keywords that the schema's draft ignores, unused definitions and keywords without effect are
removed. References by name, and dynamic references with a single target, are replaced with JSON
pointers. ``unevaluatedProperties`` and ``unevaluatedItems`` are replaced with other keywords if the
schema alone, independently of the value, determines the properties or items that they apply to.
"""

from __future__ import annotations

import re
from typing import Any

from graft.grammar.schema.documents import (
    DATA,
    MAPS,
    SchemaObject,
    any_of,
    subschemas,
    texts_of_keys,
    word_set,
)
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.schema.references import References, pointer_steps, replace_references

__all__ = ["normalize"]

#: First JSON schema draft that defines each of the newer keywords.
_SINCE = {
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "then": 7,
    "else": 7,
    "dependentRequired": 2019,
    "dependentSchemas": 2019,
    "unevaluatedProperties": 2019,
    "unevaluatedItems": 2019,
    "minContains": 2019,
    "maxContains": 2019,
    "$recursiveRef": 2019,
    "prefixItems": 2020,
    "$dynamicRef": 2020,
}
#: Keywords that are kept next to ``$ref`` although old drafts ignore all keywords there.
_KEPT_NEXT_TO_REF = word_set("$schema $defs definitions title description $comment")
_DEFINITIONS = ("$defs", "definitions")
_IDENTIFIERS = ("$id", "id")
#: Keywords whose subschemas apply to the same value as the schema that contains the keyword, but
#: only if the value meets a condition.
_CONDITIONAL = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas")
_DYNAMIC_REFERENCES = ("$dynamicRef", "$recursiveRef")

#: Property names, and property patterns. Each dict is used as an ordered set of its keys.
Names = tuple[dict[str, Any], dict[str, Any]]


def normalize(
    root: SchemaObject, draft: int, impossible: frozenset[str] = frozenset()
) -> SchemaObject | bool:
    """Return a normalized copy of a schema document; False if the document becomes ``false``.

    References to the subschemas at the JSON pointers `impossible`, which no value satisfies, are
    replaced with ``false``.
    """
    # An identifier of the document is kept even if its keyword belongs to another draft.
    identifiers = {keyword: root[keyword] for keyword in _IDENTIFIERS if keyword in root}
    root = {**_without_ignored(root, draft, is_map=False), **identifiers}
    references = References(root)
    parts = subschemas(root)
    if not references.nested:
        _resolve_names(parts)
    if impossible:
        root = replace_references(root, impossible, references, False)
        if not isinstance(root, dict):
            return root
        references = References(root)
        parts = subschemas(root)
    for _, part in parts:
        for keyword, replace_keyword in _UNEVALUATED.items():
            if keyword in part:
                try:
                    replace_keyword(part, part[keyword], references, draft)
                except NoExactForm:
                    continue  # the rewriter reports the keyword
                del part[keyword]
        _remove_idle_contains(part)
    _remove_unused_definitions(root, references)
    return root


def _remove_idle_contains(part: SchemaObject) -> None:
    """Remove ``contains`` and its bounds, ``minContains`` and ``maxContains``, if without effect.

    The bounds have no effect in a schema without ``contains``.
    """
    if part.get("minContains") == 0 and "maxContains" not in part:
        part.pop("contains", None)
    if "contains" not in part:
        part.pop("minContains", None)
        part.pop("maxContains", None)


def _without_ignored(part: Any, draft: int, is_map: bool) -> Any:
    """Return a copy of a part of the document without the keywords that the draft ignores.

    The part is a schema, a list of schemas or, with `is_map`, a map of schemas, whose keys are
    names and not keywords.
    """
    if isinstance(part, list):
        return [_without_ignored(item, draft, is_map=False) for item in part]
    if not isinstance(part, dict):
        return part
    if is_map:
        return {name: _without_ignored(value, draft, is_map=False) for name, value in part.items()}
    ignored_identifier = "id" if draft >= 6 else "$id"
    ref_only = draft <= 7 and isinstance(part.get("$ref"), str)
    kept = {}
    for keyword, value in part.items():
        if draft < _SINCE.get(keyword, 0):
            continue
        if keyword == ignored_identifier and isinstance(value, str):
            continue
        if ref_only and keyword != "$ref" and keyword not in _KEPT_NEXT_TO_REF:
            continue
        if keyword in DATA:
            kept[keyword] = value
        else:
            kept[keyword] = _without_ignored(value, draft, is_map=keyword in MAPS)
    return kept


def _resolve_names(parts: list[tuple[str, SchemaObject]]) -> None:
    """Convert references by name, and dynamic references with a single target, to JSON pointers.

    `parts` are all subschemas of the document. They are modified in place.
    """
    pointers = _pointers_by_name(parts)
    for _, part in parts:
        part.pop("$dynamicAnchor", None)
        part.pop("$recursiveAnchor", None)
        for keyword in (*_DYNAMIC_REFERENCES, "$ref"):
            target = part.get(keyword, "")
            found = []
            if keyword != "$ref" and (target == "#" or target.startswith("#/")):
                found = [target]
            elif target.startswith("#"):
                found = pointers.get(target[1:], [])
            if len(found) == 1 and (keyword == "$ref" or "$ref" not in part):
                del part[keyword]
                part["$ref"] = found[0]


def _pointers_by_name(parts: list[tuple[str, SchemaObject]]) -> dict[str, list[str]]:
    """Return the JSON pointers of the subschemas with an anchor, by the name of the anchor."""
    pointers: dict[str, list[str]] = {}
    for pointer, part in parts:
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(part.get(keyword), str):
                pointers.setdefault(part[keyword], []).append(pointer)
        identifier = part.get("$id", part.get("id"))  # up to draft 7, "#name" names a subschema
        if isinstance(identifier, str) and re.fullmatch(r"#[A-Za-z][^/]*", identifier):
            pointers.setdefault(identifier[1:], []).append(pointer)
    return pointers


def _replace_unevaluated_properties(
    part: SchemaObject, rest: Any, references: References, draft: int
) -> None:
    """Add keywords to `part` that are equivalent to ``unevaluatedProperties: rest``.

    They are ``additionalProperties: rest`` and the names and patterns that other keywords of `part`
    evaluate. The caller then removes ``unevaluatedProperties``.
    """
    found = _evaluated_names(part, references, ("unevaluatedProperties",), [])
    if found is None or rest is True or rest == {}:
        return
    for keyword, names in zip(("properties", "patternProperties"), found, strict=True):
        if names:
            part[keyword] = {**names, **part.get(keyword, {})}
    part["additionalProperties"] = rest


def _evaluated_names(
    part: Any, references: References, ignored: tuple[str, ...], ancestors: list[Any]
) -> Names | None:
    """Return the property names and patterns that a schema evaluates; None for all properties.

    In JSON schema, a property is evaluated if a keyword such as ``properties`` applies to it.
    Keywords of `part` that are listed in `ignored` are skipped. `ancestors` are the schemas that
    contain or refer to `part`: a reference to one of them is recursive and adds no names. Raise
    `NoExactForm` if the names depend on the value.
    """
    if not isinstance(part, dict) or any(part is one for one in ancestors):
        return {}, {}
    if (part.keys() - ignored) & {"additionalProperties", "unevaluatedProperties"}:
        return None
    names = dict.fromkeys(part.get("properties", ()), True)
    patterns = dict.fromkeys(part.get("patternProperties", ()), True)
    conjuncts = list(part.get("allOf", ()))
    if "$ref" in part:
        conjuncts.append(references.resolve(part["$ref"]))
    path = [*ancestors, part]
    for conjunct in conjuncts:
        found = _evaluated_names(conjunct, references, (), path)
        if found is None:
            return None
        more_names, more_patterns = found
        names |= more_names
        patterns |= more_patterns
    for conditional in _conditional_parts(part):
        found = _evaluated_names(conditional, references, (), path)
        if found is None:
            raise NoExactForm("unevaluatedProperties", "depends on the value")
        more_names, more_patterns = found
        if more_names.keys() - names or more_patterns.keys() - patterns:
            raise NoExactForm("unevaluatedProperties", "depends on the value")
    if part.keys() & set(_DYNAMIC_REFERENCES):
        raise NoExactForm("unevaluatedProperties", "depends on the value")
    return names, patterns


def _conditional_parts(part: SchemaObject) -> list[Any]:
    """Return the subschemas, such as those of ``anyOf``, that apply only to some values."""
    parts: list[Any] = []
    for keyword in _CONDITIONAL:
        value = part.get(keyword, [])
        if isinstance(value, list):
            parts += value
        elif keyword == "dependentSchemas":
            parts += value.values()
        else:
            parts.append(value)
    return parts


def _replace_unevaluated_items(
    part: SchemaObject, rest: Any, references: References, draft: int
) -> None:
    """Add ``items`` or ``additionalItems`` to `part`, equivalent to ``unevaluatedItems: rest``.

    The caller then removes ``unevaluatedItems``.
    """
    if rest is True or rest == {}:
        return
    if "contains" in part:
        if draft < 2020:
            raise NoExactForm("unevaluatedItems", "validators disagree on contains before 2020-12")
        rest = any_of([part["contains"], rest])  # an item that satisfies contains is evaluated
    if part.keys() & {"allOf", "$ref", *_DYNAMIC_REFERENCES, *_CONDITIONAL}:
        raise NoExactForm("unevaluatedItems", "depends on the value")
    if isinstance(part.get("items"), list):
        part.setdefault("additionalItems", rest)
    else:
        part.setdefault("items", rest)


_UNEVALUATED = {
    "unevaluatedProperties": _replace_unevaluated_properties,
    "unevaluatedItems": _replace_unevaluated_items,
}


def _remove_unused_definitions(root: SchemaObject, references: References) -> None:
    """Remove the definitions that no reference refers to, directly or indirectly.

    If a reference is not a local pointer, all definitions are kept.
    """
    pending: list[Any] = [{key: value for key, value in root.items() if key not in _DEFINITIONS}]
    used: set[tuple[str, str]] = set()
    while pending:
        for target in texts_of_keys(pending.pop(), ("$ref", *_DYNAMIC_REFERENCES)):
            pointer = references.pointer(target)
            if pointer is None:
                return
            home, name = [*pointer_steps(pointer)[:2], "", ""][:2]
            if home in _DEFINITIONS and (home, name) not in used:
                used.add((home, name))
                pending.append(root.get(home, {}).get(name))
    for home in _DEFINITIONS:
        if home not in root:
            continue
        kept = {name: part for name, part in root[home].items() if (home, name) in used}
        if kept:
            root[home] = kept
        else:
            del root[home]
