"""Event record and wait nodes, and child graphs with moved ownership, on the soft device."""

from __future__ import annotations

import numpy as np
import pytest
from softcuda_util import check, code, codes

KERNELS = 'extern "C" __global__ void step(unsigned* p, unsigned m) { *p = *p * 3u + m; }'


@pytest.fixture
def streams(stream, other):
    return [stream, other]


def record(soft, graph, deps, event):
    return soft.cuGraphAddEventRecordNode(graph, list(deps), len(deps), event)


def wait(soft, graph, deps, event):
    return soft.cuGraphAddEventWaitNode(graph, list(deps), len(deps), event)


def test_a_stream_goes_on_at_the_record_node_not_at_the_graphs_end(soft, streams, event, graph,
                                                                   words) -> None:
    """Who waits for the event after a launch waits for the node; the graph's rest may go on."""
    a, held = soft.ints(0), soft.cuEventCreate(0)
    first = soft.add_fill(graph, [], a, 7)
    marked = record(soft, graph, [first], event)
    wait(soft, graph, [marked], held)
    words.block(streams[1])
    soft.cuEventRecord(held, streams[1])
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.cuGraphLaunch(executable, streams[0])
    soft.cuEventSynchronize(event)
    assert code(soft.d.cuStreamQuery(streams[0])) == "NOT_READY"
    assert soft.value(a) == 7
    words[0] = 1
    soft.cuStreamSynchronize(streams[0])


def test_a_wait_node_waits_for_what_was_recorded_before_the_launch(soft, streams, event, graph,
                                                                   words) -> None:
    """Each launch waits for the work the event names then; one never recorded is complete."""
    a = soft.ints(0)
    waits = wait(soft, graph, [], event)
    soft.add_fill(graph, [waits], a, 5)
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.play(executable, streams[0])
    assert soft.value(a) == 5
    soft.cuMemsetD32(a, 0, 1)
    words.block(streams[1])
    soft.cuMemsetD32Async(a, 1, 1, streams[1])
    soft.cuEventRecord(event, streams[1])
    soft.cuGraphLaunch(executable, streams[0])
    assert code(soft.d.cuStreamQuery(streams[0])) == "NOT_READY"
    words[0] = 1
    soft.cuStreamSynchronize(streams[0])
    assert soft.value(a) == 5  # the fill of the other stream came before


def test_two_graphs_hand_over_by_events_in_both_directions(soft, kernels, streams, graph) -> None:
    """A chain of launches of two executables is ordered by their record and wait nodes alone."""
    there, back, second = soft.cuEventCreate(2), soft.cuEventCreate(2), soft.cuGraphCreate(0)
    a = soft.ints(0)
    for place, before, after, value in ((graph, back, there, 1), (second, there, back, 2)):
        begun = wait(soft, place, [], before)
        worked = soft.add_kernel(place, [begun], kernels.step, 1, 1, a, np.uint32(value))
        record(soft, place, [worked], after)
    executables = [soft.cuGraphInstantiate(place, 0) for place in (graph, second)]
    expected = 0
    for _ in range(50):
        for executable, stream, value in zip(executables, streams, (1, 2), strict=True):
            soft.cuGraphLaunch(executable, stream)
            expected = (expected * 3 + value) % 2**32
    for stream in streams:
        soft.cuStreamSynchronize(stream)
    assert soft.get(a, 1, np.uint32)[0] == expected


def test_events_of_nodes_are_asked_for_and_replaced(soft, stream, event, graph) -> None:
    """Get and set on the definition, set on the executable: later launches use the new event."""
    d, others = soft.d, [soft.cuEventCreate(0) for _ in range(2)]
    marked, waits = record(soft, graph, [], event), wait(soft, graph, [], event)
    assert int(soft.cuGraphEventRecordNodeGetEvent(marked)) == int(event)
    assert int(soft.cuGraphEventWaitNodeGetEvent(waits)) == int(event)
    assert [soft.cuGraphNodeGetType(n).value for n in (waits, marked)] == [6, 7]
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.cuGraphExecEventRecordNodeSetEvent(executable, marked, others[0])
    soft.cuGraphExecEventWaitNodeSetEvent(executable, waits, others[1])
    soft.cuGraphEventRecordNodeSetEvent(marked, others[1])
    soft.cuGraphEventWaitNodeSetEvent(waits, others[1])
    assert int(soft.cuGraphEventRecordNodeGetEvent(marked)) == int(others[1])
    soft.cuGraphLaunch(executable, stream)
    soft.cuEventSynchronize(others[0])
    soft.cuEventRecord(event, stream)
    soft.cuStreamSynchronize(stream)
    assert soft.cuEventElapsedTime(others[0], event) >= 0  # others[0] was recorded
    assert code(d.cuEventElapsedTime(others[1], event)) == "INVALID_HANDLE"  # and others[1] not
    assert codes(
        d.cuGraphEventRecordNodeGetEvent(waits), d.cuGraphEventWaitNodeSetEvent(marked, event),
        d.cuGraphExecEventWaitNodeSetEvent(executable, marked, event)) == {"INVALID_VALUE"}


