"""Memory of the soft device: device addresses, bounds, pinned memory, copies and memsets."""

from __future__ import annotations

import ctypes

import numpy as np
from softcuda_util import USLEEP, code, codes, in_threads, run_child


def test_memory_allocations_are_aligned_and_addresses_not_reused(soft):
    """Allocations are aligned. A freed address is not reused while other addresses are free."""
    seen = set()
    for size in (1, 3, 100, 256, 4096, 70000):
        for _ in range(20):
            pointer = soft.alloc(size)
            assert pointer % 256 == 0 and pointer not in seen
            seen.add(pointer)
            soft.cuMemFree(pointer)


def test_memory_host_access_to_device_address_ends_process():
    """Host code that dereferences a device address gets a segmentation fault and an explanation.

    The explanation is printed to standard error.
    """
    done = run_child("ctypes.string_at(s.ints(1), 4)")
    assert done.returncode < 0 and "host code accessed device address" in done.stderr


def test_memory_copy_memset_and_free_check_bounds_and_lifetime(soft, words):
    """Copies, memsets and cuMemFree return INVALID_VALUE for invalid addresses and ranges.

    A copy or memset rejects a range that exceeds its allocation or lies in freed memory. cuMemFree
    rejects an address that is not the start of an allocation of device memory. It accepts NULL.
    """
    d = soft.d
    host = np.zeros(128, np.uint8).ctypes.data
    p = soft.alloc(64)
    assert codes(
        d.cuMemcpyDtoH(host, p + 1, 64),
        d.cuMemsetD8(p + 60, 0, 5),
        d.cuMemsetD32(p + 2, 0, 1),
        d.cuMemFree(p + 16),
        d.cuMemFree(words.host),
    ) == {"INVALID_VALUE"}
    assert code(d.cuMemcpyHtoD(p, host, 65)) == "INVALID_VALUE"
    assert "past the end of device allocation" in soft.refusal()
    soft.cuMemcpyHtoD(p, host, 64)
    soft.cuMemFree(p)
    assert code(d.cuMemcpyDtoH(host, p, 1)) == "INVALID_VALUE"
    assert "freed device allocation" in soft.refusal()
    assert code(d.cuMemFree(p)) == "INVALID_VALUE"
    soft.cuMemFree(0)


def test_memory_kernel_pointers_are_checked_at_launch(soft, kernels):
    """A launch is refused if a pointer parameter is freed, unknown or pageable memory.

    The error text names the parameter. NULL and a pointer into the middle of an allocation are
    valid.
    """
    a = soft.ints(*range(1000))
    b = soft.alloc(4000)
    soft.run(kernels.copy, 4, 128, a + 400, b + 400, np.int32(500))
    assert soft.get(b + 400, 500, np.int32).tolist() == list(range(100, 600))
    valid = soft.ints(0, 0, 0, 0)
    freed = soft.alloc(16)
    soft.cuMemFree(freed)
    pageable = np.zeros(4, np.int32)
    n = np.int32(4)
    for invalid, text in (
        (freed, "freed"),
        (valid + 100000, "no allocation"),
        (pageable.ctypes.data, "pageable host memory"),
    ):
        assert code(soft.try_launch(kernels.copy, 1, 4, valid, invalid, n)) == "INVALID_VALUE"
        assert "'copy' parameter 1" in soft.refusal()
        assert text in soft.refusal()
    soft.run(kernels.copy, 1, 4, 0, 0, np.int32(0))


def test_memory_pinned_allocation_has_separate_device_address(soft, kernels):
    """Pinned memory has a host address and a different device address. Kernels accept both."""
    host = soft.cuMemHostAlloc(400, 1 | 2)
    view = np.ctypeslib.as_array((ctypes.c_int32 * 100).from_address(host))
    view[:] = np.arange(100)
    alias = int(soft.cuMemHostGetDevicePointer(host, 0))
    inside = int(soft.cuMemHostGetDevicePointer(host + 40, 0))
    assert alias != host and inside == alias + 40
    out = soft.alloc(400)
    n = np.int32(100)
    soft.run(kernels.copy, 1, 128, alias, out, n)
    soft.run(kernels.copy, 1, 128, host, out, n)
    assert soft.get(out, 100, np.int32).tolist() == list(range(100))
    soft.run(kernels.copy, 1, 128, out, inside, np.int32(90))
    assert view[10:100].tolist() == list(range(90))


