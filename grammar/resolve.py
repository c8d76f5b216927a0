"""Select the backend of a grammar, and convert JSON schemas to the form that it compiles."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any, TypeVar

from graft.grammar.errors import GrammarError
from graft.grammar.schema.enforcement import BACKENDS, ignored_keywords
from graft.grammar.schema.router import refusal, route
from graft.grammar.schema.terms import word_set
from graft.grammar.schema.wellformed import check_schema
from graft.grammar.schema.xgrammar_strings import unsafe_strings, without_unsafe_strings
from graft.grammar.spec import Spec, check_text, parse_json
from graft.grammar.structural.formats import (
    Format,
    LoweringError,
    convert_format,
    parse_format,
    plain_format,
)
from graft.grammar.structural.lark import lark_text
from graft.grammar.structural.xgrammar import check_xgrammar_format
from graft.grammar.usable import require_usable, unusable_reason, usable_backends

__all__ = ["check_backend", "json_text", "resolve_spec", "select_backend", "without_partial_hint"]

AnySpec = TypeVar("AnySpec", bound=Spec)
_PARTIAL_HINT = " (pass partial=True to enforce the rest of the schema)"


def resolve_spec(spec: AnySpec, backend: str) -> AnySpec:
    """Return the specification in the form that an engine with this backend compiles.

    JSON schemas and the schemas of structural tags are converted as follows. For LLGuidance, the
    router rewrites a schema into an equivalent schema where necessary. For XGrammar, a schema is
    left unchanged, and a schema with a keyword that XGrammar would ignore is refused. ``"auto"``
    selects LLGuidance if it can be used. The schemas of a structural format are converted in the
    same way; ``"auto"`` then selects the first usable backend that supports the whole format.
    Grammars of other kinds, and grammars that have already been routed, are returned unchanged.

    The running time of this function depends on the schema and is not bounded. Untrusted schemas
    should therefore be resolved in a child process. The most recent results are cached.

    Parameters
    ----------
    spec
        The grammar.
    backend
        Backend of the engine: ``"auto"``, ``"llguidance"`` or ``"xgrammar"``. If the specification
        of a JSON schema names a backend, that backend is used instead.

    Raises
    ------
    GrammarError
        The backend is unknown or not installed, or cannot enforce the schema and the
        specification is not `partial`.
    """
    if not isinstance(spec, Spec):
        raise GrammarError(f"a grammar must be a GrammarSpec, got {spec!r:.80}")
    if spec.kind == "structural_tag" and backend in BACKENDS:
        resolved = _resolve_tags(replace(spec, marker=None), backend)
    elif spec.kind == "structural_format" and not spec.source:
        plain = replace(spec, marker=None, backend="")
        resolved = _resolve_format(plain, spec.backend or backend)
    elif spec.kind == "json_schema" and not spec.source:
        plain = replace(spec, marker=None, backend="")
        resolved = _resolve_schema(plain, spec.backend or backend)
    else:
        return spec
    return replace(resolved, marker=spec.marker)


def select_backend(spec: Spec, backend: str) -> str:
    """Return the name of the backend that compiles a grammar in an engine.

    Parameters
    ----------
    spec
        A grammar other than a structural format, for which `resolve_spec` selects the backend.
    backend
        Backend of the engine: ``"auto"``, ``"llguidance"`` or ``"xgrammar"``.

    Raises
    ------
    GrammarError
        The name is unknown, or no backend can be used.
    """
    name = spec.backend or backend
    check_backend(name)
    if name != "auto":
        return name
    # EBNF is XGrammar's own notation.
    if spec.kind == "ebnf" and not unusable_reason("xgrammar"):
        return "xgrammar"
    for found in usable_backends():
        return found
    raise GrammarError(f"no grammar backend can be used: {unusable_reason(BACKENDS[0])}")


def without_partial_hint(message: str) -> str:
    """Return an error message without the hint to pass ``partial=True``.

    The function is for interfaces without this option, such as structural tags and the HTTP API.
    """
    return message.removesuffix(_PARTIAL_HINT)


def json_text(schema: Any) -> str:
    """Return a schema as JSON text."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise GrammarError("JSON schema: is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"JSON schema: cannot be read: {error}") from error
    check_text("JSON schema", text)
    return text


def check_backend(backend: str) -> None:
    """Raise `GrammarError` unless `backend` is ``"auto"`` or the name of a backend."""
    if backend != "auto" and backend not in BACKENDS:
        raise GrammarError(
            f"grammar backend {backend!r} is unknown; use auto, {', '.join(BACKENDS)}"
        )


