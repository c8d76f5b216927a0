"""Reference matchers, which use the Python interfaces of LLGuidance and XGrammar.

They are the oracle of the native matchers, which call the C++ interfaces of the same libraries, and
of the rows that the guided decoder fills.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable
from typing import Any

import llguidance  # type: ignore[import-not-found, unused-ignore]
import numpy as np

from graft.grammar import CompiledGrammar, GrammarSpec, Matcher, Vocabulary, XGrammarBackend
from graft.grammar.backends.base import ending_ids
from graft.grammar.backends.llguidance import lark_rules
from graft.grammar.backends.xgrammar import library
from graft.grammar.resolve import resolve_for_backend

_LIMITS = llguidance.LLParserLimits(  # the same limits as in native/guide/llguidance_abi.cpp
    initial_lexer_fuel=10**7, step_lexer_fuel=10**7, max_items_in_row=10**6, step_max_items=10**6
)


def reference_tokenizer(vocabulary: Vocabulary) -> Any:
    """Return LLGuidance's own tokenizer object for a vocabulary.

    A `Vocabulary` contains no tokenizer, so the object tokenizes a text greedily.
    """
    v = vocabulary
    ids: dict[bytes, int] = {}
    for token, text in enumerate(v.tokens):
        if text:
            ids.setdefault(text, token)
    longest = max(map(len, ids))

    def longest_token(data: bytes) -> bytes:
        """Return the longest token at the start of `data`; empty if no token matches."""
        for size in range(min(longest, len(data)), 0, -1):
            if data[:size] in ids:
                return data[:size]
        return b""

    def greedy(data: bytes) -> list[int]:
        out = []
        while data:
            found = longest_token(data)
            if not found:
                break
            out.append(ids[found])
            data = data[len(found) :]
        return out

    class Wrapper(llguidance.TokenizerWrapper):
        # LLGuidance reads these attributes. The constructor of the base class is not called,
        # because it requires a tokenizer.
        def __init__(self) -> None:
            self.tokens = [*v.tokens, *[b""] * (v.size - len(v.tokens))]
            special = {name: token for name, token in v.names.items() if not v.is_text(token)}
            self.special_token_ids = sorted({*v.stop_ids, *special.values()})
            for name, token in special.items():
                self.tokens[token] = name.encode("utf-8")
            for token in v.stop_ids:
                self.tokens[token] = self.tokens[token] or b"<stop%d>" % token
            self.eos_token_id = v.stop_ids[0]
            self.bos_token_id = None
            self.is_tokenizer_wrapper = True

        def __call__(self, text: bytes | str) -> list[int]:
            return greedy(text.encode("utf-8") if isinstance(text, str) else text)

    return llguidance.LLTokenizer(Wrapper(), eos_token=list(v.stop_ids))


class ReferenceLLGuidance:
    """A backend that creates LLGuidance's own Python matchers."""

    name = "reference LLGuidance"

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self._tokenizer = reference_tokenizer(vocabulary)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar; raise ValueError with LLGuidance's message if it is refused."""
        grammar = resolve_for_backend(spec, "llguidance")
        if spec.kind == "json_schema" and not grammar.rules:
            # For a schema that is not part of a Lark grammar, LLGuidance would allow only one
            # tokenization of forced text.
            rules = f"start: %json {grammar.text}"
        else:
            rules = lark_rules(grammar)
        lark = '%llguidance {"no_forcing": true}\n' + rules
        text = json.dumps({"grammars": [{"lark_grammar": lark}]})
        handle = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        if handle.is_error():
            raise ValueError(handle.get_error())
        return CompiledGrammar(self, spec, handle, len(text))

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """Return a new matcher at the start."""
        return LLGuidanceMatcher(compiled, ending_ids(self, compiled, stop_ids))


