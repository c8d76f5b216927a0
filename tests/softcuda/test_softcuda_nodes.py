"""Conditional, event and child-graph nodes on the soft device, against the documentation."""

from __future__ import annotations

import numpy as np
import pytest
from softcuda_util import USLEEP, code, codes

IF = 0
WHILE = 1
SWITCH = 2


def condition(soft, graph, default: int | None = None):
    flags = 0 if default is None else 1
    return soft.cuGraphConditionalHandleCreate(graph, soft.context, default or 0, flags)


def add(soft, graph, deps, handle, kind: int, size: int = 1):
    said, node, bodies = soft.conditional(graph, deps, handle, kind, size)
    assert said == "SUCCESS"
    return node, bodies


def word(handle):
    return np.uint64(int(handle))


@pytest.mark.parametrize(
    ("kind", "size", "table"),
    [
        (IF, 1, {0: 0, 1: 1, 7: 1}),
        (IF, 2, {0: 10, 5: 1}),
    ],
)
def test_if_and_else_choose_one_body(soft, kernels, stream, kind, size, table) -> None:
    """IF takes body 0 or its else."""
    for value, expected in table.items():
        graph = soft.cuGraphCreate(0)
        a = soft.ints(0)
        handle = condition(soft, graph)
        choose = soft.add_kernel(graph, [], kernels.set, 1, 1, word(handle), np.uint32(value))
        _, bodies = add(soft, graph, [choose], handle, kind, size)
        for i, body in enumerate(bodies):
            soft.add_kernel(body, [], kernels.add, 1, 1, a, np.int32(10**i))
        soft.replay(graph, stream)
        assert soft.value(a) == expected, value


def test_loops_nest(soft, kernels, stream, graph) -> None:
    """A WHILE inside a WHILE: the inner condition is set again by each outer turn."""
    a = soft.ints(0)
    inner_count = soft.ints(0)
    outer = condition(soft, graph, 1)
    inner = condition(soft, graph)
    _, (body,) = add(soft, graph, [], outer, WHILE)
    reset = soft.add_fill(body, [], inner_count, 0)
    arm = soft.add_kernel(body, [reset], kernels.set, 1, 1, word(inner), np.uint32(1))
    loop, (nested,) = add(soft, body, [arm], inner, WHILE)
    one = soft.add_kernel(nested, [], kernels.add, 1, 1, a, np.int32(1))
    two = soft.add_kernel(nested, [one], kernels.add, 1, 1, inner_count, np.int32(1))
    soft.add_kernel(nested, [two], kernels.decide, 1, 1, word(inner), inner_count, np.int32(5))
    soft.add_kernel(body, [loop], kernels.decide, 1, 1, word(outer), a, np.int32(15))
    soft.replay(graph, stream)
    assert soft.value(a) == 15


def test_bodies_refuse_what_the_device_cannot_run(soft, graph, event) -> None:
    """Host and event nodes and pageable copies are refused in a body, also in a child graph; so is
    such a graph as a child."""
    d = soft.d
    child = soft.cuGraphCreate(0)
    p = soft.host_params(USLEEP)
    _, (body,) = add(soft, graph, [], condition(soft, graph, 1), IF)
    soft.cuGraphAddHostNode(child, [], 0, p)
    pageable = np.zeros(1, np.int32)
    c = soft.copy_params(soft.ints(0), pageable.ctypes.data, 4)
    assert codes(
        d.cuGraphAddHostNode(body, [], 0, p),
        d.cuGraphAddChildGraphNode(body, [], 0, child),
        d.cuGraphAddMemcpyNode(body, [], 0, c, soft.context),
        d.cuGraphAddEventRecordNode(body, [], 0, event),
        d.cuGraphAddEventWaitNode(body, [], 0, event),
        d.cuGraphAddChildGraphNode(child, [], 0, graph),
    ) == {"NOT_SUPPORTED"}
    assert soft.cuGraphGetNodes(body)[-1] == 0


def test_handles_steer_one_node_each(soft, graph) -> None:
    """A handle without a node, used twice, of another graph or of other bodies is refused."""
    elsewhere = soft.cuGraphCreate(0)
    foreign = condition(soft, elsewhere, 1)
    handle = condition(soft, graph, 1)
    assert soft.conditional(graph, [], foreign, IF)[0] == "INVALID_VALUE"
    assert code(soft.d.cuGraphInstantiate(elsewhere, 0)) == "INVALID_VALUE"
    assert soft.conditional(graph, [], handle, WHILE, 2)[0] == "INVALID_VALUE"
    assert soft.conditional(graph, [], handle, SWITCH, 3)[0] == "NOT_SUPPORTED"
    add(soft, graph, [], handle, IF)
    assert soft.conditional(graph, [], handle, IF)[0] == "INVALID_VALUE"


