"""Make LLGuidance compare property names independently of their spelling.

LLGuidance allows any JSON string as the name of an additional property, except for the literal
texts of the listed names, such as ``"id"``. A JSON string can also contain escape sequences, so
LLGuidance would allow ``"\\u0069d"`` as an additional name although it means ``"id"``.
`with_one_spelling` returns an equivalent schema in which each character of a compared name has only
one spelling.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from graft.grammar.schema.documents import (
    Parts,
    SchemaObject,
    copy_json,
    required_of,
    subschemas,
    types_of,
)
from graft.grammar.schema.llguidance_options import OPTIONS, PLAIN_ESCAPES
from graft.grammar.schema.reasons import Reason

__all__ = ["CONTROL", "EVERY_NAME", "NO_CONTROL", "OneSpelling", "with_one_spelling"]

#: Control characters without a short escape sequence such as ``\n``.
CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")

#: Pattern that matches the strings without characters of `CONTROL`.
NO_CONTROL = r"^[^\x00-\x07\x0B\x0E-\x1F\x7F]*$"

#: Pattern that every name matches. The pattern "" is equivalent, but LLGuidance then needs about 25
#: times as long for the mask of a name, because it does not see that most tokens are legal.
EVERY_NAME = r"^(.|\n)*$"
_ESCAPED = re.compile("[\x00-\x1f\x7f]")


class OneSpelling(NamedTuple):
    """Result of `with_one_spelling`: a schema in which each compared name has only one spelling.

    LLGuidance compares property names with the names and the patterns that the schema lists.

    Attributes
    ----------
    schema
        The rewritten schema.
    narrowed
        Descriptions of the values that the original schema allows and the rewritten one excludes.
    """

    schema: Any
    narrowed: tuple[Reason, ...] = ()


def with_one_spelling(schema: Any, parts: Parts | None = None) -> OneSpelling:
    r"""Return the form of a rewritten schema in which LLGuidance compares names correctly.

    Otherwise, LLGuidance would allow a listed name as an additional name if one of its characters
    is written as an escape sequence. In names that a pattern constrains, LLGuidance allows no
    unnecessary escape sequences. If additional properties may have any value, the returned schema
    therefore allows them with a pattern that every name matches. If additional properties have a
    schema, or if the schema has patterns, this is not possible, because LLGuidance only accepts
    disjoint patterns. The returned schema then disables ``\u`` escapes in all strings. This
    excludes the control characters that have no other escape sequence.

    `parts` are all subschemas of the schema; None if the caller does not have them.
    """
    if parts is None:
        parts = subschemas(schema)
    found = [(pointer, part) for pointer, part in parts if _has_ambiguous_names(part)]
    if not found:
        return OneSpelling(schema)
    if all(_allows_any_addition(part) for _, part in found) and not _may_refuse_every_name(parts):
        new = copy_json(schema)
        for _, part in subschemas(new):
            if _has_ambiguous_names(part):
                part.pop("additionalProperties", None)
                part.pop("patternProperties", None)
                # LLGuidance reads the two keywords together only if they are adjacent.
                part["patternProperties"] = {EVERY_NAME: {}}
                part["additionalProperties"] = False
        return OneSpelling(new)
    pointer, part = found[0]
    keyword = "patternProperties" if part.get("patternProperties") else "additionalProperties"
    why = "strings contain no control characters except those that JSON writes as \\b\\t\\n\\f\\r"
    narrowed = Reason(pointer, keyword, why)
    new = {**schema, OPTIONS: PLAIN_ESCAPES}
    return OneSpelling(new, (narrowed,))


def _has_ambiguous_names(part: SchemaObject) -> bool:
    """Return whether LLGuidance compares ambiguous names in the objects that `part` describes.

    A name is ambiguous if JSON can write it in several ways, with different escape sequences.
    """
    if "object" not in types_of(part):
        return False
    names = [*part.get("properties", ()), *required_of(part)]
    patterns = part.get("patternProperties")
    if part.get("additionalProperties") is False:
        return bool(patterns) and any(map(_ESCAPED.search, names))
    return bool(names or patterns)


def _allows_any_addition(part: SchemaObject) -> bool:
    """Return whether additional properties may have any value, and listed names need no escapes.

    The listed names are those in ``properties`` and ``required``. Control characters need escapes.
    """
    if part.get("additionalProperties", True) not in (True, {}):
        return False
    names = [*part.get("properties", ()), *required_of(part)]
    return not any(map(_ESCAPED.search, names))


def _may_refuse_every_name(parts: Parts) -> bool:
    """Return whether LLGuidance may refuse a schema to which the pattern `EVERY_NAME` is added.

    This is the case if the schema already has patterns, or if subschemas limit the number of
    properties and forbid additional properties. `parts` are all subschemas with their pointers.
    """
    counts = closed = False
    for _, part in parts:
        if part.get("patternProperties"):
            return True
        counts |= "minProperties" in part or "maxProperties" in part
        closed |= part.get("additionalProperties") is False
    return counts and closed
