"""Copies and fills of rows, CUDA arrays, stream attributes and callbacks, old signatures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from softcuda_util import code, codes

#: Number of 64-bit words of CUDA_MEMCPY3D and of the fields of one of its sides.
WORDS, SIDE = 25, 11
X, Y, Z, TYPE, HOST, DEVICE, ARRAY, PITCH, HEIGHT = 0, 1, 2, 4, 5, 6, 7, 9, 10


def copy_3d(soft: Any, source: dict[int, int], target: dict[int, int], size: Any) -> Any:
    """Return the parameters of a copy. `source` and `target` contain fields by index."""
    words = (ctypes.c_uint64 * WORDS)(0)
    for start, side in ((0, source), (SIDE, target)):
        for field, value in side.items():
            words[start + field] = value
        kinds = {HOST: 1, DEVICE: 2, ARRAY: 3}
        kind = next(kinds[field] for field in side if field in kinds)
        words[start + TYPE] = kind
    words[2 * SIDE :] = size
    return soft.d.CUDA_MEMCPY3D(ctypes.addressof(words)), words


def old_function(soft: Any, name: bytes, version: int) -> Callable[..., int]:
    """Return a driver function with the signature of an older CUDA version."""
    status, pointer, _ = soft.d.cuGetProcAddress(name, version, 0)
    assert int(status) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 10)(int(pointer))


def call(function: Callable[..., int], *arguments: int) -> int:
    """Call a function with arguments that are filled up with zeros."""
    return function(*arguments, *[0] * (10 - len(arguments)))


def number(value: int = 0) -> Any:
    return ctypes.c_uint64(value)


@pytest.mark.parametrize("captured", [False, True])
def test_rows_copy_moves_box_between_host_memory_device_and_array(soft, captured):
    """A box of bytes moves from host memory to the device, to an array, and back."""
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, (3, 6, 16), np.uint8)
    device = soft.put(np.zeros((4, 5, 32), np.uint8))
    array_kind = soft.d.CUDA_ARRAY3D_DESCRIPTOR()
    array_kind.Width, array_kind.Height, array_kind.Depth, array_kind.NumChannels = 12, 4, 2, 1
    array_kind.Format = soft.d.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
    array = int(soft.cuArray3DCreate(array_kind))
    out = np.zeros((2, 3, 8), np.uint8)
    to_device = copy_3d(
        soft,
        {X: 3, Y: 1, Z: 1, HOST: source.ctypes.data, PITCH: 16, HEIGHT: 6},
        {X: 5, Y: 2, Z: 1, DEVICE: device, PITCH: 32, HEIGHT: 5},
        (8, 3, 2),
    )
    to_array = copy_3d(
        soft,
        {X: 5, Y: 2, Z: 1, DEVICE: device, PITCH: 32, HEIGHT: 5},
        {X: 4, Y: 1, ARRAY: array},
        (8, 3, 2),
    )
    to_host = copy_3d(
        soft, {X: 4, Y: 1, ARRAY: array}, {HOST: out.ctypes.data, PITCH: 8, HEIGHT: 3}, (8, 3, 2)
    )
    stream = soft.stream()
    if captured:
        soft.begin(stream)
    for parameters, _ in (to_device, to_array, to_host):
        soft.cuMemcpy3DAsync(parameters, stream)
    if captured:
        assert not out.any()
        soft.replay(soft.cuStreamEndCapture(stream), stream)
    soft.cuStreamSynchronize(stream)
    expected = source[1:3, 1:4, 3:11]
    np.testing.assert_array_equal(out, expected)
    whole = np.zeros((4, 5, 32), np.uint8)
    whole[1:3, 2:5, 5:13] = expected
    np.testing.assert_array_equal(soft.get(device, (4, 5, 32), np.uint8), whole)
    soft.cuArrayDestroy(soft.d.CUarray(array))


def test_rows_asynchronous_copy_reads_pageable_rows_before_it_returns(soft):
    """The caller may change pageable rows as soon as an asynchronous copy returns."""
    rows = np.arange(64, dtype=np.uint8).reshape(4, 16)
    expected = rows[:, 2:10].copy()
    device = soft.alloc(32)
    parameters, _words = copy_3d(
        soft,
        {X: 2, HOST: rows.ctypes.data, PITCH: 16, HEIGHT: 4},
        {DEVICE: device, PITCH: 8, HEIGHT: 4},
        (8, 4, 1),
    )
    stream = soft.stream()
    gate = soft.ints(0)
    soft.cuStreamWaitValue32(stream, gate, 1, 0)
    soft.cuMemcpy3DAsync(parameters, stream)
    rows[:] = 0
    soft.cuMemsetD32(gate, 1, 1)
    soft.cuStreamSynchronize(stream)
    np.testing.assert_array_equal(soft.get(device, (4, 8), np.uint8), expected)


@pytest.mark.parametrize(
    ("changes", "size", "reason"),
    [
        ({PITCH: 7}, (8, 4, 1), "pitch"),
        ({HEIGHT: 3}, (8, 4, 2), "height"),
        ({}, (8, 9, 1), "past the end"),
        ({Y: 5}, (8, 4, 1), "past the end"),
        ({X: 2**63}, (8, 4, 1), "address space"),
        ({X: 64}, (8, 1, 1), "past the end"),
        ({PITCH: 0}, (8, 1, 2**40), "pitch"),
        ({PITCH: 2**40, HEIGHT: 2**40}, (8, 4, 2), "address space"),
    ],
)
def test_rows_copy_checks_bounds(soft, changes, size, reason):
    """A copy is refused if a side is too small for it or if its size overflows."""
    device = soft.alloc(64)
    side = {DEVICE: device, PITCH: 8, HEIGHT: 4, **changes}
    host = {HOST: np.zeros(2048, np.uint8).ctypes.data, PITCH: 16, HEIGHT: 16}
    for source, target in ((side, host), (host, side)):
        parameters, _words = copy_3d(soft, source, target, size)
        assert code(soft.d.cuMemcpy3D(parameters)) == "INVALID_VALUE"
        assert reason in soft.refusal()


def test_rows_copy_stays_inside_of_pinned_memory(soft):
    """An offset may not lead from pinned memory to the pageable memory after it."""
    pinned = int(soft.cuMemHostAlloc(4096, 3))
    target = {DEVICE: soft.alloc(64), PITCH: 8, HEIGHT: 1}
    for offset, expected in ((4088, "SUCCESS"), (4096, "INVALID_VALUE")):
        source = {HOST: pinned, X: offset, PITCH: 4096, HEIGHT: 1}
        parameters, _words = copy_3d(soft, source, target, (8, 1, 1))
        assert code(soft.d.cuMemcpy3D(parameters)) == expected
    assert "is outside of" in soft.refusal()


def test_arrays_check_descriptors_and_bounds(soft):
    """Invalid descriptors, and copies that exceed an array, are refused."""
    d = soft.d
    descriptor = d.CUDA_ARRAY_DESCRIPTOR()
    descriptor.Width, descriptor.Height, descriptor.NumChannels = 4, 2, 2
    descriptor.Format = d.CUarray_format.CU_AD_FORMAT_FLOAT
    array = soft.cuArrayCreate(descriptor)
    assert soft.cuArrayGetDescriptor(array).Width == 4
    host = np.arange(64, dtype=np.uint8)
    soft.cuMemcpyHtoA(array, 0, host.ctypes.data, 64)
    back = np.zeros(24, np.uint8)
    soft.cuMemcpyAtoH(back.ctypes.data, array, 28, 24)
    np.testing.assert_array_equal(back, host[28:52])
    for offset, size in ((1, 64), (64, 1), (2**64 - 8, 16)):
        result = d.cuMemcpyHtoA(array, offset, host.ctypes.data, size)
        assert code(result) == "INVALID_VALUE"
    for changes in ({"Width": 0}, {"NumChannels": 3}, {"Width": 2**62}):
        refused = d.CUDA_ARRAY_DESCRIPTOR()
        refused.Width, refused.Height, refused.NumChannels = 4, 2, 2
        refused.Format = descriptor.Format
        for name, value in changes.items():
            setattr(refused, name, value)
        assert code(d.cuArrayCreate(refused)) == "INVALID_VALUE"
    soft.cuArrayDestroy(array)
    assert code(d.cuArrayDestroy(array)) == "INVALID_HANDLE"


def test_rows_memset_fills_padded_rows(soft):
    """A memset of two dimensions leaves the padding of the rows unchanged."""
    pointer, pitch = soft.cuMemAllocPitch(24, 3, 4)
    assert pitch % 512 == 0
    soft.cuMemsetD8(pointer, 9, 3 * pitch)
    soft.cuMemsetD2D16(pointer, pitch, 0x0102, 12, 3)
    rows = soft.get(int(pointer), (3, pitch), np.uint8)
    assert (rows[:, :24].view(np.uint16) == 0x0102).all() and (rows[:, 24:] == 9).all()


@pytest.mark.parametrize(
    ("pitch", "width", "height"),
    [
        (512, 2**62 + 1, 2),  # 4 * width is 4 modulo 2**64
        (2**32, 1, 2**32 + 1),  # pitch * (height - 1) is 0 modulo 2**64
        (2**63, 1, 2**63),
        (0, 2**62 + 1, 1),
    ],
)
def test_rows_memset_refuses_sizes_that_exceed_64_bits(soft, pitch, width, height):
    pointer = soft.put(np.full(256, 3, np.uint32))
    assert code(soft.d.cuMemsetD2D32(pointer, pitch, 9, width, height)) == "INVALID_VALUE"
    assert "exceeds the address space" in soft.refusal()
    assert (soft.get(pointer, 256, np.uint32) == 3).all()


def test_stream_attributes_are_stored_and_copied(soft):
    """cuStreamCopyAttributes copies attributes that were set; others have default values."""
    first, second = soft.stream(), soft.stream()
    attribute = soft.d.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY
    value = soft.cuStreamGetAttribute(first, attribute)
    value.syncPolicy = soft.d.CUsynchronizationPolicy.CU_SYNC_POLICY_SPIN
    soft.cuStreamSetAttribute(first, attribute, value)
    before = int(soft.cuStreamGetAttribute(second, attribute).syncPolicy)
    soft.cuStreamCopyAttributes(second, first)
    after = int(soft.cuStreamGetAttribute(second, attribute).syncPolicy)
    assert (before, after) == (1, 2)


def test_stream_callback_runs_in_order_and_not_in_captures(soft):
    """A callback gets the stream, SUCCESS and its data after all previous work."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64)
    seen: list[tuple[int, ...]] = []
    function = kind(lambda *arguments: seen.append(arguments))
    pointer = soft.d.CUstreamCallback(ctypes.cast(function, ctypes.c_void_p).value)
    stream = soft.stream()
    for data in range(3):
        soft.cuStreamAddCallback(stream, pointer, data, 0)
    soft.cuStreamSynchronize(stream)
    assert seen == [(int(stream), 0, data) for data in range(3)]
    soft.begin(stream)
    result = code(soft.d.cuStreamAddCallback(stream, pointer, 0, 0))
    assert result == "STREAM_CAPTURE_UNSUPPORTED"
    soft.d.cuStreamEndCapture(stream)


