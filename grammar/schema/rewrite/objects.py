"""Equivalent forms of keywords that constrain whole objects and arrays."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from graft.grammar.schema.terms import NoExactForm, required_of, word_set
from graft.grammar.validate import search_pattern

__all__ = ["contains", "dependencies", "distinct", "property_count", "property_names"]

_MAX_OPTIONS = 64  # that a rewrite may introduce
_MAX_CONDITIONS = 7  # dependencies that become unions
_MAX_ORDERS = 400  # permutations of items
_ANNOTATIONS = word_set("type title description $comment examples default")


def dependencies(value: Any, required: list[str]) -> list[Any]:
    """Return schemas whose intersection is equivalent to ``dependencies``.

    Also handles its successors ``dependentRequired`` and ``dependentSchemas``. The dependency of a
    required property becomes unconditional. Any other becomes a union: the property is absent, or
    it is present and its dependency holds. Properties that depend on each other share one union.

    Parameters
    ----------
    value
        Value of the keyword.
    required
        Names of the required properties.

    Raises
    ------
    NoExactForm
        There are too many unions.
    """
    always_present = set(required)
    #: By group of names: the names in order, and the properties that depend on all of them.
    groups: dict[frozenset[str], tuple[list[str], list[str]]] = {}
    parts: list[Any] = []
    for name, dependency in value.items():
        if isinstance(dependency, str):  # draft 3
            dependency = [dependency]
        if isinstance(dependency, list):
            group = list(dict.fromkeys((*dependency, name)))
            _, owners = groups.setdefault(frozenset(group), (group, []))
            owners.append(name)
        elif name in always_present:
            parts.append(dependency)
        elif dependency is not True and dependency != {}:
            present = {"required": [name]}
            absent = {"properties": {name: False}}
            parts.append({"anyOf": [absent, {"allOf": [present, dependency]}]})
    for group, owners in groups.values():
        if len(group) == 1:
            continue
        all_present = {"required": group}
        if always_present & set(owners):
            parts.append(all_present)
        else:
            absent = {"properties": dict.fromkeys(owners, False)}
            parts.append({"anyOf": [absent, all_present]})
    conditions = sum("anyOf" in part for part in parts if isinstance(part, dict))
    if conditions > _MAX_CONDITIONS:
        raise NoExactForm("dependencies", f"{len(parts)} of them are too many to spell out")
    return parts


def property_names(names: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Return keywords that replace those of an object schema with ``propertyNames``.

    They are ``properties``, ``patternProperties`` and ``additionalProperties``, or only
    ``maxProperties: 0``.

    Parameters
    ----------
    names
        Value of ``propertyNames``.
    schema
        The object schema.

    Raises
    ------
    NoExactForm
        The names are not a regular language that graft knows, or patterns would be intersected.
    """
    if names is True or names == {}:
        return {}
    types = names.get("type", "string") if isinstance(names, dict) else "string"
    if names is False or "string" not in ([types] if isinstance(types, str) else types):
        return {"maxProperties": 0}
    pattern = _name_pattern(names)
    if schema.get("patternProperties"):
        raise NoExactForm("propertyNames", "is combined with patternProperties")
    listed = dict(schema.get("properties", {}))
    try:
        for name in listed:
            if not search_pattern(pattern, name):
                listed[name] = False
    except re.error as error:
        raise NoExactForm("propertyNames", f"pattern {pattern!r}: {error}") from None
    for name in required_of(schema):
        if name not in listed and not search_pattern(pattern, name):
            listed[name] = False
    rest = schema.get("additionalProperties", True)
    replacements: dict[str, Any] = {"additionalProperties": False}
    if listed:
        replacements["properties"] = listed
    if rest is not False:
        replacements["patternProperties"] = {pattern: rest}
    return replacements


def _name_pattern(names: Any) -> str:
    """Return a pattern of the names that satisfy the value of ``propertyNames``."""
    keywords = {key: value for key, value in names.items() if key not in _ANNOTATIONS}
    if set(keywords) == {"pattern"}:
        return keywords["pattern"]
    if set(keywords) in ({"enum"}, {"const"}):
        words = keywords["enum"] if "enum" in keywords else [keywords["const"]]
        texts = [re.sub(r"([^A-Za-z0-9 _-])", r"\\\1", w) for w in words if isinstance(w, str)]
        return f"^(?:{'|'.join(texts)})$"
    if set(keywords) <= {"minLength", "maxLength"}:
        low = keywords.get("minLength", 0)
        high = keywords.get("maxLength", "")
        return f"^[\\s\\S]{{{low},{high}}}$"
    raise NoExactForm("propertyNames", f"with {', '.join(sorted(keywords))} cannot be enforced")


