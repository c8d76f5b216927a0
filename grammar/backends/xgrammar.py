"""XGrammar through TVM-FFI: the wheel's library alone, without importing ``xgrammar`` or torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from graft.cudagraph.errors import OptionError
from graft.grammar.backends.base import ending_ids, require_release
from graft.grammar.errors import GrammarError, clean_message
from graft.grammar.matcher import CompiledGrammar, Matcher, NativeBackedMatcher
from graft.grammar.resolve import resolved
from graft.grammar.schema.options import Whitespace
from graft.grammar.spec import Spec
from graft.grammar.vocabulary import Vocabulary
from graft.native import _native
from graft.native.children.process import Question

__all__ = ["XGrammarBackend", "library", "probe", "read", "tokenizer_info"]

_TYPES = ("TokenizerInfo", "Grammar", "GrammarCompiler", "CompiledGrammar", "GrammarMatcher")
_RAW = 0  # XGrammar's vocabulary type: tokens are given as bytes
_HERE = __name__ + ":"
_LARGE = 1 << 19  # bytes of a grammar's text from which on it leaves holes in memory
_REFUSED = (RuntimeError, ValueError, TypeError)
_libc = ctypes.CDLL(None)


@functools.cache
def library() -> Any:
    """XGrammar's types, from its library, loaded once."""
    require_release("XGrammar", "xgrammar", "0.2.", "--no-deps xgrammar==0.2.8")
    try:
        with _own_handler(signal.SIGSEGV):
            return _register_types()
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError) as error:
        raise OptionError(f"grammar_backend: XGrammar cannot be used: {error}") from error


def _register_types() -> SimpleNamespace:
    import tvm_ffi
    from tvm_ffi import libinfo

    types: dict[str, Any] = {"module": libinfo.load_lib_module("xgrammar", "xgrammar_bindings")}
    for name in _TYPES:
        register = tvm_ffi.register_object(f"xgrammar.tvm_ffi_binding.{name}")
        types[name] = register(type(name, (tvm_ffi.Object,), {"__slots__": ()}))
    return SimpleNamespace(**types)


@contextlib.contextmanager
def _own_handler(number: int) -> Iterator[None]:
    """Keep a signal's handler: TVM-FFI sets one of its own, over the soft device's."""
    kept = ctypes.create_string_buffer(512)  # a struct sigaction and more
    _libc.sigaction(number, None, kept)
    try:
        yield
    finally:
        _libc.sigaction(number, kept, None)


@functools.cache
def probe() -> None:
    """Hand XGrammar's methods to the native worker, which checks version and signatures."""
    library()
    from tvm_ffi import libinfo

    try:
        _native.guide.load_xgrammar(libinfo.find_libtvm_ffi())
    except (OSError, RuntimeError) as error:
        raise OptionError(
            f"grammar_backend: XGrammar cannot be driven natively: {error}"
        ) from error


def tokenizer_info(tokens: Sequence[bytes], size: int, stops: Sequence[int]) -> Any:
    """XGrammar's view of a vocabulary; sorts it, about 0.1 s for 128k tokens."""
    return library().TokenizerInfo(list(tokens), _RAW, size, list(stops), False)


def _compile(info: Any, spec: Spec) -> Any:
    """XGrammar's own form of a grammar; its refusal is a ``GrammarError``."""
    spec = resolved(spec, "xgrammar")  # refuses what would be ignored
    types = library()
    text = spec.text
    root = spec.root
    compiler = types.GrammarCompiler(info, 1, False, -1)  # one thread, no cache
    try:
        if spec.kind == "json_schema":
            layout = _layout(spec.whitespace, spec.strict is not False)
            return compiler.compile_json_schema(text, *layout)
        if spec.kind == "regex":
            return compiler.compile_regex(text)
        if spec.kind == "lark":
            return compiler.compile_lark(text, [], [])
        if spec.kind == "structural_tag":
            return compiler.compile_structural_tag(_structural_tag(text, spec.whitespace))
        if spec.kind == "choice":
            text = f"{root} ::= " + " | ".join(_quote(option) for option in json.loads(text))
        return compiler.compile_grammar_from_strings(text, root)
    except _REFUSED as error:
        raise GrammarError(f"{spec.kind}: {clean_message(error)}") from None


def read(spec: Spec) -> str:
    """XGrammar's objection to a grammar, without compiling it; empty if it can read it."""
    grammar = library().Grammar
    text = spec.text
    try:
        if spec.kind == "regex":
            grammar.from_regex(text, False)
        elif spec.kind == "lark":
            grammar.from_lark(text, [], [])
        elif spec.kind == "ebnf":
            grammar.from_ebnf(text, spec.root)
        elif spec.kind == "structural_tag":
            grammar.from_structural_tag(_structural_tag(text, spec.whitespace))
    except _REFUSED as error:
        return clean_message(error) or "is refused"
    return ""


def _quote(text: str) -> str:
    """An EBNF string literal: everything but ASCII letters and digits by code point."""
    return '"' + "".join(_escape(c) for c in text) + '"'


