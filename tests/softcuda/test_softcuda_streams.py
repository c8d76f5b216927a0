"""Streams, events and host functions of the soft device; modules and launch refusals."""

from __future__ import annotations

import ctypes
import struct
import threading
import time

import numpy as np
import pytest
import softcuda_util as util
from softcuda_util import code

KERNELS = r"""
extern "C" __global__ void append(int* log, int value) { log[1 + log[0]++] = value; }
extern "C" __global__ void wait_for(const volatile int* flag, int* seen) {
  while (*flag == 0) {}
  *seen = *flag;
}
extern "C" __global__ void __launch_bounds__(64) bounded(int* p) { p[threadIdx.x] = 1; }
extern "C" __global__ void shared_user(int* p) { extern __shared__ int s[]; p[0] = s[0] * 0 + 3; }
"""
USLEEP = util.address(ctypes.CDLL(None).usleep)


def host(soft, stream, fn: int, data: int = 0) -> None:
    soft.ok(soft.d.cuLaunchHostFunc_v2(stream, soft.d.CUhostFn(fn), data, 0))


def test_one_stream_runs_in_order(soft, module):
    """Work of one stream runs in the order it was queued, whatever kind it is."""
    stream, append = soft.stream(), soft.function(module, "append")
    log = soft.put(np.zeros(600, np.int32))
    host(soft, stream, USLEEP, 5000)
    for i in range(500):
        soft.ok(soft.launch(append, 1, 1, log, np.int32(i), stream=stream))
        if i % 50 == 0:
            host(soft, stream, USLEEP, 0)
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert soft.get(log, 501, np.int32).tolist() == [500, *range(500)]
    soft.free(log)
    soft.ok(soft.d.cuStreamDestroy(stream))


def test_streams_run_beside_each_other_and_events_order_them(soft, module):
    """A stream waits for another's event and for nothing else of it."""
    a, b = soft.stream(), soft.stream()
    event = soft.ok(soft.d.cuEventCreate(0))
    gate = threading.Event()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gate.wait(10) and None)
    append = soft.function(module, "append")
    log = soft.put(np.zeros(10, np.int32))
    assert code(soft.d.cuEventQuery(event)) == "CUDA_SUCCESS"  # never recorded: complete
    host(soft, a, util.address(callback))
    soft.ok(soft.d.cuEventRecord(event, a))
    soft.ok(soft.launch(append, 1, 1, log, np.int32(1), stream=b))
    soft.ok(soft.d.cuStreamSynchronize(b))  # b is free although a is held
    soft.ok(soft.d.cuStreamWaitEvent(b, event, 0))
    soft.ok(soft.launch(append, 1, 1, log, np.int32(2), stream=b))
    assert code(soft.d.cuStreamQuery(b)) == "CUDA_ERROR_NOT_READY"
    assert code(soft.d.cuEventQuery(event)) == "CUDA_ERROR_NOT_READY"
    gate.set()
    soft.ok(soft.d.cuStreamSynchronize(b))
    assert code(soft.d.cuEventQuery(event)) == "CUDA_SUCCESS"
    assert soft.get(log, 3, np.int32).tolist() == [2, 1, 2]
    soft.ok(soft.d.cuEventDestroy(event))
    soft.free(log)
    for stream in (a, b):
        soft.ok(soft.d.cuStreamDestroy(stream))


def test_a_wait_binds_to_the_record_of_its_moment(soft, module):
    """Recording an event again does not move a wait that was queued before."""
    a, b = soft.stream(), soft.stream()
    event = soft.ok(soft.d.cuEventCreate(0))
    gate = threading.Event()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gate.wait(10) and None)
    soft.ok(soft.d.cuEventRecord(event, a))
    soft.ok(soft.d.cuStreamWaitEvent(b, event, 0))
    host(soft, a, util.address(callback))
    soft.ok(soft.d.cuEventRecord(event, a))
    soft.ok(soft.d.cuStreamSynchronize(b))
    assert code(soft.d.cuEventQuery(event)) == "CUDA_ERROR_NOT_READY"
    gate.set()
    soft.ok(soft.d.cuEventSynchronize(event))
    soft.ok(soft.d.cuEventDestroy(event))
    for stream in (a, b):
        soft.ok(soft.d.cuStreamDestroy(stream))


