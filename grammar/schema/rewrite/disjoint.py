"""Whether two schemas have no value in common, as far as can be proved."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from typing import Any

from graft.grammar.schema.terms import (
    KINDS,
    Cannot,
    Kinds,
    References,
    kinds_of,
    meet,
    required_of,
    values_of,
)
from graft.grammar.schema.trial import unsatisfiable
from graft.grammar.validate import search_pattern

__all__ = ["Disjointness"]

_DEPTH = 6
_QUESTIONS = 60  # to LLGuidance, about one document
_LARGEST = 15_000  # characters; LLGuidance takes half a second for some larger documents
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')


class Disjointness:
    """Proofs within one document; "not proved" says nothing.

    LLGuidance is asked where types, constants and required properties do not settle the matter.
    """

    def __init__(self, root: Any, references: References):
        shared = ("$schema", "$defs", "definitions")
        self._references = references
        self._definitions = {k: root[k] for k in shared if k in root}
        self._left = _QUESTIONS

    def proved(self, one: Any, other: Any, base: Any = True, kinds: Kinds = KINDS) -> bool:
        """Whether no value of these types fits ``base`` and both schemas."""
        if self._apart(one, other, kinds, _DEPTH):
            return True
        if self._left <= 0:
            return False
        self._left -= 1
        typed = True if kinds == KINDS else {"type": sorted(kinds)}
        document = self._document([base, one, other, typed])
        return len(json.dumps(document)) <= _LARGEST and unsatisfiable(document)

    def _document(self, parts: list[Any]) -> dict[str, Any]:
        """The intersection, with the definitions it refers to and no others."""
        found: dict[str, Any] = {"allOf": parts}
        if "$schema" in self._definitions:
            found["$schema"] = self._definitions["$schema"]
        pending = set(_REFERENCE.findall(json.dumps(parts)))
        done: set[str] = set()
        while pending - done:
            reference = (pending - done).pop()
            done.add(reference)
            home, _, name = reference.removeprefix("#/").partition("/")
            if home not in ("$defs", "definitions") or name not in self._definitions.get(home, {}):
                return {**self._definitions, "allOf": parts}
            target = self._definitions[home][name]
            found.setdefault(home, {})[name] = target
            pending |= set(_REFERENCE.findall(json.dumps(target)))
        return found

    def _apart(self, one: Any, other: Any, kinds: Kinds, depth: int) -> bool:
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or depth == 0:
            return False
        for first, second in ((one, other), (other, one)):
            for part in self._conjuncts(first):
                if self._apart(part, second, kinds, depth - 1):
                    return True
            for keyword in ("anyOf", "oneOf"):
                if keyword in first and all(
                    self._apart(part, second, kinds, depth - 1) for part in first[keyword]
                ):
                    return True
        values = values_of(one)
        others = values_of(other)
        if values is not None and others is not None:
            return not any(
                a == b and isinstance(a, bool) == isinstance(b, bool)
                for a in values
                for b in others
            )
        common = meet(kinds, meet(kinds_of(one), kinds_of(other)))
        if not common:
            return True
        if common == {"object"}:
            return self._objects_apart(one, other, depth)
        if common == {"string"}:
            for words, schema in ((values, other), (others, one)):
                if words is not None and _refused(words, schema):
                    return True
            return one.get("minLength", 0) > other.get("maxLength", math.inf) or other.get(
                "minLength", 0
            ) > one.get("maxLength", math.inf)
        return False

    def _conjuncts(self, schema: dict[str, Any]) -> list[Any]:
        parts = list(schema.get("allOf", ()))
        if "$ref" in schema:
            with contextlib.suppress(Cannot):
                parts.append(self._references.resolve(schema["$ref"]))
        return parts

    def _objects_apart(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Whether a property that must be there cannot fit both."""
        return any(
            self._apart(_property(one, name), _property(other, name), KINDS, depth - 1)
            for name in dict.fromkeys((*required_of(one), *required_of(other)))
        )


def _property(schema: dict[str, Any], name: str) -> Any:
    """What a property of this name must fit (possibly less than all of it)."""
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    if schema.get("patternProperties"):
        return True
    return schema.get("additionalProperties", True)


def _refused(words: list[Any], schema: dict[str, Any]) -> bool:
    """Whether a schema's own string keywords refuse every one of the words."""
    low = schema.get("minLength", 0)
    high = schema.get("maxLength", math.inf)
    found = None
    with contextlib.suppress(re.error, KeyError):
        re.compile(schema["pattern"])
        found = functools.partial(search_pattern, schema["pattern"])
    return all(
        not isinstance(word, str)
        or not low <= len(word) <= high
        or (found and word.isascii() and not found(word))
        for word in words
    )
