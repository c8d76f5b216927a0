"""Conditional nodes, event nodes and moved child graphs on the soft device."""

from __future__ import annotations

import numpy as np
import pytest
from softcuda_util import USLEEP, check, code, codes

IF = 0
WHILE = 1
SWITCH = 2


def condition(soft, graph, default: int | None = None):
    """Create a conditional handle.

    `default` is the value that each launch stores in the handle. None creates a handle without a
    default value.
    """
    flags = 0 if default is None else 1
    return soft.cuGraphConditionalHandleCreate(graph, soft.context, default or 0, flags)


def add_conditional(soft, graph, deps, handle, kind: int, size: int = 1):
    """Add a conditional node and return the node and its body graphs."""
    result, node, bodies = soft.conditional(graph, deps, handle, kind, size)
    assert result == "SUCCESS"
    return node, bodies


def word(handle):
    """Return a conditional handle as a kernel argument."""
    return np.uint64(int(handle))


@pytest.mark.parametrize(
    ("kind", "size", "table"),
    [
        (IF, 1, {0: 0, 1: 1, 7: 1}),
        (IF, 2, {0: 10, 5: 1}),
        (SWITCH, 1, {0: 1, 1: 0}),
        (SWITCH, 2, {0: 1, 1: 10, 2: 0}),
    ],
)
def test_conditional_if_runs_body_by_value(soft, kernels, stream, kind, size, table) -> None:
    """An IF node runs its first body for a nonzero value and its second body, if any, for zero."""
    for value, expected in table.items():
        graph = soft.cuGraphCreate(0)
        a = soft.ints(0)
        handle = condition(soft, graph)
        choose = soft.add_kernel(graph, [], kernels.set, 1, 1, word(handle), np.uint32(value))
        _, bodies = add_conditional(soft, graph, [choose], handle, kind, size)
        for i, body in enumerate(bodies):
            soft.add_int_kernel(body, [], kernels.add, a, 10**i)
        soft.replay(graph, stream)
        assert soft.value(a) == expected, value


def test_conditional_while_nodes_nest(soft, kernels, stream, graph) -> None:
    """A WHILE node can be nested in a WHILE node.

    Each iteration of the outer loop sets the condition of the inner loop again.
    """
    a = soft.ints(0)
    inner_count = soft.ints(0)
    outer = condition(soft, graph, 1)
    inner = condition(soft, graph)
    _, (body,) = add_conditional(soft, graph, [], outer, WHILE)
    reset = soft.add_fill(body, [], inner_count, 0)
    arm = soft.add_kernel(body, [reset], kernels.set, 1, 1, word(inner), np.uint32(1))
    loop, (nested,) = add_conditional(soft, body, [arm], inner, WHILE)
    one = soft.add_int_kernel(nested, [], kernels.add, a, 1)
    two = soft.add_int_kernel(nested, [one], kernels.add, inner_count, 1)
    soft.add_kernel(nested, [two], kernels.decide, 1, 1, word(inner), inner_count, np.int32(5))
    soft.add_kernel(body, [loop], kernels.decide, 1, 1, word(outer), a, np.int32(15))
    soft.replay(graph, stream)
    assert soft.value(a) == 15


def test_condition_without_default_is_undefined_in_every_launch(soft, kernels, stream, graph):
    """The value at the end of a launch is not the value at the start of the next launch."""
    a = soft.ints(0)
    handle = condition(soft, graph)
    node, (body,) = add_conditional(soft, graph, [], handle, IF)
    soft.add_int_kernel(body, [], kernels.add, a, 1)
    soft.add_kernel(graph, [node], kernels.set, 1, 1, word(handle), np.uint32(1))
    soft.replay(graph, stream, launches=64)
    assert 1 < soft.value(a) < 63


