"""Grammars of objects whose keys come in any order: what is behind ``key_order="any"``."""

from __future__ import annotations

from typing import Any

from ..options import Whitespace, json_options
from ..terms import Cannot, Reason, subschemas
from ..trial import trial_lark
from .rules import lark_rules

__all__ = ["in_any_order"]


Told = tuple[Reason, ...]


def in_any_order(schema: Any, whitespace: Whitespace) -> tuple[str, Told, Told]:
    """A Lark grammar for a schema that LLGuidance takes; empty if ``%json`` does it, or nothing.

    Also where, and why, keys keep the schema's order all the same: in some objects if there are
    rules, else in all; and where other keys are left out.
    """
    try:
        # Asking about each leaf costs time, and few schemas have any that nothing fits.
        for careful in (False, True):
            rules, kept, narrowed = lark_rules(schema, json_options(whitespace), careful=careful)
            objection = trial_lark(rules) if rules else ""
            if not objection:
                return rules, _located(schema, kept, _KEPT), _located(schema, narrowed, "")
            if "Unsatisfiable" not in objection:
                break
        why = Cannot("schema", objection)
    except RecursionError:
        why = Cannot("schema", "it is too deep")
    except Cannot as error:
        why = error
    return "", _located(schema, [why], _KEPT), ()


_KEPT = "keys in the schema's order only: "


def _located(schema: Any, told: list[Cannot], what: str) -> Told:
    """Each obstacle with the part of the schema that has most of it."""
    parts = subschemas(schema) if told else []
    found = []
    for why in told:
        extents = [(_extent(part, why), pointer) for pointer, part in parts]
        place = max(extents, key=lambda one: one[0])[1] if extents else "#"
        found.append(Reason(place, why.keyword, what + why.why))
    return tuple(dict.fromkeys(found))


def _extent(part: dict[str, Any], why: Cannot) -> int:
    """How much of what stands in the way is in this part of the schema."""
    value = part.get(why.keyword)
    if why.keyword == "$ref":
        return int(repr(value) in why.why)
    return len(value) if isinstance(value, (dict, list)) else 0
