"""Lowering of grammars to finite automata, which run instead of LLGuidance's matchers."""

from __future__ import annotations

from graft.grammar.automaton.schema import lower_schema
from graft.grammar.regular.expression import (
    EMPTY,
    MAX_EXPRESSION,
    Expression,
    concat,
    optional,
    repeat,
    text,
    union,
)
from graft.grammar.regular.regex import NotRegular, lower_regex
from graft.grammar.resolve import ResolvedGrammar
from graft.grammar.spec import Whitespace
from graft.grammar.structural.formats import Format
from graft.native import _native

__all__ = ["MAX_STATES", "compile_automaton", "lower"]

#: Maximum number of states of an automaton.
MAX_STATES = 2048

#: Minimum and maximum numbers of repetitions by type of structural format.
_REPETITIONS: dict[str, tuple[int, int | None]] = {
    "optional": (0, 1),
    "star": (0, None),
    "plus": (1, None),
}


def compile_automaton(grammar: ResolvedGrammar) -> bytes | None:
    """Compile a grammar in LLGuidance's form to an automaton, and return it serialized.

    Return None if the grammar is not known to be regular, or if the automaton would be too large.
    The time is limited to about 50 ms, so the function may run on untrusted grammars.
    """
    try:
        expression = lower(grammar)
        if len(expression) > MAX_EXPRESSION:
            return None
        return bytes(_native.guide.compile_automaton([(0, 0, expression)], MAX_STATES))
    except RecursionError:  # the schema is nested more deeply than this function can read
        return None
    except ValueError:  # NotRegular, or the automaton exceeds a limit or allows no text
        return None


def lower(grammar: ResolvedGrammar) -> Expression:
    """Return an expression that matches exactly the texts that LLGuidance allows for a grammar.

    Raise `NotRegular` if the grammar is not regular, or if graft cannot lower it.
    """
    kind = grammar.spec.kind
    if kind == "regex":
        return lower_regex(grammar.content)
    if kind == "choice":
        return union([text(option) for option in grammar.content])
    if kind == "json_schema" and not grammar.rules:
        return lower_schema(grammar.content, grammar.spec.whitespace)
    if kind == "structural_format":
        return _lower_format(grammar.content, grammar.spec.whitespace)
    raise NotRegular(f"grammars of kind {kind!r} have no lowering")


def _lower_format(form: Format, whitespace: Whitespace) -> Expression:
    """Return the expression of a structural format.

    Raise `NotRegular` if the format contains free text, special tokens or parts that are not
    regular.
    """

    def lower_part(part: Format) -> Expression:
        return _lower_format(part, whitespace)

    kind = form["type"]
    if kind == "const_string":
        return _text(form["value"])
    if kind == "regex":
        return lower_regex(form["pattern"])
    if kind == "json_schema":  # graft.grammar.resolve has applied or refused all other fields
        return lower_schema(form["json_schema"], whitespace)
    if kind == "sequence":
        return concat(map(lower_part, form["elements"]))
    if kind == "or":
        return union(map(lower_part, form["elements"]))
    if kind in _REPETITIONS:
        return repeat(lower_part(form["content"]), *_REPETITIONS[kind])
    if kind == "repeat":
        high = None if form["max"] == -1 else form["max"]
        return repeat(lower_part(form["content"]), form["min"], high)
    if kind == "tag" and isinstance(form["begin"], str) and isinstance(form["end"], list):
        ends = union(map(_text, form["end"]))
        return concat([_text(form["begin"]), lower_part(form["content"]), ends])
    if kind == "tags_with_separator":
        tag = union(map(lower_part, form["tags"]))
        if form["stop_after_first"]:
            return tag if form["at_least_one"] else optional(tag)
        more = repeat(concat([_text(form["separator"]), tag]), 0, None)
        tags = concat([tag, more])
        return tags if form["at_least_one"] else optional(tags)
    raise NotRegular(f"structural formats of type {kind!r} have no lowering")


def _text(value: str) -> Expression:
    return text(value) if value else EMPTY
