"""XGrammar through TVM-FFI: the wheel's library alone, without importing ``xgrammar`` or torch."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable
from typing import Any

import numpy as np

from graft.native import _native

from .backend import ending_ids
from .compile_child import compile_native, register_types, tokenizer_info
from .errors import GrammarError, clean_message
from .marker import marked
from .matcher import CompiledGrammar, Matcher
from .spec import GrammarSpec
from .vocabulary import Vocabulary

__all__ = ["XGrammarBackend", "library", "probe"]

_RELEASE = "0.2."


@functools.cache
def library() -> Any:
    """XGrammar's types, from its library, loaded once.

    Raises
    ------
    GrammarError
        If XGrammar is not installed, is of another release, or cannot be loaded.
    """
    install = "install it with: pip install --no-deps xgrammar==0.2.8"
    try:
        release = importlib.metadata.version("xgrammar")
    except importlib.metadata.PackageNotFoundError as error:
        raise GrammarError(f"XGrammar is not installed; {install}") from error
    if not release.startswith(_RELEASE):
        raise GrammarError(f"XGrammar {release} is installed, graft needs {_RELEASE}x; {install}")
    try:
        return register_types()
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError) as error:
        raise GrammarError(f"XGrammar {release} cannot be used: {error}") from error


@functools.cache
def probe() -> None:
    """Hand XGrammar's methods to the native worker, which checks version and signatures.

    Raises
    ------
    GrammarError
        If they are not the known ones.
    """
    library()
    from tvm_ffi import libinfo

    try:
        _native.guide.load_xgrammar(libinfo.find_libtvm_ffi())
    except (OSError, RuntimeError) as error:
        raise GrammarError(f"XGrammar cannot be driven natively: {error}") from error


class XGrammarBackend:
    """Compiles grammars for one vocabulary and makes matchers.

    Parameters
    ----------
    vocabulary
        Token bytes, logit columns and stop ids.

    Notes
    -----
    Construction sorts the vocabulary (about 0.1 s for 128k tokens) and holds the GIL; do it at
    start-up. ``compile`` releases the GIL.
    """

    name = "XGrammar"
    child = "xgrammar"

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.release = importlib.metadata.version("xgrammar")
        self._types = library()
        probe()
        self._info = tokenizer_info(
            self._types, vocabulary.tokens, vocabulary.size, vocabulary.stop_ids
        )
        self._acceptable_by_stops: dict[tuple[int, ...], np.ndarray] = {}

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile on the calling thread, in this process.

        Raises
        ------
        GrammarError
            With XGrammar's reason, if it refuses the grammar.
        """
        try:
            native = compile_native(self._types, self._info, *self.request(spec))
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(f"{spec.kind}: {clean_message(error)}") from None
        return CompiledGrammar(self, spec, native, int(native.memory_size_bytes()))

    def request(self, spec: GrammarSpec) -> tuple[Any, ...]:
        """The arguments of ``compile_native`` after the vocabulary."""
        spec = spec.resolved("xgrammar")  # refuses what would be ignored
        return (spec.kind, spec.text, spec.root, spec.any_whitespace, spec.strict is not False)

    def dump(self, compiled: CompiledGrammar) -> str:
        """The grammar as JSON text, several times its size in memory."""
        return str(compiled.native.serialize_json())

    def load(self, spec: GrammarSpec, text: str) -> CompiledGrammar:
        """A grammar that another process compiled for an equal vocabulary, from its JSON text."""
        native = self._types.CompiledGrammar.deserialize_json(text, self._info)
        return CompiledGrammar(self, spec, native, int(native.memory_size_bytes()))

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """A new matcher at the start of the grammar.

        Parameters
        ----------
        compiled
            A grammar of this backend.
        stop_ids
            The request's stop ids, the vocabulary's if absent. Once the grammar is complete, each
            of them is legal and terminates it. Ids that are text stay text to the grammar: whether
            they end the request is for the device to decide.
        """
        if compiled.backend is not self:
            raise GrammarError("matcher: the grammar was compiled for another vocabulary")
        ending = ending_ids(self.vocabulary, stop_ids)
        override = None if ending == self.vocabulary.stop_ids else list(ending)
        handle = self._types.GrammarMatcher(compiled.native, override, False, -1, None)
        matcher = XGrammarMatcher(compiled, ending, handle, self._acceptable(ending))
        return marked(matcher, compiled.spec.marker)

    def _acceptable(self, stops: tuple[int, ...]) -> np.ndarray:
        """A bit per id that XGrammar may be handed: text, or a stop id."""
        if stops not in self._acceptable_by_stops:
            flags = np.zeros(self.vocabulary.words * 32, bool)
            flags[: len(self.vocabulary.tokens)] = [bool(text) for text in self.vocabulary.tokens]
            flags[list(stops)] = True
            packed = np.packbits(flags, bitorder="little").view(np.uint32)
            self._acceptable_by_stops[stops] = packed
        return self._acceptable_by_stops[stops]


class XGrammarMatcher(Matcher):
    """XGrammar's matcher; the Python methods and ``native`` drive one and the same."""

    def __init__(
        self,
        compiled: CompiledGrammar,
        stop_ids: tuple[int, ...],
        handle: Any,
        acceptable: np.ndarray,
    ):
        super().__init__(compiled, stop_ids)
        self._handle = handle  # the native side borrows its reference, and the table's memory
        self._acceptable = acceptable  # bit per id that is text or a stop id, uint32 words
        self.native = _native.guide.XGrammarMatcher(
            handle.__chandle__(), acceptable.ctypes.data, self.size
        )

    def accept(self, token: int) -> bool:
        # XGrammar would refuse these as well, and print a warning.
        if not self._is_acceptable(token) or self.is_terminated():
            return False
        return bool(self._handle.accept_token(int(token), False))

    def _is_acceptable(self, token: int) -> bool:
        words = self._acceptable
        return 0 <= token < self.size and bool(int(words[token >> 5]) >> (token & 31) & 1)

    def fill(self, row: np.ndarray) -> bool:
        self._require_running()
        self._require_row(row)
        self._handle.fill_next_token_bitmask(row, 0, False)
        # XGrammar sets bits beyond the vocabulary too, and those of stop ids of other requests
        row &= self._acceptable.view(np.int32)
        return True

    def rollback(self, tokens: int) -> None:
        self._handle.rollback(int(tokens))

    def is_terminated(self) -> bool:
        return bool(self._handle.is_terminated())
