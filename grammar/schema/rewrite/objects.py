"""Equivalent forms of what JSON schema says about whole objects and arrays."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from graft.grammar.schema.terms import Cannot, required_of, word_set
from graft.grammar.validate import search_pattern

__all__ = ["contains", "dependencies", "distinct", "property_count", "property_names"]

_CHOICES = 64  # alternatives a rewrite may introduce
_SAYS_NOTHING = word_set("type title description $comment examples default")


def dependencies(value: Any, required: list[str]) -> list[Any]:
    """Conjuncts that say the same as ``dependencies`` (or its two successors).

    For a property that must be there, the dependency itself; else "the property is absent, or it is
    there and so is what it needs". Properties that need each other share one such choice.
    """
    always = set(required)
    groups: dict[frozenset[str], tuple[list[str], list[str]]] = {}
    parts: list[Any] = []
    for name, wanted in value.items():
        if isinstance(wanted, str):  # draft 3
            wanted = [wanted]
        if isinstance(wanted, list):
            group = list(dict.fromkeys((*wanted, name)))  # what is needed comes first
            groups.setdefault(frozenset(group), (group, []))[1].append(name)
        elif name in always:
            parts.append(wanted)
        elif wanted is not True and wanted != {}:
            there = {"required": [name]}
            absent = {"properties": {name: False}}
            parts.append({"anyOf": [absent, {"allOf": [there, wanted]}]})
    for group, owners in groups.values():
        if len(group) == 1:
            continue
        together = {"required": group}
        if always & set(owners):
            parts.append(together)
        else:
            absent = {"properties": dict.fromkeys(owners, False)}
            parts.append({"anyOf": [absent, together]})
    if sum("anyOf" in part for part in parts if isinstance(part, dict)) > 7:
        raise Cannot("dependencies", f"{len(parts)} of them are too many to spell out")
    return parts


def property_names(names: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Replacements for ``properties``, ``patternProperties`` and ``additionalProperties``."""
    if names is True or names == {}:
        return {}
    kind = names.get("type", "string") if isinstance(names, dict) else "string"
    if names is False or "string" not in ([kind] if isinstance(kind, str) else kind):
        return {"maxProperties": 0}
    pattern = _name_pattern(names)
    if schema.get("patternProperties"):
        raise Cannot("propertyNames", "stands beside patternProperties")
    listed = dict(schema.get("properties", {}))
    try:
        for name in listed:
            if not search_pattern(pattern, name):
                listed[name] = False
    except re.error as error:
        raise Cannot("propertyNames", f"pattern {pattern!r}: {error}") from None
    for name in required_of(schema):
        if name not in listed and not search_pattern(pattern, name):
            listed[name] = False
    rest = schema.get("additionalProperties", True)
    made: dict[str, Any] = {"additionalProperties": False}
    if listed:
        made["properties"] = listed
    if rest is not False:
        made["patternProperties"] = {pattern: rest}
    return made


def _name_pattern(names: Any) -> str:
    """One regular expression of the names that are allowed."""
    said = {key: value for key, value in names.items() if key not in _SAYS_NOTHING}
    if set(said) == {"pattern"}:
        return said["pattern"]
    if set(said) in ({"enum"}, {"const"}):
        words = said["enum"] if "enum" in said else [said["const"]]
        texts = [re.sub(r"([^A-Za-z0-9 _-])", r"\\\1", w) for w in words if isinstance(w, str)]
        return f"^(?:{'|'.join(texts)})$"
    if set(said) <= {"minLength", "maxLength"}:
        low = said.get("minLength", 0)
        high = said.get("maxLength", "")
        return f"^[\\s\\S]{{{low},{high}}}$"
    raise Cannot("propertyNames", f"with {', '.join(sorted(said))} cannot be enforced")


def property_count(schema: dict[str, Any]) -> list[Any] | None:
    """A disjunction that says the same as ``minProperties`` and ``maxProperties``.

    None if the bounds can stay: every listed property is required, or impossible.
    """
    low = int(schema.get("minProperties", 0))
    high = schema.get("maxProperties")
    properties = schema.get("properties", {})
    required = set(required_of(schema))
    optional = [n for n, part in properties.items() if part is not False and n not in required]
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if not optional:
        return None
    if closed and high is not None and high >= len(optional) + len(required):
        high = None
    if len(required) >= low:
        low = 0
    if low == 0 and high is None:
        return []
    if closed and high is None:
        need = low - len(required)
        _check(math.comb(len(optional), need) if need <= len(optional) else 0)
        return [{"required": list(some)} for some in itertools.combinations(optional, need)]
    if low - len(required) == 1 and high is None:
        absent = dict.fromkeys(optional, False)
        some: list[Any] = [{"required": [name]} for name in optional]
        return [*some, {"properties": absent, "minProperties": low}]
    most = len(optional) if high is None else min(len(optional), int(high) - len(required))
    sizes = range(most + 1)
    _check(sum(math.comb(len(optional), size) for size in sizes))
    options = []
    for size in sizes:
        for present in itertools.combinations(optional, size):
            option: dict[str, Any] = {
                "properties": {n: False for n in optional if n not in present},
                "required": list(present),
            }
            if low:
                option["minProperties"] = low
            if high is not None:
                option["maxProperties"] = int(high)
            options.append(option)
    return options


def _check(count: int) -> None:
    if count > _CHOICES:
        raise Cannot("minProperties/maxProperties", f"more than {_CHOICES} combinations")


def distinct(schema: dict[str, Any], values: list[Any] | None) -> list[Any] | None:
    """A disjunction that says the same as ``uniqueItems``; None if nothing needs to be said.

    ``values`` are all that an item can have, None if they are not a short list.
    """
    bound = schema.get("maxItems")
    if bound is not None and bound <= 1:
        return None
    if values is None:
        raise Cannot("uniqueItems", "items that differ cannot be enforced")
    most = len(values) if bound is None else min(len(values), int(bound))
    least = int(schema.get("minItems", 0))
    count = sum(math.perm(len(values), size) for size in range(least, most + 1))
    if count > 400:
        raise Cannot("uniqueItems", f"{len(values)} values have more than 400 orders")
    return [
        {"const": list(row)}
        for size in range(least, most + 1)
        for row in itertools.permutations(values, size)
    ]


def contains(part: Any, schema: dict[str, Any], prefix: str) -> list[Any]:
    """A disjunction that says the same as ``contains``, by the places of what is to be contained.

    ``prefix`` is the keyword for first items: ``"prefixItems"`` or ``"items"``.
    """
    least = int(schema.get("minContains", 1))
    bound = schema.get("maxItems")
    if "maxContains" in schema:
        raise Cannot("contains", "with maxContains cannot be enforced")
    if part is True or part == {}:
        return [{"type": "array", "minItems": least}]
    if bound is None:
        raise Cannot("contains", "in arrays without maxItems cannot be enforced")
    count = math.comb(int(bound), least) if bound < 1000 else _CHOICES + 1
    if count > _CHOICES:
        raise Cannot("contains", f"has more than {_CHOICES} places to stand at")
    return [
        {
            "type": "array",
            "minItems": places[-1] + 1,
            prefix: [part if i in places else True for i in range(places[-1] + 1)],
        }
        for places in itertools.combinations(range(int(bound)), least)
    ]
