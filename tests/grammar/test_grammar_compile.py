"""Tests of GrammarService: results, cache, routing, limits and child processes."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
import weakref

import pytest
from guide_util import BYTES, accepts, byte_vocabulary, output_of

from graft.cudagraph.errors import OptionError
from graft.grammar import (
    CompiledGrammar,
    GrammarError,
    GrammarService,
    GrammarSpec,
    GrammarUnavailableError,
    Vocabulary,
)
from graft.grammar.backends import llguidance
from graft.grammar.backends import xgrammar as xgrammar_module
from graft.grammar.backends.llguidance import LLGuidanceBackend
from graft.grammar.backends.xgrammar import XGrammarBackend
from graft.grammar.processes import POOL
from graft.native.children.errors import ChildTimeout, ChildUnavailable
from graft.native.children.process import Call, ChildProcess

ENDLESS = GrammarSpec("json_schema", '{"items": ' * 500 + "{}" + "}" * 500)  # takes minutes
NOT = {
    "type": "object",
    "properties": {"a": {"type": ["string", "null"], "not": {"const": "x"}}},
    "required": ["a"],
    "additionalProperties": False,
}


def assert_equal_masks(one: CompiledGrammar, other: CompiledGrammar, text: bytes) -> None:
    """Check that two grammars accept a text and have equal masks before each byte of the text."""
    first = one.matcher()
    second = other.matcher()
    for byte in text:
        assert first.legal().tolist() == second.legal().tolist()
        assert first.accept(byte) and second.accept(byte)
    assert first.legal().tolist() == second.legal().tolist()


def test_compile_service_gives_same_masks_as_backend(xgrammar, serve):
    service = serve(timeout_s=600)
    integers = {"type": "array", "maxItems": 40, "items": {"type": "integer"}}
    for spec, text in (
        (GrammarSpec.json_schema(integers), b"[1, -20"),
        (GrammarSpec.regex("(ab|abc)+[0-9]{2,40}"), b"ababc12"),
        (GrammarSpec.choice(["true", "ab"]), b"ab"),
        (GrammarSpec.lark('start: "true" | "ab" /[0-9]/'), b"ab7"),
    ):
        assert_equal_masks(service.submit(spec).result(), xgrammar.compile(spec), text)


def test_compile_service_shares_results(serve):
    """Submissions of equal specifications share one compilation, which cannot be cancelled.

    Services with equal settings share compiled grammars. A service with other settings does not.
    """
    spec = GrammarSpec.regex("shared+")
    first = serve()
    second = serve()
    other = serve(cache_bytes=1 << 20)
    # Services of earlier tests may still be alive and share the cache.
    known = first.counters()["cache_entries"]
    futures = [first.submit(spec), first.submit(GrammarSpec.regex("shared+"))]
    assert not any(future.cancel() for future in futures)
    compiled = futures[0].result()
    assert futures[1].result() is compiled
    assert first.counters()["cache_entries"] == known + 1
    assert second.submit(spec).result() is compiled is first.submit(spec).result()
    assert not first.submit(spec).cancel()
    assert other.submit(spec).result() is not compiled
    assert "compiled" not in second.counters()


@pytest.mark.parametrize(
    "spec, message",
    [
        (GrammarSpec("regex", "a(b"), "parenthesis is not closed"),
        (GrammarSpec("regex", "[z-a]"), "lower bound is larger"),
        (GrammarSpec("regex", r"(a)\1"), "Backreference"),
        (GrammarSpec("regex", "a(?=b)"), "Lookahead"),
        (GrammarSpec("ebnf", "root ::= "), "Expect element"),
        (GrammarSpec("ebnf", "root ::= missing"), '"missing" is not defined'),
        (GrammarSpec("ebnf", 'start ::= "a"'), '"root" is not found'),
        (GrammarSpec("json_schema", '{"type": "foo"}'), "must be a type of JSON .*'foo'"),
        (GrammarSpec("json_schema", '{"$ref": "#/nowhere"}'), "'#/nowhere' points to nothing"),
        (GrammarSpec("json_schema", '{"type": "string", "pattern": "(a"}'), "not closed"),
        (GrammarSpec("json_schema", '{"type": "integer", "minimum": 5, "maximum": 2}'), "range"),
        (GrammarSpec.json_schema(NOT), "#/properties/a: not"),
        (
            GrammarSpec.json_schema({"type": "string", "pattern": "(?=a)b"}, backend="xgrammar"),
            "cannot be enforced as a whole: Lookahead",
        ),
        (
            GrammarSpec.json_schema(
                {"oneOf": [{"type": "string"}, {"pattern": "^a", "type": "string"}]}
            ),
            "cannot be enforced as a whole: oneOf with overlapping",
        ),
        (
            GrammarSpec.json_schema({"type": "number", "multipleOf": 0.5}),
            "cannot be enforced as a whole: multipleOf",
        ),
    ],
)
def test_compile_service_reports_xgrammar_errors_and_warnings(
    xgrammar, serve, capfd, spec, message
):
    """The error message is one sentence without source locations, time stamps or backtraces.

    XGrammar's own message does not appear on the standard output.
    """
    in_service = serve(timeout_s=600).submit(spec).result

    def in_process():
        return xgrammar.compile(spec)

    # XGrammar prints its warnings, which only the child process can read.
    compilers = [in_service] if "enforced" in message else [in_service, in_process]
    for compile_spec in compilers:
        with pytest.raises(GrammarError, match=message) as caught:
            compile_spec()
        assert not any(text in str(caught.value) for text in (".cc", "Traceback", "\n"))
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


#: Counters of finished compilations.
OUTCOMES = ("compiled", "refused", "failed", "killed_or_crashed")


class SlowBackend(LLGuidanceBackend):
    """A backend that sleeps N seconds in the child process for a pattern of the form sleepN."""

    def compile_call(self, spec):
        if spec.text.startswith("sleep"):
            return Call("time:sleep", (float(spec.text[5:]),))
        return super().compile_call(spec)

    def load(self, spec, result):
        if spec.text.startswith("sleep"):
            return self.compile(GrammarSpec.regex("a+"))
        return super().load(spec, result)


def sleeping(seconds: float) -> GrammarSpec:
    return GrammarSpec("regex", f"sleep{seconds}")


class ExitingBackend(LLGuidanceBackend):
    """A backend that raises SystemExit while it loads or measures a grammar.

    The pattern of the grammar selects the time: "exit_load" or "exit_nbytes".
    """

    class Grammar(CompiledGrammar):
        """A compiled grammar without a size."""

        @property
        def nbytes(self):
            sys.exit("no size")

        @nbytes.setter
        def nbytes(self, size):
            pass

    def load(self, spec, result):
        compiled = super().load(spec, result)
        if "exit_load" in spec.text:
            sys.exit("no grammar")
        if "exit_nbytes" in spec.text:
            compiled.__class__ = self.Grammar
        return compiled


@pytest.mark.parametrize("when", ["load", "nbytes", "callback"])
def test_compile_thread_survives_system_exit(serve, when):
    """SystemExit in a backend or in a done callback does not end a compile thread."""
    service = serve(ExitingBackend)
    future = service.submit(GrammarSpec.regex(f"exit_{when}[0-9]"))
    if when == "callback":
        future.add_done_callback(lambda _: sys.exit("no"))
    error = future.exception(timeout=60)
    assert (error is not None) == (when == "load")
    assert service.submit(GrammarSpec.regex("next+")).result(timeout=60) is not None
    wait_until(lambda: service._fast_queue.jobs.empty())
    assert all(thread.is_alive() for thread in service._fast_queue.threads)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.full)])
def test_compile_service_does_not_delay_fast_grammars(serve, count):
    """A slow grammar moves to the slow queue after the time limit of the fast queue."""
    service = serve(SlowBackend, timeout_s=3600)
    slow = [service.submit(sleeping(3600 + i)) for i in range(count)]
    quick = [service.submit(GrammarSpec.regex(f"b{i}+")) for i in range(20)]
    for future in quick:
        assert future.result(timeout=300).nbytes > 0
    assert not any(future.done() for future in slow)
    assert service.counters()["compiled"] == 20


def test_compile_service_runs_one_process_for_one_grammar_at_a_time(serve):
    service = serve(threads=3, memory_bytes=1 << 30)  # no process of the pool has this limit
    for i in range(6):
        service.submit(GrammarSpec.regex(f"one at a time {i}")).result()
    assert sum(child.idle for child in service._children) == 1


def test_compile_service_remembers_slow_grammars(serve, monkeypatch):
    """A grammar that has been too slow for the fast queue does not occupy it a second time."""
    calls = []

    def time_out(child, *_):
        calls.append(child)
        raise ChildTimeout("took too long")

    service = serve(SlowBackend)
    fast, slow = service._children
    monkeypatch.setattr(ChildProcess, "call", time_out)
    for expected in ([fast, slow], [fast, slow, slow]):
        with pytest.raises(GrammarError, match="took too long"):
            service.submit(GrammarSpec.regex("slow")).result(timeout=300)
        assert calls == expected


WIDE = GrammarSpec(
    "json_schema", json.dumps({"properties": {f"p{i}": {"type": "null"} for i in range(20_000)}})
)


@pytest.mark.parametrize("choice, spec", [("xgrammar", ENDLESS), ("auto", WIDE)])
@pytest.mark.full("auto")
def test_compile_service_time_limit(serve, choice, spec):
    service = serve(choice, timeout_s=0.3)
    with pytest.raises(GrammarError, match=r"JSON schema: took longer than 0.3 s$"):
        service.submit(spec).result(timeout=300)


def test_compile_service_memory_limit_fails_one_grammar(serve):
    service = serve(memory_bytes=1 << 28, timeout_s=600)
    large = GrammarSpec.regex("([a-z]x[0-9]|[b-z]y){1000,3000}" * 90)
    message = r"regex: needs more than 0\.25 GiB of memory"
    with pytest.raises(GrammarError, match=message):
        service.submit(large).result(timeout=300)
    assert service.submit(GrammarSpec.regex("a+")).result(timeout=300).nbytes > 0


@pytest.mark.parametrize("spec, kept", [(sleeping(60), False), (GrammarSpec("regex", "(a"), True)])
def test_compile_service_caches_refusals_but_not_timeouts(serve, spec, kept):
    service = serve(SlowBackend, timeout_s=1)
    first = service.submit(spec).exception(timeout=300)
    assert isinstance(first, GrammarError)
    assert service.counters()["cache_entries"] == int(kept)
    second = service.submit(spec).exception(timeout=300)
    assert isinstance(second, GrammarError) and str(second) == str(first)
    counters = service.counters()
    assert sum(counters.get(outcome, 0) for outcome in OUTCOMES) == (1 if kept else 2)


def busy_process_id(service: GrammarService) -> int:
    """Wait until the slow queue's child process compiles a grammar, and return its process id."""
    child = service._children[1]
    wait_until(lambda: child._process is not None and not child.idle)
    return child._process.pid


