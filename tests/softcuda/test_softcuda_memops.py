"""Stream memory operations of the soft device: waits, writes and batches."""

from __future__ import annotations

import time

import numpy as np
import pytest
from softcuda_util import Words, check, code, run_child

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
    """Return the parameters of one operation as CUstreamBatchMemOpParams."""
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


def assert_stays_busy(soft, stream) -> None:
    """Assert that the stream does not complete its work within 30 ms."""
    end = time.monotonic() + 0.03
    while time.monotonic() < end:
        assert code(soft.d.cuStreamQuery(stream)) == "NOT_READY"


@pytest.mark.parametrize(
    ("bits", "flags", "value", "no", "yes"),
    [
        (32, 0, 5, 4, 6),
        (32, 0, 0xFFFFFFFE, 0xFFFFFFFD, 3),  # GEQ is cyclic: 3 comes after -2
        (32, EQ, 7, 6, 7),
        (32, AND, 0b0110, 0b1001, 0b0100),
        (32, NOR, 0xFFFFFFFE, 1, 0),
        (64, EQ, 5 | 1 << 40, 5, 5 | 1 << 40),
    ],
)
def test_memop_wait_blocks_stream_until_comparison_is_true(
    soft, words, stream, bits, flags, value, no, yes
):
    """A wait blocks its stream until the word in memory satisfies the comparison.

    GEQ compares cyclically. AND is satisfied if some bit is set in both values, and NOR if some bit
    is set in neither value. 64-bit operations compare both halves of the word.
    """
    words[0] = no
    written = 9 << bits - 28
    getattr(soft, f"cuStreamWaitValue{bits}")(stream, words.address(0), value, flags)
    getattr(soft, f"cuStreamWriteValue{bits}")(stream, words.address(1), written, 0)
    assert_stays_busy(soft, stream)
    assert words[1] == 0
    words[0] = yes
    soft.cuStreamSynchronize(stream)
    assert words[1] == written


def test_memop_batch_runs_in_array_order(soft, words, stream):
    """The operations of a batch run in order, and an unsatisfied wait delays those after it."""
    ops = [
        op(soft, WRITE32, words.address(0), 1),
        op(soft, WAIT32, words.address(1), 1, EQ),
        op(soft, WRITE32, words.address(1), 0),
        op(soft, BARRIER),
        op(soft, WRITE32, words.address(2), 3),
    ]
    soft.cuStreamBatchMemOp(stream, len(ops), ops, 0)
    assert_stays_busy(soft, stream)
    assert (words[0], words[2]) == (1, 0)
    words[1] = 1
    soft.cuStreamSynchronize(stream)
    assert (words[1], words[2]) == (0, 3)


def test_memop_on_capturing_stream_becomes_node(soft, words, stream):
    """A captured operation does not run during the capture. It runs when the graph is launched."""
    soft.begin(stream, 2)
    words.block(stream)
    soft.cuStreamWriteValue32(stream, words.address(1), 5, 0)
    run = soft.cuGraphInstantiate(soft.cuStreamEndCapture(stream), 0)
    assert words[1] == 0
    soft.cuGraphLaunch(run, stream)
    assert_stays_busy(soft, stream)
    words[0] = 1
    soft.cuStreamSynchronize(stream)
    assert words[1] == 5


def test_memop_rejects_invalid_addresses(soft, words, stream):
    """Pageable, misaligned, null and freed addresses return INVALID_VALUE.

    The error text of the refused call states the reason.
    """
    pageable = np.zeros(16, np.uint64)
    freed = Words(soft, 1)
    soft.cuMemFreeHost(freed.host)
    for address, text in (
        (pageable.ctypes.data, "pageable"),
        (words.address(0) + 2, "not aligned"),
        (0, "null pointer"),
        (freed.address(0), "freed"),
    ):
        assert code(soft.d.cuStreamWriteValue32(stream, address, 1, 0)) == "INVALID_VALUE"
        assert text in soft.refusal()
    wait = soft.d.cuStreamWaitValue64
    assert code(wait(stream, words.address(0) + 4, 1, 0)) == "INVALID_VALUE"


#: Reserves an address range and maps memory into it. {access} is the access of the device.
MAPPED = """
base = int(s.cuMemAddressReserve(65536, 0, 0, 0))
memory = s.cuMemCreate(65536, s.memory_properties(), 0)
s.cuMemMap(base, 65536, 0, memory, 0)
grant = d.CUmemAccessDesc()
grant.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
grant.flags = d.CUmemAccess_flags({access})
s.cuMemSetAccess(base, 65536, [grant], 1)
stream = s.stream()
"""


@pytest.mark.parametrize("name", ["WriteValue32", "WriteValue64", "WaitValue32", "WaitValue64"])
def test_memop_on_reserved_address_needs_mapped_memory(soft, stream, name):
    """An address without memory is refused by the call."""
    base = int(soft.cuMemAddressReserve(65536, 0, 0, 0))
    try:
        call = getattr(soft.d, "cuStream" + name)
        assert code(call(stream, base + 64, 1, 0)) == "INVALID_VALUE"
        assert "no memory is mapped" in soft.refusal()
    finally:
        soft.cuMemAddressFree(base, 65536)


def test_memop_uses_mapped_virtual_memory():
    text = (
        MAPPED.format(access=3)
        + """
s.cuStreamWriteValue32(stream, base + 64, 7, 0)
s.cuStreamWaitValue32(stream, base + 64, 7, 1)
s.cuStreamSynchronize(stream)
print(s.value(base + 64))
"""
    )
    assert run_child(text).stdout == "7\n"