def property_count(schema: dict[str, Any]) -> list[Any] | None:
    """Return schemas whose union is equivalent to ``minProperties`` and ``maxProperties``.

    Returns
    -------
    list or None
        The schemas; empty if the bounds always hold; None if the bounds can be kept, because every
        listed property is required or impossible.

    Raises
    ------
    NoExactForm
        There are too many combinations.
    """
    low = int(schema.get("minProperties", 0))
    high = schema.get("maxProperties")
    properties = schema.get("properties", {})
    required = set(required_of(schema))
    optional = [
        name for name, part in properties.items() if part is not False and name not in required
    ]
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
        missing = low - len(required)
        _check_combinations(math.comb(len(optional), missing) if missing <= len(optional) else 0)
        return [
            {"required": list(present)} for present in itertools.combinations(optional, missing)
        ]
    if low - len(required) == 1 and high is None:
        one_present: list[Any] = [{"required": [name]} for name in optional]
        all_absent = dict.fromkeys(optional, False)
        return [*one_present, {"properties": all_absent, "minProperties": low}]
    max_present = len(optional)
    if high is not None:
        max_present = min(max_present, int(high) - len(required))
    sizes = range(max_present + 1)
    _check_combinations(sum(math.comb(len(optional), size) for size in sizes))
    options = []
    for size in sizes:
        for present in itertools.combinations(optional, size):
            option: dict[str, Any] = {
                "properties": {name: False for name in optional if name not in present},
                "required": list(present),
            }
            if low:
                option["minProperties"] = low
            if high is not None:
                option["maxProperties"] = int(high)
            options.append(option)
    return options


def _check_combinations(count: int) -> None:
    if count > _MAX_OPTIONS:
        raise NoExactForm("minProperties/maxProperties", f"more than {_MAX_OPTIONS} combinations")


def distinct(schema: dict[str, Any], values: list[Any] | None) -> list[Any] | None:
    """Return schemas whose union is equivalent to ``uniqueItems: true`` for arrays.

    Parameters
    ----------
    schema
        The array schema.
    values
        All values that an item can have; None if they are not a short list.

    Returns
    -------
    list or None
        The schemas; None if the keyword has no effect.

    Raises
    ------
    NoExactForm
        The values are unknown, or have too many orders.
    """
    max_items = schema.get("maxItems")
    if max_items is not None and max_items <= 1:
        return None
    if values is None:
        raise NoExactForm("uniqueItems", "items that differ cannot be enforced")
    largest = len(values) if max_items is None else min(len(values), int(max_items))
    smallest = int(schema.get("minItems", 0))
    sizes = range(smallest, largest + 1)
    count = sum(math.perm(len(values), size) for size in sizes)
    if count > _MAX_ORDERS:
        raise NoExactForm(
            "uniqueItems", f"{len(values)} values have more than {_MAX_ORDERS} orders"
        )
    return [{"const": list(row)} for size in sizes for row in itertools.permutations(values, size)]


def contains(part: Any, schema: dict[str, Any], prefix: str) -> list[Any]:
    """Return schemas whose union is equivalent to ``contains`` for arrays.

    There is one schema for each set of positions of the contained items.

    Parameters
    ----------
    part
        Value of the keyword.
    schema
        The array schema.
    prefix
        Keyword for the first items in the draft: ``"prefixItems"`` or ``"items"``.

    Raises
    ------
    NoExactForm
        There is no ``maxItems``, there is ``maxContains``, or there are too many positions.
    """
    min_contains = int(schema.get("minContains", 1))
    max_items = schema.get("maxItems")
    if "maxContains" in schema:
        raise NoExactForm("contains", "with maxContains cannot be enforced")
    if part is True or part == {}:
        return [{"type": "array", "minItems": min_contains}]
    if max_items is None:
        raise NoExactForm("contains", "in arrays without maxItems cannot be enforced")
    count = math.comb(int(max_items), min_contains) if max_items < 1000 else _MAX_OPTIONS + 1
    if count > _MAX_OPTIONS:
        raise NoExactForm("contains", f"has more than {_MAX_OPTIONS} combinations of positions")
    return [
        {
            "type": "array",
            "minItems": positions[-1] + 1,
            prefix: [part if i in positions else True for i in range(positions[-1] + 1)],
        }
        for positions in itertools.combinations(range(int(max_items)), min_contains)
    ]
