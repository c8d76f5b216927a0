"""Request ids, streams, concurrent calls, chunked prefill, timeouts and log messages."""

import gc
import logging
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine_util import FREE, LONG, drain, mixed_requests, outputs

from graft.models.engine import scheduler as scheduler_module
from graft.models.engine.scheduler import Scheduler
from graft.models.errors import EngineError, EngineUseError, RequestError
from graft.models.request import Request


def test_engine_rejects_duplicate_ids_before_submission(engine):
    """Two requests cannot have the same id, and requests without an id get an unused one."""
    for call in (engine.generate, lambda requests: list(engine.stream(requests))):
        with pytest.raises(RequestError, match="two requests have id 'a'"):
            call([replace(FREE, id="a"), replace(FREE, id="a")])
        assert not engine.busy
        for wrong in (FREE, "a prompt", {"prompt": "a"}):
            with pytest.raises(RequestError, match="requests must be a list of Request"):
                call(wrong)
    engine.submit(replace(FREE, id="b"))
    with pytest.raises(RequestError, match="'b' is already running"):
        engine.generate([replace(FREE, id="c"), replace(FREE, id="b")])
    assert drain(engine).keys() == {"b"}
    [output] = engine.generate([FREE])
    number = int(output.id.removeprefix("request-"))
    next_id = f"request-{number + 1}"
    found = engine.generate([FREE, replace(FREE, id=next_id), FREE])
    assert found[1].id == next_id
    assert len({output.id for output in found}) == 3


def test_engine_streams_get_exactly_their_own_events(engine):
    """Each stream returns all events of its own requests, and no events of other requests.

    The test interleaves and nests streams, and combines them with `generate` and `step`. The
    outputs are the same as if all requests had been passed to one `generate`.
    """
    requests = []
    for i, request in enumerate(mixed_requests(6, seed=3)):
        requests.append(replace(request, id=f"r{i}"))
    expected = {o.id: o.tokens for o in engine.generate(requests)}
    found = {}

    engine.submit(requests[0])
    found |= {o.id: o for o in engine.generate([requests[1]])}
    found |= drain(engine)
    assert found.keys() == {"r0", "r1"}

    streams = [engine.stream([request]) for request in requests[2:4]]
    while streams:
        for stream in list(streams):
            event = next(stream, None)
            if event is None:
                streams.remove(stream)
            elif event.output is not None:
                found[event.id] = event.output
    outer = engine.stream([requests[4]])
    for event in outer:
        if event.output is not None:
            found[event.id] = event.output
        if "r5" not in found:
            found |= {o.id: o for o in engine.generate([requests[5]])}
    assert {request_id: output.tokens for request_id, output in found.items()} == expected

    stream = engine.stream([requests[0], requests[1]])
    events = [next(stream)]
    assert drain(engine) == {}, "step() runs the requests of a stream but returns no events of it"
    events += stream
    streamed_outputs = outputs(events)
    assert streamed_outputs.keys() == {"r0", "r1"}
    for request_id, output in streamed_outputs.items():
        assert output.tokens == expected[request_id]
    streamed = [token for event in events if event.id == "r0" for token in event.tokens]
    assert streamed == expected["r0"] and not engine.busy


def test_engine_ids_can_be_used_again_before_events_are_fetched(engine):
    """A finished request and a new one with the same id have separate events."""
    expected = engine.generate([FREE])[0].tokens
    good = replace(FREE, id="a")
    refused = replace(FREE, id="a", max_tokens=0)

    engine.submit(refused)
    assert engine.generate([good])[0].tokens == expected
    assert drain(engine)["a"].reason == "refused"

    first = engine.stream([refused, replace(FREE, id="b")])
    assert next(first).id in "ab"
    second = engine.stream([good])
    found = [next(second)]
    engine.submit(replace(LONG, id="c", max_tokens=200))
    found += list(second)
    assert outputs(found)["a"].tokens == expected
    assert {event.id for event in first} <= {"a", "b"}
    assert drain(engine).keys() == {"c"}

    # The only request of the first stream is refused, so this stream ends after the second has
    # begun.
    first = engine.stream([refused])
    next(first)
    second = engine.stream([good])
    found = [next(second)]
    assert list(first) == []
    found += list(second)
    assert [token for event in found for token in event.tokens] == expected