class LLGuidanceMatcher(Matcher):
    """LLGuidance's own Python matcher, which additionally ends at the request's stop ids."""

    def __init__(self, compiled: CompiledGrammar, stop_ids: tuple[int, ...]):
        super().__init__(compiled, stop_ids)
        self._start = compiled.native  # never advanced; `rollback` starts again from a copy of it
        self._handle = self._start.deep_copy()
        self._history: list[int] = []
        self._terminated = self._dead = False

    def accept(self, token: int) -> bool:
        if self._terminated or self._dead or not 0 <= token < self.size:
            return False
        if token in self.stop_ids:
            self._terminated = self._handle.is_accepting()
            return self._terminated
        stops = self.compiled.backend.vocabulary.stop_ids
        if token in stops or self._handle.validate_tokens([int(token)]) != 1:
            return False
        if not self._handle.consume_token(int(token)):
            raise RuntimeError(self._handle.get_error())
        self._history.append(int(token))
        return True

    def fill(self, row: np.ndarray) -> bool:
        self._require_not_terminated()
        self._require_mask_row(row)
        if not self._dead:
            try:
                self._handle.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            except ValueError as error:
                # LLGuidance also reports a state without legal tokens as an error.
                self._dead = "NoExtensionBias" in str(error)
                if not self._dead:
                    raise RuntimeError(str(error)) from error
        if self._dead:
            row[:] = 0
            return True
        legal = np.unpackbits(row.view(np.uint8), bitorder="little")
        legal[list(self.compiled.backend.vocabulary.stop_ids)] = 0
        legal[list(self.stop_ids)] = self._handle.is_accepting()
        legal[self.size :] = 0
        row[:] = np.packbits(legal, bitorder="little").view(np.int32)
        return True

    def rollback(self, tokens: int) -> None:
        if tokens <= 0:
            return
        if tokens > len(self._history) + self._terminated:
            raise RuntimeError("rollback of more tokens than were accepted")
        tokens -= self._terminated
        self._terminated = self._dead = False
        if tokens:
            del self._history[-tokens:]
            self._handle = self._start.deep_copy()
            if not self._handle.consume_tokens(self._history):
                raise RuntimeError(self._handle.get_error())

    def is_terminated(self) -> bool:
        return self._terminated


class ReferenceXGrammar(XGrammarBackend):
    """A backend that creates XGrammar's own Python matchers."""

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """Return a new matcher at the start."""
        return XGrammarMatcher(compiled, ending_ids(self, compiled, stop_ids))


class XGrammarMatcher(Matcher):
    """XGrammar's own Python matcher, restricted to tokens with text and the request's stop ids.

    The class avoids calls for which XGrammar would print a warning. A token is illegal if the text
    up to its end cannot be the beginning of valid UTF-8.
    """

    def __init__(self, compiled: CompiledGrammar, stop_ids: tuple[int, ...]):
        super().__init__(compiled, stop_ids)
        self._handle: Any = library().GrammarMatcher(
            compiled.native, list(stop_ids), False, -1, None
        )
        vocabulary: Vocabulary = compiled.backend.vocabulary
        ids = range(vocabulary.words * 32)
        self._known = np.array([vocabulary.is_text(i) or i in stop_ids for i in ids])
        padding = [b""] * (len(self._known) - len(vocabulary.tokens))
        self._tokens = [*vocabulary.tokens, *padding]
        self._text: list[bytes] = []

    def _known_here(self) -> np.ndarray:
        """Return whether each id may continue the accepted text as UTF-8, or is a stop id."""
        last = self._text[-1][-1:] if self._text else b""
        return self._known & np.array([_may_be_utf8(last, token) for token in self._tokens])

    def accept(self, token: int) -> bool:
        if not 0 <= token < self.size or self.is_terminated() or not self._known_here()[token]:
            return False
        accepted = bool(self._handle.accept_token(int(token), False))
        if accepted:
            self._text.append(self._tokens[token])
        return accepted

    def fill(self, row: np.ndarray) -> bool:
        self._require_not_terminated()
        self._handle.fill_next_token_bitmask(row, 0, False)
        row &= np.packbits(self._known_here(), bitorder="little").view(np.int32)
        return True

    def rollback(self, tokens: int) -> None:
        self._handle.rollback(int(tokens))
        del self._text[len(self._text) - int(tokens) :]

    def is_terminated(self) -> bool:
        return bool(self._handle.is_terminated())


@functools.cache
def _may_be_utf8(last: bytes, text: bytes) -> bool:
    """Return whether the first two bytes of each character of a text are valid UTF-8.

    XGrammar itself refuses texts in which a character has too few or too many bytes. `last` is the
    byte before the text; it is empty at the beginning.
    """
    data = last + text
    for lead, second in itertools.pairwise(data):
        if lead >= 0xC0 and 0x80 <= second < 0xC0:
            missing = (lead >= 0xE0) + (lead >= 0xF0)
            try:
                bytes([lead, second, *[0x80] * missing]).decode()
            except UnicodeDecodeError:
                return False
    return not set(text) & {0xC0, 0xC1, *range(0xF5, 0x100)}
