"""Engine failures, closing and interruption: error reports and released resources."""

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_util import FREE, LONG, demo_engine, drain, mixed_requests, outputs
from round_simulator import run_work

from graft.cudagraph.device import open_device
from graft.cudagraph.errors import DeviceError, HostWorkError, OptionError
from graft.cudagraph.host.hostwork import PythonWork
from graft.cudagraph.lanes import StreamLane
from graft.grammar.decoder import GuidedDecoder
from graft.grammar.processes import POOL
from graft.models.engine import assembly, construction, replay
from graft.models.engine import engine as engine_module
from graft.models.engine.interrupt import Shield
from graft.models.engine.slots import SlotManager
from graft.models.errors import EngineError
from graft.models.request import Request
from graft.models.round.prefill import Prefill


def live_resources(*, collects=True):
    """Return the numbers of live device allocations, pinned allocations and graphs."""
    if collects:
        gc.collect()  # unreachable objects must not be counted
    live = open_device().stats()["live"]
    return {name: live[name] for name in ("device_memory", "pinned_memory", "graph_exec")}


def process_resources():
    """Return the numbers of threads and open file descriptors of this process.

    The pipes of idle child processes, which are kept for later engines, do not count.
    """
    resources = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")}
    resources["fd"] -= len(POOL._idle)
    return resources


def wait_until_released(before, count=live_resources):
    """Wait until no number that `count` returns is greater than in its earlier result `before`."""
    deadline = time.monotonic() + 30
    live = count()
    while any(live[name] > before[name] for name in live):
        assert time.monotonic() < deadline, (live, before)
        time.sleep(0.01)
        live = count()


@pytest.fixture(scope="module")
def child_lines():
    """The lines that each of `CHILD_SCRIPTS` prints, by its name.

    The scripts run one after another in a child process, with `engine_util` imported. The process
    must exit without an error.
    """
    script = "import sys\nsys.path.insert(0, sys.argv[1])\nfrom engine_util import *\n"
    for name, text in CHILD_SCRIPTS.items():
        script += f"print({name!r}, flush=True)\n{text}\n"
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "Error" not in result.stderr
    lines = {}
    for line in result.stdout.splitlines():
        if line in CHILD_SCRIPTS:
            name = line
            lines[name] = []
        else:
            lines[name].append(line)
    return lines


# Failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("kernel", 0),
        ("record_event", 2),
        *(
            pytest.param(call, nth, marks=pytest.mark.full)
            for call, numbers in (
                ("kernel", (1, 2, 5)),
                ("copy", (0, 1, 2, 5)),
                ("record_event", (0,)),
            )
            for nth in numbers
        ),
    ],
)
def test_engine_reports_driver_error_while_request_joins(call, nth, monkeypatch):
    """`step` raises a driver error that occurs while a request gets its slot.

    The message is stored in `Engine.failure`. After that, close() frees all resources.
    """
    before = live_resources()
    engine = demo_engine(max_batch_size=2)
    count = itertools.count()
    original = getattr(StreamLane, call)

    def failing(self, *arguments, **options):
        if next(count) == nth:
            raise DeviceError("cuSomething: CUDA_ERROR_UNKNOWN")
        original(self, *arguments, **options)

    monkeypatch.setattr(StreamLane, call, failing)
    for request in mixed_requests(4):
        engine.submit(request)
    with pytest.raises(DeviceError, match="cuSomething"):
        drain(engine)
    assert engine.failure == "cuSomething: CUDA_ERROR_UNKNOWN"
    with pytest.raises(EngineError, match="has failed: cuSomething"):
        engine.step()
    engine.close()
    wait_until_released(before)


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"composition": "two"}], ids=str)
@pytest.mark.full("overlap")
def test_engine_raises_failed_round_once(monkeypatch, options):
    """If a host step of a round fails, `step` raises its error once.

    All later calls raise an `EngineError` that contains the message of the first error.
    """
    calls = itertools.count(1)

    def fail_seventh(work):
        if next(calls) == 7:
            raise RuntimeError("the grammar is on fire")
        run_work(work)

    original = GuidedDecoder.commit_work
    monkeypatch.setattr(
        GuidedDecoder, "commit_work", lambda self: PythonWork(fail_seventh, original(self))
    )
    engine = demo_engine(max_batch_size=2, grammar_transport="native", **options)
    for request in mixed_requests(2):
        engine.submit(request)
    with pytest.raises(HostWorkError, match=r"in replay 7: RuntimeError: .* on fire") as caught:
        drain(engine)
    assert caught.value.replay == 7, "the number within the engine, not within a graph"
    for call in (engine.step, engine.synchronize, lambda: engine.submit(mixed_requests(1)[0])):
        with pytest.raises(EngineError, match=r"has failed: .*on fire"):
            call()
    engine.close()
    engine.close()
    with pytest.raises(OptionError, match="closed"):
        engine.step()


