"""Grammar implementations that the grammar benchmark compares, run in child processes.

The benchmark (`graft.tools.bench.grammar`) continues if a child process crashes, hangs or runs out
of memory. Every implementation has these methods: ``prepare`` converts a schema to the form that
``load`` compiles; ``load`` returns a function that creates a matcher; ``fill`` computes the token
bitmask of a matcher's state; ``accept`` advances a matcher by a token; ``rollback`` takes tokens
back; and ``complete`` returns whether the text may end here, without changing the state.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graft.grammar import GrammarError, GrammarSpec, Vocabulary, make_backend, route
from graft.grammar.automaton.lower import MAX_STATES, lower
from graft.grammar.backends import llguidance
from graft.grammar.backends.xgrammar import library, tokenizer_info
from graft.grammar.resolve import resolve_for_automaton, resolve_for_backend, strict_schema
from graft.grammar.schema.router import automaton_form
from graft.grammar.validate import satisfies_schema
from graft.native import _native
from graft.tools.bench.grammar_data import byte_vocabulary, load_tokenizer

#: Maximum number of mask fills that are timed per schema.
_MAX_TIMED_FILLS = 3000
#: Maximum number of orders of keys that are tried before the search for one.
_MAX_ORDERS = 100
#: Maximum number of pieces of text that the search for an accepted order of keys tries per value.
_MAX_PIECES = 5000


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

    def prepare(self, schema: Any) -> str:
        options: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        try:
            text = self._matcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except ValueError as error:
            raise SchemaRefused(str(error)) from error
        return str(text)

    def load(self, prepared: str) -> Callable[[], Any]:
        matcher = self._matcher(self._tokenizer, prepared, log_level=0)
        if matcher.is_error():
            raise SchemaRefused(matcher.get_error().split("\n")[0])
        return matcher.deep_copy  # type: ignore[no-any-return]

    def fill(self, matcher: Any) -> None:
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.try_consume_tokens([token]) == 1)

    def rollback(self, matcher: Any, tokens: int) -> None:
        matcher.rollback(tokens)

    def complete(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


class XGrammar:
    """Compiles schemas and checks tokens with the TVM-FFI classes that XGrammar's API wraps."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Any):
        self._types = library()
        self._stop_id = vocabulary.stop_ids[0]
        self._info = tokenizer_info(vocabulary.tokens, vocabulary.size, vocabulary.stop_ids)
        self._mask = np.zeros((1, vocabulary.words), np.int32)

    def prepare(self, schema: Any) -> str:
        return json.dumps(schema)

    def load(self, prepared: str) -> Callable[[], Any]:
        compiler = self._types.GrammarCompiler(self._info, 1, False, -1)
        try:
            compiled = compiler.compile_json_schema(prepared, False, None, None, True, None, False)
        except (RuntimeError, ValueError, TypeError) as error:
            raise SchemaRefused(str(error).strip().split("\n")[-1]) from error
        return lambda: self._types.GrammarMatcher(compiled, None, False, -1, None)

    def fill(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._mask, 0, False)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token, False))

    def rollback(self, matcher: Any, tokens: int) -> None:
        matcher.rollback(tokens)

    def complete(self, matcher: Any) -> bool:
        ends = bool(matcher.accept_token(self._stop_id, False))
        if ends:
            matcher.rollback(1)
        return ends


