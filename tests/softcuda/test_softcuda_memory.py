"""Memory of the soft device: aliases, bounds, pinned memory, copies and fills."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
import softcuda_util as util
from softcuda_util import code

COPY = r"""
extern "C" __global__ void copy(const int* in, int* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i];
}
"""


@pytest.fixture(scope="module")
def copy(soft):
    module = soft.module(COPY)
    yield soft.function(module, "copy")
    soft.ok(soft.d.cuModuleUnload(module))


def test_round_trip_and_interior_pointers(soft, copy):
    """What is copied in comes back; pointers into the middle of an allocation work everywhere."""
    data = np.arange(1000, dtype=np.int32)
    a, b = soft.put(data), soft.alloc(4000)
    soft.run(copy, 4, 128, a + 400, b + 400, np.int32(500))
    out = np.empty(500, np.int32)
    soft.ok(soft.d.cuMemcpyDtoH(out.ctypes.data, b + 400, 2000))
    assert np.array_equal(out, data[100:600])
    soft.free(a, b)


def test_addresses_are_aligned_and_never_reused(soft):
    """Allocations are aligned for any type; a freed address waits until the others are used."""
    seen = set()
    for size in (1, 3, 100, 256, 4096, 70000):
        for _ in range(20):
            pointer = soft.alloc(size)
            assert pointer % 256 == 0
            assert pointer not in seen
            seen.add(pointer)
            soft.free(pointer)


def test_host_code_cannot_follow_a_device_pointer():
    """Dereferencing a device address on the host ends the process, saying what happened."""
    done = util.run_child(
        """
        p = s.put(np.ones(4, np.float32))
        ctypes.string_at(p, 4)
        """
    )
    assert done.returncode < 0
    assert "host code touched device address" in done.stderr


def test_copies_check_bounds_and_lifetime(soft):
    """A copy past an allocation's end or into freed memory is INVALID_VALUE and copies nothing."""
    host = np.zeros(64, np.uint8)
    p = soft.alloc(64)
    assert code(soft.d.cuMemcpyHtoD(p, host.ctypes.data, 64)) == "CUDA_SUCCESS"
    assert code(soft.d.cuMemcpyHtoD(p, host.ctypes.data, 65)) == "CUDA_ERROR_INVALID_VALUE"
    assert "past the end of device allocation" in soft.refusal()
    assert code(soft.d.cuMemcpyDtoH(host.ctypes.data, p + 1, 64)) == "CUDA_ERROR_INVALID_VALUE"
    assert code(soft.d.cuMemsetD8(p + 60, 0, 5)) == "CUDA_ERROR_INVALID_VALUE"
    assert code(soft.d.cuMemsetD32(p + 2, 0, 1)) == "CUDA_ERROR_INVALID_VALUE"
    soft.free(p)
    assert code(soft.d.cuMemcpyDtoH(host.ctypes.data, p, 1)) == "CUDA_ERROR_INVALID_VALUE"
    assert "freed device allocation" in soft.refusal()
    assert code(soft.d.cuMemFree(p)) == "CUDA_ERROR_INVALID_VALUE"


def test_free_takes_only_the_start_of_an_allocation(soft):
    """cuMemFree of an interior, unknown or pinned pointer is refused; of NULL it is allowed."""
    p = soft.alloc(64)
    host = soft.ok(soft.d.cuMemHostAlloc(64, 2))
    assert code(soft.d.cuMemFree(p + 16)) == "CUDA_ERROR_INVALID_VALUE"
    assert code(soft.d.cuMemFree(host)) == "CUDA_ERROR_INVALID_VALUE"
    assert code(soft.d.cuMemFree(0)) == "CUDA_SUCCESS"
    soft.ok(soft.d.cuMemFreeHost(host))
    soft.free(p)


def test_kernel_pointers_are_checked_at_launch(soft, copy):
    """A kernel never starts with a freed, unknown or host pointer; the parameter is named."""
    good = soft.put(np.zeros(4, np.int32))
    gone = soft.alloc(16)
    soft.free(gone)
    pageable = np.zeros(4, np.int32)
    n = np.int32(4)
    for bad, word in (
        (gone, "freed"),
        (good + 100000, "no allocation"),
        (pageable.ctypes.data, "pageable host memory"),
    ):
        assert code(soft.launch(copy, 1, 4, good, bad, n)) == "CUDA_ERROR_INVALID_VALUE"
        assert "'copy' parameter 1" in soft.refusal()
        assert word in soft.refusal()
    soft.run(copy, 1, 4, 0, 0, np.int32(0))  # NULL stays NULL
    soft.free(good)