def test_old_signatures_of_graphs_are_found_by_version(soft):
    """Functions of CUDA 10 and 11 build, edit and query the same graphs as the current ones."""
    function = soft.kernels('extern "C" __global__ void bump(int* p) { *p += 1; }').bump
    pointer = soft.ints(0)
    parameters, _keep = soft.kernel_params(function, 1, 1, pointer)
    graph = soft.cuGraphCreate(0)
    add = old_function(soft, b"cuGraphAddKernelNode", 10000)
    nodes = [number(), number()]
    for node in nodes:
        result = call(add, ctypes.addressof(node), int(graph), 0, 0, int(parameters.getPtr()))
        assert result == 0
    first, second = (ctypes.addressof(node) for node in nodes)
    connect = old_function(soft, b"cuGraphAddDependencies", 10000)
    assert call(connect, int(graph), first, second, 1) == 0
    source, target, count = number(), number(), number(1)
    edges = old_function(soft, b"cuGraphGetEdges", 10000)
    arguments = [ctypes.addressof(x) for x in (source, target, count)]
    assert call(edges, int(graph), *arguments) == 0
    assert (source.value, target.value, count.value) == (nodes[0].value, nodes[1].value, 1)
    executable = number()
    instantiate = old_function(soft, b"cuGraphInstantiate", 11000)
    assert call(instantiate, ctypes.addressof(executable), int(graph)) == 0
    soft.cuGraphLaunch(soft.d.CUgraphExec(executable.value), soft.stream())
    soft.cuCtxSynchronize()
    assert soft.value(pointer) == 2


