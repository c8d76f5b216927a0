"""Mailboxes: requests, answers, deadlines, who wins, and what is left afterwards."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from graft.cudagraph.device import Device
from graft.cudagraph.errors import DeadlineError, HostWorkError, OptionError
from graft.cudagraph.graph import Graph, GraphExec, GraphLane
from graft.cudagraph.hostwork import NativeWork, PythonWork
from graft.cudagraph.mailbox import MailboxWorker, current_part
from graft.native import _native

TRANSPORTS = ("mailbox", "spin")
LIMIT_S = 20.0
USLEEP = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0


def add(lane: GraphLane, transport: str, work: object, **options: object) -> None:
    getattr(lane, transport)(work, **options)


def until(done: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, "what was waited for did not happen"
        time.sleep(0.001)


def asleep(worker: MailboxWorker, threads: int) -> bool:
    return worker.parked == threads


def answered(device: Device, transport: str, work: object, **options: object):
    """A graph of one mailbox whose output is copied to the device: (executable, result)."""
    graph = Graph(device, "one mailbox")
    output, result = device.pinned((4,), "int32"), device.zeros((4,), "int32")
    lane = graph.lane("main")
    add(lane, transport, work, output=output, name="answer", **options)
    lane.copy(result, output)
    return graph.instantiate(), result


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_replay_gets_its_own_answer_after_everything_was_dropped(device, stream, transport):
    """The callable, its graph and its worker live as long as the executable, replay by replay."""

    def make() -> tuple[GraphExec, object]:
        count = [0]

        def work(out: np.ndarray) -> None:
            count[0] += 1
            out[:] = (count[0], count[0] * 3, 7, 11)

        return answered(device, transport, work)

    run, result = make()
    gc.collect()
    for i in range(1, 1001):
        run.launch(stream)
        if i < 6 or i % 100 == 0:
            run.synchronize(LIMIT_S)
            assert result.to_host().tolist() == [i, 3 * i, 7, 11]
    run.synchronize(LIMIT_S)
    run.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_replays_in_flight_are_answered_in_order(device, stream, transport):
    """Thousands of queued replays: each request is seen once, with its replay's number."""
    seen: list[int] = []
    graph = Graph(device, "numbers")
    worker = MailboxWorker()

    def work() -> None:
        seen.extend(n[1] for n in _native.running_host_work() if n[0] == "number")

    add(graph.lane("main"), transport, work, name="number", worker=worker)
    run = graph.instantiate()
    for _ in range(2000):
        run.launch(stream)
    run.synchronize(60.0)
    assert seen == list(range(1, 2001)) and worker.served == 2000
    run.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_native_work_answers_without_python(device, stream, transport):
    """A C function is called once per replay, and a failure of it fails the replay."""
    worker, graph = MailboxWorker(), Graph(device, "native")
    add(graph.lane("main"), transport, NativeWork(USLEEP, 10, name="nap"), worker=worker)
    run = graph.instantiate()
    for _ in range(200):
        run.launch(stream)
    run.synchronize(LIMIT_S)
    assert worker.served == 200
    run.close()


class Api(ctypes.Structure):
    """What the native function below is given."""

    _fields_ = (("output", ctypes.c_void_p), ("part", ctypes.c_void_p), ("runs", ctypes.c_int))


SOURCE = """
struct Api { int* (*output)(); void (*part)(int*, int*); int runs; };
extern "C" void answer(void* data) {
  auto* api = static_cast<Api*>(data);
  int index = 0, count = 0;
  api->part(&index, &count);
  if (index == 0) ++api->runs;
  const int runs = __atomic_load_n(&api->runs, __ATOMIC_RELAXED);
  for (int i = index; i < 4; i += count) api->output()[i] = 10 * index + (index == 0 ? runs : 1);
}
"""


