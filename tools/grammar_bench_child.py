"""The process in which `grammar_bench` tries one grammar backend: it may crash, hang or be killed.

Run as ``python -m graft.tools.grammar_bench_child``. It reads pickled messages from its standard
input and answers on its standard output (see `graft.grammar.compile_child.send`): first the setup
``(subject, tokenizer path, memory bytes)``, answered by ``"ready"``; then one `Row` as a dict each,
answered by a dict.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tokenizers

from graft.grammar.backend import make_backend
from graft.grammar.compile_child import receive, send
from graft.grammar.errors import GrammarError
from graft.grammar.matcher import Matcher
from graft.grammar.schema.enforcement import available_backends
from graft.grammar.schema.options import KeyOrder, Whitespace
from graft.grammar.schema.router import route
from graft.grammar.schema.terms import subschemas
from graft.grammar.statement import GrammarSpec
from graft.grammar.vocabulary import Vocabulary

__all__ = ["SUBJECTS", "Refused", "try_row"]

#: What can be measured: the stock Python APIs, and graft's router with what it chooses, with keys
#: in the schema's order and in any.
SUBJECTS = ("llguidance", "xgrammar", "xgrammar-loose", "auto", "auto-any")
_FILLED_TOKENS = 3000  # masks filled and timed per schema
_SEARCH_S = 1.0  # time for finding another order of an instance's keys; it is only counted


class Refused(Exception):
    """The backend does not take the schema; the text says why."""


class Matching(Protocol):
    """One text being matched."""

    def fill(self) -> None: ...
    def accept(self, token: int) -> bool: ...
    def rollback(self, count: int) -> None: ...
    def complete(self) -> bool: ...


Compiled = Callable[[], Matching]


class _Llguidance:
    """LLGuidance's Python API, as its documentation uses it."""

    def __init__(self, vocabulary: Vocabulary, path: str):
        import llguidance  # type: ignore[import-not-found, unused-ignore]

        self._matcher = llguidance.LLMatcher
        stop = vocabulary.stop_ids[0]
        self._tokenizer = llguidance.LLTokenizer(path, n_vocab=vocabulary.size, eos_token=stop)
        self._mask = np.zeros(vocabulary.words, np.int32)

    def compile(self, schema: Any, compact: bool) -> Compiled:
        options: Any = {"whitespace_flexible": compact}
        if not compact:
            options |= {"item_separator": ", ", "key_separator": ": "}
        try:
            text = self._matcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except ValueError as error:
            raise Refused(str(error)) from error
        first = self._new(text)
        if first.is_error():
            raise Refused(first.get_error().split("\n")[0])
        return lambda: _LlguidanceMatching(first.deep_copy(), self._mask)

    def _new(self, text: str) -> Any:
        return self._matcher(self._tokenizer, text, log_level=0)


class _LlguidanceMatching:
    def __init__(self, matcher: Any, mask: np.ndarray):
        self._matcher = matcher
        self._address, self._bytes = mask.ctypes.data, mask.nbytes
        self._keep = mask

    def fill(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bytes)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())


class _Xgrammar:
    """XGrammar's Python API (its TVM-FFI classes, which its own package wraps)."""

    def __init__(self, vocabulary: Vocabulary, strict: bool):
        from graft.grammar.compile_child import register_types, tokenizer_info

        self._types = register_types()
        self._strict = strict
        self._stop = vocabulary.stop_ids[0]
        self._info = tokenizer_info(
            self._types, vocabulary.tokens, vocabulary.size, vocabulary.stop_ids
        )
        self._mask = np.zeros((1, vocabulary.words), np.int32)

    def compile(self, schema: Any, compact: bool) -> Compiled:
        compiler = self._types.GrammarCompiler(self._info, 1, False, -1)
        try:
            compiled = compiler.compile_json_schema(
                json.dumps(schema), compact, None, None, self._strict, None, False
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise Refused(str(error).strip().split("\n")[-1]) from error
        return lambda: _XgrammarMatching(
            self._types.GrammarMatcher(compiled, None, False, -1, None), self._mask, self._stop
        )


class _XgrammarMatching:
    def __init__(self, matcher: Any, mask: np.ndarray, stop: int):
        self._matcher, self._mask, self._stop = matcher, mask, stop

    def fill(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask, 0, False)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token, False))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def complete(self) -> bool:
        return bool(self._matcher.accept_token(self._stop, False))