def test_updates_reach_into_bodies(soft, kernels, stream, graph) -> None:
    """A node of a body takes new parameters in the executable, and can be disabled there."""
    a = soft.ints(0)
    _, (body,) = add(soft, graph, [], condition(soft, graph, 1), IF)
    node = soft.add_kernel(body, [], kernels.add, 1, 1, a, np.int32(1))
    executable = soft.cuGraphInstantiate(graph, 0)
    new, keep = soft.kernel_params(kernels.add, 1, 1, a, np.int32(50))
    soft.cuGraphExecKernelNodeSetParams(executable, node, new)
    soft.cuGraphLaunch(executable, stream)
    soft.cuGraphNodeSetEnabled(executable, node, 0)
    soft.cuGraphLaunch(executable, stream)
    soft.cuStreamSynchronize(stream)
    assert soft.value(a) == 50 and keep


def record(soft, graph, deps, event):
    return soft.cuGraphAddEventRecordNode(graph, list(deps), len(deps), event)


def wait(soft, graph, deps, event):
    return soft.cuGraphAddEventWaitNode(graph, list(deps), len(deps), event)


def test_a_wait_node_waits_for_what_was_recorded_before_the_launch(
    soft, stream, other, event, graph, words
) -> None:
    """Each launch waits for the work the event names then; one never recorded is complete."""
    a = soft.ints(0)
    waits = wait(soft, graph, [], event)
    soft.add_fill(graph, [waits], a, 5)
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.play(executable, stream)
    assert soft.value(a) == 5
    soft.cuMemsetD32(a, 0, 1)
    words.block(other)
    soft.cuMemsetD32Async(a, 1, 1, other)
    soft.cuEventRecord(event, other)
    soft.cuGraphLaunch(executable, stream)
    assert code(soft.d.cuStreamQuery(stream)) == "NOT_READY"
    words[0] = 1
    soft.cuStreamSynchronize(stream)
    assert soft.value(a) == 5  # the fill of the other stream came before


def test_launches_with_destroyed_events_are_refused(soft, stream, event, graph) -> None:
    """A launch says so when an event of its nodes was destroyed, stricter than hardware."""
    marked = record(soft, graph, [], event)
    waits = wait(soft, graph, [], event)
    assert [soft.cuGraphNodeGetType(n).value for n in (waits, marked)] == [6, 7]
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.cuEventDestroy(event)
    assert code(soft.d.cuGraphLaunch(executable, stream)) == "INVALID_HANDLE"
    assert "destroyed" in soft.refusal()


def test_generic_nodes_and_whole_updates_know_events(soft, stream, event) -> None:
    """cuGraphAddNode makes both kinds; cuGraphExecUpdate takes the new definition's events."""
    new = soft.cuEventCreate(0)
    definitions = []
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


def move(soft, parent, child, ownership: int = 1) -> str:
    p = soft.node_params("GRAPH")
    p.graph.graph = child
    p.graph.ownership = soft.d.CUgraphChildGraphNodeOwnership(ownership)
    return code(soft.d.cuGraphAddNode(parent, [], None, 0, p))


def test_a_moved_child_may_hold_conditionals_and_belongs_to_its_parent(soft, stream) -> None:
    """It runs in the parent, is nobody else's any more, and goes with the parent."""
    d = soft.d
    before = soft.live()
    parent = soft.cuGraphCreate(0)
    child = soft.cuGraphCreate(0)
    a = soft.ints(0)
    handle = soft.cuGraphConditionalHandleCreate(child, soft.context, 1, 1)
    _, node, (body,) = soft.conditional(child, [], handle, 0)
    soft.add_fill(body, [], a, 3)
    assert move(soft, parent, child, 0) == "NOT_SUPPORTED"
    assert move(soft, parent, parent) == "INVALID_VALUE"
    assert move(soft, parent, child) == "SUCCESS"
    assert move(soft, parent, child) == "INVALID_VALUE"
    assert codes(
        d.cuGraphInstantiate(child, 0),
        d.cuGraphDestroy(child),
        d.cuGraphAddChildGraphNode(parent, [], 0, child),
    ) == {"INVALID_VALUE"}
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
