"""Whether a stated grammar is one at all, asked of the installed backends without a vocabulary."""

from __future__ import annotations

import importlib.util

from .backends import llguidance, xgrammar
from .errors import GrammarError
from .resolve import resolved
from .spec import Spec

__all__ = ["check_syntax"]


def check_syntax(spec: Spec) -> None:
    """Refuses a grammar that no installed backend can read; takes about a millisecond.

    Raises
    ------
    GrammarError
        With the reason, if every backend refuses the grammar.
    """
    asked = [_llguidance, _xgrammar]
    if spec.kind == "ebnf":  # which is XGrammar's notation
        asked.reverse()
    said = [ask(spec) for ask in asked if importlib.util.find_spec(ask.__name__[1:])]
    if said and all(said):
        raise GrammarError(f"{spec.kind}: {said[0]}")


def _llguidance(spec: Spec) -> str:
    return llguidance.read(spec)


def _xgrammar(spec: Spec) -> str:
    try:
        return xgrammar.read(resolved(spec, "xgrammar"))
    except GrammarError as error:
        return str(error).removeprefix("structural tag ")
