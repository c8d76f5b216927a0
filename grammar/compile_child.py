"""A process that compiles grammars: it can be killed, and it can die, without harm to its parent.

It is run as a script (``python compile_child.py``), so it imports XGrammar's library and the
standard library only. The parent writes pickled messages to its standard input and reads pickled
answers from its standard output, each behind its length in 8 bytes:

1. once: the vocabulary ``(tokens, size, stop_ids)`` and the address space limit in bytes; answered
   by ``"ready"``;
2. per grammar: the arguments of ``compile_native``; answered by ``("compiled", json, warnings)`` or
   ``("refused", message, warnings)``. Warnings are what XGrammar prints about features it ignores.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, BinaryIO

__all__ = ["compile_native", "receive", "register_types", "send"]

_TYPES = ("TokenizerInfo", "GrammarCompiler", "CompiledGrammar", "GrammarMatcher")
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
    types: Any, info: Any, kind: str, text: str, root: str, any_whitespace: bool, strict: bool
) -> Any:
    """Compile one grammar on the calling thread; XGrammar's refusal is a RuntimeError."""
    compiler = types.GrammarCompiler(info, 1, False, -1)  # one thread, no cache
    if kind == "json_schema":
        # whitespace, indent, separators, strict, whitespace limit, properties in any order
        return compiler.compile_json_schema(text, any_whitespace, None, None, strict, None, False)
    if kind == "regex":
        return compiler.compile_regex(text)
    return compiler.compile_grammar_from_strings(text, root)


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
    vocabulary, memory = receive(sys.stdin.buffer)
    types = register_types()
    info = tokenizer_info(types, *vocabulary)
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    send(answers, "ready")
    while True:
        try:
            request = receive(sys.stdin.buffer)
        except EOFError:
            return
        os.ftruncate(printed, 0)
        os.lseek(printed, 0, os.SEEK_SET)
        try:
            answer = ["compiled", str(compile_native(types, info, *request).serialize_json())]
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            answer = ["refused", str(error) or type(error).__name__]
        os.lseek(printed, 0, os.SEEK_SET)
        warnings = os.read(printed, 1 << 20).decode("utf-8", "replace")
        send(answers, (*answer, warnings))


if __name__ == "__main__":
    main()
