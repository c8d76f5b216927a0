"""Updates of executables on the soft device: single nodes, switches, whole graphs."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import softcuda_util as util
from softcuda_util import code, copy_params, fill_params

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
