"""Lowering of grammar specifications to finite automata."""

from __future__ import annotations

import json

from graft.grammar.automaton.expression import MAX_EXPRESSION, Expression, text, union
from graft.grammar.automaton.regex import NotRegular, lower_regex
from graft.grammar.automaton.schema import lower_schema
from graft.grammar.spec import Spec
from graft.native import _native

__all__ = ["MAX_STATES", "compile_automaton", "lower"]

#: Maximum number of states of an automaton.
MAX_STATES = 2048


def compile_automaton(spec: Spec) -> bytes | None:
    """Return the automaton of a grammar in the native code's serialized form.

    The time is limited to about 50 ms, so the function may run on untrusted grammars.

    Parameters
    ----------
    spec
        The grammar, as `resolve_spec` returns it for LLGuidance.

    Returns
    -------
    bytes or None
        None if the grammar is not known to be regular, or if the automaton would be too large.
    """
    try:
        expression = lower(spec)
        if len(expression) > MAX_EXPRESSION:
            return None
        return bytes(_native.guide.compile_automaton(expression, MAX_STATES))
    except RecursionError:  # the schema is nested more deeply than this function can read
        return None
    except ValueError:  # NotRegular, or the automaton exceeds a limit or allows no text
        return None


def lower(spec: Spec) -> Expression:
    """Return the expression of exactly the texts that LLGuidance allows for a grammar.

    Raises
    ------
    NotRegular
        The grammar is not regular, or its lowering is not known.
    """
    if spec.kind == "regex":
        return lower_regex(spec.text)
    if spec.kind == "choice":
        return union([text(option) for option in json.loads(spec.text)])
    if spec.kind == "json_schema" and not spec.rules:
        return lower_schema(json.loads(spec.text), spec.whitespace)
    raise NotRegular(f"grammars of kind {spec.kind!r} have no lowering")