ACCESSES = [
    (1, "s.cuStreamWriteValue32(stream, base, 7, 0)", "writes to"),
    (0, "s.cuStreamWaitValue64(stream, base, 7, 1)", "reads"),
]


@pytest.mark.parametrize(("access", "call", "word"), ACCESSES, ids=["write", "wait"])
def test_memop_without_access_to_virtual_memory_is_a_fault(access, call, word):
    text = MAPPED.format(access=access) + call + "\nprint(code(d.cuStreamSynchronize(stream)))"
    done = run_child(text + "\nprint(s.fault())")
    assert done.stdout.startswith("ILLEGAL_ADDRESS"), done.stderr
    assert word in done.stdout and "has no such access" in done.stdout


def test_memop_node_on_unmapped_memory_is_a_fault():
    """A node is checked when it is created. Its memory may be unmapped before a launch."""
    text = (
        MAPPED.format(access=3)
        + """
from test_softcuda_memops import WRITE32, op
graph = s.cuGraphCreate(0)
params = d.CUDA_BATCH_MEM_OP_NODE_PARAMS()
params.ctx, params.count, params.paramArray = s.context, 1, [op(s, WRITE32, base, 1)]
s.cuGraphAddBatchMemOpNode(graph, None, 0, params)
run = s.cuGraphInstantiate(graph, 0)
s.cuMemUnmap(base, 65536)
s.cuGraphLaunch(run, stream)
print(code(d.cuStreamSynchronize(stream)), s.fault())
"""
    )
    done = run_child(text)
    assert done.stdout.startswith("ILLEGAL_ADDRESS"), done.stderr
    assert "where no memory is mapped" in done.stdout


#: Script that prints the attributes of memory operations, then the error codes of five operations.
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


def test_memop_features_can_be_disabled_by_attribute():
    """An operation whose device attribute is 0 returns NOT_SUPPORTED. Atomic reductions are
    never supported."""
    numbers = (92, 93, 94, 98, 122, 123)
    all_disabled = {f"SOFTCUDA_ATTRIBUTE_{n}": "0" for n in numbers}
    for settings, attributes, codes in (
        ({}, [1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 801]),
        (all_disabled, [0] * 7, [0, 801, 801, 801, 801]),
        ({"SOFTCUDA_MEMOPS": "0"}, [1, 1, 1, 1, 1, 1, 0], [801] * 5),
    ):
        lines = check(ATTRIBUTES, **settings).splitlines()
        assert lines[:2] == [str(attributes), str(codes)]


@pytest.mark.parametrize(("settings", "before"), [({}, 1), ({"SOFTCUDA_QUEUES": "1"}, 0)])
def test_memop_wait_blocks_other_streams_with_one_hardware_queue(settings, before):
    """With SOFTCUDA_QUEUES=1, a pending wait also delays the work of other streams.

    By default, it does not delay them.
    """
    check(
        f"""
        w, waits, other = Words(s, 3), s.stream(), s.stream()
        w.block(waits)
        s.cuStreamWriteValue32(other, w.address(1), 1, 0)
        if {before}:
            while not w[1]: time.sleep(0.001)
        else:
            time.sleep(0.05)
            assert w[1] == 0
        w[0] = 1
        s.cuStreamSynchronize(other)
        s.cuStreamSynchronize(waits)
        assert w[1] == 1
        """,
        **settings,
    )


@pytest.mark.parametrize(("settings", "before"), [({}, 1), ({"SOFTCUDA_QUEUES": "1"}, 0)])
def test_polling_kernel_blocks_other_streams_with_one_hardware_queue(settings, before):
    """A kernel that reads the clock while it waits is regarded as a pending wait."""
    check(
        f"""
        poll = s.kernels('''extern "C" __global__ void poll(
          const volatile unsigned long long* word, unsigned long long* started) {{
          *started = 1;
          while (*word == 0) __nanosleep(200);
        }}''').poll
        w, waits, other = Words(s, 3), s.stream(), s.stream()
        s.launch(poll, 1, 1, np.uint64(w.address(0)), np.uint64(w.address(2)), stream=waits)
        while w[2] == 0: time.sleep(0.001)
        time.sleep(0.01)
        s.cuStreamWriteValue32(other, w.address(1), 1, 0)
        if {before}:
            while not w[1]: time.sleep(0.001)
        else:
            time.sleep(0.05)
            assert w[1] == 0
        w[0] = 1
        s.cuStreamSynchronize(other)
        s.cuStreamSynchronize(waits)
        assert w[1] == 1
        """,
        SOFTCUDA_WORKERS="2",
        **settings,
    )


def test_driver_call_is_not_permitted_while_device_waits_for_thread(soft):
    """A thread on which a pending stream wait depends may not call the driver.

    Its calls return NOT_PERMITTED between softcuda_set_device_waits(1) and
    softcuda_set_device_waits(0).
    """
    soft.lib.softcuda_set_device_waits(1)
    try:
        result = soft.d.cuMemAlloc(64)
        text = soft.refusal()
    finally:
        soft.lib.softcuda_set_device_waits(0)
    assert code(result) == "NOT_PERMITTED"
    assert "that the device waits for" in text
    soft.ints(1)


@pytest.mark.parametrize("generic", [pytest.param(False, marks=pytest.mark.full), True])
def test_memop_node_waits_in_each_of_5000_launches(soft, words, stream, graph, generic):
    """A graph node that waits for a word and then resets it works in each of many launches.

    In every second launch, the host sets the word before the launch, otherwise after it. With
    `generic`, the node is added by cuGraphAddNode, otherwise by cuGraphAddBatchMemOpNode.
    """
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