def test_elapsed_time(soft):
    """Elapsed time covers what ran between two events; untimed or unrecorded ones are refused."""
    stream = soft.stream()
    timed = [soft.ok(soft.d.cuEventCreate(0)) for _ in range(3)]
    untimed = soft.ok(soft.d.cuEventCreate(2))
    soft.ok(soft.d.cuEventRecord(timed[0], stream))
    host(soft, stream, USLEEP, 20000)
    soft.ok(soft.d.cuEventRecord(timed[1], stream))
    soft.ok(soft.d.cuEventRecord(untimed, stream))
    elapsed = soft.d.cuEventElapsedTime(timed[0], timed[1])
    assert code(elapsed) in ("CUDA_ERROR_NOT_READY", "CUDA_SUCCESS")
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert soft.ok(soft.d.cuEventElapsedTime(timed[0], timed[1])) >= 19.9
    assert soft.ok(soft.d.cuEventElapsedTime(timed[1], timed[0])) <= -19.9
    for bad in (timed[2], untimed):
        assert code(soft.d.cuEventElapsedTime(timed[0], bad)) == "CUDA_ERROR_INVALID_HANDLE"
    for event in (*timed, untimed):
        soft.ok(soft.d.cuEventDestroy(event))
    soft.ok(soft.d.cuStreamDestroy(stream))


def test_legacy_stream_joins_blocking_streams_only(soft, module):
    """The NULL stream waits for blocking streams and not for non-blocking ones."""
    blocking = soft.ok(soft.d.cuStreamCreate(0))
    other = soft.stream()
    gates = [threading.Event(), threading.Event()]
    calls = [
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _, g=gate: g.wait(10) and None)
        for gate in gates
    ]
    raw = [util.address(call) for call in calls]
    p = soft.alloc(4)
    host(soft, other, raw[1])
    soft.ok(soft.d.cuMemsetD8Async(p, 1, 4, 0))
    # One host-function thread: this one runs after the other stream's, so open that first.
    gates[1].set()
    host(soft, blocking, raw[0])
    soft.ok(soft.d.cuMemsetD8Async(p, 2, 4, 0))
    assert code(soft.d.cuStreamQuery(0)) == "CUDA_ERROR_NOT_READY"
    gates[0].set()
    soft.ok(soft.d.cuStreamSynchronize(0))
    assert code(soft.d.cuStreamQuery(blocking)) == "CUDA_SUCCESS"
    soft.free(p)
    for stream in (blocking, other):
        soft.ok(soft.d.cuStreamDestroy(stream))


def test_mapped_memory_is_seen_while_a_kernel_runs(soft, module):
    """A kernel that polls mapped pinned memory sees a host store made while it runs."""
    done = util.run_child(
        f"""
        m = s.module({KERNELS!r})
        host = s.ok(d.cuMemHostAlloc(64, 3))
        flag = (ctypes.c_int * 16).from_address(host)
        alias = int(s.ok(d.cuMemHostGetDevicePointer(host, 0)))
        stream, seen = s.stream(), s.put(np.zeros(1, np.int32))
        s.ok(s.launch(s.function(m, "wait_for"), 1, 1, alias, seen, stream=stream))
        time.sleep(0.05)
        assert d.cuStreamQuery(stream)[0].name == "CUDA_ERROR_NOT_READY"
        flag[0] = 77
        s.ok(d.cuStreamSynchronize(stream))
        print(s.get(seen, 1, np.int32)[0])
        """
    )
    assert done.stdout.strip() == "77", done.stderr


def test_handles_are_never_reused(soft, module):
    """A destroyed stream's or event's handle is INVALID_HANDLE for good."""
    stream, event = soft.stream(), soft.ok(soft.d.cuEventCreate(0))
    soft.ok(soft.d.cuStreamDestroy(stream))
    soft.ok(soft.d.cuEventDestroy(event))
    fresh = [soft.stream() for _ in range(5)]
    invalid = "CUDA_ERROR_INVALID_HANDLE"
    assert code(soft.d.cuStreamSynchronize(stream)) == invalid
    assert code(soft.d.cuStreamDestroy(stream)) == invalid
    assert code(soft.d.cuEventRecord(event, fresh[0])) == invalid
    assert code(soft.d.cuStreamWaitEvent(fresh[0], event, 0)) == invalid
    for item in fresh:
        soft.ok(soft.d.cuStreamDestroy(item))


