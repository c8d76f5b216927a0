"""The compile service: futures, cache, time limit, killed children."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import wait

import pytest
from guide_util import byte_vocabulary

from graft.cudagraph.errors import OptionError
from graft.grammar import CompileService, GrammarError, GrammarSpec, XGrammarBackend

ENDLESS = GrammarSpec.json_schema('{"items": ' * 500 + "{}" + "}" * 500)  # takes minutes


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(byte_vocabulary())


@pytest.fixture
def service(backend):
    made = CompileService(backend)
    yield made
    made.close()


def test_compiled_elsewhere_gives_the_same_masks(backend, service):
    """A grammar compiled in a child allows what the same grammar compiled here allows."""
    for spec in (
        GrammarSpec.json_object(),
        GrammarSpec.regex("(ab|abc)+[0-9]{2,3}"),
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
        (GrammarSpec.regex("a(b"), "parenthesis is not closed"),
        (GrammarSpec.ebnf("root ::= x"), '"x" is not defined'),
        (
            GrammarSpec.json_schema({"type": "string", "pattern": "(?=a)b"}),
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


def test_a_grammar_that_takes_too_long_fails_alone(backend):
    """Past the time limit the grammar fails; others compile meanwhile and afterwards."""
    service = CompileService(backend, threads=2, timeout_s=3)
    try:
        slow = service.submit(ENDLESS)
        assert service.submit(GrammarSpec.regex("b+")).result(timeout=30).nbytes > 0
        with pytest.raises(GrammarError, match="took longer than 3 s"):
            slow.result(timeout=30)
        assert service.submit(ENDLESS) is not slow  # a refusal for lack of time is not kept
        assert service.submit(GrammarSpec.regex("c+")).result(timeout=30).nbytes > 0
    finally:
        service.close()


def test_a_child_that_dies_fails_one_grammar(service):
    """When the child is killed, the grammar at hand fails and the next one compiles."""
    service.submit(GrammarSpec.regex("a")).result()
    (child,) = service._children
    doomed = service.submit(ENDLESS)
    time.sleep(0.1)
    os.kill(child._process.pid, signal.SIGKILL)
    with pytest.raises(GrammarError, match="ended with status -9"):
        doomed.result(timeout=30)
    assert service.submit(GrammarSpec.regex("b")).result(timeout=30).nbytes > 0


def test_close_stops_at_once_and_fails_what_is_left(backend):
    """close() does not wait for a long compilation; waiting and later requests fail typed."""
    service = CompileService(backend)
    futures = [service.submit(ENDLESS), service.submit(GrammarSpec.regex("a+"))]
    time.sleep(0.4)
    service.close()
    wait(futures, timeout=10)
    for future in futures:
        with pytest.raises(GrammarError, match="closed"):
            future.result(timeout=0)
    with pytest.raises(GrammarError, match="is closed"):
        service.submit(GrammarSpec.regex("b+"))
    assert not [t for t in threading.enumerate() if t in service._threads]


def test_the_cache_is_bounded_by_entries_and_bytes(backend):
    """The least recently used grammars go when entries or bytes exceed their bound."""
    service = CompileService(backend, cache_entries=3)
    try:
        specs = [GrammarSpec.regex(f"x{i}") for i in range(5)]
        futures = [service.submit(spec) for spec in specs]
        wait(futures)
        service.submit(GrammarSpec.regex("last")).result()
        assert service.submit(specs[0]) is not futures[0]
        assert service.submit(specs[4]) is futures[4]
        assert len(service._cache) == 3
    finally:
        service.close()
    service = CompileService(backend, cache_bytes=2000)
    try:
        big = GrammarSpec.json_object()
        first = service.submit(big)
        assert first.result().nbytes > 2000
        service.submit(GrammarSpec.regex("y")).result()
        assert service.submit(big) is not first
    finally:
        service.close()


def test_bad_options_are_refused(backend):
    """Bounds must be positive."""
    for name in ("threads", "cache_entries", "cache_bytes", "timeout_s", "memory_bytes"):
        with pytest.raises(OptionError, match=name):
            CompileService(backend, **{name: 0})
