"""Lifetime of graphs, executables, records and resources (INVARIANTS.md, L5 to L13)."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
from cudagraph_util import (
    ForeignCapture,
    Semaphore,
    Step,
    replay,
    resident_kib,
    run_program,
    wait_for_records,
    wait_until,
    wait_until_freed,
)
from fork_server import run_forked

from graft import native
from graft.cudagraph import Device, DeviceError, Graph, GraphLane, Stream, condition, if_, if_else
from graft.cudagraph.graph import nodes
from graft.cudagraph.host.hostwork import PythonWork, hostfunc
from graft.cudagraph.lanes import StreamLane
from graft.native import _native

all_kinds = pytest.mark.parametrize("all_kinds", [False, True])


@pytest.fixture(autouse=True)
def freed_resources() -> None:
    """Wait until all resources of earlier tests are freed."""
    wait_until_freed()


class Watched:
    """A graph with a host step that the test can watch through a weak reference.

    After ``del step`` only the graph and its executable keep the step alive, and
    ``wait_until_gone()`` waits until it is released. With ``all_kinds`` the graph runs the step by
    all transports and also contains events and conditionals.
    """

    def __init__(self, device: Device, all_kinds: bool, before: Any = None):
        self.step = Step()
        self.watch = weakref.ref(self.step)
        self.released = native.released_records()
        live = native.live_records()
        self.graph = Graph(device, "watched")
        if before is not None:
            self.graph.lane("main").host(before)
        lane = self.graph.lane("main")
        self.calls = 4 if all_kinds else 1
        lane.host(self.step)
        if all_kinds:
            self._add_all(device, lane)
        self.records = native.live_records() - live

    def _add_all(self, device: Device, lane: GraphLane) -> None:
        """Add the step by each transport, and add events and conditionals."""
        lane.host(self.step)
        event = device.event("lifetime")
        data = device.zeros((4,), "int32")
        lane.wait_event(event)
        lane.mailbox(self.step)
        if_(lane, condition(self.graph, 1), name="if").lane("inside").fill(data)
        lane.record_event(event)
        lane.spinkernel(self.step)
        bodies = if_else(lane, condition(self.graph, 0), name="branch")
        bodies[1].lane("inside").fill(data, 1)

    def kept(self) -> bool:
        """Return whether nothing was released yet."""
        return native.released_records() == self.released and self.watch() is not None

    def wait_until_gone(self) -> None:
        """Wait until the step and all records are released."""
        wait_for_records(self.released + self.records)
        assert self.watch() is None


@all_kinds
@pytest.mark.parametrize("close", [True, False])
def test_executable_outlives_closed_or_dropped_definition(
    device: Device, stream: Stream, all_kinds: bool, close: bool
) -> None:
    """An executable keeps all that it uses alive without its definition (INVARIANTS.md L5)."""
    watched = Watched(device, all_kinds)
    executable = watched.graph.instantiate()
    if close:
        watched.graph.close()
    del watched.graph, watched.step
    gc.collect()
    replay(executable, stream, 5)
    living = watched.watch()
    assert living is not None and living.calls == 5 * watched.calls and watched.kept()
    del living, executable
    watched.wait_until_gone()


@all_kinds
def test_definition_outlives_executables(device: Device, stream: Stream, all_kinds: bool) -> None:
    """A definition keeps its host steps alive and can be instantiated again (INVARIANTS.md L6)."""
    watched = Watched(device, all_kinds)
    for _ in range(3):
        executable = watched.graph.instantiate()
        executable.launch(stream)
        executable.close()
    stream.synchronize(60)
    assert watched.step.calls == 3 * watched.calls
    del watched.step
    assert watched.kept()
    watched.graph.close()
    watched.wait_until_gone()


@pytest.mark.overlap
@all_kinds
def test_launch_in_flight_keeps_everything_alive(device: Device, all_kinds: bool) -> None:
    """Host steps run even if graph, executable, stream and callable are gone (INVARIANTS.md L7)."""
    gate = threading.Event()
    done = threading.Event()
    watched = Watched(device, all_kinds, lambda: gate.wait(60))
    stream = device.stream("flight")
    watched.graph.lane("main").host(done.set)
    executable = watched.graph.instantiate()
    executable.launch(stream)
    executable.close()
    stream.close()
    del watched.graph, executable, stream, watched.step
    gc.collect()
    assert watched.kept()
    gate.set()
    assert done.wait(60)
    wait_for_records(watched.released + watched.records + 1)
    watched.wait_until_gone()


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("add_host", "host"),
        ("add_mailbox_wait", "mailbox"),
        ("add_kernel", "spinkernel"),
        ("add_event", "event"),
        ("add_conditional", "if"),
    ],
)
def test_failed_graph_build_releases_resources(
    device: Device, stream: Stream, monkeypatch: pytest.MonkeyPatch, function: str, kind: str
) -> None:
    """If the driver rejects a node, its records are released; the graph runs (INVARIANTS.md L9).

    If it rejects the wait node of a mailbox, the request node is removed as well.
    """

    def reject(*_: object) -> None:
        raise DeviceError("the node was rejected")

    good = Step()
    bad = Step()
    watch = weakref.ref(bad)
    graph = Graph(device, "build")
    lane = graph.lane("main")
    lane.host(good)
    live = native.live_records()
    with monkeypatch.context() as patch:
        patch.setattr(nodes, function, reject)
        with pytest.raises(DeviceError, match="rejected"):
            if kind == "event":
                lane.record_event(device.event())
            elif kind == "if":
                if_(lane, condition(graph, 1))
            else:
                getattr(lane, kind)(bad)
    del bad
    gc.collect()
    # The request node of a mailbox has two records, one for the port and one for the work. The
    # graph keeps these records until it is closed, although the wait node was rejected.
    kept = 2 if kind == "mailbox" else 0
    wait_until(lambda: native.live_records() <= live + kept)
    assert [node.kind for node in graph.nodes] == ["host"]
    if kind != "mailbox":
        assert watch() is None
    if kind != "if":  # the unused condition prevents an instantiation
        executable = replay(graph, stream)
        assert good.calls == 1
        executable.close()
    graph.close()
    wait_until(lambda: watch() is None)


FORKED = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork, from Python 3.12 on
calls = []
graph = Graph(device, "forked")
graph.lane("main").host(lambda: calls.append(1))
graph.lane("main").mailbox(lambda: calls.append(2))
graph.lane("main").record_event(device.event())
executable = graph.instantiate()
executable.launch(stream)
executable.synchronize(60)
child = os.fork()
if child == 0:
    try:
        executable.launch(stream)
    except DeviceError as error:
        print("child:", error, flush=True)
    del executable, graph
    sys.exit(7)
_, status = os.waitpid(child, 0)
for _ in range(3):
    executable.launch(stream)
executable.synchronize(60)
print("parent:", os.waitstatus_to_exitcode(status), len(calls))
"""


