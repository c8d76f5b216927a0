"""Conditional nodes on the soft device, against the rules of the driver's documentation."""

from __future__ import annotations

import numpy as np
import pytest
import softcuda_util as util
from softcuda_util import replay as run
from softcuda_util import short_code as code

KERNELS = r"""
extern "C" __global__ void add(int* p, int value) { *p += value; }
extern "C" __global__ void decide(unsigned long long handle, const int* p, int below) {
  cudaGraphSetConditional(handle, *p < below ? 1u : 0u);
}
extern "C" __global__ void set(cudaGraphConditionalHandle handle, unsigned value) {
  cudaGraphSetConditional(handle, value);
}
"""


@pytest.fixture(scope="module")
def soft():
    return util.device()


@pytest.fixture(scope="module")
def module(soft):
    made = soft.module(KERNELS)
    yield made
    soft.ok(soft.d.cuModuleUnload(made))


@pytest.fixture
def stream(soft):
    made = soft.stream()
    yield made
    soft.ok(soft.d.cuStreamDestroy(made))


@pytest.fixture
def graph(soft):
    made = soft.ok(soft.d.cuGraphCreate(0))
    yield made
    soft.ok(soft.d.cuGraphDestroy(made))


def condition(soft, graph, default: int | None = None):
    flags = 0 if default is None else 1
    return soft.ok(soft.d.cuGraphConditionalHandleCreate(graph, soft.context, default or 0, flags))


def params(soft, handle, kind: int, size: int = 1):
    p = soft.d.CUgraphNodeParams()
    p.type = soft.d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    p.conditional.handle = handle
    p.conditional.type = soft.d.CUgraphConditionalNodeType(kind)
    p.conditional.size = size
    p.conditional.ctx = soft.context
    return p


def add(soft, graph, deps, handle, kind: int, size: int = 1):
    p = params(soft, handle, kind, size)
    node = soft.ok(soft.d.cuGraphAddNode(graph, list(deps), None, len(deps), p))
    return node, p.conditional.phGraph_out


def test_while_runs_until_its_condition_is_zero(soft, module, stream, graph) -> None:
    """The body repeats as long as a kernel keeps the condition set; default at each launch."""
    a, b = soft.put(np.zeros(1, np.int32)), soft.put(np.zeros(1, np.int32))
    handle = condition(soft, graph, 1)
    node, (body,) = add(soft, graph, [], handle, 1)
    step = soft.add_kernel(body, [], soft.function(module, "add"), 1, 1, a, np.int32(3))
    soft.add_kernel(
        body, [step], soft.function(module, "decide"), 1, 1, np.uint64(int(handle)), a, np.int32(20)
    )
    soft.add_kernel(graph, [node], soft.function(module, "add"), 1, 1, b, np.int32(1))
    run(soft, graph, stream, 2)
    assert soft.get(a, 1, np.int32)[0] == 24 and soft.get(b, 1, np.int32)[0] == 2
    soft.free(a, b)


def test_if_else_and_switch_choose_one_body(soft, module, stream) -> None:
    """IF takes body 0 or its else; SWITCH body n, or none beyond its size."""
    for kind, size, table in (
        (0, 1, {0: 0, 1: 1, 7: 1}),
        (0, 2, {0: 10, 5: 1}),
        (2, 3, {0: 1, 1: 10, 2: 100, 3: 0}),
    ):
        for value, expected in table.items():
            graph = soft.ok(soft.d.cuGraphCreate(0))
            a = soft.put(np.zeros(1, np.int32))
            handle = condition(soft, graph)
            choose = soft.add_kernel(
                graph, [], soft.function(module, "set"), 1, 1, np.uint64(int(handle)),
                np.uint32(value),
            )  # fmt: skip
            _, bodies = add(soft, graph, [choose], handle, kind, size)
            for i, body in enumerate(bodies):
                soft.add_kernel(body, [], soft.function(module, "add"), 1, 1, a, np.int32(10**i))
            run(soft, graph, stream)
            assert soft.get(a, 1, np.int32)[0] == expected, (kind, size, value)
            soft.free(a)
            soft.ok(soft.d.cuGraphDestroy(graph))


def test_loops_nest(soft, module, stream, graph) -> None:
    """A WHILE inside a WHILE: the inner condition is set again by each outer turn."""
    a, inner_count = soft.put(np.zeros(1, np.int32)), soft.put(np.zeros(1, np.int32))
    f = {name: soft.function(module, name) for name in ("add", "decide", "set")}
    outer, inner = condition(soft, graph, 1), condition(soft, graph)
    _, (body,) = add(soft, graph, [], outer, 1)
    zero = soft.d.CUDA_MEMSET_NODE_PARAMS()
    zero.dst, zero.elementSize = soft.d.CUdeviceptr(inner_count), 4
    zero.width, zero.height = 1, 1
    reset = soft.ok(soft.d.cuGraphAddMemsetNode(body, [], 0, zero, soft.context))
    arm = soft.add_kernel(body, [reset], f["set"], 1, 1, np.uint64(int(inner)), np.uint32(1))
    loop, (nested,) = add(soft, body, [arm], inner, 1)
    one = soft.add_kernel(nested, [], f["add"], 1, 1, a, np.int32(1))
    two = soft.add_kernel(nested, [one], f["add"], 1, 1, inner_count, np.int32(1))
    soft.add_kernel(
        nested, [two], f["decide"], 1, 1, np.uint64(int(inner)), inner_count, np.int32(5)
    )
    soft.add_kernel(body, [loop], f["decide"], 1, 1, np.uint64(int(outer)), a, np.int32(15))
    run(soft, graph, stream)
    assert soft.get(a, 1, np.int32)[0] == 15
    soft.free(a, inner_count)


