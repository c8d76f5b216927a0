"""The compile service: futures, cache, routing, limits of time and memory, killed children."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from concurrent.futures import wait
from dataclasses import replace

import pytest
from guide_util import byte_vocabulary

from graft.cudagraph.errors import OptionError
from graft.grammar import (
    CompileService,
    GrammarError,
    GrammarService,
    GrammarSpec,
    StructuralTag,
    Vocabulary,
    XGrammarBackend,
)
from graft.grammar.compile_risk import risk

ENDLESS = GrammarSpec("json_schema", '{"items": ' * 500 + "{}" + "}" * 500)  # takes minutes
TAG_OF_NUMBER = StructuralTag.of("<", {"type": "number", "multipleOf": 2}, ">")


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(byte_vocabulary())


@pytest.fixture
def service(backend):
    made = CompileService(backend, timeout_s=600)
    yield made
    made.close()


def test_compiled_elsewhere_gives_the_same_masks(backend, service):
    """A grammar compiled in a child allows what the same grammar compiled here allows."""
    for spec in (
        GrammarSpec.json_schema({"type": "array", "maxItems": 200, "items": {"type": "integer"}}),
        GrammarSpec.regex("(ab|abc)+[0-9]{2,200}"),
        GrammarSpec.lark('start: "true" | "ab" /[0-9]/'),
        GrammarSpec.choice(["true", "abc", "{"]),
    ):
        away = backend.matcher(service.submit(spec).result())
        here = backend.matcher(backend.compile(spec))
        for _ in range(6):
            legal = here.legal()
            assert away.legal().tolist() == legal.tolist()
            token = int(legal[-1])
            assert away.accept(token) == here.accept(token) is True
            if here.is_terminated():
                break


def test_equal_specs_share_one_future_that_nobody_can_cancel(service):
    """A second submit of an equal spec gets the first one's future; cancelling has no effect."""
    first = service.submit(GrammarSpec.regex("a+"))
    assert service.submit(GrammarSpec.regex("a+")) is first
    assert not first.cancel()
    assert first.result() is service.submit(GrammarSpec.regex("a+")).result()


@pytest.mark.parametrize(
    "spec, message",
    [
        (GrammarSpec("regex", "a(b"), "parenthesis is not closed"),
        (GrammarSpec("ebnf", "root ::= x"), '"x" is not defined'),
        (
            GrammarSpec.json_schema({"type": "string", "pattern": "(?=a)b"}, backend="xgrammar"),
            "cannot be enforced as a whole: Lookahead",
        ),
        (
            GrammarSpec.json_schema({"oneOf": [{"type": "string"}, {"maxLength": 3,
                                                                   "type": "string"}]}),
            "cannot be enforced as a whole: oneOf with overlapping",
        ),
        (GrammarSpec.json_schema({"type": "number", "multipleOf": 0.5}), "multipleOf"),
    ],
)  # fmt: skip
def test_refusals_and_ignored_features_are_errors(service, capfd, spec, message):
    """What XGrammar refuses, or would ignore with a printed warning, fails and prints nothing."""
    with pytest.raises(GrammarError, match=message) as caught:
        service.submit(spec).result()
    assert "\n" not in str(caught.value) and ".cc" not in str(caught.value)
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


def test_partial_takes_a_grammar_with_ignored_features(service):
    """partial=True compiles a schema of which XGrammar ignores a part."""
    schema = {"type": "number", "multipleOf": 0.5}
    assert service.submit(GrammarSpec.json_schema(schema, partial=True)).result().nbytes > 0


def running_child(service):
    """The one process that the service has started, waited for."""
    deadline = time.monotonic() + 300
    while not service._children:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (child,) = service._children
    return child


def test_cheap_grammars_never_wait_for_a_risky_one(backend):
    """While one grammar does not get on in its process, twenty others compile in threads."""
    service = CompileService(backend, timeout_s=3600)
    try:
        slow = service.submit(ENDLESS)
        os.kill(running_child(service).pid, signal.SIGSTOP)  # however fast the machine is
        cheap = [service.submit(GrammarSpec.regex(f"b{i}+")) for i in range(20)]
        for future in cheap:
            assert future.result(timeout=300).nbytes > 0
        assert not slow.done()
        counters = service.counters()
        assert counters["compiled_in_threads"] == 20
    finally:
        service.close()


