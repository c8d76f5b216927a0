"""Conditional nodes on the soft device, against the rules of the driver's documentation."""

from __future__ import annotations

import numpy as np
import pytest
from softcuda_util import USLEEP, address, code, codes

KERNELS = r"""
extern "C" __global__ void add(int* p, int value) { *p += value; }
extern "C" __global__ void decide(unsigned long long handle, const int* p, int below) {
  cudaGraphSetConditional(handle, *p < below ? 1u : 0u);
}
extern "C" __global__ void set(cudaGraphConditionalHandle h, unsigned v) {
  cudaGraphSetConditional(h, v);
}
"""
IF, WHILE, SWITCH = 0, 1, 2


def condition(soft, graph, default: int | None = None):
    flags = 0 if default is None else 1
    return soft.cuGraphConditionalHandleCreate(graph, soft.context, default or 0, flags)


def add(soft, graph, deps, handle, kind: int, size: int = 1):
    said, node, bodies = soft.conditional(graph, deps, handle, kind, size)
    assert said == "SUCCESS"
    return node, bodies


def word(handle):
    return np.uint64(int(handle))


def test_while_runs_until_its_condition_is_zero(soft, kernels, stream, graph) -> None:
    """The body repeats as long as a kernel keeps the condition set; default at each launch."""
    a, b = soft.ints(0), soft.ints(0)
    handle = condition(soft, graph, 1)
    node, (body,) = add(soft, graph, [], handle, WHILE)
    step = soft.add_kernel(body, [], kernels.add, 1, 1, a, np.int32(3))
    soft.add_kernel(body, [step], kernels.decide, 1, 1, word(handle), a, np.int32(20))
    soft.add_kernel(graph, [node], kernels.add, 1, 1, b, np.int32(1))
    soft.replay(graph, stream, 2)
    assert soft.value(a) == 24 and soft.value(b) == 2


@pytest.mark.parametrize(("kind", "size", "table"), [
    (IF, 1, {0: 0, 1: 1, 7: 1}), (IF, 2, {0: 10, 5: 1}), (SWITCH, 3, {0: 1, 1: 10, 2: 100, 3: 0}),
])  # fmt: skip
def test_if_else_and_switch_choose_one_body(soft, kernels, stream, kind, size, table) -> None:
    """IF takes body 0 or its else; SWITCH body n, or none beyond its size."""
    for value, expected in table.items():
        graph, a = soft.cuGraphCreate(0), soft.ints(0)
        handle = condition(soft, graph)
        choose = soft.add_kernel(graph, [], kernels.set, 1, 1, word(handle), np.uint32(value))
        _, bodies = add(soft, graph, [choose], handle, kind, size)
        for i, body in enumerate(bodies):
            soft.add_kernel(body, [], kernels.add, 1, 1, a, np.int32(10**i))
        soft.replay(graph, stream)
        assert soft.value(a) == expected, value


def test_loops_nest(soft, kernels, stream, graph) -> None:
    """A WHILE inside a WHILE: the inner condition is set again by each outer turn."""
    a, inner_count = soft.ints(0), soft.ints(0)
    outer, inner = condition(soft, graph, 1), condition(soft, graph)
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
    """Host and event nodes and pageable copies are refused in a body, also in a child graph."""
    d, child = soft.d, soft.cuGraphCreate(0)
    _, (body,) = add(soft, graph, [], condition(soft, graph, 1), IF)
    p = d.CUDA_HOST_NODE_PARAMS()
    p.fn = d.CUhostFn(address(USLEEP))
    soft.cuGraphAddHostNode(child, [], 0, p)
    pageable = np.zeros(1, np.int32)
    c = soft.copy_params(soft.ints(0), pageable.ctypes.data, 4)
    assert codes(
        d.cuGraphAddHostNode(body, [], 0, p), d.cuGraphAddChildGraphNode(body, [], 0, child),
        d.cuGraphAddMemcpyNode(body, [], 0, c, soft.context),
        d.cuGraphAddEventRecordNode(body, [], 0, event),
        d.cuGraphAddEventWaitNode(body, [], 0, event)) == {"NOT_SUPPORTED"}
    assert soft.cuGraphGetNodes(body)[-1] == 0


def test_no_copies_of_graphs_with_conditionals(soft, graph) -> None:
    """Cloning such a graph, or adding it as a child, is refused."""
    add(soft, graph, [], condition(soft, graph, 0), IF)
    parent = soft.cuGraphCreate(0)
    assert codes(soft.d.cuGraphClone(graph),
                 soft.d.cuGraphAddChildGraphNode(parent, [], 0, graph)) == {"NOT_SUPPORTED"}


def test_handles_steer_one_node_each(soft, graph) -> None:
    """A handle without a node, used twice, of another graph or of other bodies is refused."""
    elsewhere = soft.cuGraphCreate(0)
    foreign, handle = condition(soft, elsewhere, 1), condition(soft, graph, 1)
    assert soft.conditional(graph, [], foreign, IF)[0] == "INVALID_VALUE"
    assert code(soft.d.cuGraphInstantiate(elsewhere, 0)) == "INVALID_VALUE"
    assert soft.conditional(graph, [], handle, WHILE, 2)[0] == "INVALID_VALUE"
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
