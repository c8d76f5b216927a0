"""Memory operations of the soft device: waits, writes, batches, refusals, one hardware queue."""

from __future__ import annotations

import time

import numpy as np
import pytest
from softcuda_util import Words, check, code

EQ = 1
AND = 2
NOR = 3
WAIT32 = 1
WRITE32 = 2
FLUSH = 3
WAIT64 = 4
WRITE64 = 5
BARRIER = 6
REDUCE = 8


def op(soft, kind: int, address: int = 0, value: int = 0, flags: int = 0):
    """One CUstreamBatchMemOpParams."""
    p = soft.d.CUstreamBatchMemOpParams()
    p.operation = soft.d.CUstreamBatchMemOpType(kind)
    if kind in (WAIT32, WAIT64, WRITE32, WRITE64):
        part = p.waitValue if kind in (WAIT32, WAIT64) else p.writeValue
        part.address = address
        part.value64 = soft.d.cuuint64_t(value)
    else:
        part = p.memoryBarrier
    part.operation = p.operation
    part.flags = flags
    return p


def settle(soft, stream) -> None:
    """Give the device time to run whatever it can; the stream must stay busy all along."""
    end = time.monotonic() + 0.03
    while time.monotonic() < end:
        assert code(soft.d.cuStreamQuery(stream)) == "NOT_READY"


@pytest.mark.parametrize(
    ("bits", "flags", "value", "no", "yes"),
    [
        (32, 0, 5, 4, 6),
        (32, 0, 0xFFFFFFFE, 0xFFFFFFFD, 3),  # cyclic: 3 comes after -2
        (32, EQ, 7, 6, 7),
        (32, AND, 0b0110, 0b1001, 0b0100),
        (32, NOR, 0xFFFFFFFE, 1, 0),
        (64, EQ, 5 | 1 << 40, 5, 5 | 1 << 40),
    ],
)
def test_a_wait_holds_its_stream_until_the_documented_comparison_is_true(
    soft, words, stream, bits, flags, value, no, yes
):
    """GEQ is cyclic, EQ equality, AND any common bit, NOR any bit that neither has; a 64-bit wait
    looks at both halves, and a 64-bit write stores both."""
    words[0] = no
    written = 9 << bits - 28
    getattr(soft, f"cuStreamWaitValue{bits}")(stream, words.address(0), value, flags)
    getattr(soft, f"cuStreamWriteValue{bits}")(stream, words.address(1), written, 0)
    settle(soft, stream)
    assert words[1] == 0
    words[0] = yes
    soft.cuStreamSynchronize(stream)
    assert words[1] == written


def test_a_batch_runs_in_array_order(soft, words, stream):
    """What stands before a wait has happened, what stands after it has not."""
    ops = [
        op(soft, WRITE32, words.address(0), 1),
        op(soft, WAIT32, words.address(1), 1, EQ),
        op(soft, WRITE32, words.address(1), 0),
        op(soft, BARRIER),
        op(soft, WRITE32, words.address(2), 3),
    ]
    soft.cuStreamBatchMemOp(stream, len(ops), ops, 0)
    settle(soft, stream)
    assert (words[0], words[2]) == (1, 0)
    words[1] = 1
    soft.cuStreamSynchronize(stream)
    assert (words[1], words[2]) == (0, 3)


def test_a_capturing_stream_takes_memory_operations_as_nodes(soft, words, stream):
    """They do not run while capturing, and run in every replay."""
    soft.begin(stream, 2)
    words.block(stream)
    soft.cuStreamWriteValue32(stream, words.address(1), 5, 0)
    run = soft.cuGraphInstantiate(soft.cuStreamEndCapture(stream), 0)
    assert words[1] == 0
    soft.cuGraphLaunch(run, stream)
    settle(soft, stream)
    words[0] = 1
    soft.cuStreamSynchronize(stream)
    assert words[1] == 5


