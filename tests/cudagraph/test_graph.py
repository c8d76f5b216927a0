"""Graphs: definition, launches, updates of executables and of nodes, payloads."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cudagraph_util import assert_raises, replay, run_in_threads, run_program, wait_until_freed

from graft import native
from graft.cudagraph import (
    Device,
    DeviceArray,
    Graph,
    GraphBody,
    GraphLane,
    KernelError,
    KernelModule,
    NativeWork,
    OptionError,
    PythonWork,
    Stream,
    condition,
    if_,
    load_text,
)
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.graph import graph as graph_module

TEXT = """
extern "C" __global__ void add(int* data, int value) { data[threadIdx.x] += value; }
extern "C" __global__ void scale(int* data, int value) { data[threadIdx.x] *= value; }
"""
WAITING = """
#include "graft.cuh"
extern "C" __global__ void plain(int* data) { *data += 1; /* wait_for_previous_kernel(); */ }
extern "C" __global__ void wait(int* data) {
  const int one = 1;
  wait_for_previous_kernel();
  *data += one;
}
extern "C" __global__ void late(int* data) {
  if (data == nullptr) return;
  wait_for_previous_kernel();
  *data += 1;
}
extern "C" __global__ void inner(int* data) {
  if (data != nullptr) wait_for_previous_kernel();
  *data += 1;
}
"""


def test_graph_lists_nodes_and_edges(device: Device, module) -> None:
    """Each node of a lane depends on the previous one; wait() adds a dependency on the mark."""
    data = device.zeros((4,), "int32")
    pinned = device.pinned((4,), "int32")
    graph = Graph(device, "shape")
    model = graph.lane("model")
    grammar = graph.lane("grammar")
    model.fill(data, name="clear")
    model.kernel(module["add"], 1, 4, [data, 1])
    mark = model.record()
    grammar.host(lambda: None, name="masks")
    grammar.wait(mark)
    grammar.copy(pinned, data, name="read")
    model.wait(grammar.record())
    model.fill(data)
    assert [(n.name, n.kind, n.lane, n.index) for n in graph.nodes] == [
        ("clear", "fill", "model", 0),
        ("add", "kernel", "model", 1),
        ("masks", "host", "grammar", 2),
        ("read", "copy", "grammar", 3),
        ("fill", "fill", "model", 4),
    ]
    assert sorted(graph.edges) == [(0, 1), (1, 3), (1, 4), (2, 3), (3, 4)]
    assert graph.lanes == ["model", "grammar"]
    graph.lane("grammar").fill(data)
    assert graph.edges[-1] == (3, 5), "the same lane is continued"


def test_graph_has_one_open_executable(device: Device, stream: Stream) -> None:
    """A second instantiate() raises while the first executable is open."""
    graph = Graph(device, "single")
    ran: list[int] = []
    graph.lane("main").host(PythonWork(ran.append, 1))
    first = graph.instantiate()
    assert_raises(OptionError, {"'single'": graph.instantiate})
    first.launch(stream)
    first.close()
    second = replay(graph, stream)
    assert len(ran) == 2 and second.launches == 1
    with pytest.raises(OptionError, match="closed"):
        first.launch(stream)


def test_exec_update_rejects_other_topology_and_busy_graph(device: Device, module) -> None:
    data = device.zeros((8,), "int32")
    small, twin, large = (Graph(device, name) for name in ("small", "twin", "large"))
    for graph in (small, twin, large):
        graph.lane("main").kernel(module["add"], 1, 8, [data, 1])
    large.lane("main").fill(data)
    executable = small.instantiate()
    with pytest.raises(OptionError, match=r"'small' cannot be updated to 'large'"):
        executable.update(large)
    other = large.instantiate()
    with pytest.raises(OptionError, match="of its own"):
        executable.update(large)
    other.close()
    executable.update(twin)
    with pytest.raises(OptionError, match="'twin'"):
        twin.instantiate()
    with pytest.raises(OptionError, match="can only be updated to a Graph, not None"):
        executable.update(None)  # type: ignore[arg-type]


def test_exec_launches_of_threads_are_serialized(device: Device, module) -> None:
    """If three threads launch on three streams, each replay runs once and no two overlap."""
    data = device.zeros((8,), "int32")
    graph = Graph(device, "shared")
    running_at_start = []
    running = []

    def enter() -> None:
        running.append(1)
        running_at_start.append(len(running))

    lane = graph.lane("main")
    lane.host(enter)
    lane.kernel(module["add"], 1, 8, [data, 1])
    lane.host(running.pop)
    executable = graph.instantiate()
    streams = [device.stream() for _ in range(3)]

    def work(stream: Stream) -> None:
        for _ in range(50):
            executable.launch(stream)

    run_in_threads(*(partial(work, stream) for stream in streams))
    executable.synchronize(60)
    device.synchronize()
    assert executable.launches == 150 and running_at_start == [1] * 150
    assert (data.to_host() == 150).all()


def test_exec_synchronize_ignores_later_launches(device: Device, module) -> None:
    """synchronize() and update() return while other threads keep launching."""
    data = device.zeros((8,), "int32")
    graph = Graph(device, "busy")
    other = Graph(device, "next")
    for value, definition in enumerate((graph, other), start=1):
        definition.lane("main").kernel(module["add"], 1, 8, [data, value])
    executable = graph.instantiate()
    stop = threading.Event()

    def work() -> None:
        stream = device.stream()
        while not stop.is_set():
            executable.launch(stream)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            before = executable.launches
            executable.synchronize(30)
            assert data.to_host()[0] >= before  # to_host() waits for the streams
        executable.update(other, 30)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    executable.synchronize(60)
    assert executable.launches <= data.to_host()[0] < 2 * executable.launches


@pytest.mark.overlap
def test_graph_instantiate_waits_without_lock(device: Device, stream: Stream) -> None:
    """Other threads use the graph while instantiate() waits for earlier launches."""
    gate = threading.Event()
    entered = threading.Event()
    graph = Graph(device, "waits")
    graph.lane("main").host(lambda: (entered.set(), gate.wait(60)))
    first = graph.instantiate()
    first.launch(stream)
    first.close()
    assert entered.wait(60)
    results: list[object] = []
    waiting = threading.Thread(target=lambda: results.append(graph.instantiate()))
    waiting.start()
    adding = threading.Thread(target=lambda: results.append(graph.lane("other")))
    adding.start()
    adding.join(30)
    assert len(results) == 1
    gate.set()
    waiting.join(60)
    adding.join(60)
    assert len(results) == 2


def test_graph_lanes_are_filled_by_threads(device: Device, stream: Stream, module) -> None:
    data = device.zeros((4, 8), "int32")
    graph = Graph(device, "parallel build")

    def work(i: int) -> None:
        for _ in range(25):
            graph.lane(f"lane {i}").kernel(module["add"], 1, 8, [data[i], i + 1])

    run_in_threads(*(partial(work, i) for i in range(4)))
    assert len(graph.nodes) == 100 and len(graph.edges) == 96
    replay(graph, stream)
    assert data.to_host()[:, 0].tolist() == [25, 50, 75, 100]


def test_closed_graph_raises_option_error(device: Device) -> None:
    graph = Graph(device, "over")
    data = device.zeros((1,), "int32")
    graph.close()
    for attempt in (lambda: graph.lane("main").fill(data), graph.instantiate):
        assert_raises(OptionError, {"'over'": attempt})


def test_graph_dot_has_nodes_lanes_and_edges(device: Device) -> None:
    graph = Graph(device, 'a "round"')
    data = device.zeros((1,), "int32")
    graph.lane("model").fill(data, name="clear")
    graph.lane("grammar").wait(graph.lane("model").record())
    graph.lane("grammar").host(lambda: None, name="fill row 0")
    text = graph.dot()
    assert text.startswith('digraph "a \\"round\\"" {')
    assert 'n0 [label="clear"' in text and 'n1 [label="fill row 0"' in text
    assert 'label="model"' in text and 'label="grammar"' in text
    assert re.search(r"n0 -> n1 \[", text), "edges between lanes are highlighted"
    assert text.count("{") == text.count("}")


def test_update_kernel_affects_later_launches(device: Device, stream: Stream, module) -> None:
    """update_kernel() changes function, block and arguments of a node, given by name or as Node."""
    a = device.zeros((4,), "int32")
    b = device.from_host(np.ones(4, np.int32))
    graph = Graph(device, "changing")
    graph.lane("main").kernel(module["add"], 1, 4, [a, 3], name="work")
    executable = graph.instantiate()
    executable.launch(stream)
    executable.update_kernel("work", module["add"], 1, 2, [a, 10])
    executable.launch(stream)
    executable.update_kernel(graph.nodes[0], module["scale"], 1, 2, [b, 2])
    replay(executable, stream)
    assert a.to_host().tolist() == [13, 13, 3, 3] and b.to_host().tolist() == [2, 2, 1, 1]


def test_update_kernel_operands_live_until_replaced(device: Device, stream: Stream, module) -> None:
    """Replaced operands are released, so 300 changes of a node do not accumulate resources."""
    data = device.zeros((4,), "int32")
    graph = Graph(device, "kept")
    graph.lane("main").kernel(module["add"], 1, 4, [data, 1], name="work")
    executable = graph.instantiate()
    wait_until_freed()
    before = native.live_resources()
    for i in range(300):
        fresh = device.pinned((4,), "int32")
        seen = fresh.array
        fresh.array[:] = i
        executable.update_kernel("work", module["add"], 1, 4, [fresh, 1])
        del fresh
        executable.launch(stream)
    executable.synchronize(60)
    assert seen.tolist() == [300] * 4
    del seen
    executable.update_kernel("work", module["add"], 1, 4, [data, 1])
    wait_until_freed()
    assert native.live_resources() <= before


@pytest.mark.overlap
def test_closed_exec_keeps_operands_of_launch_in_flight(
    device: Device, stream: Stream, module
) -> None:
    gate = threading.Event()
    data = device.zeros((4,), "int32")
    fresh = device.pinned((4,), "int32")
    seen = fresh.array
    graph = Graph(device, "flight")
    lane = graph.lane("main")
    lane.host(lambda: gate.wait(30))
    lane.kernel(module["add"], 1, 4, [data, 1], name="work")
    executable = graph.instantiate()
    executable.update_kernel("work", module["add"], 1, 4, [fresh, 7])
    executable.launch(stream)
    executable.close()
    del executable, graph, lane, fresh, data
    gc.collect()
    gate.set()
    stream.synchronize(60)
    assert seen.tolist() == [7] * 4


@pytest.mark.parametrize("priorities", [False, True])
def test_set_enabled_skips_kernel_node(
    device: Device, stream: Stream, module, priorities: bool
) -> None:
    """A disabled kernel node does nothing, and host nodes cannot be disabled.

    Kernels with priorities compute the same results.
    """
    data = device.zeros((1,), "int32")
    graph = Graph(device, "switch")
    lane = graph.lane("main")
    lane.kernel(module["add"], 1, 1, [data, 1], name="one")
    lane.kernel(module["add"], 1, 1, [data, 10], name="ten", priority=-1)
    lane.host(list, name="masks")
    executable = graph.instantiate(priorities=priorities)
    executable.set_enabled("one", False)
    executable.launch(stream)
    executable.set_enabled("one", True)
    replay(executable, stream)
    assert data.to_host()[0] == 21
    with pytest.raises(OptionError, match=r"host node 'masks'.*'switch'"):
        executable.set_enabled("masks", False)


def programmatic_edges(graph: Graph | GraphBody) -> list[tuple[int, int]]:
    """Return the programmatic edges of a CUgraph as pairs of node indices."""
    nodes, count = call(cu.cuGraphGetNodes, graph.handle, 99)
    index = {int(node): i for i, node in enumerate(nodes[:count])}
    starts, ends, properties, count = call(cu.cuGraphGetEdges, graph.handle, 99)
    found = []
    for i in range(count):
        if (int(properties[i].type), properties[i].from_port) == (1, 1):
            found.append((index[int(starts[i])], index[int(ends[i])]))
    return found


def waiting_graph(
    device: Device, kernels: KernelModule, data: DeviceArray, programmatic: bool
) -> tuple[Graph, GraphBody]:
    """Build a graph of the kernels in WAITING, with marks, other nodes and a conditional body.

    Each kernel increments ``data``.

    Returns
    -------
    (Graph, GraphBody)
        Graph, and the body of its conditional node.
    """
    graph = Graph(device, "p", programmatic=programmatic)
    main = graph.lane("main")
    other = graph.lane("other")

    def add(name: str, lane: GraphLane = main) -> None:
        lane.kernel(kernels[name], 1, 1, [data])

    for name in ("wait", "wait", "plain", "wait", "late", "wait", "inner"):
        add(name)
    main.fill(device.zeros((1,), "int32"))
    add("wait")
    mark = main.record()
    add("wait")
    other.wait(mark)
    add("wait", other)
    main.wait(other.record())
    add("wait")
    main.host(list)
    body = if_(main, condition(graph, 1))
    add("wait", body.lane("main"))
    add("wait", body.lane("main"))
    return graph, body


def test_programmatic_edges_lead_only_to_waiting_kernels(
    device: Device, stream: Stream, monkeypatch
) -> None:
    """Only an edge to a kernel that calls wait_for_previous_kernel() is programmatic.

    The edge must connect two consecutive kernels of a lane, and the second kernel must make the
    call at its top. Edges at a mark and at a node of another kind are ordinary dependencies. The
    body of a conditional inherits the setting of the graph. Nodes at a programmatic edge cannot be
    changed.
    """
    monkeypatch.setattr(graph_module, "PROGRAMMATIC_MIN_CUDA", 10**9)
    assert_raises(OptionError, {"'p'.*9.0": lambda: Graph(device, "p", programmatic=True)})
    monkeypatch.undo()
    if device.compute_capability < (9, 0):
        pytest.skip("programmatic edges need compute capability 9.0")
    kernels = load_text(device, WAITING, "waiting.cu")
    assert {n for n in ("plain", "wait", "late", "inner") if kernels[n].waits_for_previous} == {
        "wait"
    }
    totals = []
    for programmatic in (False, True):
        data = device.zeros((1,), "int32")
        graph, body = waiting_graph(device, kernels, data, programmatic)
        expected = [(0, 1), (2, 3), (4, 5)] if programmatic else []
        assert programmatic_edges(graph) == expected
        assert programmatic_edges(body) == ([(0, 1)] if programmatic else [])
        run = replay(graph, stream)
        totals.append(data.to_host()[0])
        for node in graph.nodes[:7]:
            change = partial(run.set_enabled, node, True)
            if programmatic and node.index < 6:
                assert_raises(OptionError, {"programmatic edge": change})
            else:
                change()
    assert totals == [13, 13]


TWO_KERNELS_IN_BODY = f"""
sys.path.insert(0, sys.argv[1])
from test_graph import programmatic_edges
kernel = load_text(device, {WAITING!r}, "waiting.cu")["wait"]
graph, data = Graph(device, "loop", programmatic=True), device.zeros((1,), "int32")
lane = if_(graph.lane("main"), condition(graph, 1)).lane("main")
lane.kernel(kernel, 1, 1, [data])
lane.kernel(kernel, 1, 1, [data])
print(len(programmatic_edges(lane.graph)))
graph.instantiate().launch(device.stream("s"))
device.synchronize()
print(data.to_host()[0])
"""


@pytest.mark.parametrize(
    "failure, edges", [("", 1), ("cuGraphInstantiateWithFlags:1:801", 0), ("cuGraphAddNode:3:1", 0)]
)
def test_bodies_have_programmatic_edges_if_driver_accepts_them(failure: str, edges: int) -> None:
    done = run_program(
        TWO_KERNELS_IN_BODY, str(Path(__file__).parent), GRAFT_DEVICE="soft", SOFTCUDA_FAIL=failure
    )
    assert done.stdout.split() == [str(edges), "2"], done.stderr


def test_lack_of_memory_is_not_taken_for_a_refused_body() -> None:
    """The error is raised, and the next body tries again whether the driver accepts it."""
    code = TWO_KERNELS_IN_BODY.replace(
        "graph, data =",
        """
