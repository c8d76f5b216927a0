"""A stated grammar as one backend is to compile it: schemas routed, tags each by itself."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any, TypeVar

from graft.grammar.errors import GrammarError
from graft.grammar.schema.enforcement import BACKENDS, available_backends, ignored
from graft.grammar.schema.router import refusal, route
from graft.grammar.schema.terms import word_set
from graft.grammar.schema.wellformed import check_schema
from graft.grammar.spec import Spec, check_text, parsed

__all__ = ["json_text", "resolved", "without_hint"]

Stated = TypeVar("Stated", bound=Spec)
_HINT = " (partial=True takes the schema all the same)"


def resolved(spec: Stated, backend: str) -> Stated:
    """A grammar as an engine compiles it whose own backend has this name.

    A JSON schema that names no backend is routed to LLGuidance for ``"llguidance"``, and for
    ``"auto"`` where that is installed. XGrammar gets it as it stands, if it ignores nothing. So it
    is with the schemas of a structural tag, by the backend that is to compile it. Other grammars
    stay as they are. The last answers are kept.

    Raises
    ------
    GrammarError
        If that backend cannot enforce the schema, unless this grammar is ``partial``.
    """
    if not isinstance(spec, Spec):
        raise GrammarError(f"a grammar must be a GrammarSpec, got {spec!r:.80}")
    if spec.kind == "structural_tag" and backend in BACKENDS:
        found = _tags(replace(spec, marker=None), backend)
    elif spec.kind == "json_schema" and not spec.backend:
        found = _schema(replace(spec, marker=None), backend)
    else:
        return spec
    return replace(found, marker=spec.marker)


def without_hint(said: str) -> str:
    """A schema's refusal where none is taken in part: in a tag, or by HTTP."""
    return said.removesuffix(_HINT)


def json_text(schema: Any) -> str:
    """A schema as JSON text."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise GrammarError("JSON schema: is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"JSON schema: cannot be read: {error}") from error
    check_text("JSON schema", text)
    return text


@functools.lru_cache(maxsize=256)
def _schema(spec: Stated, backend: str) -> Stated:
    value = parsed("JSON schema", spec.text)
    try:
        if _named(backend) == "xgrammar":
            check_schema(value)
            return _for_xgrammar(spec, value)
        if spec.strict and '"allOf"' not in json.dumps(value):  # closing one would forbid another
            value = _closed(value)
        found = route(
            value,
            key_order=spec.key_order,
            whitespace=spec.whitespace,
            assert_formats=spec.assert_formats,
        )
        text = json_text(found.schema)
    except RecursionError:
        raise GrammarError("JSON schema: is nested too deeply") from None
    if found.backend is None or not (found.exact or spec.partial):
        hint = "" if found.backend is None else _HINT
        raise GrammarError(f"JSON schema: {found.refusal()}{hint}")
    if spec.key_order == "any" and found.ordered:
        raise GrammarError(f"JSON schema: {found.ordered[0]}")
    return replace(
        spec,
        text=text,
        partial=not found.exact,
        backend=found.backend,
        rules=found.rules,
        source=spec.text,
    )


_OPEN = word_set(
    """additionalProperties patternProperties unevaluatedProperties allOf anyOf oneOf not if then
    else $ref dependentSchemas"""
)


def _closed(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` where an object merely lists properties."""
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(out.get(key), dict):
            out[key] = {name: _closed(value) for name, value in out[key].items()}
    for key in ("items", "additionalProperties", "contains"):
        if key in out:
            out[key] = _closed(out[key])
    for key in ("prefixItems", "items", "anyOf", "oneOf"):
        combined = key in ("anyOf", "oneOf") and "properties" in out
        if isinstance(out.get(key), list) and not combined:
            out[key] = [_closed(value) for value in out[key]]
    if "properties" in out and not out.keys() & _OPEN:
        out["additionalProperties"] = False
    return out


def _named(backend: str) -> str:
    """The backend that a name stands for, which is installed."""
    available = available_backends()
    if backend == "auto" and available:
        return available[0]
    if backend != "auto" and backend not in BACKENDS:
        raise GrammarError(
            f"grammar backend {backend!r} is unknown; use auto, {', '.join(BACKENDS)}"
        )
    if backend not in available:
        raise GrammarError(f"grammar backend {backend!r} is not available here")
    return backend


def _for_xgrammar(spec: Stated, value: Any) -> Stated:
    """For XGrammar unrouted: the schema as it stands."""
    if spec.key_order == "any":
        raise GrammarError("JSON schema: XGrammar writes keys in the schema's order only")
    if spec.whitespace == "compact":
        raise GrammarError("JSON schema: XGrammar writes spaces where the value is left free")
    if not spec.partial and (found := ignored(value)):
        raise GrammarError(f"JSON schema: {refusal(found)}{_HINT}")
    return replace(spec, backend="xgrammar", strict=spec.strict is not False)


@functools.lru_cache(maxsize=256)
def _tags(spec: Stated, backend: str) -> Stated:
    """A structural tag whose tags' schemas are what ``backend`` is to compile.

    Objects in them are closed as with ``strict``; XGrammar, which gets them as they stand, does so
    itself.
    """
    parts = json.loads(spec.text)
    for tag in parts["tags"]:
        try:
            one = Spec(
                "json_schema", json_text(tag["schema"]), strict=True, whitespace=spec.whitespace
            )
            tag["schema"] = json.loads(_schema(one, backend).text)
        except GrammarError as error:
            said = f"structural tag {tag['begin']!r}: {without_hint(str(error))}"
            raise GrammarError(said) from error
    return replace(spec, text=json.dumps(parts, ensure_ascii=False))