def test_memory_copy_accepts_host_pointer_to_pinned_memory(soft):
    """Copies accept the host address of memory that the driver allocated, and no other."""
    source = soft.cuMemHostAlloc(64, 0)
    target = soft.cuMemHostAlloc(64, 0)
    ctypes.memset(source, 7, 64)
    soft.cuMemcpyDtoH(target, source, 64)
    assert ctypes.string_at(target, 64) == bytes([7]) * 64
    soft.cuMemcpyDtoD(target + 32, source, 32)
    soft.cuMemcpyHtoD(source, target, 64)
    assert code(soft.d.cuMemcpyDtoH(target, source + 32, 64)) == "INVALID_VALUE"
    pageable = np.zeros(64, np.uint8)
    assert code(soft.d.cuMemcpyDtoH(target, pageable.ctypes.data, 64)) == "INVALID_VALUE"


def test_memory_memset_writes_exact_range_for_each_element_size(soft):
    p = soft.put(np.zeros(64, np.uint8))
    soft.cuMemsetD8(p + 1, 0xAB, 3)
    soft.cuMemsetD16(p + 8, 0x1234, 4)
    soft.cuMemsetD32(p + 32, 0xDEADBEEF, 2)
    expected = np.zeros(64, np.uint8)
    expected[1:4] = 0xAB
    expected[8:16].view(np.uint16)[:] = 0x1234
    expected[32:40].view(np.uint32)[:] = 0xDEADBEEF
    assert np.array_equal(soft.get(p, 64, np.uint8), expected)


def test_memory_unified_copy_accepts_host_and_device_addresses(soft):
    a = soft.ints(1, 2)
    b = soft.ints(0, 0)
    host = np.zeros(2, np.int32)
    soft.cuMemcpy(b, a, 8)
    soft.cuMemcpy(host.ctypes.data, b, 8)
    assert host.tolist() == [1, 2]
    host[:] = 5
    soft.cuMemcpy(a, host.ctypes.data, 8)
    assert soft.get(a, 2, np.int32).tolist() == [5, 5]


def test_memory_async_copy_reads_pageable_source_before_returning(soft, stream):
    """The caller may overwrite a pageable source after an asynchronous copy has returned.

    An asynchronous copy to pageable memory is complete when the call returns.
    """
    source = np.full(1 << 14, 7, np.int32)
    p = soft.alloc(1 << 16)
    soft.host(stream, USLEEP, 30000)
    soft.cuMemcpyHtoDAsync(p, source.ctypes.data, source.nbytes, stream)
    source[:] = 9
    back = np.zeros(1 << 14, np.int32)
    soft.cuMemcpyDtoHAsync(back.ctypes.data, p, back.nbytes, stream)
    assert (back == 7).all()


def test_memory_allocation_requires_current_context(soft):
    """A thread without a current context cannot allocate memory until it pushes a context."""

    def work(_: int) -> int:
        assert codes(soft.d.cuMemAlloc(16), soft.d.cuCtxGetDevice()) == {"INVALID_CONTEXT"}
        soft.cuCtxPushCurrent(soft.context)
        soft.cuMemFree(soft.alloc(16))
        soft.cuCtxPopCurrent()
        return int(soft.cuCtxGetCurrent())

    assert in_threads(work, 0) == [0]


