"""Grammar backends by name, and what those that are installed say of a grammar."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from graft.cudagraph.errors import OptionError
from graft.grammar.backends import llguidance, xgrammar
from graft.grammar.errors import GrammarError
from graft.grammar.matcher import GrammarBackend
from graft.grammar.resolve import resolved
from graft.grammar.spec import Spec
from graft.grammar.vocabulary import Vocabulary

__all__ = ["BACKENDS", "check_syntax", "make_backend"]

#: Backends by name.
BACKENDS: dict[str, Callable[[Vocabulary], GrammarBackend]] = {
    "xgrammar": xgrammar.XGrammarBackend,
    "llguidance": llguidance.LLGuidanceBackend,
}


def make_backend(
    choice: str | Callable[[Vocabulary], GrammarBackend], vocabulary: Vocabulary
) -> GrammarBackend:
    """The backend of a name, or the one that a factory of the user's makes.

    Raises
    ------
    OptionError
        If the name is unknown, its library is missing or not the known one, or the factory makes
        something else.
    """
    if callable(choice):
        made = choice(vocabulary)
        if not isinstance(made, GrammarBackend):
            raise OptionError(f"grammar_backend: made a {type(made).__name__}, no GrammarBackend")
        return made
    if choice not in BACKENDS:
        raise OptionError(f"grammar_backend must be one of {tuple(BACKENDS)}, got {choice!r}")
    return BACKENDS[choice](vocabulary)


def check_syntax(spec: Spec) -> None:
    """Refuses a grammar that no installed backend can read, without a vocabulary."""
    asked = {"llguidance": llguidance.read, "xgrammar": _read_by_xgrammar}
    order = sorted(asked, reverse=spec.kind == "ebnf")  # which is XGrammar's notation
    said = [asked[name](spec) for name in order if importlib.util.find_spec(name)]
    if said and all(said):
        raise GrammarError(f"{spec.kind}: {said[0]}")


def _read_by_xgrammar(spec: Spec) -> str:
    try:
        return xgrammar.read(resolved(spec, "xgrammar"))
    except GrammarError as error:
        return str(error).removeprefix("structural tag ")