def test_compile_service_survives_killed_process(serve):
    """The compilation is repeated in a new process."""
    service = serve(SlowBackend)
    slow = service.submit(sleeping(1.2))
    os.kill(busy_process_id(service), signal.SIGKILL)
    assert slow.result(timeout=300).nbytes > 0


def test_compile_service_reports_unavailable_processes(serve, monkeypatch):
    """Without a process for the fast queue, the compilation starts again in the slow queue.

    If no process is available for the slow queue either, the error does not blame the grammar.
    """
    calls = []

    def fail(child, *_):
        calls.append(child)
        raise ChildUnavailable("the child process did not start within 120 s")

    service = serve(SlowBackend)
    with monkeypatch.context() as patch:
        patch.setattr(ChildProcess, "call", fail)
        with pytest.raises(GrammarUnavailableError, match="regex: could not be compiled: the"):
            service.submit(GrammarSpec.regex("unavailable")).result(timeout=300)
    assert calls == service._children
    assert service.submit(GrammarSpec.regex("unavailable")).result(timeout=300).nbytes > 0


def test_compile_service_close_fails_pending_grammars(serve):
    """close() kills running compilations and returns each child process to the pool.

    A second call of close() does not return a process to the pool twice.
    """
    service = serve(SlowBackend, timeout_s=3600)
    futures = [service.submit(sleeping(3600 + i)) for i in range(3)]
    pid = busy_process_id(service)
    service.close()
    service.close()
    assert len(POOL._idle) == len({id(child) for child in POOL._idle})
    for future in futures:
        with pytest.raises(GrammarError, match="closed"):
            future.result(timeout=0)
    with pytest.raises(GrammarError, match="is closed"):
        service.submit(GrammarSpec.regex("b+"))
    assert not any(
        thread.is_alive() for thread in (*service._fast_queue.threads, *service._slow_queue.threads)
    )
    assert not os.path.exists(f"/proc/{pid}")


