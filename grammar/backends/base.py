"""Interface of the built-in backends, and functions that both of them use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from graft.grammar.errors import GrammarError
from graft.grammar.matcher import CompiledGrammar, GrammarBackend
from graft.grammar.spec import Spec
from graft.native.children.process import Call
from graft.native.errors import OptionError

__all__ = ["BoundedBackend", "ending_ids", "require_release"]


@runtime_checkable
class BoundedBackend(GrammarBackend, Protocol):
    """A backend that can compile a grammar in a child process with limits of time and memory.

    A child process runs the call that `compile_call` returns. The engine's process passes the
    result of the call to `load`, which creates the compiled grammar.
    """

    def compile_call(self, spec: Spec) -> Call:
        """Return the call with which a child process compiles a grammar.

        The call also converts the grammar to the form of this backend and checks it. It raises
        `UnsupportedFormatError` for a structural format that this backend cannot enforce.
        """

    def load(self, spec: Spec, result: Any) -> CompiledGrammar:
        """Create the compiled grammar from the result of the call that `compile_call` returned.

        The vocabulary of this backend must equal the vocabulary in the child process that ran the
        call.
        """


def require_release(name: str, package: str, releases: tuple[str, ...], install: str) -> str:
    """Return the installed version of a grammar library.

    Raise `OptionError` if the library is not installed or the version is not in `releases`.
    `package` is the library's distribution package. In `releases`, ``"1.9.x"`` means all versions
    that begin with ``"1.9."``. The error message contains `install`, the arguments of
    ``pip install`` for a supported version.
    """
    import importlib.metadata  # child processes that load no library start faster without it

    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise OptionError(
            f"grammar_backend: {name} is not installed; install it with: pip install {install}"
        ) from error
    if found not in releases and f"{found.rpartition('.')[0]}.x" not in releases:
        raise OptionError(
            f"grammar_backend: {name} {found} is installed, but graft needs "
            f"{' or '.join(releases)}; install it with: pip install {install}"
        )
    return found


def ending_ids(
    backend: GrammarBackend, compiled: CompiledGrammar, stop_ids: Iterable[int] | None
) -> tuple[int, ...]:
    """Return the stop ids that terminate a matcher, that is, the stop ids without text.

    For the grammar, a stop id with text (bytes in the vocabulary) remains an ordinary token.
    Otherwise, the grammar could reach a state in which no token is legal. The device decides,
    independently of the grammar, whether this stop id ends the request.

    If `stop_ids` is None, the stop ids of the vocabulary apply. Raise `GrammarError` if the grammar
    belongs to another backend, if a stop id is outside the vocabulary, or if all stop ids have
    text.
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
            f"matcher: all stop ids {list(stops)} have text, so the grammar could never end"
        )
    return ending
