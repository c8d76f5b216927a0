"""One test per feature of the driver on which graft depends, and per open question about it.

Each test takes less than a second. The answers to open questions are recorded as figures. On a
driver that lacks a feature, its test fails and says how the driver refuses it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cudagraph_util import wait_until_freed
from gpu_util import LIMIT_S, launch_times

from graft import native
from graft.cudagraph import (
    Graph,
    MailboxWorker,
    StreamLane,
    condition,
    hostfunc,
    if_,
    if_else,
    load_text,
    while_,
)
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.graph.graph import supports_programmatic_edges
from graft.cudagraph.graph.nodes import highest_priority
from graft.cudagraph.host.hostwork import NativeWork

KERNELS = """
#include "graft.cuh"
#include "conditional.cuh"
extern "C" __global__ void add(int* data, int value) {
  wait_for_previous_kernel();
  *data += value;
}
extern "C" __global__ void below(unsigned long long condition, const int* data, int limit) {
  cudaGraphSetConditional(condition, *data < limit ? 1u : 0u);
}
extern "C" __global__ void spin(unsigned long long ns) {
  wait_for_previous_kernel();
  const unsigned long long begin = global_timer_ns();
  while (global_timer_ns() - begin < ns) {
  }
}
extern "C" __global__ void publish(int* word, int value) { store_release_system(word, value); }
extern "C" __global__ void wait_word(const int* word, int value, unsigned long long limit_ns) {
  const unsigned long long begin = global_timer_ns();
  while (load_acquire_system(word) != value && global_timer_ns() - begin < limit_ns) {
  }
}
"""
SPIN_NS = 200_000


@pytest.fixture(scope="module")
def kernels(device):
    return load_text(device, KERNELS, "features.cu")


@pytest.fixture
def data(device):
    """A word on the device, which is 0."""
    return device.zeros((1,), "int32")


@pytest.fixture
def add(kernels, data):
    """A function that adds a kernel to a lane; the kernel adds a value to `data`."""
    return lambda lane, value=1: lane.kernel(kernels["add"], 1, 1, [data, value])


def run(graph, stream, times=1):
    executable = graph.instantiate()
    for _ in range(times):
        executable.launch(stream)
    executable.synchronize(LIMIT_S)
    return executable


def value(data):
    return int(data.to_host()[0])


# Streams and memory -------------------------------------------------------------------------------


def test_stream_runs_kernels_copies_and_fills(device, stream, data, add):
    result = device.pinned((1,), "int32")
    lane = StreamLane(stream)
    lane.fill(data, 1)
    add(lane, 5)
    lane.copy(result, data)
    stream.synchronize(LIMIT_S)
    assert result.array[0] == 0x01010101 + 5


def test_events_order_streams_and_measure_time(device, stream, kernels, figure):
    begin = device.event("begin", timing=True)
    end = device.event("end", timing=True)
    begin.record(stream)
    StreamLane(stream).kernel(kernels["spin"], 1, 1, [SPIN_NS])
    end.record(stream)
    end.synchronize(LIMIT_S)
    figure("spin of 200 us, by events", 1e6 * end.elapsed_s(begin), "us", (200, 230))


def test_host_sees_store_of_running_kernel(device, stream, kernels):
    """A kernel's store to pinned memory is visible while the next kernel still runs."""
    word = device.pinned((1,), "int32")
    answer = device.pinned((1,), "int32")
    lane = StreamLane(stream)
    lane.kernel(kernels["publish"], 1, 1, [word, 7])
    lane.kernel(kernels["wait_word"], 1, 1, [answer, 9, 3_000_000_000])
    end = time.monotonic() + 2
    while word.buffer[0] != 7 and time.monotonic() < end:
        pass
    arrived = word.buffer[0] == 7
    answer.buffer[0] = 9
    stream.synchronize(LIMIT_S)
    assert arrived