def test_forked_child_raises_and_exits_while_parent_continues() -> None:
    """After a fork, driver calls fail in the child; both processes exit (INVARIANTS.md L10)."""
    done = run_program(FORKED)
    assert done.returncode == 0, done.stderr
    assert "child: cuGraphLaunch: this process was forked" in done.stdout
    assert "parent: 7 8" in done.stdout and done.stderr == ""


FORKED_BEFORE_DEVICE = """
import os, sys
from graft.cudagraph import *
child = os.fork()
device = open_device()
graph = Graph(device, "after fork")
calls = []
graph.lane("main").host(lambda: calls.append(1))
executable = graph.instantiate()
executable.launch(device.stream())
executable.synchronize(60)
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
sys.exit(len(calls) - 1)
"""


def test_process_that_was_forked_before_its_parent_opened_a_device_opens_one() -> None:
    done = run_forked(FORKED_BEFORE_DEVICE)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


UNRECORDED = """
graph = Graph(device, "unrecorded")
data = device.zeros((1,), "int32")
text = 'extern "C" __global__ void add(int* p, int by) { *p += by; }'
add = load_text(device, text, "add.cu")["add"]
graph.lane("main").kernel(add, 1, 1, [data, 1], name="add")
executable = graph.instantiate()
executable.launch(stream)
executable.synchronize(60)
other = device.zeros((1,), "int32")
executable.update_kernel("add", add, 1, 1, [other, 2])
for attempt in (lambda: executable.launch(stream), lambda: executable.synchronize(60)):
    try:
        attempt()
    except DeviceError as error:
        print(error.api, error.code)
executable.launch(stream)
executable.synchronize(60)
print(data.to_host()[0], other.to_host()[0])
"""


def test_launch_without_recorded_event_does_not_count_as_complete() -> None:
    """If the event after a launch cannot be recorded, waiting for the launch raises the error.

    Without the error, the event of the previous launch would show that the executable is idle. The
    event of the next launch covers both launches.
    """
    done = run_program(UNRECORDED, GRAFT_DEVICE="soft", SOFTCUDA_FAIL="cuEventRecord:2:999")
    lines = done.stdout.splitlines()
    assert lines[0] == "cuEventRecord 999", done.stderr
    assert lines[1].endswith(" 999") and lines[2] == "1 4"


