"""A process that compiles or judges: it can be killed, and it can die, without harm to its parent.

It is run as a script (``python compile_child.py``), so it imports one backend's library (to judge:
``jsonschema``) and the standard library only. The parent writes pickled messages to its standard
input and reads pickled answers from its standard output, each behind its length in 8 bytes:

1. once: the backend's name, the vocabulary ``(tokens, size, stop_ids)`` and the bytes of address
   space that it may take beyond this; answered by ``"ready"``;
2. per grammar: what the backend's ``request`` gives, or a question of `judge`; answered by
   ``("compiled", text, warnings)``, ``("refused", message, warnings)`` or ``("memory", message,
   warnings)``. Warnings tell of features that the backend ignores.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import resource
import signal
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, BinaryIO

__all__ = [
    "compile_native", "read_native", "receive", "register_types", "satisfies", "send",
    "tokenizer_info",
]  # fmt: skip

_TYPES = ("TokenizerInfo", "Grammar", "GrammarCompiler", "CompiledGrammar", "GrammarMatcher")
_RAW = 0  # XGrammar's vocabulary type: tokens are given as bytes
_PR_SET_PDEATHSIG = 1


def register_types() -> SimpleNamespace:
    """Load XGrammar's library and make a class for each of its types that graft uses."""
    import tvm_ffi
    from tvm_ffi import libinfo

    types: dict[str, Any] = {"module": libinfo.load_lib_module("xgrammar", "xgrammar_bindings")}
    for name in _TYPES:
        register = tvm_ffi.register_object(f"xgrammar.tvm_ffi_binding.{name}")
        types[name] = register(type(name, (tvm_ffi.Object,), {"__slots__": ()}))
    return SimpleNamespace(**types)


def tokenizer_info(types: Any, tokens: Sequence[bytes], size: int, stops: Sequence[int]) -> Any:
    """XGrammar's view of a vocabulary; sorts it, about 0.1 s for 128k tokens."""
    return types.TokenizerInfo(list(tokens), _RAW, size, list(stops), False)


def compile_native(
    types: Any, info: Any, kind: str, text: str, root: str, whitespace: str | int, strict: bool
) -> Any:
    """Compile one grammar on the calling thread; XGrammar's refusal is a RuntimeError."""
    compiler = types.GrammarCompiler(info, 1, False, -1)  # one thread, no cache
    if kind == "json_schema":
        return compiler.compile_json_schema(text, *_layout(whitespace, strict))
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "lark":
        return compiler.compile_lark(text, [], [])
    if kind == "structural_tag":
        return compiler.compile_structural_tag(_structural_tag(types, text, whitespace))
    if kind == "choice":
        options = json.loads(text)
        text = f"{root} ::= " + " | ".join(_quote(option) for option in options)
    return compiler.compile_grammar_from_strings(text, root)


def read_native(types: Any, kind: str, text: str, root: str) -> None:
    """Read a grammar without compiling it for a vocabulary; a refusal is a RuntimeError."""
    if kind == "regex":
        types.Grammar.from_regex(text, False)
    elif kind == "lark":
        types.Grammar.from_lark(text, [], [])
    elif kind == "ebnf":
        types.Grammar.from_ebnf(text, root)
    elif kind == "structural_tag":
        types.Grammar.from_structural_tag(_structural_tag(types, text, "line"))


def _quote(text: str) -> str:
    """An EBNF string literal: everything but ASCII letters and digits by code point."""
    return '"' + "".join(_escape(c) for c in text) + '"'


def _escape(char: str) -> str:
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _layout(whitespace: str | int, strict: bool) -> tuple[Any, ...]:
    """XGrammar's arguments: any whitespace, indent, separators, strict, most of it, any order."""
    free = whitespace not in ("line", "compact")
    separators = (",", ":") if whitespace == "compact" else None
    most = whitespace if isinstance(whitespace, int) else None
    return free, None, separators, strict, most, False


