"""Event record and wait nodes, and child graphs with moved ownership, on the soft device."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import softcuda_util as util
from softcuda_util import short_code as code


@pytest.fixture
def streams(soft):
    made = [soft.stream(), soft.stream()]
    yield made
    for stream in made:
        soft.ok(soft.d.cuStreamDestroy(stream))


@pytest.fixture
def gate(soft):
    made = Gate()
    yield made
    made.close()


@pytest.fixture
def graph(soft):
    made = soft.ok(soft.d.cuGraphCreate(0))
    yield made
    soft.d.cuGraphDestroy(made)


class Gate:
    """A pinned word that holds a stream until it is opened."""

    def __init__(self) -> None:
        self.soft = util.device()
        self.host = int(self.soft.ok(self.soft.d.cuMemHostAlloc(64, 3)))
        self.device = int(self.soft.ok(self.soft.d.cuMemHostGetDevicePointer(self.host, 0)))
        self.word = ctypes.c_uint32.from_address(self.host)
        self.word.value = 0

    def block(self, stream) -> None:
        self.soft.ok(self.soft.d.cuStreamWaitValue32(stream, self.device, 1, 1))

    def open(self) -> None:
        self.word.value = 1

    def close(self) -> None:
        self.soft.ok(self.soft.d.cuMemFreeHost(self.host))


def fill(soft, graph, deps, pointer: int, value: int):
    p = util.fill_params(soft, pointer, value, 1)
    return soft.ok(soft.d.cuGraphAddMemsetNode(graph, list(deps), len(deps), p, soft.context))


def record(soft, graph, deps, event):
    return soft.ok(soft.d.cuGraphAddEventRecordNode(graph, list(deps), len(deps), event))


def wait(soft, graph, deps, event):
    return soft.ok(soft.d.cuGraphAddEventWaitNode(graph, list(deps), len(deps), event))


def instantiate(soft, graph):
    return soft.ok(soft.d.cuGraphInstantiate(graph, 0))


def test_a_stream_goes_on_at_the_record_node_not_at_the_graphs_end(
    soft, streams, event, graph, gate
) -> None:
    """Who waits for the event after a launch waits for the node; the graph's rest may go on."""
    a = soft.put(np.zeros(2, np.uint32))
    first = fill(soft, graph, [], a, 7)
    marked = record(soft, graph, [first], event)
    held = soft.ok(soft.d.cuEventCreate(0))
    wait(soft, graph, [marked], held)
    gate.block(streams[1])
    soft.ok(soft.d.cuEventRecord(held, streams[1]))
    executable = instantiate(soft, graph)
    soft.ok(soft.d.cuGraphLaunch(executable, streams[0]))
    soft.ok(soft.d.cuEventSynchronize(event))
    assert code(soft.d.cuStreamQuery(streams[0])) == "NOT_READY"
    assert soft.get(a, 1, np.uint32)[0] == 7
    gate.open()
    soft.ok(soft.d.cuStreamSynchronize(streams[0]))
    soft.ok(soft.d.cuGraphExecDestroy(executable))
    soft.ok(soft.d.cuEventDestroy(held))
    soft.free(a)


def test_a_wait_node_waits_for_what_was_recorded_before_the_launch(
    soft, streams, event, graph, gate
) -> None:
    """Each launch waits for the work the event names then; one never recorded is complete."""
    a = soft.put(np.zeros(1, np.uint32))
    waits = wait(soft, graph, [], event)
    fill(soft, graph, [waits], a, 5)
    executable = instantiate(soft, graph)
    soft.ok(soft.d.cuGraphLaunch(executable, streams[0]))
    soft.ok(soft.d.cuStreamSynchronize(streams[0]))
    assert soft.get(a, 1, np.uint32)[0] == 5
    soft.ok(soft.d.cuMemsetD32(a, 0, 1))
    gate.block(streams[1])
    soft.ok(soft.d.cuMemsetD32Async(a, 1, 1, streams[1]))
    soft.ok(soft.d.cuEventRecord(event, streams[1]))
    soft.ok(soft.d.cuGraphLaunch(executable, streams[0]))
    assert code(soft.d.cuStreamQuery(streams[0])) == "NOT_READY"
    gate.open()
    soft.ok(soft.d.cuStreamSynchronize(streams[0]))
    assert soft.get(a, 1, np.uint32)[0] == 5  # the fill of stream 1 came before
    soft.ok(soft.d.cuGraphExecDestroy(executable))
    soft.free(a)


