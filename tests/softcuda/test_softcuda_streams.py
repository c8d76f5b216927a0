"""Streams, events, modules, functions and kernel launches of the soft device."""

from __future__ import annotations

import ctypes
import re
import struct
import threading

import numpy as np
import pytest
import softcuda_util as util
from softcuda_util import CALLBACK, USLEEP, check, code, codes, in_threads

from graft.cudagraph.driver.softstats import counters


@pytest.fixture
def gate():
    """A threading.Event. Its attribute ``callback`` is a host function that waits for the event."""
    opened = threading.Event()
    opened.callback = CALLBACK(lambda _: opened.wait(10) and None)
    return opened


def test_streams_run_concurrently_and_wait_for_events(soft, kernels, stream, other, event, gate):
    """A stream wait covers the work before the last record of the event, and nothing else.

    It does not cover later records of the event or other work on the recording stream.
    """
    log = soft.ints(0, 0, 0)
    assert code(soft.d.cuEventQuery(event)) == "SUCCESS"  # an event that was never recorded
    soft.cuEventRecord(event, stream)
    soft.cuStreamWaitEvent(other, event, 0)  # waits for the record in the line above
    soft.host(stream, gate.callback)
    soft.cuEventRecord(event, stream)
    soft.launch_int(kernels.append, log, 1, other)
    soft.cuStreamSynchronize(other)  # completes although `stream` is blocked
    soft.cuStreamWaitEvent(other, event, 0)
    soft.launch_int(kernels.append, log, 2, other)
    assert codes(soft.d.cuStreamQuery(other), soft.d.cuEventQuery(event)) == {"NOT_READY"}
    gate.set()
    soft.cuStreamSynchronize(other)
    assert code(soft.d.cuEventQuery(event)) == "SUCCESS"
    assert soft.get(log, 3, np.int32).tolist() == [2, 1, 2]


def test_event_elapsed_time_covers_work_between_events(soft, stream):
    """cuEventElapsedTime measures the work between two records.

    It rejects events without timing and events that were never recorded.
    """
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
    never_recorded = elapsed(timed[0], timed[2])
    without_timing = elapsed(timed[0], untimed)
    assert codes(never_recorded, without_timing) == {"INVALID_HANDLE"}


def test_legacy_stream_waits_for_blocking_streams_only(soft, other, gate):
    blocking = soft.cuStreamCreate(0)
    p = soft.ints(0)
    held = threading.Event()
    callback = CALLBACK(lambda _: held.wait(10) and None)
    soft.host(other, callback)
    soft.cuMemsetD8Async(p, 1, 4, 0)
    # Host functions run on one thread, so the first one must return before the next one starts.
    held.set()
    soft.host(blocking, gate.callback)
    soft.cuMemsetD8Async(p, 2, 4, 0)
    assert code(soft.d.cuStreamQuery(0)) == "NOT_READY"
    gate.set()
    soft.cuStreamSynchronize(0)
    assert code(soft.d.cuStreamQuery(blocking)) == "SUCCESS"


def test_per_thread_stream_is_separate_for_each_thread(soft, kernels):
    """Each thread has its own CU_STREAM_PER_THREAD, which is destroyed when the thread exits.

    The stream runs its work in order, waits for the legacy stream, and can capture.
    """
    own = soft.d.CUstream(2)
    log = soft.ints(*[0] * 128)
    add = kernels.append

    def work(_):
        soft.cuCtxSetCurrent(soft.context)
        soft.cuMemsetD32Async(log, 0, 1, 0)  # on the legacy stream
        for i in range(100):
            soft.launch_int(add, log, i, own)
        soft.cuStreamSynchronize(own)
        assert soft.get(log, 101, np.int32).tolist() == [100, *range(100)]
        soft.begin(own, 2)
        soft.launch_int(add, log, 1, own)
        graph = soft.cuStreamEndCapture(own)
        assert soft.cuGraphGetNodes(graph, 0)[1] == 1
        soft.cuGraphDestroy(graph)
        return int(soft.cuStreamGetId(own))

    before = soft.live()
    assert in_threads(work, 0) != in_threads(work, 0)
    assert soft.live() == before


