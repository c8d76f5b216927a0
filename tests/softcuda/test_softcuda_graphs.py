"""Explicit graphs on the soft device: execution order, queries, child graphs and updates."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest
from softcuda_util import CALLBACK, USLEEP, code, codes


@pytest.fixture
def log(soft):
    """Device memory to which kernels append numbers. The first word counts the numbers after it."""
    return soft.ints(*[0] * 128)


def entries(soft, log):
    """Return the numbers that kernels have appended to a log, as a list."""
    words = soft.get(log, 128, np.int32)
    return words[1 : 1 + words[0]].tolist()


def test_graph_branches_run_concurrently(soft, kernels, stream, graph, words):
    """Two branches of a graph run at the same time.

    The kernel of one branch polls a word that the host node of the other branch sets.
    """
    out = soft.ints(0)
    callback = CALLBACK(lambda _: time.sleep(0.03) or words.__setitem__(0, 9))
    fork = soft.cuGraphAddEmptyNode(graph, [], 0)
    soft.add_kernel(graph, [fork], kernels.wait_for, 1, 1, words.device, out)
    soft.add_host(graph, [fork], callback)
    soft.replay(graph, stream)
    assert soft.value(out) == 9


def test_graph_queries_return_nodes_edges_and_parameters(soft, kernels, graph):
    p = soft.ints(0)
    a = soft.add_kernel(graph, [], kernels.add, 3, (4, 2, 1), p, np.int32(77))
    c = soft.cuGraphAddEmptyNode(graph, [], 0)
    b = soft.add_host(graph, [a, c], USLEEP, 12)
    nodes, count = soft.cuGraphGetNodes(graph, 8)
    assert count == 3
    assert list(map(int, nodes[:count])) == list(map(int, (a, c, b)))
    sources, targets, _, count = soft.cuGraphGetEdges(graph, 8)
    edges = zip(map(int, sources[:count]), map(int, targets[:count]), strict=True)
    assert set(edges) == {(int(a), int(b)), (int(c), int(b))}
    kernel = soft.cuGraphKernelNodeGetParams(a)
    assert int(kernel.func) == int(kernels.add)
    assert kernel.gridDimX == 3
    assert kernel.blockDimY == 2
    parameters = (ctypes.c_uint64 * 2).from_address(int(kernel.kernelParams))
    assert ctypes.c_uint64.from_address(parameters[0]).value == p
    assert ctypes.c_int.from_address(parameters[1]).value == 77
    assert int(soft.cuGraphHostNodeGetParams(b).userData) == 12


def test_graph_kernel_node_cluster_attribute_supports_one_block(soft, kernels, graph):
    node = soft.add_kernel(graph, [], kernels.add, 1, 1, soft.ints(0), np.int32(1))
    cluster = soft.d.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value = soft.cuGraphKernelNodeGetAttribute(node, cluster)
    value.clusterDim.x = 1
    value.clusterDim.y = 1
    value.clusterDim.z = 1
    soft.cuGraphKernelNodeSetAttribute(node, cluster, value)
    assert soft.cuGraphKernelNodeGetAttribute(node, cluster).clusterDim.x == 1
    value.clusterDim.x = 2
    assert code(soft.d.cuGraphKernelNodeSetAttribute(node, cluster, value)) == "NOT_SUPPORTED"


KERNEL_FIELDS = (
    "func",
    "gridDimX",
    "gridDimY",
    "gridDimZ",
    "blockDimX",
    "blockDimY",
    "blockDimZ",
    "kernelParams",
)


def add_kernel_chain(soft, kernel, graph, log, edge) -> None:
    """Add three kernels, each of which depends on the one before it and appends its index to a log.

    `edge` is the edge data of the dependencies. None makes them full dependencies.
    """
    last: list = []
    for i in range(3):
        params = soft.node_params("KERNEL")
        kernel_params, _keep = soft.kernel_params(kernel, 1, 1, log, np.int32(i))
        for name in KERNEL_FIELDS:
            setattr(params.kernel, name, getattr(kernel_params, name))
        edges = [edge] if last and edge is not None else None
        last = [soft.cuGraphAddNode(graph, last, edges, len(last), params)]


@pytest.fixture
def programmatic_edge(soft):
    """Edge data of a programmatic edge from port 1 of a kernel."""
    edge = soft.d.CUgraphEdgeData()
    edge.from_port = 1
    edge.type = soft.d.CUgraphDependencyType(1)
    return edge


def test_graph_programmatic_edges_order_kernels_like_full_edges(
    soft, kernels, stream, graph, log, programmatic_edge
):
    """Kernels connected by programmatic edges run in order.

    Queries return these edges, an update with other edges fails, and removing a node removes its
    edges.
    """
    add_kernel_chain(soft, kernels.append, graph, log, programmatic_edge)
    soft.replay(graph, stream)
    assert entries(soft, log) == [0, 1, 2]
    *_, data, count = soft.cuGraphGetEdges(graph, 8)
    edges = [(edge.from_port, edge.to_port, int(edge.type)) for edge in data[:count]]
    assert edges == [(1, 0, 1)] * 2
    full = soft.cuGraphCreate(0)
    add_kernel_chain(soft, kernels.append, full, log, None)
    executable = soft.cuGraphInstantiate(graph, 0)
    assert code(soft.d.cuGraphExecUpdate(executable, full)) == "GRAPH_EXEC_UPDATE_FAILURE"
    _first, second, *_ = soft.cuGraphGetNodes(graph, 8)[0]
    soft.cuGraphDestroyNode(second)
    assert soft.cuGraphGetEdges(graph, 8)[-1] == 0


def test_graph_programmatic_edges_reject_invalid_use(soft, kernels, graph, log, programmatic_edge):
    """A programmatic edge must connect two kernels and start at port 1 or 2.

    A query of the edges returns LOSSY_QUERY if the caller passes no array for the edge data.
    """
    d = soft.d
    add_kernel_chain(soft, kernels.append, graph, log, programmatic_edge)
    params = soft.node_params("EMPTY")
    first = soft.cuGraphGetNodes(graph, 8)[0][0]
    for port in (1, 3):
        programmatic_edge.from_port = port
        result = d.cuGraphAddNode(graph, [first], [programmatic_edge], 1, params)
        assert code(result) == "INVALID_VALUE"
    count = ctypes.c_size_t(1)
    nodes = (ctypes.c_void_p * 2)()
    handle = ctypes.c_void_p(int(graph))
    lossy = soft.lib.cuGraphGetEdges_v2(handle, nodes, nodes, None, ctypes.byref(count))
    assert lossy == int(d.CUresult.CUDA_ERROR_LOSSY_QUERY)


def test_graph_add_node_rejects_invalid_dependencies_and_types(soft, graph):
    """Adding a node fails for invalid dependencies and for unsupported node types.

    A dependency on a node of another graph and a duplicate dependency return INVALID_VALUE. A node
    type that is not implemented returns NOT_SUPPORTED.
    """
    d = soft.d
    elsewhere = soft.cuGraphCreate(0)
    foreign = soft.cuGraphAddEmptyNode(elsewhere, [], 0)
    a = soft.cuGraphAddEmptyNode(graph, [], 0)
    for dependencies in ([foreign], [a, a]):
        result = d.cuGraphAddEmptyNode(graph, dependencies, len(dependencies))
        assert code(result) == "INVALID_VALUE"
    params = soft.node_params("EXT_SEMAS_SIGNAL")
    assert code(d.cuGraphAddNode(graph, [], None, 0, params)) == "NOT_SUPPORTED"


def test_graph_executable_is_independent_of_definition(soft, kernels, stream, graph):
    """Changing or destroying the definition does not affect its executable graphs."""
    p = soft.ints(0)
    executables = []
    for value in (1, 99):
        soft.add_int_kernel(graph, [], kernels.add, p, value)
        executables.append(soft.cuGraphInstantiate(graph, 0))
    soft.cuGraphDestroy(graph)
    for executable in executables:
        soft.play(executable, stream)
    assert soft.value(p) == 101


def test_graph_child_is_cloned_into_parent(soft, kernels, stream, graph, log):
    """A child graph node runs a clone of the child graph, at the position of this node.

    Changing the original child graph later does not affect the clone.
    """
    append = kernels.append
    child = soft.cuGraphCreate(0)
    x = soft.add_int_kernel(child, [], append, log, 2)
    soft.add_int_kernel(child, [x], append, log, 3)
    a = soft.add_int_kernel(graph, [], append, log, 1)
    node = soft.cuGraphAddChildGraphNode(graph, [a], 1, child)
    soft.add_int_kernel(graph, [node], append, log, 4)
    soft.add_int_kernel(child, [], append, log, 99)  # not in the clone
    soft.cuGraphDestroy(child)
    soft.replay(graph, stream)
    assert entries(soft, log) == [1, 2, 3, 4]


def test_graph_counters_count_launches_nodes_kernels_and_host_functions(
    soft, kernels, stream, graph
):
    """Launches, nodes, kernels and host functions are counted, also for an empty graph."""
    empty = soft.cuGraphInstantiate(graph, 0)
    soft.cuGraphUpload(empty, stream)
    soft.cuGraphLaunch(empty, stream)
    a = soft.add_kernel(graph, [], kernels.add, 1, 1, soft.ints(0), np.int32(1))
    soft.add_host(graph, [a], USLEEP)
    names = ("graph_launch", "node", "kernel_launch", "host_func")
    before = np.array([soft.count(name) for name in names])
    soft.replay(graph, stream, 5)
    after = np.array([soft.count(name) for name in names])
    assert (after - before).tolist() == [5, 10, 5, 5]


def test_graph_set_params_affects_later_launches_only(soft, kernels, stream, graph, log):
    """Setting node parameters does not affect launches that are already queued.

    Host nodes cannot be disabled or get the parameters of a kernel.
    """
    gate = threading.Event()
    callback = CALLBACK(lambda _: gate.wait(10) and None)
    hold = soft.add_host(graph, [], callback)
    node = soft.add_int_kernel(graph, [hold], kernels.append, log, 1)
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.cuGraphLaunch(executable, stream)
    for value in (2, 3):
        params, _keep = soft.kernel_params(kernels.append, 1, 1, log, np.int32(value))
        soft.cuGraphExecKernelNodeSetParams(executable, node, params)
        soft.cuGraphLaunch(executable, stream)
    gate.set()
    soft.cuStreamSynchronize(stream)
    assert entries(soft, log) == [1, 2, 3]
    results = (
        soft.d.cuGraphExecKernelNodeSetParams(executable, hold, params),
        soft.d.cuGraphNodeSetEnabled(executable, hold, 0),
    )
    assert codes(*results) == {"INVALID_VALUE"}


def test_graph_exec_update_requires_equal_topology(soft, kernels, stream):
    """An update with another topology fails, and its result info states what differs."""
    p = soft.ints(0)

    def define(value: int, second: str = "kernel"):
        graph = soft.cuGraphCreate(0)
        a = soft.add_int_kernel(graph, [], kernels.add, p, value)
        if second == "host":
            soft.add_host(graph, [a], USLEEP)
        else:
            soft.add_int_kernel(graph, [a], kernels.scale, p, 2)
        if second == "and more":
            soft.cuGraphAddEmptyNode(graph, [], 0)
        return graph

    executable = soft.cuGraphInstantiate(define(1), 0)
    soft.cuGraphExecUpdate(executable, define(5))
    for second, reason in (("host", "NODE_TYPE_CHANGED"), ("and more", "TOPOLOGY_CHANGED")):
        graph = define(5, second)
        # Call the driver through ctypes, because cuda.bindings returns no result info on failure.
        info = soft.d.CUgraphExecUpdateResultInfo()
        arguments = (int(executable), int(graph), info.getPtr())
        error = soft.lib.cuGraphExecUpdate_v2(*map(ctypes.c_void_p, arguments))
        assert error == 910
        assert info.result.name == f"CU_GRAPH_EXEC_UPDATE_ERROR_{reason}"
    soft.play(executable, stream)
    assert soft.value(p) == 10


def test_graph_exec_update_accepts_equal_child_graphs(soft, kernels, stream):
    """An executable graph can be updated to a definition with an equal child graph.

    The comparison of child graphs must not depend on the addresses of their nodes. Each launch uses
    the parameters of the last update.
    """
    a = soft.ints(0)
    executable = None
    for value in range(1, 21):
        child = soft.cuGraphCreate(0)
        graph = soft.cuGraphCreate(0)
        last: list = []
        for _ in range(6):
            last = [soft.add_int_kernel(child, last, kernels.add, a, value)]
        soft.cuGraphAddChildGraphNode(graph, [], 0, child)
        executable = executable or soft.cuGraphInstantiate(graph, 0)
        soft.cuGraphExecUpdate(executable, graph)
        soft.cuGraphLaunch(executable, stream)
    soft.cuStreamSynchronize(stream)
    assert soft.value(a) == 6 * sum(range(1, 21))
