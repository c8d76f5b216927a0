"""The XGrammar backend for constrained decoding. It calls XGrammar through TVM-FFI.

This module loads only the shared library from XGrammar's wheel. It imports neither the Python
package ``xgrammar`` nor torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from graft.grammar.backends.base import ending_ids, require_release
from graft.grammar.backends.xgrammar_regex import convert_pattern, convert_patterns
from graft.grammar.errors import GrammarError, clean_message
from graft.grammar.matcher import CompiledGrammar, Matcher, NativeBackedMatcher
from graft.grammar.processes import run_call
from graft.grammar.resolve import ResolvedGrammar, resolve_for_backend
from graft.grammar.spec import Spec, Whitespace, check_spec
from graft.grammar.structural.formats import Format
from graft.grammar.structural.xgrammar import xgrammar_format
from graft.grammar.vocabulary import Vocabulary
from graft.native import _native
from graft.native.children.process import Call, Setup
from graft.native.errors import OptionError
from graft.native.heap import return_free_memory

# Functions import NumPy where they need it, for the reason that `graft.grammar.matcher` states.
if TYPE_CHECKING:
    import numpy as np

__all__ = ["XGrammarBackend", "check_syntax", "library", "load_native", "tokenizer_info"]

#: Tested versions. XGrammar's C++ interface is internal and differs between versions.
RELEASES = ("0.2.8", "0.2.9")
_TYPES = ("TokenizerInfo", "Grammar", "GrammarCompiler", "CompiledGrammar", "GrammarMatcher")
_RAW = 0  # XGrammar's vocabulary type for tokens given as bytes
_MODULE = __name__ + ":"
# Length of the JSON text of a compiled grammar. Deserializing a longer text fragments the heap, so
# `load` then returns free memory to the operating system.
_TRIM_BYTES = 1 << 19
_XGRAMMAR_ERRORS = (RuntimeError, ValueError, TypeError)
# First bytes of UTF-8 characters, each with the range of second bytes that UTF-8 does not allow
# after it. XGrammar would allow some of these pairs: in encoded surrogates and, for some patterns,
# in overlong encodings.
_LEADS = {
    b"\xe0": (b"\x80", b"\x9f"),
    b"\xed": (b"\xa0", b"\xbf"),
    b"\xf0": (b"\x80", b"\x8f"),
    b"\xf4": (b"\x90", b"\xbf"),
}
_NOT_UTF8 = re.compile(
    rb"[\xc0\xc1\xf5-\xff]|"
    + b"|".join(lead + b"[" + low + b"-" + high + b"]" for lead, (low, high) in _LEADS.items())
)
_libc = ctypes.CDLL(None)


def require_xgrammar() -> str:
    """Return the version of XGrammar; raise `OptionError` if it is missing or not supported."""
    return require_release("XGrammar", "xgrammar", RELEASES, f"--no-deps xgrammar=={RELEASES[0]}")


@functools.cache
def library() -> Any:
    """Load XGrammar's library once and return the namespace of its types.

    Raise `OptionError` if XGrammar is not installed, has an unsupported version, or cannot be
    loaded.
    """
    require_xgrammar()
    try:
        with _keep_signal_handler(signal.SIGSEGV):
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
def _keep_signal_handler(number: int) -> Iterator[None]:
    """Return a context manager that restores the handler of signal `number` on exit.

    Loading TVM-FFI would otherwise replace the signal handler that the soft device has installed.
    """
    handler = ctypes.create_string_buffer(512)  # larger than struct sigaction
    _libc.sigaction(number, None, handler)
    try:
        yield
    finally:
        _libc.sigaction(number, handler, None)


@functools.cache
def load_native() -> None:
    """Load XGrammar's methods into the native worker.

    The worker checks the ABI version of TVM-FFI and the signatures of the methods.

    Raise `OptionError` if XGrammar cannot be loaded, or if the native worker does not support this
    release.
    """
    library()
    from tvm_ffi import libinfo

    try:
        _native.guide.load_xgrammar(libinfo.find_libtvm_ffi())
    except (OSError, RuntimeError) as error:
        raise OptionError(
            f"grammar_backend: graft cannot call the installed XGrammar: {error}"
        ) from error


def tokenizer_info(tokens: Sequence[bytes], size: int, stops: Sequence[int]) -> Any:
    """Return XGrammar's ``TokenizerInfo`` of a vocabulary.

    XGrammar sorts the tokens, which takes about 0.1 s for 128k tokens. XGrammar accepts a stop id
    only if there is a token with this id, so ids without a token are padded with empty strings.
    """
    padding = [b""] * (max(stops, default=-1) + 1 - len(tokens))
    return library().TokenizerInfo([*tokens, *padding], _RAW, size, list(stops), False)


def _compile(info: Any, grammar: ResolvedGrammar) -> Any:
    """Compile a grammar with XGrammar; raise `GrammarError` if XGrammar refuses it."""
    spec = grammar.spec
    content = grammar.content
    compiler = new_compiler(info)
    try:
        if spec.kind == "json_schema":
            layout = _layout(spec.whitespace, spec.strict is not False)
            return compiler.compile_json_schema(_schema_text(content, grammar.text), *layout)
        if spec.kind == "regex":
            return compiler.compile_regex(convert_pattern(content))
        if spec.kind == "lark":
            return compiler.compile_lark(content, [], [])
        if spec.kind == "structural_tag":
            return compiler.compile_structural_tag(_structural_tag(content, spec.whitespace))
        if spec.kind == "structural_format":
            return compiler.compile_structural_tag(_structural_format(content, spec.whitespace))
        if spec.kind == "choice":
            content = f"{spec.root} ::= {' | '.join(map(_quote, content))}"
        return compiler.compile_grammar_from_strings(content, spec.root)
    except (GrammarError, *_XGRAMMAR_ERRORS) as error:
        if "bad_alloc" in str(error):
            raise MemoryError from None
        raise GrammarError(f"{spec.kind}: {clean_message(error)}") from None


def new_compiler(info: Any) -> Any:
    """Return an XGrammar compiler with one thread and without a cache."""
    arguments = [info, 1, False, -1]
    if require_xgrammar() != "0.2.8":
        # Disable dynamic compilation: it would compile the masks of a state when a matcher first
        # reaches the state, while a decoding round waits for the mask row.
        arguments.append(False)
    return library().GrammarCompiler(*arguments)


def check_syntax(grammar: ResolvedGrammar) -> None:
    """Raise `GrammarError` if XGrammar refuses a grammar or would enforce only a part of it.

    XGrammar parses the grammar but does not compile it. The function must run in a child process;
    see `_require_no_warnings`.
    """
    spec = grammar.spec
    content = grammar.content
    reader = library().Grammar
    try:
        if spec.kind == "json_schema":
            _schema_rules(content, spec.whitespace, strict=spec.strict is not False)
        elif spec.kind == "regex":
            reader.from_regex(convert_pattern(content), False)
        elif spec.kind == "lark":
            reader.from_lark(content, None, [], [])
        elif spec.kind == "ebnf":
            reader.from_ebnf(content, spec.root)
        elif spec.kind == "structural_tag":
            reader.from_structural_tag(_structural_tag(content, spec.whitespace))
        elif spec.kind == "structural_format":
            reader.from_structural_tag(_structural_format(content, spec.whitespace))
    except (GrammarError, *_XGRAMMAR_ERRORS) as error:
        raise GrammarError(f"{spec.kind}: {clean_message(error) or 'is refused'}") from None
    _require_no_warnings(spec)


def _require_no_warnings(spec: Spec) -> None:
    """Raise `GrammarError` if XGrammar has warned that it ignores a part of the grammar.

    XGrammar prints a warning about each such part to file descriptor 1. In a child process of the
    pool, file descriptor 1 is a file that is empty when a call begins.
    """
    printed = os.pread(1, 1 << 20, 0).decode("utf-8", "replace")
    ignored = list(dict.fromkeys(clean_message(line) for line in printed.splitlines()))
    if ignored and not spec.partial:
        raise GrammarError(f"{spec.kind}: cannot be enforced as a whole: {'; '.join(ignored)}")


def _schema_text(schema: Any, text: str = "") -> str:
    """Return a JSON schema as the JSON text that XGrammar reads.

    The patterns in `schema` are converted in place; see `convert_patterns`. If the caller passes
    the JSON text of `schema` as `text`, and there is no pattern, the function returns `text`.
    """
    if text and "pattern" not in text:
        return text
    convert_patterns(schema)
    return json.dumps(schema)


def _quote(text: str) -> str:
    """Return a text as an EBNF string literal.

    All characters except ASCII letters and digits are escaped.
    """
    return '"' + "".join(_escape(c) for c in text) + '"'


def _escape(char: str) -> str:
    if char.isascii() and char.isalnum():
        return char
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _layout(whitespace: Whitespace, strict: bool) -> tuple[Any, ...]:
    """Return the arguments of XGrammar's ``compile_json_schema`` that follow the schema.

    The arguments are, in this order: whether any white space is allowed, indentation, separators,
    strict mode, maximum number of white-space characters, and whether keys may have any order.
    """
    any_whitespace = whitespace != "line"
    max_whitespace = whitespace if isinstance(whitespace, int) else None
    return any_whitespace, None, None, strict, max_whitespace, False


def _structural_tag(document: Any, whitespace: Whitespace) -> str:
    """Return a structural tag in XGrammar's JSON form.

    The schema of each tag is converted to EBNF rules. If the structural tag contained the schema
    itself, XGrammar would allow any white space in the content.
    """
    tags = []
    for tag in document["tags"]:
        content = {"type": "grammar", "grammar": _schema_rules(tag["schema"], whitespace)}
        tags.append({"type": "tag", "begin": tag["begin"], "content": content, "end": tag["end"]})
    form = {
        "type": "triggered_tags",
        "triggers": document["triggers"],
        "tags": tags,
        "at_least_one": document["at_least_one"] or document["at_once"],
        "stop_after_first": False,
    }
    if document["at_least_one"] and not document["at_once"]:
        for tag, trigger in itertools.product(document["tags"], document["triggers"]):
            if any(trigger.endswith(tag["begin"][:n]) for n in range(1, len(trigger))):
                raise GrammarError(
                    f"XGrammar cannot see where the trigger {trigger!r} occurs first"
                )
        # XGrammar's at_least_one requires the output to start with a tag. The free text before the
        # first tag must therefore be added explicitly.
        free_text = {"type": "any_text", "excludes": document["triggers"]}
        form = {"type": "sequence", "elements": [free_text, form]}
    return json.dumps({"type": "structural_tag", "format": form})


def _schema_rules(
    schema: Any, whitespace: Whitespace, any_order: bool = False, strict: bool = True
) -> str:
    """Convert a JSON schema to EBNF rules with XGrammar.

    `any_order` allows keys in any order, and `strict` forbids additional properties.
    """
    any_whitespace, indent, separators, strict, max_whitespace, _ = _layout(whitespace, strict)
    rules = library().Grammar.from_json_schema(
        _schema_text(schema),
        any_whitespace,
        indent,
        separators,
        strict,
        max_whitespace,
        False,
        any_order,
    )
    return str(rules.to_string())


def _structural_format(form: Format, whitespace: Whitespace) -> str:
    """Return the JSON text of XGrammar's structural tag whose ``format`` is `form`."""

    def schema_rules(form: Format) -> str:
        most = form["max_whitespace_cnt"]
        return _schema_rules(
            form["json_schema"], whitespace if most is None else most, form["any_order"]
        )

    def regex_rules(pattern: str) -> str:
        return str(library().Grammar.from_regex(convert_pattern(pattern), False).to_string())

    converted = xgrammar_format(form, schema_rules, regex_rules)
    return json.dumps({"type": "structural_tag", "format": converted})


