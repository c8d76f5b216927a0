"""References within a JSON schema document."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from graft.grammar.schema.documents import DATA, MAPS, SCHEMA_KEYWORDS
from graft.grammar.schema.reasons import NoExactForm

__all__ = ["References", "nesting_of", "pointer_steps", "replace_references"]

_MAX_REFERENCE_CHAIN = 8
_IDENTIFIERS = ("$id", "id")
_DEFINITIONS = ("$defs", "definitions")


def pointer_steps(pointer: str) -> list[str]:
    """Return the unescaped keys and indices of a JSON pointer."""
    _, *steps = pointer.split("/")
    if "%" not in pointer and "~" not in pointer:
        return steps
    steps = [unquote(step) for step in steps]
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


class References:
    """Local references of one schema document.

    The attribute `base` is the document's base URI, or empty. The attribute `nested` is True if a
    subschema declares another base URI. No reference of the document is then treated as local,
    because references inside the subschema may be relative to that URI.
    """

    def __init__(self, root: Any):
        self._root = root
        base = root.get("$id", root.get("id")) if isinstance(root, dict) else None
        self.base = base.rstrip("#") if isinstance(base, str) else ""

    @functools.cached_property
    def nested(self) -> bool:
        return _has_nested_id(self._root)

    def pointer(self, reference: Any) -> str | None:
        """Return the JSON pointer of a local reference, such as ``#/$defs/name``.

        Return None for any other reference: one to another document, or to an anchor by its name.
        """
        if not isinstance(reference, str) or self.nested:
            return None
        if self.base and reference.startswith(self.base + "#"):
            reference = reference[len(self.base) :]
        if reference == "#" or reference.startswith("#/"):
            return reference[1:]
        return None

    def follow(self, schema: Any) -> Any:
        """Return the target of a schema that is a reference; return other schemas unchanged."""
        for _ in range(_MAX_REFERENCE_CHAIN):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            try:
                schema = self.resolve(schema["$ref"])
            except NoExactForm:
                break
        return schema

    def resolve(self, reference: Any) -> Any:
        """Return the target of a reference.

        Raise `NoExactForm` if the reference has no JSON pointer (see `pointer`), or if its target
        does not exist.
        """
        pointer = self.pointer(reference)
        if pointer is None:
            why = f"{reference!r} is not a plain pointer into this schema"
            if self.nested and isinstance(reference, str) and reference.startswith("#"):
                why = f"{reference!r} may be relative to the $id of a subschema"
            raise NoExactForm("$ref", why)
        found = self._root
        for key in pointer_steps(pointer):
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, ValueError, IndexError, TypeError):
                raise NoExactForm("$ref", f"'#{pointer}' points to nothing") from None
        return found


def nesting_of(root: Any) -> int:
    """Return how deeply the subschemas of a document are nested, through references too.

    The search visits each subschema once, in the order in which LLGuidance compiles the subschemas.
    """
    references = References(root)
    greatest = 0
    seen = set()
    pending = [(root, 1)]
    while pending:
        part, depth = pending.pop()
        if isinstance(part, list):
            pending.extend((item, depth) for item in reversed(part))
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        greatest = max(greatest, depth)
        children: list[Any] = []
        for keyword, value in part.items():
            if keyword == "$ref":
                with contextlib.suppress(NoExactForm):
                    children.append(references.resolve(value))
            elif keyword in SCHEMA_KEYWORDS:
                children.append(value)
            elif keyword in MAPS and keyword not in _DEFINITIONS and isinstance(value, dict):
                children.extend(value.values())
        pending.extend((child, depth + 1) for child in reversed(children))
    return greatest


def replace_references(
    part: Any,
    pointers: frozenset[str],
    references: References,
    replacement: bool,
    *,
    is_map: bool = False,
) -> Any:
    """Return a copy of a part of a document in which some references are replaced.

    The part is a schema, a list of schemas or, with `is_map`, a map of schemas, whose keys are
    names and not keywords. Each subschema that refers to one of the JSON pointers becomes
    `replacement`.
    """
    if isinstance(part, list):
        return [replace_references(item, pointers, references, replacement) for item in part]
    if not isinstance(part, dict):
        return part
    if not is_map and references.pointer(part.get("$ref")) in pointers:
        return replacement
    copy = {}
    for key, value in part.items():
        if key in DATA and not is_map:
            copy[key] = value
        else:
            copy[key] = replace_references(
                value, pointers, references, replacement, is_map=key in MAPS and not is_map
            )
    return copy


def _has_nested_id(root: Any) -> bool:
    """Return whether a subschema seems to have a base URI of its own.

    A property with the name ``id`` is not mistaken for the keyword ``id``, because the value of
    the keyword is a string and the value of a property is a schema.
    """
    pending: list[Iterable[Any]] = [root.values()] if isinstance(root, dict) else []
    for parts in pending:  # grows during the loop
        for part in parts:
            if isinstance(part, str):  # most values are strings
                continue
            if isinstance(part, dict):
                for key in _IDENTIFIERS:
                    if key in part and isinstance(part[key], str) and part[key][:1] != "#":
                        return True
                pending.append(part.values())
            elif isinstance(part, list):
                pending.append(part)
    return False
