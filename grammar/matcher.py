"""Interfaces of grammar backends, compiled grammars and matchers for constrained decoding.

Structured output needs the set of legal next tokens at every position. A matcher holds the state of
one request in its grammar. The matcher accepts tokens, rolls them back and fills the token bitmask
of the legal next tokens. Matchers have the same interface for every backend.
"""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from graft.grammar.errors import GrammarError, clean_message
from graft.grammar.spec import MAX_SPACE, Marker, Spec
from graft.grammar.structural.formats import has_free_text, parse_format
from graft.grammar.vocabulary import Vocabulary
from graft.native import _native

# Child processes that check grammars import this module. They start in a third less time if they do
# not import NumPy, so only the functions that need NumPy import it.
if TYPE_CHECKING:
    import numpy as np

__all__ = ["CompiledGrammar", "GrammarBackend", "Matcher", "NativeBackedMatcher"]

#: Budget of `Matcher.fill` without a limit.
NO_BUDGET = 2**31 - 1


@runtime_checkable
class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary and creates matchers.

    A user-defined backend may be written in pure Python. `Matcher` lists the methods that its
    matchers must implement. graft passes JSON schemas to a user-defined backend unchanged. The
    backend must either enforce the whole schema or refuse it. If a specification names a built-in
    backend (`GrammarSpec.backend`), that backend compiles the schema instead.

    Attributes
    ----------
    name
        Name of the backend in error messages.
    vocabulary
        Vocabulary of the grammars and matchers.
    """

    name: str
    vocabulary: Vocabulary

    def compile(self, spec: Spec) -> CompiledGrammar:
        """Compile a grammar on the calling thread; raise `GrammarError` if it is refused."""

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """Return a new matcher at the start of a grammar.

        The matchers of one grammar run on different threads, so they must not share mutable state.
        The method ignores the `marker` of the specification, because `CompiledGrammar.matcher`
        handles the free text before the marker.

        Parameters
        ----------
        compiled
            A grammar that this backend compiled.
        stop_ids
            Ids that terminate the matcher; None for the stop ids of the vocabulary.
        """


class CompiledGrammar:
    """A grammar compiled for one vocabulary, shared by all matchers of this grammar.

    Parameters
    ----------
    backend
        Backend that compiled the grammar.
    spec
        Specification of the grammar.
    native
        The backend's own compiled form of the grammar; None if `automaton` replaces it.
    nbytes
        Memory that the grammar occupies, in bytes, as reported by the backend.

    Attributes
    ----------
    timing
        Record of whether the grammar's matchers have kept the guided decoder's time budget so far.
        The decoder's native worker updates it; see ``OrderTiming`` in native/guide/matcher.h.
    automaton
        Native automaton that the matchers run; None if the grammar has none.
    unique
        Native shapes with which the matchers enforce ``uniqueItems``; None if the grammar does not
        need them.
    """

    def __init__(self, backend: GrammarBackend, spec: Spec, native: Any, nbytes: int):
        self.backend = backend
        self.spec = spec
        self.native = native
        self.nbytes = nbytes
        self.timing = _native.guide.OrderTiming()
        self.automaton: Any = None
        self.unique: Any = None

    @functools.cached_property
    def has_free_text(self) -> bool:
        """Whether the grammar allows free text that no tag ends, which may end anywhere."""
        if self.spec.kind != "structural_format":
            return self.spec.kind == "structural_tag"
        return has_free_text(parse_format(json.loads(self.spec.text)))

    def matcher(
        self,
        stop_ids: Iterable[int] | None = None,
        tokens: Iterable[int] = (),
        max_reasoning_tokens: int | None = None,
    ) -> Matcher:
        """Return a new matcher that has already accepted the given tokens.

        If the specification has a marker, the grammar applies only after this text, and the matcher
        starts in the free text before it. If the marker has an opening, the output has free text
        only if it begins with the opening; otherwise, it begins directly with text of the grammar.

        Parameters
        ----------
        stop_ids
            Ids that terminate the matcher; None for the stop ids of the vocabulary.
        tokens
            Token ids to accept, in order.
        max_reasoning_tokens
            Number of tokens within which the opening and the marker of the specification must be
            complete if the output has free text; None for no limit. Tokens that would make this
            impossible are illegal.

        Raises
        ------
        GrammarError
            A token is illegal, the marker is one of the stop ids, or `max_reasoning_tokens` is too
            small for the marker or given without a marker.
        """
        matcher = self.backend.matcher(self, stop_ids)
        if self.spec.marker is not None:
            matcher = _with_marker(matcher, self.spec.marker, max_reasoning_tokens)
        elif max_reasoning_tokens is not None:
            raise GrammarError("max_reasoning_tokens: the grammar has no marker")
        known_tokens = list(tokens)
        accepted = matcher.accept_all(known_tokens)
        if accepted < len(known_tokens):
            raise GrammarError(
                f"matcher: token {known_tokens[accepted]} at index {accepted} is illegal"
            )
        return matcher


class Matcher(ABC):
    """State of one request in its grammar. It determines which tokens are legal next.

    A matcher is not thread-safe. The guided decoder owns the matcher while a replay (graph launch)
    in which its request takes part is in flight. A backend in pure Python derives a class from
    `Matcher` and implements the abstract methods. The guided decoder's native worker calls these
    methods on its threads with the GIL held.

    Attributes
    ----------
    compiled
        The grammar.
    stop_ids
        Ids that terminate the matcher once the grammar is complete.
    size
        Number of logit columns of the vocabulary.
    words
        Number of int32 words of a mask row, ``ceil(size / 32)``.
    claimed
        Whether a request of a guided decoder uses the matcher. If `claimed` is True, no other code
        may use the matcher.
    failure
        Exception that a method raised when the native worker called it; None if there was none.
    """

    failure: BaseException | None = None

    def __init__(self, compiled: CompiledGrammar, stop_ids: tuple[int, ...]):
        self.compiled = compiled
        self.stop_ids = stop_ids
        self.size = compiled.backend.vocabulary.size
        self.words = compiled.backend.vocabulary.words
        self.claimed = False

    @functools.cached_property
    def native(self) -> Any:
        """Native object through which the guided decoder's native worker calls this matcher."""
        import numpy as np

        return _native.guide.PythonMatcher(self, np.zeros(self.words, np.int32), self.size)

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Advance by one token.

        Returns
        -------
        bool
            Whether the token was accepted. It is False if the token is illegal or outside the
            vocabulary, or if the matcher has terminated; the state then does not change.
        """

    def accept_all(self, tokens: Sequence[int]) -> int:
        """Advance by tokens, in order, until a token is not accepted.

        Returns
        -------
        int
            Number of accepted tokens.
        """
        for index, token in enumerate(tokens):
            if not self.accept(token):
                return index
        return len(tokens)

    @abstractmethod
    def fill(self, row: np.ndarray, budget: int = NO_BUDGET) -> bool:
        """Write the token bitmask of the legal next tokens.

        Parameters
        ----------
        row
            Contiguous int32 array ``[words]``. Bit ``i`` of the row is set if token ``i`` is legal.
        budget
            Number of tokens that may still be written: the next token, all later ones and the stop
            id. The row then has only the legal tokens after which `distance` is less than `budget`.
            Matchers whose `distance` is None ignore the budget, and need not have this parameter.

        Returns
        -------
        bool
            Whether the row was written. It is False if every token is legal.

        Raises
        ------
        GrammarError
            The matcher has terminated.
        """

    @abstractmethod
    def rollback(self, tokens: int) -> None:
        """Undo the last `tokens` accepted tokens. An accepted stop id counts as one token."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """Return whether a stop id was accepted."""

    def distance(self) -> int | None:
        """Return the number of tokens after which the text can be complete; None if not known.

        The number is an upper bound and counts the stop id. It is 0 after termination and 1 where
        a stop id is legal. In any other state, a legal token leads to a state with a smaller
        number. A matcher that returns a number at its start must do so in all later states.
        Outputs of matchers that return None can be cut off by ``max_tokens``.
        """
        return None

    def legal(self) -> np.ndarray:
        """Return the legal token ids, ascending, as int64."""
        import numpy as np

        row = np.zeros(self.words, np.int32)
        if not self.fill(row):
            return np.arange(self.size)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))

    def _require_not_terminated(self) -> None:
        if self.is_terminated():
            raise GrammarError("matcher: cannot fill a mask after the grammar has terminated")

    def _require_mask_row(self, row: np.ndarray) -> None:
        import numpy as np

        if not isinstance(row, np.ndarray):
            raise GrammarError(f"mask row: must be an int32 array, got {row!r}")
        # The grammar libraries receive only the address of the row. They would corrupt memory if
        # the array had another layout.
        if row.dtype != np.int32 or row.shape != (self.words,) or not row.flags.c_contiguous:
            raise GrammarError(
                f"mask row: is {row.dtype} {list(row.shape)}, "
                f"expected contiguous int32 [{self.words}]"
            )


def _raises_grammar_error(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method so that it raises a backend's RuntimeError as a `GrammarError`."""

    @functools.wraps(method)
    def wrapped(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except RuntimeError as error:
            raise GrammarError(f"matcher: {clean_message(error)}") from None

    return wrapped


class NativeBackedMatcher(Matcher):
    """A matcher whose methods call a native matcher.

    Parameters
    ----------
    compiled, stop_ids
        As in `Matcher`.
    native
        The native matcher.
    keep
        Objects to which the native matcher refers. The matcher keeps them alive.
    """

    def __init__(
        self, compiled: CompiledGrammar, stop_ids: tuple[int, ...], native: Any, keep: Any = None
    ):
        super().__init__(compiled, stop_ids)
        self.native = native
        self._keep = keep

    @_raises_grammar_error
    def accept(self, token: int) -> bool:
        if not -(2**31) <= token < 2**31:
            return False
        return bool(self.native.accept(int(token)))

    @_raises_grammar_error
    def accept_all(self, tokens: Sequence[int]) -> int:
        return int(self.native.accept_all([int(token) for token in tokens]))

    @_raises_grammar_error
    def fill(self, row: np.ndarray, budget: int = NO_BUDGET) -> bool:
        self._require_not_terminated()
        self._require_mask_row(row)
        return bool(self.native.fill(row, budget))

    @_raises_grammar_error
    def distance(self) -> int | None:
        distance = int(self.native.distance())
        return None if distance == _native.guide.UNKNOWN_DISTANCE else distance

    @_raises_grammar_error
    def rollback(self, tokens: int) -> None:
        if not isinstance(tokens, Integral) or not 0 <= tokens < 2**31:
            raise GrammarError(f"rollback: takes a number of tokens, got {tokens!r}")
        self.native.rollback(int(tokens))

    @_raises_grammar_error
    def is_terminated(self) -> bool:
        return bool(self.native.is_terminated())


@functools.lru_cache(maxsize=32)
def _native_marker(vocabulary: Vocabulary, marker: Marker) -> Any:
    return _native.guide.Marker(
        marker.ids(vocabulary),
        marker.text.encode("utf-8"),
        vocabulary.tokens,
        vocabulary.size,
        marker.required,
        marker.opening_ids(vocabulary),
        marker.opening.encode("utf-8"),
        MAX_SPACE,
        MAX_SPACE if marker.skips_space else 0,
    )


def _with_marker(inner: Matcher, marker: Marker, max_tokens: int | None) -> Matcher:
    """Return a matcher of free text, followed by the marker and the grammar of `inner`."""
    compiled = inner.compiled
    vocabulary = compiled.backend.vocabulary
    ids = {*marker.ids(vocabulary), *marker.opening_ids(vocabulary)}
    if ids & set(inner.stop_ids):
        raise GrammarError("marker: its token is one of the request's stop ids")
    native_marker = _native_marker(vocabulary, marker)
    limit = NO_BUDGET if max_tokens is None else min(max_tokens, NO_BUDGET)
    try:
        native = _native.guide.MarkedMatcher(inner.native, native_marker, inner.stop_ids, limit)
    except ValueError as error:
        if max_tokens is None:
            raise
        refusal = GrammarError(f"max_reasoning_tokens is {max_tokens}, but {error}")
        refusal.param = "max_reasoning_tokens"
        raise refusal from None
    return NativeBackedMatcher(compiled, inner.stop_ids, native, keep=inner)
