"""Leaves of an any-order grammar: parts of a schema that LLGuidance compiles as ``%json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from graft.grammar.schema.any_order.shape import ARRAYS, OBJECTS, Conjuncts
from graft.grammar.schema.llguidance_errors import schema_error
from graft.grammar.schema.terms import References, has_orders, word_set

__all__ = ["KNOWN", "Leaves"]

#: Keywords of leaves, other than references and combinations.
KNOWN = (
    OBJECTS
    | ARRAYS
    | word_set(
        """type enum const format pattern minLength maxLength minimum maximum exclusiveMinimum
    exclusiveMaximum multipleOf"""
    )
)
_KEPT = KNOWN | word_set("$ref anyOf allOf oneOf")
_MAPS = ("properties", "patternProperties")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SINGLE = ("additionalProperties", "additionalItems", "items")

_StripKey = tuple[int, tuple[str, ...]]  # id of a schema, removed keywords


class Leaves:
    """Leaves of one schema document.

    Parameters
    ----------
    root
        The document.
    options
        LLGuidance's options of ``%json``.
    check_satisfiable
        Whether LLGuidance is queried about the satisfiability of each leaf, which takes time.
    """

    def __init__(self, root: Any, options: dict[str, Any], check_satisfiable: bool):
        self._root = root
        self._options = options
        self._check_satisfiable = check_satisfiable
        self._references = References(root)
        self._references.nested &= _has_reference_below_id(root)
        #: Results of `without`, with the schema that each was made from: its id must stay valid.
        self._stripped: dict[_StripKey, tuple[dict[str, Any], Any]] = {}
        self._definitions: dict[str, str] = {}  # names of definitions in leaves, by pointer
        self._parts: dict[int, dict[str, Any]] = {}  # reachable schemas, by id
        self._with_orders: set[int] = set()  # ids of those that contain objects with several keys
        self._find_parts()

    def resolve(self, reference: Any) -> Any:
        """Return the target of a reference; raise `NoExactForm` if it is not a local pointer."""
        return self._references.resolve(reference)

    def without(self, part: dict[str, Any], *keywords: str) -> dict[str, Any]:
        """Return the schema without annotations and without some keywords.

        Equal arguments give the same object.
        """
        if not keywords and part.keys() <= _KEPT:
            return part
        key = id(part), keywords
        if key not in self._stripped:
            kept = {k: v for k, v in part.items() if k in _KEPT and k not in keywords}
            self._stripped[key] = kept, part
        stripped, _ = self._stripped[key]
        return stripped

    def conjuncts(self, parts: Conjuncts) -> tuple[dict[str, Any], ...] | None:
        """Return the distinct conjuncts, with ``allOf`` expanded; None if one is ``false``."""
        found: dict[int, dict[str, Any]] = {}
        pending = list(reversed(parts))
        while pending:
            part = pending.pop()
            if part is True:
                continue
            if part is False:
                return None
            part = self.without(part)
            if "allOf" in part:
                pending += reversed(part["allOf"])
                part = self.without(part, "allOf")
            if part:
                found[id(part)] = part
        return tuple(found.values())

    def has_orders(self, part: Any) -> bool:
        """Return whether values of a schema can contain an object with several key orders."""
        if not isinstance(part, dict) or id(part) in self._parts:
            return id(part) in self._with_orders
        return has_orders(part) or any(map(self.has_orders, self._inner(part)))

    def leaf(self, parts: Conjuncts, types: frozenset[str] | None = None) -> str | None:
        """Return the ``%json`` of a conjunction of schemas.

        Parameters
        ----------
        parts
            The schemas.
        types
            JSON types that the values may have; None if any.

        Returns
        -------
        str or None
            The ``%json`` expression; None if the conjunction is known to be unsatisfiable.
        """
        reached: dict[str, None] = {}
        copies = [self._copy(part, reached) for part in parts]
        if types is not None:
            irrelevant: set[str] = set()
            if "object" not in types:
                irrelevant |= OBJECTS
            if "array" not in types:
                irrelevant |= ARRAYS
            for copy in copies:
                for keyword in irrelevant & copy.keys():
                    del copy[keyword]
        document = _conjunction(copies)
        if types is not None:
            names = sorted(types)
            document["type"] = names[0] if len(names) == 1 else names
        definitions = self._copy_definitions(reached)
        if definitions:
            document = {**document, "$defs": definitions}
        if isinstance(self._root, dict) and "$schema" in self._root:
            document = {"$schema": self._root["$schema"], **document}
        if self._check_satisfiable and schema_error(document).startswith("Unsatisfiable"):
            return None
        return "%json " + json.dumps({**document, "x-guidance": self._options})

    def _inner(self, part: dict[str, Any]) -> Iterator[Any]:
        """Yield the schemas inside a schema, and the target of its reference."""
        for keyword in _MAPS:
            yield from part.get(keyword, {}).values()
        for keyword in _LISTS:
            if isinstance(part.get(keyword), list):
                yield from part[keyword]
        for keyword in _SINGLE:
            if isinstance(part.get(keyword), dict):
                yield part[keyword]
        if "$ref" in part:
            yield self.resolve(part["$ref"])

    def _find_parts(self) -> None:
        """Find all reachable schemas, and those that contain objects with several key orders."""
        pending = [self._root]
        while pending:
            part = pending.pop()
            if isinstance(part, dict) and id(part) not in self._parts:
                self._parts[id(part)] = part
                pending += self._inner(part)
        new = {key for key, part in self._parts.items() if has_orders(part)}
        while new:
            self._with_orders |= new
            new = {
                key
                for key, part in self._parts.items()
                if key not in self._with_orders
                and any(id(inner) in self._with_orders for inner in self._inner(part))
            }

    def _copy_definitions(self, reached: dict[str, None]) -> dict[str, Any]:
        """Return the definitions of all pointers in `reached`, which grows meanwhile, by name."""
        definitions: dict[str, Any] = {}
        while len(definitions) < len(reached):
            for pointer in list(reached):
                name = self._definition_name(pointer)
                if name not in definitions:
                    definitions[name] = self._copy(self.resolve(f"#{pointer}"), reached)
        return definitions

    def _definition_name(self, pointer: str) -> str:
        return self._definitions.setdefault(pointer, f"d{len(self._definitions)}")

    def _copy(self, part: Any, reached: dict[str, None]) -> Any:
        """Copy a schema without annotations, with references renamed to the leaf's definitions.

        Parameters
        ----------
        part
            The schema.
        reached
            Pointers of the references; extended by those of `part`.
        """
        if not isinstance(part, dict):
            return part
        out: dict[str, Any] = {}
        for keyword, value in part.items():
            if keyword not in _KEPT:
                continue
            if keyword == "$ref":
                self.resolve(value)
                pointer = str(self._references.pointer(value))
                reached[pointer] = None
                out[keyword] = f"#/$defs/{self._definition_name(pointer)}"
            elif keyword in _MAPS:
                out[keyword] = {name: self._copy(s, reached) for name, s in value.items()}
            elif keyword in _LISTS and isinstance(value, list):
                out[keyword] = [self._copy(s, reached) for s in value]
            elif keyword in _SINGLE:
                out[keyword] = self._copy(value, reached)
            else:
                out[keyword] = value
        return out


def _conjunction(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if not schemas:
        return {}
    return schemas[0] if len(schemas) == 1 else {"allOf": schemas}


def _has_reference_below_id(root: Any) -> bool:
    """Return whether a subschema that seems to have a base URI of its own has a reference."""
    pending = [(root, False)]
    while pending:
        part, inside = pending.pop()
        if isinstance(part, list):
            pending += [(item, inside) for item in part]
        elif isinstance(part, dict):
            has_id = any(isinstance(part.get(key), str) for key in ("$id", "id"))
            inside = inside or (has_id and part is not root)
            if inside and "$ref" in part:
                return True
            pending += [(value, inside) for value in part.values()]
    return False