def test_stream_properties(soft):
    """Flags, priority, id and capture state of a stream read back."""
    least, greatest = soft.ok(soft.d.cuCtxGetStreamPriorityRange())
    stream = soft.ok(soft.d.cuStreamCreateWithPriority(1, greatest - 3))
    assert int(soft.ok(soft.d.cuStreamGetFlags(stream))) == 1
    assert soft.ok(soft.d.cuStreamGetPriority(stream)) == greatest < least == 0
    assert int(soft.ok(soft.d.cuStreamGetCtx(stream))) == int(soft.context)
    status = soft.ok(soft.d.cuStreamIsCapturing(stream))
    assert status == soft.d.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    assert soft.ok(soft.d.cuStreamGetCaptureInfo(stream))[0] == status
    soft.ok(soft.d.cuStreamDestroy(stream))


# ---- host functions ---------------------------------------------------------------------------
def test_raw_host_functions_run_while_the_gil_is_held(soft):
    """A C host function given to the v2 entry needs no GIL."""
    stream = soft.stream()
    before = soft.count("host_func")
    held = ctypes.PyDLL(soft.lib._name)  # calls through it keep the GIL
    soft.ok(soft.d.cuLaunchHostFunc_v2(stream, soft.d.CUhostFn(USLEEP), 1000, 0))
    end = time.monotonic() + 20
    handle = ctypes.c_void_p(int(stream))
    while held.softcuda_count(b"host_func") == before and time.monotonic() < end:
        held.usleep(1000)
    # From here to the answer this thread never gives the GIL up.
    while held.cuStreamQuery(handle) == 600 and time.monotonic() < end:
        held.usleep(1000)
    assert held.cuStreamQuery(handle) == 0
    soft.ok(soft.d.cuStreamDestroy(stream))


def test_the_gil_record(soft):
    """Calls through cuda.bindings come without the GIL; through a GIL-keeping door they show."""
    pointer = soft.alloc(64)


    def record():
        names = (b"cuMemsetD8", b"cuCtxSynchronize", None)
        held = [soft.lib.softcuda_gil_held(name) for name in names]
        return np.array([*(soft.lib.softcuda_calls(name) for name in names[:2]), *held])

    before = record()
    soft.ok(soft.d.cuMemsetD8(pointer, 0, 64))
    soft.ok(soft.d.cuCtxSynchronize())
    assert (record() - before).tolist() == [1, 1, 0, 0, 0]
    assert ctypes.PyDLL(soft.lib._name).cuCtxSynchronize() == 0
    assert (record() - before).tolist() == [1, 2, 0, 1, 1]
    soft.free(pointer)


# ---- modules and launches ---------------------------------------------------------------------
def test_module_images_are_checked(soft):
    """Text, foreign ELF machines and truncated tables are refused with the documented codes."""
    d = soft.d
    assert code(d.cuModuleLoadData(b"not an image" + bytes(64))) == "CUDA_ERROR_INVALID_IMAGE"
    image = bytearray(util.compile_kernel(KERNELS))
    image[18:20] = (190).to_bytes(2, "little")  # EM_CUDA
    assert code(d.cuModuleLoadData(bytes(image))) == "CUDA_ERROR_NO_BINARY_FOR_GPU"
    # The kernel ABI is the first word of the exported table; another one is refused by name.
    image = bytearray(util.compile_kernel(KERNELS))
    offset = softcuda_table_offset(bytes(image))
    abi = int.from_bytes(image[offset : offset + 4], "little")
    image[offset : offset + 4] = (abi + 1).to_bytes(4, "little")
    assert code(d.cuModuleLoadData(bytes(image))) == "CUDA_ERROR_INVALID_IMAGE"
    assert f"kernel ABI {abi + 1}" in soft.refusal()


def softcuda_table_offset(image: bytes) -> int:
    """File offset of the exported kernel table, from the ELF symbol and section tables."""
    at, (size, count) = (
        int.from_bytes(image[0x28:0x30], "little"),
        struct.unpack_from("<HH", image, 0x3A),
    )
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, at + i * size) for i in range(count)]
    for section in sections:
        if section[1] != 2:  # SHT_SYMTAB
            continue
        names = sections[section[6]][4]
        for entry in range(section[4], section[4] + section[5], 24):
            name, _, _, index, value, _ = struct.unpack_from("<IBBHQQ", image, entry)
            if image[names + name :].startswith(b"softcuda_image_v\0"):
                home = sections[index]
                return value - home[3] + home[4]
    raise AssertionError("the image exports no kernel table")


