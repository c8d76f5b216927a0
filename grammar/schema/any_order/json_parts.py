"""JSON parts of an any-order grammar.

An any-order grammar is a Lark grammar in which objects have their keys in any order. A JSON part is
a part of the schema document for which the grammar has no rules of its own: the grammar contains
the part as a ``%json`` expression, which LLGuidance compiles with its own schema compiler. Usually,
a JSON part contains no object with several possible key orders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from graft.grammar.schema.any_order.merged_constraints import ARRAYS, OBJECTS, Conjuncts
from graft.grammar.schema.documents import SchemaObject, has_orders, subschemas, word_set
from graft.grammar.schema.llguidance_check import schema_error
from graft.grammar.schema.llguidance_options import with_options
from graft.grammar.schema.name_spelling import with_one_spelling
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.schema.references import References
from graft.grammar.spec import Whitespace

__all__ = ["KNOWN", "JsonParts"]

#: Keywords that need Lark rules, because LLGuidance's schemas do not have them.
_NOT_IN_JSON = word_set("contains minContains notMultipleOf notPattern")
#: Keywords that a schema may have, besides ``$ref``, ``anyOf``, ``allOf`` and ``oneOf``.
KNOWN = (
    OBJECTS
    | ARRAYS
    | word_set(
        """type enum const format pattern minLength maxLength minimum maximum exclusiveMinimum
    exclusiveMaximum multipleOf notMultipleOf"""
    )
)
_KEPT = KNOWN | word_set("$ref anyOf allOf oneOf notPattern")
_MAPS = ("properties", "patternProperties")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SINGLE = ("additionalProperties", "additionalItems", "items", "contains")

_StripKey = tuple[int, tuple[str, ...]]  # id of a schema object, removed keywords


class JsonParts:
    """Converts parts of the schema document `root` to JSON parts (``%json`` expressions).

    With `check_satisfiable`, the method `json_part` checks with LLGuidance whether each JSON part
    is satisfiable, which takes time. The attribute `excluded` collects errors that name the valid
    values that the JSON parts exclude.
    """

    def __init__(self, root: Any, whitespace: Whitespace, check_satisfiable: bool):
        self.excluded: list[NoExactForm] = []
        self._root = root
        self._whitespace = whitespace
        self._check_satisfiable = check_satisfiable
        self._references = References(root)
        self._references.nested &= _has_reference_below_id(root)
        #: Results of `without`. Each is stored with its original schema: while the original exists,
        #: no other object can get its object id, which is in the key.
        self._stripped: dict[_StripKey, tuple[SchemaObject, Any]] = {}
        self._definitions: dict[str, str] = {}  # names of definitions in JSON parts, by pointer
        self._parts: dict[int, SchemaObject] = {}  # reachable schemas, by id
        self._with_rules: set[int] = set()  # ids of reachable schemas that `needs_rules` reports
        self._find_parts()

    def resolve(self, reference: Any) -> Any:
        """Return the target of a reference; raise `NoExactForm` if it is not a local pointer."""
        return self._references.resolve(reference)

    def without(self, part: SchemaObject, *keywords: str) -> SchemaObject:
        """Return the schema without annotations and without the given keywords.

        Calls with the same arguments return the same object. Schemas can therefore be compared by
        object id.
        """
        if not keywords and part.keys() <= _KEPT:
            return part
        key = id(part), keywords
        if key not in self._stripped:
            names = [name for name in part if name in _KEPT and name not in keywords]
            self._stripped[key] = {name: part[name] for name in names}, part
        stripped, _ = self._stripped[key]
        return stripped

    def conjuncts(self, parts: Conjuncts) -> tuple[SchemaObject, ...] | None:
        """Return the distinct schemas of a conjunction, with each ``allOf`` expanded.

        The result contains no annotations. It is None if one of the schemas is ``false``.
        """
        found: dict[int, SchemaObject] = {}
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

    def needs_rules(self, part: Any) -> bool:
        """Return whether a schema needs Lark rules.

        It does if a value can contain objects whose keys may be reordered, or if the schema has
        keywords that LLGuidance's schemas do not have.
        """
        if not isinstance(part, dict) or id(part) in self._parts:
            return id(part) in self._with_rules
        return _needs_rules(part) or any(map(self.needs_rules, self._inner(part)))

    def json_part(self, parts: Conjuncts, types: frozenset[str] | None = None) -> str | None:
        """Return a ``%json`` expression for the values that satisfy all schemas in `parts`.

        `types` are the JSON types that the values may have; by default, they may have any type.
        Return None if the object was created with `check_satisfiable` and LLGuidance finds that no
        value is valid. Raise `NoExactForm` if LLGuidance's schemas do not have one of the keywords.
        """
        reached: dict[str, None] = {}
        copies = [self._copy(part, reached) for part in parts]
        document = _conjunction(copies, types)
        definitions = self._copy_definitions(reached)
        if definitions:
            document = {**document, "$defs": definitions}
        for _, part in subschemas(document):
            missing = _NOT_IN_JSON & part.keys()
            if missing:
                raise NoExactForm(min(missing), "not supported for keys in any order")
        if isinstance(self._root, dict) and "$schema" in self._root:
            document = {"$schema": self._root["$schema"], **document}
        if self._check_satisfiable and schema_error(document).startswith("Unsatisfiable"):
            return None
        spelled = with_one_spelling(document)
        self.excluded += [NoExactForm(reason.keyword, reason.why) for reason in spelled.narrowed]
        return "%json " + json.dumps(with_options(spelled.schema, self._whitespace))

    def _inner(self, part: SchemaObject) -> Iterator[Any]:
        """Yield the direct subschemas of a schema, and the target of its reference."""
        for keyword in _MAPS:
            schemas = part.get(keyword, {})
            yield from schemas.values()
        for keyword in _LISTS:
            value = part.get(keyword)
            if isinstance(value, list):
                yield from value
        for keyword in _SINGLE:
            value = part.get(keyword)
            if isinstance(value, dict):
                yield value
        if "$ref" in part:
            yield self.resolve(part["$ref"])

    def _find_parts(self) -> None:
        """Find all reachable schemas, and those that need Lark rules."""
        pending = [self._root]
        while pending:
            part = pending.pop()
            if isinstance(part, dict) and id(part) not in self._parts:
                self._parts[id(part)] = part
                pending += self._inner(part)
        new = {key for key, part in self._parts.items() if _needs_rules(part)}
        while new:
            self._with_rules |= new
            new = set()
            for key, part in self._parts.items():
                if key not in self._with_rules and self._has_inner_with_rules(part):
                    new.add(key)

    def _has_inner_with_rules(self, part: SchemaObject) -> bool:
        return any(id(inner) in self._with_rules for inner in self._inner(part))

    def _copy_definitions(self, reached: dict[str, None]) -> dict[str, Any]:
        """Return the definitions of a JSON part: a dict from name to a copy of the schema.

        `reached` contains the JSON pointers of the schemas that the part needs. It grows while the
        schemas are copied, because they may contain further references.
        """
        definitions: dict[str, Any] = {}
        while len(definitions) < len(reached):
            for pointer in list(reached):
                name = self._definition_name(pointer)
                if name not in definitions:
                    target = self.resolve(f"#{pointer}")
                    definitions[name] = self._copy(target, reached)
        return definitions

    def _definition_name(self, pointer: str) -> str:
        new_name = f"d{len(self._definitions)}"
        return self._definitions.setdefault(pointer, new_name)

    def _copy(self, part: Any, reached: dict[str, None]) -> Any:
        """Return a copy of a schema without annotations.

        References in the copy are renamed, so that they refer to the definitions of the JSON part.
        The method adds the JSON pointers of the original references to `reached`.
        """
        if not isinstance(part, dict):
            return part
        out: SchemaObject = {}
        for keyword, value in part.items():
            if keyword not in _KEPT:
                continue
            if keyword == "$ref":
                self.resolve(value)
                pointer = str(self._references.pointer(value))
                reached[pointer] = None
                out[keyword] = f"#/$defs/{self._definition_name(pointer)}"
            elif keyword in _MAPS:
                schemas: dict[str, Any] = {}
                for name, schema in value.items():
                    schemas[name] = self._copy(schema, reached)
                out[keyword] = schemas
            elif keyword in _LISTS and isinstance(value, list):
                out[keyword] = [self._copy(schema, reached) for schema in value]
            elif keyword in _SINGLE:
                out[keyword] = self._copy(value, reached)
            else:
                out[keyword] = value
        return out


def _needs_rules(part: SchemaObject) -> bool:
    """Return whether a schema needs Lark rules apart from its subschemas."""
    return not _NOT_IN_JSON.isdisjoint(part) or has_orders(part)


def _conjunction(schemas: list[SchemaObject], types: frozenset[str] | None) -> SchemaObject:
    """Return one schema for the values of the given JSON types that satisfy all `schemas`.

    The keywords that are irrelevant for these types are removed from the schemas in place. If
    `types` is None, the types are not restricted.
    """
    if types is not None:
        _remove_irrelevant_keywords(schemas, types)
    document: SchemaObject = {}
    if len(schemas) == 1:
        document = schemas[0]
    elif schemas:
        document["allOf"] = schemas
    if types is not None:
        names = sorted(types)
        document["type"] = names[0] if len(names) == 1 else names
    return document


def _remove_irrelevant_keywords(schemas: list[SchemaObject], types: frozenset[str]) -> None:
    """Remove the object keywords if `types` lacks ``object``, and others likewise."""
    irrelevant: set[str] = set()
    if types.isdisjoint(("number", "integer")):
        irrelevant.add("notMultipleOf")
    if "object" not in types:
        irrelevant |= OBJECTS
    if "array" not in types:
        irrelevant |= ARRAYS
    for schema in schemas:
        for keyword in irrelevant & schema.keys():
            del schema[keyword]


def _has_reference_below_id(root: Any) -> bool:
    """Return whether a subschema with its own base URI contains a reference.

    Such a reference may be relative to the base URI of the subschema. A subschema counts as having
    a base URI if the value of ``$id`` or ``id`` is a string.
    """
    pending = [(root, False)]
    while pending:
        part, inside = pending.pop()
        if isinstance(part, list):
            pending += [(item, inside) for item in part]
        elif isinstance(part, dict):
            has_id = isinstance(part.get("$id"), str) or isinstance(part.get("id"), str)
            inside = inside or (has_id and part is not root)
            if inside and "$ref" in part:
                return True
            pending += [(value, inside) for value in part.values()]
    return False
