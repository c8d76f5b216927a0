"""Who may use an engine how: in turns, nested, from two threads, after its end; what it tells."""

import gc
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_util import demo_engine, drain, mixed_requests, outputs
from guide_util import run_work

from graft.cudagraph.device import open_device
from graft.cudagraph.errors import DeviceError, HostWorkError, OptionError
from graft.cudagraph.hostwork import PythonWork
from graft.cudagraph.lanes import StreamLane
from graft.grammar.compile.service import GrammarService
from graft.grammar.decoder import GuidedDecoder
from graft.grammar.grammar_spec import GrammarSpec
from graft.models.cache.kv import PagedKV
from graft.models.engine import replay
from graft.models.engine.interrupt import Shield
from graft.models.engine.scheduler import Scheduler
from graft.models.engine.slots import RequestState, SlotManager
from graft.models.errors import EngineError, EngineUseError, RequestError
from graft.models.request import Limits, Request

FREE = Request(tokens=[300, 301, 302], max_tokens=40)
#: Runs to its end: nothing stops it.
LONG = Request(tokens=[300, 301, 302], max_tokens=1000, temperature=4.0, seed=1)


def live():
    """The device's memory and graphs that are not freed, once what is garbage has gone."""
    gc.collect()
    found = open_device().stats()["live"]
    return {name: found[name] for name in ("device_memory", "pinned_memory", "graph_exec")}


def given_back(before):
    """Wait until no more lives than before: what a device still did is freed when it ends."""
    deadline = time.monotonic() + 30
    while (left := live()) != before:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


# Users in turns ---------------------------------------------------------------------------------


def test_ids_that_clash_are_refused_before_anything_runs(engine):
    """Twice one id in a call, or one that runs: an error by name, and nothing was taken; requests
    without a name get names that no other one of the call or of the engine has."""
    for call in (engine.generate, lambda requests: list(engine.stream(requests))):
        with pytest.raises(RequestError, match="two requests have id 'a'"):
            call([replace(FREE, id="a"), replace(FREE, id="a")])
        assert not engine.busy
        with pytest.raises(RequestError, match="requests must be a list of Request"):
            call(FREE)
    engine.submit(replace(FREE, id="b"))
    with pytest.raises(RequestError, match="'b' is running already"):
        engine.generate([replace(FREE, id="c"), replace(FREE, id="b")])
    assert drain(engine).keys() == {"b"}
    numbers = [int(engine.generate([FREE])[0].id.removeprefix("request-")) for _ in range(2)]
    clash = f"request-{numbers[1] + 1}"
    found = engine.generate([FREE, replace(FREE, id=clash), FREE])
    assert found[1].id == clash and len({output.id for output in found}) == 3


def test_events_go_to_whom_they_belong(engine):
    """submit() beside generate(), streams in turns, one within another, and steps by hand: each
    gets all of its own events, and outputs are those of requests alone."""
    requests = [replace(r, id=f"r{i}") for i, r in enumerate(mixed_requests(6, seed=3))]
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
    assert {name: output.tokens for name, output in found.items()} == expected

    stream = engine.stream([requests[0], requests[1]])
    events = [next(stream)]
    assert drain(engine) == {}, "steps by hand run a stream's requests, and leave it its events"
    events += stream
    assert {i: o.tokens for i, o in outputs(events).items()} == {
        name: expected[name] for name in ("r0", "r1")
    }
    told = [t for event in events if event.id == "r0" for t in event.tokens]
    assert told == expected["r0"] and not engine.busy


def test_a_stream_that_is_left_takes_its_requests_along(engine):
    """Closed, collected or never begun: nothing runs on for it, and others are not disturbed."""
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


