"""Memory operations of the soft device: waits, writes, batches, refusals, one hardware queue."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
import softcuda_util as util

EQ, AND, NOR = 1, 2, 3
WAIT32, WRITE32, FLUSH, WAIT64, WRITE64, BARRIER, REDUCE = 1, 2, 3, 4, 5, 6, 8


class Words:
    """Pinned 64-bit words, one cache line each, with host view and device addresses."""

    def __init__(self, soft, count: int) -> None:
        self._soft = soft
        self.host = int(soft.ok(soft.d.cuMemHostAlloc(64 * count, 3)))
        self.device = int(soft.ok(soft.d.cuMemHostGetDevicePointer(self.host, 0)))
        buffer = (ctypes.c_uint64 * (8 * count)).from_address(self.host)
        self.view = np.frombuffer(buffer, np.uint64).reshape(count, 8)
        self.view[:] = 0

    def __getitem__(self, i: int) -> int:
        return int(self.view[i, 0])

    def __setitem__(self, i: int, value: int) -> None:
        self.view[i, 0] = value

    def address(self, i: int) -> int:
        return self.device + 64 * i

    def close(self) -> None:
        self.view = None
        self._soft.ok(self._soft.d.cuMemFreeHost(self.host))


@pytest.fixture
def words(soft):
    made = Words(soft, 8)
    yield made
    made.close()


def op(soft, kind: int, address: int = 0, value: int = 0, flags: int = 0):
    """One CUstreamBatchMemOpParams."""
    p = soft.d.CUstreamBatchMemOpParams()
    p.operation = soft.d.CUstreamBatchMemOpType(kind)
    if kind in (WAIT32, WAIT64, WRITE32, WRITE64):
        part = p.waitValue if kind in (WAIT32, WAIT64) else p.writeValue
        part.operation = soft.d.CUstreamBatchMemOpType(kind)
        part.address = address
        part.value64 = soft.d.cuuint64_t(value)
        part.flags = flags
    else:
        p.memoryBarrier.operation = soft.d.CUstreamBatchMemOpType(kind)
        p.memoryBarrier.flags = flags
    return p


def batch(soft, *ops):
    params = soft.d.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    params.ctx = soft.context
    params.count = len(ops)
    params.paramArray = list(ops)
    params.flags = 0
    return params


def busy(soft, stream) -> bool:
    return int(soft.d.cuStreamQuery(stream)[0]) == 600


def settle(soft, stream) -> None:
    """Give the device time to run whatever it can; the stream must stay busy all along."""
    end = time.monotonic() + 0.03
    while time.monotonic() < end:
        assert busy(soft, stream)


@pytest.mark.parametrize(
    ("flags", "value", "no", "yes"),
    [
        (0, 5, 4, 6),
        (0, 0xFFFFFFFE, 0xFFFFFFFD, 3),  # cyclic: 3 comes after -2
        (EQ, 7, 6, 7),
        (AND, 0b0110, 0b1001, 0b0100),
        (NOR, 0xFFFFFFFE, 1, 0),
    ],
)
def test_a_wait_holds_its_stream_until_the_documented_comparison_is_true(
    soft, words, stream, flags, value, no, yes
):
    """GEQ is cyclic, EQ equality, AND any common bit, NOR any bit that neither has."""
    words[0] = no
    soft.ok(soft.d.cuStreamWaitValue32(stream, words.address(0), value, flags))
    soft.ok(soft.d.cuStreamWriteValue32(stream, words.address(1), 9, 0))
    settle(soft, stream)
    assert words[1] == 0
    words[0] = yes
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert words[1] == 9


def test_wide_words_are_compared_in_64_bits(soft, words, stream):
    """A 64-bit wait looks at both halves, and a 64-bit write stores both."""
    words[0] = 5
    soft.ok(soft.d.cuStreamWaitValue64(stream, words.address(0), 5 | 1 << 40, EQ))
    soft.ok(soft.d.cuStreamWriteValue64(stream, words.address(1), 1 << 50, 0))
    settle(soft, stream)
    words[0] = 5 | 1 << 40
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert words[1] == 1 << 50


def test_a_batch_runs_in_array_order(soft, words, stream):
    """What stands before a wait has happened, what stands after it has not."""
    ops = [
        op(soft, WRITE32, words.address(0), 1),
        op(soft, WAIT32, words.address(1), 1, EQ),
        op(soft, WRITE32, words.address(1), 0),
        op(soft, BARRIER),
        op(soft, WRITE32, words.address(2), 3),
    ]
    soft.ok(soft.d.cuStreamBatchMemOp(stream, len(ops), ops, 0))
    settle(soft, stream)
    assert (words[0], words[2]) == (1, 0)
    words[1] = 1
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert (words[1], words[2]) == (0, 3)


@pytest.mark.parametrize("generic", [False, True])
def test_a_node_that_resets_its_word_waits_anew_in_every_replay(soft, words, stream, generic):
    """[WAIT ack EQ 1, WRITE ack 0] in one node needs one answer per replay."""
    graph = soft.ok(soft.d.cuGraphCreate(0))
    ack, count = words.address(0), words.address(1)
    params = batch(soft, op(soft, WAIT32, ack, 1, EQ), op(soft, WRITE32, ack, 0))
    if generic:
        node_params = soft.d.CUgraphNodeParams()
        node_params.type = soft.d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP
        node_params.memOp.ctx = soft.context
        node_params.memOp.count = 2
        node_params.memOp.paramArray = [op(soft, WAIT32, ack, 1, EQ), op(soft, WRITE32, ack, 0)]
        node = soft.ok(soft.d.cuGraphAddNode(graph, None, None, 0, node_params))
    else:
        node = soft.ok(soft.d.cuGraphAddBatchMemOpNode(graph, None, 0, params))
    after = batch(soft, op(soft, WRITE32, count, 1))
    soft.ok(soft.d.cuGraphAddBatchMemOpNode(graph, [node], 1, after))
    run = soft.ok(soft.d.cuGraphInstantiate(graph, 0))
    for _ in range(4):
        words[1] = 0
        soft.ok(soft.d.cuGraphLaunch(run, stream))
        settle(soft, stream)
        assert words[1] == 0
        words[0] = 1
        soft.ok(soft.d.cuStreamSynchronize(stream))
        assert (words[0], words[1]) == (0, 1)
    soft.ok(soft.d.cuGraphExecDestroy(run))
    soft.ok(soft.d.cuGraphDestroy(graph))


def test_parameters_of_a_node_can_be_read_and_changed(soft, words, stream):
    """GetParams gives what was set; the executable takes new values, but no new kinds or counts."""
    d = soft.d
    graph = soft.ok(d.cuGraphCreate(0))
    params = batch(soft, op(soft, WRITE32, words.address(0), 1))
    node = soft.ok(d.cuGraphAddBatchMemOpNode(graph, None, 0, params))
    got = soft.ok(d.cuGraphBatchMemOpNodeGetParams(node))
    assert got.count == 1
    run = soft.ok(d.cuGraphInstantiate(graph, 0))
    changed = batch(soft, op(soft, WRITE32, words.address(1), 2))
    soft.ok(d.cuGraphExecBatchMemOpNodeSetParams(run, node, changed))
    soft.ok(d.cuGraphLaunch(run, stream))
    soft.ok(d.cuStreamSynchronize(stream))
    assert (words[0], words[1]) == (0, 2)
    more = batch(soft, *[op(soft, WRITE32, words.address(1), 2)] * 2)
    other = batch(soft, op(soft, WAIT32, words.address(1), 2))
    for refused in (more, other):
        assert int(d.cuGraphExecBatchMemOpNodeSetParams(run, node, refused)[0]) == 1
    soft.ok(d.cuGraphBatchMemOpNodeSetParams(node, other))
    got = soft.ok(d.cuGraphBatchMemOpNodeGetParams(node))
    # The bindings do not read the array back: it is the third field of the C struct.
    array = ctypes.c_void_p.from_address(int(got.getPtr()) + 16).value
    assert array and ctypes.c_int.from_address(array).value == WAIT32
    soft.ok(d.cuGraphExecDestroy(run))
    soft.ok(d.cuGraphDestroy(graph))


def test_a_capturing_stream_takes_memory_operations_as_nodes(soft, words, stream):
    """They do not run while capturing, and run in every replay."""
    d = soft.d
    soft.ok(d.cuStreamBeginCapture(stream, d.CUstreamCaptureMode(2)))
    soft.ok(d.cuStreamWaitValue32(stream, words.address(0), 1, EQ))
    soft.ok(d.cuStreamWriteValue32(stream, words.address(1), 5, 0))
    graph = soft.ok(d.cuStreamEndCapture(stream))
    assert words[1] == 0
    run = soft.ok(d.cuGraphInstantiate(graph, 0))
    soft.ok(d.cuGraphLaunch(run, stream))
    settle(soft, stream)
    words[0] = 1
    soft.ok(d.cuStreamSynchronize(stream))
    assert words[1] == 5
    soft.ok(d.cuGraphExecDestroy(run))
    soft.ok(d.cuGraphDestroy(graph))


def test_addresses_that_hardware_cannot_watch_are_refused(soft, words, stream):
    """Host addresses, misaligned, NULL and freed ones are INVALID_VALUE, with the reason."""
    pageable = np.zeros(16, np.uint64)
    gone = Words(soft, 1)
    address = gone.address(0)
    gone.close()
    for bad, said in (
        (pageable.ctypes.data, "pageable"),
        (words.address(0) + 2, "not aligned"),
        (0, "null pointer"),
        (address, "freed"),
    ):
        assert int(soft.d.cuStreamWriteValue32(stream, bad, 1, 0)[0]) == 1
        assert said in soft.refusal()
    assert int(soft.d.cuStreamWaitValue64(stream, words.address(0) + 4, 1, 0)[0]) == 1


ATTRIBUTES = """
from test_softcuda_memops import *
w, stream = Words(s, 2), s.stream()
def attribute(n):
    return s.ok(d.cuDeviceGetAttribute(d.CUdevice_attribute(n), 0))
