"""Explicit graphs on the soft device: order, concurrency, structure, queries, updates."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import softcuda_util as util
from softcuda_util import code, copy_params, fill_params
from softcuda_util import replay as run

KERNELS = r"""
extern "C" __global__ void append(int* log, int value) { log[1 + log[0]++] = value; }
extern "C" __global__ void add(int* p, int value) { *p += value; }
extern "C" __global__ void scale(int* p, int value) { *p *= value; }
extern "C" __global__ void spin_until(const volatile int* flag, int* out, int value) {
  while (*flag != value) {}
  *out = value;
}
"""
USLEEP = util.address(ctypes.CDLL(None).usleep)
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def test_branches_overlap_a_kernel_with_a_host_node(soft, module, stream, graph):
    """A kernel that waits for a host node of another branch finishes: both really run at once."""
    host = soft.ok(soft.d.cuMemHostAlloc(64, 3))
    flag = ctypes.c_int.from_address(host)
    flag.value = 0
    alias = int(soft.ok(soft.d.cuMemHostGetDevicePointer(host, 0)))
    out = soft.put(np.zeros(1, np.int32))

    def release(_):
        time.sleep(0.03)
        flag.value = 9

    callback = CALLBACK(release)
    fork = soft.ok(soft.d.cuGraphAddEmptyNode(graph, [], 0))
    soft.add_kernel(
        graph, [fork], soft.function(module, "spin_until"), 1, 1, alias, out, np.int32(9)
    )
    soft.add_host(graph, [fork], util.address(callback))
    run(soft, graph, stream)
    assert soft.get(out, 1, np.int32)[0] == 9
    soft.free(out)
    soft.ok(soft.d.cuMemFreeHost(host))


def test_launches_of_one_executable_are_serialised():
    """Two streams launch one executable at once: the second launch starts after the first."""
    done = util.run_child(
        f"""
        m = s.module({KERNELS!r})
        CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        inside, worst = [0], [0]
        def enter(_):
            inside[0] += 1
            worst[0] = max(worst[0], inside[0])
        def leave(_):
            time.sleep(0.01)
            inside[0] -= 1
        enter_c, leave_c = CALLBACK(enter), CALLBACK(leave)
        raw = lambda c: ctypes.cast(c, ctypes.c_void_p).value
        log = s.put(np.zeros(100, np.int32))
        g = s.ok(d.cuGraphCreate(0))
        a = s.add_host(g, [], raw(enter_c))
        b = s.add_kernel(g, [a], s.function(m, "append"), 1, 1, log, np.int32(1))
        c = s.add_kernel(g, [b], s.function(m, "append"), 1, 1, log, np.int32(2))
        s.add_host(g, [c], raw(leave_c))
        e = s.ok(d.cuGraphInstantiate(g, 0))
        streams = [s.stream(), s.stream()]
        for i in range(10):
            s.ok(d.cuGraphLaunch(e, streams[i % 2]))
        for q in streams: s.ok(d.cuStreamSynchronize(q))
        print(worst[0], s.get(log, 21, np.int32).tolist() == [20] + [1, 2] * 10)
        """,
        SOFTCUDA_WORKERS="2",
    )
    assert done.stdout.split() == ["1", "True"], done.stderr


def test_structure_reads_back(soft, module, graph, tmp_path):
    """Nodes, edges, roots, dependencies and parameters can be read from a definition."""
    p = soft.alloc(4)
    add = soft.function(module, "add")
    a = soft.add_kernel(graph, [], add, 3, (4, 2, 1), p, np.int32(77))
    b = soft.add_host(graph, [a], USLEEP, 12)
    c = soft.ok(soft.d.cuGraphAddEmptyNode(graph, [], 0))
    soft.ok(soft.d.cuGraphAddDependencies(graph, [c], [b], None, 1))
    nodes, count = soft.ok(soft.d.cuGraphGetNodes(graph, 8))
    assert count == 3 and [int(n) for n in nodes[:3]] == [int(a), int(b), int(c)]
    sources, targets, _, edges = soft.ok(soft.d.cuGraphGetEdges(graph, 8))
    pairs = {(int(x), int(y)) for x, y in zip(sources[:edges], targets[:edges], strict=True)}
    assert pairs == {(int(a), int(b)), (int(c), int(b))}
    roots, count = soft.ok(soft.d.cuGraphGetRootNodes(graph, 8))
    assert {int(n) for n in roots[:count]} == {int(a), int(c)}
    kernel = soft.ok(soft.d.cuGraphKernelNodeGetParams(a))
    assert int(kernel.func) == int(add) and (kernel.gridDimX, kernel.blockDimY) == (3, 2)
    table = (ctypes.c_uint64 * 2).from_address(int(kernel.kernelParams))
    assert ctypes.c_uint64.from_address(table[0]).value == p
    assert ctypes.c_int.from_address(table[1]).value == 77
    assert int(soft.ok(soft.d.cuGraphHostNodeGetParams(b)).userData) == 12
    path = tmp_path / "graph.dot"
    soft.ok(soft.d.cuGraphDebugDotPrint(graph, str(path).encode(), 0))
    text = path.read_text()
    assert "kernel add" in text and text.count("->") == 2
    soft.free(p)


def test_bad_structures_are_refused(soft, module, graph):
    """Foreign and duplicate dependencies, cycles and unknown node types are refused."""
    other = soft.ok(soft.d.cuGraphCreate(0))
    foreign = soft.ok(soft.d.cuGraphAddEmptyNode(other, [], 0))
    a = soft.ok(soft.d.cuGraphAddEmptyNode(graph, [], 0))
    b = soft.ok(soft.d.cuGraphAddEmptyNode(graph, [a], 1))
    invalid = "CUDA_ERROR_INVALID_VALUE"
    assert code(soft.d.cuGraphAddEmptyNode(graph, [foreign], 1)) == invalid
    assert code(soft.d.cuGraphAddEmptyNode(graph, [a, a], 2)) == invalid
    soft.ok(soft.d.cuGraphAddDependencies(graph, [b], [a], None, 1))
    assert code(soft.d.cuGraphInstantiate(graph, 0)) == invalid
    assert "cycle" in soft.refusal()
    soft.ok(soft.d.cuGraphRemoveDependencies(graph, [b], [a], None, 1))
    soft.ok(soft.d.cuGraphExecDestroy(soft.ok(soft.d.cuGraphInstantiate(graph, 0))))
    params = soft.d.CUgraphNodeParams()
    params.type = soft.d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEM_ALLOC
    assert code(soft.d.cuGraphAddNode(graph, [], None, 0, params)) == "CUDA_ERROR_NOT_SUPPORTED"
    soft.ok(soft.d.cuGraphDestroy(other))
    assert code(soft.d.cuGraphAddEmptyNode(other, [], 0)) == "CUDA_ERROR_INVALID_HANDLE"


def test_an_executable_is_independent_of_its_definition(soft, module, stream):
    """Destroying or changing the definition leaves an executable as it was instantiated."""
    p = soft.put(np.zeros(1, np.int32))
    graph = soft.ok(soft.d.cuGraphCreate(0))
    node = soft.add_kernel(graph, [], soft.function(module, "add"), 1, 1, p, np.int32(1))
    executable = soft.ok(soft.d.cuGraphInstantiate(graph, 0))
    params, keep = soft.kernel_params(soft.function(module, "add"), 1, 1, p, np.int32(100))
    soft.ok(soft.d.cuGraphKernelNodeSetParams(node, params))
    del keep
    second = soft.ok(soft.d.cuGraphInstantiate(graph, 0))
    soft.ok(soft.d.cuGraphDestroy(graph))
    soft.ok(soft.d.cuGraphLaunch(executable, stream))
    soft.ok(soft.d.cuGraphLaunch(second, stream))
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert soft.get(p, 1, np.int32)[0] == 101
    for item in (executable, second):
        soft.ok(soft.d.cuGraphExecDestroy(item))
    soft.free(p)


def test_child_graphs_and_clones(soft, module, stream, graph):
    """A child is cloned into its parent and runs between its node's neighbours."""
    log = soft.put(np.zeros(16, np.int32))
    append = soft.function(module, "append")
    child = soft.ok(soft.d.cuGraphCreate(0))
    x = soft.add_kernel(child, [], append, 1, 1, log, np.int32(2))
    soft.add_kernel(child, [x], append, 1, 1, log, np.int32(3))
    a = soft.add_kernel(graph, [], append, 1, 1, log, np.int32(1))
    node = soft.ok(soft.d.cuGraphAddChildGraphNode(graph, [a], 1, child))
    soft.add_kernel(graph, [node], append, 1, 1, log, np.int32(4))
    inner = soft.ok(soft.d.cuGraphChildGraphNodeGetGraph(node))
    assert int(inner) != int(child)
    soft.add_kernel(child, [], append, 1, 1, log, np.int32(99))  # after the fact: not in the clone
    clone = soft.ok(soft.d.cuGraphClone(graph))
    twin = soft.ok(soft.d.cuGraphNodeFindInClone(a, clone))
    assert int(twin) != int(a)
    soft.ok(soft.d.cuGraphDestroy(child))
    run(soft, clone, stream)
    assert soft.get(log, 6, np.int32).tolist() == [4, 1, 2, 3, 4, 0]
    soft.ok(soft.d.cuGraphDestroy(clone))
    run(soft, graph, stream)
    assert soft.get(log, 9, np.int32).tolist() == [8, 1, 2, 3, 4, 1, 2, 3, 4]
    soft.free(log)