def test_pinned_memory_has_its_own_device_address(soft, copy):
    """Mapped pinned memory is one memory with two addresses; kernels are given the device's."""
    host = soft.ok(soft.d.cuMemHostAlloc(400, 1 | 2))
    view = np.ctypeslib.as_array((ctypes.c_int32 * 100).from_address(host))
    view[:] = np.arange(100)
    alias = int(soft.ok(soft.d.cuMemHostGetDevicePointer(host, 0)))
    assert alias != host
    inside = int(soft.ok(soft.d.cuMemHostGetDevicePointer(host + 40, 0)))
    assert inside == alias + 40
    out = soft.alloc(400)
    assert code(soft.launch(copy, 1, 128, host, out, np.int32(100))) == "CUDA_ERROR_INVALID_VALUE"
    assert "SOFTCUDA_ALIASES_ONLY" in soft.refusal()
    soft.run(copy, 1, 128, alias, out, np.int32(100))
    assert np.array_equal(soft.get(out, 100, np.int32), np.arange(100))
    soft.run(copy, 1, 128, out, inside, np.int32(90))
    assert view[10:100].tolist() == list(range(90))
    soft.free(out)
    soft.ok(soft.d.cuMemFreeHost(host))
    assert code(soft.d.cuMemHostGetDevicePointer(host, 0)) == "CUDA_ERROR_INVALID_VALUE"


def test_registered_host_memory(soft):
    """Registering makes caller's memory pinned until it is unregistered, never twice."""
    memory = np.arange(1024, dtype=np.uint8)
    p = memory.ctypes.data
    soft.ok(soft.d.cuMemHostRegister(p, 1024, 2))
    twice = soft.d.cuMemHostRegister(p + 100, 10, 2)
    assert code(twice) == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    alias = int(soft.ok(soft.d.cuMemHostGetDevicePointer(p, 0)))
    assert np.array_equal(soft.get(alias, 1024, np.uint8), memory)
    assert code(soft.d.cuStreamWriteValue32(0, p, 1, 0)) == "CUDA_ERROR_INVALID_VALUE"
    assert "in registered memory" in soft.refusal()
    soft.ok(soft.d.cuMemHostUnregister(p))
    assert code(soft.d.cuMemHostUnregister(p)) == "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"
    assert memory[5] == 5


def test_fills_of_every_width(soft):
    """8-, 16- and 32-bit fills write their element, and only their range."""
    p = soft.put(np.zeros(64, np.uint8))
    soft.ok(soft.d.cuMemsetD8(p + 1, 0xAB, 3))
    soft.ok(soft.d.cuMemsetD16(p + 8, 0x1234, 4))
    soft.ok(soft.d.cuMemsetD32(p + 32, 0xDEADBEEF, 2))
    out = soft.get(p, 64, np.uint8)
    expected = np.zeros(64, np.uint8)
    expected[1:4] = 0xAB
    expected[8:16].view(np.uint16)[:] = 0x1234
    expected[32:40].view(np.uint32)[:] = 0xDEADBEEF
    assert np.array_equal(out, expected)
    soft.free(p)


def test_unified_copies_take_either_side(soft):
    """cuMemcpy finds out which side is the host's."""
    a, b = soft.put(np.arange(8, dtype=np.int64)), soft.alloc(64)
    host = np.zeros(8, np.int64)
    soft.ok(soft.d.cuMemcpy(b, a, 64))
    soft.ok(soft.d.cuMemcpy(host.ctypes.data, b, 64))
    assert host.tolist() == list(range(8))
    host[:] = 5
    soft.ok(soft.d.cuMemcpy(a, host.ctypes.data, 64))
    assert soft.get(a, 8, np.int64).tolist() == [5] * 8
    soft.free(a, b)


def test_asynchronous_copies_take_pageable_sources_at_the_call(soft):
    """A pageable source may be overwritten as soon as an asynchronous copy has returned."""
    stream = soft.stream()
    sleep = util.address(ctypes.CDLL(None).usleep)
    p = soft.alloc(1 << 16)
    source = np.full(1 << 14, 7, np.int32)
    soft.ok(soft.d.cuLaunchHostFunc_v2(stream, soft.d.CUhostFn(sleep), 30000, 0))
    soft.ok(soft.d.cuMemcpyHtoDAsync(p, source.ctypes.data, source.nbytes, stream))
    source[:] = 9
    back = np.zeros(1 << 14, np.int32)
    # A pageable destination: the call returns when the copy is over.
    soft.ok(soft.d.cuMemcpyDtoHAsync(back.ctypes.data, p, back.nbytes, stream))
    assert (back == 7).all()
    soft.free(p)
    soft.ok(soft.d.cuStreamDestroy(stream))


def test_poisoned_memory():
    """With SOFTCUDA_POISON=1 fresh device memory reads as NaN, so missing writes show."""
    done = util.run_child(
        "print(np.isnan(s.get(s.alloc(4096), 1024, np.float32)).all())", SOFTCUDA_POISON="1"
    )
    assert done.stdout.strip() == "True", done.stderr


def test_allocation_needs_a_current_context(soft):
    """A thread that made no context current cannot allocate; the context stack nests."""
    d = soft.d
    names: list[str | int] = []

    def work() -> None:
        names.append(code(d.cuMemAlloc(16)))
        names.append(code(d.cuCtxGetDevice()))
        soft.ok(d.cuCtxPushCurrent(soft.context))
        pointer = soft.alloc(16)
        soft.free(pointer)
        soft.ok(d.cuCtxPopCurrent())
        names.append(int(soft.ok(d.cuCtxGetCurrent())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert names == ["CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_CONTEXT", 0]