def test_native_work_writes_its_part_of_the_output(device, stream, tmp_path):
    """Two threads of C++ share the rows of one answer, and only their output is published."""
    (tmp_path / "work.cpp").write_text(SOURCE)
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", str(tmp_path / "work.so"),
               str(tmp_path / "work.cpp")]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip(f"no C++ compiler ({command[0]})")
    library, offered = ctypes.CDLL(str(tmp_path / "work.so")), _native.mailbox_api()
    api = Api(output=offered["current_output"], part=offered["read_part"])
    address = ctypes.cast(library.answer, ctypes.c_void_p).value or 0
    work = NativeWork(address, ctypes.addressof(api), keep=(library, api), name="answer")
    run, result = answered(device, "mailbox", work, worker=MailboxWorker(threads=2))
    for i in range(1, 101):
        run.launch(stream)
        run.synchronize(LIMIT_S)
        assert result.to_host().tolist() == [i, 11, i, 11]
    run.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_wait_descends_from_its_request_and_the_request_from_the_lane(device, transport):
    """What the lane holds before is an ancestor of the request, and the request of the wait."""
    graph = Graph(device, "shape")
    lane, array = graph.lane("grammar"), device.zeros((4,), "int32")
    lane.fill(array, 1)
    add(lane, transport, lambda: None, name="step")
    lane.fill(array, 2)
    kinds = [(node.kind, node.name) for node in graph.nodes]
    assert kinds[1:3] == [("request", "request: step"), ("wait", "answer: step")]
    assert graph.edges == [(0, 1), (1, 2), (2, 3)]
    graph.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_worker_loses_and_its_result_is_not_published(device, stream, transport):
    """The watchdog lets the device go on, names the step; late results go nowhere."""
    go, slow = threading.Event(), [False]

    def work(out: np.ndarray) -> None:
        if slow[0]:
            go.wait(LIMIT_S)
            out[:] = 99
        else:
            out[:] = 5

    later: list[int] = []
    graph = Graph(device, "late")
    output, result = device.pinned((4,), "int32"), device.zeros((4,), "int32")
    lane = graph.lane("main")
    add(lane, transport, work, output=output, name="grammar", deadline_s=0.15)
    lane.copy(result, output)
    add(lane, transport, lambda: later.append(1), name="after")
    run = graph.instantiate()
    run.launch(stream)
    run.synchronize(LIMIT_S)
    slow[0] = True
    run.launch(stream)
    run.launch(stream)  # in flight when the first of the two fails: it must not hang either
    with pytest.raises(HostWorkError, match=r"no answer within 0\.15 s") as failed:
        run.synchronize(LIMIT_S)
    assert (failed.value.node, failed.value.replay) == ("grammar", 2)
    assert graph.status.array[0] == 4 and graph.status.array[1] == 2
    with pytest.raises(HostWorkError):
        run.launch(stream)
    with pytest.raises(DeadlineError, match="given up is still running"):
        run.clear(timeout_s=0.05)
    assert graph.worker.stuck
    go.set()
    run.clear(timeout_s=LIMIT_S)
    assert result.to_host().tolist() == [5] * 4 and output.array.tolist() == [5] * 4
    assert later == [1]
    slow[0] = False
    for _ in range(3):
        run.launch(stream)
    run.synchronize(LIMIT_S)
    assert result.to_host().tolist() == [5] * 4 and later == [1] * 4
    run.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_worker_and_watchdog_never_both_answer(device, stream, transport):
    """Work about as long as its deadline: published by the worker or failed, never both."""
    number, rng = [0], np.random.default_rng(3)

    def work(out: np.ndarray) -> None:
        time.sleep(0.02 + float(rng.uniform(-0.01, 0.01)))
        out[:] = number[0]

    run, result = answered(device, transport, work, deadline_s=0.021)
    expected, lost = 0, 0
    for i in range(1, 41):
        number[0] = i
        run.launch(stream)
        try:
            run.synchronize(LIMIT_S)
            expected = i
        except HostWorkError:
            lost += 1
            run.clear(LIMIT_S)
        assert result.to_host().tolist() == [expected] * 4
    assert 0 < lost < 40
    run.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_exception_fails_the_replay_and_later_steps_stand_down(device, stream, transport):
    """The cause is kept; nothing hangs; clear() lets replays run again."""
    later: list[int] = []
    bad = [True]

    def work() -> None:
        if bad[0]:
            raise ValueError("out of words")

    graph = Graph(device, "raises")
    lane = graph.lane("main")
    add(lane, transport, work, name="raises")
    add(lane, transport, lambda: later.append(1), name="later")
    lane.host(lambda: later.append(2))
    run = graph.instantiate()
    run.launch(stream)
    with pytest.raises(HostWorkError, match="out of words") as failed:
        run.synchronize(LIMIT_S)
    assert isinstance(failed.value.__cause__, ValueError) and later == []
    bad[0] = False
    run.clear(LIMIT_S)
    run.launch(stream)
    run.synchronize(LIMIT_S)
    assert later == [1, 2]
    run.close()