def _structural_tag(types: Any, text: str, whitespace: str | int) -> str:
    """XGrammar's form of a ``GrammarSpec.structural_tag``; its own schemas take any whitespace."""
    spec = json.loads(text)
    layout = _layout(whitespace, True)
    tags = []
    for tag in spec["tags"]:
        schema = json.dumps(tag["schema"])
        rules = types.Grammar.from_json_schema(schema, *layout[:-1], False, layout[-1])
        content = {"type": "grammar", "grammar": rules.to_string()}
        tags.append({"type": "tag", "begin": tag["begin"], "content": content, "end": tag["end"]})
    triggered = {
        "type": "triggered_tags", "triggers": spec["triggers"], "tags": tags,
        "at_least_one": spec["at_least_one"] or spec["at_once"], "stop_after_first": False,
    }  # fmt: skip
    if spec["at_least_one"] and not spec["at_once"]:  # which XGrammar takes for "at once"
        text_first = {"type": "any_text", "excludes": spec["triggers"]}
        triggered = {"type": "sequence", "elements": [text_first, triggered]}
    return json.dumps({"type": "structural_tag", "format": triggered})


class _XGrammar:
    """Compiles with XGrammar; warnings are what it prints."""

    def __init__(self, tokens: Sequence[bytes], size: int, stops: Sequence[int]):
        self._types = register_types()
        self._info = tokenizer_info(self._types, tokens, size, stops)

    def compile(self, *request: Any) -> str:
        return str(compile_native(self._types, self._info, *request).serialize_json())


def satisfies(schema: Any, text: str) -> bool:
    """Whether a text is JSON that satisfies a schema, formats included; nothing is fetched.

    Raises
    ------
    ValueError
        If the schema cannot be judged: an unresolvable reference, a bad pattern.
    """
    import jsonschema
    from jsonschema_specifications import REGISTRY  # without it, a $ref is fetched by network

    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return False
    latest = jsonschema.validators.Draft202012Validator
    judge = jsonschema.validators.validator_for(schema, default=latest)
    try:
        checker = judge(schema, registry=REGISTRY, format_checker=judge.FORMAT_CHECKER)
        return bool(checker.is_valid(value))
    except MemoryError:
        raise
    except Exception as error:  # whatever comes is not the output's fault
        raise ValueError(str(error)) from error


def _no_number(name: str) -> None:
    """Python's reader takes NaN and Infinity, which JSON does not know."""
    raise ValueError(name)


class _Judge:
    """Answers what a user's pattern could keep Python busy with for ever."""

    def __init__(self) -> None:
        import jsonschema  # noqa: F401  (a second that no question is charged with)

        sys.set_int_max_str_digits(0)

    def compile(self, question: str, about: str, text: str) -> str:
        if question == "search":
            return "yes" if re.search(about, text) else ""
        return "yes" if satisfies(json.loads(about), text) else ""


def send(stream: BinaryIO, message: Any) -> None:
    """Write one message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Read one message; EOFError at the end of the stream. Both ends are graft's own."""
    size = stream.read(8)
    if len(size) < 8:
        raise EOFError
    length = int.from_bytes(size, "little")
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def main() -> None:
    """Serve until the parent closes the pipe or dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "wb")
    printed = os.memfd_create("printed")  # whatever XGrammar prints lands here
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    name, vocabulary, memory = receive(sys.stdin.buffer)
    compilers: dict[str, Any] = {"xgrammar": _XGrammar, "judge": _Judge}
    compiler = compilers[name](*vocabulary)
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, resource.RLIM_INFINITY))
    send(answers, "ready")
    while True:
        try:
            request = receive(sys.stdin.buffer)
        except EOFError:
            return
        os.ftruncate(printed, 0)
        os.lseek(printed, 0, os.SEEK_SET)
        try:
            answer = ("compiled", compiler.compile(*request))
        except (RuntimeError, ValueError, TypeError, ImportError, MemoryError, re.error) as error:
            out = isinstance(error, MemoryError) or "bad_alloc" in str(error)
            answer = ("memory" if out else "refused", str(error))
        os.lseek(printed, 0, os.SEEK_SET)
        warnings = os.read(printed, 1 << 20).decode("utf-8", "replace")
        send(answers, (*answer, warnings))


if __name__ == "__main__":
    main()
