"""Select the backend of a grammar, and convert grammars to the form that the backend compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from graft.grammar.errors import GrammarError, UnsupportedFormatError
from graft.grammar.schema.documents import word_set
from graft.grammar.schema.keyword_support import BACKENDS, ignored_keywords
from graft.grammar.schema.router import automaton_form, refusal, route
from graft.grammar.schema.wellformed import check_schema
from graft.grammar.schema.xgrammar_strings import unsafe_strings, without_unsafe_strings
from graft.grammar.spec import KeyOrder, Spec, Whitespace, check_spec, json_text, parse_json
from graft.grammar.structural.formats import Format, LoweringError, convert_format, parse_format
from graft.grammar.structural.lark import lark_text
from graft.grammar.structural.xgrammar import check_xgrammar_format
from graft.grammar.usable import require_usable, unusable_reason, usable_backends

__all__ = [
    "ResolvedGrammar",
    "check_backend",
    "resolve_for_automaton",
    "resolve_for_backend",
    "resolve_spec",
    "strict_schema",
    "without_partial_hint",
]

_TOO_DEEP = "JSON schema: is nested too deeply"
_PARTIAL_HINT = " (pass partial=True to enforce the rest of the schema)"


@dataclass(frozen=True)
class ResolvedGrammar:
    """A grammar in the form that one backend compiles.

    Attributes
    ----------
    spec
        The grammar as the user specified it.
    backend
        Name of the backend.
    content
        Input of the backend. A JSON schema is rewritten; a structural format is as `parse_format`
        returns it; a structural tag and a list of choices are parsed JSON. For grammars of the
        other kinds, the text of the specification.
    partial
        Whether outputs may violate a part of the JSON schema.
    text
        The JSON schema as the JSON text that the backend reads; empty for grammars of the other
        kinds and for the result of `resolve_for_automaton`. For LLGuidance, the text includes
        LLGuidance's options, and LLGuidance accepts the text.
    rules
        Lark grammar that LLGuidance compiles instead of `content`; empty if `content` is compiled.
    unique
        As in `Route`.
    """

    spec: Spec
    backend: str
    content: Any
    partial: bool = False
    text: str = ""
    rules: str = ""
    unique: Any = None


def resolve_spec(spec: Spec, backend: str) -> ResolvedGrammar:
    """Return a grammar in the form that an engine with this backend compiles.

    JSON schemas and the schemas of structural tags are converted as follows. For LLGuidance, a
    schema is rewritten into an equivalent schema where necessary. For XGrammar, a schema is left
    unchanged, and a schema with a keyword that XGrammar would ignore is refused. ``"auto"``
    selects LLGuidance if it can be used. The schemas of a structural format are converted in the
    same way; ``"auto"`` then selects the first usable backend that supports the whole format.

    The running time of this function depends on the schema and is not bounded. Untrusted schemas
    should therefore be resolved in a child process.

    Parameters
    ----------
    spec
        The grammar.
    backend
        Backend of the engine: ``"auto"``, ``"llguidance"`` or ``"xgrammar"``. If the specification
        names a backend, that backend is used instead.

    Raises
    ------
    GrammarError
        The backend is unknown or not installed, or cannot enforce the grammar and the
        specification is not `partial`.
    """
    reasons = []
    for name in candidate_backends(spec, backend):
        try:
            return resolve_for_backend(spec, name)
        except UnsupportedFormatError as error:
            reasons.append(str(error))
    raise GrammarError("; ".join(dict.fromkeys(reasons)))


def resolve_for_backend(
    spec: Spec, name: str, *, unique_items: Callable[[Any], Any] | None = None
) -> ResolvedGrammar:
    """Return a grammar in the form that the backend with this name compiles; see `resolve_spec`.

    `unique_items` is as in `route`, for LLGuidance.

    Raise `GrammarError` if the grammar is invalid, the backend cannot enforce it, or the backend
    cannot be used. In the last two cases, the error for a structural format is the subclass
    `UnsupportedFormatError`.
    """
    if spec.kind == "structural_format":
        return _resolve_format(spec, name)
    require_usable(name)
    if spec.kind == "json_schema":
        value = parse_json("JSON schema", spec.text)
        found = _resolve_schema(value, _options_of(spec), name, unique_items=unique_items)
        text = found.text or spec.text
        return ResolvedGrammar(
            spec, name, found.schema, found.partial, text, found.rules, found.unique
        )
    if spec.kind == "structural_tag":
        return ResolvedGrammar(spec, name, _resolve_tags(spec, name))
    if spec.kind == "choice":
        return ResolvedGrammar(spec, name, parse_json("choice", spec.text))
    return ResolvedGrammar(spec, name, spec.text)


def resolve_for_automaton(spec: Spec) -> ResolvedGrammar | None:
    """Return a JSON schema in the form that graft's automata enforce; None if there is none.

    The form may have keywords that no backend enforces. The caller must enforce ``uniqueItems``.
    Raise `GrammarError` if the specification contains no JSON schema.
    """
    value = parse_json("JSON schema", spec.text)
    try:
        form = automaton_form(
            strict_schema(value) if spec.strict else value,
            key_order=spec.key_order,
            assert_formats=spec.assert_formats,
        )
    except RecursionError:
        raise GrammarError(_TOO_DEEP) from None
    return None if form is None else ResolvedGrammar(spec, "llguidance", form.schema)


def candidate_backends(spec: Spec, backend: str) -> tuple[str, ...]:
    """Return the names of the backends that may compile a grammar, in order of preference.

    The arguments are those of `resolve_spec`. There are several names only if the grammar is a
    structural format and the backend is ``"auto"``; the caller then uses the first backend that
    supports the whole format. Raise `GrammarError` if `spec` is not a specification, if the backend
    is unknown, or if no backend can be used.
    """
    check_spec(spec)
    name = spec.backend or backend
    check_backend(name)
    if name != "auto":
        return (name,)
    if spec.kind == "structural_format":
        return BACKENDS
    # XGrammar is preferred, because EBNF is XGrammar's own notation.
    if spec.kind == "ebnf" and not unusable_reason("xgrammar"):
        return ("xgrammar",)
    for found in usable_backends():
        return (found,)
    raise GrammarError(f"no grammar backend can be used: {unusable_reason(BACKENDS[0])}")


def without_partial_hint(message: str) -> str:
    """Return an error message without the hint to pass ``partial=True``.

    Interfaces that do not have this option, such as structural tags and the HTTP API, remove the
    hint.
    """
    return message.removesuffix(_PARTIAL_HINT)


def check_backend(backend: str) -> None:
    """Raise `GrammarError` unless `backend` is ``"auto"`` or the name of a backend."""
    if backend != "auto" and backend not in BACKENDS:
        raise GrammarError(
            f"grammar backend {backend!r} is unknown; use auto, {', '.join(BACKENDS)}"
        )


class _SchemaOptions(NamedTuple):
    """Options of a JSON schema; see `Spec`."""

    whitespace: Whitespace
    strict: bool | None
    partial: bool = False
    key_order: KeyOrder = "schema"
    assert_formats: bool | None = None


def _options_of(spec: Spec) -> _SchemaOptions:
    return _SchemaOptions(
        spec.whitespace, spec.strict, spec.partial, spec.key_order, spec.assert_formats
    )


class _ResolvedSchema(NamedTuple):
    """A JSON schema in the form that a backend compiles.

    `schema` is the rewritten schema, the later `ResolvedGrammar.content`. `text` is `schema` as
    JSON text; it is empty if the schema has not been changed. `partial`, `rules` and `unique` are
    the fields of the same name of `ResolvedGrammar`.
    """

    schema: Any
    partial: bool
    text: str = ""
    rules: str = ""
    unique: Any = None


def _resolve_schema(
    value: Any,
    options: _SchemaOptions,
    name: str,
    *,
    raw: bool = False,
    unique_items: Callable[[Any], Any] | None = None,
) -> _ResolvedSchema:
    """Convert a parsed JSON schema to the form that the backend `name` compiles.

    `raw` is True if the schema is part of a structural format whose ``style`` writes the strings of
    the outermost object as plain text, not as JSON; see `unsafe_strings`. `unique_items` is as in
    `route`. Raise `GrammarError` if
    the backend cannot enforce the schema.
    """
    try:
        require_usable(name)
        if name == "xgrammar":
            check_schema(value)
            return _resolve_for_xgrammar(value, options, raw)
        if options.strict:
            value = strict_schema(value)
        found = route(
            value,
            key_order=options.key_order,
            whitespace=options.whitespace,
            assert_formats=options.assert_formats,
            unique_items=unique_items,
        )
    except RecursionError:
        raise GrammarError(_TOO_DEEP) from None
    if found.backend is None:
        raise GrammarError(f"JSON schema: {found.refusal()}")
    if not found.exact and not options.partial:
        raise GrammarError(f"JSON schema: {found.refusal()}{_PARTIAL_HINT}")
    if options.key_order == "any" and found.ordered:
        raise GrammarError(f"JSON schema: {found.ordered[0]}")
    return _ResolvedSchema(found.schema, not found.exact, found.text, found.rules, found.unique)


def strict_schema(schema: Any) -> Any:
    """Return the schema that is enforced for a parsed JSON schema with ``strict=True``."""
    # additionalProperties=false in one schema of an allOf would forbid the properties that only the
    # other schemas define.
    return schema if _contains_text(schema, "allOf") else _close_objects(schema)


def _contains_text(value: Any, text: str) -> bool:
    """Return whether a JSON value contains a text as a key or as a value."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            if text in part:
                return True
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)
        elif part == text:
            return True
    return False


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


