"""What LLGuidance itself says of a schema or a grammar, without a vocabulary."""

from __future__ import annotations

import json
import re
from typing import Any

from graft.grammar.schema.terms import Reason, subschemas

__all__ = ["objections", "trial", "trial_lark", "unsatisfiable", "validate"]

#: As the native worker sets them (see ``native/guide/llguidance_abi``).
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 10**7,
    "step_lexer_fuel": 10**7,
    "max_items_in_row": 10**6,
    "step_max_items": 10**6,
}
#: For questions that may stay without an answer.
_SMALL: dict[str, Any] = {"max_grammar_size": 20_000, "initial_lexer_fuel": 50_000}
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
    """Whether LLGuidance refuses a grammar, and what it says."""
    from llguidance import LLMatcher, LLParserLimits  # type: ignore[import-not-found, unused-ignore]

    text = json.dumps({"grammars": [grammar]})
    return LLMatcher.validate_grammar_with_warnings(text, limits=LLParserLimits(**limits))


def trial(schema: Any, *, lenient: bool = False) -> str:
    """LLGuidance's objection to a schema, empty if it takes it."""
    document = {} if schema is True else {"not": {}} if schema is False else schema
    options = {"whitespace_flexible": False, "lenient": lenient, "coerce_one_of": lenient}
    grammar = {"json_schema": {**document, "x-guidance": options}}
    return _said(*validate(grammar, _SMALL if lenient else _LIMITS))


def trial_lark(rules: str) -> str:
    """LLGuidance's objection to a Lark grammar, empty if it takes it."""
    return _said(*validate({"lark_grammar": f"%llguidance {{}}\n{rules}"}))


def _said(refused: bool, messages: list[str]) -> str:
    if not refused:
        return ""
    first, *more = messages[0].split("\n")
    faults = [line for line in more if line.startswith("error: ")]  # of a regex, after an excerpt
    return f"{first} {faults[0].removeprefix('error: ')}" if faults else first


def unsatisfiable(schema: dict[str, Any]) -> bool:
    """Whether LLGuidance proves that nothing fits; what it does not know counts as fitting."""
    return trial(schema, lenient=True).startswith("Unsatisfiable")


def objections(schema: Any) -> list[Reason]:
    """Why LLGuidance does not take a schema, at the innermost part that alone meets the same."""
    objection = trial(schema)
    if not objection:
        return []
    if objection.startswith("Unsatisfiable"):
        return [Reason("#", "schema", f"allows no output ({objection})")]
    keyword = _keyword_of(objection)
    shared = {
        key: schema[key]
        for key in ("$schema", "$id", "id", "$defs", "definitions")
        if isinstance(schema, dict) and key in schema
    }
    place = "#"
    for pointer, part in subschemas(schema)[:400]:
        inside = pointer == place or pointer.startswith(place + "/")
        if inside and keyword in part and trial({**shared, **part}) == objection:
            place = pointer
    return [Reason(place, keyword, objection)]


def _keyword_of(objection: str) -> str:
    named = re.search(r"(?:keys: \[\"|for ')([$A-Za-z]+)", objection)
    if named:
        return named[1]
    for pattern, keyword in _KEYWORD_OF:
        if re.search(pattern, objection):
            return keyword
    return "schema"