def test_compile_service_close_during_submission_completes_the_future(serve, monkeypatch):
    service = serve("llguidance")
    closer = threading.Thread(target=service.close)
    put = service._fast_queue.put

    def put_while_closing(job):
        closer.start()
        closer.join(0.3)  # ends only if close() does not wait for the submission
        put(job)

    monkeypatch.setattr(service._fast_queue, "put", put_while_closing)
    future = service.submit(GrammarSpec.regex("a+"))
    closer.join()
    assert future.done()


RETAINED = """
from graft.grammar import GrammarService, GrammarSpec, Vocabulary
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20
letters = [bytes([a, b]) for a in range(97, 123) for b in range(97, 123)]
tokens = [bytes([b]) for b in range(256)] + letters * 4 + [b""]
vocabulary = Vocabulary(tokens, len(tokens), [len(tokens) - 1])
before = resident()
for life in range(3):
    service = GrammarService(vocabulary, "xgrammar", cache_bytes=(1 << 29) + life)
    for i in range(4):
        text = '{"type": "string", "pattern": "^[a-z]{0,20}$"}'
        keys = (f'"k{i}_{j}": {text}' for j in range(25))
        text = '{"type": "object", "properties": {' + ", ".join(keys) + "}}"
        service.submit(GrammarSpec("json_schema", text)).result(300)
    service.close()
    del service
print(resident() - before)
"""