def test_two_graphs_hand_over_by_events_in_both_directions(soft, streams, graph) -> None:
    """A chain of launches of two executables is ordered by their record and wait nodes alone."""
    there, back = (soft.ok(soft.d.cuEventCreate(2)) for _ in range(2))
    other = soft.ok(soft.d.cuGraphCreate(0))
    a = soft.put(np.zeros(1, np.uint32))
    module = soft.module(
        'extern "C" __global__ void step(unsigned* p, unsigned m) { *p = *p * 3u + m; }'
    )
    function = soft.function(module, "step")
    for place, before, after, value in ((graph, back, there, 1), (other, there, back, 2)):
        begun = wait(soft, place, [], before)
        worked = soft.add_kernel(place, [begun], function, 1, 1, a, np.uint32(value))
        record(soft, place, [worked], after)
    executables = [instantiate(soft, graph), instantiate(soft, other)]
    expected = 0
    for _ in range(50):
        for executable, stream, value in zip(executables, streams, (1, 2), strict=True):
            soft.ok(soft.d.cuGraphLaunch(executable, stream))
            expected = (expected * 3 + value) % 2**32
    for stream in streams:
        soft.ok(soft.d.cuStreamSynchronize(stream))
    assert soft.get(a, 1, np.uint32)[0] == expected
    for executable in executables:
        soft.ok(soft.d.cuGraphExecDestroy(executable))
    soft.ok(soft.d.cuGraphDestroy(other))
    for event in (there, back):
        soft.ok(soft.d.cuEventDestroy(event))
    soft.ok(soft.d.cuModuleUnload(module))
    soft.free(a)


def test_events_of_nodes_are_asked_for_and_replaced(soft, streams, event, graph) -> None:
    """Get and set on the definition, set on the executable: later launches use the new event."""
    others = [soft.ok(soft.d.cuEventCreate(0)) for _ in range(2)]
    marked, waits = record(soft, graph, [], event), wait(soft, graph, [], event)
    d = soft.d
    assert int(soft.ok(d.cuGraphEventRecordNodeGetEvent(marked))) == int(event)
    assert int(soft.ok(d.cuGraphEventWaitNodeGetEvent(waits))) == int(event)
    assert [soft.ok(d.cuGraphNodeGetType(n)).value for n in (waits, marked)] == [6, 7]
    executable = instantiate(soft, graph)
    soft.ok(d.cuGraphExecEventRecordNodeSetEvent(executable, marked, others[0]))
    soft.ok(d.cuGraphExecEventWaitNodeSetEvent(executable, waits, others[1]))
    soft.ok(d.cuGraphEventRecordNodeSetEvent(marked, others[1]))
    soft.ok(d.cuGraphEventWaitNodeSetEvent(waits, others[1]))
    assert int(soft.ok(d.cuGraphEventRecordNodeGetEvent(marked))) == int(others[1])
    soft.ok(d.cuGraphLaunch(executable, streams[0]))
    soft.ok(d.cuEventSynchronize(others[0]))
    soft.ok(d.cuStreamSynchronize(streams[0]))
    soft.ok(d.cuEventRecord(event, streams[0]))
    soft.ok(d.cuStreamSynchronize(streams[0]))
    assert soft.ok(d.cuEventElapsedTime(others[0], event)) >= 0  # others[0] was recorded
    assert code(d.cuEventElapsedTime(others[1], event)) == "INVALID_HANDLE"  # and others[1] not
    assert code(d.cuGraphEventRecordNodeGetEvent(waits)) == "INVALID_VALUE"
    assert code(d.cuGraphEventWaitNodeSetEvent(marked, event)) == "INVALID_VALUE"
    assert code(d.cuGraphExecEventWaitNodeSetEvent(executable, marked, event)) == "INVALID_VALUE"
    soft.ok(d.cuGraphExecDestroy(executable))
    for other in others:
        soft.ok(d.cuEventDestroy(other))