def test_driver_allocates_and_frees_beside_a_kernel(device, stream, kernels, figure):
    """The durations show whether the driver waits for a kernel that does not use the memory.

    The test calls the driver directly, because graft frees an array only after the streams.
    """

    def measure(name, function, argument):
        StreamLane(stream).kernel(kernels["spin"], 1, 1, [50 * SPIN_NS])
        start = time.perf_counter()
        result = call(function, argument)
        figure(f"{name} beside a kernel of 10 ms", 1e3 * (time.perf_counter() - start), "ms")
        stream.synchronize(LIMIT_S)
        return result

    memory = measure("allocation", cu.cuMemAlloc, 1 << 18)
    measure("free", cu.cuMemFree, memory)


# Graphs -------------------------------------------------------------------------------------------


def test_graph_runs_lanes_with_marks(device, stream, data, add):
    graph = Graph(device)
    one, two = graph.lane("one"), graph.lane("two")
    add(one, 1)
    two.wait(one.record())
    add(two, 2)
    run(graph, stream, 3)
    assert value(data) == 9


def test_graph_runs_child_graphs(device, stream, data, add):
    graph, child = Graph(device), Graph(device)
    add(child.lane("inside"), 3)
    graph.lane("main").child(child)
    run(graph, stream, 2)
    assert value(data) == 6


def test_graph_records_and_waits_for_events(device, stream, data, add):
    event = device.event("between")
    graph, other = Graph(device), Graph(device)
    lane = graph.lane("main")
    add(lane, 1)
    lane.record_event(event)
    second = other.lane("main")
    second.wait_event(event)
    add(second, 1)
    run(graph, stream)
    run(other, stream)
    assert value(data) == 2


def test_executable_is_changed_and_updated(device, stream, kernels, data, add):
    graph = Graph(device)
    add(graph.lane("main"), 1)
    executable = run(graph, stream)
    executable.update_kernel(graph.nodes[0], kernels["add"], 1, 1, [data, 10])
    executable.launch(stream)
    executable.set_enabled(graph.nodes[0], False)
    executable.launch(stream)
    executable.set_enabled(graph.nodes[0], True)
    executable.synchronize(LIMIT_S)
    assert value(data) == 11
    changed = Graph(device)
    add(changed.lane("main"), 100)
    executable.update(changed, LIMIT_S)
    executable.launch(stream)
    executable.synchronize(LIMIT_S)
    assert value(data) == 111


def test_graph_runs_nodes_with_priorities(device, stream, kernels, data):
    graph = Graph(device)
    arguments = [data, 1]
    graph.lane("main").kernel(kernels["add"], 1, 1, arguments, priority=highest_priority())
    executable = graph.instantiate(priorities=True)
    executable.launch(stream)
    executable.synchronize(LIMIT_S)
    assert value(data) == 1


def test_programmatic_edges_keep_results(device, stream, data, add):
    if not supports_programmatic_edges(device):
        pytest.skip("the device has no programmatic edges")
    graph = Graph(device, programmatic=True)
    lane = graph.lane("main")
    for _ in range(50):
        add(lane, 1)
    run(graph, stream, 4)
    assert value(data) == 200


def test_instantiation_and_upload_take(device, stream, add, figure):
    graph = Graph(device)
    lane = graph.lane("main")
    for _ in range(250):
        add(lane, 1)
    start = time.perf_counter()
    executable = graph.instantiate()
    middle = time.perf_counter()
    executable.upload(stream)
    stream.synchronize(LIMIT_S)
    figure("instantiation of 250 nodes", 1e3 * (middle - start), "ms")
    figure("upload of 250 nodes", 1e3 * (time.perf_counter() - middle), "ms")


def test_graph_releases_its_operands(device, stream, kernels):
    """The driver calls the destructors of user objects after graph and executable are gone."""
    wait_until_freed()
    records = native.live_records()
    graph = Graph(device)
    graph.lane("main").kernel(kernels["add"], 1, 1, [device.zeros((1,), "int32"), 1])
    executable = run(graph, stream)
    assert native.live_records() > records
    executable.close()
    graph.close()
    del executable, graph
    end = time.monotonic() + 2
    while native.live_records() > records:
        assert time.monotonic() < end
        time.sleep(0.001)