print([attribute(n) for n in (92, 93, 94, 98, 122, 123, 148)])
r = d.CUstreamBatchMemOpParams()
r.operation = d.CUstreamBatchMemOpType(REDUCE)
a = r.atomicReduction
a.operation = d.CUstreamBatchMemOpType(REDUCE)
a.flags, a.address, a.value = 0, w.address(0), d.cuuint64_t(3)
a.reductionOp = d.CUstreamAtomicReductionOpType.CU_STREAM_ATOMIC_REDUCTION_OP_ADD
a.dataType = d.CUstreamAtomicReductionDataType.CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_32
print([int(x[0]) for x in (
    d.cuStreamWriteValue32(stream, w.address(0), 4, 0),
    d.cuStreamWriteValue64(stream, w.address(1), 4, 0),
    d.cuStreamWaitValue32(stream, w.address(1), 0, NOR),
    d.cuStreamWaitValue32(stream, w.address(1), 0, 1 << 30),
    d.cuStreamBatchMemOp(stream, 1, [r], 0))])
s.ok(d.cuStreamSynchronize(stream))
print(w[0])
"""


def test_each_attribute_can_be_switched_off(soft):
    """Everything is there by default; what an attribute of 0 stands for is NOT_SUPPORTED."""
    done = util.run_child(ATTRIBUTES)
    assert done.stdout.split("\n")[:3] == ["[1, 1, 1, 1, 1, 1, 1]", "[0, 0, 0, 0, 0]", "7"], done
    off = {f"SOFTCUDA_ATTRIBUTE_{n}": "0" for n in (92, 93, 94, 98, 122, 123, 148)}
    done = util.run_child(ATTRIBUTES, **off)
    want = ["[0, 0, 0, 0, 0, 0, 0]", "[0, 801, 801, 801, 801]", "4"]
    assert done.stdout.split("\n")[:3] == want, done
    done = util.run_child(ATTRIBUTES, SOFTCUDA_MEMOPS="0")
    assert done.stdout.split("\n")[1] == "[801, 801, 801, 801, 801]", done


QUEUES = """
from test_softcuda_memops import *
w, waits, other = Words(s, 3), s.stream(), s.stream()
s.ok(d.cuStreamWaitValue32(waits, w.address(0), 1, EQ))
s.ok(d.cuStreamWriteValue32(other, w.address(1), 1, 0))
time.sleep(0.05)
before = w[1]
w[0] = 1
s.ok(d.cuStreamSynchronize(other))
s.ok(d.cuStreamSynchronize(waits))
print(before, w[1])
"""


def test_one_hardware_queue_holds_what_is_submitted_behind_a_wait(soft):
    """With SOFTCUDA_QUEUES=1 another stream's work waits too; by default it does not."""
    assert util.run_child(QUEUES).stdout.split() == ["1", "1"]
    assert util.run_child(QUEUES, SOFTCUDA_QUEUES="1").stdout.split() == ["0", "1"]