def test_generic_nodes_and_whole_updates_know_events(soft, streams, event, graph) -> None:
    """cuGraphAddNode makes both kinds; cuGraphExecUpdate takes the new definition's events."""
    other = soft.ok(soft.d.cuEventCreate(0))
    definitions = []
    for which in (event, other):
        place = soft.ok(soft.d.cuGraphCreate(0))
        params = soft.d.CUgraphNodeParams()
        params.type = soft.d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EVENT_RECORD
        params.eventRecord.event = which
        soft.ok(soft.d.cuGraphAddNode(place, [], None, 0, params))
        params = soft.d.CUgraphNodeParams()
        params.type = soft.d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_WAIT_EVENT
        params.eventWait.event = which
        soft.ok(soft.d.cuGraphAddNode(place, [], None, 0, params))
        definitions.append(place)
    executable = instantiate(soft, definitions[0])
    soft.ok(soft.d.cuGraphExecUpdate(executable, definitions[1]))
    soft.ok(soft.d.cuGraphLaunch(executable, streams[0]))
    soft.ok(soft.d.cuStreamSynchronize(streams[0]))
    assert soft.ok(soft.d.cuEventElapsedTime(other, other)) == 0
    assert code(soft.d.cuEventElapsedTime(event, event)) == "INVALID_HANDLE"
    soft.ok(soft.d.cuGraphExecDestroy(executable))
    for place in definitions:
        soft.ok(soft.d.cuGraphDestroy(place))
    soft.ok(soft.d.cuEventDestroy(other))


def test_external_events_become_nodes_of_a_capture(soft, streams, event) -> None:
    """With the external flag record and wait are captured as nodes; elsewhere it is invalid."""
    d, stream = soft.d, streams[0]
    assert code(d.cuEventRecordWithFlags(event, stream, 1)) == "INVALID_VALUE"
    assert code(d.cuStreamWaitEvent(stream, event, 1)) == "INVALID_VALUE"
    a = soft.put(np.zeros(1, np.uint32))
    soft.ok(d.cuStreamBeginCapture(stream, d.CUstreamCaptureMode(2)))
    soft.ok(d.cuStreamWaitEvent(stream, event, 1))
    soft.ok(d.cuMemsetD32Async(a, 9, 1, stream))
    soft.ok(d.cuEventRecordWithFlags(event, stream, 1))
    graph = soft.ok(d.cuStreamEndCapture(stream))
    nodes = soft.ok(d.cuGraphGetNodes(graph, 3))[0]
    assert [soft.ok(d.cuGraphNodeGetType(n)).value for n in nodes] == [6, 2, 7]
    executable = instantiate(soft, graph)
    for _ in range(3):
        soft.ok(d.cuGraphLaunch(executable, stream))
    soft.ok(d.cuEventSynchronize(event))
    assert soft.get(a, 1, np.uint32)[0] == 9
    soft.ok(d.cuGraphExecDestroy(executable))
    soft.ok(d.cuGraphDestroy(graph))
    soft.free(a)


def test_event_nodes_are_refused_in_bodies_and_with_wrong_handles(soft, event, graph) -> None:
    """Bodies of conditionals hold no event nodes; unknown and destroyed events are named."""
    d = soft.d
    handle = soft.ok(d.cuGraphConditionalHandleCreate(graph, soft.context, 1, 1))
    p = d.CUgraphNodeParams()
    p.type = d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    p.conditional.handle, p.conditional.size = handle, 1
    p.conditional.type, p.conditional.ctx = d.CUgraphConditionalNodeType(0), soft.context
    soft.ok(d.cuGraphAddNode(graph, [], None, 0, p))
    (body,) = p.conditional.phGraph_out
    assert code(d.cuGraphAddEventRecordNode(body, [], 0, event)) == "NOT_SUPPORTED"
    assert code(d.cuGraphAddEventWaitNode(body, [], 0, event)) == "NOT_SUPPORTED"
    assert code(d.cuGraphAddEventRecordNode(graph, [], 0, d.CUevent(12345))) == "INVALID_HANDLE"
    assert code(d.cuGraphAddEventWaitNode(d.CUgraph(1), [], 0, event)) == "INVALID_HANDLE"