def test_conditional_body_with_unsupported_node_is_not_instantiated(soft, graph, event) -> None:
    """Host nodes, event nodes and copies of pageable memory can be added to a body.

    The instantiation is refused, also if such a node is inside a child graph. A graph with a
    conditional node cannot be cloned as a child graph.
    """
    d = soft.d
    child = soft.cuGraphCreate(0)
    p = soft.host_params(USLEEP)
    _, (body,) = add_conditional(soft, graph, [], condition(soft, graph, 1), IF)
    soft.cuGraphAddHostNode(child, [], 0, p)
    pageable = np.zeros(1, np.int32)
    c = soft.copy_params(soft.ints(0), pageable.ctypes.data, 4)
    for add in (
        lambda: soft.cuGraphAddHostNode(body, [], 0, p),
        lambda: soft.cuGraphAddChildGraphNode(body, [], 0, child),
        lambda: soft.cuGraphAddMemcpyNode(body, [], 0, c, soft.context),
        lambda: soft.cuGraphAddEventRecordNode(body, [], 0, event),
        lambda: soft.cuGraphAddEventWaitNode(body, [], 0, event),
    ):
        node = add()
        assert code(d.cuGraphInstantiate(graph, 0)) == "NOT_SUPPORTED"
        soft.cuGraphDestroyNode(node)
    assert code(d.cuGraphAddChildGraphNode(child, [], 0, graph)) == "NOT_SUPPORTED"
    soft.cuGraphInstantiate(graph, 0)


@pytest.mark.parametrize(("setting", "order"), [("serial", "13 24"), ("reverse", "24 13")])
def test_conditional_body_branches_run_one_after_another(setting, order) -> None:
    """With SOFTCUDA_BODY, the branches of a body run in a fixed order, each node after its
    dependencies."""
    numbers = check(
        """
from test_softcuda_nodes import *
graph, stream, log = s.cuGraphCreate(0), s.stream(), s.ints(*[0] * 5)
_, (body,) = add_conditional(s, graph, [], condition(s, graph, 1), IF)
def append(after, value):
    return s.add_int_kernel(body, after, kernels.append, log, value)
first = append([], 1), append([], 2)
append([first[0]], 3), append([first[1]], 4)
s.replay(graph, stream)
print(*s.get(log, 5, np.int32)[1:])
""",
        SOFTCUDA_BODY=setting,
    )
    serial = {"13 24": "1 2 3 4", "24 13": "2 4 1 3"}
    assert numbers.strip() == serial[order]


def test_conditional_handle_belongs_to_one_node(soft, graph) -> None:
    """A conditional handle must be used by exactly one node of its own graph.

    A handle of another graph and a handle that is already used are rejected. A graph with an unused
    handle cannot be instantiated. The test also checks that a node with the wrong number of bodies
    is rejected.
    """
    elsewhere = soft.cuGraphCreate(0)
    foreign = condition(soft, elsewhere, 1)
    handle = condition(soft, graph, 1)
    assert soft.conditional(graph, [], foreign, IF)[0] == "INVALID_VALUE"
    assert code(soft.d.cuGraphInstantiate(elsewhere, 0)) == "INVALID_VALUE"
    assert soft.conditional(graph, [], handle, WHILE, 2)[0] == "INVALID_VALUE"
    assert soft.conditional(graph, [], handle, SWITCH, 0)[0] == "INVALID_VALUE"
    add_conditional(soft, graph, [], handle, IF)
    assert soft.conditional(graph, [], handle, IF)[0] == "INVALID_VALUE"


def test_conditional_body_nodes_can_be_updated_in_executable(soft, kernels, stream, graph) -> None:
    """Nodes of a conditional body can be updated and disabled in the executable graph."""
    a = soft.ints(0)
    _, (body,) = add_conditional(soft, graph, [], condition(soft, graph, 1), IF)
    node = soft.add_int_kernel(body, [], kernels.add, a, 1)
    executable = soft.cuGraphInstantiate(graph, 0)
    new, _keep = soft.kernel_params(kernels.add, 1, 1, a, np.int32(50))
    soft.cuGraphExecKernelNodeSetParams(executable, node, new)
    soft.cuGraphLaunch(executable, stream)
    soft.cuGraphNodeSetEnabled(executable, node, 0)
    soft.cuGraphLaunch(executable, stream)
    soft.cuStreamSynchronize(stream)
    assert soft.value(a) == 50