def _resolve_for_xgrammar(value: Any, options: _SchemaOptions, raw: bool) -> _ResolvedSchema:
    """Return a JSON schema in the form that XGrammar compiles.

    With some keywords, XGrammar would allow text that is not JSON. If the option `partial` is set,
    the function removes or replaces these keywords. Otherwise, it raises `GrammarError` for a
    schema with such keywords or with keywords that XGrammar ignores, and returns any other schema
    unchanged. `raw` is as in `_resolve_schema`.
    """
    if options.key_order == "any":
        raise GrammarError("JSON schema: XGrammar writes keys in the schema's order only")
    if options.whitespace == "compact":
        raise GrammarError(
            "JSON schema: whitespace 'compact' is not supported by XGrammar, which writes spaces "
            "in values that the schema does not constrain"
        )
    if options.partial:
        safe = without_unsafe_strings(value, options.assert_formats)
        return _ResolvedSchema(safe, True, json_text(safe))
    unsafe = unsafe_strings(value, options.assert_formats, raw=raw)
    ignored = [*ignored_keywords(value), *(found.reason for found in unsafe)]
    if ignored:
        raise GrammarError(f"JSON schema: {refusal(ignored)}{_PARTIAL_HINT}")
    return _ResolvedSchema(value, False)


def _resolve_tags(spec: Spec, name: str) -> Any:
    """Return the structural tag of `spec` with the schemas that the backend `name` compiles.

    The schemas of tags are strict, that is, their objects allow no additional properties. XGrammar
    receives the schemas unchanged, because its strict mode enforces this rule.
    """
    structural_tag = parse_json("structural tag", spec.text)
    options = _SchemaOptions(spec.whitespace, strict=True)
    for tag in structural_tag["tags"]:
        try:
            found = _resolve_schema(tag["schema"], options, name)
        except GrammarError as error:
            reason = without_partial_hint(str(error))
            raise GrammarError(f"structural_tag: {tag['begin']!r}: {reason}") from error
        tag["schema"] = found.schema
        tag["text"] = found.text
    return structural_tag


def _resolve_format(spec: Spec, name: str) -> ResolvedGrammar:
    """Convert the structural format of `spec` to the form that the backend `name` compiles."""
    form = parse_format(parse_json("structural format", spec.text))
    rules = ""
    try:
        require_usable(name)
        resolved = convert_format(form, functools.partial(_with_resolved_schema, spec, name))
        if name == "llguidance":
            rules = lark_text(resolved, spec.whitespace)
        else:
            check_xgrammar_format(resolved)
    except GrammarError as error:
        raise UnsupportedFormatError(str(error)) from error
    return ResolvedGrammar(spec, name, resolved, rules=rules)


def _with_resolved_schema(spec: Spec, name: str, form: Format) -> Format:
    """Replace the schema of a ``json_schema`` format with the schema that the backend compiles.

    The result has the additional field ``text``, the schema as JSON text. Formats of other types
    are returned unchanged.
    """
    if form["type"] != "json_schema":
        return form
    options = _SchemaOptions(spec.whitespace, form["strict"])
    try:
        found = _resolve_schema(form["json_schema"], options, name, raw=form["style"] != "json")
    except GrammarError as error:
        raise LoweringError(without_partial_hint(str(error))) from error
    return {**form, "json_schema": found.schema, "text": found.text}
