"""What a graph can still run stays alive; what nobody can run is freed (INVARIANTS.md, L5-L13)."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from cudagraph_util import (
    Foreign,
    Semaphore,
    Step,
    released,
    replay,
    resident_kib,
    run_program,
    settled,
    until,
)

from graft import native
from graft.cudagraph import (
    Device,
    DeviceError,
    Graph,
    GraphLane,
    Stream,
    condition,
    if_,
    if_else,
    nodes,
)
from graft.cudagraph.hostwork import PythonWork, hostfunc
from graft.cudagraph.lanes import StreamLane

everything = pytest.mark.parametrize("everything", [False, True])


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Start each test with nothing left to free."""
    settled()


class Watched:
    """A graph of watched steps: ``gone()`` waits until the steps and all records are."""

    def __init__(self, device: Device, everything: bool, before: Any = None):
        self.step = Step()
        self.watch = weakref.ref(self.step)
        self.released = native.released_records()
        live = native.live_records()
        self.graph = Graph(device, "watched")
        if before is not None:
            self.graph.lane("main").host(before)
        lane = self.graph.lane("main")
        self.calls = 4 if everything else 1
        lane.host(self.step)
        if everything:
            self._add_all(device, lane)
        self.records = native.live_records() - live

    def _add_all(self, device: Device, lane: GraphLane) -> None:
        """One step more of each kind, between events and conditionals."""
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
        """Nothing was released yet."""
        return native.released_records() == self.released and self.watch() is not None

    def gone(self) -> None:
        """Wait for the end of everything."""
        released(self.released + self.records)
        assert self.watch() is None


@everything
@pytest.mark.parametrize("close", [True, False])
def test_executables_outlive_their_definition(
    device: Device, stream: Stream, everything: bool, close: bool
) -> None:
    """Closed or dropped, a definition takes nothing from its executable, which frees all (L5)."""
    made = Watched(device, everything)
    executable = made.graph.instantiate()
    if close:
        made.graph.close()
    del made.graph, made.step
    gc.collect()
    replay(executable, stream, 5)
    living = made.watch()
    assert living is not None and living.calls == 5 * made.calls and made.kept()
    del living, executable
    made.gone()


@everything
def test_definitions_outlive_their_executables(
    device: Device, stream: Stream, everything: bool
) -> None:
    """Records stay with the definition; each executable counts its replays from 1 (L6)."""
    made = Watched(device, everything)
    for _ in range(3):
        executable = made.graph.instantiate()
        executable.launch(stream)
        executable.close()
    stream.synchronize(60)
    assert made.step.calls == 3 * made.calls
    del made.step
    assert made.kept()
    made.graph.close()
    made.gone()


@everything
def test_launches_keep_what_they_run(device: Device, everything: bool) -> None:
    """Steps behind a blocked one run after graph, executable, stream and callables went (L7)."""
    gate = threading.Event()
    done = threading.Event()
    made = Watched(device, everything, lambda: gate.wait(60))
    stream = device.stream("flight")
    made.graph.lane("main").host(done.set)
    executable = made.graph.instantiate()
    executable.launch(stream)
    executable.close()
    stream.close()
    del made.graph, executable, stream, made.step
    gc.collect()
    assert made.kept()
    gate.set()
    assert done.wait(60)
    released(made.released + made.records + 1)
    made.gone()


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        ("add_host", "host"),
        ("add_mailbox_wait", "mailbox"),
        ("add_kernel", "spinkernel"),
        ("add_event", "event"),
        ("add_conditional", "if"),
    ],
)
def test_a_failed_build_leaves_nothing(
    device: Device, stream: Stream, monkeypatch: pytest.MonkeyPatch, refused: str, kind: str
) -> None:
    """A refused node is undone, a wait with its request; the graph before it still runs (L9)."""

    def refuse(*_: object) -> None:
        raise DeviceError("the node was refused")

    good = Step()
    bad = Step()
    watch = weakref.ref(bad)
    graph = Graph(device, "build")
    lane = graph.lane("main")
    lane.host(good)
    live = native.live_records()
    with monkeypatch.context() as patch:
        patch.setattr(nodes, refused, refuse)
        with pytest.raises(DeviceError, match="refused"):
            if kind == "event":
                lane.record_event(device.event())
            elif kind == "if":
                if_(lane, condition(graph, 1))
            else:
                getattr(lane, kind)(bad)
    del bad
    gc.collect()
    kept = 2 if kind == "mailbox" else 0  # the request's port and work, until the graph goes
    until(lambda: native.live_records() <= live + kept)
    assert [node.kind for node in graph.nodes] == ["host"]
    if kind != "mailbox":
        assert watch() is None
    if kind != "if":  # its condition steers no node
        executable = replay(graph, stream)
        assert good.calls == 1
        executable.close()
    graph.close()
    until(lambda: watch() is None)