def test_functions_and_their_attributes(soft, module):
    """Functions are found by name; attributes and loading state read back."""
    d = soft.d
    assert code(d.cuModuleGetFunction(module, b"missing")) == "CUDA_ERROR_NOT_FOUND"
    assert code(d.cuModuleGetGlobal(module, b"anything")) == "CUDA_ERROR_NOT_FOUND"
    f = soft.function(module, "bounded")
    assert soft.ok(d.cuFuncGetName(f)) == b"bounded"
    assert int(soft.ok(d.cuFuncGetModule(f))) == int(module)
    a = d.CUfunction_attribute
    most = a.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    assert soft.ok(d.cuFuncGetAttribute(most, f)) == 64
    soft.ok(d.cuFuncLoad(f))
    loaded = soft.ok(d.cuFuncIsLoaded(f))
    assert loaded == d.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED
    dynamic = a.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    user = soft.function(module, "shared_user")
    p = soft.alloc(4)
    refused = soft.launch(user, 1, 1, p, shared=60000)
    assert code(refused) == "CUDA_ERROR_INVALID_VALUE"
    soft.ok(d.cuFuncSetAttribute(user, dynamic, 60000))
    soft.run(user, 1, 1, p, shared=60000)
    assert soft.get(p, 1, np.int32)[0] == 3
    assert code(d.cuFuncSetAttribute(user, dynamic, 1 << 20)) == "CUDA_ERROR_INVALID_VALUE"
    soft.free(p)


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((0, 1, 1), 1),
        (1, (0, 1, 1)),
        (1, 1025),
        (1, (64, 32, 1)),
        ((1, 70000, 1), 1),
        (1, (1, 1, 65)),
        (1, 128),
    ],
)
def test_launch_geometry_is_checked(soft, module, grid, block):
    """Grids, blocks and launch bounds outside the device's limits are INVALID_VALUE."""
    p = soft.alloc(4096)
    f = soft.function(module, "bounded")
    assert code(soft.launch(f, grid, block, p)) == "CUDA_ERROR_INVALID_VALUE"
    assert "'bounded'" in soft.refusal()
    soft.free(p)


def test_versions_choose_the_symbol(soft):
    """cuGetProcAddress answers by name and version."""
    ask = soft.lib.cuGetProcAddress_v2

    def address(name: bytes, version: int) -> tuple[int, int | None, int]:
        pointer, status = ctypes.c_void_p(), ctypes.c_int()
        rc = ask(name, ctypes.byref(pointer), version, ctypes.c_uint64(0), ctypes.byref(status))
        return rc, pointer.value, status.value

    v1, v2 = address(b"cuLaunchHostFunc", 10000), address(b"cuLaunchHostFunc", 13020)
    assert v1[0] == v2[0] == 0 and v1[1] != v2[1]
    assert address(b"cuLaunchHostFunc", 9000)[::2] == (500, 2)
    assert address(b"cuNothing", 13020)[::2] == (500, 1)
    assert (
        address(b"cuMemAlloc", 13000)[1]
        == ctypes.cast(soft.lib.cuMemAlloc_v2, ctypes.c_void_p).value
    )


def test_process_exit_never_hangs():
    """A process that exits in the middle of device and host work ends at once."""
    done = util.run_child(
        f"""
        m = s.module({KERNELS!r})
        flag, seen = s.put(np.zeros(1, np.int32)), s.alloc(4)
        s.launch(s.function(m, "wait_for"), 1, 1, flag, seen, stream=s.stream())
        usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
        d.cuLaunchHostFunc_v2(s.stream(), d.CUhostFn(usleep), 60_000_000, 0)
        time.sleep(0.05)
        """,
        limit=20,
        SOFTCUDA_WORKERS="2",
    )
    assert done.returncode == 0, done.stderr


def test_many_threads_may_call_at_once(soft, module):
    """Concurrent allocation, launches, copies and frees from several threads stay correct."""
    append = soft.function(module, "append")
    failures = []

    def work(seed: int) -> None:
        soft.ok(soft.d.cuCtxSetCurrent(soft.context))
        stream = soft.stream()
        for i in range(40):
            log = soft.put(np.zeros(8, np.int32))
            for j in range(4):
                soft.ok(soft.launch(append, 1, 1, log, np.int32(seed + j), stream=stream))
            soft.ok(soft.d.cuStreamSynchronize(stream))
            if soft.get(log, 5, np.int32).tolist() != [4, *range(seed, seed + 4)]:
                failures.append((seed, i))
            soft.free(log)
        soft.ok(soft.d.cuStreamDestroy(stream))

    threads = [threading.Thread(target=work, args=(100 * t,)) for t in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []
