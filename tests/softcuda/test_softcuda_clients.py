"""What other users of the driver's interface rely on: cuda.core, cuda-python, and their users."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
import softcuda_util as util
from softcuda_util import short_code

KERNELS = """
extern "C" __global__ void add(int* p, int n) { *p += n; }
extern "C" __global__ void say(int n) { printf("thread %d of %s\\n", n + threadIdx.x, "block"); }
"""
PAGEABLE = np.zeros(64, np.uint8)


@pytest.fixture(scope="module")
def soft():
    """The process's soft device."""
    return util.device()


@pytest.fixture(scope="module")
def module(soft):
    """The kernels of this file."""
    return soft.module(KERNELS)


def test_every_public_error_has_its_name(soft):
    """cuGetErrorName and cuGetErrorString know each code of the public enumeration."""
    for error in soft.d.CUresult:
        assert soft.ok(soft.d.cuGetErrorName(error)).decode() == error.name
        assert soft.ok(soft.d.cuGetErrorString(error))


def test_attributes_of_any_pointer(soft):
    """All at once succeed for any address, with defaults for what the device does not know."""
    attribute = soft.d.CUpointer_attribute
    asked = [attribute(n) for n in (1, 2, 3, 4, 7, 8, 9, 11, 12, 13)]
    device, host = soft.alloc(64), soft.ok(soft.d.cuMemHostAlloc(64, 2))
    alias = int(soft.ok(soft.d.cuMemHostGetDevicePointer(host, 0)))
    for p, wanted in (
        (device + 8, [2, device + 8, 0, 0, device, 64, True]),
        (host, [1, alias, host, 0, alias, 64, True]),
        (PAGEABLE.ctypes.data, [0, 0, 0, -2, 0, 0, False]),
    ):
        got = [int(v) for v in soft.ok(soft.d.cuPointerGetAttributes(len(asked), asked, p))]
        context, kind, pointer, of_host, number, managed, ordinal, start, size, mapped = got
        assert [kind, pointer, of_host, ordinal, start, size, mapped] == wanted
        assert (context != 0) == (number != 0) == bool(mapped) and managed == 0
        if not mapped:
            assert short_code(soft.d.cuPointerGetAttribute(asked[1], p)) == "INVALID_VALUE"
    soft.free(device)
    soft.ok(soft.d.cuMemFreeHost(host))


def test_nodes_know_their_dependents_and_parameters(soft, module):
    """Dependent nodes; parameters of any type are read and set, also in an executable."""
    d, types = soft.d, soft.d.CUgraphNodeType
    graph, stream, p = soft.ok(d.cuGraphCreate(0)), soft.stream(), soft.put(np.zeros(2, np.int32))
    first = soft.ok(d.cuGraphAddMemsetNode(graph, [], 0, util.fill_params(soft, p, 3, 1), 0))
    kernel = soft.add_kernel(graph, [first], soft.function(module, "add"), 1, 1, p, np.int32(4))
    seen = (ctypes.c_uint64 * 1)()
    stamp = util.address(soft.lib.softcuda_stamp)
    host = soft.add_host(graph, [first], stamp, ctypes.addressof(seen))
    nodes, _, count = soft.ok(d.cuGraphNodeGetDependentNodes(first, 2))
    assert {int(n) for n in nodes} == {int(kernel), int(host)} and count == 2
    assert soft.ok(d.cuGraphNodeGetDependentNodes(host, 0))[2] == 0
    read = {t: soft.ok(d.cuGraphNodeGetParams(n)) for t, n in
            (("memset", first), ("kernel", kernel), ("host", host))}
    assert [int(r.type) for r in read.values()] == [2, 0, 3]
    assert (read["memset"].memset.value, read["memset"].memset.width) == (3, 1)
    assert int(read["kernel"].kernel.func) == int(soft.function(module, "add"))
    assert int(read["host"].host.fn) == stamp
    run = soft.ok(d.cuGraphInstantiate(graph, 0))
    params = d.CUgraphNodeParams()
    params.type, fill = types.CU_GRAPH_NODE_TYPE_MEMSET, d.CUDA_MEMSET_NODE_PARAMS_v2()
    fill.dst, fill.value, fill.elementSize, fill.width, fill.height = d.CUdeviceptr(p), 50, 4, 1, 1
    params.memset = fill
    soft.ok(d.cuGraphExecNodeSetParams(run, first, params))
    soft.ok(d.cuGraphLaunch(run, stream))
    soft.ok(d.cuStreamSynchronize(stream))
    assert soft.get(p, 1, np.int32)[0] == 54 and seen[0] > 0
    assert soft.ok(d.cuGraphNodeGetParams(first)).memset.value == 3  # the definition keeps its own
    soft.ok(d.cuGraphNodeSetParams(first, params))
    assert soft.ok(d.cuGraphNodeGetParams(first)).memset.value == 50
    params.type = types.CU_GRAPH_NODE_TYPE_GRAPH
    assert short_code(d.cuGraphNodeSetParams(first, params)) == "NOT_SUPPORTED"
    cluster = d.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value = soft.ok(d.cuGraphKernelNodeGetAttribute(kernel, cluster))
    value.clusterDim.x = value.clusterDim.y = value.clusterDim.z = 1
    soft.ok(d.cuGraphKernelNodeSetAttribute(kernel, cluster, value))
    value.clusterDim.x = 2
    assert short_code(d.cuGraphKernelNodeSetAttribute(kernel, cluster, value)) == "NOT_SUPPORTED"
    soft.ok(d.cuGraphExecDestroy(run))
    soft.ok(d.cuGraphDestroy(graph))
    soft.ok(d.cuStreamDestroy(stream))
    soft.free(p)


