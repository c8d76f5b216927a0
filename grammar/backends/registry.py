"""Registry of backends by name, and a syntax check with the installed backends."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from graft.cudagraph.errors import GraftError, OptionError
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
        Name of a backend, or a factory, that is, a function that creates a backend for a
        vocabulary.
    vocabulary
        Vocabulary of the backend.

    Raises
    ------
    OptionError
        The name is unknown, the backend's library is not installed or has an unsupported version,
        or the factory raised an exception that is not a `GraftError` or did not return a
        `GrammarBackend`.
    """
    if callable(choice):
        try:
            backend = choice(vocabulary)
        except GraftError:
            raise
        except Exception as error:  # the factory is user code and may raise anything
            raise OptionError(f"grammar_backend {choice!r}: {error}") from error
        if not isinstance(backend, GrammarBackend):
            raise OptionError(
                f"grammar_backend: the factory returned {type(backend).__name__}, which is not a "
                f"GrammarBackend: it has no {' and no '.join(_missing_members(backend))}"
            )
        return backend
    if choice not in BACKENDS:
        raise OptionError(f"grammar_backend must be one of {tuple(BACKENDS)}, got {choice!r}")
    return BACKENDS[choice](vocabulary)


def _missing_members(backend: object) -> list[str]:
    """Return the attributes and methods of `GrammarBackend` that an object lacks."""
    members = {"name": "`name`", "vocabulary": "`vocabulary`"}
    members |= {"compile": "method `compile`", "matcher": "method `matcher`"}
    return [text for name, text in members.items() if not hasattr(backend, name)]


def check_syntax(spec: Spec) -> None:
    """Raise `GrammarError` if no installed backend can parse a grammar.

    The function needs no vocabulary. Its running time depends on the grammar and is not bounded, so
    the function should run in a child process.
    """
    readers = {
        "llguidance": llguidance.syntax_error,
        "xgrammar": _xgrammar_syntax_error,
    }
    names = ["llguidance", "xgrammar"]
    if spec.kind == "structural_format":
        spec = resolve_spec(spec, "auto")
        names = [spec.backend]
    if spec.kind == "ebnf":
        # EBNF is XGrammar's own notation, so XGrammar's error is more helpful than LLGuidance's.
        names.reverse()
    errors = []
    for name in names:
        if importlib.util.find_spec(name):
            errors.append(readers[name](spec))
    if errors and all(errors):
        raise GrammarError(f"{spec.kind}: {errors[0]}")


def _xgrammar_syntax_error(spec: Spec) -> str:
    """Return XGrammar's error for a grammar, or an empty string if there is none."""
    try:
        return xgrammar.syntax_error(resolve_spec(spec, "xgrammar"))
    except GrammarError as error:
        return str(error).removeprefix("structural_tag: ")
