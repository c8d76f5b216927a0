"""Grammar implementations that the grammar benchmark compares, run in child processes.

The benchmark (`graft.tools.bench.grammar`) continues if a child process crashes, hangs or runs out
of memory. Every implementation has the methods ``compile``, which returns a function that creates a
matcher for a schema; ``fill``, which computes the token bitmask of a matcher's state; ``accept``,
which advances a matcher by a token; and ``complete``, which returns whether the text may end here.
"""

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
from graft.tools.bench.grammar_data import load_tokenizer

#: Maximum number of mask fills that are timed per schema.
_MAX_TIMED_FILLS = 3000


class SchemaRefused(Exception):
    """The implementation does not support the schema. The message gives the reason."""


class LLGuidance:
    """Compiles schemas and checks tokens with LLGuidance's documented Python API."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Any):
        import llguidance  # type: ignore[import-not-found, unused-ignore]

        self._matcher = llguidance.LLMatcher
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.to_str(), n_vocab=vocabulary.size, eos_token=vocabulary.stop_ids[0]
        )
        self._mask = np.zeros(vocabulary.words, np.int32)

    def compile(self, schema: Any) -> Callable[[], Any]:
        options: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        try:
            text = self._matcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except ValueError as error:
            raise SchemaRefused(str(error)) from error
        matcher = self._matcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise SchemaRefused(matcher.get_error().split("\n")[0])
        return matcher.deep_copy  # type: ignore[no-any-return]

    def fill(self, matcher: Any) -> None:
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.try_consume_tokens([token]) == 1)

    def complete(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


class XGrammar:
    """Compiles schemas and checks tokens with the TVM-FFI classes that XGrammar's API wraps."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Any):
        self._types = library()
        self._stop_id = vocabulary.stop_ids[0]
        self._info = tokenizer_info(vocabulary.tokens, vocabulary.size, vocabulary.stop_ids)
        self._mask = np.zeros((1, vocabulary.words), np.int32)

    def compile(self, schema: Any) -> Callable[[], Any]:
        compiler = self._types.GrammarCompiler(self._info, 1, False, -1)
        try:
            compiled = compiler.compile_json_schema(
                json.dumps(schema), False, None, None, True, None, False
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise SchemaRefused(str(error).strip().split("\n")[-1]) from error
        return lambda: self._types.GrammarMatcher(compiled, None, False, -1, None)

    def fill(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._mask, 0, False)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token, False))

    def complete(self, matcher: Any) -> bool:
        return bool(matcher.accept_token(self._stop_id, False))


class Auto:
    """Compiles schemas and checks tokens with graft, whose router rewrites them for LLGuidance.

    Schemas are compiled with ``partial=True``, so that a schema that cannot be enforced exactly is
    not refused.
    """

    def __init__(self, vocabulary: Vocabulary, tokenizer: Any):
        self._backend = make_backend("llguidance", vocabulary)
        self._mask = np.zeros(vocabulary.words, np.int32)
        #: Result of `route` for the schema that is evaluated; see `find_route`.
        self.route: Any = None
        #: Order in which the keys of an object may be generated.
        self.key_order: Any = "schema"

    def compile(self, schema: Any) -> Callable[[], Any]:
        # graft refuses key_order="any" if the grammar of an object cannot allow every order of its
        # keys. The benchmark then uses the key order of the schema.
        key_order: Any = "schema" if self.route.ordered else self.key_order
        spec = GrammarSpec.json_schema(schema, partial=True, key_order=key_order)
        return self._backend.compile(spec).matcher

    def find_route(self, schema: Any) -> None:
        """Rewrite a schema with graft's router, and set `route` to the result.

        Must be called before `compile`.
        """
        self.route = route(schema, key_order=self.key_order)

    def fill(self, matcher: Any) -> None:
        matcher.fill(self._mask)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept(token))

    def complete(self, matcher: Any) -> bool:
        return bool(matcher.accept(matcher.stop_ids[0]))


#: Implementations by name: the libraries' own Python APIs, and graft.
SUBJECTS: dict[str, Any] = {"llguidance": LLGuidance, "xgrammar": XGrammar, "auto": Auto}


class _Instances:
    """Matches instances of one JSON schema token by token, and times each fill of a mask.

    `new_matcher` returns a matcher in its initial state, and `encode` tokenizes a text.
    """

    def __init__(
        self, subject: Any, new_matcher: Callable[[], Any], encode: Callable[[str], list[int]]
    ):
        self._subject = subject
        self._new_matcher = new_matcher
        self._encode = encode
        self.fill_ns: list[int] = []  #: nanoseconds of each mask fill

    def accepts(self, value: Any, fill_masks: bool) -> bool:
        """Return whether the schema's grammar accepts an instance.

        With `fill_masks`, a mask is filled and timed before each token.
        """
        matcher = self._new_matcher()
        for token in self._encode(json.dumps(value, ensure_ascii=False)):
            if fill_masks and len(self.fill_ns) < _MAX_TIMED_FILLS:
                start = time.perf_counter_ns()
                self._subject.fill(matcher)
                self.fill_ns.append(time.perf_counter_ns() - start)
            if not self._subject.accept(matcher, token):
                return False
        return bool(self._subject.complete(matcher))