def test_empty_graphs_and_uploads(soft, stream, graph):
    """A graph without nodes launches; uploads are accepted on any stream."""
    executable = soft.ok(soft.d.cuGraphInstantiate(graph, 0))
    soft.ok(soft.d.cuGraphUpload(executable, stream))
    soft.ok(soft.d.cuGraphLaunch(executable, stream))
    soft.ok(soft.d.cuStreamSynchronize(stream))
    soft.ok(soft.d.cuGraphExecDestroy(executable))
    assert code(soft.d.cuGraphLaunch(executable, stream)) == "CUDA_ERROR_INVALID_HANDLE"


def test_launches_and_nodes_are_counted(soft, module, stream, graph):
    """Counters tell launches, nodes, kernels and host functions apart."""
    p = soft.put(np.zeros(1, np.int32))
    a = soft.add_kernel(graph, [], soft.function(module, "add"), 1, 1, p, np.int32(1))
    soft.add_host(graph, [a], USLEEP, 0)
    names = ("graph_launch", "node", "kernel_launch", "host_func")
    before = [soft.count(name) for name in names]
    run(soft, graph, stream, 5)
    assert [soft.count(n) - b for n, b in zip(names, before, strict=True)] == [5, 10, 5, 5]
    soft.free(p)


# ---- updates of executables --------------------------------------------------------------------
def test_set_params_change_later_launches_only(soft, module, stream, graph):
    """Launches already queued keep the parameters they were queued with."""
    p = soft.put(np.zeros(32, np.int32))
    append = soft.function(module, "append")
    gate = threading.Event()
    callback = CALLBACK(lambda _: gate.wait(10) and None)
    hold = soft.add_host(graph, [], util.address(callback))
    node = soft.add_kernel(graph, [hold], append, 1, 1, p, np.int32(1))
    executable = soft.ok(soft.d.cuGraphInstantiate(graph, 0))
    soft.ok(soft.d.cuGraphLaunch(executable, stream))
    for value in (2, 3):
        params, keep = soft.kernel_params(append, 1, 1, p, np.int32(value))
        soft.ok(soft.d.cuGraphExecKernelNodeSetParams(executable, node, params))
        soft.ok(soft.d.cuGraphLaunch(executable, stream))
    gate.set()
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert soft.get(p, 4, np.int32).tolist() == [3, 1, 2, 3]
    wrong = soft.d.cuGraphExecKernelNodeSetParams(executable, hold, params)
    assert code(wrong) == "CUDA_ERROR_INVALID_VALUE"
    del keep
    soft.ok(soft.d.cuGraphExecDestroy(executable))
    soft.free(p)


