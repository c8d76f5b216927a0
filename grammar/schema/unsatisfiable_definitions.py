"""Find definitions that no finite value satisfies.

LLGuidance refuses a schema if any definition that the schema reaches is unsatisfiable, even if some
values of the schema do not need this definition, for example because only an optional property
refers to it.
"""

from __future__ import annotations

from typing import Any

from graft.grammar.schema.documents import Parts, SchemaObject, subschemas
from graft.grammar.schema.llguidance_check import schema_error
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.schema.references import References, replace_references
from graft.grammar.schema.wellformed import finite_values

__all__ = ["endless_definitions", "impossible_definitions"]

_MAX_DEFINITIONS = 200  # maximum number of definitions that are checked
_SHARED = ("$schema", "$id", "id", "$defs", "definitions")


def impossible_definitions(document: SchemaObject) -> frozenset[str]:
    """Return the JSON pointers of definitions that are proved unsatisfiable.

    The document is a rewritten schema. LLGuidance also calls a definition unsatisfiable if the
    cause is in another definition to which it refers. The function therefore tests each definition
    that LLGuidance calls unsatisfiable a second time, with the schema ``true`` in place of each
    reference to any of them. This does not find a definition that is unsatisfiable only because it
    refers to another one. To find it, the caller can replace the references to the returned
    definitions with ``false`` and call the function again.
    """
    references = References(document)
    reached: set[str] = set()
    pending = _targets(document, references)
    while pending and len(reached) < _MAX_DEFINITIONS:
        pointer = pending.pop()
        if pointer not in reached:
            reached.add(pointer)
            pending += _targets(references.resolve(f"#{pointer}"), references)
    shared = {key: document[key] for key in _SHARED if key in document}
    refused = set()
    for pointer in reached - {""}:
        if _is_unsatisfiable({**shared, "$ref": f"#{pointer}"}):
            refused.add(pointer)
    found = set()
    for pointer in refused:
        target = references.resolve(f"#{pointer}")
        weakened = replace_references(target, frozenset(refused), references, True)
        if isinstance(weakened, dict):
            impossible = _is_unsatisfiable({**shared, **weakened})
        else:
            impossible = weakened is False
        if impossible:
            found.add(pointer)
    return frozenset(found)


def endless_definitions(document: Any, parts: Parts) -> frozenset[str]:
    """Return the JSON pointers of definitions that only infinitely nested values satisfy.

    An example is a definition that requires a property with the same definition. LLGuidance would
    let a model begin such a value, which can never end. `parts` are all subschemas of the document.
    """
    if not any("$ref" in part for _, part in parts):
        return frozenset()
    references = References(document)
    found = set()
    try:
        is_finite = finite_values(parts, references)
        for _, part in parts:
            pointer = references.pointer(part.get("$ref"))
            if pointer and not is_finite(references.resolve(f"#{pointer}")):
                found.add(pointer)
    except NoExactForm:  # a reference without a target, which LLGuidance reports
        return frozenset()
    return frozenset(found)


def _is_unsatisfiable(schema: SchemaObject) -> bool:
    return schema_error(schema).startswith("Unsatisfiable")


def _targets(part: Any, references: References) -> list[str]:
    """Return the JSON pointers of the targets of a schema's references, in order.

    The references in the definitions of the schema do not count.
    """
    if not isinstance(part, dict):
        return []
    body = {key: value for key, value in part.items() if key not in ("$defs", "definitions")}
    found = []
    for _, inner in subschemas(body):
        pointer = references.pointer(inner.get("$ref"))
        if pointer is None:
            continue
        try:
            references.resolve(inner["$ref"])
        except NoExactForm:
            continue
        found.append(pointer)
    return found
