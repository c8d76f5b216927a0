"""Orders of an object's keys: which schemas LLGuidance can be given with any, and how."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from .rules import any_order
from .leaves import Leaves
from ..enforcement import subschemas, trial_lark
from ..terms import Cannot, Reason

__all__ = ["AnyOrder", "has_key_orders", "in_any_order", "json_options"]

_KEPT = 32  # a schema is compiled right after it is routed


@dataclass(frozen=True)
class AnyOrder:
    """A schema for objects whose keys come in any order.

    Attributes
    ----------
    rules
        A Lark grammar; empty if LLGuidance's own compiler of schemas does it, or nothing does.
    kept
        Where, and why, keys keep the schema's order all the same: in some objects if there are
        rules, else in all.
    """

    rules: str = ""
    kept: tuple[Reason, ...] = ()


def json_options(any_whitespace: bool) -> dict[str, Any]:
    """LLGuidance's options for a schema."""
    options: dict[str, Any] = {"whitespace_flexible": any_whitespace}
    if not any_whitespace:
        options |= {"item_separator": ", ", "key_separator": ": "}
    return options


def has_key_orders(schema: Any) -> bool:
    """Whether a schema allows objects whose keys can be put in several orders."""
    try:
        return Leaves(schema, {}, careful=False).has_objects(schema)
    except Cannot:  # a reference to elsewhere
        return True


@functools.lru_cache(maxsize=_KEPT)
def in_any_order(text: str, any_whitespace: bool) -> AnyOrder:
    """The grammar for a schema that LLGuidance takes, as JSON text. The last answers are kept."""
    schema, options = json.loads(text), json_options(any_whitespace)
    try:
        # Asking about each leaf costs time, and few schemas have any that nothing fits.
        for careful in (False, True):
            rules, kept = any_order(schema, options, careful=careful)
            objection = trial_lark(rules) if rules else ""
            if not objection:
                return AnyOrder(rules, _located(schema, kept))
            if "Unsatisfiable" not in objection:
                break
        why = Cannot("schema", objection)
    except RecursionError:
        why = Cannot("schema", "it is too deep")
    except Cannot as error:
        why = error
    return AnyOrder("", _located(schema, (why,)))


def _located(schema: Any, kept: tuple[Cannot, ...]) -> tuple[Reason, ...]:
    """Each obstacle with the part of the schema that has most of it."""
    parts = subschemas(schema) if kept else []
    found = []
    for why in kept:
        extents = [(_extent(part, why), pointer) for pointer, part in parts]
        place = max(extents, key=lambda one: one[0])[1] if extents else "#"
        text = f"keys in the schema's order only: {why.why}"
        found.append(Reason(place, why.keyword, text))
    return tuple(dict.fromkeys(found))


def _extent(part: dict[str, Any], why: Cannot) -> int:
    """How much of what stands in the way is in this part of the schema."""
    value = part.get(why.keyword)
    if why.keyword == "$ref":
        return int(repr(value) in why.why)
    return len(value) if isinstance(value, (dict, list)) else 0