LEAVING = """
data = device.zeros((1024,), "int32")
graph = Graph(device, "leaving")
lane = graph.lane("main")
event = device.event()
lane.wait_event(event)
for _ in range(20):
    lane.mailbox(lambda: time.sleep(0.0005))
    lane.host(lambda: time.sleep(0.001))
    lane.fill(data)
lane.record_event(event)
if_(lane, condition(graph, 1)).lane("inside").fill(data)
executable = graph.instantiate()
for _ in range(50):
    executable.launch(stream)
hostfunc(stream, print, "never or later")
"""


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "del executable, graph, lane, data"])
@pytest.mark.full("[]")
def test_process_exits_cleanly_with_replays_in_flight(ending: str) -> None:
    """Exit prints only errors of host steps that the shutdown interrupted (INVARIANTS.md L11)."""
    done = run_program(LEAVING + ending)
    assert done.returncode == (3 if "SystemExit" in ending else 0), done.stderr
    assert all("interpreter is shutting down" in line for line in done.stderr.splitlines())


THREADS = """
graph = Graph(device, "busy")
graph.lane("main").fill(device.zeros((64,), "int32"))
run = graph.instantiate()
def launch():
    stream = device.stream()
    while True:
        run.launch(stream)
        run.synchronize(60)
for _ in range(3):
    threading.Thread(target=launch, daemon=True).start()
time.sleep(0.2)
print("leaving", flush=True)
"""