@pytest.mark.full
def test_xgrammar_load_returns_memory():
    """The process does not grow when it loads large grammars that a child process has compiled."""
    assert int(output_of(RETAINED)) < 40  # MiB; measured: 18, and 62 without malloc_trim


def test_grammar_cache_evicts_least_recently_used(serve):
    probe = serve(cache_bytes=(1 << 20) + 1)
    probe.submit(GrammarSpec.regex("x0")).result()
    one = probe.counters()["cache_bytes"]
    probe.close()
    service = serve(cache_bytes=3 * one + one // 2)
    specs = [GrammarSpec.regex(f"x{i}") for i in range(5)]
    compiled = [service.submit(spec).result() for spec in specs]
    assert service.counters()["cache_entries"] == 3
    assert service.submit(specs[4]).result() is compiled[4]
    assert service.submit(specs[0]).result() is not compiled[0]
    assert service.counters()["cache_bytes"] <= 3 * one + one // 2


def test_grammar_cache_counts_everything_it_holds(serve):
    """The size includes texts in wide characters and refusals. It is right after evictions."""
    service = serve("auto", cache_bytes=1 << 20)
    wide = "\N{SNOWMAN}" * 400  # 2 bytes per character
    specs = [
        GrammarSpec.json_schema({"const": wide}),
        GrammarSpec.json_schema({"enum": ["é", wide]}, key_order="any"),
        GrammarSpec("regex", "(" + wide),
        *(GrammarSpec.json_schema({"enum": [i, wide]}) for i in range(40)),
    ]
    for spec in specs:
        service.submit(spec).exception(timeout=300)
    service.close()  # waits for the queue's threads
    entries = service._shared.cache._entries
    assert 2 < len(entries) < len(specs)
    sizes = []
    for spec, (outcome, size) in entries.items():
        sizes.append(size)
        held = sys.getsizeof(spec.text)
        if isinstance(outcome, CompiledGrammar):
            held += outcome.nbytes
        else:
            held += sys.getsizeof(outcome)
        assert held <= size <= held + 4096
    assert service.counters()["cache_bytes"] == sum(sizes) <= 1 << 20


@pytest.mark.parametrize("pattern", ["kept+", "(refused"])
def test_compile_service_drops_callbacks(serve, pattern):
    """A cached grammar or refusal keeps alive neither callbacks nor the frames of its waiters.

    Nothing keeps a future alive once its waiter drops it.
    """

    class Waiter:
        """Waits for a grammar, as a request does."""

        def __init__(self):
            self.future = service.submit(GrammarSpec("regex", pattern))
            self.future.add_done_callback(self.on_compiled)

        def on_compiled(self, future):
            with contextlib.suppress(GrammarError):
                future.result()

        def wait(self):
            with contextlib.suppress(GrammarError):
                self.future.result(300)

    service = serve()
    references = []
    for _ in range(3):  # the first waiter compiles, the others find the result in the cache
        waiter = Waiter()
        waiter.wait()
        references += [weakref.ref(waiter), weakref.ref(waiter.future)]
        del waiter
    assert service.counters()["cache_entries"] >= 1  # services of other tests may share the cache
    wait_until(lambda: collected(references))


def collected(references) -> bool:
    """Return whether all objects are dead, after a garbage collection."""
    gc.collect()
    return all(reference() is None for reference in references)


def wait_until(condition):
    """Wait for a condition that a thread of the service may establish after a future is done."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("choice", ["xgrammar", "auto"])
def test_compile_service_refuses_grammars_without_output(serve, choice):
    """A grammar that allows no output is refused only if the vocabulary can spell every text.

    Otherwise, the cause may be the vocabulary. The grammar is then accepted, and the request ends
    in a dead end.
    """
    some = Vocabulary([bytes([b]) for b in range(128)] + [b""], 129, [128])
    nothing = (GrammarSpec.regex(r"[^\s\S]"), GrammarSpec.ebnf('root ::= root "a"'))
    for vocabulary, refused in ((BYTES, True), (some, False)):
        service = serve(choice, vocabulary)
        for spec in nothing:
            error = service.submit(spec).exception(timeout=300)
            assert str(error) == (f"{spec.kind}: allows no output" if refused else "None")
        assert service.submit(GrammarSpec.regex("a*")).result(timeout=300) is not None


class FaultyBackend:
    """A backend that raises an unexpected exception, and whose grammars have an invalid size."""

    name = "vague"

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary
        self._inner = LLGuidanceBackend(vocabulary)
        self.matcher = self._inner.matcher

    def compile(self, spec):
        if spec.text == "fails+":
            raise KeyError("fails")
        compiled = self._inner.compile(spec)
        compiled.nbytes = None
        return compiled


def test_compile_service_survives_faulty_backend(serve, caplog):
    """The service reports every exception of a backend as a `GrammarError` of the grammar."""
    service = serve(FaultyBackend)
    failed = service.submit(GrammarSpec("regex", "fails+")).exception(timeout=300)
    assert isinstance(failed, GrammarError) and str(failed) == "regex: KeyError: 'fails'"
    for text in ("a+", "b+", "a+"):
        assert service.submit(GrammarSpec("regex", text)).result(timeout=300) is not None
    wait_until(lambda: "not cached" in caplog.text)


NESTED = """
from graft.grammar import GrammarService, GrammarSpec, Vocabulary
vocabulary = Vocabulary([bytes([b]) for b in range(256)] + [b""], 257, [256])
service = GrammarService(vocabulary, "llguidance")
for length in (700, 2000):
    definitions = {f"d{length}": {"type": "integer", "multipleOf": 9973}}
    for i in range(length):
        definitions[f"d{i}"] = {"properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}}
    schema = {"$defs": definitions, "$ref": "#/$defs/d0"}
    error = service.submit(GrammarSpec.json_schema(schema)).exception(300)
    print(type(error).__name__)
service.close()
"""


@pytest.mark.parametrize("stack_bytes", [resource.RLIM_INFINITY, 1 << 20])
@pytest.mark.full("1048576")
def test_long_chains_of_references_do_not_overflow_the_stack(stack_bytes):
    """Grammars that a child process compiles are compiled again, whatever the limit of stacks."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_STACK)
    if stack_bytes == resource.RLIM_INFINITY != hard_limit:
        pytest.skip("the size of the stack is limited")

    def limit_stack():
        resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, hard_limit))

    # LLGuidance compiles the first schema. The router refuses the second one, because LLGuidance's
    # recursion would be too deep.
    printed = output_of(NESTED, preexec_fn=limit_stack)
    assert printed.split() == ["NoneType", "GrammarError"]