def test_memory_pointer_attributes_of_device_pinned_and_pageable_memory(soft, words):
    """cuPointerGetAttributes succeeds for every address.

    For pageable memory, it returns the documented default values.
    """
    attribute = soft.d.CUpointer_attribute
    pageable = np.zeros(64, np.uint8)
    attributes = [attribute(n) for n in (1, 2, 3, 4, 7, 8, 9, 11, 12, 13)]
    device = soft.alloc(64)
    host = words.host
    alias = words.device
    for p, expected in (
        (device + 8, [2, device + 8, 0, 0, device, 64, True]),
        (host, [1, alias, host, 0, alias, 512, True]),
        (pageable.ctypes.data, [0, 0, 0, -2, 0, 0, False]),
    ):
        values = soft.cuPointerGetAttributes(len(attributes), attributes, p)
        context, *rest = [int(value) for value in values]
        kind, pointer, host_pointer, buffer_id, managed, ordinal, start, size, mapped = rest
        assert [kind, pointer, host_pointer, ordinal, start, size, mapped] == expected
        assert managed == 0
        assert (context != 0) == bool(mapped)
        assert (buffer_id != 0) == bool(mapped)
        if not mapped:
            assert code(soft.d.cuPointerGetAttribute(attributes[1], p)) == "INVALID_VALUE"


def test_host_register_pins_memory_of_the_caller(soft):
    """Registered memory has a device address. Its host address is rejected by device work."""
    d = soft.d
    memory = np.arange(1024, dtype=np.uint8)
    p = memory.ctypes.data
    soft.cuMemHostRegister(p, 1024, 2)
    assert code(d.cuMemHostRegister(p + 100, 10, 2)) == "HOST_MEMORY_ALREADY_REGISTERED"
    assert int(soft.cuMemHostGetFlags(p)) == 2
    alias = int(soft.cuMemHostGetDevicePointer(p, 0))
    np.testing.assert_array_equal(soft.get(alias, 1024, np.uint8), memory)
    assert code(d.cuStreamWriteValue32(0, p, 1, 0)) == "INVALID_VALUE"
    assert "in registered memory" in soft.refusal()
    assert code(d.cuMemFreeHost(p)) == "INVALID_VALUE"
    soft.cuMemHostUnregister(p)
    assert code(d.cuMemHostUnregister(p)) == "HOST_MEMORY_NOT_REGISTERED"


def test_address_range_returns_allocation(soft):
    p = soft.alloc(1000)
    base, size = soft.cuMemGetAddressRange(p + 10)
    assert (int(base), size) == (p, 1000)
    assert code(soft.d.cuMemGetAddressRange(p + 2000)) == "NOT_FOUND"


def copy_attributes(soft, order: int):
    p = soft.d.CUmemcpyAttributes()
    p.srcAccessOrder = soft.d.CUmemcpySrcAccessOrder(order)
    return p


STREAM_ORDER = 1
DURING_CALL = 2


def test_copy_with_attributes_reads_source_as_ordered(soft, stream, words):
    """The source is read in stream order or before the call returns."""
    source, first, second = soft.ints(1), soft.ints(0), soft.ints(0)
    words.block(stream)
    soft.cuMemsetD32Async(source, 5, 1, stream)
    for target, order in ((first, STREAM_ORDER), (second, DURING_CALL)):
        attributes = copy_attributes(soft, order)
        soft.cuMemcpyWithAttributesAsync(target, source, 4, attributes, stream)
    words[0] = 1
    soft.cuStreamSynchronize(stream)
    assert (soft.value(first), soft.value(second)) == (5, 1)


def test_copy_batch_copies_all_pairs(soft, stream):
    """A batch with an invalid copy copies nothing."""
    d = soft.d
    sources = [d.CUdeviceptr(soft.ints(i)) for i in (1, 2, 3)]
    targets = [d.CUdeviceptr(soft.ints(0)) for _ in range(3)]
    attributes = [copy_attributes(soft, order) for order in (STREAM_ORDER, DURING_CALL)]

    def batch(sizes, groups, queue=stream):
        return d.cuMemcpyBatchAsync(
            targets, sources, sizes, 3, attributes, groups, len(groups), queue
        )

    bad = (batch([4, 4, 400], [0, 1]), batch([4] * 3, [1, 2]), batch([4] * 3, [0, 0]))
    assert codes(*bad, batch([4] * 3, [0, 1], d.CUstream(0))) == {"INVALID_VALUE"}
    soft.cuStreamSynchronize(stream)
    assert [soft.value(int(p)) for p in targets] == [0, 0, 0]
    assert code(batch([4] * 3, [0, 1])) == "SUCCESS"
    soft.cuStreamSynchronize(stream)
    assert [soft.value(int(p)) for p in targets] == [1, 2, 3]