class _Auto:
    """graft's router and backends; what cannot be enforced exactly is taken loosely and marked."""

    def __init__(self, vocabulary: Vocabulary, key_order: KeyOrder):
        self._key_order = key_order
        self._backends = {name: make_backend(name, vocabulary) for name in available_backends()}
        self._mask = np.zeros(vocabulary.words, np.int32)

    def compile(self, schema: Any, compact: bool, draft: int = 2020) -> tuple[Compiled, Any]:
        whitespace: Whitespace = "any" if compact else "line"
        found = route(
            schema, tuple(self._backends), draft=draft, key_order=self._key_order,
            whitespace=whitespace,
        )  # fmt: skip
        if found.backend is None:
            raise Refused(found.refusal())
        backend = self._backends[found.backend]
        spec = GrammarSpec(
            "json_schema", json.dumps(found.schema, ensure_ascii=False), whitespace=whitespace,
            strict=found.backend == "xgrammar", partial=not found.exact, backend=found.backend,
            rules=found.rules,
        )  # fmt: skip
        compiled = backend.compile(spec)
        return lambda: _GraftMatching(backend.matcher(compiled), self._mask), found


class _GraftMatching:
    def __init__(self, matcher: Matcher, mask: np.ndarray):
        self._matcher, self._mask = matcher, mask

    def fill(self) -> None:
        self._matcher.fill(self._mask)

    def accept(self, token: int) -> bool:
        return self._matcher.accept(token)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def complete(self) -> bool:
        return self._matcher.accept(self._matcher.stop_ids[0])


def _subject(name: str, vocabulary: Vocabulary, path: str) -> Any:
    if name in ("auto", "auto-any"):
        return _Auto(vocabulary, "any" if name == "auto-any" else "schema")
    if name == "llguidance":
        return _Llguidance(vocabulary, path)
    return _Xgrammar(vocabulary, strict=name == "xgrammar")


def try_row(subject: Any, row: dict[str, Any], encode: Callable[[str], list[int]],
            byte_ids: list[int]) -> dict[str, Any]:  # fmt: skip
    """Compile one schema, walk its instances, fill masks along the valid ones.

    Returns
    -------
    dict
        ``outcome`` ("compiled" or "refused"), ``why``, ``keyword``, ``pointer``, ``backend``,
        ``marked``, ``compile_s``, ``fill_ns`` (list) and the same as ``compile_cpu_s`` and
        ``fill_cpu_ns`` in the processor's time, which other work does not lengthen, ``valid`` and
        ``invalid`` (accepted, one flag an instance), ``spelling`` (of stock APIs: valid ones
        accepted only in another order of their keys), ``narrowed`` (of `auto`: valid ones that the
        route had said would not be accepted).
    """
    compact = bool(row.get("compact"))
    answer: dict[str, Any] = {"marked": False, "backend": None, "why": "", "keyword": ""}
    begin, begin_cpu = time.perf_counter(), time.process_time()
    try:
        if isinstance(subject, _Auto):
            compiled, found = subject.compile(row["schema"], compact, row.get("draft", 2020))
            answer.update(marked=not found.exact, backend=found.backend)
            said = (*found.reasons, *found.narrowed, *found.spelling)
            if said:  # why it is marked or narrowed, should it be
                reason = said[0]
                answer.update(why=reason.why, keyword=reason.keyword, pointer=reason.pointer)
        else:
            compiled = subject.compile(row["schema"], compact)
    except (Refused, GrammarError) as error:
        parts = str(error).split(": ")  # "cannot be enforced: pointer: keyword: why"
        keyword = parts[2] if isinstance(subject, _Auto) and len(parts) > 3 else ""
        return {**answer, "outcome": "refused", "why": str(error)[:300], "keyword": keyword}
    compile_s, compile_cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    fills: list[tuple[int, int]] = []
    write = functools.partial(
        json.dumps, ensure_ascii=False, separators=(",", ":") if compact else None
    )
    accepted: dict[str, list[bool]] = {"valid": [], "invalid": []}
    spelling = narrowed = 0
    for label, flags in accepted.items():
        for value in row[label]:
            fits = _walk(compiled(), encode(write(value)), fills if label == "valid" else None)
            flags.append(fits)
            if label == "valid" and not fits and isinstance(subject, _Auto):
                narrowed += bool(found.narrowed) or bool(
                    found.spelling and _walk(compiled(), encode(write(_whole(value))), None)
                )
            elif label == "valid" and not fits and not compact:
                spelling += _Search(compiled(), byte_ids, row["schema"]).fits(value)
    return {**answer, "outcome": "compiled", "compile_s": compile_s,
            "compile_cpu_s": compile_cpu_s, "spelling": spelling, "narrowed": narrowed,
            "fill_ns": [wall for wall, _ in fills], "fill_cpu_ns": [cpu for _, cpu in fills],
            **accepted}  # fmt: skip


