"""What `bench.grammar` asks of processes that may crash, hang or be killed: to try one backend."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from graft.grammar import GrammarError, GrammarSpec, Vocabulary, make_backend, route
from graft.grammar.backends.xgrammar import library, tokenizer_info
from graft.tools.bench.data import load_tokenizer

_FILLED_TOKENS = 3000  # masks filled and timed per schema


class Refused(Exception):
    """The backend does not take the schema; the text says why."""


class LLGuidance:
    """LLGuidance's Python API, as its documentation uses it."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Any):
        import llguidance  # type: ignore[import-not-found, unused-ignore]

        self._matcher = llguidance.LLMatcher
        stop = vocabulary.stop_ids[0]
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.to_str(), n_vocab=vocabulary.size, eos_token=stop
        )
        self._mask = np.zeros(vocabulary.words, np.int32)

    def compile(self, schema: Any) -> Callable[[], Any]:
        options: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        try:
            text = self._matcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except ValueError as error:
            raise Refused(str(error)) from error
        first = self._matcher(self._tokenizer, text, log_level=0)
        if first.is_error():
            raise Refused(first.get_error().split("\n")[0])
        return first.deep_copy  # type: ignore[no-any-return]

    def fill(self, matcher: Any) -> None:
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.try_consume_tokens([token]) == 1)

    def complete(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


class XGrammar:
    """XGrammar's Python API (its TVM-FFI classes, which its own package wraps)."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Any):
        self._types = library()
        self._stop = vocabulary.stop_ids[0]
        self._info = tokenizer_info(vocabulary.tokens, vocabulary.size, vocabulary.stop_ids)
        self._mask = np.zeros((1, vocabulary.words), np.int32)

    def compile(self, schema: Any) -> Callable[[], Any]:
        compiler = self._types.GrammarCompiler(self._info, 1, False, -1)
        try:
            compiled = compiler.compile_json_schema(
                json.dumps(schema), False, None, None, True, None, False
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise Refused(str(error).strip().split("\n")[-1]) from error
        return lambda: self._types.GrammarMatcher(compiled, None, False, -1, None)

    def fill(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._mask, 0, False)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token, False))

    def complete(self, matcher: Any) -> bool:
        return bool(matcher.accept_token(self._stop, False))


class Auto:
    """graft's router and backends; what cannot be enforced exactly is taken loosely and marked."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Any):
        self._backend = make_backend("llguidance", vocabulary)
        self._mask = np.zeros(vocabulary.words, np.int32)
        self.found: Any = None
        self.key_order: Any = "schema"

    def compile(self, schema: Any) -> Callable[[], Any]:
        self.found = None
        found = self.found = route(schema, draft=2020, key_order=self.key_order)
        if found.backend is None:
            raise Refused(found.refusal())
        compiled = self._backend.compile(
            GrammarSpec(
                "json_schema",
                json.dumps(found.schema, ensure_ascii=False),
                partial=not found.exact,
                backend=found.backend,
                source=json.dumps(schema),
                rules=found.rules,
            )
        )
        return lambda: compiled.matcher()

    def fill(self, matcher: Any) -> None:
        matcher.fill(self._mask)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept(token))

    def complete(self, matcher: Any) -> bool:
        return bool(matcher.accept(matcher.stop_ids[0]))


#: What can be measured: the stock Python APIs, and graft's router with what it chooses.
SUBJECTS: dict[str, Any] = {"llguidance": LLGuidance, "xgrammar": XGrammar, "auto": Auto}


def try_row(
    subject: Any, row: dict[str, Any], encode: Callable[[str], list[int]]
) -> dict[str, Any]:
    """Compile one schema, walk its instances, fill masks along the valid ones.

    Returns
    -------
    dict
        ``outcome`` ("compiled" or "refused"), ``why``, ``keyword``, ``backend``, ``marked``,
        ``compile_s``, ``fill_ns`` (list), ``valid`` and ``invalid`` (accepted, one flag an
        instance), ``narrowed`` (of `auto`: valid ones that the route had said it would not accept).
    """
    answer: dict[str, Any] = {"marked": False, "backend": None, "why": "", "keyword": ""}
    begin = time.perf_counter()
    try:
        compiled = subject.compile(row["schema"])
    except (Refused, GrammarError) as error:
        found = getattr(subject, "found", None)
        said = (*found.reasons, *found.narrowed) if found is not None else ()
        return answer | {
            "outcome": "refused",
            "why": str(error)[:300],
            "keyword": said[0].keyword if said else "",
        }
    answer["compile_s"] = time.perf_counter() - begin
    narrowed = spelled = ()
    if isinstance(subject, Auto):
        found = subject.found
        narrowed = found.narrowed
        spelled = found.spelling
        answer |= {"marked": not found.exact, "backend": found.backend}
        if said := (*found.reasons, *narrowed, *spelled):
            answer |= {"why": said[0].why, "keyword": said[0].keyword}
    fills: list[int] = []

    def fits(value: Any, filled: bool) -> bool:
        matcher = compiled()
        for token in encode(json.dumps(value, ensure_ascii=False)):
            if filled and len(fills) < _FILLED_TOKENS:
                start = time.perf_counter_ns()
                subject.fill(matcher)
                fills.append(time.perf_counter_ns() - start)
            if not subject.accept(matcher, token):
                return False
        return bool(subject.complete(matcher))

    valid = [fits(value, True) for value in row["valid"]]
    told = sum(
        not good and bool(narrowed or (spelled and fits(_whole(value), False)))
        for value, good in zip(row["valid"], valid, strict=True)
    )
    return answer | {
        "outcome": "compiled",
        "valid": valid,
        "narrowed": told,
        "fill_ns": fills,
        "invalid": [fits(value, False) for value in row["invalid"]],
    }


def _whole(value: Any) -> Any:
    """The value with whole numbers as integers."""
    if isinstance(value, dict):
        return {key: _whole(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_whole(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


_subject: Any = None
_tokenizer: Any = None


def prepare(name: str, tokenizer: str, stop: str | None, key_order: str) -> None:
    """In a child: make the subject that `answer` tries."""
    global _subject, _tokenizer
    _tokenizer, vocabulary = load_tokenizer(Path(tokenizer), stop)
    _subject = SUBJECTS[name](vocabulary, _tokenizer)
    if isinstance(_subject, Auto):
        _subject.key_order = key_order
    sys.setrecursionlimit(20_000)


def answer(row: dict[str, Any]) -> dict[str, Any]:
    """In a child: `try_row` of what it has prepared."""
    return try_row(
        _subject, row, lambda text: list(_tokenizer.encode(text, add_special_tokens=False).ids)
    )