def test_a_launch_with_a_destroyed_event_is_refused(soft, streams, graph) -> None:
    """Stricter than hardware: the launch says so instead of recording into nothing."""
    gone = soft.ok(soft.d.cuEventCreate(0))
    record(soft, graph, [], gone)
    executable = instantiate(soft, graph)
    soft.ok(soft.d.cuEventDestroy(gone))
    assert code(soft.d.cuGraphLaunch(executable, streams[0])) == "INVALID_HANDLE"
    assert "destroyed" in soft.refusal()
    soft.ok(soft.d.cuGraphExecDestroy(executable))


def test_a_fault_completes_what_waits_for_record_nodes() -> None:
    """After a fault nobody hangs on the event of a launch that will not run."""
    done = util.run_child("""
    a, b = s.stream(), s.stream()
    event = s.ok(d.cuEventCreate(0))
    graph = s.ok(d.cuGraphCreate(0))
    s.ok(d.cuGraphAddEventRecordNode(graph, [], 0, event))
    executable = s.ok(d.cuGraphInstantiate(graph, 0))
    text = 'extern "C" __global__ void stray(int* p) { for (int i = 0; i < 1024; ++i) p[i] = 1; }'
    stray = s.function(s.module(text), "stray")
    word = int(s.ok(d.cuMemHostAlloc(64, 3)))
    ctypes.memset(word, 0, 64)
    s.ok(d.cuStreamWaitValue32(a, int(s.ok(d.cuMemHostGetDevicePointer(word, 0))), 1, 1))
    s.ok(s.launch(stray, 1, 1, s.alloc(4), stream=a))
    s.ok(d.cuGraphLaunch(executable, a))
    s.ok(d.cuStreamWaitEvent(b, event, 0))
    ctypes.memset(word, 1, 1)
    print(d.cuEventSynchronize(event)[0].name, d.cuStreamSynchronize(b)[0].name)
    """)
    assert done.stdout.split() == ["CUDA_ERROR_ILLEGAL_ADDRESS"] * 2, done.stderr


def move(soft, parent, child, ownership: int = 1):
    p = soft.d.CUgraphNodeParams()
    p.type = soft.d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    p.graph.graph = child
    p.graph.ownership = soft.d.CUgraphChildGraphNodeOwnership(ownership)
    return soft.d.cuGraphAddNode(parent, [], None, 0, p)


def test_a_moved_child_may_hold_conditionals_and_belongs_to_its_parent(soft, streams) -> None:
    """It runs in the parent, is nobody else's any more, and goes with the parent."""
    d = soft.d
    before = soft.live()
    parent, child = soft.ok(d.cuGraphCreate(0)), soft.ok(d.cuGraphCreate(0))
    a = soft.put(np.zeros(1, np.uint32))
    handle = soft.ok(d.cuGraphConditionalHandleCreate(child, soft.context, 1, 1))
    p = d.CUgraphNodeParams()
    p.type = d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    p.conditional.handle, p.conditional.size = handle, 1
    p.conditional.type, p.conditional.ctx = d.CUgraphConditionalNodeType(0), soft.context
    node = soft.ok(d.cuGraphAddNode(child, [], None, 0, p))
    (body,) = p.conditional.phGraph_out
    fill(soft, body, [], a, 3)
    assert code(move(soft, parent, child, 0)) == "NOT_SUPPORTED"
    assert code(move(soft, parent, parent)) == "INVALID_VALUE"
    soft.ok(move(soft, parent, child))
    assert code(move(soft, parent, child)) == "INVALID_VALUE"
    assert code(d.cuGraphInstantiate(child, 0)) == "INVALID_VALUE"
    assert d.cuGraphDestroy(child)[0].name == "CUDA_ERROR_INVALID_VALUE"
    assert code(d.cuGraphAddChildGraphNode(parent, [], 0, child)) == "INVALID_VALUE"
    fill(soft, child, [node], a, 4)
    executable = instantiate(soft, parent)
    assert code(d.cuGraphExecUpdate(executable, child)) == "INVALID_VALUE"
    soft.ok(d.cuGraphLaunch(executable, streams[0]))
    soft.ok(d.cuStreamSynchronize(streams[0]))
    assert soft.get(a, 1, np.uint32)[0] == 4
    soft.ok(d.cuGraphExecDestroy(executable))
    soft.ok(d.cuGraphDestroy(parent))
    assert d.cuGraphDestroy(child)[0].name == "CUDA_ERROR_INVALID_HANDLE"
    soft.free(a)
    assert soft.live() == before