# Functions that run in a child process.

_vocabularies: dict[str, Any] = {}  # TokenizerInfo by fingerprint of the vocabulary


def add_vocabulary(fingerprint: str, *vocabulary: Any) -> None:
    """Store a vocabulary in the child process for later calls of `compiled_text`.

    `vocabulary` are the arguments of `tokenizer_info`.
    """
    _vocabularies[fingerprint] = tokenizer_info(*vocabulary)


def compiled_text(fingerprint: str, spec: Spec) -> str:
    """Convert a grammar to XGrammar's form, compile it, and return the result as JSON text.

    `fingerprint` identifies a vocabulary that `add_vocabulary` has stored. The text is several
    times as large as the compiled grammar in memory. Raise `GrammarError` if XGrammar refuses the
    grammar, or if XGrammar would enforce only a part of it and the specification is not `partial`.
    """
    grammar = resolve_for_backend(spec, "xgrammar")
    text = str(_compile(_vocabularies[fingerprint], grammar).serialize_json())
    _require_no_warnings(spec)
    return text


class XGrammarBackend:
    """Compiles grammars with XGrammar and creates matchers.

    The constructor sorts the vocabulary while it holds the GIL, which takes about 0.1 s for 128k
    tokens. The backend should therefore be created at start-up. `compile` releases the GIL.

    Parameters
    ----------
    vocabulary
        Vocabulary of the grammars and matchers.
    """

    name = "XGrammar"

    def __init__(self, vocabulary: Vocabulary):
        import numpy as np

        self.vocabulary = vocabulary
        self._types = library()
        load_native()
        self._info = tokenizer_info(vocabulary.tokens, vocabulary.size, vocabulary.stop_ids)
        tokens = vocabulary.tokens
        # Token bitmask of the ids that a matcher can accept, without stop ids.
        self._acceptable_texts = self._bitmask(
            [bool(text) and not _NOT_UTF8.search(text) for text in tokens]
        )
        without_text = range(len(tokens), vocabulary.size)
        ends_with = []
        follows = []
        for lead, (low, high) in _LEADS.items():
            ends_with.append(self._bitmask([text.endswith(lead) for text in tokens]))
            legal = [not low <= text[:1] <= high for text in tokens]
            follows.append(self._bitmask(legal, without_text))
        self._ends_with_lead = np.stack(ends_with)
        self._follows_lead = np.stack(follows)

    def compile(self, spec: Spec) -> CompiledGrammar:
        """Compile a grammar in a child process, as an engine does.

        XGrammar prints which parts of a grammar it ignores. graft can read these warnings, and then
        refuse the grammar, only in a child process.
        """
        check_spec(spec)
        return self.load(spec, run_call(spec.kind, self.compile_call(spec)))

    def compile_call(self, spec: Spec) -> Call:
        """Return the call that compiles a grammar in a child process; see `BoundedBackend`."""
        vocabulary = self.vocabulary
        fingerprint = vocabulary.fingerprint
        setup = Setup(
            f"xgrammar {fingerprint}",
            _MODULE + "add_vocabulary",
            (fingerprint, vocabulary.tokens, vocabulary.size, vocabulary.stop_ids),
        )
        return Call(_MODULE + "compiled_text", (fingerprint, spec), setup)

    def load(self, spec: Spec, result: str) -> CompiledGrammar:
        """Create the compiled grammar from the JSON text that `compiled_text` returned."""
        native = self._types.CompiledGrammar.deserialize_json(result, self._info)
        if len(result) > _TRIM_BYTES:
            # Otherwise, the C library would keep the memory that XGrammar used to read `result`.
            return_free_memory()
        return self._compiled_grammar(spec, native)

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """Return a new matcher at the start of a grammar.

        The stop ids without text terminate the matcher; see `ending_ids`.
        """
        ending = ending_ids(self, compiled, stop_ids)
        override = None if ending == self.vocabulary.stop_ids else list(ending)
        handle = self._types.GrammarMatcher(compiled.native, override, False, -1, None)
        acceptable = self._acceptable(ending)
        native = _native.guide.XGrammarMatcher(
            handle.__chandle__(),
            acceptable=acceptable.ctypes.data,
            ends_with=self._ends_with_lead.ctypes.data,
            follows=self._follows_lead.ctypes.data,
            leads=len(_LEADS),
            vocab_size=self.vocabulary.size,
        )
        return NativeBackedMatcher(
            compiled,
            ending,
            native,
            keep=(handle, acceptable, self._ends_with_lead, self._follows_lead),
        )

    def _compiled_grammar(self, spec: Spec, native: Any) -> CompiledGrammar:
        return CompiledGrammar(self, spec, native, int(native.memory_size_bytes()))

    def _acceptable(self, stops: tuple[int, ...]) -> np.ndarray:
        """Return the token bitmask of the ids that a matcher can accept.

        These are the stop ids `stops`, and the ids whose bytes can be a part of a UTF-8 text.
        """
        import numpy as np

        acceptable = self._acceptable_texts.copy()
        for stop in stops:
            acceptable[stop // 32] |= np.uint32(1 << stop % 32)
        return acceptable

    def _bitmask(self, flags: list[bool], ids: Iterable[int] = ()) -> np.ndarray:
        """Return the token bitmask that allows each id `i` with ``flags[i]``, and all `ids`."""
        import numpy as np

        padded = np.zeros(self.vocabulary.words * 32, bool)
        padded[: len(flags)] = flags
        padded[list(ids)] = True
        return np.packbits(padded, bitorder="little").view(np.uint32)
