"""Further orders of an object's properties, beside the one in which a schema lists them.

A grammar writes the properties of an object in one order. Models often write another: what is
required first, in the order of ``required``. Where a whole value is an object, this pass puts a
choice of orders before its schema, as a conjunct that constrains nothing but comes first::

    {"allOf": [{"anyOf": [{"properties": {"a": {}, "b": {}}}, {"properties": {"b": {}, "a": {}}}]},
               schema]}

Objects of few properties get every order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from .rewrite_terms import References, escape, kinds_of, word_set

__all__ = ["several_orders"]

_ALL_ORDERS = 3  # properties of which every order is allowed
_MOST_ORDERS = 8  # of larger objects
_MOST_WAYS = 24  # orders times the unions inside an object: the backend multiplies them out
_MOST_NAMES = 4000  # names written into one schema's orders
_HOMES = ("$defs", "definitions")
_ANNOTATIONS = word_set("title description default examples $comment deprecated type")
_DOCUMENT = word_set("$schema $id id $defs definitions")
_BRANCHES = word_set("allOf anyOf $ref")


def several_orders(root: Any, home: str) -> Any:
    """The schema with a choice of orders at its objects; the same if there is none to offer.

    Parameters
    ----------
    root
        A schema as the rewriter leaves it. It is not changed.
    home
        Where shared definitions go: ``"$defs"`` or ``"definitions"``.
    """
    if not isinstance(root, dict):
        return root
    references = References(root)
    if references.nested:
        return root
    worker = _Orders(root, references, home)
    new = worker.document()
    return new if worker.made else root


class _Orders:
    def __init__(self, root: dict[str, Any], references: References, home: str):
        self._root, self._references, self._home = root, references, home
        self._parts = _used_as_parts(root)
        self._names_left = _MOST_NAMES
        self._shared: dict[str, Any] = {}
        self.made = False

    def document(self) -> dict[str, Any]:
        """The whole schema."""
        outer = {key: value for key, value in self._root.items() if key in _DOCUMENT}
        inner = {key: value for key, value in self._root.items() if key not in _DOCUMENT}
        new = dict(self._value(inner, "#" not in self._parts))
        for home in _HOMES:
            if isinstance(self._root.get(home), dict):
                outer[home] = {
                    name: self._value(part, f"#/{home}/{escape(name)}" not in self._parts)
                    for name, part in self._root[home].items()
                }
        if self._shared:
            outer[self._home] = {**outer.get(self._home, {}), **self._shared}
        return {**outer, **new}

    def _value(self, schema: Any, whole: bool = True) -> Any:
        """A schema that a whole value has to fit, or else a part of such a schema."""
        if not isinstance(schema, dict) or "$ref" in schema:
            return schema
        new = dict(schema)
        options = schema.get("anyOf")
        if isinstance(options, list) and not schema.keys() - _ANNOTATIONS - {"anyOf"}:
            new["anyOf"] = [self._value(option, whole) for option in options]
            return new
        orders = list(self._orders(schema)) if whole and kinds_of(schema) == {"object"} else []
        for keyword in ("properties", "patternProperties"):
            parts = schema.get(keyword)
            if isinstance(parts, dict):
                new[keyword] = {
                    name: self._member(part, bool(orders)) for name, part in parts.items()
                }
        for keyword in ("additionalProperties", "items", "additionalItems"):
            if isinstance(schema.get(keyword), dict):
                new[keyword] = self._member(schema[keyword], bool(orders))
        for keyword in ("prefixItems", "items"):
            if isinstance(schema.get(keyword), list):
                new[keyword] = [self._value(part) for part in schema[keyword]]
        if not orders:
            return new
        self.made = True
        hints = [{"type": "object", "properties": {n: {} for n in names}} for names in orders]
        return {"allOf": [{"anyOf": hints}, new]}

    def _member(self, schema: Any, several: bool) -> Any:
        """A schema in an object; written once and referred to if the object has several orders."""
        new = self._value(schema)
        if not several or not isinstance(new, dict) or not new.keys() & {
            "properties", "allOf", "anyOf", "items", "patternProperties", "prefixItems"
        }:  # fmt: skip
            return new
        name = f"graft-order-{len(self._shared)}"
        self._shared[name] = new
        return {"$ref": f"#/{self._home}/{name}"}

    def _orders(self, schema: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        """Orders to offer, the schema's own among them; none if one is enough."""
        names: dict[str, None] = {}
        wanted: list[tuple[str, ...]] = []
        self._gather(schema, names, wanted, (), 0)
        natural = tuple(names)
        if len(natural) < 2:
            return
        found: dict[tuple[str, ...], None] = {natural: None}
        if len(natural) <= _ALL_ORDERS:
            found.update(dict.fromkeys(itertools.permutations(natural)))
        else:
            for required in wanted:
                first = tuple(name for name in dict.fromkeys(required) if name in names)
                found.setdefault((*first, *(name for name in natural if name not in first)))
        offered = list(found)[: min(_MOST_ORDERS, _MOST_WAYS // self._ways(schema, 0))]
        cost = len(offered) * len(natural)
        if len(offered) < 2 or cost > self._names_left:
            return
        self._names_left -= cost
        yield from offered

    def _ways(self, schema: Any, depth: int) -> int:
        """Combinations of options in the unions that a schema is made of."""
        schema = self._references.followed(schema)
        if not isinstance(schema, dict) or depth > 4:
            return 1
        parts, options = schema.get("allOf"), schema.get("anyOf")
        ways = math.prod(self._ways(part, depth + 1) for part in _listed(parts))
        return ways * max(1, sum(self._ways(option, depth + 1) for option in _listed(options)))

    def _gather(
        self, schema: Any, names: dict[str, None], wanted: list[tuple[str, ...]],
        before: tuple[str, ...], depth: int,
    ) -> None:  # fmt: skip
        """Names in the order in which the backend merges them, and lists of required ones."""
        schema = self._references.followed(schema)
        if not isinstance(schema, dict) or depth > 4:
            return
        properties = schema.get("properties")
        for name, part in properties.items() if isinstance(properties, dict) else ():
            if part is not False:
                names.setdefault(name)
        required = schema.get("required")
        if isinstance(required, list):
            own = tuple(name for name in required if isinstance(name, str))
            wanted += [(*before, *own), (*own, *before)]
            before = (*before, *own)
        for keyword in ("allOf", "anyOf"):
            for part in _listed(schema.get(keyword)):
                self._gather(part, names, wanted, before, depth + 1)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _used_as_parts(root: dict[str, Any]) -> set[str]:
    """References from where a schema is one conjunct of several, or part of such a one."""
    found: set[str] = set()
    pending: list[tuple[Any, bool]] = [(root, False)]
    while pending:
        schema, part = pending.pop()
        if isinstance(schema, list):
            pending += [(item, part) for item in schema]
            continue
        if not isinstance(schema, dict):
            continue
        if part and isinstance(schema.get("$ref"), str):
            found.add(schema["$ref"])
        union = "anyOf" in schema and not schema.keys() - _ANNOTATIONS - {"anyOf"} - _DOCUMENT
        for keyword, value in schema.items():
            if keyword == "allOf" or (keyword == "anyOf" and not union):
                pending.append((value, True))
            elif keyword == "anyOf":
                pending.append((value, part))
            elif keyword not in ("enum", "const", "default", "examples"):
                inside = keyword in ("properties", "patternProperties", *_HOMES)
                parts = list(value.values()) if inside and isinstance(value, dict) else [value]
                pending += [(item, False) for item in parts]
    return found
