"""Explicit graphs on the soft device: order, concurrency, structure, queries, updates."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest
from softcuda_util import CALLBACK, USLEEP, code, codes


@pytest.fixture
def log(soft):
    """A log that kernels append to: the count, then the entries."""
    return soft.ints(*[0] * 128)


def entries(soft, log):
    """What a log holds."""
    words = soft.get(log, 128, np.int32)
    return words[1 : 1 + words[0]].tolist()


def test_branches_overlap(soft, kernels, stream, graph, words):
    """A kernel that waits for a host node of another branch finishes: both really run at once."""
    out = soft.ints(0)
    callback = CALLBACK(lambda _: time.sleep(0.03) or words.__setitem__(0, 9))
    fork = soft.cuGraphAddEmptyNode(graph, [], 0)
    soft.add_kernel(graph, [fork], kernels.wait_for, 1, 1, words.device, out)
    soft.add_host(graph, [fork], callback)
    soft.replay(graph, stream)
    assert soft.value(out) == 9


def test_structure_reads_back(soft, kernels, graph):
    """Nodes, edges and parameters can be read from a definition; clusters of one block are kept
    and given back, those of several refused."""
    p = soft.ints(0)
    a = soft.add_kernel(graph, [], kernels.add, 3, (4, 2, 1), p, np.int32(77))
    c = soft.cuGraphAddEmptyNode(graph, [], 0)
    b = soft.add_host(graph, [a, c], USLEEP, 12)
    nodes, count = soft.cuGraphGetNodes(graph, 8)
    assert count == 3 and [int(n) for n in nodes[:3]] == [int(a), int(c), int(b)]
    sources, targets, _, edges = soft.cuGraphGetEdges(graph, 8)
    pairs = {(int(x), int(y)) for x, y in zip(sources[:edges], targets[:edges], strict=True)}
    assert pairs == {(int(a), int(b)), (int(c), int(b))}
    kernel = soft.cuGraphKernelNodeGetParams(a)
    assert int(kernel.func) == int(kernels.add) and (kernel.gridDimX, kernel.blockDimY) == (3, 2)
    table = (ctypes.c_uint64 * 2).from_address(int(kernel.kernelParams))
    assert ctypes.c_uint64.from_address(table[0]).value == p
    assert ctypes.c_int.from_address(table[1]).value == 77
    assert int(soft.cuGraphHostNodeGetParams(b).userData) == 12
    cluster = soft.d.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value = soft.cuGraphKernelNodeGetAttribute(a, cluster)
    value.clusterDim.x = value.clusterDim.y = value.clusterDim.z = 1
    soft.cuGraphKernelNodeSetAttribute(a, cluster, value)
    assert soft.cuGraphKernelNodeGetAttribute(a, cluster).clusterDim.x == 1
    value.clusterDim.x = 2
    assert code(soft.d.cuGraphKernelNodeSetAttribute(a, cluster, value)) == "NOT_SUPPORTED"


def test_programmatic_edges_are_kept_and_waited_for(soft, kernels, stream, graph, log):
    """They join kernels only, read back, order like full ones, and make another shape; they go with
    their nodes."""
    d = soft.d
    full = soft.cuGraphCreate(0)
    edge = d.CUgraphEdgeData()
    edge.from_port = 1
    edge.type = d.CUgraphDependencyType(1)
    for one, data in ((graph, [edge]), (full, None)):
        last: list = []
        for i in range(3):
            params = soft.node_params("KERNEL")
            given, keep = soft.kernel_params(kernels.append, 1, 1, log, np.int32(i))
            for name in (
                "func",
                "gridDimX",
                "gridDimY",
                "gridDimZ",
                "blockDimX",
                "blockDimY",
                "blockDimZ",
                "kernelParams",
            ):
                setattr(params.kernel, name, getattr(given, name))
            last = [soft.cuGraphAddNode(one, last, data if last else None, len(last), params)]
    soft.replay(graph, stream)
    assert entries(soft, log) == [0, 1, 2] and keep
    *_, data, count = soft.cuGraphGetEdges(graph, 8)
    assert [(e.from_port, e.to_port, int(e.type)) for e in data[:count]] == [(1, 0, 1)] * 2
    executable = soft.cuGraphInstantiate(graph, 0)
    assert code(d.cuGraphExecUpdate(executable, full)) == "GRAPH_EXEC_UPDATE_FAILURE"
    params, (first, last, *_) = d.CUgraphNodeParams(), soft.cuGraphGetNodes(graph, 8)[0]
    params.type = d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY
    assert code(d.cuGraphAddNode(graph, [first], [edge], 1, params)) == "INVALID_VALUE"
    edge.from_port = 3
    assert code(d.cuGraphAddNode(graph, [first], [edge], 1, params)) == "INVALID_VALUE"
    count = ctypes.c_size_t(1)
    nodes = (ctypes.c_void_p * 2)()
    lossy = soft.lib.cuGraphGetEdges_v2(
        ctypes.c_void_p(int(graph)), nodes, nodes, None, ctypes.byref(count)
    )
    assert lossy == int(d.CUresult.CUDA_ERROR_LOSSY_QUERY)
    soft.cuGraphDestroyNode(last)
    assert soft.cuGraphGetEdges(graph, 8)[-1] == 0


def test_bad_structures_are_refused(soft, graph):
    """Foreign and duplicate dependencies and unknown node types are refused."""
    d = soft.d
    elsewhere = soft.cuGraphCreate(0)
    foreign = soft.cuGraphAddEmptyNode(elsewhere, [], 0)
    a = soft.cuGraphAddEmptyNode(graph, [], 0)
    bad = [d.cuGraphAddEmptyNode(graph, deps, len(deps)) for deps in ([foreign], [a, a])]
    assert codes(*bad) == {"INVALID_VALUE"}
    params = soft.node_params("MEM_ALLOC")
    assert code(d.cuGraphAddNode(graph, [], None, 0, params)) == "NOT_SUPPORTED"


def test_an_executable_is_independent_of_its_definition(soft, kernels, stream, graph):
    """Destroying or changing the definition leaves an executable as it was instantiated."""
    p = soft.ints(0)
    executables = []
    for value in (1, 99):
        soft.add_kernel(graph, [], kernels.add, 1, 1, p, np.int32(value))
        executables.append(soft.cuGraphInstantiate(graph, 0))
    soft.cuGraphDestroy(graph)
    for executable in executables:
        soft.play(executable, stream)
    assert soft.value(p) == 101


def test_child_graphs(soft, kernels, stream, graph, log):
    """A child is copied into its parent and runs between its node's neighbours."""
    append = kernels.append
    child = soft.cuGraphCreate(0)
    x = soft.add_kernel(child, [], append, 1, 1, log, np.int32(2))
    soft.add_kernel(child, [x], append, 1, 1, log, np.int32(3))
    a = soft.add_kernel(graph, [], append, 1, 1, log, np.int32(1))
    node = soft.cuGraphAddChildGraphNode(graph, [a], 1, child)
    soft.add_kernel(graph, [node], append, 1, 1, log, np.int32(4))
    soft.add_kernel(child, [], append, 1, 1, log, np.int32(99))  # after the fact: not in the copy
    soft.cuGraphDestroy(child)
    soft.replay(graph, stream)
    assert entries(soft, log) == [1, 2, 3, 4]