@pytest.mark.parametrize(
    "schema, limits, message",
    [
        (ENDLESS.schema, {"timeout_s": 2}, "took longer than 2 s to compile"),
        (
            {"type": "array", "maxItems": 3000, "items": {"type": "string", "maxLength": 3000}},
            {"memory_bytes": 1 << 27, "timeout_s": 600},
            # of libraries without memory some raise, and some end the process
            r"(needs more than|the compiling process, limited to) 0\.125 GiB of memory",
        ),
    ],
)
def test_limits_of_time_and_memory_refuse_one_grammar(backend, schema, limits, message):
    """Past a limit the grammar fails with a sentence that names it; others compile afterwards."""
    service = CompileService(backend, **limits)
    try:
        with pytest.raises(GrammarError, match=f"json_schema: {message}"):
            service.submit(GrammarSpec("json_schema", json.dumps(schema))).result(timeout=300)
        service._timeout_s = 600  # a loaded machine may be slow with any grammar
        risky = GrammarSpec.json_schema({"type": "array", "maxItems": 200})
        assert service.submit(risky).result(timeout=300).nbytes > 0
    finally:
        service.close()


def test_refusals_for_lack_of_time_are_not_kept(backend):
    """What another attempt may bring is tried again; a refusal of the grammar itself is kept."""
    service = CompileService(backend, timeout_s=1)
    try:
        for spec, kept in ((ENDLESS, False), (GrammarSpec("regex", "a(b"), True)):
            first = service.submit(spec)
            assert isinstance(first.exception(timeout=300), GrammarError)
            wait_until(lambda: not service._pending)
            assert (service.submit(spec) is first) == kept
    finally:
        service.close()


def test_a_child_that_dies_fails_one_grammar(service):
    """When the child is killed, the grammar at hand fails and the next risky one compiles."""
    doomed = service.submit(ENDLESS)
    os.kill(running_child(service).pid, signal.SIGKILL)
    with pytest.raises(GrammarError, match="ended with status -9"):
        doomed.result(timeout=300)
    risky = GrammarSpec.json_schema({"type": "string", "maxLength": 300})
    assert service.submit(risky).result(timeout=300).nbytes > 0


def test_close_stops_at_once_and_fails_what_is_left(backend):
    """close() does not wait for a long compilation; waiting and later requests fail typed."""
    service = CompileService(backend)
    futures = [service.submit(ENDLESS), service.submit(replace(ENDLESS, whitespace="any"))]
    os.kill(running_child(service).pid, signal.SIGSTOP)
    service.close()
    for future in futures:
        with pytest.raises(GrammarError, match="closed"):
            future.result(timeout=0)
    with pytest.raises(GrammarError, match="is closed"):
        service.submit(GrammarSpec.regex("b+"))
    assert not any(thread.is_alive() for thread in (*service._here, *service._away))


