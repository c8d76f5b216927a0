"""Whether a stated grammar is one at all, asked of the installed backends without a vocabulary."""

from __future__ import annotations

import importlib.util

from .compile_child import read_native
from .compile_risk import risk
from .errors import GrammarError, clean_message
from .llguidance import grammar_text, objection
from .resolve import resolved
from .schema.rewrite.strings import ecma_pattern
from .schema.terms import Cannot
from .schema.trial import parser_limits
from .spec import Spec
from .xgrammar import library

__all__ = ["check_syntax"]


def check_syntax(spec: Spec) -> None:
    """Refuses a grammar that no installed backend can read; takes about a millisecond.

    What XGrammar might run away with is not asked of it here (`compile_risk`): such a grammar is
    read when it is compiled, in a process that can be killed.

    Raises
    ------
    GrammarError
        With the reason, if every backend in question refuses the grammar.
    """
    asked = [_xgrammar, _llguidance] if spec.kind == "ebnf" else [_llguidance, _xgrammar]
    said = [ask(spec) for ask in asked if importlib.util.find_spec(ask.__name__[1:])]
    if said and all(said):
        raise GrammarError(f"{spec.kind}: {said[0]}")


def _llguidance(spec: Spec) -> str:
    from llguidance import LLMatcher  # the wheel, where it is installed

    try:
        text = grammar_text(spec)
    except GrammarError as error:
        return str(error).removeprefix(f"{spec.kind}: ").removeprefix("structural tag ")
    failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    return objection("\n".join(messages), spec.kind) or "is refused" if failed else ""


def _xgrammar(spec: Spec) -> str:
    try:
        spec = resolved(spec, "xgrammar")
    except GrammarError as error:
        return str(error).removeprefix("structural tag ")
    if spec.kind == "regex":
        try:
            ecma_pattern(spec.text)  # XGrammar reads more than it compiles
        except Cannot as error:
            return error.why
    if spec.kind != "lark" and risk(spec):
        return ""
    try:
        read_native(library(), spec.kind, spec.text, spec.root)
    except (RuntimeError, ValueError, TypeError) as error:
        return clean_message(error) or "is refused"
    return ""