DEVICE_FAULT = """
import contextlib
from graft.cudagraph.errors import DeviceError
from graft.cudagraph.kernels.kernels import load_text
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
with contextlib.suppress(DeviceError):  # the call itself may already raise it
    StreamLane(engine._built.stream).kernel(stray, 1, 1, [data, 1 << 40])
try:
    drain(engine)
except DeviceError as error:
    print("first:", error.code_name)
try:
    engine.step()
except EngineError as error:
    print("then:", str(error).split(":")[0])
del data, stray
engine.close()
print("closed")
"""


def test_engine_device_fault_ends_rounds_in_flight(child_lines):
    """If a kernel accesses invalid memory, the next step raises a DeviceError.

    Later steps raise EngineErrors, and close() returns.
    """
    assert child_lines["device fault"] == [
        "unread: 1",
        "first: CUDA_ERROR_ILLEGAL_ADDRESS",
        "then: the engine has failed",
        "closed",
    ]


@pytest.mark.overlap
def test_replay_deadline_is_extended_by_prefill_progress(monkeypatch):
    """The deadline of a round starts anew whenever a prefill chunk completes."""
    prompt = Request(tokens=[7] * 1000, max_tokens=2)
    completed = [0]
    original = SlotManager.count_completed_chunks

    def count_chunks(slots):
        completed[0] = original(slots)
        return completed[0]

    def count_nothing(slots):
        count_chunks(slots)
        return 0

    monkeypatch.setattr(replay, "POLL_S", 0.005)
    monkeypatch.setattr(replay, "ROUND_DEADLINE_S", 1.5)  # one second passes per chunk
    clock = SimpleNamespace(monotonic=lambda: float(completed[0]))
    monkeypatch.setattr(replay, "time", clock)
    with demo_engine(max_batch_size=1, prefix_cache_bytes=0) as engine:
        monkeypatch.setattr(SlotManager, "count_completed_chunks", count_chunks)
        assert engine.generate([prompt])[0].reason == "length" and completed[0] >= 3
        monkeypatch.setattr(SlotManager, "count_completed_chunks", count_nothing)
        with pytest.raises(DeviceError, match="published no result") as caught:
            engine.generate([prompt])
        assert "\n" not in str(caught.value) and "waiting: thread" in caught.value.__notes__[0]


# Closing ----------------------------------------------------------------------------------------


def test_engine_closed_twice_cancels_streams_and_rejects_calls():
    engine = demo_engine(max_batch_size=1)
    stream = engine.stream([replace(LONG, id="a")])
    next(stream)
    engine.close()
    engine.close()
    assert [output.reason for output in outputs(stream).values()] == ["cancelled"]
    assert not engine.busy and not engine.cancel("a")
    engine.wake()
    assert engine.graphs == {}
    for call in (
        engine.counters,
        engine.step,
        engine.synchronize,
        engine.reset_stats,
        lambda: engine.submit(FREE),
        lambda: engine.preempt("a"),
        lambda: engine.generate([FREE]),
        lambda: next(engine.stream([FREE])),
        lambda: engine.warm(FREE),
        lambda: engine.migrate_out("a"),
        lambda: engine.migrate_in(None),
    ):
        with pytest.raises(OptionError, match="the engine is closed"):
            call()


