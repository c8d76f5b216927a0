"""What a grammar backend is, and the ones graft brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from graft.cudagraph.errors import OptionError

from .errors import GrammarError
from .matcher import CompiledGrammar, Matcher
from .spec import GrammarSpec
from .vocabulary import Vocabulary

__all__ = ["BACKENDS", "GrammarBackend", "SerializingBackend", "ending_ids", "make_backend"]


@runtime_checkable
class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary and makes matchers.

    A backend may be written in Python alone: see `Matcher`. A JSON schema that names no backend
    comes as it stands (unless `GrammarSpec.resolved` knows the backend): enforce all of it, or
    refuse it.

    Attributes
    ----------
    name
        For messages.
    vocabulary
        Token bytes, logit columns and stop ids.
    """

    name: str
    vocabulary: Vocabulary

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile on the calling thread; ``GrammarError`` with the reason if it is refused."""

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """A new matcher at the start; ``stop_ids`` end it, the vocabulary's if absent.

        It is independent of every other: matchers of one grammar run on different threads.
        """


@runtime_checkable
class SerializingBackend(GrammarBackend, Protocol):
    """A backend whose grammars can come from another process, or from disk.

    Attributes
    ----------
    child
        Name under which ``compile_child`` knows how to compile for it.
    release
        Of the library: serialised grammars of another one are not used.
    """

    child: str
    release: str

    def request(self, spec: GrammarSpec) -> tuple[Any, ...]:
        """What a child process is asked, and all that the result depends on; plain JSON values."""

    def dump(self, compiled: CompiledGrammar) -> str:
        """The grammar as text."""

    def load(self, spec: GrammarSpec, text: str) -> CompiledGrammar:
        """The grammar from its text, made by `dump` or in a child for an equal vocabulary.

        Raises
        ------
        RuntimeError, ValueError
            If the text is not one.
        """


def ending_ids(vocabulary: Vocabulary, stop_ids: Iterable[int] | None) -> tuple[int, ...]:
    """The stop ids that can end a grammar: those that are no text.

    Ids that are text stay text to the grammar: whether they end the request is for the device to
    decide. A backend that took a textual stop id out of the text could find no way to go on.

    Raises
    ------
    GrammarError
        If an id is out of range or none is left.
    """
    stops = tuple(dict.fromkeys(vocabulary.stop_ids if stop_ids is None else stop_ids))
    for stop in stops:
        if not 0 <= stop < vocabulary.size:
            raise GrammarError(f"matcher: stop id {stop} is outside [0, {vocabulary.size})")
    ending = tuple(stop for stop in stops if not vocabulary.is_text(stop))
    if not ending:
        raise GrammarError(
            f"matcher: all stop ids {list(stops)} are text, so the grammar could never end"
        )
    return ending


def _xgrammar(vocabulary: Vocabulary) -> GrammarBackend:
    from .xgrammar import XGrammarBackend

    return XGrammarBackend(vocabulary)


def _llguidance(vocabulary: Vocabulary) -> GrammarBackend:
    from .llguidance import LLGuidanceBackend

    return LLGuidanceBackend(vocabulary)


#: Backends by name.
BACKENDS: dict[str, Callable[[Vocabulary], GrammarBackend]] = {
    "xgrammar": _xgrammar,
    "llguidance": _llguidance,
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
        If the name is unknown, or the factory makes something else.
    GrammarError
        If the library is missing or is not the known one.
    """
    if callable(choice):
        made = choice(vocabulary)
        if not isinstance(made, GrammarBackend):
            raise OptionError(f"grammar_backend: made a {type(made).__name__}, no GrammarBackend")
        return made
    if choice not in BACKENDS:
        raise OptionError(f"grammar_backend must be one of {tuple(BACKENDS)}, got {choice!r}")
    return BACKENDS[choice](vocabulary)
