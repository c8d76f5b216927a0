"""XGrammar through TVM-FFI: the wheel's library alone, without importing ``xgrammar`` or torch."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from .compile_child import compile_native, register_types, tokenizer_info
from .errors import GrammarError
from .matcher import CompiledGrammar, Matcher
from .spec import GrammarSpec
from .vocabulary import Vocabulary

__all__ = ["XGrammarBackend", "clean_message", "library"]

_RELEASE = "0.2."


@functools.cache
def library() -> Any:
    """Load XGrammar's library once and hand it to the native worker too.

    Raises
    ------
    GrammarError
        If XGrammar is not installed, is of another release, or its ABI is not the known one.
    """
    install = "install it with: pip install --no-deps xgrammar==0.2.8"
    try:
        release = importlib.metadata.version("xgrammar")
    except importlib.metadata.PackageNotFoundError as error:
        raise GrammarError(f"XGrammar is not installed; {install}") from error
    if not release.startswith(_RELEASE):
        raise GrammarError(f"XGrammar {release} is installed, graft needs {_RELEASE}x; {install}")
    from tvm_ffi import libinfo

    from graft.native import _native

    try:
        types = register_types()
        _native.guide.load_xgrammar(libinfo.find_libtvm_ffi())
    except (OSError, RuntimeError, ValueError, AttributeError) as error:
        raise GrammarError(f"XGrammar {release} cannot be used: {error}") from error
    return types


def clean_message(error: BaseException | str) -> str:
    """XGrammar's sentence without time, source file and check expression."""
    lines = str(error).strip().splitlines()
    text = lines[-1] if lines and lines[0].startswith("Traceback") else " ".join(lines)
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Warning: )?", "", text)
    text = re.sub(r"Check failed: \(.*?\) is false: ", "", text)
    text = re.sub(r" The JSON string is:.*", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text).strip()[:500]


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

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self._types = library()
        self._info = tokenizer_info(
            self._types, vocabulary.tokens, vocabulary.size, vocabulary.stop_ids
        )
        # One thread, no cache of its own: the compile service decides about both.
        self._acceptable_by_stops: dict[tuple[int, ...], np.ndarray] = {}

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile on the calling thread, in this process.

        Raises
        ------
        GrammarError
            With XGrammar's reason, if it refuses the grammar.
        """
        try:
            native = compile_native(
                self._types,
                self._info,
                spec.kind,
                spec.text,
                spec.root,
                spec.any_whitespace,
                spec.strict,
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(f"{spec.kind}: {clean_message(error)}") from None
        return CompiledGrammar(self, spec, native)

    def load(self, spec: GrammarSpec, text: str) -> CompiledGrammar:
        """A grammar that another process compiled for an equal vocabulary, from its JSON text."""
        native = self._types.CompiledGrammar.deserialize_json(text, self._info)
        return CompiledGrammar(self, spec, native)

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
        stops = tuple(dict.fromkeys(self.vocabulary.stop_ids if stop_ids is None else stop_ids))
        for stop in stops:
            if not 0 <= stop < self.vocabulary.size:
                raise GrammarError(
                    f"matcher: stop id {stop} is outside [0, {self.vocabulary.size})"
                )
        # XGrammar would take a textual stop id out of the text, which can leave no way to go on.
        ending = [stop for stop in stops if not self.vocabulary.is_text(stop)]
        if not ending:
            raise GrammarError(
                f"matcher: all stop ids {list(stops)} are text, so the grammar could never end"
            )
        override = None if tuple(ending) == self.vocabulary.stop_ids else ending
        native = self._types.GrammarMatcher(compiled.native, override, False, -1, None)
        return Matcher(compiled, native, tuple(ending), self._acceptable(tuple(ending)))

    def _acceptable(self, stops: tuple[int, ...]) -> np.ndarray:
        """A bit per id that XGrammar may be handed: text, or a stop id."""
        if stops not in self._acceptable_by_stops:
            flags = np.zeros(self.vocabulary.words * 32, bool)
            flags[: len(self.vocabulary.tokens)] = [bool(text) for text in self.vocabulary.tokens]
            flags[list(stops)] = True
            packed = np.packbits(flags, bitorder="little").view(np.uint32)
            self._acceptable_by_stops[stops] = packed
        return self._acceptable_by_stops[stops]