def test_launches_and_nodes_are_counted(soft, kernels, stream, graph):
    """Counters tell launches, nodes, kernels and host functions apart; no nodes are none."""
    empty = soft.cuGraphInstantiate(graph, 0)
    soft.cuGraphUpload(empty, stream)
    soft.cuGraphLaunch(empty, stream)
    a = soft.add_kernel(graph, [], kernels.add, 1, 1, soft.ints(0), np.int32(1))
    soft.add_host(graph, [a], USLEEP)
    names = ("graph_launch", "node", "kernel_launch", "host_func")
    before = [soft.count(name) for name in names]
    soft.replay(graph, stream, 5)
    assert [soft.count(n) - b for n, b in zip(names, before, strict=True)] == [5, 10, 5, 5]


def test_set_params_change_later_launches_only(soft, kernels, stream, graph, log):
    """Launches already queued keep the parameters they were queued with; host nodes have none to
    change, and cannot be disabled."""
    gate = threading.Event()
    callback = CALLBACK(lambda _: gate.wait(10) and None)
    hold = soft.add_host(graph, [], callback)
    node = soft.add_kernel(graph, [hold], kernels.append, 1, 1, log, np.int32(1))
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.cuGraphLaunch(executable, stream)
    for value in (2, 3):
        params, keep = soft.kernel_params(kernels.append, 1, 1, log, np.int32(value))
        soft.cuGraphExecKernelNodeSetParams(executable, node, params)
        soft.cuGraphLaunch(executable, stream)
    gate.set()
    soft.cuStreamSynchronize(stream)
    assert entries(soft, log) == [1, 2, 3]
    wrong = (
        soft.d.cuGraphExecKernelNodeSetParams(executable, hold, params),
        soft.d.cuGraphNodeSetEnabled(executable, hold, 0),
    )
    assert codes(*wrong) == {"INVALID_VALUE"} and keep


def test_whole_graph_update(soft, kernels, stream):
    """cuGraphExecUpdate takes a definition of equal topology and names what differs otherwise."""
    p = soft.ints(0)

    def define(value: int, second: str = "kernel"):
        graph = soft.cuGraphCreate(0)
        a = soft.add_kernel(graph, [], kernels.add, 1, 1, p, np.int32(value))
        if second == "host":
            soft.add_host(graph, [a], USLEEP)
        else:
            soft.add_kernel(graph, [a], kernels.scale, 1, 1, p, np.int32(2))
        if second == "and more":
            soft.cuGraphAddEmptyNode(graph, [], 0)
        return graph

    executable = soft.cuGraphInstantiate(define(1), 0)
    soft.cuGraphExecUpdate(executable, define(5))
    for second, reason in (("host", "NODE_TYPE_CHANGED"), ("and more", "TOPOLOGY_CHANGED")):
        graph = define(5, second)
        info = soft.d.CUgraphExecUpdateResultInfo()  # the bindings give none after a failure
        words = (int(executable), int(graph), info.getPtr())
        error = soft.lib.cuGraphExecUpdate_v2(*map(ctypes.c_void_p, words))
        assert error == 910
        assert info.result.name == f"CU_GRAPH_EXEC_UPDATE_ERROR_{reason}"
    soft.play(executable, stream)
    assert soft.value(p) == 10


def test_updates_know_child_graphs_wherever_their_nodes_lie(soft, kernels, stream):
    """Definitions of one shape agree, also with several nodes in a child; new parameters count."""
    a = soft.ints(0)
    executable = None
    for value in range(1, 21):
        child, graph = (soft.cuGraphCreate(0) for _ in range(2))
        last: list = []
        for _ in range(6):
            last = [soft.add_kernel(child, last, kernels.add, 1, 1, a, np.int32(value))]
        soft.cuGraphAddChildGraphNode(graph, [], 0, child)
        executable = executable or soft.cuGraphInstantiate(graph, 0)
        soft.cuGraphExecUpdate(executable, graph)
        soft.cuGraphLaunch(executable, stream)
    soft.cuStreamSynchronize(stream)
    assert soft.value(a) == 6 * sum(range(1, 21))