RESIDENT = """
import gc, sys
from graft.grammar import GrammarSpec, Vocabulary, make_backend
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
vocabulary = Vocabulary([bytes([b]) for b in range(256)] + [b""], 257, [256])
backend = make_backend("llguidance", vocabulary)
def use(i):
    properties = {f"k{i}_{j}": {"type": "string", "maxLength": 20} for j in range(10)}
    grammar = backend.compile(GrammarSpec.json_schema({"properties": properties}))
    grammar.matcher().legal()
    return grammar
use(0)
before = resident()
grammars = [use(i + 1) for i in range(80)]
gc.collect()
print((resident() - before) / sum(grammar.nbytes for grammar in grammars))
"""


def test_llguidance_grammar_size_is_not_underestimated():
    assert float(output_of(RESIDENT)) < 1.3


def test_grammar_larger_than_cache_is_not_cached(serve, xgrammar):
    """A grammar that is not cached can still be used."""
    service = serve(cache_bytes=1)
    spec = GrammarSpec.json_object()
    compiled = service.submit(spec).result()
    service.close()  # waits for the queue's threads
    assert service.counters()["cache_entries"] == 0
    gc.collect()
    assert_equal_masks(compiled, xgrammar.compile(spec), b'{"a": 1}')


@pytest.mark.parametrize(
    "name, value",
    [
        ("threads", 0),
        ("cache_bytes", 0),
        ("memory_bytes", 0),
        *(("timeout_s", value) for value in (0, 10**400, float("inf"), float("nan"), "1", None)),
    ],
)
def test_compile_service_rejects_invalid_options(name, value):
    with pytest.raises(OptionError, match=rf"{name} is .* must be( a)? positive"):
        GrammarService(byte_vocabulary(), **{name: value})