def test_event_wait_node_waits_for_work_recorded_before_launch(
    soft, stream, other, event, graph, words
) -> None:
    """An event wait node waits for the last record before the launch.

    It does not wait if the event was never recorded.
    """
    a = soft.ints(0)
    wait_node = soft.cuGraphAddEventWaitNode(graph, [], 0, event)
    soft.add_fill(graph, [wait_node], a, 5)
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
    assert soft.value(a) == 5  # the memset of the other stream ran first


def test_event_node_with_destroyed_event_rejects_launch(soft, stream, event, graph) -> None:
    """A graph launch is rejected if the event of one of its nodes was destroyed.

    A GPU's driver does not make this check.
    """
    record_node = soft.cuGraphAddEventRecordNode(graph, [], 0, event)
    wait_node = soft.cuGraphAddEventWaitNode(graph, [], 0, event)
    types = [soft.cuGraphNodeGetType(node).value for node in (wait_node, record_node)]
    assert types == [6, 7]
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.cuEventDestroy(event)
    assert code(soft.d.cuGraphLaunch(executable, stream)) == "INVALID_HANDLE"
    assert "destroyed" in soft.refusal()


def test_event_nodes_are_updated_by_exec_update(soft, stream, event) -> None:
    """Updating an executable graph replaces the events of its event nodes."""
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


def move_child(soft, parent, child, ownership: int = 1) -> str:
    """Add a child graph node with an ownership (0 clone, 1 move). Return the error code."""
    p = soft.node_params("GRAPH")
    p.graph.graph = child
    p.graph.ownership = soft.d.CUgraphChildGraphNodeOwnership(ownership)
    return code(soft.d.cuGraphAddNode(parent, [], None, 0, p))


def test_child_graph_moved_into_parent_belongs_to_it(soft, stream) -> None:
    """A child graph that was moved into a parent cannot be used separately.

    It is destroyed with its parent.
    """
    d = soft.d
    before = soft.live()
    parent = soft.cuGraphCreate(0)
    child = soft.cuGraphCreate(0)
    a = soft.ints(0)
    node = soft.add_fill(child, [], a, 3)
    assert move_child(soft, parent, parent) == "INVALID_VALUE"
    assert move_child(soft, parent, child) == "SUCCESS"
    assert move_child(soft, parent, child) == "INVALID_VALUE"
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


def test_child_graph_with_conditional_node_is_refused(soft) -> None:
    """A graph with a conditional node cannot be a child graph, even if the node is added later."""
    d = soft.d
    parent = soft.cuGraphCreate(0)
    child = soft.cuGraphCreate(0)
    handle = soft.cuGraphConditionalHandleCreate(child, soft.context, 1, 1)
    _, node, _ = soft.conditional(child, [], handle, 0)
    assert move_child(soft, parent, child, 0) == "NOT_SUPPORTED"
    assert move_child(soft, parent, child, 1) == "NOT_SUPPORTED"
    soft.cuGraphDestroyNode(node)
    assert move_child(soft, parent, child, 1) == "SUCCESS"
    later = soft.cuGraphConditionalHandleCreate(child, soft.context, 1, 1)
    soft.conditional(child, [], later, 0)
    assert code(d.cuGraphInstantiate(parent, 0)) == "NOT_SUPPORTED"
    soft.cuGraphDestroy(parent)


def test_graph_ids_differ_and_nodes_name_their_graph(soft, graph):
    """Graphs, executable graphs and nodes have different ids. A node returns its graph."""
    other = soft.cuGraphCreate(0)
    nodes = [soft.cuGraphAddEmptyNode(g, [], 0) for g in (graph, graph, other)]
    assert len({int(soft.cuGraphNodeGetToolsId(node)) for node in nodes}) == 3
    assert len({int(soft.cuGraphNodeGetLocalId(node)) for node in nodes[:2]}) == 2
    assert int(soft.cuGraphGetId(graph)) != int(soft.cuGraphGetId(other))
    containing = [int(soft.cuGraphNodeGetContainingGraph(node)) for node in nodes]
    assert containing == [int(graph), int(graph), int(other)]
    executables = [soft.cuGraphInstantiate(g, 0) for g in (graph, other)]
    assert len({int(soft.cuGraphExecGetId(executable)) for executable in executables}) == 2