def test_old_signature_of_kernel_parameters_writes_56_bytes(soft):
    """The structure of CUDA 10 lacks the last two fields, so they must not be written."""
    function = soft.kernels('extern "C" __global__ void idle(int* p) {}').idle
    parameters, _keep = soft.kernel_params(function, 1, 1, soft.ints(0))
    node = soft.cuGraphAddKernelNode(soft.cuGraphCreate(0), [], 0, parameters)
    out = (ctypes.c_uint64 * 9)(*[7] * 9)
    get = old_function(soft, b"cuGraphKernelNodeGetParams", 10000)
    assert call(get, int(node), ctypes.addressof(out)) == 0
    assert out[0] == int(parameters.func) and list(out[7:]) == [7, 7]


def test_unregister_refuses_address_inside_of_registered_memory(soft):
    """Memory is unregistered by its start; other addresses inside of it are invalid."""
    memory = np.zeros(256, np.uint8)
    start = memory.ctypes.data
    soft.cuMemHostRegister(start, 256, 2)
    inside = soft.d.cuMemHostUnregister(start + 64)
    outside = soft.d.cuMemHostUnregister(start + 256)
    assert [code(inside), code(outside)] == ["INVALID_VALUE", "HOST_MEMORY_NOT_REGISTERED"]
    soft.cuMemHostUnregister(start)


