"""Explicit graphs on the soft device: order, concurrency, structure, queries."""

from __future__ import annotations

import ctypes
import time
from typing import Any

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


def test_every_node_type_in_one_chain(soft, module, stream, graph):
    """Fill, kernel, copy, host and empty nodes run in dependency order on each replay."""
    a, b = soft.alloc(4), soft.alloc(4)
    host = soft.ok(soft.d.cuMemHostAlloc(64, 3))
    value = ctypes.c_int.from_address(host)
    seen: list[int] = []
    callback = CALLBACK(lambda _: seen.append(value.value))
    n0 = soft.ok(
        soft.d.cuGraphAddMemsetNode(graph, [], 0, fill_params(soft, a, 5, 1), soft.context)
    )
    n1 = soft.add_kernel(graph, [n0], soft.function(module, "add"), 1, 1, a, np.int32(2))
    n2 = soft.ok(
        soft.d.cuGraphAddMemcpyNode(graph, [n1], 1, copy_params(soft, b, a, 4), soft.context)
    )
    n3 = soft.ok(soft.d.cuGraphAddEmptyNode(graph, [n2], 1))
    n4 = soft.add_kernel(graph, [n3], soft.function(module, "scale"), 1, 1, b, np.int32(3))
    n5 = soft.ok(
        soft.d.cuGraphAddMemcpyNode(graph, [n4], 1, copy_params(soft, host, b, 4), soft.context)
    )
    soft.add_host(graph, [n5], util.address(callback))
    run(soft, graph, stream, 3)
    assert seen == [21, 21, 21]
    types = [soft.ok(soft.d.cuGraphNodeGetType(n)).value for n in (n0, n1, n2, n3)]
    assert types == [2, 0, 1, 5]
    soft.free(a, b)
    soft.ok(soft.d.cuMemFreeHost(host))


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


def test_random_graphs_respect_every_edge(soft, module, stream):
    """In graphs with random edges each node runs once a replay, after all it depends on."""
    rng = np.random.default_rng(3)
    append = soft.function(module, "append")
    for _ in range(5):
        n = 40
        graph = soft.ok(soft.d.cuGraphCreate(0))
        order: list[int] = []
        callbacks: list[Any] = []
        nodes: list[Any] = []
        edges: list[tuple[int, int]] = []
        for i in range(n):
            wanted = [j for j in range(i) if rng.random() < 0.08]
            edges += [(j, i) for j in wanted]
            deps = [nodes[j] for j in wanted]
            if rng.random() < 0.4:
                callbacks.append(CALLBACK(lambda _, i=i, order=order: order.append(i)))
                nodes.append(soft.add_host(graph, deps, util.address(callbacks[-1])))
            else:
                # A device node is seen through a host node of its own right behind it.
                log = soft.put(np.zeros(4, np.int32))
                first = soft.add_kernel(graph, deps, append, 1, 1, log, np.int32(i))
                callbacks.append(CALLBACK(lambda _, i=i, order=order: order.append(i)))
                nodes.append(soft.add_host(graph, [first], util.address(callbacks[-1])))
        run(soft, graph, stream, 2)
        assert len(order) == 2 * n
        for replay in (order[:n], order[n:]):
            assert sorted(replay) == list(range(n))
            position = {node: at for at, node in enumerate(replay)}
            assert all(position[a] < position[b] for a, b in edges)
        soft.ok(soft.d.cuGraphDestroy(graph))


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