@functools.lru_cache(maxsize=256)
def _resolve_schema(spec: AnySpec, backend: str, raw: bool = False) -> AnySpec:
    """Resolve a JSON schema that names no backend.

    Parameters
    ----------
    spec
        The schema.
    backend
        As in `resolve_spec`.
    raw
        As in `unsafe_strings`.
    """
    value = parse_json("JSON schema", spec.text)
    try:
        name = select_backend(spec, backend)
        require_usable(name)
        if name == "xgrammar":
            check_schema(value)
            return _resolve_for_xgrammar(spec, value, raw)
        # additionalProperties=false in one schema of an allOf would forbid the properties that only
        # the other schemas define.
        if spec.strict and '"allOf"' not in json.dumps(value):
            value = _close_objects(value)
        found = route(
            value,
            key_order=spec.key_order,
            whitespace=spec.whitespace,
            assert_formats=spec.assert_formats,
        )
        text = json_text(found.schema)
    except RecursionError:
        raise GrammarError("JSON schema: is nested too deeply") from None
    if found.backend is None:
        raise GrammarError(f"JSON schema: {found.refusal()}")
    if not found.exact and not spec.partial:
        raise GrammarError(f"JSON schema: {found.refusal()}{_PARTIAL_HINT}")
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


_COMBINING_KEYWORDS = word_set(
    """additionalProperties patternProperties unevaluatedProperties allOf anyOf oneOf not if then
    else $ref dependentSchemas"""
)


def _close_objects(schema: Any) -> Any:
    """Return the schema with ``additionalProperties: false`` added to plain object schemas.

    An object schema is plain if it has ``properties`` and none of `_COMBINING_KEYWORDS`.
    """
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        schemas = out.get(keyword)
        if isinstance(schemas, dict):
            out[keyword] = {name: _close_objects(part) for name, part in schemas.items()}
    for keyword in ("items", "additionalProperties", "contains"):
        if keyword in out:
            out[keyword] = _close_objects(out[keyword])
    for keyword in ("prefixItems", "items", "anyOf", "oneOf"):
        extends_properties = keyword in ("anyOf", "oneOf") and "properties" in out
        if isinstance(out.get(keyword), list) and not extends_properties:
            out[keyword] = [_close_objects(part) for part in out[keyword]]
    if "properties" in out and not out.keys() & _COMBINING_KEYWORDS:
        out["additionalProperties"] = False
    return out


def _resolve_for_xgrammar(spec: AnySpec, value: Any, raw: bool) -> AnySpec:
    """Resolve a JSON schema that XGrammar compiles unchanged.

    A partial schema loses the keywords with which XGrammar would write text that is not JSON.
    """
    if spec.key_order == "any":
        raise GrammarError("JSON schema: XGrammar writes keys in the schema's order only")
    if spec.whitespace == "compact":
        raise GrammarError(
            "JSON schema: whitespace 'compact' is not supported by XGrammar, which writes spaces "
            "in values that the schema does not constrain"
        )
    text = spec.text
    if spec.partial:
        text = json_text(without_unsafe_strings(value, spec.assert_formats))
    else:
        unsafe = unsafe_strings(value, spec.assert_formats, raw=raw)
        ignored = [*ignored_keywords(value), *(found.reason for found in unsafe)]
        if ignored:
            raise GrammarError(f"JSON schema: {refusal(ignored)}{_PARTIAL_HINT}")
    return replace(spec, text=text, backend="xgrammar", strict=spec.strict is not False)


@functools.lru_cache(maxsize=256)
def _resolve_tags(spec: AnySpec, backend: str) -> AnySpec:
    """Resolve the schemas of a structural tag for a backend.

    The schemas of tags are strict, that is, their objects allow no additional properties. XGrammar
    receives the schemas unchanged, because its strict mode enforces this rule.
    """
    structural_tag = json.loads(spec.text)
    for tag in structural_tag["tags"]:
        try:
            content = Spec(
                "json_schema", json_text(tag["schema"]), strict=True, whitespace=spec.whitespace
            )
            tag["schema"] = json.loads(_resolve_schema(content, backend).text)
        except GrammarError as error:
            reason = without_partial_hint(str(error))
            raise GrammarError(f"structural_tag: {tag['begin']!r}: {reason}") from error
    return replace(spec, text=json.dumps(structural_tag, ensure_ascii=False))


@functools.lru_cache(maxsize=256)
def _resolve_format(spec: AnySpec, backend: str) -> AnySpec:
    """Resolve a structural format for a backend, or for the first one that supports the format."""
    check_backend(backend)
    names = BACKENDS if backend == "auto" else (backend,)
    form = parse_format(parse_json("structural format", spec.text))
    reasons = []
    for name in names:
        try:
            require_usable(name)
            resolved = convert_format(form, functools.partial(_with_routed_schema, spec, name))
            if name == "llguidance":
                lark_text(resolved, spec.whitespace)
            else:
                check_xgrammar_format(resolved)
        except GrammarError as error:
            reasons.append(str(error))
            continue
        text = json.dumps(plain_format(resolved), ensure_ascii=False)
        return replace(spec, text=text, backend=name, source=spec.text)
    raise GrammarError("; ".join(dict.fromkeys(reasons)))


def _with_routed_schema(spec: Spec, backend: str, form: Format) -> Format:
    """Return a format with the JSON schema that the backend compiles."""
    if form["type"] != "json_schema":
        return form
    content = Spec(
        "json_schema",
        json_text(form["json_schema"]),
        strict=form["strict"],
        whitespace=spec.whitespace,
    )
    try:
        routed = _resolve_schema(content, backend, form["style"] != "json")
    except GrammarError as error:
        raise LoweringError(without_partial_hint(str(error))) from error
    return {**form, "json_schema": json.loads(routed.text)}