def test_copy_and_fill_nodes_update(soft, stream, graph):
    """Memcpy and memset nodes of an executable take new parameters."""
    a, b, c = (soft.put(np.full(4, v, np.int32)) for v in (1, 2, 3))
    fill = soft.ok(
        soft.d.cuGraphAddMemsetNode(graph, [], 0, fill_params(soft, a, 7, 4), soft.context)
    )
    copy = soft.ok(
        soft.d.cuGraphAddMemcpyNode(graph, [fill], 1, copy_params(soft, b, a, 16), soft.context)
    )
    executable = soft.ok(soft.d.cuGraphInstantiate(graph, 0))
    soft.ok(
        soft.d.cuGraphExecMemsetNodeSetParams(
            executable, fill, fill_params(soft, a, 8, 4), soft.context
        )
    )
    soft.ok(
        soft.d.cuGraphExecMemcpyNodeSetParams(
            executable, copy, copy_params(soft, c, a, 8), soft.context
        )
    )
    soft.ok(soft.d.cuGraphLaunch(executable, stream))
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert soft.get(b, 4, np.int32).tolist() == [2] * 4
    assert soft.get(c, 4, np.int32).tolist() == [8, 8, 3, 3]
    soft.ok(soft.d.cuGraphExecDestroy(executable))
    soft.free(a, b, c)