def test_addresses_that_hardware_cannot_watch_are_refused(soft, words, stream):
    """Host addresses, misaligned, NULL and freed ones are INVALID_VALUE, with the reason."""
    pageable = np.zeros(16, np.uint64)
    gone = Words(soft, 1)
    soft.cuMemFreeHost(gone.host)
    for bad, said in (
        (pageable.ctypes.data, "pageable"),
        (words.address(0) + 2, "not aligned"),
        (0, "null pointer"),
        (gone.address(0), "freed"),
    ):
        assert code(soft.d.cuStreamWriteValue32(stream, bad, 1, 0)) == "INVALID_VALUE"
        assert said in soft.refusal()
    wait = soft.d.cuStreamWaitValue64
    assert code(wait(stream, words.address(0) + 4, 1, 0)) == "INVALID_VALUE"


ATTRIBUTES = """
from test_softcuda_memops import *
w, stream = Words(s, 2), s.stream()
print([s.cuDeviceGetAttribute(d.CUdevice_attribute(n), 0) for n in (92, 93, 94, 98, 122, 123, 148)])
print([int(x[0]) for x in (
    d.cuStreamWriteValue32(stream, w.address(0), 4, 0),
    d.cuStreamWriteValue64(stream, w.address(1), 4, 0),
    d.cuStreamWaitValue32(stream, w.address(1), 0, NOR),
    d.cuStreamWaitValue32(stream, w.address(1), 0, 1 << 30),
    d.cuStreamBatchMemOp(stream, 1, [op(s, REDUCE)], 0))])
"""


def test_each_attribute_can_be_switched_off():
    """What an attribute of 0 stands for is NOT_SUPPORTED, as atomic reductions always are."""
    numbers = (92, 93, 94, 98, 122, 123)
    for settings, attributes, answers in (
        ({}, [1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 801]),
        ({f"SOFTCUDA_ATTRIBUTE_{n}": "0" for n in numbers}, [0] * 7, [0, 801, 801, 801, 801]),
        ({"SOFTCUDA_MEMOPS": "0"}, [1, 1, 1, 1, 1, 1, 0], [801] * 5),
    ):
        assert check(ATTRIBUTES, **settings).split("\n")[:2] == [str(attributes), str(answers)]


@pytest.mark.parametrize(("settings", "before"), [({}, 1), ({"SOFTCUDA_QUEUES": "1"}, 0)])
def test_one_hardware_queue_holds_what_is_submitted_behind_a_wait(settings, before):
    """With SOFTCUDA_QUEUES=1 another stream's work waits too; by default it does not."""
    check(
        f"""
        w, waits, other = Words(s, 3), s.stream(), s.stream()
        w.block(waits)
        s.cuStreamWriteValue32(other, w.address(1), 1, 0)
        time.sleep(0.05)
        assert w[1] == {before}
        w[0] = 1
        s.cuStreamSynchronize(other)
        s.cuStreamSynchronize(waits)
        assert w[1] == 1
        """,
        **settings,
    )


def test_a_worker_that_owes_an_answer_may_not_call(soft):
    """softcuda_set_device_waits(1) makes every call of this thread NOT_PERMITTED until (0)."""
    soft.lib.softcuda_set_device_waits(1)
    try:
        refused = soft.d.cuMemAlloc(64)
        said = soft.refusal()
    finally:
        soft.lib.softcuda_set_device_waits(0)
    assert code(refused) == "NOT_PERMITTED" and "that the device waits for" in said
    soft.ints(1)


@pytest.mark.parametrize("generic", [False, True])
def test_five_thousand_waits_end(soft, words, stream, graph, generic):
    """A node that resets its word waits anew in every replay; every wait of a long run is seen by
    the poller, whether it finds its word set or not."""
    ack = words.address(0)
    ops = [op(soft, WAIT32, ack, 1, EQ), op(soft, WRITE32, ack, 0)]
    if generic:
        params = soft.node_params("BATCH_MEM_OP")
        params.memOp.ctx = soft.context
        params.memOp.count = 2
        params.memOp.paramArray = ops
        soft.cuGraphAddNode(graph, None, None, 0, params)
    else:
        params = soft.d.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        params.ctx = soft.context
        params.count = 2
        params.paramArray = ops
        soft.cuGraphAddBatchMemOpNode(graph, None, 0, params)
    run = soft.cuGraphInstantiate(graph, 0)
    for i in range(5000):
        words[0] = i % 2
        soft.cuGraphLaunch(run, stream)
        if not i % 2:
            words[0] = 1
        while words[0]:
            pass
    soft.cuStreamSynchronize(stream)