CLOSE_IN_FLIGHT = """
import json
from graft.cudagraph.device import open_device
engine = demo_engine(max_batch_size=4)
engine.generate(mixed_requests(4, max_tokens=20))
for request in mixed_requests(6):
    engine.submit(request)
while not engine.counters()["held"]["unread_replays"]:
    engine.step()
engine.close()
device = open_device()
live, leaked = device.stats()["live"], device.stats()["leaked"]
held = {}
if device.kind == "soft":
    from graft.cudagraph.driver import softstats
    held = +softstats.counters()["gil_held"]
print(json.dumps({"kind": device.kind, "live": live, "leaked": leaked, "gil_held": held}))
"""


def test_engine_close_releases_all_device_resources(child_lines):
    """close() with rounds in flight frees all resources of the engine.

    The test also checks that the engine released the GIL in all driver calls.
    """
    report = json.loads(child_lines["close in flight"][-1])
    if report["kind"] == "soft":
        assert not any(report["live"].values()), report["live"]
        assert not any(report["leaked"].values()), report["leaked"]
        # cuda.bindings holds the GIL while it looks up entry points. This call does no device work.
        report["gil_held"].pop("cuGetProcAddress", None)
        assert not report["gil_held"]


def test_engine_dropped_without_close_releases_its_resources():
    """An engine that is dropped while it generates leaves no thread, device memory or graph.

    In one of the two cases, the engine is part of a reference cycle.
    """
    demo_engine(max_batch_size=1).close()
    before = live_resources()
    threads = len(os.listdir("/proc/self/task"))
    for cycle in (False, True):
        engine = demo_engine(max_batch_size=1)
        next(engine.stream([LONG]))
        engine.cycle = [engine] if cycle else None
        del engine
        wait_until_released(before)
        assert len(os.listdir("/proc/self/task")) <= threads


DROP_IN_HOST_FUNCTION = """
from graft.cudagraph.device import open_device
from graft.cudagraph.host.hostwork import hostfunc
sys.unraisablehook = lambda unraisable: print(unraisable.exc_value)
held, stream = [demo_engine(max_batch_size=1)], open_device().stream("x")
held[0].submit(mixed_requests(1)[0])
held[0].step()
hostfunc(stream, held.clear)
stream.synchronize()
print("continued", held)
"""


def test_engine_dropped_in_host_function_makes_no_driver_call(child_lines):
    """An engine whose last reference is dropped inside a host function is not closed.

    CUDA forbids driver calls in host functions. The memory of the engine is therefore freed only at
    process exit. The stream that runs the host function must continue.
    """
    assert child_lines["drop in host function"] == ["continued []"]


# Interruption -----------------------------------------------------------------------------------


def test_engine_generate_cancels_requests_on_keyboard_interrupt(engine):
    """After generate() has raised KeyboardInterrupt, the engine has no requests and still works."""
    requests = mixed_requests(5, seed=61, max_tokens=50)
    begin = time.perf_counter()
    expected = [o.tokens for o in engine.generate(requests)]
    duration = time.perf_counter() - begin
    interrupted = 0
    for part in range(1, 13, 4):
        delay = duration * part / 16
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            engine.generate(requests)
            timer.join()
            time.sleep(0.05)  # if generate() returned before the timer's signal, wait for it
        except KeyboardInterrupt:
            interrupted += 1
        assert not engine.busy
        again = engine.generate(requests[:3])
        assert [o.tokens for o in again] == expected[:3]
    assert interrupted > 0