def evaluate_schema(
    subject: Any, row: dict[str, Any], encode: Callable[[str], list[int]]
) -> dict[str, Any]:
    """Compile the schema of a row, match the row's instances, and time mask fills on valid ones.

    `subject` is the implementation to evaluate, and `encode` tokenizes a text.

    Returns
    -------
    dict
        ``outcome``
            "compiled" or "refused".
        ``why``, ``keyword``
            First reason why the schema is refused or not enforced exactly, and the schema keyword
            that causes it.
        ``backend``
            "llguidance" if graft compiled the schema; None for other implementations.
        ``partial``
            Whether graft declared that the grammar does not enforce all of the schema.
        ``compile_s``
            Compile time in seconds.
        ``fill_ns``
            Time of each mask fill in nanoseconds.
        ``valid``, ``invalid``
            Whether each instance was accepted.
        ``declared``
            Number of rejected valid instances whose rejection graft declared in advance (see
            `_is_declared`).
    """
    answer: dict[str, Any] = {"partial": False, "backend": None, "why": "", "keyword": ""}
    if isinstance(subject, Auto):
        subject.find_route(row["schema"])
    start = time.perf_counter()
    try:
        new_matcher = subject.compile(row["schema"])
    except (SchemaRefused, GrammarError) as error:
        answer |= {"outcome": "refused", "why": str(error)[:300]}
        if isinstance(subject, Auto):
            reasons = (*subject.route.reasons, *subject.route.narrowed)
            if reasons:
                answer["keyword"] = reasons[0].keyword
        return answer
    answer |= {"outcome": "compiled", "compile_s": time.perf_counter() - start}
    instances = _Instances(subject, new_matcher, encode)
    valid = [instances.accepts(value, True) for value in row["valid"]]
    rejected = [value for value, ok in zip(row["valid"], valid, strict=True) if not ok]
    declared = 0
    if isinstance(subject, Auto):
        found = subject.route
        answer |= {"partial": not found.exact, "backend": found.backend}
        reasons = (*found.reasons, *found.narrowed, *found.spelling)
        if reasons:
            answer |= {"why": reasons[0].why, "keyword": reasons[0].keyword}
        declared = sum(_is_declared(found, value, instances) for value in rejected)
    invalid = [instances.accepts(value, False) for value in row["invalid"]]
    return answer | {
        "valid": valid,
        "declared": declared,
        "fill_ns": instances.fill_ns,
        "invalid": invalid,
    }


def _is_declared(found: Any, value: Any, instances: _Instances) -> bool:
    """Return whether graft declared in advance that it rejects the valid instance `value`.

    `found` is the route: the form in which graft compiles the schema. A route declares two kinds of
    restrictions. If it is narrowed, its grammar generates fewer values than the schema allows, so
    the rejection of any instance counts as declared. If the spelling of numbers is restricted, the
    grammar may accept ``1`` but reject ``1.0``. The rejection then counts as declared if the
    grammar accepts the instance after its whole numbers have been rewritten as integers.
    """
    if found.narrowed:
        return True
    return bool(found.spelling) and instances.accepts(_with_integers(value), False)


def _with_integers(value: Any) -> Any:
    """Return a JSON value with floats such as 1.0 replaced with integers."""
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


# Entry points of the child process ----------------------------------------------------------------

_subject: Any = None
_tokenizer: Any = None


def prepare(name: str, tokenizer: str, stop_token: str | None, key_order: str) -> None:
    """Create the grammar implementation `name` (a key of `SUBJECTS`) for later calls of `answer`.

    The other arguments are options of the command line: the path of the tokenizer, the token that
    ends an output, and the order of object keys that the implementation "auto" allows.
    """
    global _subject, _tokenizer
    _tokenizer, vocabulary = load_tokenizer(Path(tokenizer), stop_token)
    _subject = SUBJECTS[name](vocabulary, _tokenizer)
    if isinstance(_subject, Auto):
        _subject.key_order = key_order
    sys.setrecursionlimit(20_000)


def _encode(text: str) -> list[int]:
    return list(_tokenizer.encode(text, add_special_tokens=False).ids)


def answer(row: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `evaluate_schema` with the implementation that `prepare` created."""
    return evaluate_schema(_subject, row, _encode)