def test_a_spinning_kernel_gives_up_on_the_device_clock(device, stream):
    """Without any help of the host the kernel ends at its own deadline, and the replay fails."""
    go = threading.Event()

    def work(out: np.ndarray) -> None:
        go.wait(LIMIT_S)
        out[:] = 1

    run, result = answered(device, "spin", work, deadline_s=LIMIT_S, device_deadline_s=0.1)
    begun = time.monotonic()
    run.launch(stream)
    with pytest.raises(HostWorkError, match="gave up"):
        run.synchronize(LIMIT_S)
        until(lambda: run.check() is not None)  # the watchdog sees the word a little later
    assert time.monotonic() - begun < LIMIT_S
    go.set()
    run.clear(LIMIT_S)
    assert result.to_host().tolist() == [0] * 4
    run.launch(stream)
    run.synchronize(LIMIT_S)
    assert result.to_host().tolist() == [1] * 4
    run.close()


def test_a_request_that_is_not_reached_in_time_fails_the_replay(device, stream):
    """The replay deadline counts from the launch; the step then stands down when it is reached."""
    seen: list[int] = []
    graph = Graph(device, "queued")
    lane = graph.lane("main")
    lane.host(NativeWork(USLEEP, 400_000, name="long nap"))
    lane.mailbox(lambda: seen.append(1), name="asked late", replay_deadline_s=0.1)
    run = graph.instantiate()
    run.launch(stream)
    with pytest.raises(HostWorkError, match="did not reach this step") as failed:
        run.synchronize(LIMIT_S)
    assert failed.value.node == "asked late" and seen == []
    run.close()


def test_several_threads_share_each_request(device, stream):
    """Each thread does its part once a replay, and the answer follows the last of them."""
    parts: list[tuple[int, int]] = []
    done: list[int] = []

    def work() -> None:
        part = current_part()
        time.sleep(0.002 * part[0])
        parts.append(part)

    graph, worker = Graph(device, "shared"), MailboxWorker(threads=3)
    lane = graph.lane("main")
    lane.mailbox(work, worker=worker, name="rows")
    lane.host(lambda: done.append(len(parts)))
    run = graph.instantiate()
    for _ in range(20):
        run.launch(stream)
    run.synchronize(LIMIT_S)
    assert done == [3 * i for i in range(1, 21)]
    assert all(sorted(parts[3 * i : 3 * i + 3]) == [(0, 3), (1, 3), (2, 3)] for i in range(20))
    assert current_part() == (0, 1)
    run.close()


def test_one_worker_serves_several_graphs(device, stream):
    """Mailboxes of two graphs share a thread; each has words of its own."""
    worker, counts = MailboxWorker(wait="park"), [0, 0]

    def bump(i: int) -> None:
        counts[i] += 1

    runs = []
    for i in range(2):
        graph = Graph(device, f"graph {i}")
        for lane in ("a", "b"):
            graph.lane(lane).mailbox(PythonWork(bump, i), worker=worker, name=f"{i} {lane}")
        runs.append(graph.instantiate())
    other = device.stream("other")
    for _ in range(50):
        runs[0].launch(stream)
        runs[1].launch(other)
    for run in runs:
        run.synchronize(LIMIT_S)
        run.close()
    assert counts == [100, 100]
    other.close()


def test_work_may_not_call_the_device_and_garbage_is_no_call(device, stream):
    """A driver call in work is refused by name; collecting a device array there is harmless."""
    graph = Graph(device, "forbidden")
    lane = graph.lane("main")

    def collect() -> None:
        cycle: list[object] = [held.pop()]
        cycle.append(cycle)
        del cycle
        gc.collect()

    held = [device.zeros((16,), "int32")]
    lane.mailbox(collect, name="collects")
    lane.mailbox(lambda: device.zeros((1,), "int32"), name="allocates")
    run = graph.instantiate()
    run.launch(stream)
    with pytest.raises(HostWorkError, match="must not call the driver") as failed:
        run.synchronize(LIMIT_S)
    assert failed.value.node == "allocates"
    run.close()


