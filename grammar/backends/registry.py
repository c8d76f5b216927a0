"""Grammar backends by name."""

from __future__ import annotations

from collections.abc import Callable

from graft.cudagraph.errors import OptionError

from ..matcher import GrammarBackend
from ..vocabulary import Vocabulary
from .llguidance import LLGuidanceBackend
from .xgrammar import XGrammarBackend

__all__ = ["BACKENDS", "make_backend"]

#: Backends by name.
BACKENDS: dict[str, Callable[[Vocabulary], GrammarBackend]] = {
    "xgrammar": XGrammarBackend,
    "llguidance": LLGuidanceBackend,
}


def make_backend(
    choice: str | Callable[[Vocabulary], GrammarBackend], vocabulary: Vocabulary
) -> GrammarBackend:
    """The backend of a name, or the one that a factory of the user's makes.

    Parameters
    ----------
    choice
        ``"xgrammar"``, ``"llguidance"``, or a callable that takes the vocabulary.

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
