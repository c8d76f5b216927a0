"""Streams, events and host functions of the soft device; modules and launch refusals."""

from __future__ import annotations

import ctypes
import re
import struct
import threading

import numpy as np
import pytest
import softcuda_util as util
from softcuda_util import CALLBACK, USLEEP, check, code, codes, in_threads

from graft.cudagraph.softstats import counters


@pytest.fixture
def gate():
    """Something that opens, and a callback that waits for it."""
    opens = threading.Event()
    opens.callback = CALLBACK(lambda _: opens.wait(10) and None)
    return opens


def test_streams_run_beside_each_other_and_events_order_them(
    soft, kernels, stream, other, event, gate
):
    """A stream waits for another's event as it was recorded then, and for nothing else of it."""
    log = soft.ints(0, 0, 0)
    assert code(soft.d.cuEventQuery(event)) == "SUCCESS"  # never recorded: complete
    soft.cuEventRecord(event, stream)
    soft.cuStreamWaitEvent(other, event, 0)  # for this record, not for the next
    soft.host(stream, gate.callback)
    soft.cuEventRecord(event, stream)
    soft.launch(kernels.append, 1, 1, log, np.int32(1), stream=other)
    soft.cuStreamSynchronize(other)  # it is free although the first is held
    soft.cuStreamWaitEvent(other, event, 0)
    soft.launch(kernels.append, 1, 1, log, np.int32(2), stream=other)
    assert codes(soft.d.cuStreamQuery(other), soft.d.cuEventQuery(event)) == {"NOT_READY"}
    gate.set()
    soft.cuStreamSynchronize(other)
    assert code(soft.d.cuEventQuery(event)) == "SUCCESS"
    assert soft.get(log, 3, np.int32).tolist() == [2, 1, 2]


def test_elapsed_time(soft, stream):
    """Elapsed time covers what ran between two events; untimed or unrecorded ones are refused."""
    timed = [soft.cuEventCreate(0) for _ in range(3)]
    untimed = soft.cuEventCreate(2)
    soft.cuEventRecord(timed[0], stream)
    soft.host(stream, USLEEP, 20000)
    soft.cuEventRecord(timed[1], stream)
    soft.cuEventRecord(untimed, stream)
    elapsed = soft.d.cuEventElapsedTime
    assert code(elapsed(timed[0], timed[1])) in ("NOT_READY", "SUCCESS")
    soft.cuStreamSynchronize(stream)
    assert soft.cuEventElapsedTime(timed[0], timed[1]) >= 19.9
    assert soft.cuEventElapsedTime(timed[1], timed[0]) <= -19.9
    assert codes(elapsed(timed[0], timed[2]), elapsed(timed[0], untimed)) == {"INVALID_HANDLE"}


def test_legacy_stream_joins_blocking_streams_only(soft, other, gate):
    """The NULL stream waits for blocking streams and not for non-blocking ones."""
    blocking = soft.cuStreamCreate(0)
    p = soft.ints(0)
    held = threading.Event()
    callback = CALLBACK(lambda _: held.wait(10) and None)
    soft.host(other, callback)
    soft.cuMemsetD8Async(p, 1, 4, 0)
    # One host-function thread: this one runs after the other stream's, so open that first.
    held.set()
    soft.host(blocking, gate.callback)
    soft.cuMemsetD8Async(p, 2, 4, 0)
    assert code(soft.d.cuStreamQuery(0)) == "NOT_READY"
    gate.set()
    soft.cuStreamSynchronize(0)
    assert code(soft.d.cuStreamQuery(blocking)) == "SUCCESS"


def test_each_thread_has_a_default_stream(soft, kernels):
    """CU_STREAM_PER_THREAD is ordered, waits for the legacy stream, captures, and ends."""
    own = soft.d.CUstream(2)
    log = soft.ints(*[0] * 128)
    add = kernels.append

    def work(_):
        soft.cuCtxSetCurrent(soft.context)
        soft.cuMemsetD32Async(log, 0, 1, 0)  # on the legacy stream
        for i in range(100):
            soft.launch(add, 1, 1, log, np.int32(i), stream=own)
        soft.cuStreamSynchronize(own)
        assert soft.get(log, 101, np.int32).tolist() == [100, *range(100)]
        soft.begin(own, 2)
        soft.launch(add, 1, 1, log, np.int32(1), stream=own)
        graph = soft.cuStreamEndCapture(own)
        assert soft.cuGraphGetNodes(graph, 0)[1] == 1
        soft.cuGraphDestroy(graph)
        return int(soft.cuStreamGetId(own))

    before = soft.live()
    assert in_threads(work, 0) != in_threads(work, 0)
    assert soft.live() == before


def test_streams_read_back_and_their_handles_are_never_reused(soft, event):
    """Flags, priority and context of a stream read back; a destroyed stream's or event's handle is
    INVALID_HANDLE for good."""
    d, (least, greatest) = soft.d, soft.cuCtxGetStreamPriorityRange()
    stream = soft.cuStreamCreateWithPriority(1, greatest - 3)
    assert int(soft.cuStreamGetFlags(stream)) == 1
    assert soft.cuStreamGetPriority(stream) == greatest < least == 0
    assert int(soft.cuStreamGetCtx(stream)) == int(soft.context)
    soft.cuStreamDestroy(stream)
    soft.cuEventDestroy(event)
    fresh, *_ = [soft.stream() for _ in range(5)]
    assert codes(
        d.cuStreamSynchronize(stream),
        d.cuStreamDestroy(stream),
        d.cuEventRecord(event, fresh),
        d.cuStreamWaitEvent(fresh, event, 0),
    ) == {"INVALID_HANDLE"}