def test_core_dump_settings_are_stored(soft):
    """Settings keep their values; unknown settings are refused."""
    d = soft.d
    settings = d.CUcoredumpSettings
    soft.cuCoredumpSetAttributeGlobal(settings.CU_COREDUMP_FILE, b"dump")
    soft.cuCoredumpSetAttributeGlobal(settings.CU_COREDUMP_LIGHTWEIGHT, True)
    assert soft.cuCoredumpGetAttributeGlobal(settings.CU_COREDUMP_FILE) == b"dump"
    assert soft.cuCoredumpGetAttribute(settings.CU_COREDUMP_LIGHTWEIGHT) is True
    assert codes(d.cuStreamGetAttribute(0, d.CUstreamAttrID(2))) == {"INVALID_VALUE"}


def test_old_graph_update_reports_error_for_unknown_handle(soft, graph):
    """The result of an update that is refused early is CU_GRAPH_EXEC_UPDATE_ERROR (1)."""
    update = old_function(soft, b"cuGraphExecUpdate", 10020)
    node, result = number(7), ctypes.c_int(0)
    handle = int(graph)
    status = call(update, 1, handle, ctypes.addressof(node), ctypes.addressof(result))
    assert status != 0
    assert (node.value, result.value) == (0, 1)
    executable = soft.cuGraphInstantiate(graph, 0)
    arguments = (int(executable), handle, ctypes.addressof(node), ctypes.addressof(result))
    assert call(update, *arguments) == 0
    assert result.value == 0