def _escape(char: str) -> str:
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _layout(whitespace: Whitespace, strict: bool) -> tuple[Any, ...]:
    """XGrammar's arguments: any whitespace, indent, separators, strict, most of it, any order."""
    most = whitespace if isinstance(whitespace, int) else None
    return whitespace != "line", None, None, strict, most, False


def _structural_tag(text: str, whitespace: Whitespace) -> str:
    """XGrammar's form of a structural tag; of a schema in one it would take any whitespace."""
    spec = json.loads(text)
    layout = _layout(whitespace, True)
    tags = []
    for tag in spec["tags"]:
        rules = library().Grammar.from_json_schema(
            json.dumps(tag["schema"]), *layout[:-1], False, layout[-1]
        )
        content = {"type": "grammar", "grammar": rules.to_string()}
        tags.append({"type": "tag", "begin": tag["begin"], "content": content, "end": tag["end"]})
    form = {
        "type": "triggered_tags",
        "triggers": spec["triggers"],
        "tags": tags,
        "at_least_one": spec["at_least_one"] or spec["at_once"],
        "stop_after_first": False,
    }
    if spec["at_least_one"] and not spec["at_once"]:  # which XGrammar takes for "at once"
        text_first = {"type": "any_text", "excludes": spec["triggers"]}
        form = {"type": "sequence", "elements": [text_first, form]}
    return json.dumps({"type": "structural_tag", "format": form})


_learnt: dict[str, Any] = {}  # in a compiling process: vocabularies by fingerprint


def learn(fingerprint: str, *vocabulary: Any) -> None:
    """In a compiling process: what to compile for, from now on."""
    _learnt[fingerprint] = tokenizer_info(*vocabulary)


def compiled_text(fingerprint: str, spec: Spec) -> str:
    """In a compiling process: a compiled grammar as JSON text, several times its size in memory."""
    text = str(_compile(_learnt[fingerprint], spec).serialize_json())
    # that it would enforce a grammar in part only, it says by printing
    printed = os.pread(1, 1 << 20, 0).decode("utf-8", "replace")
    ignored = list(dict.fromkeys(clean_message(line) for line in printed.splitlines()))
    if ignored and not spec.partial:
        raise GrammarError(f"{spec.kind}: cannot be enforced as a whole: {'; '.join(ignored)}")
    return text


class XGrammarBackend:
    """Compiles grammars for one vocabulary and makes matchers.

    Construction sorts the vocabulary (about 0.1 s for 128k tokens) and holds the GIL; do it at
    start-up. ``compile`` releases the GIL.
    """

    name = "XGrammar"

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self._types = library()
        probe()
        self._info = tokenizer_info(vocabulary.tokens, vocabulary.size, vocabulary.stop_ids)
        self._acceptable_by_stops: dict[tuple[int, ...], np.ndarray] = {}

    def compile(self, spec: Spec) -> CompiledGrammar:
        """Compile on the calling thread, in this process."""
        return self._grammar(spec, _compile(self._info, spec))

    def question(self, spec: Spec, routed: bool) -> Question:
        """See `BoundedBackend`."""
        v = self.vocabulary
        learn = Question(_HERE + "learn", (v.fingerprint, v.tokens, v.size, v.stop_ids))
        return Question(
            _HERE + "compiled_text", (v.fingerprint, spec), (f"xgrammar {v.fingerprint}", learn)
        )

    def load(self, spec: Spec, answer: str) -> CompiledGrammar:
        """A grammar that another process compiled for an equal vocabulary, from its JSON text."""
        native = self._types.CompiledGrammar.deserialize_json(answer, self._info)
        if len(answer) > _LARGE:
            _libc.malloc_trim(0)  # what reading it took would stay with this process for good
        return self._grammar(spec, native)

    def _grammar(self, spec: Spec, native: Any) -> CompiledGrammar:
        return CompiledGrammar(self, spec, native, int(native.memory_size_bytes()))

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """A new matcher at the start; once complete, each of its `ending_ids` terminates it."""
        ending = ending_ids(self, compiled, stop_ids)
        override = None if ending == self.vocabulary.stop_ids else list(ending)
        handle = self._types.GrammarMatcher(compiled.native, override, False, -1, None)
        acceptable = self._acceptable(ending)
        native = _native.guide.XGrammarMatcher(
            handle.__chandle__(), acceptable.ctypes.data, self.vocabulary.size
        )
        return NativeBackedMatcher(compiled, ending, native, keep=(handle, acceptable))

    def _acceptable(self, stops: tuple[int, ...]) -> np.ndarray:
        """A bit per id that XGrammar may be handed: text, or a stop id."""
        if stops not in self._acceptable_by_stops:
            flags = np.zeros(self.vocabulary.words * 32, bool)
            flags[: len(self.vocabulary.tokens)] = [bool(text) for text in self.vocabulary.tokens]
            flags[list(stops)] = True
            packed = np.packbits(flags, bitorder="little").view(np.uint32)
            self._acceptable_by_stops[stops] = packed
        return self._acceptable_by_stops[stops]