def test_generic_nodes_and_whole_updates_know_events(soft, stream, event) -> None:
    """cuGraphAddNode makes both kinds; cuGraphExecUpdate takes the new definition's events."""
    new, definitions = soft.cuEventCreate(0), []
    for which in (event, new):
        definitions.append(soft.cuGraphCreate(0))
        for kind, field in (("EVENT_RECORD", "eventRecord"), ("WAIT_EVENT", "eventWait")):
            params = soft.node_params(kind)
            getattr(params, field).event = which
            soft.cuGraphAddNode(definitions[-1], [], None, 0, params)
    executable = soft.cuGraphInstantiate(definitions[0], 0)
    soft.cuGraphExecUpdate(executable, definitions[1])
    soft.play(executable, stream)
    assert soft.cuEventElapsedTime(new, new) == 0
    assert code(soft.d.cuEventElapsedTime(event, event)) == "INVALID_HANDLE"


def test_a_launch_with_a_destroyed_event_is_refused(soft, stream, event, graph) -> None:
    """Stricter than hardware: the launch says so instead of recording into nothing."""
    record(soft, graph, [], event)
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.cuEventDestroy(event)
    assert code(soft.d.cuGraphLaunch(executable, stream)) == "INVALID_HANDLE"
    assert "destroyed" in soft.refusal()


def test_a_fault_completes_what_waits_for_record_nodes() -> None:
    """After a fault nobody hangs on the event of a launch that will not run."""
    check("""
    a, b, words = s.stream(), s.stream(), Words(s, 1)
    event, graph = s.cuEventCreate(0), s.cuGraphCreate(0)
    s.cuGraphAddEventRecordNode(graph, [], 0, event)
    executable = s.cuGraphInstantiate(graph, 0)
    words.block(a)
    s.launch(kernels.stray, 1, 1, s.ints(0), stream=a)
    s.cuGraphLaunch(executable, a)
    s.cuStreamWaitEvent(b, event, 0)
    words[0] = 1
    assert code(d.cuEventSynchronize(event)) == code(d.cuStreamSynchronize(b)) == "ILLEGAL_ADDRESS"
    """, 'extern "C" __global__ void stray(int* p) { for (int i = 0; i < 1024; ++i) p[i] = 1; }')


def move(soft, parent, child, ownership: int = 1) -> str:
    p = soft.node_params("GRAPH")
    p.graph.graph = child
    p.graph.ownership = soft.d.CUgraphChildGraphNodeOwnership(ownership)
    return code(soft.d.cuGraphAddNode(parent, [], None, 0, p))


def test_a_moved_child_may_hold_conditionals_and_belongs_to_its_parent(soft, stream) -> None:
    """It runs in the parent, is nobody else's any more, and goes with the parent."""
    d, before = soft.d, soft.live()
    parent, child, a = soft.cuGraphCreate(0), soft.cuGraphCreate(0), soft.ints(0)
    handle = soft.cuGraphConditionalHandleCreate(child, soft.context, 1, 1)
    _, node, (body,) = soft.conditional(child, [], handle, 0)
    soft.add_fill(body, [], a, 3)
    assert move(soft, parent, child, 0) == "NOT_SUPPORTED"
    assert move(soft, parent, parent) == "INVALID_VALUE"
    assert move(soft, parent, child) == "SUCCESS"
    assert move(soft, parent, child) == "INVALID_VALUE"
    assert codes(d.cuGraphInstantiate(child, 0), d.cuGraphDestroy(child),
                 d.cuGraphAddChildGraphNode(parent, [], 0, child)) == {"INVALID_VALUE"}
    soft.add_fill(child, [node], a, 4)
    executable = soft.cuGraphInstantiate(parent, 0)
    assert code(d.cuGraphExecUpdate(executable, child)) == "INVALID_VALUE"
    soft.play(executable, stream)
    assert soft.value(a) == 4
    soft.cuGraphExecDestroy(executable)
    soft.cuGraphDestroy(parent)
    assert code(d.cuGraphDestroy(child)) == "INVALID_HANDLE"
    soft.cuMemFree(a)
    assert soft.live() == before
