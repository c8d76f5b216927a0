"""Graphs: definition, launches, updates."""

from __future__ import annotations

import gc
import re
import threading

import numpy as np
import pytest
from cudagraph_util import replay

from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import PythonWork

TEXT = """
extern "C" __global__ void add(int* data, int value, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] += value;
}
extern "C" __global__ void scale(int* data, int value, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] *= value;
}
"""


def test_definition_lists_nodes_and_edges(device: Device, module) -> None:
    """Nodes carry name, kind and lane; edges are the lane's order and waited marks, no others."""
    data = device.zeros((4,), "int32")
    pinned = device.pinned((4,), "int32")
    graph = Graph(device, "shape")
    model, grammar = graph.lane("model"), graph.lane("grammar")
    model.fill(data, name="clear")
    model.kernel(module["add"], 1, 4, [data, 1, 4])
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
    assert graph.edges[-1] == (3, 5), "a lane asked for again goes on where it was"


def test_arguments_are_copied_at_build_time(device: Device, stream: Stream, module) -> None:
    """Temporaries of the build may go, and the heap be reused, before the node runs."""
    data = device.zeros((32,), "int32")
    graph = Graph(device, "temporaries")
    lane = graph.lane("main")
    for value in range(1, 41):
        lane.kernel(module["add"], 1, 32, [data, np.int32(value), np.int32(32)])
    executable = graph.instantiate()
    del lane, graph
    gc.collect()
    churn = [bytearray(np.random.default_rng(i).bytes(64)) for i in range(20000)]
    replay(executable, stream)
    assert len(churn) == 20000 and (data.to_host() == 820).all()


def test_one_executable_per_definition(device: Device, stream: Stream) -> None:
    """A second instantiate is refused while the first executable is open, and works after."""
    graph = Graph(device, "single")
    ran: list[int] = []
    graph.lane("main").host(PythonWork(ran.append, 1))
    first = graph.instantiate()
    with pytest.raises(OptionError, match="'single'"):
        graph.instantiate()
    first.launch(stream)
    first.close()
    second = replay(graph, stream)
    assert len(ran) == 2 and second.launches == 1
    with pytest.raises(OptionError, match="closed"):
        first.launch(stream)


def test_update_to_another_topology_is_refused(device: Device, module) -> None:
    """A definition that cannot replace this one raises OptionError, saying why; one that did has
    no executable of its own."""
    data = device.zeros((8,), "int32")
    small, twin, large = (Graph(device, name) for name in ("small", "twin", "large"))
    for graph in (small, twin, large):
        graph.lane("main").kernel(module["add"], 1, 8, [data, 1, 8])
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
    with pytest.raises(OptionError, match="is updated to a Graph, not None"):
        executable.update(None)  # type: ignore[arg-type]


def test_launches_from_many_threads_are_serialised(device: Device, module) -> None:
    """One executable launched by several threads on several streams runs every replay once."""
    data = device.zeros((8,), "int32")
    graph = Graph(device, "shared")
    graph.lane("main").kernel(module["add"], 1, 8, [data, 1, 8])
    executable = graph.instantiate()
    streams = [device.stream() for _ in range(3)]
    failures: list[BaseException] = []

    def work(stream: Stream) -> None:
        try:
            for _ in range(50):
                executable.launch(stream)
        except BaseException as error:  # reported by the assert below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    executable.synchronize(60)
    device.synchronize()
    assert not failures and executable.launches == 150
    assert (data.to_host() == 150).all()


def test_waiting_ends_although_others_go_on_launching(device: Device, module) -> None:
    """synchronize() and update() wait for what was launched before, not for what follows."""
    data = device.zeros((8,), "int32")
    graph, other = Graph(device, "busy"), Graph(device, "next")
    for value, made in enumerate((graph, other), start=1):
        made.lane("main").kernel(module["add"], 1, 8, [data, value, 8])
    executable = graph.instantiate()
    over = threading.Event()

    def work() -> None:
        stream = device.stream()
        while not over.is_set():
            executable.launch(stream)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            before = executable.launches
            executable.synchronize(30)
            assert data.to_host()[0] >= before  # to_host() waits for the streams: some went on
        executable.update(other, 30)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    executable.synchronize(60)
    assert executable.launches <= data.to_host()[0] < 2 * executable.launches


def test_instantiating_again_leaves_the_definition_unlocked(device: Device) -> None:
    """While instantiate() waits for launches of an earlier executable others use the graph."""
    gate, entered = threading.Event(), threading.Event()
    stream = device.stream()
    graph = Graph(device, "waits")
    graph.lane("main").host(lambda: (entered.set(), gate.wait(60)))
    first = graph.instantiate()
    first.launch(stream)
    first.close()
    assert entered.wait(60)
    made: list[object] = []
    waiting = threading.Thread(target=lambda: made.append(graph.instantiate()))
    waiting.start()
    named = threading.Thread(target=lambda: made.append(graph.lane("other")))
    named.start()
    named.join(30)
    assert len(made) == 1
    gate.set()
    waiting.join(60)
    named.join(60)
    assert len(made) == 2
    stream.close()


def test_graphs_are_built_from_many_threads(device: Device, module) -> None:
    """Lanes of one graph may be filled by different threads."""
    data = device.zeros((4, 8), "int32")
    graph = Graph(device, "parallel build")

    def work(i: int) -> None:
        for _ in range(25):
            graph.lane(f"lane {i}").kernel(module["add"], 1, 8, [data[i], i + 1, 8])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(graph.nodes) == 100 and len(graph.edges) == 96
    stream = device.stream()
    replay(graph, stream)
    assert data.to_host()[:, 0].tolist() == [25, 50, 75, 100]
    stream.close()


def test_closed_graphs_are_refused(device: Device) -> None:
    """A closed definition takes no nodes and gives no executable."""
    graph = Graph(device, "over")
    data = device.zeros((1,), "int32")
    graph.close()
    with pytest.raises(OptionError, match="'over'"):
        graph.lane("main").fill(data)
    with pytest.raises(OptionError, match="'over'"):
        graph.instantiate()


def test_dot_names_every_node_and_edge(device: Device) -> None:
    """The DOT text of a graph has its nodes by name, its lanes as clusters and its edges."""
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