def test_stream_queries_return_flags_priority_and_context(soft):
    """A stream has the flags, priority and context of its creation. Priorities are clamped."""
    least, greatest = soft.cuCtxGetStreamPriorityRange()
    stream = soft.cuStreamCreateWithPriority(1, greatest - 3)
    assert int(soft.cuStreamGetFlags(stream)) == 1
    assert soft.cuStreamGetPriority(stream) == greatest < least == 0
    assert int(soft.cuStreamGetCtx(stream)) == int(soft.context)


def test_stream_and_event_handles_are_never_reused(soft, stream, event):
    """The handle of a destroyed object stays invalid after other objects were created."""
    d = soft.d
    soft.cuStreamDestroy(stream)
    soft.cuEventDestroy(event)
    new, *_ = [soft.stream() for _ in range(5)]
    assert codes(
        d.cuStreamSynchronize(stream),
        d.cuStreamDestroy(stream),
        d.cuEventRecord(event, new),
        d.cuStreamWaitEvent(new, event, 0),
    ) == {"INVALID_HANDLE"}


def test_gil_counters_count_calls_that_hold_the_gil(soft):
    """Only driver calls of threads that hold the GIL are counted in the group ``gil_held``.

    cuda.bindings releases the GIL during driver calls. Calls through ctypes.PyDLL do not release
    it.
    """
    pointer = soft.alloc(64)

    def call_counts():
        current = counters()
        calls = current["calls"]
        held = current["gil_held"]
        names = ("cuMemsetD8", "cuCtxSynchronize")
        by_name = [calls[name] for name in names] + [held[name] for name in names]
        return np.array([*by_name, held.total()])

    before = call_counts()
    soft.cuMemsetD8(pointer, 0, 64)
    soft.cuCtxSynchronize()
    assert (call_counts() - before).tolist() == [1, 1, 0, 0, 0]
    assert ctypes.PyDLL(soft.lib._name).cuCtxSynchronize() == 0
    assert (call_counts() - before).tolist() == [1, 2, 0, 1, 1]


def test_module_load_rejects_invalid_images(soft):
    """Loading an invalid image returns the documented error code.

    Invalid images are files that are not ELF files, images with GPU code, and images with another
    kernel ABI.
    """
    load = soft.d.cuModuleLoadData
    image = util.compile_kernel(util.KERNELS)
    assert code(load(b"not an image" + bytes(64))) == "INVALID_IMAGE"
    foreign = image[:18] + (190).to_bytes(2, "little") + image[20:]  # EM_CUDA
    assert code(load(foreign)) == "NO_BINARY_FOR_GPU"
    # The kernel table begins with the ABI number and the number of kernels. An image with 77
    # kernels contains these bytes only once, so that the test can find the table.
    header = (util.SOURCE / "include" / "softcuda_abi.h").read_text()
    abi = int(re.findall(r"SOFTCUDA_ABI (\d+)u", header)[0])
    many = "".join(f'extern "C" __global__ void k{i}(int* p) {{}}\n' for i in range(77))
    image = util.compile_kernel(many)
    table = struct.pack("<II", abi, 77)
    assert image.count(table) == 1
    assert code(load(image.replace(table, struct.pack("<II", 99, 77)))) == "INVALID_IMAGE"
    assert "kernel ABI 99" in soft.refusal()


def test_functions_are_found_by_name_and_have_attributes(soft, kernels):
    """Functions are found by name, and have a loading state and a limit of shared memory."""
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
    ("grid", "block"),
    [
        (1, (64, 32, 1)),  # 2048 threads per block
        ((1, 70000, 1), 1),
        (1, (1, 1, 65)),
        (1, 128),  # exceeds the launch bounds of 64
    ],
)
def test_launch_rejects_invalid_grid_and_block_dimensions(soft, kernels, grid, block):
    """Grid and block sizes above the device's limits or the launch bounds are rejected."""
    assert code(soft.try_launch(kernels.bounded, grid, block, soft.ints(0))) == "INVALID_VALUE"
    assert "'bounded'" in soft.refusal()


