"""Host work and lanes on streams that another library captures."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from cudagraph_util import THREAD_LOCAL, ForeignCapture, replay, wait_for_records, wait_until_freed

from graft import native
from graft.cudagraph import (
    Device,
    DeviceError,
    Graph,
    HostWorkError,
    OptionError,
    Stream,
    StreamLane,
    load_text,
)
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.host.hostwork import check_captured, hostfunc
from graft.native import _native

TEXT = """
extern "C" __global__ void add(int* data, int value) { data[threadIdx.x] += value; }
"""


@pytest.fixture
def foreign(stream: Stream) -> Iterator[ForeignCapture]:
    yield ForeignCapture(stream)
    while _native.take_captured_failure() is not None:
        pass


def test_hostfunc_in_capture_becomes_graph_node(foreign: ForeignCapture) -> None:
    """Captured host work runs once per replay, not at capture, and lives as long as the graph."""
    calls: list[int] = []

    class Work:
        def __call__(self, value: int) -> None:
            calls.append(value)

    work = Work()
    watch = weakref.ref(work)
    before = wait_until_freed()
    foreign.begin()
    hostfunc(foreign.stream, work, 7)
    hostfunc(foreign.stream.handle, work, 8)
    foreign.end()
    foreign.stream.synchronize(60)
    assert calls == []
    del work
    gc.collect()
    fillers = [bytearray(64) for _ in range(1000)]
    foreign.launch(3)
    assert calls == [7, 8] * 3 and watch() is not None and len(fillers) == 1000
    call(cu.cuGraphDestroy, foreign.graph)
    foreign.launch()
    assert calls == [7, 8] * 4
    call(cu.cuGraphExecDestroy, foreign.exec)
    wait_for_records(before + 2)
    assert watch() is None


def test_captured_host_work_is_skipped_until_failure_is_raised(foreign: ForeignCapture) -> None:
    """A failure in a captured graph is raised once; afterwards the graph's host steps run again."""
    ran: list[str] = []
    fail = [True]

    def first() -> None:
        ran.append("first")
        if fail[0]:
            raise KeyError("broken")

    foreign.begin()
    hostfunc(foreign.stream, first)
    hostfunc(foreign.stream, ran.append, "second")
    foreign.end()
    foreign.launch(2)
    assert ran == ["first"]
    with pytest.raises(HostWorkError, match=r"captured graph.*replay 1.*broken") as caught:
        foreign.stream.synchronize(60)
    assert isinstance(caught.value.__cause__, KeyError)
    check_captured()
    fail[0] = False
    foreign.launch()
    assert ran == ["first", "first", "second"]
    foreign.drop()


def test_stream_lane_operands_live_as_long_as_captured_graph(
    device: Device, foreign: ForeignCapture
) -> None:
    kernel = load_text(device, TEXT, "capture.cu")["add"]  # no other reference exists
    data = device.zeros((8,), "int32")
    out = device.pinned((8,), "int32")
    result = out.array
    lane = StreamLane(foreign.stream)
    foreign.begin()
    lane.fill(data)
    lane.kernel(kernel, 1, 8, [data, 5])
    lane.copy(out, data)
    foreign.end()
    del kernel, data, out
    wait_until_freed()
    others = [device.zeros((8,), "int32") for _ in range(20)]
    foreign.launch(2)
    assert result.tolist() == [5] * 8 and not any(o.to_host().any() for o in others)
    foreign.drop()


def test_events_in_capture_become_nodes(device: Device, foreign: ForeignCapture) -> None:
    """In a capture, record_event() and wait_event() become nodes that keep their event alive."""
    data = device.zeros((1,), "int32")
    event = device.event("captured")
    lane = StreamLane(foreign.stream)
    foreign.begin()
    lane.wait_event(event)
    lane.fill(data, 3)
    lane.record_event(event)
    foreign.end()
    nodes, _ = call(cu.cuGraphGetNodes, foreign.graph, 3)
    kinds = [call(cu.cuGraphNodeGetType, node).name.rpartition("TYPE_")[2] for node in nodes]
    assert kinds == ["WAIT_EVENT", "MEMSET", "EVENT_RECORD"]
    call(cu.cuGraphDestroy, foreign.graph)
    del event
    gc.collect()
    foreign.launch(3)
    assert data.to_host()[0] == 0x03030303
    call(cu.cuGraphExecDestroy, foreign.exec)


def test_freeing_memory_does_not_invalidate_capture(device: Device, stream: Stream) -> None:
    """Memory that is dropped during a capture in the global mode is freed after the capture."""
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    array = device.zeros((1024,), "int32")
    wait_until_freed()
    failed = native.failed_frees()
    live = native.live_resources()
    call(cu.cuStreamBeginCapture, stream.handle, mode)
    del array
    assert not _native.flush(60.0) and native.live_resources() == live
    hostfunc(stream, list)
    call(cu.cuGraphDestroy, call(cu.cuStreamEndCapture, stream.handle))
    wait_until_freed()
    assert native.live_resources() == live - 1
    assert native.failed_frees() == failed


