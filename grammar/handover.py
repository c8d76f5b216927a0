"""A request's place in its grammar, taken from one guided decoder to another."""

from __future__ import annotations

from dataclasses import dataclass

from .backends.base import GrammarBackend
from .errors import GuideError
from .matcher import CompiledGrammar, Matcher

__all__ = ["Handover"]


@dataclass(frozen=True)
class Handover:
    """What another decoder needs to go on where one stopped; nothing of it is a live matcher.

    Attributes
    ----------
    compiled
        The grammar. Its ``spec`` can be compiled anew where the compiled form cannot go.
    stop_ids
        Ids that end the request once its grammar is complete.
    tokens
        Every token the request's matcher has taken, in order.
    position
        Position of the last of them, or of the last prompt token if there are none.
    """

    compiled: CompiledGrammar
    stop_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    position: int

    def matcher(self, backend: GrammarBackend | None = None) -> Matcher:
        """A new matcher that has taken the tokens.

        Parameters
        ----------
        backend
            Where the grammar is compiled again; None: the compiled one is used.

        Raises
        ------
        GrammarError
            If the backend does not compile the grammar.
        GuideError
            If its grammar refuses a token.
        """
        compiled = self.compiled if backend is None else backend.compile(self.compiled.spec)
        matcher = compiled.backend.matcher(compiled, self.stop_ids)
        for index, token in enumerate(self.tokens):
            if not matcher.accept(token):
                raise GuideError(f"handed-over token {token} (index {index}) is refused")
        return matcher
