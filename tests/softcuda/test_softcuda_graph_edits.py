"""Graph definitions on the soft device: neighbours, edges, clones and node parameters."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from softcuda_util import USLEEP, code, codes

WRITE32 = 2
WAIT32 = 1


@pytest.fixture
def chain(soft, graph):
    """Three empty nodes, each of which depends on the one before it."""
    nodes = [soft.cuGraphAddEmptyNode(graph, [], 0)]
    for _ in range(2):
        nodes.append(soft.cuGraphAddEmptyNode(graph, nodes[-1:], 1))
    return nodes


def handles(nodes, count):
    return [int(node) for node in nodes[:count]]


def neighbours(query, node):
    """Return the handles that a query of dependencies or dependent nodes returns."""
    nodes, _, count = query(node, 8)
    return handles(nodes, count)


def batch(soft, *operations):
    """Return the parameters of a node with stream memory operations (kind, address, value)."""
    d = soft.d
    array = []
    for kind, address, value in operations:
        p = d.CUstreamBatchMemOpParams()
        p.operation = p.writeValue.operation = d.CUstreamBatchMemOpType(kind)
        p.writeValue.address = d.CUdeviceptr(address)
        p.writeValue.value = d.cuuint32_t(value)
        array.append(p)
    p = d.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    p.ctx = soft.context
    p.count = len(array)
    p.paramArray = array
    return p


def test_graph_queries_return_neighbours_and_roots(soft, graph, chain):
    first, last = int(chain[0]), int(chain[2])
    assert neighbours(soft.cuGraphNodeGetDependencies, chain[1]) == [first]
    assert neighbours(soft.cuGraphNodeGetDependentNodes, chain[1]) == [last]
    assert neighbours(soft.cuGraphNodeGetDependentNodes, chain[2]) == []
    assert soft.cuGraphNodeGetDependentNodes(chain[0], 0)[-1] == 1  # the number only
    roots, count = soft.cuGraphGetRootNodes(graph, 8)
    assert handles(roots, count) == [first]
    soft.cuGraphDestroyNode(chain[1])
    assert neighbours(soft.cuGraphNodeGetDependentNodes, chain[0]) == []
    roots, count = soft.cuGraphGetRootNodes(graph, 8)
    assert handles(roots, count) == [first, last]


def test_graph_edges_can_be_added_and_removed(soft, kernels, stream, graph):
    """Nodes run in the order of the edges, also if an edge leads to a node that was added earlier.

    A graph with a cycle cannot be instantiated.
    """
    d = soft.d
    p = soft.ints(1)
    add = soft.add_int_kernel(graph, [], kernels.add, p, 4)
    scale = soft.add_int_kernel(graph, [], kernels.scale, p, 3)
    soft.cuGraphAddDependencies(graph, [scale], [add], None, 1)
    soft.replay(graph, stream)
    assert soft.value(p) == 1 * 3 + 4
    assert code(d.cuGraphAddDependencies(graph, [scale], [add], None, 1)) == "INVALID_VALUE"
    soft.cuGraphAddDependencies(graph, [add], [scale], None, 1)
    assert code(d.cuGraphInstantiate(graph, 0)) == "INVALID_VALUE"
    assert "cycle" in soft.refusal()
    soft.cuGraphRemoveDependencies(graph, [scale], [add], None, 1)
    soft.replay(graph, stream)
    assert soft.value(p) == (7 + 4) * 3
    foreign = soft.cuGraphAddEmptyNode(soft.cuGraphCreate(0), [], 0)
    results = (
        d.cuGraphRemoveDependencies(graph, [scale], [add], None, 1),
        d.cuGraphAddDependencies(graph, [foreign], [add], None, 1),
        d.cuGraphAddDependencies(graph, [add], [add], None, 1),
    )
    assert codes(*results) == {"INVALID_VALUE"}


def test_graph_programmatic_edge_is_returned_by_queries_of_both_nodes(soft, kernels, graph):
    p = soft.ints(0)
    nodes = [soft.add_int_kernel(graph, [], kernels.add, p, 1) for _ in range(2)]
    edge = soft.d.CUgraphEdgeData()
    edge.from_port = 1
    edge.type = soft.d.CUgraphDependencyType(1)
    soft.cuGraphAddDependencies(graph, nodes[:1], nodes[1:], [edge], 1)
    assert soft.cuGraphNodeGetDependencies(nodes[1], 1)[1][0].from_port == 1
    assert soft.cuGraphNodeGetDependentNodes(nodes[0], 1)[1][0].from_port == 1


def test_graph_clone_has_its_own_nodes(soft, kernels, stream, graph):
    p = soft.ints(0)
    node = soft.add_int_kernel(graph, [], kernels.add, p, 5)
    clone = soft.cuGraphClone(graph)
    copy = soft.cuGraphNodeFindInClone(node, clone)
    assert int(copy) != int(node)
    params, _keep = soft.kernel_params(kernels.add, 1, 1, p, np.int32(100))
    soft.cuGraphKernelNodeSetParams(copy, params)
    soft.replay(graph, stream)
    assert soft.value(p) == 5
    soft.cuGraphDestroy(graph)
    soft.replay(clone, stream)
    assert soft.value(p) == 105
    soft.cuGraphDestroyNode(copy)
    assert code(soft.d.cuGraphNodeFindInClone(node, clone)) == "INVALID_VALUE"


def test_graph_debug_dot_print_writes_nodes_and_edges(soft, kernels, graph, tmp_path):
    path = tmp_path / "graph.dot"
    node = soft.add_int_kernel(graph, [], kernels.add, soft.ints(0), 1)
    soft.add_host(graph, [node], USLEEP)
    soft.cuGraphDebugDotPrint(graph, str(path).encode(), 0)
    text = path.read_text()
    assert "kernel add" in text and text.count("->") == 1
    missing = str(tmp_path / "absent" / "graph.dot").encode()
    assert code(soft.d.cuGraphDebugDotPrint(graph, missing, 0)) == "OPERATING_SYSTEM"


def test_graph_node_params_are_returned_as_set(soft, kernels, event, graph, words):
    """Queries return the values that the caller passed, for every type of node."""
    a, b = soft.ints(1, 2), soft.ints(0, 0)
    fill = soft.add_fill(graph, [], a, 7)
    copy = soft.cuGraphAddMemcpyNode(graph, [], 0, soft.copy_params(b, a, 8), soft.context)
    record = soft.cuGraphAddEventRecordNode(graph, [], 0, event)
    wait = soft.cuGraphAddEventWaitNode(graph, [], 0, event)
    child = soft.cuGraphAddChildGraphNode(graph, [], 0, soft.cuGraphCreate(0))
    write = (WRITE32, words.address(1), 9)
    memops = soft.cuGraphAddBatchMemOpNode(graph, [], 0, batch(soft, write))
    handle = soft.cuGraphConditionalHandleCreate(graph, soft.context, 1, 1)
    conditional, bodies = soft.conditional(graph, [], handle, 0)[1:]

    memset = soft.cuGraphMemsetNodeGetParams(fill)
    assert (int(memset.dst), memset.value, memset.width) == (a, 7, 1)
    memcpy = soft.cuGraphMemcpyNodeGetParams(copy)
    assert (int(memcpy.dstDevice), memcpy.WidthInBytes, memcpy.Height) == (b, 8, 1)
    for get, node in (
        (soft.cuGraphEventRecordNodeGetEvent, record),
        (soft.cuGraphEventWaitNodeGetEvent, wait),
    ):
        assert int(get(node)) == int(event)
    assert soft.cuGraphBatchMemOpNodeGetParams(memops).count == 1
    graph_of_child = int(soft.cuGraphChildGraphNodeGetGraph(child))
    assert int(soft.cuGraphNodeGetParams(child).graph.graph) == graph_of_child
    generic = soft.cuGraphNodeGetParams(copy)
    assert int(generic.memcpy.copyCtx) == int(soft.context)
    assert int(generic.memcpy.copyParams.srcDevice) == a
    generic = soft.cuGraphNodeGetParams(conditional)
    assert int(generic.conditional.handle) == int(handle)
    array = ctypes.c_uint64.from_address(int(generic.getPtr()) + 16 + 16).value
    assert ctypes.c_uint64.from_address(array).value == int(bodies[0])
    wrong = soft.d.cuGraphMemsetNodeGetParams(copy), soft.d.cuGraphEventWaitNodeGetEvent(record)
    assert codes(*wrong) == {"INVALID_VALUE"}


def test_graph_copy_and_memset_nodes_can_be_changed(soft, stream, graph):
    """The executable graph and the definition have separate parameters after the instantiation."""
    a, b, c = soft.ints(1, 1), soft.ints(2, 2), soft.ints(3, 3)
    fill = soft.add_fill(graph, [], a, 7)
    copy = soft.cuGraphAddMemcpyNode(graph, [fill], 1, soft.copy_params(b, a, 8), soft.context)
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.cuGraphExecMemsetNodeSetParams(executable, fill, soft.fill_params(a, 8), soft.context)
    soft.cuGraphExecMemcpyNodeSetParams(executable, copy, soft.copy_params(c, a, 4), soft.context)
    soft.play(executable, stream)
    assert [soft.get(p, 2, np.int32).tolist() for p in (a, b, c)] == [[8, 1], [2, 2], [8, 3]]
    assert soft.cuGraphMemsetNodeGetParams(fill).value == 7
    soft.cuGraphMemsetNodeSetParams(fill, soft.fill_params(a, 50))
    params = soft.node_params("MEMCPY")
    params.memcpy.copyParams = soft.copy_params(b, a, 4)
    soft.cuGraphNodeSetParams(copy, params)
    soft.replay(graph, stream)
    assert [soft.get(p, 2, np.int32).tolist() for p in (a, b, c)] == [[50, 1], [50, 2], [8, 3]]
    wrong_type = soft.node_params("EMPTY")
    results = (
        soft.d.cuGraphNodeSetParams(fill, wrong_type),
        soft.d.cuGraphExecNodeSetParams(executable, fill, wrong_type),
    )
    assert codes(*results) == {"INVALID_VALUE"}


def test_graph_memset_node_fills_rows_with_pitch(soft, stream, graph):
    a = soft.ints(*[0] * 12)
    params = soft.fill_params(a, 5)
    params.width, params.height, params.pitch = 2, 3, 16
    soft.cuGraphAddMemsetNode(graph, [], 0, params, soft.context)
    soft.replay(graph, stream)
    assert soft.get(a, 12, np.int32).reshape(3, 4).tolist() == [[5, 5, 0, 0]] * 3
    for change in ({"pitch": 4}, {"pitch": 18}, {"height": 4}):
        for name, value in {"pitch": 16, "height": 3, **change}.items():
            setattr(params, name, value)
        result = soft.d.cuGraphAddMemsetNode(graph, [], 0, params, soft.context)
        assert code(result) == "INVALID_VALUE"


def test_graph_event_nodes_can_be_changed(soft, stream, event, graph):
    d = soft.d
    others = [soft.cuEventCreate(0) for _ in range(2)]
    record = soft.cuGraphAddEventRecordNode(graph, [], 0, event)
    wait = soft.cuGraphAddEventWaitNode(graph, [record], 1, event)
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.cuGraphExecEventRecordNodeSetEvent(executable, record, others[0])
    soft.cuGraphEventRecordNodeSetEvent(record, others[1])
    soft.cuGraphEventWaitNodeSetEvent(wait, others[1])
    assert int(soft.cuGraphEventRecordNodeGetEvent(record)) == int(others[1])
    soft.play(executable, stream)
    timed = soft.cuEventCreate(0)
    soft.cuEventRecord(timed, stream)
    soft.cuStreamSynchronize(stream)
    assert soft.cuEventElapsedTime(others[0], timed) >= 0
    assert code(d.cuEventElapsedTime(others[1], timed)) == "INVALID_HANDLE"  # never recorded
    results = (
        d.cuGraphEventWaitNodeSetEvent(record, event),
        d.cuGraphExecEventWaitNodeSetEvent(executable, record, event),
    )
    assert codes(*results) == {"INVALID_VALUE"}


def test_graph_memop_node_keeps_kinds_of_operations_in_executable(soft, stream, graph, words):
    """An executable graph accepts new addresses and values, but no other kinds or numbers."""
    first, second = (WRITE32, words.address(0), 1), (WRITE32, words.address(1), 2)
    node = soft.cuGraphAddBatchMemOpNode(graph, [], 0, batch(soft, first))
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.cuGraphExecBatchMemOpNodeSetParams(executable, node, batch(soft, second))
    soft.play(executable, stream)
    assert (words[0], words[1]) == (0, 2)
    wait = (WAIT32, words.address(1), 2)
    for operations in ((first, second), (wait,)):
        params = batch(soft, *operations)
        result = soft.d.cuGraphExecBatchMemOpNodeSetParams(executable, node, params)
        assert code(result) == "INVALID_VALUE"
    soft.cuGraphBatchMemOpNodeSetParams(node, batch(soft, first, second))
    assert soft.cuGraphBatchMemOpNodeGetParams(node).count == 2


def test_graph_child_can_be_replaced(soft, kernels, stream, graph):
    """The executable graph requires a child with the same topology; the definition does not."""
    p = soft.ints(0)

    def child(*values):
        new = soft.cuGraphCreate(0)
        last: list = []
        for value in values:
            last = [soft.add_int_kernel(new, last, kernels.add, p, value)]
        return new

    before = soft.add_int_kernel(graph, [], kernels.add, p, 1)
    node = soft.cuGraphAddChildGraphNode(graph, [before], 1, child(10, 20))
    soft.add_int_kernel(graph, [node], kernels.scale, p, 2)
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.cuGraphExecChildGraphNodeSetParams(executable, node, child(100, 200))
    soft.play(executable, stream)
    assert soft.value(p) == 602
    for values in ((5,), (5, 6, 7)):
        result = soft.d.cuGraphExecChildGraphNodeSetParams(executable, node, child(*values))
        assert code(result) == "INVALID_VALUE"
    params = soft.node_params("GRAPH")
    params.graph.graph = child(1000)
    old = soft.cuGraphChildGraphNodeGetGraph(node)
    soft.cuGraphNodeSetParams(node, params)
    assert code(soft.d.cuGraphGetNodes(old)) == "INVALID_HANDLE"
    soft.cuMemsetD32(p, 0, 1)
    soft.replay(graph, stream)
    assert soft.value(p) == 2002