def test_nodes_can_be_disabled(soft, module, stream, graph):
    """A disabled kernel node becomes empty and keeps the order; host nodes cannot be disabled."""
    p = soft.put(np.ones(1, np.int32))
    a = soft.add_kernel(graph, [], soft.function(module, "add"), 1, 1, p, np.int32(4))
    b = soft.add_kernel(graph, [a], soft.function(module, "scale"), 1, 1, p, np.int32(10))
    h = soft.add_host(graph, [b], USLEEP, 0)
    executable = soft.ok(soft.d.cuGraphInstantiate(graph, 0))
    assert soft.ok(soft.d.cuGraphNodeGetEnabled(executable, a)) == 1
    soft.ok(soft.d.cuGraphNodeSetEnabled(executable, a, 0))
    assert soft.ok(soft.d.cuGraphNodeGetEnabled(executable, a)) == 0
    for _ in range(2):
        soft.ok(soft.d.cuGraphLaunch(executable, stream))
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert soft.get(p, 1, np.int32)[0] == 100
    soft.ok(soft.d.cuGraphNodeSetEnabled(executable, a, 1))
    soft.ok(soft.d.cuGraphLaunch(executable, stream))
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert soft.get(p, 1, np.int32)[0] == 1040
    refused = soft.d.cuGraphNodeSetEnabled(executable, h, 0)
    assert code(refused) == "CUDA_ERROR_INVALID_VALUE"
    soft.ok(soft.d.cuGraphExecDestroy(executable))
    soft.free(p)


def test_whole_graph_update(soft, module, stream):
    """cuGraphExecUpdate takes a definition of equal topology and names what differs otherwise."""
    p = soft.put(np.zeros(1, np.int32))
    add, scale = soft.function(module, "add"), soft.function(module, "scale")

    def define(value: int, *, second: str = "kernel", extra: bool = False):
        graph = soft.ok(soft.d.cuGraphCreate(0))
        a = soft.add_kernel(graph, [], add, 1, 1, p, np.int32(value))
        if second == "kernel":
            soft.add_kernel(graph, [a], scale, 1, 1, p, np.int32(2))
        else:
            soft.add_host(graph, [a], USLEEP, 0)
        if extra:
            soft.ok(soft.d.cuGraphAddEmptyNode(graph, [], 0))
        return graph

    first = define(1)
    executable = soft.ok(soft.d.cuGraphInstantiate(first, 0))
    same, other, longer = define(5), define(5, second="host"), define(5, extra=True)
    soft.ok(soft.d.cuGraphExecUpdate(executable, same))
    result = soft.d.CUgraphExecUpdateResult
    for graph, reason in (
        (other, result.CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED),
        (longer, result.CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED),
    ):
        outcome = soft.d.cuGraphExecUpdate(executable, graph)
        assert code(outcome) == "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"
        info = soft.d.CUgraphExecUpdateResultInfo()
        error = soft.lib.cuGraphExecUpdate_v2(
            ctypes.c_void_p(int(executable)),
            ctypes.c_void_p(int(graph)),
            ctypes.c_void_p(info.getPtr()),
        )
        assert error == 910 and info.result == reason
    soft.ok(soft.d.cuGraphLaunch(executable, stream))
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert soft.get(p, 1, np.int32)[0] == 10
    soft.ok(soft.d.cuGraphExecDestroy(executable))
    for graph in (first, same, other, longer):
        soft.ok(soft.d.cuGraphDestroy(graph))
    soft.free(p)


def test_updates_know_child_graphs_wherever_their_nodes_lie(soft, module, stream):
    """Definitions of one shape agree, also with several nodes in a child; new parameters count."""
    a = soft.put(np.zeros(1, np.int32))
    function = soft.function(module, "add")
    executable, definitions = None, []
    for value in range(1, 21):
        child, graph = (soft.ok(soft.d.cuGraphCreate(0)) for _ in range(2))
        last: list = []
        for _ in range(6):
            last = [soft.add_kernel(child, last, function, 1, 1, a, np.int32(value))]
        soft.ok(soft.d.cuGraphAddChildGraphNode(graph, [], 0, child))
        soft.ok(soft.d.cuGraphDestroy(child))
        definitions.append(graph)
        if executable is None:
            executable = soft.ok(soft.d.cuGraphInstantiate(graph, 0))
        else:
            soft.ok(soft.d.cuGraphExecUpdate(executable, graph))
        soft.ok(soft.d.cuGraphLaunch(executable, stream))
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert soft.get(a, 1, np.int32)[0] == 6 * sum(range(1, 21))
    soft.ok(soft.d.cuGraphExecDestroy(executable))
    for graph in definitions:
        soft.ok(soft.d.cuGraphDestroy(graph))
    soft.free(a)