def end_request_while_cancelling(engine, monkeypatch):
    """Step until a request ends, and cancel request "a" just before that.

    Return the outputs by id, and the results of the calls of `cancel`.
    """
    original_end = Scheduler.end
    cancelled = []

    def cancelling_end(self, *args, **options):
        cancelled.append(engine.cancel("a"))
        original_end(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "end", cancelling_end)
        found = {}
        while not found:
            found |= outputs(engine.step())
    return found, cancelled


def test_deferred_cancel_does_not_end_later_request_with_same_id(engine, monkeypatch):
    """If `cancel` is called during a step, the next step ends the request if it is unfinished."""
    expected = engine.generate([FREE])[0].tokens
    engine.submit(replace(FREE, id="a", max_tokens=1))
    found, cancelled = end_request_while_cancelling(engine, monkeypatch)
    assert cancelled == [True] and found["a"].reason == "length"
    engine.submit(replace(FREE, id="a"))
    assert drain(engine)["a"].tokens == expected


def test_id_of_cancelled_request_can_be_used_at_once(engine, monkeypatch):
    """If a request is cancelled during a step, its id can be used again after the step."""
    expected = engine.generate([FREE])[0].tokens
    engine.submit(replace(LONG, id="a"))
    engine.submit(replace(FREE, id="b", max_tokens=1))
    found, _ = end_request_while_cancelling(engine, monkeypatch)
    assert found.keys() == {"b"}
    assert not engine.preempt("a")
    engine.submit(replace(FREE, id="a"))
    found = [event.output for event in drain_events(engine) if event.output is not None]
    assert [(output.id, output.reason == "cancelled") for output in found] == [
        ("a", True),
        ("a", False),
    ]
    assert found[1].tokens == expected


def drain_events(engine):
    """Step until no request is unfinished, and return the events."""
    events = []
    while engine.busy:
        events += engine.step()
    return events


def test_engine_stream_raises_if_its_requests_are_lost(engine):
    """A stream with neither events nor unfinished requests raises an error instead of waiting."""
    stream = engine.stream([replace(LONG, id="lost")])
    next(stream)
    state = engine._scheduler.unfinished["lost"]
    engine._scheduler.end(state, "cancelled")
    engine._scheduler.outbox.release([state.submission])
    with pytest.raises(EngineError, match="requests lost have ended without a final event"):
        next(stream)
    assert engine.generate([FREE])[0].finished


def test_engine_stream_cancels_its_requests_when_left(engine):
    """Requests are cancelled when their stream is closed, garbage-collected or never started."""
    stream = engine.stream([replace(LONG, id="left"), replace(LONG, id="other")])
    next(stream)
    stream.close()
    assert not engine.busy and drain(engine) == {}
    engine.submit(replace(FREE, id="mine"))
    stream = engine.stream([replace(LONG, id="left")])
    next(stream)
    del stream
    gc.collect()
    engine.stream([FREE])
    assert drain(engine).keys() == {"mine"}


def test_engine_rejects_concurrent_calls_except_cancel(engine, monkeypatch):
    """A call from a second thread raises an error that names both threads.

    The first call continues. Only `cancel` is allowed from the second thread.
    """
    inside = threading.Event()
    resume = threading.Event()
    original_read = Scheduler.read

    def blocking_read(self, shield):
        inside.set()
        assert resume.wait(60)
        original_read(self, shield)

    expected = engine.generate([FREE])[0].tokens
    monkeypatch.setattr(Scheduler, "read", blocking_read)
    results = []
    requests = [replace(FREE, id="first"), replace(LONG, id="second")]
    worker = threading.Thread(
        target=lambda: results.append(engine.generate(requests)), name="worker"
    )
    worker.start()
    assert inside.wait(60)
    for call in (
        engine.step,
        engine.synchronize,
        lambda: engine.submit(FREE),
        engine.close,
        lambda: engine.generate([FREE]),
        lambda: engine.preempt("first"),
    ):
        with pytest.raises(EngineUseError, match=r"'MainThread' called .* 'worker'"):
            call()
    assert engine.cancel("second") and engine.failure is None
    resume.set()
    worker.join()
    first, second = results[0]
    assert first.tokens == expected and second.reason == "cancelled"
    assert engine.generate([FREE])[0].tokens == expected


