"""Schemas that only endless values would satisfy: references that lead back to themselves."""

from __future__ import annotations

from typing import Any

from .terms import Cannot, followed, subschemas

__all__ = ["is_endless"]


def is_endless(schema: Any) -> bool:
    """Whether no finite value satisfies a schema, because of references within it.

    The least fixed point: a subschema has a finite value if what it needs (the target of its
    reference, required properties, items that must be there, every part of ``allOf``, some part of
    ``anyOf`` and ``oneOf``) has one. Whatever else it says counts as satisfied.
    """
    if not isinstance(schema, dict):
        return False
    parts = [part for _, part in subschemas(schema)]
    if not any("$ref" in part for part in parts):
        return False
    finite = {id(part): False for part in parts}
    for part in parts:  # it grows: references may lead to where no keyword does
        target = _target(schema, part.get("$ref"))
        if isinstance(target, dict) and id(target) not in finite:
            more = [found for _, found in subschemas(target) if id(found) not in finite]
            finite |= {id(found): False for found in more}
            parts += more
    changed = True
    while changed:
        changed = False
        for part in reversed(parts):  # children first
            if not finite[id(part)] and _has_end(part, schema, finite):
                finite[id(part)] = changed = True
    return not finite[id(schema)]


def _has_end(part: dict[str, Any], schema: Any, finite: dict[int, bool]) -> bool:
    def ends(child: Any) -> bool:
        return finite.get(id(child), True) if isinstance(child, dict) else child is not False

    if "$ref" in part:  # older drafts ignore what stands beside it
        return ends(_target(schema, part["$ref"]))
    for keyword in ("anyOf", "oneOf"):
        options = part.get(keyword)
        if isinstance(options, list) and options and not any(map(ends, options)):
            return False
    conjuncts = part.get("allOf")
    if isinstance(conjuncts, list) and not all(map(ends, conjuncts)):
        return False
    return all(map(ends, _needed(part)))


def _needed(part: dict[str, Any]) -> list[Any]:
    """Schemas of properties and items without which nothing fits."""
    kind = part.get("type")
    if kind in ("object", ["object"]) and isinstance(part.get("required"), list):
        properties = part.get("properties")
        known = properties if isinstance(properties, dict) else {}
        return [known[name] for name in part["required"] if isinstance(name, str) and name in known]
    least = part.get("minItems")
    if kind in ("array", ["array"]) and isinstance(least, int) and least > 0:
        items = part.get("items", True)
        first = part.get("prefixItems", items if isinstance(items, list) else [])
        if isinstance(first, list):
            rest = part.get("additionalItems", True) if isinstance(items, list) else items
            return first[:least] + ([rest] if least > len(first) else [])
    return []


def _target(schema: Any, reference: Any) -> Any:
    """What a reference within the schema points to; True where that is not known."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return True
    try:
        return followed(schema, reference[1:])
    except Cannot:
        return True