def test_compile_service_without_libraries_refuses_each_grammar(serve, monkeypatch):
    """The service starts, so that an engine can run requests that have no grammar."""

    def refuse():
        raise OptionError("it is not installed")

    monkeypatch.setattr(llguidance, "load_native", refuse)
    monkeypatch.setattr(xgrammar_module, "load_native", refuse)
    service = serve("auto", byte_vocabulary(272))
    for spec in (
        GrammarSpec.regex("a+"),
        GrammarSpec.json_schema(PLAIN),
        GrammarSpec.ebnf('root ::= "a"'),
    ):
        with pytest.raises(GrammarError, match="it is not installed"):
            service.submit(spec).result(60)
    with pytest.raises(OptionError, match="it is not installed"):
        serve("llguidance", byte_vocabulary(272))


PLAIN = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize("choice", ["auto", "llguidance"])
def test_compile_service_routes_json_schemas(serve, choice):
    """A schema with ``not`` is enforced exactly.

    The masks are equal in three cases: the service routes the schema, the backend routes the
    schema, and the grammar names the backend.
    """
    service = serve(choice, BYTES)
    compiled = service.submit(GrammarSpec.json_schema(NOT)).result(120)
    assert isinstance(compiled.backend, LLGuidanceBackend) and compiled.spec.schema == NOT
    alone = LLGuidanceBackend(BYTES).compile(GrammarSpec.json_schema(NOT))
    for grammar in (compiled, alone):
        taken = [accepts(grammar, text) for text in ('{"a": "y"}', '{"a": null}', '{"a": "x"}')]
        assert taken == [True, True, False]
    assert service.submit(GrammarSpec.json_schema(NOT)).result(120) is compiled
    named = GrammarSpec.json_schema(NOT, backend="auto", strict=True)
    assert_equal_masks(compiled, service.submit(named).result(120), b'{"a": "yes"}')


def test_compile_service_auto_backend_compiles_every_kind(serve):
    """The service compiles EBNF with XGrammar, and keeps the markers of specifications."""
    service = serve("auto", BYTES)
    ebnf = service.submit(GrammarSpec.ebnf('root ::= "a" [0-9]')).result(120)
    assert isinstance(ebnf.backend, XGrammarBackend)
    for spec in (
        GrammarSpec.regex("a+"),
        GrammarSpec.choice(["a", "b"]),
        GrammarSpec.json_object(),
        GrammarSpec.lark('start: "a"'),
    ):
        assert service.submit(spec).result(120).spec.kind == spec.kind
    marked = GrammarSpec.json_schema(PLAIN).after("</think>")
    compiled = service.submit(marked).result(120)
    assert compiled.spec.marker == marked.marker and accepts(compiled, 'hm</think>{"n": 1}')