def test_step_waits_for_cancel_of_another_thread(engine, monkeypatch):
    cancelling = threading.Event()
    original_end = Scheduler.end

    def slow_end(self, *args, **options):
        cancelling.set()
        time.sleep(0.2)
        original_end(self, *args, **options)

    engine.submit(replace(LONG, id="cancelled"))
    engine.step()
    monkeypatch.setattr(Scheduler, "end", slow_end)
    worker = threading.Thread(target=lambda: engine.cancel("cancelled"))
    worker.start()
    assert cancelling.wait(60)
    events = engine.step()
    worker.join()
    while engine.busy:
        events += engine.step()
    assert [event.output.reason for event in events if event.finished] == ["cancelled"]


def test_chunked_prefill_interleaves_prompts_with_decoding(engine):
    """While three prompts are prefilled, a running request continues to generate tokens.

    The prompts are prefilled one after another, in chunks.
    """
    engine.submit(replace(LONG, id="running", max_tokens=400))
    while not any(event.id == "running" for event in engine.step()):
        pass
    for i in range(3):
        prompt = [7 + i] * 300
        engine.submit(Request(tokens=prompt, max_tokens=4, id=f"long {i}"))
    order = []
    while engine.busy:
        order += [event.id for event in engine.step()]
    firsts = [order.index(f"long {i}") for i in range(3)]
    assert 0 < firsts[0] < firsts[1] < firsts[2]
    last = max(i for i, request_id in enumerate(order) if request_id == "running")
    assert firsts[0] < last  # 75 rounds at most
    for begin, end in zip([0, *firsts], firsts, strict=False):
        assert "running" in order[begin:end] or end > last


def test_engine_timeout_ends_waiting_and_running_requests(engine, monkeypatch):
    """A request that times out keeps its output so far. Other requests are not affected."""
    late = replace(LONG, min_tokens=1000, timeout_s=1000.0)  # no early stop
    ids = [engine.submit(late) for _ in range(5)]
    ids.append(engine.submit(replace(FREE, timeout_s=10_000.0)))
    events = engine.step()
    while not any(event.tokens for event in events):
        events += engine.step()
    first = next(event.id for event in events if event.tokens)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 2000.0)
    monkeypatch.setattr(scheduler_module, "time", clock)
    outputs = {event.id: event.output for event in events if event.finished} | drain(engine)
    assert outputs.keys() == set(ids)
    for name in ids[:5]:
        output = outputs[name]
        assert output.reason == "timeout" and output.error_type == "RequestTimeoutError"
        assert "1000.0 s" in output.error and len(output.tokens) < 1000
    assert outputs[first].tokens and first in ids[:5]
    assert outputs[ids[5]].reason in ("stop", "length")


def test_output_times_are_in_order(engine):
    """Time in the queue, time to the first token and total time are in ascending order.

    A refused request has no slot and no first token, so these times are None.
    """
    output, refused = engine.generate([FREE, replace(FREE, temperature=-1.0)])
    times = (0.0, output.queue_s, output.first_token_s, output.total_s)
    assert None not in times and list(times) == sorted(times)
    assert (refused.queue_s, refused.first_token_s) == (None, None)
    assert refused.total_s is not None


def test_engine_logs_refused_requests(engine, caplog):
    """The logger "graft" reports the id and the error of a refused request.

    The logger has a NullHandler, so nothing is printed unless the application configures logging.
    """
    with caplog.at_level(logging.INFO, "graft"):
        engine.generate([replace(FREE, temperature=-1.0, id="bad"), FREE])
    assert [r.getMessage() for r in caplog.records] == [
        "request bad refused: temperature must be a number from 0.0 to 10000.0, got -1.0"
    ]
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger("graft").handlers)
