"""Replacements of keywords that constrain objects and arrays as a whole, such as ``contains``."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection
from typing import Any

from graft.grammar.schema.documents import SchemaObject, required_of, word_set
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.validate import search_pattern

__all__ = ["contains", "dependencies", "distinct", "property_count", "property_names"]

_MAX_OPTIONS = 64  # maximum number of options of a union that replaces a keyword
_MAX_CONDITIONS = 7  # maximum number of unions that replace dependencies
_MAX_ORDERS = 400  # maximum number of arrays that are listed to replace uniqueItems
_NO_NAME = r"^[^\s\S]$"
_REPEATED_NAMES = "a name that is not listed could occur twice and would count twice"
_ANNOTATIONS = word_set("type title description $comment examples default")


def dependencies(value: Any, required: list[str], objects_only: bool) -> list[Any]:
    """Return schemas whose intersection is equivalent to ``dependencies``.

    The function also handles ``dependentRequired`` and ``dependentSchemas``, the successors of
    ``dependencies``. `value` contains the dependency of each property: a schema, or the names of
    properties that must be present. `required` are the required properties. `objects_only` is True
    if the schema with the keyword allows objects only.

    The dependency of a required property applies to all objects. Any other dependency is replaced
    with a union: the property is absent, or it is present and the dependency holds. Properties that
    depend on each other share one union. If `objects_only` is False, a dependency that is a schema
    always needs a union, because the schema must not constrain values of other types. Raise
    `NoExactForm` if there are too many unions.
    """
    name_lists: dict[str, list[str]] = {}
    parts: list[Any] = []
    for name, dependency in value.items():
        if isinstance(dependency, str):  # draft 3 allows a single name
            name_lists[name] = [dependency]
        elif isinstance(dependency, list):
            name_lists[name] = dependency
        elif name in required and objects_only:
            parts.append(dependency)
        elif dependency is not True and dependency != {}:
            absent = {"properties": {name: False}}
            present = {"allOf": [{"required": [name]}, dependency]}
            parts.append({"anyOf": [absent, present]})
    parts += _required_together(name_lists, set(required))
    conditions = sum("anyOf" in part for part in parts if isinstance(part, dict))
    if conditions > _MAX_CONDITIONS:
        raise NoExactForm("dependencies", f"more than {_MAX_CONDITIONS} conditions ({conditions})")
    return parts


def _required_together(name_lists: dict[str, list[str]], required: set[str]) -> list[Any]:
    """Return schemas that replace the dependencies whose values are lists of names.

    `name_lists` contains, for each property, the properties that must be present if it is present.
    `required` are the properties that the object schema requires in any case. If one of them has a
    list, the names of the list are required unconditionally, too.
    """
    # This dict maps a set of properties to two lists: the set in a fixed order, and the properties
    # (owners) whose presence requires the whole set.
    groups: dict[frozenset[str], tuple[list[str], list[str]]] = {}
    for name, names in name_lists.items():
        group = list(dict.fromkeys([*names, name]))
        _, owners = groups.setdefault(frozenset(group), (group, []))
        owners.append(name)
    parts: list[Any] = []
    for group, owners in groups.values():
        if len(group) == 1:
            continue
        all_present = {"required": group}
        if required & set(owners):
            parts.append(all_present)
        else:
            absent = {"properties": dict.fromkeys(owners, False)}
            parts.append({"anyOf": [absent, all_present]})
    return parts


def property_names(names: Any, schema: SchemaObject) -> SchemaObject:
    """Return the keywords that replace ``propertyNames: names`` in an object schema.

    The result contains new values of ``properties``, ``patternProperties`` and
    ``additionalProperties``. If `names` allows no name, the result is ``maxProperties: 0``. Raise
    `NoExactForm` if no pattern is known for the names, or if the object schema has
    ``patternProperties`` or a schema for additional properties that cannot be combined with it.
    """
    if names is True or names == {}:
        return {}
    if names is False:
        return {"maxProperties": 0}
    types = names.get("type", "string")
    if isinstance(types, str):
        types = [types]
    if "string" not in types:
        return {"maxProperties": 0}
    listed = dict(schema.get("properties", {}))
    rest = schema.get("additionalProperties", True)
    words = names.get("enum", [names["const"]] if "const" in names else None)
    # A schema for additional properties does not apply to listed properties, so the pattern of
    # additional properties must not match these.
    pattern = _name_pattern(names, () if rest in (True, {}) else listed)
    if schema.get("patternProperties"):
        raise NoExactForm("propertyNames", "is combined with patternProperties")
    try:
        for name in listed:
            matches = name in words if words is not None else search_pattern(pattern, name)
            if not matches:
                listed[name] = False
            elif words is None and rest not in (True, {}, False):
                why = "is combined with a schema for additional properties"
                raise NoExactForm("propertyNames", why)
    except re.error as error:
        raise NoExactForm("propertyNames", f"pattern {pattern!r}: {error}") from None
    for name in required_of(schema):
        if name not in listed and not search_pattern(pattern, name):
            listed[name] = False
    replacements: SchemaObject = {"additionalProperties": False}
    if listed:
        replacements["properties"] = listed
    if rest is not False:
        replacements["patternProperties"] = {pattern: rest}
    return replacements


def _name_pattern(names: Any, excluded: Collection[str] = ()) -> str:
    """Return a pattern that matches exactly the names that ``propertyNames`` allows.

    `names` is the value of ``propertyNames``. If it lists the allowed names, the names in
    `excluded` are left out.
    """
    keywords = names.keys() - _ANNOTATIONS
    if keywords == {"pattern"}:
        return names["pattern"]
    if keywords in ({"enum"}, {"const"}):
        words = names["enum"] if "enum" in names else [names["const"]]
        escaped = []
        for word in words:
            if isinstance(word, str) and word not in excluded:
                escaped.append(re.sub(r"([^A-Za-z0-9 _-])", r"\\\1", word))
        return f"^(?:{'|'.join(escaped)})$" if escaped else _NO_NAME
    if keywords <= {"minLength", "maxLength"}:
        low = names.get("minLength", 0)
        high = names.get("maxLength", "")
        return f"^[\\s\\S]{{{low},{high}}}$"
    listed = ", ".join(sorted(keywords))
    raise NoExactForm("propertyNames", f"a schema with {listed} cannot be enforced for names")


def property_count(schema: SchemaObject) -> tuple[list[Any] | None, bool]:
    """Return schemas whose union is equivalent to ``minProperties`` and ``maxProperties``.

    There is one schema for each set of optional properties that may be present together. None
    instead of a list means that no listed property is optional, so the two keywords can be kept. An
    empty list means that the number of required properties decides alone: if it is within the
    bounds, all objects satisfy them, otherwise none does.

    An output may contain the same name several times if it is not listed in ``properties``. The
    schemas therefore count all unlisted properties of an object as at most one. The second result
    is True if they exclude valid objects for this reason.

    Raise `NoExactForm` if there are too many combinations, or if objects need several unlisted
    properties.
    """
    low = int(schema.get("minProperties", 0))
    high = schema.get("maxProperties")
    properties = schema.get("properties", {})
    required = set(required_of(schema))
    optional = []
    for name, part in properties.items():
        if part is not False and name not in required:
            optional.append(name)
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    missing = low - len(required)
    if not closed and missing - len(optional) > 1:
        raise NoExactForm("minProperties", _REPEATED_NAMES)
    if not optional:
        return None, False
    if closed and high is not None and high >= len(optional) + len(required):
        high = None
    if missing <= 0:
        low = 0
    if low == 0 and high is None:
        return [], False
    if closed and missing > len(optional):
        return [], False
    if closed and high is None:
        _check_combinations(math.comb(len(optional), missing))
        combinations = itertools.combinations(optional, missing)
        return [{"required": list(present)} for present in combinations], False
    if missing == 1 and high is None:
        one_present: list[Any] = [{"required": [name]} for name in optional]
        all_absent = dict.fromkeys(optional, False)
        return [*one_present, {"properties": all_absent, "minProperties": low}], False
    max_present = len(optional)
    bounds: dict[str, int] = {}
    if low:
        bounds["minProperties"] = low
    if high is not None:
        bounds["maxProperties"] = int(high)
        max_present = min(max_present, int(high) - len(required))
    min_present = 0 if closed else max(0, missing - 1)
    options = _presence_options(optional, range(min_present, max_present + 1), bounds)
    return options, min_present > 0


def _presence_options(
    optional: list[str], sizes: range, bounds: dict[str, int]
) -> list[SchemaObject]:
    """Return a schema for each set of optional properties of the given sizes.

    The schema requires the properties of the set, forbids the other optional properties, and has
    the keywords `bounds`.
    """
    _check_combinations(sum(math.comb(len(optional), size) for size in sizes))
    options = []
    for size in sizes:
        for present in itertools.combinations(optional, size):
            absent = [name for name in optional if name not in present]
            option: SchemaObject = {
                "properties": dict.fromkeys(absent, False),
                "required": list(present),
                **bounds,
            }
            options.append(option)
    return options


def _check_combinations(count: int) -> None:
    if count > _MAX_OPTIONS:
        raise NoExactForm("minProperties/maxProperties", f"more than {_MAX_OPTIONS} combinations")


def distinct(schema: SchemaObject, values: list[Any] | None) -> list[Any] | None:
    """Return schemas whose union is equivalent to ``uniqueItems: true``; None if it has no effect.

    `values` are all values that an item can have; None if the schema of the items is not an
    ``enum``. Raise `NoExactForm` if the values are not listed, or if there are too many arrays of
    distinct values.
    """
    max_items = schema.get("maxItems")
    if max_items is not None and max_items <= 1:
        return None
    if values is None:
        raise NoExactForm("uniqueItems", "cannot be enforced unless items is an enum")
    largest = len(values) if max_items is None else min(len(values), int(max_items))
    smallest = int(schema.get("minItems", 0))
    sizes = range(smallest, largest + 1)
    count = 0
    for size in sizes:
        count += math.perm(len(values), size)
        if count > _MAX_ORDERS:  # before the numbers of larger arrays, which have many digits
            raise NoExactForm(
                "uniqueItems", f"{len(values)} values form more than {_MAX_ORDERS} arrays"
            )
    options = []
    for size in sizes:
        for items in itertools.permutations(values, size):
            options.append({"enum": [list(items)]})  # draft 4 has no const
    return options


def contains(part: Any, schema: SchemaObject, prefix: str) -> list[Any]:
    """Return schemas whose union is equivalent to ``contains: part`` for arrays.

    The required items can be at different positions of the array. There is one schema for each set
    of positions. `prefix` is the keyword that the document's draft uses for the schemas of the
    first items: ``"prefixItems"`` or ``"items"``. Raise `NoExactForm` if the array schema has
    ``maxContains``. If `part` does not allow every item, also raise it without ``maxItems``, or if
    there are too many sets of positions.
    """
    min_contains = int(schema.get("minContains", 1))
    max_items = schema.get("maxItems")
    if "maxContains" in schema:
        raise NoExactForm("contains", "cannot be enforced together with maxContains")
    if part is True or part == {}:
        return [{"type": "array", "minItems": min_contains}]
    if max_items is None:
        raise NoExactForm("contains", "cannot be enforced in arrays without maxItems")
    count = math.comb(int(max_items), min_contains) if max_items < 1000 else _MAX_OPTIONS + 1
    if count > _MAX_OPTIONS:
        raise NoExactForm("contains", f"has more than {_MAX_OPTIONS} combinations of positions")
    options = []
    for positions in itertools.combinations(range(int(max_items)), min_contains):
        size = positions[-1] + 1
        items = [part if index in positions else True for index in range(size)]
        option = {"type": "array", "minItems": size, prefix: items}
        options.append(option)
    return options