graph = Graph(device, "first", programmatic=True)
try:
    if_(graph.lane("main"), condition(graph, 1))
except DeviceError as error:
    print(error.code_name)
graph, data =""",
    )
    done = run_program(
        code,
        str(Path(__file__).parent),
        GRAFT_DEVICE="soft",
        SOFTCUDA_FAIL="cuGraphInstantiateWithFlags:1:2",
    )
    assert done.stdout.split() == ["CUDA_ERROR_OUT_OF_MEMORY", "1", "2"], done.stderr


def test_invalid_node_and_payload_changes_raise(device: Device, stream: Stream, module) -> None:
    data = device.zeros((1,), "int32")
    graph = Graph(device, "mine")
    other = Graph(device, "other")
    for _ in range(2):
        graph.lane("main").kernel(module["add"], 1, 1, [data, 1])
    other.lane("main").fill(data, name="elsewhere")
    payload = graph.payload()
    executable = graph.instantiate()
    enable = executable.set_enabled
    add = module["add"]
    assert_raises(
        OptionError,
        {
            "2 nodes named 'add'": lambda: executable.update_kernel("add", add, 1, 1, [data, 5]),
            "0 nodes named": lambda: enable("nothing", False),
            "not a node of graph 'mine'": lambda: enable(other.nodes[0], False),
            "'payload'.*'other'": lambda: other.lane("main").host(print, payload=payload),
            "fill node 'elsewhere'.*only kernel": lambda: enable("elsewhere", False, within=other),
        },
    )
    with pytest.raises(KernelError, match="2 arguments"):
        executable.update_kernel(graph.nodes[0], module["add"], 1, 1, [data])
    replay(executable, stream)
    assert data.to_host()[0] == 2


@pytest.mark.overlap
def test_payload_is_the_value_at_launch(device: Device, stream: Stream) -> None:
    """A replay reads the payload value that was set before its launch, even if it runs later."""
    gate = threading.Event()
    seen: list[tuple[object, str]] = []
    graph = Graph(device, "payloads")
    payload = graph.payload("first", name="payload")
    lane = graph.lane("main")
    lane.host(lambda: gate.wait(30))
    lane.host(PythonWork(lambda value, tag: seen.append((value, tag)), "x"), payload=payload)
    lane.host(lambda value: seen.append((value, "y")), payload=payload)
    executable = graph.instantiate()
    executable.launch(stream)
    for value in ("second", "third"):
        executable.set_payload(payload, value)
        executable.launch(stream)
    executable.launch(stream)
    assert payload.live_values == 3
    gate.set()
    executable.synchronize(60)
    assert [v for v, tag in seen if tag == "x"] == ["first", "second", "third", "third"]
    assert [v for v, tag in seen if tag == "y"] == ["first", "second", "third", "third"]
    assert payload.live_values == 1
    executable.close()
    seen.clear()
    gate.clear()
    again = graph.instantiate()  # numbers its replays from 1
    again.launch(stream)
    again.set_payload(payload, "fourth")
    again.launch(stream)
    gate.set()
    again.synchronize(60)
    assert [v for v, tag in seen if tag == "x"] == ["third", "fourth"]


def test_exec_update_uses_payloads_of_new_definition(device: Device, stream: Stream) -> None:
    """After an update of the executable, set_payload() rejects payloads of the old definition."""
    seen: list[object] = []
    graphs = [Graph(device, name) for name in ("old", "new")]
    payloads = [graph.payload(f"{graph.name} first") for graph in graphs]
    for graph, payload in zip(graphs, payloads, strict=True):
        graph.lane("main").host(seen.append, payload=payload)
    run = replay(graphs[0], stream)
    run.update(graphs[1])
    replay(run, stream)
    run.set_payload(payloads[1], "new second")
    replay(run, stream)
    assert seen == ["old first", "new first", "new second"]
    assert_raises(
        OptionError,
        {"'payload' does not belong to graph 'new'": lambda: run.set_payload(payloads[0], "old")},
    )


def test_native_work_receives_payload_address(device: Device, stream: Stream) -> None:
    seen: list[int] = []
    fn = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda p: seen.append(ctypes.c_int.from_address(p).value)
    )
    address = ctypes.cast(fn, ctypes.c_void_p).value
    assert address is not None
    values = [device.pinned((1,), "int32") for _ in range(3)]
    for i, pinned in enumerate(values):
        pinned.array[0] = 10 * i
    graph = Graph(device, "native")
    payload = graph.payload(values[0])
    graph.lane("main").host(NativeWork(address, keep=fn), payload=payload)
    executable = graph.instantiate()
    for pinned in values:
        executable.set_payload(payload, pinned)
        executable.launch(stream)
    executable.synchronize(60)
    assert seen == [0, 10, 20]


BLOCKED = """
seen = []
graph = Graph(device, "blocked")
payload = graph.payload(0, name="payload")
def work(value):
    seen.append(value)
    assert run.launches <= 3
    run.set_payload(payload, value + 1)
    if value == 2:
        run.close()
