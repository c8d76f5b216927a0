"""Parts of a schema that LLGuidance's own compiler takes over, as ``%json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from graft.grammar.schema.any_order.shape import ARRAYS, OBJECTS, Parts
from graft.grammar.schema.terms import References, has_orders, word_set
from graft.grammar.schema.trial import trial

__all__ = ["KNOWN", "Leaves"]

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


class Leaves:
    """Leaves of one schema document; if careful, LLGuidance is asked whether anything fits them."""

    def __init__(self, root: Any, options: dict[str, Any], careful: bool):
        self._root = root
        self._options = options
        self._careful = careful
        self._references = References(root)
        self._references.nested &= _bases_matter(root)
        self._made: dict[tuple[int, tuple[str, ...]], tuple[Any, Any]] = {}  # with what it is of
        self._definitions: dict[str, str] = {}  # pointers, and names of the copies in leaves
        self._parts: dict[int, dict[str, Any]] = {}  # that can be reached, by identity
        self._marked: set[int] = set()
        self._mark()

    def resolved(self, reference: Any) -> Any:
        """What a reference means; `Cannot` if it is no plain pointer into this document."""
        return self._references.resolve(reference)

    def without(self, part: dict[str, Any], *keywords: str) -> dict[str, Any]:
        """The schema without annotations and these keywords; the same object each time."""
        if not keywords and part.keys() <= _KEPT:
            return part
        mark = id(part), keywords
        if mark not in self._made:
            kept = {k: v for k, v in part.items() if k in _KEPT and k not in keywords}
            self._made[mark] = kept, part
        made: dict[str, Any] = self._made[mark][0]
        return made

    def conjuncts(self, parts: Parts) -> tuple[dict[str, Any], ...] | None:
        """The conjuncts as objects without ``allOf``, each once; None if one is ``false``."""
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

    def has_objects(self, part: Any) -> bool:
        """Whether an object whose keys have several orders is in what fits a schema."""
        if not isinstance(part, dict) or id(part) in self._parts:
            return id(part) in self._marked
        return has_orders(part) or any(map(self.has_objects, self._inner(part)))

    def _inner(self, part: dict[str, Any]) -> Iterator[Any]:
        for keyword in _MAPS:
            yield from part.get(keyword, {}).values()
        for keyword in _LISTS:
            if isinstance(part.get(keyword), list):
                yield from part[keyword]
        for keyword in _SINGLE:
            if isinstance(part.get(keyword), dict):
                yield part[keyword]
        if "$ref" in part:
            yield self.resolved(part["$ref"])

    def _mark(self) -> None:
        """Mark every schema that can be reached, from the inside out."""
        pending = [self._root]
        while pending:
            part = pending.pop()
            if isinstance(part, dict) and id(part) not in self._parts:
                self._parts[id(part)] = part
                pending += self._inner(part)
        grown = {mark for mark, part in self._parts.items() if has_orders(part)}
        while grown:
            self._marked |= grown
            grown = {
                mark
                for mark, part in self._parts.items()
                if mark not in self._marked
                and any(id(inner) in self._marked for inner in self._inner(part))
            }

    def of(self, parts: Parts, kinds: frozenset[str] | None = None) -> str | None:
        """What fits all the schemas, and is of these types, as ``%json``; None if nothing does."""
        reached: dict[str, None] = {}
        made = [self._copy(part, reached) for part in parts]
        if kinds is not None:
            gone = (OBJECTS if "object" not in kinds else frozenset()) | (
                ARRAYS if "array" not in kinds else frozenset()
            )
            made = [{k: v for k, v in one.items() if k not in gone} for one in made]
        whole = made[0] if len(made) == 1 else {"allOf": made} if made else {}
        if kinds is not None:
            whole["type"] = min(kinds) if len(kinds) == 1 else sorted(kinds)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(reached):
            for pointer in list(reached):
                name = self._definitions.setdefault(pointer, f"d{len(self._definitions)}")
                if name not in definitions:
                    definitions[name] = self._copy(self.resolved(f"#{pointer}"), reached)
        if definitions:
            whole = {**whole, "$defs": definitions}
        if isinstance(self._root, dict) and "$schema" in self._root:
            whole = {"$schema": self._root["$schema"], **whole}
        if self._careful and trial(whole).startswith("Unsatisfiable"):
            return None
        return "%json " + json.dumps({**whole, "x-guidance": self._options})

    def _copy(self, part: Any, reached: dict[str, None]) -> Any:
        """Without annotations, its references named anew; takes note of what they mean."""
        if not isinstance(part, dict):
            return part
        out: dict[str, Any] = {}
        for keyword, value in part.items():
            if keyword not in _KEPT:
                continue
            if keyword == "$ref":
                self.resolved(value)
                pointer = str(self._references.pointer(value))
                reached[pointer] = None
                name = self._definitions.setdefault(pointer, f"d{len(self._definitions)}")
                out[keyword] = f"#/$defs/{name}"
            elif keyword in _MAPS:
                out[keyword] = {name: self._copy(s, reached) for name, s in value.items()}
            elif keyword in _LISTS and isinstance(value, list):
                out[keyword] = [self._copy(s, reached) for s in value]
            elif keyword in _SINGLE:
                out[keyword] = self._copy(value, reached)
            else:
                out[keyword] = value
        return out


def _bases_matter(root: Any) -> bool:
    """Whether a reference stands in a subschema that seems to have a base of its own."""
    pending = [(root, False)]
    while pending:
        part, inside = pending.pop()
        if isinstance(part, list):
            pending += [(item, inside) for item in part]
        elif isinstance(part, dict):
            base = any(isinstance(part.get(key), str) for key in ("$id", "id"))
            inside = inside or (base and part is not root)
            if inside and "$ref" in part:
                return True
            pending += [(value, inside) for value in part.values()]
    return False
