"""What the backends that graft brings have in common."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from graft.cudagraph.errors import OptionError
from graft.grammar.errors import GrammarError
from graft.grammar.matcher import CompiledGrammar, GrammarBackend
from graft.grammar.spec import Spec
from graft.native.children.process import Question

__all__ = ["BoundedBackend", "ending_ids", "require_release"]


@runtime_checkable
class BoundedBackend(GrammarBackend, Protocol):
    """A backend that does what may run away in another process, which can be killed."""

    def question(self, spec: Spec, routed: bool) -> Question:
        """What that process is asked for a grammar; ``routed``: which it has just routed itself."""

    def load(self, spec: Spec, answer: Any) -> CompiledGrammar:
        """The grammar from the answer, for an equal vocabulary."""


def require_release(name: str, package: str, release: str, install: str) -> None:
    """Refuse a library that is not installed, or of which graft knows another release."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise OptionError(
            f"grammar_backend: {name} is not installed; install it with: pip install {install}"
        ) from error
    if not found.startswith(release):
        raise OptionError(
            f"grammar_backend: {name} {found} is installed, graft needs {release}x; "
            f"install it with: pip install {install}"
        )


def ending_ids(
    backend: GrammarBackend, compiled: CompiledGrammar, stop_ids: Iterable[int] | None
) -> tuple[int, ...]:
    """The stop ids that can end a grammar of this backend: those that are no text.

    Ids that are text stay text to the grammar: whether they end the request is for the device to
    decide. A backend that took a textual stop id out of the text could find no way to go on.
    """
    if compiled.backend is not backend:
        raise GrammarError("matcher: the grammar was compiled for another vocabulary")
    vocabulary = backend.vocabulary
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
