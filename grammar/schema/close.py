"""Objects closed to properties that their schema does not list."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["close_objects"]

_COMBINING = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "dependentSchemas")
)


def close_objects(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` where an object lists its properties.

    An object that says anything about further properties is left as it is, and so is every object
    of a schema that combines schemas with ``allOf``: closing one part would forbid what another
    part requires.
    """
    if '"allOf"' in json.dumps(schema):
        return schema
    return _close(schema)


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(out.get(key), dict):
            out[key] = {name: _close(value) for name, value in out[key].items()}
    for key in ("items", "additionalProperties", "contains"):
        if key in out:
            out[key] = _close(out[key])
    for key in ("prefixItems", "items", "anyOf", "oneOf"):
        if isinstance(out.get(key), list):
            combined = key in ("anyOf", "oneOf") and "properties" in out
            out[key] = out[key] if combined else [_close(value) for value in out[key]]
    says = ("additionalProperties", "patternProperties", "unevaluatedProperties")
    if "properties" in out and not any(key in out for key in says) and not _COMBINING & set(out):
        out["additionalProperties"] = False
    return out