def test_bodies_refuse_host_work(soft, module, graph) -> None:
    """Host nodes and pageable copies are refused in a body, also inside a child graph."""
    handle = condition(soft, graph, 1)
    _, (body,) = add(soft, graph, [], handle, 0)
    p = soft.d.CUDA_HOST_NODE_PARAMS()
    p.fn = soft.d.CUhostFn(1)
    assert code(soft.d.cuGraphAddHostNode(body, [], 0, p)) == "NOT_SUPPORTED"
    child = soft.ok(soft.d.cuGraphCreate(0))
    soft.ok(soft.d.cuGraphAddHostNode(child, [], 0, p))
    assert code(soft.d.cuGraphAddChildGraphNode(body, [], 0, child)) == "NOT_SUPPORTED"
    pageable = np.zeros(1, np.int32)
    device = soft.alloc(4)
    c = soft.d.CUDA_MEMCPY3D()
    c.srcMemoryType = soft.d.CUmemorytype.CU_MEMORYTYPE_HOST
    c.dstMemoryType = soft.d.CUmemorytype.CU_MEMORYTYPE_DEVICE
    c.srcHost, c.dstDevice = pageable.ctypes.data, soft.d.CUdeviceptr(device)
    c.WidthInBytes, c.Height, c.Depth = 4, 1, 1
    assert code(soft.d.cuGraphAddMemcpyNode(body, [], 0, c, soft.context)) == "NOT_SUPPORTED"
    assert soft.ok(soft.d.cuGraphGetNodes(body))[-1] == 0
    soft.ok(soft.d.cuGraphDestroy(child))
    soft.free(device)


def test_no_copies_of_graphs_with_conditionals(soft, stream, graph) -> None:
    """Cloning such a graph, or adding it as a child, is refused."""
    add(soft, graph, [], condition(soft, graph, 0), 0)
    parent = soft.ok(soft.d.cuGraphCreate(0))
    assert code(soft.d.cuGraphClone(graph)) == "NOT_SUPPORTED"
    assert code(soft.d.cuGraphAddChildGraphNode(parent, [], 0, graph)) == "NOT_SUPPORTED"
    soft.ok(soft.d.cuGraphDestroy(parent))


def test_handles_steer_one_node_each(soft, stream, graph) -> None:
    """A handle without a node, used twice, or of another graph is refused."""
    other = soft.ok(soft.d.cuGraphCreate(0))
    foreign = condition(soft, other, 1)
    result = soft.d.cuGraphAddNode(graph, [], None, 0, params(soft, foreign, 0))
    assert code(result) == "INVALID_VALUE"
    assert code(soft.d.cuGraphInstantiate(other, 0)) == "INVALID_VALUE"
    handle = condition(soft, graph, 1)
    assert code(soft.d.cuGraphAddNode(graph, [], None, 0, params(soft, handle, 1, 2))) == (
        "INVALID_VALUE"
    )
    add(soft, graph, [], handle, 0)
    result = soft.d.cuGraphAddNode(graph, [], None, 0, params(soft, handle, 0))
    assert code(result) == "INVALID_VALUE"
    soft.ok(soft.d.cuGraphDestroy(other))


def test_updates_reach_into_bodies(soft, module, stream, graph) -> None:
    """A node of a body takes new parameters in the executable, and can be disabled there."""
    a = soft.put(np.zeros(1, np.int32))
    function = soft.function(module, "add")
    _, (body,) = add(soft, graph, [], condition(soft, graph, 1), 0)
    node = soft.add_kernel(body, [], function, 1, 1, a, np.int32(1))
    executable = soft.ok(soft.d.cuGraphInstantiate(graph, 0))
    new, keep = soft.kernel_params(function, 1, 1, a, np.int32(50))
    soft.ok(soft.d.cuGraphExecKernelNodeSetParams(executable, node, new))
    soft.ok(soft.d.cuGraphLaunch(executable, stream))
    soft.ok(soft.d.cuGraphNodeSetEnabled(executable, node, 0))
    soft.ok(soft.d.cuGraphLaunch(executable, stream))
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert soft.get(a, 1, np.int32)[0] == 50 and keep
    soft.ok(soft.d.cuGraphExecDestroy(executable))
    soft.free(a)