def test_get_proc_address_selects_symbol_by_version(soft):
    def address(name: bytes, version: int) -> tuple[int, int | None, int]:
        """Return (error code, address, status)."""
        pointer = ctypes.c_void_p()
        status = ctypes.c_int()
        error = soft.lib.cuGetProcAddress_v2(
            name, ctypes.byref(pointer), version, ctypes.c_uint64(0), ctypes.byref(status)
        )
        return error, pointer.value, status.value

    v1 = address(b"cuLaunchHostFunc", 10000)
    v2 = address(b"cuLaunchHostFunc", 13020)
    assert v1[0] == v2[0] == 0 and v1[1] != v2[1]
    assert address(b"cuLaunchHostFunc", 9000)[::2] == (500, 2)
    assert address(b"cuNothing", 13020)[::2] == (500, 1)
    assert address(b"cuMemAlloc", 13000)[1] == util.address(soft.lib.cuMemAlloc_v2)


def test_running_kernel_sees_host_stores_and_does_not_block_exit():
    """A running kernel sees a value that the host writes to pinned memory.

    A process can exit immediately while a kernel and a host function are running.
    """
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


def test_occupancy_follows_device_limits(soft, kernels):
    """Blocks per multiprocessor are limited by threads, shared memory and launch bounds."""
    d = soft.d
    blocks = soft.cuOccupancyMaxActiveBlocksPerMultiprocessor
    assert [blocks(kernels.add, size, 0) for size in (32, 64, 1000, 2048)] == [32, 32, 2, 0]
    assert blocks(kernels.add, 64, 40000) == 5
    assert blocks(kernels.add, 64, 50000) == 0  # requires cuFuncSetAttribute
    grid, block = soft.cuOccupancyMaxPotentialBlockSize(kernels.add, None, 0, 0)
    workers = soft.cuDeviceGetAttribute(d.CUdevice_attribute(16), 0)
    assert (block, grid) == (1024, 2 * workers)
    limited = soft.cuOccupancyMaxPotentialBlockSize(kernels.add, None, 0, 100)
    assert limited == (32 * workers, 64)  # 64 threads in 32 blocks, or 96 in 21
    shared = soft.cuOccupancyAvailableDynamicSMemPerBlock(kernels.add, 2, 128)
    assert blocks(kernels.add, 128, 0) >= 2 and shared == 48 * 1024  # the kernel's limit
    assert soft.cuOccupancyAvailableDynamicSMemPerBlock(kernels.add, 8, 128) == 233472 // 8 - 1024
    results = (
        d.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernels.add, 0, 0),
        d.cuOccupancyMaxPotentialBlockSize(kernels.add, None, 0, -1),
        d.cuOccupancyAvailableDynamicSMemPerBlock(kernels.add, 33, 64),
    )
    assert codes(*results) == {"INVALID_VALUE"}


def test_function_attributes_are_returned_as_set(soft, kernels):
    """The preferred carveout is stored. Attributes of registers and clusters are zero."""
    carveout = soft.d.CUfunction_attribute(9)
    function = kernels.add
    assert soft.cuFuncGetAttribute(carveout, function) == -1
    soft.cuFuncSetAttribute(function, carveout, 50)
    assert soft.cuFuncGetAttribute(carveout, function) == 50
    assert code(soft.d.cuFuncSetAttribute(function, carveout, 101)) == "INVALID_VALUE"
    for number in (2, 3, 4, 7, *range(10, 16)):
        assert soft.cuFuncGetAttribute(soft.d.CUfunction_attribute(number), function) == 0