@pytest.mark.parametrize("_", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, 9))])
def test_process_exits_cleanly_with_launching_daemon_threads(_: int) -> None:
    """The exit does not crash or hang while threads are in launch() or synchronize() (L11)."""
    done = run_program(THREADS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


UNREPORTED = """
def replay(name, check):
    def broken():
        raise ValueError("about " + name)
    graph = Graph(device, name)
    graph.lane("main").host(broken, name=name)
    run = graph.instantiate()
    run.launch(stream)
    device.synchronize()
    try:
        if check:
            run.check()
    except HostWorkError:
        pass
replay("checked", True)
replay("dropped", False)
hostfunc(stream, lambda: 1 / 0)
device.synchronize()
"""


def test_unreported_failure_is_printed_at_exit() -> None:
    """The exit prints only failures of host steps that were never raised."""
    done = run_program(UNREPORTED)
    lines = sorted(done.stderr.splitlines())
    assert done.returncode == 0 and len(lines) == 2, done.stderr
    assert "'<lambda>' failed; the error was not raised: ZeroDivisionError" in lines[0]
    assert (
        "'dropped' failed in replay 1; the error was not raised: ValueError: about dropped"
        in lines[1]
    )


def recapture(device: Device, stream: Stream, times: int) -> int:
    """Capture, replay and drop a graph repeatedly; return how often its host step ran."""
    data = device.zeros((64,), "int32")
    event = device.event()
    lane = StreamLane(stream)
    step = Step()
    capture = ForeignCapture(stream)
    for i in range(times):
        capture.begin()
        hostfunc(stream, step)
        lane.fill(data)
        lane.record_event(event)
        capture.end(i % 10 == 0)
        if i % 10 == 0:
            capture.launch(wait=False)
        capture.drop()
    stream.synchronize(60)
    return step.calls


@pytest.mark.parametrize("times", [1000, pytest.param(10_000, marks=pytest.mark.full)])
def test_repeated_captures_keep_memory_constant(device: Device, stream: Stream, times: int) -> None:
    """Every record of every capture is released (INVARIANTS.md L12)."""
    recapture(device, stream, 1000)
    wait_until_freed()
    resident = resident_kib()
    before = native.released_records()
    live = native.live_records()
    assert recapture(device, stream, times) == times // 10
    wait_for_records(before + 3 * times)
    wait_until_freed()
    assert native.live_records() == live and resident_kib() - resident < 8 * 1024


FAULTY = r"""
kernel = load_text(device, '''
extern "C" __global__ void stray(int* data, long long offset) { data[offset] = 1; }
''', "stray.cu")["stray"]
data = device.zeros((4,), "int32")
ran = []
class Eager:
    def __call__(self):
        ran.append("eager")
eager = Eager()
watch = weakref.ref(eager)
graph = Graph(device, "faulty")
lane = graph.lane("main")
lane.host(lambda: ran.append("before"))
lane.kernel(kernel, 1, 1, [data, 1 << 40])
lane.host(lambda: ran.append("after"))
executable = graph.instantiate()
raised = []
try:
    executable.launch(stream)  # the fault may occur before launch() has returned
    hostfunc(stream, eager)
    executable.synchronize(60)
except DeviceError as error:
    raised.append(error.code)
    print("typed:", error.code_name)
print("ran:", *ran)
try:
    executable.launch(stream)
except DeviceError as error:
    raised.append(error.code)
del eager
gc.collect()
_native.flush(30)
print("abandoned:", watch() is None)
executable.close()
graph.close()
data.close()
print("raised:", len(set(raised)), len(raised))
"""


@pytest.mark.parametrize("ending", ["", "del executable, graph, lane, kernel, data, stream"])
@pytest.mark.full("[]")
def test_device_fault_raises_once_and_process_exits(ending: str) -> None:
    """After a fault, no host step or eager work runs; exit prints nothing (INVARIANTS.md L13)."""
    done = run_program(FAULTY + ending)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "typed: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert lines[1:] == ["ran: before", "abandoned: True", "raised: 1 2"] and done.stderr == ""


def test_native_work_keep_lives_as_long_as_graph(device: Device, stream: Stream) -> None:
    semaphore = Semaphore()
    owner = Step()
    graph = Graph(device, "native owner")
    graph.lane("main").host(semaphore.work(keep=owner))
    executable = graph.instantiate()
    watch = weakref.ref(owner)
    del owner, graph
    gc.collect()
    replay(executable, stream, 5)
    assert watch() is not None and semaphore.value == 5
    executable.close()
    wait_until(lambda: watch() is None)


def test_exec_update_releases_old_definition(device: Device, stream: Stream) -> None:
    counts: list[int] = []
    live = native.live_records()

    def version(i: int) -> Graph:
        graph = Graph(device, f"version {i}")
        graph.lane("main").host(PythonWork(counts.append, i))
        return graph

    executable = replay(version(0), stream)
    for i in range(1, 200):
        executable.update(version(i))
        executable.launch(stream)
    executable.synchronize(60)
    assert counts == list(range(200))
    wait_until(lambda: native.live_records() == live + 1)
    executable.close()
    wait_until(lambda: native.live_records() == live)


def test_eager_host_work_is_freed_after_its_run(stream: Stream) -> None:
    live = native.live_records()
    calls = []

    def fn(number: int) -> None:
        calls.append(number)

    watch = weakref.ref(fn)
    for i in range(50):
        hostfunc(stream, fn, i)
    del fn
    gc.collect()
    stream.synchronize(60)
    assert calls == list(range(50))
    wait_until(lambda: native.live_records() == live)
    assert watch() is None


EAGER = """
go = threading.Event()
text = 'extern "C" __global__ void add(const int* x, int* y) { *y += *x; }'
kernel = load_text(device, text, "add.cu")["add"]
x, y = device.from_host(__import__("numpy").array([5], "int32")), device.zeros((1,), "int32")
staging, result = device.pinned((1,), "int32"), device.pinned((1,), "int32")
staging.array[0] = 7
other = device.stream()
lane = StreamLane(other)
lane.host(lambda: go.wait(60))
lane.copy(y, staging)
lane.kernel(kernel, 1, 1, [x, y])
lane.copy(result, y)
StreamLane(stream).wait(lane.record())
del kernel, x, y, staging, other, lane
end = time.monotonic() + 0.1
while time.monotonic() < end and _native.live_resources() > 3:
    time.sleep(0.001)
go.set()
stream.synchronize(60)
assert _native.flush(60)
print(result.array[0], _native.live_resources(), _native.failed_frees())
"""


@pytest.mark.overlap
@pytest.mark.parametrize("setting", ["wait", "immediate"])
def test_operands_of_eager_work_are_freed_after_the_work(setting) -> None:
    """The driver need not wait for the device when it frees memory or unloads a module.

    The operands include those of work on a stream that was dropped. The result, its stream and the
    stream for transfers remain.
    """
    done = run_program(EAGER, GRAFT_DEVICE="soft", SOFTCUDA_FREE=setting)
    assert done.stdout.split() == ["12", "3", "0"], done.stderr


UNKNOWN_STREAM = """
from cuda.bindings import driver as cu
from graft.cudagraph.driver.driver import call
go = threading.Event()
text = 'extern "C" __global__ void add(const int* x, int* y) { *y += *x; }'
kernel = load_text(device, text, "add.cu")["add"]
x, y = device.zeros((1,), "int32"), device.zeros((1,), "int32")
lane = StreamLane(stream)
lane.host(lambda: go.wait(60))
lane.fill(x, 5)
lane.kernel(kernel, 1, 1, [x, y])
if "capture" in sys.argv:
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    call(cu.cuStreamBeginCapture, stream.handle, mode)
live = _native.live_resources()
del x
print(_native.flush(0.1), _native.live_resources() - live)
if "long" in sys.argv:
    time.sleep(31)
    print(_native.flush(0.1), _native.live_resources() - live)
if "capture" in sys.argv:
    call(cu.cuGraphDestroy, call(cu.cuStreamEndCapture, stream.handle))
go.set()
stream.synchronize(60)
print(_native.flush(20), format(y.to_host()[0], "x"))
"""


@pytest.mark.overlap
def test_operand_dropped_during_capture_is_freed_after_earlier_work() -> None:
    """A capture hides whether the work that was enqueued before it has ended (INVARIANTS.md L8)."""
    settings = {"GRAFT_DEVICE": "soft", "SOFTCUDA_FREE": "immediate"}
    done = run_program(UNKNOWN_STREAM, "capture", **settings)
    assert done.stdout.splitlines() == ["False 0", "True 5050505"], done.stderr


@pytest.mark.overlap
def test_operand_is_freed_after_work_although_event_cannot_be_created() -> None:
    settings = {"GRAFT_DEVICE": "soft", "SOFTCUDA_FREE": "immediate"}
    done = run_program(UNKNOWN_STREAM, **settings, SOFTCUDA_FAIL="cuEventCreate:1")
    assert done.stdout.splitlines() == ["False 0", "True 5050505"], done.stderr


@pytest.mark.overlap
@pytest.mark.full
def test_operand_dropped_during_long_capture_is_kept() -> None:
    """The work from before the capture may run for longer than any limit."""
    settings = {"GRAFT_DEVICE": "soft", "SOFTCUDA_FREE": "immediate"}
    done = run_program(UNKNOWN_STREAM, "capture", "long", **settings)
    assert done.stdout.splitlines() == ["False 0", "False 0", "True 5050505"], done.stderr


PENDING_WAIT = """
go = threading.Event()
graph, data = Graph(device, "pending"), device.zeros((1,), "int32")
graph.lane("main").mailbox(lambda: go.wait(60), name="step", deadline_s=5.0)
run = graph.instantiate()
run.launch(stream)
while graph.worker.native.parked: time.sleep(0.001)
del data
time.sleep(0.05)
device.stream()
go.set()
run.synchronize(60)
print("done")
"""


@pytest.mark.overlap
def test_dropped_memory_does_not_block_driver_calls_while_a_wait_is_pending() -> None:
    """A driver may lock the context while a call that frees memory waits for the device."""
    done = run_program(PENDING_WAIT, GRAFT_DEVICE="soft", SOFTCUDA_LOCK_MODEL="8")
    assert done.stdout.split() == ["done"], done.stderr


def test_exec_close_breaks_reference_cycle(device: Device) -> None:
    holder = Step()
    graph = Graph(device, "cycle")
    graph.lane("main").host(holder)
    holder.executable = graph.instantiate()  # type: ignore[attr-defined]
    watch = weakref.ref(holder)
    graph.close()
    holder.executable.close()  # type: ignore[attr-defined]
    del holder, graph
    gc.collect()
    wait_until(lambda: watch() is None)


def test_garbage_collection_in_host_work_makes_no_driver_call(
    device: Device, stream: Stream
) -> None:
    """Arrays, streams and graphs that are collected in a host function are freed later."""
    failed = native.failed_frees()
    resources = native.live_resources()

    def make_garbage() -> None:
        graph = Graph(device, "garbage")
        graph.lane("main").host(lambda: None)
        ring: list[object] = [
            device.zeros((4,), "int32"),
            device.pinned((4,), "int32"),
            device.stream(),
            graph,
            graph.instantiate(),
        ]
        ring.append(ring)

    collected: list[int] = []
    gc.disable()
    try:
        make_garbage()
        hostfunc(stream, lambda: collected.append(gc.collect()))
        stream.synchronize(60)
    finally:
        gc.enable()
    assert collected and collected[0] > 0
    wait_until(lambda: native.live_resources() <= resources)
    assert native.failed_frees() == failed


def test_flush_does_not_wait_for_capture(device: Device, stream: Stream) -> None:
    """The calling thread may be the one that has to end the capture (INVARIANTS.md L3)."""
    array = device.zeros((4,), "float32")
    capture = ForeignCapture(stream)
    capture.begin()
    live = native.live_resources()
    del array
    begin_s = time.monotonic()
    freed = _native.flush(60)
    waited_s = time.monotonic() - begin_s
    capture.end(runs=False)
    capture.drop()
    assert not freed and waited_s < 30
    wait_until(lambda: native.live_resources() < live)