FORKED = """
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


def test_a_forked_child_is_told_and_ends() -> None:
    """The child's driver call is refused by name, it ends well, the parent goes on (L10)."""
    done = run_program(FORKED)
    assert done.returncode == 0, done.stderr
    assert "child: cuGraphLaunch: this process was forked" in done.stdout
    assert "parent: 7 8" in done.stdout and done.stderr == ""


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
def test_the_process_ends_with_replays_in_flight(ending: str) -> None:
    """Whatever is dropped first, the exit code is the script's and there is no noise (L11)."""
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


@pytest.mark.parametrize("_", range(4))
def test_the_process_ends_beside_daemon_threads(_: int) -> None:
    """Threads inside launch() and synchronize() when the interpreter ends are parked (L11)."""
    done = run_program(THREADS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


UNTOLD = """
def replay(name, ask):
    def broken():
        raise ValueError("about " + name)
    graph = Graph(device, name)
    graph.lane("main").host(broken, name=name)
    run = graph.instantiate()
    run.launch(stream)
    device.synchronize()
    try:
        if ask:
            run.check()
    except HostWorkError:
        pass
replay("asked", True)
replay("dropped", False)
hostfunc(stream, lambda: 1 / 0)
device.synchronize()
"""


def test_a_failure_that_nobody_asked_for_is_told_at_exit() -> None:
    """The node, its replay and what was raised, once; what was told before is not repeated."""
    done = run_program(UNTOLD)
    lines = sorted(done.stderr.splitlines())
    assert done.returncode == 0 and len(lines) == 2, done.stderr
    assert "'<lambda>' failed; the error was not raised: ZeroDivisionError" in lines[0]
    assert (
        "'dropped' failed in replay 1; the error was not raised: ValueError: about dropped"
        in lines[1]
    )


def recapture(device: Device, stream: Stream, times: int) -> int:
    """Capture, replay and drop a graph; returns how often its host step ran."""
    data = device.zeros((64,), "int32")
    event = device.event()
    lane = StreamLane(stream)
    step = Step()
    capture = Foreign(stream)
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
def test_recaptures_leave_nothing(device: Device, stream: Stream, times: int) -> None:
    """Every record of every capture is released, and none weighs on memory (L12)."""
    recapture(device, stream, 1000)
    settled()
    resident = resident_kib()
    before = native.released_records()
    live = native.live_records()
    assert recapture(device, stream, times) == times // 10
    released(before + 3 * times)
    settled()
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
    executable.launch(stream)  # the fault may come before the call has returned
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
print("given up:", watch() is None)
executable.close()
graph.close()
data.close()
print("raised:", len(set(raised)), len(raised))
"""


@pytest.mark.parametrize("ending", ["", "del executable, graph, lane, kernel, data, stream"])
def test_a_fault_is_typed_and_the_process_ends(ending: str) -> None:
    """One typed error; later host steps never run, eager ones are given up; exit is quiet (L13)."""
    done = run_program(FAULTY + ending)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "typed: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert lines[1:] == ["ran: before", "given up: True", "raised: 1 2"] and done.stderr == ""


def test_native_work_keeps_its_owner(device: Device, stream: Stream) -> None:
    """NativeWork.keep lives until the graph that uses it is gone."""
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
    until(lambda: watch() is None)


def test_updates_release_the_old_definition(device: Device, stream: Stream) -> None:
    """Two hundred updates leave one definition's record."""
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
    until(lambda: native.live_records() == live + 1)
    executable.close()
    until(lambda: native.live_records() == live)


def test_eager_records_free_themselves(stream: Stream) -> None:
    """An eager callable that is dropped at once runs once a call; then all of it is gone."""
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
    until(lambda: native.live_records() == live)
    assert watch() is None


def test_closing_breaks_a_cycle_through_the_driver(device: Device) -> None:
    """A callable that refers to its own executable is freed once the executable is closed."""
    holder = Step()
    graph = Graph(device, "cycle")
    graph.lane("main").host(holder)
    holder.executable = graph.instantiate()  # type: ignore[attr-defined]
    watch = weakref.ref(holder)
    graph.close()
    holder.executable.close()  # type: ignore[attr-defined]
    del holder, graph
    gc.collect()
    until(lambda: watch() is None)


def test_garbage_collection_in_a_callback_calls_no_driver(device: Device, stream: Stream) -> None:
    """Arrays, streams and graphs that die inside a host function are freed elsewhere, later."""
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
    until(lambda: native.live_resources() <= resources)
    assert native.failed_frees() == failed
