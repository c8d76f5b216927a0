"""A schema in its draft's own terms, without what says nothing: the form that is rewritten.

What the draft ignores goes, as do definitions that nothing refers to and keywords without effect;
named and dynamic references become pointers, and what "unevaluated" covers is spelled out where
the schema alone tells.
"""

from __future__ import annotations

import json
import re
from typing import Any

from graft.grammar.schema.terms import MAPS, Cannot, References, steps_of, subschemas, word_set

__all__ = ["normal"]

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
_BESIDE_REF = word_set("$schema $defs definitions title description $comment")
_DATA = word_set("enum const default examples example")
_HOMES = ("$defs", "definitions")
_IN_PLACE = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas")


def normal(root: dict[str, Any], draft: int) -> dict[str, Any]:
    """A copy of the whole schema."""
    root = _in_force(root, draft, names=False)
    if not References(root).nested:
        _point(root)
    references = References(root)
    for _, part in subschemas(root):
        if part.get("minContains") == 0 and "maxContains" not in part:  # asks for nothing
            part.pop("contains", None)
        if "contains" not in part:
            part.pop("minContains", None)
            part.pop("maxContains", None)
        for keyword, spell in _UNEVALUATED.items():
            if keyword in part:
                try:
                    spell(part, part[keyword], references)
                except Cannot:
                    continue  # the rewriter names it
                del part[keyword]
    _prune(root, references)
    return root


def _in_force(part: Any, draft: int, names: bool) -> Any:
    """A copy without newer keywords, and what stands beside ``$ref`` in old drafts."""
    if isinstance(part, list):
        return [_in_force(p, draft, False) for p in part]
    if not isinstance(part, dict):
        return part
    alone = not names and draft <= 7 and isinstance(part.get("$ref"), str)
    kept = {}
    for key, value in part.items():
        if not names and (
            draft < _SINCE.get(key, 0) or (alone and key != "$ref" and key not in _BESIDE_REF)
        ):
            continue
        data = not names and key in _DATA
        maps = not names and key in MAPS
        kept[key] = value if data else _in_force(value, draft, maps)
    return kept


def _point(root: dict[str, Any]) -> None:
    """Turns references by name, and dynamic ones with one target, into pointers."""
    places: dict[str, list[str]] = {}
    for pointer, part in subschemas(root):
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(part.get(keyword), str):
                places.setdefault(part[keyword], []).append(pointer)
        name = part.get("$id", part.get("id"))  # up to draft 7
        if isinstance(name, str) and re.fullmatch(r"#[A-Za-z][^/]*", name):
            places.setdefault(name[1:], []).append(pointer)
    for _, part in subschemas(root):
        part.pop("$dynamicAnchor", None)
        part.pop("$recursiveAnchor", None)
        for keyword in ("$dynamicRef", "$recursiveRef", "$ref"):
            target = part.get(keyword, "")
            found = places.get(target[1:], []) if target[:1] == "#" else []
            if keyword != "$ref" and (target == "#" or target[:2] == "#/"):
                found = [target]
            if len(found) == 1 and (keyword == "$ref" or "$ref" not in part):
                del part[keyword]
                part["$ref"] = found[0]


def _properties(part: dict[str, Any], rest: Any, references: References) -> None:
    found = _evaluated(part, references, ("unevaluatedProperties",), [])
    if found is None or rest is True or rest == {}:
        return
    for keyword, names in zip(("properties", "patternProperties"), found, strict=True):
        if names:
            part[keyword] = {**names, **part.get(keyword, {})}
    part["additionalProperties"] = rest


def _evaluated(
    part: Any, references: References, but: tuple[str, ...], above: list[Any]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Names and patterns that a schema looks at, whatever the value; None: all."""
    if not isinstance(part, dict) or any(part is one for one in above):
        return {}, {}
    if (part.keys() - but) & {"additionalProperties", "unevaluatedProperties"}:
        return None
    names = dict.fromkeys(part.get("properties", ()), True)
    patterns = dict.fromkeys(part.get("patternProperties", ()), True)
    inner = list(part.get("allOf", ()))
    if "$ref" in part:
        inner.append(references.resolve(part["$ref"]))
    for one in inner:
        found = _evaluated(one, references, (), [*above, part])
        if found is None:
            return None
        names = names | found[0]
        patterns = patterns | found[1]
    for keyword in _IN_PLACE:
        value = part.get(keyword, [])
        if not isinstance(value, list):
            value = value.values() if keyword == "dependentSchemas" else [value]
        for one in value:
            found = _evaluated(one, references, (), [*above, part])
            if found is None or found[0].keys() - names or found[1].keys() - patterns:
                raise Cannot("unevaluatedProperties", "depends on the value")
    if part.keys() & {"$dynamicRef", "$recursiveRef"}:
        raise Cannot("unevaluatedProperties", "depends on the value")
    return names, patterns


def _items(part: dict[str, Any], rest: Any, references: References) -> None:
    if rest is True or rest == {}:
        return
    if part.keys() & {"allOf", "$ref", "$dynamicRef", "$recursiveRef", "contains", *_IN_PLACE}:
        raise Cannot("unevaluatedItems", "depends on the value")
    if isinstance(part.get("items"), list):
        part.setdefault("additionalItems", rest)
    else:
        part.setdefault("items", rest)


_UNEVALUATED = {"unevaluatedProperties": _properties, "unevaluatedItems": _items}


def _prune(root: dict[str, Any], references: References) -> None:
    """Drops definitions that nothing refers to; all stay where a reference is no plain pointer."""
    pending: list[Any] = [{k: v for k, v in root.items() if k not in _HOMES}]
    used: set[tuple[str, str]] = set()
    while pending:
        for target in re.findall(
            r'"\$(?:ref|dynamicRef|recursiveRef)": "((?:[^"\\]|\\.)*)"', json.dumps(pending.pop())
        ):
            pointer = references.pointer(json.loads(f'"{target}"'))
            if pointer is None:
                return
            home, name = [*steps_of(pointer)[:2], "", ""][:2]
            if home in _HOMES and (home, name) not in used:
                used.add((home, name))
                pending.append(root.get(home, {}).get(name))
    for home in _HOMES:
        if home in root:
            root[home] = {k: v for k, v in root[home].items() if (home, k) in used}
            if not root[home]:
                del root[home]
