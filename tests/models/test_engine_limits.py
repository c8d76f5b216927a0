"""Limits on requests; host cost of a step for long queues and outputs."""

import sys
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace

from engine_util import FREE, LONG, demo_engine

from graft.grammar.compile.service import GrammarService
from graft.grammar.grammar_spec import GrammarSpec
from graft.models.cache.kv import PagedKV
from graft.models.engine import replay
from graft.models.engine.request_state import RequestState
from graft.models.request import Limits, Request


def test_engine_limits_reject_oversized_requests():
    """A request is refused if its prompt, rendered messages, stop strings or grammar are too large.

    The error message contains the name of the limit.
    """
    limits = {"prompt_bytes": 600, "stop_strings": 2, "stop_characters": 9, "grammar_bytes": 20}
    grammar = GrammarSpec.choice(["a" * 30, "b"])
    oversized = {
        "prompt_bytes": [
            replace(FREE, tokens=None, prompt="é" * 301),
            Request(messages=[{"role": "user", "content": "x" * 601}]),
        ],
        "stop_strings": [replace(FREE, stop=["a", "b", "c"])],
        "stop_characters": [replace(FREE, stop=["abcde", "fghij"])],
        "grammar_bytes": [replace(FREE, grammar=grammar)],
    }
    with demo_engine(max_batch_size=1, limits=Limits(**limits)) as engine:
        for name, requests in oversized.items():
            for output in engine.generate(requests):
                assert output.reason == "refused" and f"Limits.{name}" in (output.error or "")
                assert output.error_type == "RequestError"


def test_engine_limits_reject_requests_when_queue_is_full():
    """A request is refused while the queue is full. It is served when it is submitted again."""
    with demo_engine(max_batch_size=1, limits=Limits(waiting=3)) as engine:
        found = engine.generate([FREE] * 5)
        assert [output.reason for output in found] == [found[0].reason] * 3 + ["refused"] * 2
        assert found[4].error_type == "QueueFullError"
        assert engine.generate([FREE])[0].tokens == found[0].tokens
    with demo_engine(max_batch_size=1, limits=Limits(waiting_tokens=7)) as engine:
        three = replace(FREE, tokens=range(300, 303), max_tokens=2)
        eight = replace(FREE, tokens=range(300, 308), max_tokens=2)
        found = engine.generate([three, three, replace(three, tokens=[5, 6]), replace(three, n=1)])
        assert [output.reason == "refused" for output in found] == [False, False, True, True]
        assert found[2].error_type == "QueueFullError" and "waiting_tokens" in str(found[2].error)
        # The limit on waiting tokens does not apply to a request if no other request is waiting.
        assert [o.error is None for o in engine.generate([eight, three])] == [True, False]


def count_calls(work):
    """Call `work`, and return the number of calls of Python functions in this thread."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_engine_costs_do_not_grow_with_queue_or_output(monkeypatch):
    """The cost of `submit` and `step` depends neither on the queue nor on the number of tokens.

    The engine builds the list of all tokens and the list of all pages of a request only twice: when
    the request joins a slot, and when its prefill is complete.
    """
    reads = Counter()
    original_tokens = RequestState.tokens.fget
    original_pages_of = PagedKV.pages_of

    def tokens(self):
        reads["tokens"] += 1
        return original_tokens(self)

    def pages_of(self, slot):
        reads["pages"] += 1
        return original_pages_of(self, slot)

    monkeypatch.setattr(RequestState, "tokens", property(tokens))
    monkeypatch.setattr(PagedKV, "pages_of", pages_of)
    monkeypatch.setattr(GrammarService, "submit", lambda self, spec: Future())
    # The number of calls must not depend on the time for which a step waits for the device.
    monkeypatch.setattr(replay, "POLL_S", 60.0)
    with demo_engine(max_batch_size=1) as engine:
        engine.submit(LONG)
        engine.step()
        costs = []
        for count in (10, 1000):
            for _ in range(count):
                engine.submit(replace(FREE, grammar=GrammarSpec.regex("held+")))
                engine.submit(FREE)
            submit = count_calls(lambda: engine.submit(FREE))
            costs.append((submit, count_calls(engine.step)))
        assert reads == {"tokens": 2, "pages": 2}
    (submit, step), (submit_late, step_late) = costs
    assert submit_late < 1.5 * submit and step_late < 1.5 * step
