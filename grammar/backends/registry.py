"""Create backends by name, and check a grammar with the backend that would compile it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from graft.grammar.backends import llguidance, xgrammar
from graft.grammar.errors import describe
from graft.grammar.matcher import GrammarBackend
from graft.grammar.resolve import candidate_backends, resolve_spec
from graft.grammar.spec import Spec
from graft.grammar.vocabulary import Vocabulary
from graft.native.errors import GraftError, OptionError

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
        Name of a backend, a factory (a function that creates a backend for a vocabulary), or the
        import name ``module:attribute`` of a factory.
    vocabulary
        Vocabulary of the backend.

    Raises
    ------
    OptionError
        The name is unknown, the backend's library is not installed or has an unsupported version,
        or the factory raised an exception that is not a `GraftError` or did not return a
        `GrammarBackend`.
    """
    if callable(choice) or ":" in choice:
        try:
            factory = choice if callable(choice) else _import_attribute(choice)
            backend = factory(vocabulary)
        except GraftError:
            raise
        except Exception as error:  # importing or calling user code may raise any exception
            raise OptionError(f"grammar_backend {choice!r}: {describe(error)}") from error
        if not isinstance(backend, GrammarBackend):
            raise OptionError(
                f"grammar_backend: the factory returned {type(backend).__name__}, which is not a "
                f"GrammarBackend: it has no {' and no '.join(_missing_members(backend))}"
            )
        return backend
    if choice not in BACKENDS:
        raise OptionError(
            f"grammar_backend must be one of {tuple(BACKENDS)} or 'module:attribute', "
            f"got {choice!r}"
        )
    return BACKENDS[choice](vocabulary)


def _import_attribute(name: str) -> Any:
    """Return the attribute with the import name ``module:attribute``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _missing_members(backend: object) -> list[str]:
    """Return the attributes and methods of `GrammarBackend` that an object lacks."""
    members = {"name": "`name`", "vocabulary": "`vocabulary`"}
    members |= {"compile": "method `compile`", "matcher": "method `matcher`"}
    return [text for name, text in members.items() if not hasattr(backend, name)]


def check_syntax(spec: Spec, backend: str) -> None:
    """Raise `GrammarError` if an engine would refuse a grammar.

    `backend` is the engine's option `grammar_backend`. The function must run in a child process,
    because its running time depends on the grammar and is not bounded, and because graft reads
    XGrammar's warnings from the standard output of the child process.
    """
    if spec.kind == "json_schema" and candidate_backends(spec, backend) == ("llguidance",):
        llguidance.prepare(spec, {}, automata=True)
        return
    grammar = resolve_spec(spec, backend)
    readers = {"llguidance": llguidance.check_syntax, "xgrammar": xgrammar.check_syntax}
    readers[grammar.backend](grammar)