def _whole(value: Any) -> Any:
    """The value with whole numbers as integers."""
    if isinstance(value, dict):
        return {key: _whole(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_whole(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _walk(
    matching: Matching, tokens: list[int], fills: list[tuple[int, int]] | None
) -> bool:
    for token in tokens:
        if fills is not None and len(fills) < _FILLED_TOKENS:
            begin_cpu, begin = time.thread_time_ns(), time.perf_counter_ns()
            matching.fill()
            end = time.perf_counter_ns()
            fills.append((end - begin, time.thread_time_ns() - begin_cpu))
        if not matching.accept(token):
            return False
    return matching.complete()


class _Search:
    """Whether some order of an instance's keys (whole numbers written plainly) is accepted.

    The keys are tried in the order in which the schema first lists them, so that the search seldom
    has to turn back; it gives up after a while.
    """

    def __init__(self, matching: Matching, byte_ids: list[int], schema: Any):
        self._matching, self._ids = matching, byte_ids
        self._until = time.monotonic() + _SEARCH_S
        self._rank: dict[str, int] = {}
        for _, part in subschemas(schema):
            for name in part.get("properties") or ():
                self._rank.setdefault(name, len(self._rank))

    def fits(self, value: Any) -> bool:
        """Search depth first, a piece of text at a time."""
        try:
            return self._value(value, self._matching.complete)
        except (RecursionError, TimeoutError):
            return False

    def _piece(self, text: str, then: Callable[[], bool]) -> bool:
        if time.monotonic() > self._until:
            raise TimeoutError
        taken = 0
        for byte in text.encode():
            if not self._matching.accept(self._ids[byte]):
                break
            taken += 1
        else:
            if then():
                return True
        if taken:
            self._matching.rollback(taken)
        return False

    def _value(self, value: Any, then: Callable[[], bool]) -> bool:
        if isinstance(value, dict):
            keys = sorted(value, key=lambda key: self._rank.get(key, len(self._rank)))
            return self._piece("{", lambda: self._members(value, keys, True, then))
        if isinstance(value, list):
            return self._piece("[", lambda: self._items(value, 0, then))
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            value = int(value)
        return self._piece(json.dumps(value, ensure_ascii=False), then)

    def _members(self, value: dict, keys: list[str], first: bool, then: Callable[[], bool]) -> bool:
        if not keys:
            return self._piece("}", then)
        for key in keys:
            rest = [other for other in keys if other != key]
            text = ("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": "

            def follow(key: str = key, rest: list[str] = rest) -> bool:
                return self._value(value[key], lambda: self._members(value, rest, False, then))

            if self._piece(text, follow):
                return True
        return False

    def _items(self, value: list, index: int, then: Callable[[], bool]) -> bool:
        if index == len(value):
            return self._piece("]", then)
        return self._piece(
            ", " if index else "",
            lambda: self._value(value[index], lambda: self._items(value, index + 1, then)),
        )


def main() -> None:
    """Serve until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    name, path, memory = receive(sys.stdin.buffer)
    tokenizer = tokenizers.Tokenizer.from_file(path)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    ends = [i for text, i in added.items() if "end" in text and "think" not in text]
    end = ends[0] if ends else size - 1
    vocabulary = Vocabulary.from_tokenizer(tokenizer, size, [end])
    ids = {text: token for token, text in enumerate(vocabulary.tokens) if len(text) == 1}
    byte_ids = [ids.get(bytes([byte]), -1) for byte in range(256)]
    subject = _subject(name, vocabulary, path)
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    sys.setrecursionlimit(20_000)
    send(answers, "ready")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    while True:
        try:
            row = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            send(answers, try_row(subject, row, encode, byte_ids))
        except (MemoryError, RuntimeError, ValueError, RecursionError) as error:
            send(answers, {"outcome": "crash", "why": repr(error)[:300]})


if __name__ == "__main__":
    main()
