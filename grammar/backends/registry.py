"""Backends by name, and the syntax check by the installed backends."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from graft.cudagraph.errors import OptionError
from graft.grammar.backends import llguidance, xgrammar
from graft.grammar.errors import GrammarError
from graft.grammar.matcher import GrammarBackend
from graft.grammar.resolve import resolve_spec
from graft.grammar.spec import Spec
from graft.grammar.vocabulary import Vocabulary

__all__ = ["BACKENDS", "check_syntax", "make_backend"]

#: Backend classes by name.
BACKENDS: dict[str, Callable[[Vocabulary], GrammarBackend]] = {
    "xgrammar": xgrammar.XGrammarBackend,
    "llguidance": llguidance.LLGuidanceBackend,
}


def make_backend(
    choice: str | Callable[[Vocabulary], GrammarBackend], vocabulary: Vocabulary
) -> GrammarBackend:
    """Return a backend for a vocabulary.

    Parameters
    ----------
    choice
        Name of a backend, or a factory.
    vocabulary
        Vocabulary of the backend.

    Raises
    ------
    OptionError
        The name is unknown, its library is missing or of an unsupported release, or the factory
        did not return a `GrammarBackend`.
    """
    if callable(choice):
        backend = choice(vocabulary)
        if not isinstance(backend, GrammarBackend):
            raise OptionError(
                f"grammar_backend: the factory returned {type(backend).__name__}, which is not a "
                "GrammarBackend"
            )
        return backend
    if choice not in BACKENDS:
        raise OptionError(f"grammar_backend must be one of {tuple(BACKENDS)}, got {choice!r}")
    return BACKENDS[choice](vocabulary)


def check_syntax(spec: Spec) -> None:
    """Raise `GrammarError` if no installed backend can read a grammar.

    Needs no vocabulary. The cost depends on the grammar and has no bound: for child processes.
    """
    readers = {"llguidance": llguidance.syntax_error, "xgrammar": _xgrammar_syntax_error}
    names = ["llguidance", "xgrammar"]
    if spec.kind == "ebnf":  # XGrammar's notation: its error is the one to report
        names.reverse()
    errors = [readers[name](spec) for name in names if importlib.util.find_spec(name)]
    if errors and all(errors):
        raise GrammarError(f"{spec.kind}: {errors[0]}")


def _xgrammar_syntax_error(spec: Spec) -> str:
    """Return XGrammar's error for a grammar; empty if it can read it."""
    try:
        return xgrammar.syntax_error(resolve_spec(spec, "xgrammar"))
    except GrammarError as error:
        return str(error).removeprefix("structural_tag: ")
