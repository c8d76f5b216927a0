"""What each grammar backend makes of a JSON schema, before anything is compiled for a model.

``ENFORCEMENT`` is the knowledge by keyword; `trial` asks LLGuidance itself (its schema compiler
needs no vocabulary and takes about a millisecond); `schema_audit` knows XGrammar.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from typing import Any, Literal, NamedTuple

from .rewrite_terms import Reason, escape, word_set
from .schema_audit import unenforced_keywords

__all__ = [
    "BACKENDS", "ENFORCEMENT", "Finding", "available_backends", "compile_cost", "parser_limits",
    "preflight", "refusals", "trial", "trial_lark", "unsatisfiable",
]  # fmt: skip

Level = Literal["exact", "loose", "refused"]

#: Backends in order of preference: LLGuidance compiles in a millisecond and refuses what it does
#: not know; XGrammar precompiles masks, which string and array bounds can make very slow.
BACKENDS = ("llguidance", "xgrammar")

_BOTH = """type enum const properties required additionalProperties items minItems maxItems
    minLength maxLength pattern minimum maximum exclusiveMinimum exclusiveMaximum anyOf $ref"""
_COUNTS = "minProperties maxProperties"
_NEVER = """not if then else dependencies dependentRequired dependentSchemas contains minContains
    maxContains unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef uniqueItems"""

#: How each backend by itself treats a keyword. What the router rewrites is exact all the same.
ENFORCEMENT: dict[str, dict[Level, frozenset[str]]] = {
    "llguidance": {
        "exact": word_set(_BOTH + " multipleOf prefixItems additionalItems allOf"),
        "loose": word_set("format contentEncoding contentMediaType"),
        "refused": word_set(_NEVER + " oneOf propertyNames patternProperties " + _COUNTS),
    },
    "xgrammar": {
        "exact": word_set(_BOTH),
        "loose": word_set(
            _NEVER + " oneOf allOf format multipleOf propertyNames patternProperties prefixItems "
            "additionalItems contentEncoding contentMediaType " + _COUNTS
        ),
        "refused": frozenset(),
    },
}
_MAPS = word_set("properties patternProperties $defs definitions dependentSchemas")
_PARTS = word_set(
    """allOf anyOf oneOf prefixItems items additionalItems additionalProperties propertyNames
    contains not if then else unevaluatedItems unevaluatedProperties dependencies"""
)
_LARGE = 512  # XGrammar spells bounds out: beyond this its compile takes seconds
_KEYWORD_OF = (
    (r"Unknown format", "format"),
    (r"range: min=None", "maximum"),
    (r"float range|integer range", "minimum"),
    (r"patternPropert", "patternProperties"),
    (r"regex|lookaround", "pattern"),
    (r"Resource|Anchor|circular references|Pointer|not found", "$ref"),
    (r"oneOf", "oneOf"),
    (r"min/maxProperties", "minProperties"),
)


class Finding(NamedTuple):
    """One keyword of a schema and how a backend by itself treats it."""

    pointer: str
    keyword: str
    level: Level


def available_backends() -> tuple[str, ...]:
    """Backends that are installed, in order of preference."""
    return tuple(name for name in BACKENDS if importlib.util.find_spec(name))


def preflight(schema: Any, backend: str) -> list[Finding]:
    """Every asserting keyword with how the backend treats it when given the schema as it stands.

    ``loose`` means that the backend may let violations through, ``refused`` that it may refuse the
    schema for it: what a keyword's value decides is decided for the worse here.
    """
    table = ENFORCEMENT[backend]
    return [
        Finding(pointer, keyword, level)
        for pointer, part in subschemas(schema)
        for keyword in part
        for level, keywords in table.items()
        if keyword in keywords
    ]


def subschemas(schema: Any, at: str = "#") -> list[tuple[str, dict[str, Any]]]:
    """Every subschema that is an object, with its pointer; parents come first."""
    found: list[tuple[str, dict[str, Any]]] = []
    pending = [(at, schema)]
    while pending:
        here, part = pending.pop()
        if not isinstance(part, dict):
            continue
        found.append((here, part))
        for keyword, value in part.items():
            steps: list[tuple[Any, Any]] = []
            if isinstance(value, dict) and keyword in _MAPS:
                steps = list(value.items())
            elif isinstance(value, list) and keyword in _PARTS:
                steps = list(enumerate(value))
            elif keyword in _PARTS:
                pending.append((f"{here}/{escape(keyword)}", value))
            base = f"{here}/{escape(keyword)}"
            pending += [(f"{base}/{escape(step)}", value) for step, value in reversed(steps)]
    return found


def compile_cost(schema: Any) -> list[Reason]:
    """Bounds that make XGrammar's compilation run away."""
    return [
        Reason(pointer, keyword, f"{part[keyword]} takes XGrammar too long to compile")
        for pointer, part in subschemas(schema)
        for keyword in ("minLength", "maxLength", "minItems", "maxItems")
        if isinstance(part.get(keyword), (int, float)) and part[keyword] > _LARGE
    ]