def test_the_cache_is_bounded_in_bytes(backend):
    """Least recently used grammars go when their bytes pass the bound, which always holds."""
    probe = CompileService(backend)
    probe.submit(GrammarSpec.regex("x0")).result()
    wait_until(lambda: probe.counters()["cache_entries"] == 1)
    one = probe.counters()["cache_bytes"]
    probe.close()
    service = CompileService(backend, cache_bytes=3 * one + one // 2)
    try:
        specs = [GrammarSpec.regex(f"x{i}") for i in range(5)]
        futures = [service.submit(spec) for spec in specs]
        wait(futures)
        wait_until(lambda: service.counters()["cache_evictions"] == 2)
        assert service.submit(specs[4]) is futures[4]
        assert service.submit(specs[0]) is not futures[0]
        assert service.counters()["cache_bytes"] <= 3 * one + one // 2
    finally:
        service.close()


def wait_until(condition):
    """What the service's threads do after a future is done, awaited."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("choice", ["xgrammar", "auto"])
def test_grammars_without_a_text_are_refused(choice):
    """Where every text could be spelled and none is the grammar's; else a dead end says so."""
    every = Vocabulary([bytes([b]) for b in range(256)] + [b""], 257, [256])
    some = Vocabulary([bytes([b]) for b in range(128)] + [b""], 129, [128])
    nothing = (GrammarSpec.regex(r"[^\s\S]"), GrammarSpec.ebnf('root ::= root "a"'))
    for vocabulary, refused in ((every, True), (some, False)):
        service = GrammarService(vocabulary, choice)
        try:
            for spec in nothing:
                error = service.submit(spec).exception(timeout=300)
                assert str(error) == (f"{spec.kind}: allows no output" if refused else "None")
            assert service.submit(GrammarSpec.regex("a*")).result(timeout=300) is not None
        finally:
            service.close()


class Vague(XGrammarBackend):
    """It does not know how large its grammars are, and fails in its own ways."""

    def compile(self, spec):
        if spec.text == "fails+":
            raise KeyError("fails")
        compiled = super().compile(spec)
        compiled.nbytes = None
        return compiled


def test_what_a_backend_does_wrong_costs_one_grammar(caplog):
    """Whatever a backend raises is a GrammarError of that grammar; the service goes on."""
    service = CompileService(Vague(byte_vocabulary()))
    try:
        failed = service.submit(GrammarSpec("regex", "fails+")).exception(timeout=300)
        assert isinstance(failed, GrammarError) and str(failed) == "regex: KeyError: 'fails'"
        for text in ("a+", "b+", "a+"):
            assert service.submit(GrammarSpec("regex", text)).result(timeout=300) is not None
        wait_until(lambda: not service._pending)
        assert "not kept" in caplog.text
    finally:
        service.close()


def test_a_grammar_larger_than_the_cache_is_not_kept_but_works(backend):
    """Eviction never takes a grammar from a matcher, even when nothing at all can be kept."""
    service = CompileService(backend, cache_bytes=1)
    try:
        spec = GrammarSpec.json_object()
        matcher = backend.matcher(service.submit(spec).result())
        wait_until(lambda: not service._pending)
        assert service.counters()["cache_entries"] == 0
        gc.collect()
        again = backend.matcher(backend.compile(spec))
        for token in b'{"a": 1}':
            assert matcher.legal().tolist() == again.legal().tolist()
            assert matcher.accept(token) and again.accept(token)
    finally:
        service.close()


def test_services_of_equal_settings_share_backend_and_grammars():
    """A second service in the process finds what the first compiled; other settings do not."""
    spec = GrammarSpec.regex("shared+")
    first, second = GrammarService(byte_vocabulary()), GrammarService(byte_vocabulary())
    other = GrammarService(byte_vocabulary(), cache_bytes=1 << 20)
    try:
        compiled = first.submit(spec).result()
        wait_until(lambda: first.counters()["XGrammar"]["cache_entries"] == 1)
        assert second.submit(spec).result() is compiled
        assert other.submit(spec).result() is not compiled
        assert "compiled_in_threads" not in second.counters()["XGrammar"]
    finally:
        for service in (first, second, other):
            service.close()


@pytest.mark.parametrize(
    "spec, why",
    [
        (ENDLESS, "nested deeper"),
        (GrammarSpec.json_schema({"type": "string", "maxLength": 4000}), "4000 characters"),
        (
            GrammarSpec.json_schema(
                {"type": "array", "maxItems": 50, "items": {"type": "string", "maxLength": 50}}
            ),
            "2550 characters",
        ),
        (
            GrammarSpec.json_schema({"type": "string", "pattern": "a(?=b)b"}, backend="xgrammar"),
            "a pattern",
        ),
        (
            GrammarSpec.json_schema({"type": "string", "pattern": "^a+$", "maxLength": 3}),
            "pattern beside bounds",
        ),
        (GrammarSpec.json_schema({"$ref": "other.json"}, backend="xgrammar"), "other.json"),
        (GrammarSpec.json_schema({"type": "number", "multipleOf": 2}), "multipleOf"),
        (GrammarSpec.json_schema({"enum": ["x" * 40000]}), "40014 characters"),
        (GrammarSpec.regex("(a{100}){100}"), "10000 items"),
        (GrammarSpec.regex("a^b"), "a pattern"),
        (GrammarSpec("regex", "(" * 50 + "a" + ")" * 50), "groups nested"),
        (GrammarSpec.ebnf('root ::= "a"{1,500}'), "500 items"),
        (GrammarSpec.lark('start: "a"'), "lark"),
        (GrammarSpec.structural_tag([TAG_OF_NUMBER], ["<"]), "multipleOf"),
        (GrammarSpec.regex(r"^[A-Z]{2}-(?:\d{4}|x)\.$"), ""),
        (GrammarSpec.choice(["a", "b"]), ""),
        (GrammarSpec.json_object(), ""),
        (
            GrammarSpec.json_schema(
                {
                    "type": "object",
                    "properties": {"a": {"type": "string", "maxLength": 16}, "b": {"$ref": "#"}},
                    "required": ["a"],
                    "additionalProperties": False,
                }
            ),
            "",
        ),
    ],
)
def test_what_is_risky_is_known_before_compiling(spec, why):
    """Grammars that may run away, or be enforced in part, are told by name; plain ones are not."""
    found = risk(spec)
    assert why in found and bool(found) == bool(why)


def test_nothing_compiles_here_if_tvm_ffi_would_hold_the_gil(service, monkeypatch):
    """Where the environment tells TVM-FFI to keep the GIL, every grammar goes to a child."""
    monkeypatch.setenv("TVM_FFI_RELEASE_GIL_BY_DEFAULT", "0")
    assert service.submit(GrammarSpec.regex("a+")).result(timeout=300).nbytes > 0
    counters = service.counters()
    assert counters["compiled_in_children"] == 1 and "compiled_in_threads" not in counters


def test_bad_options_are_refused(backend):
    """Bounds must be positive."""
    for name in ("threads", "children", "cache_bytes", "timeout_s", "memory_bytes"):
        with pytest.raises(OptionError, match=name):
            CompileService(backend, **{name: 0})