def test_everything_is_given_back(device, stream):
    """Records and threads end with the executable, and an idle worker sleeps."""
    _native.flush(LIMIT_S)
    before = _native.live_records()
    worker = MailboxWorker(threads=2, name="ending")
    run, _ = answered(device, "mailbox", lambda out: None, worker=worker)
    run.launch(stream)
    run.synchronize(LIMIT_S)
    until(functools.partial(asleep, worker, 2))

    def threads() -> int:
        names = []
        for task in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{task}/comm") as comm:
                    names.append(comm.read().strip())
            except FileNotFoundError:
                continue
        return sum(name.startswith("ending") for name in names)

    assert threads() == 2
    run.close()
    del run, _
    gc.collect()
    until(lambda: _native.live_records() <= before)
    del worker  # the last owner: its graph's port is gone
    until(lambda: threads() == 0)


def test_a_definition_with_a_mailbox_has_one_executable(device, stream):
    """A second one would share its words; after the first is closed another counts on."""
    seen: list[int] = []
    graph = Graph(device, "single")
    graph.lane("main").mailbox(lambda: seen.append(1), name="m")
    run = graph.instantiate()
    with pytest.raises(OptionError, match="open executable"):
        graph.instantiate()
    run.launch(stream)
    run.synchronize(LIMIT_S)
    run.close()
    again = graph.instantiate()
    for _ in range(3):
        again.launch(stream)
    again.synchronize(LIMIT_S)
    assert len(seen) == 4
    again.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_updated_executable_asks_the_new_definition(device, stream, transport):
    """After update() requests go to the new work, and replays are numbered on."""
    seen: list[tuple[str, int]] = []

    def definition(name: str) -> Graph:
        graph = Graph(device, name)

        def work() -> None:
            seen.extend((name, n[1]) for n in _native.running_host_work() if n[0] == "number")

        add(graph.lane("main"), transport, work, name="number")
        return graph

    first, second = definition("first"), definition("second")
    run = first.instantiate()
    for _ in range(2):
        run.launch(stream)
    run.update(second)
    for _ in range(2):
        run.launch(stream)
    run.synchronize(LIMIT_S)
    assert seen == [("first", 1), ("first", 2), ("second", 3), ("second", 4)]
    run.close()


def test_a_graph_with_a_mailbox_is_neither_cloned_nor_a_child(device):
    """Both would share its words: refused by an OptionError that names the step."""
    graph, parent = Graph(device, "not shared"), Graph(device, "parent")
    graph.lane("main").mailbox(lambda: None, name="private")
    with pytest.raises(OptionError, match="private"):
        graph.clone()
    with pytest.raises(OptionError, match="private"):
        parent.add_child(graph)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_mailbox_stands_outside_of_conditionals(device, transport):
    """A worker expects one request a launch, so neither pair is taken in a body."""
    graph = Graph(device, "branches")
    body = graph.lane("main").if_(graph.condition(0, name="once"))
    with pytest.raises(OptionError, match="cannot stand in the conditional"):
        add(body.lane("main"), transport, lambda: None, name="inside")
    assert body.nodes == []
    graph.close()


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"threads": 65}, {"cpus": [10**6]}, {"cpus": []}, {"wait": "hover"},
     {"spin_us": -1.0}, {"sleep_us": float("nan")}],
)  # fmt: skip
def test_worker_settings_out_of_range_are_refused(options):
    """Each by an OptionError, before any thread is started."""
    with pytest.raises(OptionError):
        MailboxWorker(**options)


def test_threads_run_where_they_are_placed(device, stream):
    """`cpus` is the affinity of the worker's threads."""
    core = min(os.sched_getaffinity(0))
    where: list[set[int]] = []
    run, _ = answered(
        device, "mailbox", lambda out: where.append(os.sched_getaffinity(0)),
        worker=MailboxWorker(cpus=[core]),
    )  # fmt: skip
    run.launch(stream)
    run.synchronize(LIMIT_S)
    assert where == [{core}]
    run.close()