@functools.cache
def parser_limits() -> Any:
    """LLGuidance's limits as the native worker sets them (see ``native/guide/llguidance_abi``)."""
    from llguidance import LLParserLimits  # type: ignore[import-not-found, unused-ignore]

    return LLParserLimits(
        initial_lexer_fuel=10**7, step_lexer_fuel=10**7, max_items_in_row=10**6,
        step_max_items=10**6,
    )  # fmt: skip


@functools.cache
def _llguidance() -> tuple[Any, Any]:
    """LLGuidance's matcher class, and limits for questions that may stay without an answer."""
    from llguidance import LLMatcher, LLParserLimits  # type: ignore[import-not-found, unused-ignore]

    return LLMatcher, LLParserLimits(max_grammar_size=20_000, initial_lexer_fuel=50_000)


def trial(schema: Any, *, lenient: bool = False) -> str:
    """LLGuidance's objection to a schema, empty if it takes it."""
    matcher, small = _llguidance()
    document = {} if schema is True else {"not": {}} if schema is False else schema
    options = {"whitespace_flexible": False, "lenient": lenient, "coerce_one_of": lenient}
    text = matcher.grammar_from_json_schema(json.dumps(document), overrides=options)
    limits = small if lenient else parser_limits()
    failed, messages = matcher.validate_grammar_with_warnings(text, limits=limits)
    return messages[0].split("\n")[0] if failed else ""


def trial_lark(rules: str) -> str:
    """LLGuidance's objection to a Lark grammar, empty if it takes it."""
    matcher, _ = _llguidance()
    text = json.dumps({"grammars": [{"lark_grammar": f"%llguidance {{}}\n{rules}"}]})
    failed, messages = matcher.validate_grammar_with_warnings(text, limits=parser_limits())
    return messages[0].split("\n")[0] if failed else ""


def unsatisfiable(schema: dict[str, Any]) -> bool:
    """Whether LLGuidance proves that nothing fits; what it does not know counts as fitting."""
    return trial(schema, lenient=True).startswith("Unsatisfiable")


def refusals(schema: Any, backend: str) -> list[Reason]:
    """Why a backend cannot enforce a schema exactly as it stands; empty if it can."""
    if backend == "xgrammar":
        return _xgrammar_refusals(schema)
    objection = trial(schema)
    return [_located(schema, objection)] if objection else []


def _xgrammar_refusals(schema: Any) -> list[Reason]:
    found = []
    for line in unenforced_keywords(schema):
        pointer, _, why = line.partition(": ")
        found.append(Reason(pointer, why.split(" ")[0], f"XGrammar ignores {why}"))
    for finding in preflight(schema, "xgrammar"):
        if finding.level == "loose":
            why = "XGrammar enforces it loosely or not at all"
            found.append(Reason(finding.pointer, finding.keyword, why))
    for pointer, part in subschemas(schema):
        target = part.get("$ref")
        if isinstance(target, str) and not target.startswith("#"):
            found.append(Reason(pointer, "$ref", f"{target!r} is not in this schema"))
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            bound = part.get(keyword)
            if isinstance(bound, (int, float)) and abs(bound) >= 2**63:
                found.append(Reason(pointer, keyword, f"{str(bound)[:30]} is beyond 64 bits"))
    return found + compile_cost(schema)


def _located(schema: Any, objection: str) -> Reason:
    """The innermost subschema that alone meets the same objection."""
    if objection.startswith("Unsatisfiable"):
        return Reason("#", "schema", f"allows no output ({objection})")
    keyword = _keyword_of(objection)
    shared = {
        key: schema[key] for key in ("$schema", "$id", "id", "$defs", "definitions")
        if isinstance(schema, dict) and key in schema
    }  # fmt: skip
    place = "#"
    for pointer, part in subschemas(schema)[:400]:
        inside = pointer == place or pointer.startswith(place + "/")
        if inside and keyword in part and trial({**shared, **part}) == objection:
            place = pointer
    return Reason(place, keyword, objection)


def _keyword_of(objection: str) -> str:
    named = re.search(r"(?:keys: \[\"|for ')([$A-Za-z]+)", objection)
    if named:
        return named[1]
    for pattern, keyword in _KEYWORD_OF:
        if re.search(pattern, objection):
            return keyword
    return "schema"