def test_a_joined_side_stream_may_be_destroyed_while_captured(soft, module):
    """Fork, join, destroy: the capture goes on; unjoined, it is invalidated."""
    d, p = soft.d, soft.put(np.zeros(1, np.int32))
    for joins, wanted in ((True, "CUDA_SUCCESS"), (False, "STREAM_CAPTURE_INVALIDATED")):
        main, side, event = soft.stream(), soft.stream(), soft.ok(d.cuEventCreate(2))
        soft.ok(d.cuStreamBeginCapture(main, d.CUstreamCaptureMode(2)))
        soft.ok(d.cuEventRecord(event, main))
        soft.ok(d.cuStreamWaitEvent(side, event, 0))
        soft.ok(soft.launch(soft.function(module, "add"), 1, 1, p, np.int32(1), stream=side))
        soft.ok(d.cuEventRecord(event, side))
        if joins:
            soft.ok(d.cuStreamWaitEvent(main, event, 0))
        soft.ok(d.cuStreamDestroy(side))
        ended = d.cuStreamEndCapture(main)
        assert short_code(ended) == wanted
        if joins:
            util.replay(soft, ended[1], main, 3)
            soft.ok(d.cuGraphDestroy(ended[1]))
        soft.ok(d.cuStreamDestroy(main))
        soft.ok(d.cuEventDestroy(event))
    assert soft.get(p, 1, np.int32)[0] == 3
    soft.free(p)


def test_each_thread_has_a_default_stream(soft, module):
    """CU_STREAM_PER_THREAD is ordered, waits for the legacy stream, captures, and ends."""
    d, own = soft.d, soft.d.CUstream(2)
    p, ids = soft.put(np.zeros(1, np.int32)), []
    add = soft.function(module, "add")

    def work():
        soft.ok(d.cuCtxSetCurrent(soft.context))
        ids.append(int(soft.ok(d.cuStreamGetId(own))))
        soft.ok(d.cuMemsetD32Async(p, 7, 1, 0))  # on the legacy stream
        for _ in range(100):
            soft.ok(soft.launch(add, 1, 1, p, np.int32(1), stream=own))
        soft.ok(d.cuStreamSynchronize(own))
        ids.append(int(soft.get(p, 1, np.int32)[0]))
        soft.ok(d.cuStreamBeginCapture(own, d.CUstreamCaptureMode(2)))
        soft.ok(soft.launch(add, 1, 1, p, np.int32(1), stream=own))
        graph = soft.ok(d.cuStreamEndCapture(own))
        ids.append(soft.ok(d.cuGraphGetNodes(graph, 0))[1])
        soft.ok(d.cuGraphDestroy(graph))

    before = soft.live()
    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert ids[1::3] == [107, 107] and ids[2::3] == [1, 1] and ids[0] != ids[3]
    assert soft.live() == before
    soft.free(p)