# Host work ----------------------------------------------------------------------------------------

TRANSPORTS = ("host", "mailbox", "spinkernel")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_host_steps_run_between_kernels(device, stream, data, add, transport):
    """The host step sees the kernel before it, and the kernel after it sees the host step."""
    seen = device.pinned((1,), "int32")
    values = []
    graph = Graph(device)
    lane = graph.lane("main")
    add(lane)
    lane.copy(seen, data)
    getattr(lane, transport)(lambda: values.append(int(seen.array[0])))
    add(lane)
    run(graph, stream, 3)
    assert values == [1, 3, 5]
    assert value(data) == 6


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_native_host_steps_take(device, stream, transport, figure):
    graph = Graph(device)
    lane = graph.lane("main")
    free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value or 0
    for _ in range(10):
        getattr(lane, transport)(NativeWork(free, 0, name="free(NULL)"))
    times = launch_times(graph.instantiate(), stream, 5)
    figure(f"{transport}: native host step", 1e5 * min(times), "us")


def test_missed_deadline_of_a_mailbox_fails_the_replay(device, stream, add):
    """The worker's store releases the waiting node, and the graph ends."""
    graph = Graph(device)
    lane = graph.lane("main")
    lane.mailbox(lambda: time.sleep(0.5), deadline_s=0.1, name="slow")
    add(lane)
    executable = graph.instantiate()
    executable.launch(stream)
    with pytest.raises(Exception, match="slow"):
        executable.synchronize(LIMIT_S)


def test_host_function_runs_on_a_stream(device, stream):
    done = threading.Event()
    hostfunc(stream, done.set)
    stream.synchronize(LIMIT_S)
    assert done.is_set()


def test_host_store_releases_a_waiting_node(device, stream, figure):
    """The time from the answer of a worker to the end of the graph."""
    answered = []
    graph = Graph(device)
    lane = graph.lane("main")
    lane.mailbox(lambda: answered.append(time.perf_counter()), worker=MailboxWorker())
    executable = graph.instantiate()
    delays = []
    for _ in range(20):
        executable.launch(stream)
        executable.synchronize(LIMIT_S)
        delays.append(time.perf_counter() - answered[-1])
    figure("answer of a mailbox to the end of the graph", 1e6 * min(delays), "us")


# Conditional nodes --------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "expected"), [(0, 1), (50, 150)])
def test_if_else_runs_one_body(device, stream, kernels, add, data, start, expected):
    graph = Graph(device)
    lane = graph.lane("main")
    add(lane, start)
    small = condition(graph)
    lane.kernel(kernels["below"], 1, 1, [small, data, 10])
    then, otherwise = if_else(lane, small)
    add(then.lane("then"), 1)
    add(otherwise.lane("else"), 100)
    run(graph, stream)
    assert value(data) == expected


def loop(graph, kernels, data, limit, programmatic=False):
    """Add a WHILE node that runs until `data` is not less than `limit`; return its body."""
    again = condition(graph, 1)
    body = while_(graph.lane("main"), again)
    lane = body.lane("inside")
    lane.kernel(kernels["add"], 1, 1, [data, 1])
    return body, lambda: lane.kernel(kernels["below"], 1, 1, [again, data, limit])


def test_while_runs_its_body(device, stream, kernels, data, figure):
    graph = Graph(device)
    _, end = loop(graph, kernels, data, 1000)
    end()
    executable = graph.instantiate()
    start = time.perf_counter()
    executable.launch(stream)
    executable.synchronize(LIMIT_S)
    figure("iteration of a WHILE node", 1e3 * (time.perf_counter() - start), "us")
    assert value(data) == 1000