def test_two_threads_at_once_are_noticed(engine, monkeypatch):
    """The second gets a typed error that names both, the first goes on; in turns they may, and
    cancel() is for any thread at any time."""
    inside = threading.Event()
    go = threading.Event()
    plain = Scheduler.read

    def read(self, shield):
        inside.set()
        assert go.wait(60)
        plain(self, shield)

    expected = engine.generate([FREE])[0].tokens
    monkeypatch.setattr(Scheduler, "read", read)
    done = []
    asked = [replace(FREE, id="first"), replace(LONG, id="second")]
    worker = threading.Thread(target=lambda: done.append(engine.generate(asked)), name="worker")
    worker.start()
    assert inside.wait(60)
    for call in (
        engine.step,
        engine.settle,
        lambda: engine.submit(FREE),
        engine.close,
        lambda: engine.generate([FREE]),
        lambda: engine.preempt("first"),
    ):
        with pytest.raises(EngineUseError, match=r"'MainThread' uses .* 'worker' does"):
            call()
    assert engine.cancel("second") and engine.failure is None
    go.set()
    worker.join()
    first, second = done[0]
    assert first.tokens == expected and second.reason == "cancelled"
    assert engine.generate([FREE])[0].tokens == expected


# The end ----------------------------------------------------------------------------------------


def test_after_the_end_calls_are_answered_or_refused_by_name():
    """close() twice, with a live stream: its outputs come as cancelled; the rest says closed."""
    engine = demo_engine(max_batch_size=1)
    stream = engine.stream([replace(LONG, id="a")])
    next(stream)
    engine.close()
    engine.close()
    assert [o.reason for o in outputs(stream).values()] == ["cancelled"]
    assert not engine.busy and not engine.cancel("a")
    engine.wake()
    for call in (
        engine.counters,
        engine.step,
        engine.settle,
        engine.reset_stats,
        lambda: engine.submit(FREE),
        lambda: engine.preempt("a"),
        lambda: engine.generate([FREE]),
    ):
        with pytest.raises(OptionError, match="the engine is closed"):
            call()


def test_ctrl_c_leaves_no_frame_that_holds_the_device(monkeypatch):
    """close() below a KeyboardInterrupt, whose traceback still has every frame, frees all."""
    before = live()
    count = itertools.count(1)

    def press(self):
        if next(count) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), demo_engine(max_batch_size=1) as engine:
        monkeypatch.setattr(Shield, "check", press)
        try:
            engine.generate([LONG])
        finally:
            engine.close()
            given_back(before)


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("kernel", 0),
        ("kernel", 1),
        ("kernel", 2),
        ("kernel", 5),
        ("copy", 0),
        ("copy", 1),
        ("copy", 2),
        ("copy", 5),
        ("record_event", 0),
        ("record_event", 2),
    ],
)
def test_a_driver_error_while_a_request_joins(call, nth, monkeypatch):
    """Wherever in joining it comes: it is the error that is raised, the engine tells of it, and
    close() gives everything back without another one."""
    before = live()
    engine = demo_engine(max_batch_size=2)
    count = itertools.count()
    plain = getattr(StreamLane, call)

    def failing(self, *arguments, **options):
        if next(count) == nth:
            raise DeviceError("cuSomething: CUDA_ERROR_UNKNOWN")
        plain(self, *arguments, **options)

    monkeypatch.setattr(StreamLane, call, failing)
    for request in mixed_requests(4):
        engine.submit(request)
    with pytest.raises(DeviceError, match="cuSomething"):
        drain(engine)
    assert engine.failure == "cuSomething: CUDA_ERROR_UNKNOWN"
    with pytest.raises(EngineError, match="has failed: cuSomething"):
        engine.step()
    engine.close()
    given_back(before)


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"composition": "two"}], ids=str)
def test_a_failed_round_is_told_once(monkeypatch, options):
    """The step that meets it raises it; later ones say that the engine has failed; none hangs."""
    ran = itertools.count(1)

    def burn(work):
        if next(ran) == 7:
            raise RuntimeError("the grammar is on fire")
        run_work(work)

    plain = GuidedDecoder.commit_work
    monkeypatch.setattr(GuidedDecoder, "commit_work", lambda self: PythonWork(burn, plain(self)))
    engine = demo_engine(max_batch_size=2, grammar_transport="native", **options)
    for request in mixed_requests(2):
        engine.submit(request)
    with pytest.raises(HostWorkError, match=r"in replay 7: RuntimeError: .* on fire") as caught:
        drain(engine)
    assert caught.value.replay == 7, "the engine's number, not that of one of its graphs"
    for call in (engine.step, engine.settle, lambda: engine.submit(mixed_requests(1)[0])):
        with pytest.raises(EngineError, match=r"has failed: .*on fire"):
            call()
    engine.close()
    engine.close()
    with pytest.raises(OptionError, match="closed"):
        engine.step()