def test_the_gil_record(soft):
    """Calls through cuda.bindings come without the GIL; through a GIL-keeping door they show."""
    pointer = soft.alloc(64)

    def record():
        made, held = map(counters().get, ("calls", "gil_held"))
        names = ("cuMemsetD8", "cuCtxSynchronize")
        return np.array([*map(made.get, names), *map(held.get, names), held.total()])

    before = record()
    soft.cuMemsetD8(pointer, 0, 64)
    soft.cuCtxSynchronize()
    assert (record() - before).tolist() == [1, 1, 0, 0, 0]
    assert ctypes.PyDLL(soft.lib._name).cuCtxSynchronize() == 0
    assert (record() - before).tolist() == [1, 2, 0, 1, 1]


def test_module_images_are_checked(soft):
    """Text, foreign ELF machines and other kernel ABIs are refused with the documented codes."""
    load = soft.d.cuModuleLoadData
    image = util.compile_kernel(util.KERNELS)
    assert code(load(b"not an image" + bytes(64))) == "INVALID_IMAGE"
    foreign = image[:18] + (190).to_bytes(2, "little") + image[20:]  # EM_CUDA
    assert code(load(foreign)) == "NO_BINARY_FOR_GPU"
    # The kernel table begins with the ABI and the number of kernels, here one that is found.
    header = (util.SOURCE / "include" / "softcuda_abi.h").read_text()
    abi = int(re.findall(r"SOFTCUDA_ABI (\d+)u", header)[0])
    many = "".join(f'extern "C" __global__ void k{i}(int* p) {{}}\n' for i in range(77))
    image = util.compile_kernel(many)
    table = struct.pack("<II", abi, 77)
    assert image.count(table) == 1
    assert code(load(image.replace(table, struct.pack("<II", 99, 77)))) == "INVALID_IMAGE"
    assert "kernel ABI 99" in soft.refusal()


def test_functions_and_their_attributes(soft, kernels):
    """Functions are found by name; attributes and loading state read back."""
    d = soft.d
    f = kernels.bounded
    user = kernels.shared_user
    assert code(d.cuModuleGetFunction(kernels.module, b"missing")) == "NOT_FOUND"
    assert soft.cuFuncGetName(f) == b"bounded"
    assert int(soft.cuFuncGetModule(f)) == int(kernels.module)
    a = d.CUfunction_attribute
    assert soft.cuFuncGetAttribute(a.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, f) == 64
    soft.cuFuncLoad(f)
    assert int(soft.cuFuncIsLoaded(f)) == 1
    dynamic = a.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    p = soft.ints(0)
    assert code(soft.try_launch(user, 1, 1, p, shared=60000)) == "INVALID_VALUE"
    soft.cuFuncSetAttribute(user, dynamic, 60000)
    soft.run(user, 1, 1, p, shared=60000)
    assert soft.value(p) == 3
    assert code(d.cuFuncSetAttribute(user, dynamic, 1 << 20)) == "INVALID_VALUE"


@pytest.mark.parametrize(
    ("grid", "block"), [(1, (64, 32, 1)), ((1, 70000, 1), 1), (1, (1, 1, 65)), (1, 128)]
)
def test_launch_geometry_is_checked(soft, kernels, grid, block):
    """Grids, blocks and launch bounds outside the device's limits are INVALID_VALUE."""
    assert code(soft.try_launch(kernels.bounded, grid, block, soft.ints(0))) == "INVALID_VALUE"
    assert "'bounded'" in soft.refusal()


def test_versions_choose_the_symbol(soft):
    """cuGetProcAddress answers by name and version."""
    ask = soft.lib.cuGetProcAddress_v2

    def address(name: bytes, version: int) -> tuple[int, int | None, int]:
        pointer = ctypes.c_void_p()
        status = ctypes.c_int()
        rc = ask(name, ctypes.byref(pointer), version, ctypes.c_uint64(0), ctypes.byref(status))
        return rc, pointer.value, status.value

    v1 = address(b"cuLaunchHostFunc", 10000)
    v2 = address(b"cuLaunchHostFunc", 13020)
    assert v1[0] == v2[0] == 0 and v1[1] != v2[1]
    assert address(b"cuLaunchHostFunc", 9000)[::2] == (500, 2)
    assert address(b"cuNothing", 13020)[::2] == (500, 1)
    assert address(b"cuMemAlloc", 13000)[1] == util.address(soft.lib.cuMemAlloc_v2)


def test_a_running_kernel_sees_host_stores_and_does_not_keep_its_process():
    """A kernel that polls mapped pinned memory sees a host store made while it runs; a process that
    exits in the middle of device and host work ends at once."""
    check(
        """
        words, stream, seen = Words(s, 1), s.stream(), s.ints(0)
        s.launch(kernels.wait_for, 1, 1, words.device, seen, stream=stream)
        time.sleep(0.05)
        assert code(d.cuStreamQuery(stream)) == "NOT_READY"
        words[0] = 77
        s.cuStreamSynchronize(stream)
        assert s.value(seen) == 77
        s.launch(kernels.wait_for, 1, 1, s.ints(0), seen, stream=stream)
        s.host(s.stream(), USLEEP, 60_000_000)
        time.sleep(0.05)
        """,
        SOFTCUDA_WORKERS="2",
    )