def test_while_body_contains_all_kinds_of_nodes(device, stream, kernels, data, add):
    """Copies, fills, child graphs, nested conditionals and spinning host steps run in a body."""
    graph = Graph(device)
    body, end = loop(graph, kernels, data, 3)
    lane = body.lane("inside")
    copies = device.zeros((2,), "int32")
    calls = []
    lane.copy(copies[:1], data)
    lane.fill(copies[1:], 1)
    child = Graph(device)
    child.lane("child").kernel(kernels["add"], 1, 1, [copies, 10])
    lane.child(child)
    nested = if_(lane, condition(graph, 1))
    nested.lane("nested").kernel(kernels["add"], 1, 1, [copies, 100])
    lane.spinkernel(lambda: calls.append(1))
    end()
    run(graph, stream)
    assert value(data) == 3 and len(calls) == 3
    assert copies.to_host().tolist() == [113, 0x01010101]


def test_while_body_with_programmatic_edges(device, stream, kernels, data, figure):
    """Whether programmatic edges are accepted in a body, and how long an iteration takes."""
    if not supports_programmatic_edges(device):
        pytest.skip("the device has no programmatic edges")
    for programmatic in (False, True):
        graph = Graph(device, programmatic=programmatic)
        body, end = loop(graph, kernels, data, 0)
        if body.programmatic != programmatic:
            figure("programmatic edges in a body", None, note="refused by the driver")
            return
        for _ in range(20):
            body.lane("inside").kernel(kernels["spin"], 1, 1, [1000])
        end()
        seconds = launch_times(graph.instantiate(), stream, 1)[0]
        edges = "programmatic" if programmatic else "full"
        figure(f"WHILE body of 20 spins, {edges} edges", 1e6 * seconds, "us")


# Concurrency --------------------------------------------------------------------------------------


def spin_lanes(place, kernels, count=2):
    for i in range(count):
        place.lane(f"spin {i}").kernel(kernels["spin"], 1, 1, [SPIN_NS])


@pytest.mark.parametrize("inside_body", [False, True])
def test_branches_run_concurrently(device, stream, kernels, figure, inside_body):
    """Two spins of 200 us take 200 us if branches run at the same time, otherwise 400."""
    graph = Graph(device)
    place = if_(graph.lane("main"), condition(graph, 1)) if inside_body else graph
    spin_lanes(place, kernels)
    seconds = min(launch_times(graph.instantiate(), stream, 3))
    where = "a body" if inside_body else "a graph"
    figure(f"two spins of 200 us in branches of {where}", 1e6 * seconds, "us", (200, 230))


#: Program that runs a branch with a host step beside a branch that spins, and prints the time after
#: which the host step ran.
CONNECTIONS = """
import sys, time
from graft.cudagraph import Graph, load_text, open_device
import test_features as features
device = open_device()
stream = device.stream()
kernels = load_text(device, features.KERNELS, "features.cu")
graph = Graph(device)
seen = []
getattr(graph.lane("host"), sys.argv[1])(lambda: seen.append(time.perf_counter()))
graph.lane("spin").kernel(kernels["spin"], 1, 1, [20_000_000])
executable = graph.instantiate()
executable.launch(stream)
executable.synchronize(features.LIMIT_S)
start = time.perf_counter()
executable.launch(stream)
executable.synchronize(features.LIMIT_S)
print(1e3 * (seen[-1] - start), 1e3 * (time.perf_counter() - start))
"""


@pytest.mark.parametrize(
    ("transport", "connections"),
    [
        ("mailbox", 1),
        pytest.param("mailbox", 32, marks=pytest.mark.full),
        pytest.param("spinkernel", 1, marks=pytest.mark.full),
        pytest.param("spinkernel", 32, marks=pytest.mark.full),
    ],
)
def test_waiting_branch_does_not_block_others(device, figure, transport, connections):
    """Whether a host step starts beside a kernel of 20 ms, by the number of hardware queues."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", CONNECTIONS, transport],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    started_ms, ended_ms = map(float, done.stdout.split())
    name = f"{transport} beside a kernel of 20 ms, {connections} connections"
    figure(name, started_ms, "ms", (0, 1), f"the graph took {ended_ms:.1f} ms")
