"""LLGuidance's own errors for schemas and grammars. No vocabulary is needed."""

from __future__ import annotations

import json
import re
from typing import Any

from graft.grammar.schema.terms import Reason, subschemas

__all__ = ["is_unsatisfiable", "lark_error", "schema_error", "schema_errors", "validate"]

#: Equal to the limits of the native worker (see ``native/guide/llguidance_abi``).
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 10**7,
    "step_lexer_fuel": 10**7,
    "max_items_in_row": 10**6,
    "step_max_items": 10**6,
}
#: For proofs of unsatisfiability, which may remain undecided.
_SMALL_LIMITS: dict[str, Any] = {"max_grammar_size": 20_000, "initial_lexer_fuel": 50_000}
_MAX_SEARCHED = 400  # subschemas in which the cause of an error is searched
#: Patterns of error messages and the keyword that causes them.
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


def validate(grammar: dict[str, Any], limits: dict[str, Any] = _LIMITS) -> tuple[bool, list[str]]:
    """Return whether LLGuidance refuses a grammar, and its messages."""
    from llguidance import LLMatcher, LLParserLimits  # type: ignore[import-not-found, unused-ignore]

    text = json.dumps({"grammars": [grammar]})
    return LLMatcher.validate_grammar_with_warnings(text, limits=LLParserLimits(**limits))


def schema_error(schema: Any, *, lenient: bool = False) -> str:
    """Return LLGuidance's error for a schema; empty if it accepts the schema.

    Parameters
    ----------
    schema
        Parsed JSON schema.
    lenient
        Whether LLGuidance ignores unsupported keywords, and its limits are low.
    """
    document = schema
    if schema is True:
        document = {}
    elif schema is False:
        document = {"not": {}}
    options = {"whitespace_flexible": False, "lenient": lenient, "coerce_one_of": lenient}
    grammar = {"json_schema": {**document, "x-guidance": options}}
    limits = _SMALL_LIMITS if lenient else _LIMITS
    return _first_error(*validate(grammar, limits))


def lark_error(rules: str) -> str:
    """Return LLGuidance's error for a Lark grammar; empty if it accepts the grammar."""
    return _first_error(*validate({"lark_grammar": f"%llguidance {{}}\n{rules}"}))


def _first_error(refused: bool, messages: list[str]) -> str:
    if not refused:
        return ""
    first, *details = messages[0].split("\n")
    # an error of a regular expression follows an excerpt of it
    reasons = [line for line in details if line.startswith("error: ")]
    return f"{first} {reasons[0].removeprefix('error: ')}" if reasons else first


def is_unsatisfiable(schema: dict[str, Any]) -> bool:
    """Return whether LLGuidance proves that no value satisfies a schema.

    Unsupported keywords count as satisfied.
    """
    return schema_error(schema, lenient=True).startswith("Unsatisfiable")


def schema_errors(schema: Any) -> list[Reason]:
    """Return why LLGuidance refuses a schema; empty if it accepts the schema.

    The reason names the innermost subschema that causes the same error by itself.
    """
    error = schema_error(schema)
    if not error:
        return []
    if error.startswith("Unsatisfiable"):
        return [Reason("#", "schema", f"allows no output ({error})")]
    keyword = _keyword_of(error)
    shared = {
        key: schema[key]
        for key in ("$schema", "$id", "id", "$defs", "definitions")
        if isinstance(schema, dict) and key in schema
    }
    innermost = "#"
    for pointer, part in subschemas(schema)[:_MAX_SEARCHED]:
        inside = pointer == innermost or pointer.startswith(innermost + "/")
        if inside and keyword in part and schema_error({**shared, **part}) == error:
            innermost = pointer
    return [Reason(innermost, keyword, error)]


def _keyword_of(error: str) -> str:
    """Return the keyword that an error message refers to; ``"schema"`` if unknown."""
    named = re.search(r"(?:keys: \[\"|for ')([$A-Za-z]+)", error)
    if named:
        return named[1]
    for pattern, keyword in _KEYWORD_OF:
        if re.search(pattern, error):
            return keyword
    return "schema"