graph.lane("main").host(work, payload=payload)
run = graph.instantiate()
for _ in range(3):
    run.launch(stream)
    stream.synchronize(60)
print(seen, run)
"""


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_host_work_may_use_its_own_executable(blocking: str) -> None:
    """Host work may call its executable even while a launch call waits for the replay's end."""
    done = run_program(BLOCKED, GRAFT_DEVICE="soft", SOFTCUDA_LAUNCH_BLOCKING=blocking)
    assert done.stdout == "[0, 1, 2] <GraphExec 'blocked' (closed)>\n", done.stderr


REFUSED = """
from cuda.bindings import driver as cu
from graft.cudagraph.driver import softstats
seen, started, go = [], threading.Event(), threading.Event()
graph, busy = Graph(device, "refused"), Graph(device, "busy")
payload = graph.payload("first", name="payload")
graph.lane("main").host(seen.append, payload=payload)
busy.lane("main").host(lambda: (started.set(), go.wait(60)))
run, other = graph.instantiate(), busy.instantiate()
run.launch(stream)
run.set_payload(payload, "second")

# A query invalidates the capture, so that no graph can be launched on this stream.
captured = device.stream()
mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
cu.cuStreamBeginCapture(captured.handle, mode)
cu.cuStreamQuery(captured.handle)
def launch():
    try:
        run.launch(captured)
    except DeviceError as error:
        print(error.code_name)
def launches():
    return softstats.counters()["calls"].get("cuGraphLaunch", 0)
# While the host function runs, driver calls wait.
running = threading.Thread(target=other.launch, args=(stream,))
running.start()
started.wait(60)
before, refused = launches(), threading.Thread(target=launch)
refused.start()
while launches() == before: time.sleep(0.001)
run.set_payload(payload, "third")
go.set()
for thread in (refused, running): thread.join(60)
cu.cuStreamEndCapture(captured.handle)
for _ in range(2):
    run.launch(stream)
    stream.synchronize(60)
print(seen)
"""


@pytest.mark.overlap
def test_payload_set_during_refused_launch_is_for_next_launch() -> None:
    done = run_program(REFUSED, GRAFT_DEVICE="soft", SOFTCUDA_LOCK_MODEL="1")
    expected = ["CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "['first', 'third', 'third']"]
    assert done.stdout.splitlines() == expected, done.stderr