def test_a_worker_that_owes_an_answer_may_not_call(soft, words):
    """softcuda_owe_answer(1) makes every call of this thread NOT_PERMITTED until (0)."""
    soft.lib.softcuda_owe_answer(1)
    try:
        code = int(soft.d.cuMemAlloc(64)[0])
        said = soft.refusal()
    finally:
        soft.lib.softcuda_owe_answer(0)
    assert code == 800 and "owes the device an answer" in said
    soft.free(soft.alloc(64))


FAULT = """
from test_softcuda_memops import *
BAD = 'extern "C" __global__ void bad(int* p) { p[64] = 1; }'  # the guard page
w, waits, other = Words(s, 1), s.stream(), s.stream()
s.ok(d.cuStreamWaitValue32(waits, w.address(0), 1, EQ))
module = s.module(BAD)
s.launch(s.function(module, "bad"), 1, 1, s.alloc(64), stream=other)  # may know it already
print(int(d.cuStreamSynchronize(waits)[0]))
"""


def test_a_fault_ends_pending_waits(soft):
    """A wait that nobody will answer does not outlive the context's fault."""
    done = util.run_child(FAULT)
    assert done.stdout.split() == ["700"], done


def test_five_thousand_waits_end(soft, words, stream):
    """Every wait of a long run is seen by the poller, whether it finds its word set or not."""
    d, ack = soft.d, words.address(0)
    graph = soft.ok(d.cuGraphCreate(0))
    params = batch(soft, op(soft, WAIT32, ack, 1, EQ), op(soft, WRITE32, ack, 0))
    soft.ok(d.cuGraphAddBatchMemOpNode(graph, None, 0, params))
    run = soft.ok(d.cuGraphInstantiate(graph, 0))
    for i in range(5000):
        if i % 2:
            words[0] = 1
        soft.ok(d.cuGraphLaunch(run, stream))
        if not i % 2:
            words[0] = 1
        while words[0]:
            pass
    soft.ok(d.cuStreamSynchronize(stream))
    soft.ok(d.cuGraphExecDestroy(run))
    soft.ok(d.cuGraphDestroy(graph))