def test_deadlines_and_operands_out_of_range_are_refused(device):
    """Nothing is added to the graph by a refused call."""
    graph = Graph(device, "refused")
    lane = graph.lane("main")
    for options in ({"deadline_s": 0.0}, {"deadline_s": float("inf")}, {"worker": "me"},
                    {"replay_deadline_s": -1.0}, {"output": np.zeros(3)}):  # fmt: skip
        with pytest.raises(OptionError):
            lane.mailbox(lambda: None, **options)  # type: ignore[arg-type]
    assert graph.nodes == []
    graph.close()


CHILD = """
import sys
from graft.cudagraph.device import open_device
from graft.cudagraph.errors import DeviceError
from graft.cudagraph.graph import Graph
device = open_device()
stream, other = device.stream(), device.stream()
graph, seen = Graph(device, "child"), []
grammar, model = graph.lane("grammar"), graph.lane("model")
array = device.zeros((1 << 16,), "int32")
for i in range(4):
    model.fill(array, i)
    grammar.wait(model.record())
    try:
        getattr(grammar, sys.argv[1])(lambda: seen.append(1), name=f"step {i}")
    except DeviceError as error:
        print(error.code_name, [node.kind for node in graph.nodes], graph.edges)
        sys.exit(0)
    answered = grammar.record()
    model.fill(array, i + 10)
    model.wait(answered)
run = graph.instantiate()
for _ in range(30):
    run.launch(stream)
run.synchronize(20.0)
print(len(seen))
"""


def child(transport: str, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, transport], capture_output=True, text=True, timeout=60,
        env={**os.environ, "GRAFT_DEVICE": "soft", **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split(maxsplit=1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_hardware_queue_is_enough(transport):
    """Two lanes that meet at mailboxes finish although work waits behind the waits."""
    assert child(transport, SOFTCUDA_QUEUES="1", SOFTCUDA_WORKERS="1") == ["120"]


def test_without_memory_operations_a_mailbox_is_refused_and_spinning_works():
    """The refused pair leaves no node behind; every other attribute may be 0."""
    code, rest = child("mailbox", SOFTCUDA_MEMOPS="0")
    assert (code, rest) == ("CUDA_ERROR_NOT_SUPPORTED", "['fill'] []")
    assert child("spin", SOFTCUDA_MEMOPS="0") == ["120"]
    off = {f"SOFTCUDA_ATTRIBUTE_{n}": "0" for n in (92, 93, 94, 98, 122, 123, 148)}
    assert child("mailbox", **off) == ["120"]


FAULT = """
import time
from graft.cudagraph.device import open_device
from graft.cudagraph.errors import DeviceError
from graft.cudagraph.graph import Graph
from graft.cudagraph.kernels import load_text
from graft.cudagraph.mailbox import MailboxWorker
device = open_device()
bad = load_text(device, 'extern "C" __global__ void bad(int* p) { p[1 << 24] = 1; }', "bad.cu")
stream, graph, worker = device.stream(), Graph(device, "faults"), MailboxWorker(wait="spin")
lane = graph.lane("main")
lane.kernel(bad["bad"], 1, 1, [device.zeros((1,), "int32")])
lane.mailbox(lambda: None, worker=worker, name="never asked")
run = graph.instantiate()
try:
    run.launch(stream)
    run.synchronize(20.0)
except DeviceError as error:
    print(error.code_name)
end = time.monotonic() + 20.0
while not worker.parked and time.monotonic() < end:
    time.sleep(0.001)
print(worker.parked, worker.served)
"""


def test_a_fault_wakes_everybody_and_workers_sleep():
    """The wait ends with the fault's error, and a spinning worker spins no longer."""
    done = subprocess.run(
        [sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=60,
        env={**os.environ, "GRAFT_DEVICE": "soft"},
    )  # fmt: skip
    assert done.stdout.split() == ["CUDA_ERROR_ILLEGAL_ADDRESS", "1", "0"], done.stderr


def test_native_owners_of_a_worker_hold_no_python_reference(device):
    """A worker's thread may drop the last of them, and must not need the GIL for it."""
    worker = MailboxWorker()
    before = sys.getrefcount(worker.native)
    graph = Graph(device, "owners")
    graph.lane("main").mailbox(lambda: None, worker=worker)
    run = graph.instantiate()
    after = sys.getrefcount(worker.native)
    assert after == before
    run.close()
    graph.close()