def child(script):
    """Lines that a script of a process of its own prints, which finds what the tests share."""
    begin = "import sys\nsys.path.insert(0, sys.argv[1])\nfrom engine_util import *\n"
    command = [sys.executable, "-c", begin + script, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


FAULT = """
import contextlib
from graft.cudagraph.errors import DeviceError
from graft.cudagraph.kernels import load_text
from graft.cudagraph.lanes import StreamLane
from graft.models.errors import EngineError
engine = demo_engine(max_batch_size=2)
stray = load_text(engine.device, '''
extern "C" __global__ void stray(int* data, long long offset) { data[offset] = 1; }
''', "stray.cu")["stray"]
data = engine.device.zeros((4,), "int32")
for seed in range(2):
    engine.submit(Request(tokens=[300, 301, 302 + seed], max_tokens=40))
for _ in range(3):
    engine.step()
print("unread:", engine.counters()["held"]["unread_replays"])
with contextlib.suppress(DeviceError):  # the fault may come before the call has returned
    StreamLane(engine._built.stream).kernel(stray, 1, 1, [data, 1 << 40])
try:
    drain(engine)
except DeviceError as error:
    print("typed:", error.code_name)
try:
    engine.step()
except EngineError as error:
    print("then:", str(error).split(":")[0])
del data, stray
engine.close()
print("closed")
"""


def test_a_fault_with_rounds_in_flight():
    """A device that faults under two rounds ends them: one error, then refusals, then the end."""
    assert child(FAULT) == [
        "unread: 1",
        "typed: CUDA_ERROR_ILLEGAL_ADDRESS",
        "then: the engine has failed",
        "closed",
    ]


CHILD = """
import json
from graft.cudagraph.device import open_device
engine = demo_engine(max_batch_size=4)
engine.generate(mixed_requests(6))
for request in mixed_requests(6):
    engine.submit(request)
while not engine.counters()["held"]["unread_replays"]:
    engine.step()
engine.close()
device = open_device()
live, leaked = device.stats()["live"], device.stats()["leaked"]
held = {}
if device.kind == "soft":
    from graft.cudagraph import softstats
    held = +softstats.counters()["gil_held"]
print(json.dumps({"kind": device.kind, "live": live, "leaked": leaked, "gil_held": held}))
"""


def test_everything_is_given_back():
    """close() with rounds in flight leaves nothing on the device, and no call held the GIL."""
    report = json.loads(child(CHILD)[-1])
    if report["kind"] == "soft":
        assert not any(report["live"].values()), report["live"]
        assert not any(report["leaked"].values()), report["leaked"]
        # cuda.bindings looks entry points up with the GIL; that is no call into the driver's work.
        report["gil_held"].pop("cuGetProcAddress", None)
        assert not report["gil_held"]


def test_an_engine_that_is_dropped_gives_back_what_it_held():
    """Without close(), while it generates, in a cycle or not: no thread, memory or graph stays."""
    demo_engine(max_batch_size=1).close()
    before = live()
    threads = len(os.listdir("/proc/self/task"))
    for cycle in (False, True):
        engine = demo_engine(max_batch_size=1)
        next(engine.stream([LONG]))
        engine.own = [engine] if cycle else None
        del engine
        given_back(before)
        assert len(os.listdir("/proc/self/task")) <= threads


DROPPED = """
from graft.cudagraph.device import open_device
from graft.cudagraph.hostwork import hostfunc
sys.unraisablehook = lambda told: print(told.exc_value)
held, stream = [demo_engine(max_batch_size=1)], open_device().stream("x")
held[0].submit(mixed_requests(1)[0])
held[0].step()
hostfunc(stream, held.clear)
stream.synchronize()
print("went on", held)
"""


def test_an_engine_that_is_dropped_by_a_host_function_calls_no_driver():
    """Its memory stays until the process ends; the stream goes on."""
    assert child(DROPPED) == ["went on []"]


# Ctrl-C ------------------------------------------------------------------------------------------


def test_interrupted_generation_is_cancelled(engine):
    """KeyboardInterrupt comes out of generate(), and the engine goes on as if nothing had been."""
    requests = mixed_requests(12, seed=61)
    begun = time.perf_counter()
    expected = [o.tokens for o in engine.generate(requests)]
    took = time.perf_counter() - begun
    interrupted = 0
    for part in range(1, 13, 4):
        timer = threading.Timer(took * part / 16, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            engine.generate(requests)
            timer.join()
            time.sleep(0.05)  # generation was faster than the timer: take the signal here
        except KeyboardInterrupt:
            interrupted += 1
        assert not engine.busy
        again = engine.generate(requests[:3])
        assert [o.tokens for o in again] == expected[:3]
    assert interrupted > 0


def test_shield_passes_the_signal_on():
    """A held-back SIGINT reaches the handler that stood before, at check() or at the end."""
    for at_check in (True, False):
        reached = False
        with pytest.raises(KeyboardInterrupt), Shield() as shield:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            reached = True
            if at_check:
                shield.check()
                pytest.fail("check() let the signal pass")
        assert reached
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Time -------------------------------------------------------------------------------------------


def test_prompts_ahead_of_a_round_do_not_run_into_its_deadline(monkeypatch):
    """A round waits as long as prompts before it make progress, and no longer."""
    prompt = Request(tokens=[7] * 1000, max_tokens=2)
    over = [0]
    counted = SlotManager.progress

    def progress(seating):
        over[0] = counted(seating)
        return over[0]

    def told_nothing(seating):
        progress(seating)
        return 0

    monkeypatch.setattr(replay, "POLL_S", 0.005)
    monkeypatch.setattr(replay, "ROUND_DEADLINE_S", 1.5)  # a chunk of a prompt takes a second
    monkeypatch.setattr(replay, "time", SimpleNamespace(monotonic=lambda: float(over[0])))
    with demo_engine(max_batch_size=1, prefix_cache_bytes=0) as engine:
        monkeypatch.setattr(SlotManager, "progress", progress)
        assert engine.generate([prompt])[0].reason == "length" and over[0] >= 3
        monkeypatch.setattr(SlotManager, "progress", told_nothing)
        with pytest.raises(DeviceError, match="published no result") as caught:
            engine.generate([prompt])
        assert "\n" not in str(caught.value) and "waiting: thread" in caught.value.__notes__[0]


def test_nobody_waits_for_all_prompts(engine):
    """Who runs gets tokens, and who joined first his first ones, while prompts are prefilled."""
    engine.submit(replace(LONG, id="runs", max_tokens=400))
    while not any(event.id == "runs" for event in engine.step()):
        pass
    for i in range(3):
        engine.submit(Request(tokens=[7 + i] * 300, max_tokens=4, id=f"long {i}"))
    order = []
    while engine.busy:
        order += [event.id for event in engine.step()]
    firsts = [order.index(f"long {i}") for i in range(3)]
    assert 0 < firsts[0] < firsts[1] < firsts[2]
    last = max(i for i, name in enumerate(order) if name == "runs")
    assert firsts[0] < last  # 75 rounds at most
    for begin, end in zip([0, *firsts], firsts, strict=False):
        assert "runs" in order[begin:end] or end > last


def test_a_request_ends_when_its_time_is_up(engine):
    """Running or waiting: with what it has, the reason timeout and a typed error; others go on."""
    late = replace(LONG, timeout_s=0.5)
    found = engine.generate([*([late] * 5), replace(FREE, timeout_s=1000.0)])
    for output in found[:5]:
        assert output.reason == "timeout" and output.error_type == "RequestTimeoutError"
        assert "0.5 s" in (output.error or "") and len(output.tokens) < 1000
    assert found[0].tokens and found[5].reason in ("stop", "length")


def test_times_of_a_request(engine):
    """From submission to a slot, the first token and the end, in this order; none where never."""
    output, refused = engine.generate([FREE, replace(FREE, temperature=-1.0)])
    times = (0.0, output.queue_s, output.first_token_s, output.total_s)
    assert None not in times and list(times) == sorted(times)
    assert (refused.queue_s, refused.first_token_s) == (None, None) and refused.total_s is not None


# Limits -----------------------------------------------------------------------------------------


def test_costly_requests_are_refused_by_the_limits_name():
    """Before they cost anything: prompts, templates' texts, stop strings, grammars, the queue."""
    limits = {"prompt_bytes": 600, "stop_strings": 2, "stop_characters": 9, "grammar_bytes": 20}
    grammar = GrammarSpec.choice(["a" * 30, "b"])
    bad = {
        "prompt_bytes": [
            replace(FREE, tokens=None, prompt="é" * 301),
            Request(messages=[{"role": "user", "content": "x" * 601}]),
        ],
        "stop_strings": [replace(FREE, stop=["a", "b", "c"])],
        "stop_characters": [replace(FREE, stop=["abcde", "fghij"])],
        "grammar_bytes": [replace(FREE, grammar=grammar)],
    }
    with demo_engine(max_batch_size=1, limits=Limits(**limits, waiting=3)) as engine:
        for name, requests in bad.items():
            for output in engine.generate(requests):
                assert output.reason == "refused" and f"Limits.{name}" in (output.error or "")
                assert output.error_type == "RequestError"
        found = engine.generate([FREE] * 5)
        assert [output.reason for output in found] == [found[0].reason] * 3 + ["refused"] * 2
        assert found[4].error_type == "QueueFullError"
        assert engine.generate([FREE])[0].tokens == found[0].tokens, "later it is served"
    with demo_engine(max_batch_size=1, limits=Limits(waiting_tokens=7)) as engine:
        three, eight = (replace(FREE, tokens=range(300, end), max_tokens=2) for end in (303, 308))
        found = engine.generate([three, three, replace(three, tokens=[5, 6]), replace(three, n=1)])
        assert [output.reason == "refused" for output in found] == [False, False, True, True]
        assert found[2].error_type == "QueueFullError" and "waiting_tokens" in str(found[2].error)
        assert [o.error is None for o in engine.generate([eight, three])] == [True, False]
    for wrong in (
        {"waiting": "3"},
        {"waiting_tokens": -1},
        {"prompt_bytes": -1},
        {"stop_strings": None},
    ):
        with pytest.raises(OptionError, match=f"Limits.{next(iter(wrong))}"):
            Limits(**wrong)


def calls(work):
    """How many Python functions it calls in this thread."""
    count = 0

    def called(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_costs_do_not_grow(monkeypatch):
    """Of submitting and of a step with those who wait for a slot or a grammar; of a round with the
    length of the text, whose tokens and pages nobody looks at as a whole after joining."""
    looked = Counter()
    plain = RequestState.tokens.fget
    pages_of = PagedKV.pages_of

    def tokens(self):
        looked["tokens"] += 1
        return plain(self)

    def pages(self, slot):
        looked["pages"] += 1
        return pages_of(self, slot)

    monkeypatch.setattr(RequestState, "tokens", property(tokens))
    monkeypatch.setattr(PagedKV, "pages_of", pages)
    monkeypatch.setattr(GrammarService, "submit", lambda self, spec: Future())
    with demo_engine(max_batch_size=1) as engine:
        engine.submit(LONG)
        engine.step()
        costs = []
        for count in (10, 1000):
            for _ in range(count):
                engine.submit(replace(FREE, grammar=GrammarSpec.regex("held+")))
                engine.submit(FREE)
            costs.append((calls(lambda: engine.submit(FREE)), calls(engine.step)))
        assert looked == {"tokens": 2, "pages": 2}  # when it joins, and when it is seated
    (submit, step), (submit_late, step_late) = costs
    assert submit_late < 1.5 * submit and step_late < 1.5 * step


def test_the_log_tells_of_refusals_and_failures(engine, caplog):
    """One logger, silent unless asked: each refused request by its id and sentence."""
    with caplog.at_level(logging.INFO, "graft"):
        engine.generate([replace(FREE, temperature=-1.0, id="bad"), FREE])
    assert [r.getMessage() for r in caplog.records] == [
        "request bad refused: temperature must be a number from 0.0 to 10000.0, got -1.0"
    ]
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger("graft").handlers)
