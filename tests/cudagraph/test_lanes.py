"""StreamLane and GraphLane run the same program with the same result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cudagraph_util import replay

from graft.cudagraph import Device, Graph, Lane, Stream, StreamLane

TEXT = """
extern "C" __global__ void add(int* data, int value, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] += value;
}
"""
N = 256


@pytest.fixture(params=["stream", "graph"])
def run(request, device: Device, stream: Stream) -> Callable[[Callable[[Lane, Lane], None]], None]:
    """Function that runs a program of two lanes, on streams or in a graph."""

    def in_graph(program: Callable[[Lane, Lane], None]) -> None:
        graph = Graph(device, "program")
        program(graph.lane("first"), graph.lane("second"))
        replay(graph, stream)

    def on_streams(program: Callable[[Lane, Lane], None]) -> None:
        other = device.stream("second")
        program(StreamLane(stream), StreamLane(other))
        for used in (stream, other):
            used.synchronize(60)

    return in_graph if request.param == "graph" else on_streams


def test_lane_runs_work_in_order(device: Device, run, module) -> None:
    """Each fill, kernel, host step and copy of a lane sees the results of those before it."""
    data = device.empty((N,), "int32")
    staged = device.pinned((N,), "int32")
    out = device.pinned((N,), "int32")
    staged.array[:] = np.arange(N)
    seen: list[int] = []

    def program(lane: Lane, _: Lane) -> None:
        lane.fill(data, 0xFF)
        lane.copy(out, data)
        lane.host(lambda: seen.append(int(out.array.sum())))
        lane.copy(data, staged)
        lane.kernel(module["add"], 2, 128, [data, 5, N])
        lane.copy(out, data)
        lane.host(lambda: seen.append(int(out.array.sum())))

    run(program)
    assert seen == [-N, N * (N - 1) // 2 + 5 * N]


def test_lanes_synchronize_at_marks(device: Device, run, module) -> None:
    """Work after wait() sees the results of the work before record() on the other lane."""
    data = device.zeros((N,), "int32")
    other = device.zeros((N,), "int32")
    first = device.pinned((N,), "int32")
    second = device.pinned((N,), "int32")
    order: list[str] = []

    def program(a: Lane, b: Lane) -> None:
        a.kernel(module["add"], 2, 128, [data, 1, N])
        a.copy(first, data)
        a.host(lambda: order.append("a"))
        b.wait(a.record("a done"))
        b.host(lambda: order.append(f"b {first.array[0]}"))
        b.kernel(module["add"], 2, 128, [data, 10, N])
        b.copy(other, data)
        a.wait(b.record("b done"))
        a.copy(second, other)
        a.host(lambda: order.append(f"a {second.array[-1]}"))

    run(program)
    assert order == ["a", "b 1", "a 11"]


def test_lane_copies_between_device_views(device: Device, run) -> None:
    source = device.from_host(np.arange(12, dtype=np.int32).reshape(3, 4))
    target = device.zeros((2, 4), "int32")
    run(lambda lane, _: lane.copy(target, source[1:]))
    assert np.array_equal(target.to_host(), np.arange(4, 12).reshape(2, 4))


def test_mark_of_empty_lane_passes_on_dependencies(device: Device) -> None:
    """Waiting for a lane without nodes means waiting for the marks that this lane waits for."""
    graph = Graph(device, "chain")
    a = graph.lane("a")
    b = graph.lane("b")
    c = graph.lane("c")
    data = device.zeros((4,), "int32")
    c.wait(b.record())
    a.fill(data, 1)
    b.wait(a.record())
    c.wait(b.record())
    c.fill(data, 2)
    assert graph.edges == [(0, 1)]