def test_contexts_can_be_created(soft):
    """A created context is current, shares all with the primary one, and can be destroyed."""
    d = soft.d
    made = soft.ok(d.cuCtxCreate(None, 0, 0))
    assert int(made) == int(soft.ok(d.cuCtxGetCurrent())) != int(soft.context)
    soft.free(soft.alloc(16))
    soft.ok(d.cuCtxDestroy(made))
    assert int(soft.ok(d.cuCtxGetCurrent())) == int(soft.context)
    for call in (d.cuCtxDestroy, d.cuCtxSetCurrent, d.cuCtxPushCurrent):
        assert short_code(call(made)) == "INVALID_CONTEXT"


CHILDREN = {
    "kernels and memory operations follow pinned pointers": ("""
host = s.ok(d.cuMemHostAlloc(64, 2))
word = ctypes.c_int32.from_address(host)
s.ok(d.cuStreamWriteValue32(0, host, 5, 0))
s.run(s.function(s.module(KERNELS), "add"), 1, 1, host, np.int32(1))
assert word.value == 6
""", {"SOFTCUDA_ALIASES_ONLY": "0"}),
    "memory ends where it is said to end": ("""
half = s.alloc(600_000)
assert s.ok(d.cuMemGetInfo()) == (400_000, 1_000_000)
assert "600000 bytes were asked for, 400000 are free" in refused(d.cuMemAlloc(600_000), 2)
s.ok(d.cuMemFreeHost(s.ok(d.cuMemHostAlloc(2_000_000, 2))))
s.free(half)
s.free(s.alloc(1_000_000))
""", {"SOFTCUDA_MEMORY": "1000000"}),
    "freed addresses come again only when all were used": ("""
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
seen = []
while len(seen) == len(set(seen)) < 100:
    kept = s.alloc(16)
    seen.append(s.alloc(256 << 20))
    s.free(kept, seen[-1])
assert 10 < len(seen) < 100, len(seen)
assert "freed" in refused(d.cuMemsetD8(seen[-2], 0, 1), 1)
assert "ulimit -v" in refused(d.cuMemAlloc(9 << 30), 2)
""", {}),
    "the n-th call fails on demand": ("""
s.free(s.alloc(16))
assert "SOFTCUDA_FAIL" in refused(d.cuMemAlloc(16), 2)
s.free(s.alloc(16))
refused(d.cuStreamCreate(1), 999)
s.stream()
""", {"SOFTCUDA_FAIL": "cuMemAlloc:2,cuStreamCreate:1:999"}),
    "a forked child is told so": ("""
import os
child = os.fork()
if child == 0:
    codes = {int(r[0]) for r in (d.cuInit(0), d.cuMemAlloc(16), d.cuCtxSynchronize(),
                                 d.cuStreamCreate(1), d.cuMemGetInfo())}
    os._exit(0 if codes == {3} and d.cuGetErrorName(d.CUresult(3))[1] else 1)
assert os.waitpid(child, 0)[1] == 0
s.free(s.alloc(16))
""", {}),
    "a fault is named though another library took the signal": ("""
import signal
run = s.function(s.module(KERNELS), "add")
signal.signal(signal.SIGSEGV, lambda *_: None)
p = s.alloc(16)
s.ok(s.launch(run, 1, 1, p + 16, np.int32(1)))
assert d.cuCtxSynchronize()[0].name == "CUDA_ERROR_ILLEGAL_ADDRESS" and "'add'" in s.fault()
""", {}),
    "kernels print": ("""
run = s.function(s.module(KERNELS), "say")
s.ok(s.launch(run, 1, 2, np.int32(4)))
s.ok(d.cuCtxSynchronize())
""", {}),
}  # fmt: skip
SETUP = f"""
import os, resource
KERNELS = {KERNELS!r}
def refused(result, code):
    assert int(result[0]) == code, result
    return s.refusal()
"""


@pytest.mark.parametrize("name", CHILDREN)
def test_settings_and_processes(name):
    """What the name says, in a process of its own with the settings beside it."""
    code, settings = CHILDREN[name]
    done = util.run_child(SETUP + code, **settings)
    assert done.returncode == 0, done.stderr
    if name == "kernels print":
        assert done.stdout.splitlines() == ["thread 4 of block", "thread 5 of block"]