#: Functions that run while an engine loads, in the order in which they are called first.
LOAD_PHASES = [
    (engine_module, "open_device"),
    (assembly, "_load_target"),
    (assembly, "GrammarService"),
    (assembly, "_load_drafter"),
    (assembly, "_make_round_resources"),
    (assembly, "LoopControl"),
    (assembly, "Prefill"),
    (construction, "Replays"),
    (construction, "Migrator"),
    (construction, "Promotion"),
    (construction, "Scheduler"),
    (assembly.RoundGraph, "_add_drafting"),
    (replay.Replays, "launch"),
    (Prefill, "warm"),
]


@pytest.mark.parametrize(
    ("owner", "name", "original"),
    [
        pytest.param(
            owner,
            name,
            getattr(owner, name),  # every run notices that a phase has another name
            marks=pytest.mark.full if number % 3 else (),
            id=name,
        )
        for number, (owner, name) in enumerate(LOAD_PHASES)
    ],
)
@pytest.mark.full("open_device", "_load_drafter", "Prefill", "Promotion")
def test_engine_load_releases_resources_on_keyboard_interrupt(
    owner, name, original, engine, monkeypatch
):
    """Ctrl-C while an engine loads leaves no thread, file descriptor, device memory or graph.

    Other engines, and engines that are created later, are not affected.
    """
    requests = mixed_requests(2)
    expected = [output.tokens for output in engine.generate(requests)]
    options = {"generation": "graph"} if name == "LoopControl" else {}

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    before = live_resources()
    process_before = process_resources()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo_engine(max_batch_size=2, **options)
    wait_until_released(before)
    wait_until_released(process_before, process_resources)
    with demo_engine(max_batch_size=2) as other:
        assert [output.tokens for output in other.generate(requests)] == expected


@pytest.mark.parametrize(
    "options", [{}, {"device_automata": True, "generation": "graph"}], ids=["rounds", "loops"]
)
def test_failed_engine_load_releases_resources_without_garbage_collector(options, monkeypatch):
    """After an error, device memory is free at once, so that another engine can be created."""

    def fail(*_):
        raise DeviceError("out of memory")

    monkeypatch.setattr(Prefill, "warm", fail)
    before = live_resources()
    gc.disable()
    try:
        with pytest.raises(DeviceError, match="out of memory"):
            demo_engine(max_batch_size=2, **options)
        wait_until_released(before, lambda: live_resources(collects=False))
    finally:
        gc.enable()


def test_engine_close_after_keyboard_interrupt_releases_device_memory(monkeypatch):
    """close() frees device memory although the traceback of Ctrl-C keeps the engine's frames alive.

    Those frames must therefore not own device resources.
    """
    before = live_resources()
    count = itertools.count(1)

    def interrupt_ninth(self):
        if next(count) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), demo_engine(max_batch_size=1) as engine:
        monkeypatch.setattr(Shield, "check", interrupt_ninth)
        try:
            engine.generate([LONG])
        finally:
            engine.close()
            wait_until_released(before)


@pytest.mark.parametrize("at_check", [True, False])
def test_shield_defers_sigint_to_check_or_end(at_check):
    reached = False
    with pytest.raises(KeyboardInterrupt), Shield() as shield:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        reached = True
        if at_check:
            shield.check()
            pytest.fail("check() did not raise")
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


FORKING = """
import os
with demo_engine(max_batch_size=1) as engine:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    [output] = engine.generate([Request(prompt="x", max_tokens=2)])
    print(status, output.reason)
"""


def test_forked_child_can_exit_within_context_of_engine(child_lines):
    """The exit status of the child is that of sys.exit, and the parent's engine continues."""
    assert child_lines["fork"] == ["7 stop"]


#: Scripts of the fixture `child_lines`, in the order in which they run. The first one reports what
#: is left of all engines before it, and the last one makes the device unusable.
CHILD_SCRIPTS = {
    "close in flight": CLOSE_IN_FLIGHT,
    "fork": FORKING,
    "drop in host function": DROP_IN_HOST_FUNCTION,
    "device fault": DEVICE_FAULT,
}