class Graft:
    """Compiles schemas and checks tokens with graft's LLGuidance backend.

    `strict` and `key_order` are the options of `GrammarSpec.json_schema`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        tokenizer: Any = None,
        strict: bool = False,
        key_order: Any = "schema",
    ):
        self._backend: Any = make_backend("llguidance", vocabulary)
        self._mask = np.zeros(vocabulary.words, np.int32)
        self._options: dict[str, Any] = {"strict": strict, "key_order": key_order}

    def _spec(self, schema: Any) -> GrammarSpec:
        return GrammarSpec.json_schema(schema, **self._options)

    def prepare(self, schema: Any) -> tuple[GrammarSpec, llguidance.Prepared]:
        try:
            spec = self._spec(schema)
            return spec, llguidance.prepare(spec, {}, True)
        except GrammarError as error:
            raise SchemaRefused(str(error)) from error

    def load(self, prepared: tuple[GrammarSpec, llguidance.Prepared]) -> Callable[[], Any]:
        return self._backend.load(*prepared).matcher  # type: ignore[no-any-return]

    def fill(self, matcher: Any) -> None:
        matcher.fill(self._mask)

    def accept(self, matcher: Any, token: int) -> bool:
        # An engine fills a mask before each token. LLGuidance's limits apply to the work between
        # two masks. Automata have no such limits.
        if matcher.compiled.automaton is None:
            matcher.fill(self._mask)
        return bool(matcher.accept(token))

    def rollback(self, matcher: Any, tokens: int) -> None:
        matcher.rollback(tokens)

    def complete(self, matcher: Any) -> bool:
        ends = bool(matcher.accept(matcher.stop_ids[0]))
        if ends:
            matcher.rollback(1)
        return ends

    def why_no_table(self, schema: Any) -> str:
        """Return why a schema that graft accepts has no automaton."""
        try:
            spec = self._spec(schema)
            grammar = resolve_for_automaton(spec) or resolve_for_backend(
                spec, "llguidance", unique_items=lambda schema: schema
            )
            _native.guide.compile_automaton(lower(grammar), MAX_STATES)
        except RecursionError:
            return "nested too deeply"
        except ValueError as error:
            return str(error)
        return ""

    def enforced(self, schema: Any) -> Any:
        """Return the schema that is enforced with the given options."""
        return strict_schema(schema) if self._options["strict"] else schema

    def narrowed(self, schema: Any) -> str:
        """Return a reason why valid values of a schema are never generated; "" if there is none.

        The order of keys does not count.
        """
        enforced, key_order = self.enforced(schema), self._options["key_order"]
        found = route(enforced, key_order=key_order)
        form = automaton_form(enforced, key_order=key_order)
        narrowed = found.narrowed if form is None else (*found.narrowed, *form.narrowed)
        reasons = [reason for reason in narrowed if reason not in found.ordered]
        return str(reasons[0]) if reasons else ""


#: Implementations by name: the libraries' own Python APIs, and graft.
SUBJECTS: dict[str, Any] = {"llguidance": LLGuidance, "xgrammar": XGrammar, "graft": Graft}


class _KeyOrderSearch:
    """Search for an order of keys in which a matcher accepts a value, byte by byte.

    `subject` is an implementation, `matcher` its matcher at the start of the grammar, and
    `byte_tokens` has the token id of each byte. `orders` contains the names of each ``properties``
    of the schema. For each object, the order of the ``properties`` with most of the object's names
    is tried first.
    """

    def __init__(
        self,
        subject: Any,
        matcher: Any,
        byte_tokens: list[int],
        orders: Sequence[Mapping[str, int]],
    ):
        self._orders = orders
        self._subject = subject
        self._matcher = matcher
        self._byte_tokens = byte_tokens
        self._pieces: list[str] = []
        self._left = _MAX_PIECES

    def find(self, value: Any) -> str | None:
        """Return a text of the value that is accepted, or None."""
        for _ in self._value(value):
            if self._subject.complete(self._matcher):
                return "".join(self._pieces)
        return None

    # The methods below yield once for each way in which the matcher accepts their texts. The
    # matcher has accepted the text while the caller handles the yield, and has rolled it back when
    # the generator continues.

    def _text(self, text: str) -> Iterator[None]:
        self._left -= 1
        if self._left < 0:
            return
        accepted = 0
        data = text.encode()
        for byte in data:
            if not self._subject.accept(self._matcher, self._byte_tokens[byte]):
                break
            accepted += 1
        if accepted == len(data):
            self._pieces.append(text)
            yield
            self._pieces.pop()
        if accepted:
            self._subject.rollback(self._matcher, accepted)

    def _value(self, value: Any) -> Iterator[None]:
        if isinstance(value, dict):
            for _ in self._text("{"):
                order = max(self._orders, key=lambda order: len(order.keys() & value), default={})
                keys = sorted(value, key=lambda key: order.get(key, len(order)))
                yield from self._members(value, keys, "")
        elif isinstance(value, list):
            for _ in self._text("["):
                yield from self._items(value, 0)
        else:
            yield from self._text(_json_text(value))

    def _members(self, value: dict[str, Any], keys: list[str], separator: str) -> Iterator[None]:
        if not keys:
            yield from self._text("}")
        for key in keys:
            rest = [other for other in keys if other != key]
            for _ in self._text(f"{separator}{_json_text(key)}: "):
                for _ in self._value(value[key]):
                    yield from self._members(value, rest, ", ")

    def _items(self, value: list[Any], index: int) -> Iterator[None]:
        if index == len(value):
            yield from self._text("]")
            return
        for _ in self._text(", ") if index else (None,):
            for _ in self._value(value[index]):
                yield from self._items(value, index + 1)


class _Instances:
    """Matches instances of one JSON schema.

    `new_matcher` returns a matcher in its initial state, `encode` tokenizes a text, `byte_tokens`
    has the token id of each byte, and `schema` is the JSON schema.
    """

    def __init__(
        self,
        subject: Any,
        new_matcher: Callable[[], Any],
        encode: Callable[[str], list[int]],
        byte_tokens: list[int],
        schema: Any,
    ):
        self._subject = subject
        self._new_matcher = new_matcher
        self._encode = encode
        self._orders = list(_name_orders(schema))
        self._byte_tokens = byte_tokens

    def fill_ns(self, text: str, limit: int) -> list[int]:
        """Fill a mask before each token of a text, up to the first token that is refused.

        Return the processor time of each mask in nanoseconds, at most `limit` of them.
        """
        matcher = self._new_matcher()
        times = []
        for token in self._encode(text)[:limit]:
            start = time.thread_time_ns()
            self._subject.fill(matcher)
            times.append(max(0, time.thread_time_ns() - start - _clock_ns()))
            if not self._subject.accept(matcher, token):
                break
        return times

    def accepts(self, text: str) -> bool:
        """Return whether the grammar accepts the tokens of a text."""
        matcher = self._new_matcher()
        tokens = self._encode(text)
        return all(self._subject.accept(matcher, token) for token in tokens) and bool(
            self._subject.complete(matcher)
        )

    def accepted_text(self, value: Any) -> str | None:
        """Return a text of a value that the grammar accepts, or None if no such text is found.

        The text that ``json.dumps`` writes is tried first. Then whole numbers are written as
        integers, and other orders of the keys are tried: first those in which the names that one
        ``properties`` of the schema lists precede all others.
        """
        text = _json_text(value)
        if self.accepts(text):
            return text
        plain = _with_integers(value)
        for order in self._orders[:_MAX_ORDERS]:
            text = _json_text(_with_first_keys(plain, order))
            if self.accepts(text):
                return text
        matcher = self._new_matcher()
        search = _KeyOrderSearch(self._subject, matcher, self._byte_tokens, self._orders)
        try:
            found = search.find(plain)
        except RecursionError:
            return None
        return found if found is not None and self.accepts(found) else None


def _with_first_keys(value: Any, order: Mapping[str, int]) -> Any:
    """Return a JSON value in whose objects the keys of `order` come first, in their order."""
    if isinstance(value, list):
        return [_with_first_keys(item, order) for item in value]
    if not isinstance(value, dict):
        return value
    keys = sorted(value, key=lambda key: order.get(key, len(order)))
    return {key: _with_first_keys(value[key], order) for key in keys}


def evaluate_schema(
    subject: Any,
    row: dict[str, Any],
    encode: Callable[[str], list[int]],
    byte_tokens: list[int],
    timed: bool,
) -> dict[str, Any]:
    """Compile the schema of a row and match the row's instances.

    `subject` is the implementation to evaluate, `encode` tokenizes a text, and `byte_tokens` has
    the token id of each byte.

    Returns
    -------
    dict
        ``status``, ``cause``
            See `graft.tools.bench.grammar`. The cause of "narrowed" and "refused" is a reason of
            the implementation, and that of "wrong" names the first instance.
        ``reordered``
            Whether a valid instance is accepted only with another spelling than in the row: with
            other orders of keys, or with whole numbers written as integers.
        ``table_bytes``, ``table_cause``
            For graft: size of the automaton, or None and the reason why there is none.
        ``compile_ms``
            Processor time of the compilation in milliseconds.
        ``first_us``, ``later_us``
            If `timed`: processor time of each mask fill in microseconds, along the first instance
            and along the others. The only instance of a row is matched twice.
        ``kilobytes``
            If `timed`: memory that the process has allocated for the compiled grammar. Memory for
            states and masks that an implementation computes later does not count.
    """
    schema = row["schema"]
    answer: dict[str, Any] = {"cause": "", "reordered": False, "table_bytes": None}
    answer["table_cause"] = ""
    start = time.process_time()
    try:
        prepared = subject.prepare(schema)
        prepare_s = time.process_time() - start
        before = _allocated_bytes() if timed else 0
        start = time.process_time()
        new_matcher = subject.load(prepared)
        answer["compile_ms"] = (prepare_s + time.process_time() - start) * 1e3
    except (SchemaRefused, GrammarError) as error:
        return answer | {"status": "refused", "cause": str(error)[:300]}
    instances = _Instances(subject, new_matcher, encode, byte_tokens, schema)
    if timed:
        answer["kilobytes"] = (_allocated_bytes() - before) / 1e3
        texts = [_json_text(value) for value in (*row["valid"], *row["invalid"])]
        first = instances.fill_ns(texts[0], _MAX_TIMED_FILLS)
        later: list[int] = []
        for text in texts[1:] or texts:
            later += instances.fill_ns(text, _MAX_TIMED_FILLS - len(later))
        answer["first_us"] = [ns / 1e3 for ns in first]
        answer["later_us"] = [ns / 1e3 for ns in later]
    if isinstance(subject, Graft):
        automaton = new_matcher.__self__.automaton  # type: ignore[attr-defined]
        if automaton is None:
            answer["table_cause"] = subject.why_no_table(schema)
        else:
            answer["table_bytes"] = automaton.nbytes
    return answer | _status(subject, row, instances)


def _status(subject: Any, row: dict[str, Any], instances: _Instances) -> dict[str, Any]:
    """Match the instances of a row; return ``status``, ``cause`` and ``reordered``."""
    if not row["valid"] and not row["invalid"]:
        return {"status": "untested"}
    for index, value in enumerate(row["invalid"]):
        if instances.accepted_text(value) is not None:
            return {"status": "wrong", "cause": f"accepts invalid[{index}]"}
    schema = row["schema"]
    reordered = False
    narrowed = ""
    for index, value in enumerate(row["valid"]):
        text = instances.accepted_text(value)
        if text is not None:
            reordered |= text != _json_text(value)
            continue
        if isinstance(subject, Graft):
            if not _satisfies(subject.enforced(schema), value):
                continue  # strict=True excludes the value
            narrowed = subject.narrowed(schema)
        if not narrowed:
            return {"status": "wrong", "cause": f"rejects valid[{index}]"}
    if narrowed:
        return {"status": "narrowed", "cause": narrowed, "reordered": reordered}
    return {"status": "right", "reordered": reordered}


def _satisfies(schema: Any, value: Any) -> bool:
    """Return whether jsonschema does not refute that a value satisfies a schema."""
    try:
        return satisfies_schema(json.dumps(schema), json.dumps(value))
    except GrammarError:
        return True


def _name_orders(schema: Any) -> Iterator[dict[str, int]]:
    """Yield, for each ``properties`` of a schema, the index of each name that it lists."""
    if isinstance(schema, dict):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            yield {name: place for place, name in enumerate(properties)}
    if isinstance(schema, (dict, list)):
        for part in schema.values() if isinstance(schema, dict) else schema:
            yield from _name_orders(part)


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_integers(value: Any) -> Any:
    """Return a JSON value with floats such as 1.0 replaced with integers."""
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


# Measures of the process --------------------------------------------------------------------------

_clock_cost_ns = -1


def _clock_ns() -> int:
    """Return the processor time that two readings of the thread's clock take, in nanoseconds."""
    global _clock_cost_ns
    if _clock_cost_ns < 0:
        pairs = [(time.thread_time_ns(), time.thread_time_ns()) for _ in range(1000)]
        _clock_cost_ns = int(np.median([end - start for start, end in pairs]))
    return _clock_cost_ns


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library."""

    _fields_ = tuple((f"field_{index}", ctypes.c_size_t) for index in range(10))


def _allocated_bytes() -> float:
    """Return the number of bytes that the C library has allocated; NaN if it has no `mallinfo2`."""
    gc.collect()
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return float("nan")
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return float(found.field_4 + found.field_7)  # memory-mapped blocks, and blocks of the heaps


# Entry points of the child process ----------------------------------------------------------------

_subject: Any = None
_encode: Callable[[str], list[int]]
_byte_tokens: list[int]


def prepare(
    name: str, tokenizer: str | None, stop_token: str | None, options: dict[str, Any]
) -> None:
    """Create the grammar implementation `name` (a key of `SUBJECTS`) for later calls of `answer`.

    The other arguments are options of the command line: the path of the tokenizer (None for a
    vocabulary of single bytes), the token that ends an output, and the options of `Graft`.
    """
    global _subject, _encode, _byte_tokens
    found = None
    if tokenizer is None:
        vocabulary = byte_vocabulary()
        _encode = encode_bytes
    else:
        found, vocabulary = load_tokenizer(Path(tokenizer), stop_token)
        _encode = lambda text: list(found.encode(text, add_special_tokens=False).ids)  # noqa: E731
    ids = {token: index for index, token in reversed(list(enumerate(vocabulary.tokens)))}
    _byte_tokens = [ids.get(bytes([byte]), -1) for byte in range(256)]
    _subject = SUBJECTS[name](vocabulary, found, **(options if name == "graft" else {}))
    sys.setrecursionlimit(20_000)


def encode_bytes(text: str) -> list[int]:
    """Return the tokens of a text in `byte_vocabulary`."""
    return list(text.encode())


def answer(row: dict[str, Any], timed: bool) -> dict[str, Any]:
    """Return the result of `evaluate_schema` with the implementation that `prepare` created."""
    return evaluate_schema(_subject, row, _encode, _byte_tokens, timed)
