"""Normal form of a schema, which the rewriter takes as input.

Keywords that the schema's draft ignores, unused definitions and keywords without effect are
removed. Named references, and dynamic ones with a single target, become JSON pointers.
``unevaluatedProperties`` and ``unevaluatedItems`` are replaced where the schema alone determines
their scope.
"""

from __future__ import annotations

import json
import re
from typing import Any

from graft.grammar.schema.terms import (
    MAPS,
    NoExactForm,
    References,
    pointer_steps,
    subschemas,
    word_set,
)

__all__ = ["normalize"]

#: First draft of each newer keyword.
_SINCE = {
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
#: Keywords that are kept next to ``$ref`` in drafts that ignore its siblings.
_KEPT_NEXT_TO_REF = word_set("$schema $defs definitions title description $comment")
#: Keywords whose value is data, not a schema.
_DATA = word_set("enum const default examples example")
_DEFINITIONS = ("$defs", "definitions")
#: Keywords whose subschemas apply to the same value, depending on that value.
_CONDITIONAL = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas")
_DYNAMIC_REFERENCES = ("$dynamicRef", "$recursiveRef")

#: Property names and patterns, as the keys of two dicts.
Names = tuple[dict[str, Any], dict[str, Any]]


def normalize(root: dict[str, Any], draft: int) -> dict[str, Any]:
    """Return a normalized copy of a schema document.

    Parameters
    ----------
    root
        The document.
    draft
        Its draft: 3, 4, 6, 7, 2019 or 2020.
    """
    root = _without_ignored(root, draft, is_map=False)
    if not References(root).nested:
        _resolve_names(root)
    references = References(root)
    for _, part in subschemas(root):
        _remove_idle_contains(part)
        for keyword, replace_keyword in _UNEVALUATED.items():
            if keyword in part:
                try:
                    replace_keyword(part, part[keyword], references)
                except NoExactForm:
                    continue  # the rewriter reports it
                del part[keyword]
    _remove_unused_definitions(root, references)
    return root


def _remove_idle_contains(part: dict[str, Any]) -> None:
    """Remove ``contains`` that requires nothing, and its bounds where there is no ``contains``."""
    if part.get("minContains") == 0 and "maxContains" not in part:
        part.pop("contains", None)
    if "contains" not in part:
        part.pop("minContains", None)
        part.pop("maxContains", None)


def _without_ignored(part: Any, draft: int, is_map: bool) -> Any:
    """Return a copy without the keywords that the draft ignores.

    Parameters
    ----------
    part
        A schema, a list of schemas, or a map of schemas.
    draft
        Draft of the document.
    is_map
        Whether `part` is a map of schemas, whose keys are names and not keywords.
    """
    if isinstance(part, list):
        return [_without_ignored(item, draft, is_map=False) for item in part]
    if not isinstance(part, dict):
        return part
    if is_map:
        return {name: _without_ignored(value, draft, is_map=False) for name, value in part.items()}
    ref_only = draft <= 7 and isinstance(part.get("$ref"), str)
    kept = {}
    for keyword, value in part.items():
        if draft < _SINCE.get(keyword, 0):
            continue
        if ref_only and keyword != "$ref" and keyword not in _KEPT_NEXT_TO_REF:
            continue
        if keyword in _DATA:
            kept[keyword] = value
        else:
            kept[keyword] = _without_ignored(value, draft, is_map=keyword in MAPS)
    return kept


def _resolve_names(root: dict[str, Any]) -> None:
    """Replace references by name, and dynamic ones with a single target, by pointers."""
    pointers: dict[str, list[str]] = {}  # of the subschemas with a name
    for pointer, part in subschemas(root):
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(part.get(keyword), str):
                pointers.setdefault(part[keyword], []).append(pointer)
        name = part.get("$id", part.get("id"))  # names a subschema up to draft 7
        if isinstance(name, str) and re.fullmatch(r"#[A-Za-z][^/]*", name):
            pointers.setdefault(name[1:], []).append(pointer)
    for _, part in subschemas(root):
        part.pop("$dynamicAnchor", None)
        part.pop("$recursiveAnchor", None)
        for keyword in (*_DYNAMIC_REFERENCES, "$ref"):
            target = part.get(keyword, "")
            found = pointers.get(target[1:], []) if target[:1] == "#" else []
            if keyword != "$ref" and (target == "#" or target[:2] == "#/"):
                found = [target]
            if len(found) == 1 and (keyword == "$ref" or "$ref" not in part):
                del part[keyword]
                part["$ref"] = found[0]


def _replace_unevaluated_properties(
    part: dict[str, Any], rest: Any, references: References
) -> None:
    """Replace ``unevaluatedProperties: rest`` by ``additionalProperties``."""
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
    """Return the names and patterns that a schema evaluates for every value; None if all.

    Parameters
    ----------
    part
        The schema.
    references
        References of the document.
    ignored
        Keywords of `part` that are not considered.
    ancestors
        Schemas whose evaluation led here; a recursive reference adds nothing.

    Raises
    ------
    NoExactForm
        The names depend on the value.
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
    for conjunct in conjuncts:
        found = _evaluated_names(conjunct, references, (), [*ancestors, part])
        if found is None:
            return None
        names = names | found[0]
        patterns = patterns | found[1]
    for conditional in _conditional_parts(part):
        found = _evaluated_names(conditional, references, (), [*ancestors, part])
        if found is None or found[0].keys() - names or found[1].keys() - patterns:
            raise NoExactForm("unevaluatedProperties", "depends on the value")
    if part.keys() & set(_DYNAMIC_REFERENCES):
        raise NoExactForm("unevaluatedProperties", "depends on the value")
    return names, patterns


def _conditional_parts(part: dict[str, Any]) -> list[Any]:
    """Return the subschemas that apply to the same value, depending on that value."""
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


def _replace_unevaluated_items(part: dict[str, Any], rest: Any, references: References) -> None:
    """Replace ``unevaluatedItems: rest`` by ``items`` or ``additionalItems``."""
    if rest is True or rest == {}:
        return
    if part.keys() & {"allOf", "$ref", *_DYNAMIC_REFERENCES, "contains", *_CONDITIONAL}:
        raise NoExactForm("unevaluatedItems", "depends on the value")
    if isinstance(part.get("items"), list):
        part.setdefault("additionalItems", rest)
    else:
        part.setdefault("items", rest)


_UNEVALUATED = {
    "unevaluatedProperties": _replace_unevaluated_properties,
    "unevaluatedItems": _replace_unevaluated_items,
}
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)": "((?:[^"\\]|\\.)*)"')


def _remove_unused_definitions(root: dict[str, Any], references: References) -> None:
    """Remove definitions without references. Keep all if a reference is no local pointer."""
    pending: list[Any] = [{k: v for k, v in root.items() if k not in _DEFINITIONS}]
    used: set[tuple[str, str]] = set()
    while pending:
        for target in _REFERENCE.findall(json.dumps(pending.pop())):
            pointer = references.pointer(json.loads(f'"{target}"'))
            if pointer is None:
                return
            home, name = [*pointer_steps(pointer)[:2], "", ""][:2]
            if home in _DEFINITIONS and (home, name) not in used:
                used.add((home, name))
                pending.append(root.get(home, {}).get(name))
    for home in _DEFINITIONS:
        if home in root:
            root[home] = {k: v for k, v in root[home].items() if (home, k) in used}
            if not root[home]:
                del root[home]