def test_hostfunc_rejects_invalidated_capture(stream: Stream) -> None:
    """If a capture is invalidated, hostfunc() raises the driver's result code.

    The record of the host work is released.
    """
    wait_until_freed()
    live = native.live_records()
    call(cu.cuStreamBeginCapture, stream.handle, THREAD_LOCAL)
    assert int(cu.cuStreamSynchronize(stream.handle)[0]) != 0
    with pytest.raises(DeviceError) as caught:
        hostfunc(stream, print)
    assert caught.value.code_name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert int(cu.cuStreamEndCapture(stream.handle)[0]) == caught.value.code
    _native.flush(60.0)
    assert native.live_records() == live
    stream.synchronize(60)
    hostfunc(stream, list)
    stream.synchronize(60)


def test_graph_from_captured_handle_is_launched_and_extended(
    device: Device, stream: Stream, foreign: ForeignCapture
) -> None:
    """The graph owns the CUgraph and lists its nodes; later nodes follow all others."""
    kernel = load_text(device, TEXT, "capture.cu")["add"]
    data = device.zeros((8,), "int32")
    other = device.stream("other")
    lane, side = StreamLane(stream), StreamLane(other)
    foreign.begin()
    lane.kernel(kernel, 1, 8, [data, 5])
    start = lane.record()
    lane.kernel(kernel, 1, 4, [data, 10])
    side.wait(start)
    side.kernel(kernel, 1, 4, [data[4:], 20])
    lane.wait(side.record())
    captured = call(cu.cuStreamEndCapture, stream.handle)
    graph = Graph.from_capture(device, captured, name="theirs")
    assert [(n.name, n.kind, n.lane) for n in graph.nodes] == [("add", "kernel", "captured")] * 3
    assert sorted(graph.edges) == [(0, 1), (0, 2)]
    graph.lane("captured").kernel(kernel, 1, 8, [data, 100])
    assert {edge for edge in graph.edges if edge[1] == 3} == {(1, 3), (2, 3)}
    run = replay(graph, stream, 2)
    assert data.to_host().tolist() == [230] * 4 + [250] * 4
    assert "add" in graph.dot()
    live = native.live_resources()
    run.close()
    graph.close()
    wait_until_freed()
    assert native.live_resources() < live


def test_graph_from_capture_is_moved_into_another_graph(device: Device, stream: Stream) -> None:
    data = device.zeros((8,), "int32")
    call(cu.cuStreamBeginCapture, stream.handle, THREAD_LOCAL)
    StreamLane(stream).fill(data, 1)
    child = Graph.from_capture(device, int(call(cu.cuStreamEndCapture, stream.handle)))
    graph = Graph(device)
    graph.lane("main").child(child)
    replay(graph, stream)
    assert data.to_host().tolist() == [0x01010101] * 8


class TorchGraph:
    """A captured graph as torch has it."""

    def __init__(self, handle: object, error: str = "") -> None:
        self.handle = handle
        self.error = error

    def raw_cuda_graph(self) -> int:
        if self.error:
            raise RuntimeError(self.error)
        return int(self.handle)


def test_graph_from_library_is_copied_and_kept_alive(device: Device, stream: Stream) -> None:
    """The library still owns its graph. Its object lives as long as the copy can run."""
    data = device.zeros((8,), "int32")
    call(cu.cuStreamBeginCapture, stream.handle, THREAD_LOCAL)
    StreamLane(stream).fill(data, 2)
    handle = call(cu.cuStreamEndCapture, stream.handle)
    theirs = TorchGraph(handle)
    watch = weakref.ref(theirs)
    graph = Graph.from_capture(device, theirs)
    call(cu.cuGraphDestroy, handle)
    del theirs
    run = graph.instantiate()
    del graph
    wait_until_freed()
    assert watch() is not None
    replay(run, stream)
    assert data.to_host().tolist() == [0x02020202] * 8
    run.close()
    wait_until_freed()
    assert watch() is None


def test_graph_from_capture_refuses_other_objects(device: Device) -> None:
    for wrong in (None, True, 0, "graph", Graph(device), TorchGraph(0)):
        with pytest.raises(OptionError, match=r"from_capture\(\) needs a GraphDefinition .* torch"):
            Graph.from_capture(device, wrong)
    with pytest.raises(OptionError, match=r"gives no graph: .*keep_graph"):
        Graph.from_capture(device, TorchGraph(1, "graph was not created with keep_graph=True"))


def test_graph_from_cuda_core_builder(device: Device, stream: Stream) -> None:
    """A GraphBuilder of cuda.core with a kernel, a callback and host work of graft."""
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    from cuda.core.graph import GraphDefinition

    core_device = core.Device(device.ordinal)
    core_device.set_current()
    queue = core_device.create_stream(stream)
    data = device.zeros((4,), "int32")
    seen: list[str] = []
    builder = queue.create_graph_builder()
    builder.begin_building()
    StreamLane(builder).fill(data, 3)
    hostfunc(builder, seen.append, "graft")
    builder.callback(lambda: seen.append("core"))
    builder.end_building()
    graph = Graph.from_capture(device, builder, keep=data)
    builder.close()
    assert [node.kind for node in graph.nodes] == ["fill", "host", "host"]
    replay(graph, stream, 2)
    assert seen == ["graft", "core"] * 2 and data.to_host().tolist() == [0x03030303] * 4
    definition = GraphDefinition()
    definition.memset(data.ptr, 7, 16)
    replay(Graph.from_capture(device, definition, keep=data), stream)
    assert data.to_host().tolist() == [0x07070707] * 4
