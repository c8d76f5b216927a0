"""Tests of the unmodified cuda.core library on the soft device."""

from __future__ import annotations

import sys

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="cuda.core is not installed (pip install cuda-core==1.2.2)")

from cuda.core import (
    DeviceMemoryResource,
    DeviceMemoryResourceOptions,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    ManagedMemoryResource,
    ObjectCode,
    launch,
)
from cuda.core._utils.cuda_utils import CUDAError
from cuda.core.graph import GraphDefinition, GraphNode
from softcuda_util import compile_kernel

from graft.cudagraph.driver.driver import call, cu

ONE = LaunchConfig(grid=1, block=1)
TEXT = """
extern "C" __global__ void add(int* p, int n) { p[0] += n; }
extern "C" __global__ void twice(int* p) { p[0] *= 2; }
"""


@pytest.fixture
def core(device):
    """The soft device as a Device object of cuda.core."""
    if device.kind != "soft":
        pytest.skip("the test needs the soft device")
    from cuda.core import Device

    core_device = Device(device.ordinal)
    core_device.set_current()
    return core_device


@pytest.fixture
def queue(core):
    """A stream of cuda.core."""
    stream = core.create_stream()
    yield stream
    stream.close()


@pytest.fixture
def image():
    """Compiled image of the kernels in ``TEXT``."""
    return compile_kernel(TEXT, "core.cu")


@pytest.fixture
def kernels(core, image):
    """The kernels ``add`` and ``twice``."""
    code = ObjectCode.from_cubin(image)
    return code.get_kernel("add"), code.get_kernel("twice")


@pytest.fixture
def word(core):
    """One int32 in pinned memory. The value is a pair: the NumPy view and the device address."""
    buffer = LegacyPinnedMemoryResource().allocate(64)
    view = np.from_dlpack(buffer).view(np.int32)
    view[:] = 0
    yield view, np.uint64(int(call(cu.cuMemHostGetDevicePointer, buffer.handle, 0)))
    del view
    buffer.close()


def test_cuda_core_device_streams_and_events(core, queue):
    assert core.name == "graft soft device" and core.compute_capability == (9, 0)
    other = core.create_stream()
    event = queue.record()
    other.wait(event)
    event.sync()
    other.sync()
    assert event.is_done
    event.close()
    other.close()


def test_cuda_core_loads_and_launches_kernels(queue, image, kernels, word, tmp_path):
    """cuda.core loads kernels from memory and from a file, and reads their parameter layouts."""
    view, address = word
    add, twice = kernels
    assert [(p.offset, p.size) for p in add.arguments_info] == [(0, 8), (8, 4)]
    assert twice.num_arguments == 1 and add.attributes.max_threads_per_block == 1024
    for _ in range(3):
        launch(queue, ONE, add, address, np.int32(2))
        launch(queue, ONE, twice, address)
    queue.sync()
    assert view[0] == 28
    path = tmp_path / "core.so"
    path.write_bytes(image)
    code = ObjectCode.from_cubin(str(path))
    launch(queue, ONE, code.get_kernel("add"), address, np.int32(5))
    queue.sync()
    assert view[0] == 33


def test_cuda_core_reports_unloadable_kernels(core, image):
    """The error message of cuda.core names the cause of the failure.

    The causes are an unknown kernel name, a missing file, and an image with GPU code.
    """
    gpu_code = image[:18] + (190).to_bytes(2, "little") + image[20:]
    for source, name, error in (
        (image, "absent", "NOT_FOUND"),
        ("/absent", "add", "FILE_NOT_FOUND"),
        (gpu_code, "add", "NO_BINARY_FOR_GPU"),
    ):
        with pytest.raises(CUDAError, match=f"CUDA_ERROR_{error}"):
            ObjectCode.from_cubin(source).get_kernel(name)


def test_cuda_core_explicit_graph_runs_python_callbacks(queue, kernels, word, monkeypatch):
    """Callbacks run in graph order in every launch. An exception in a callback is reported as
    unraisable and does not prevent later nodes from running."""
    view, address = word
    add, twice = kernels
    seen: list[int] = []
    unraisable: list[type] = []
    graph = GraphDefinition()
    node = graph.launch(ONE, add, address, np.int32(1))
    node = node.callback(lambda: seen.append(int(view[0])))
    node = GraphNode.callback(node, lambda: seen.append(-1))
    node = GraphNode.launch(node, ONE, twice, address)
    GraphNode.callback(node.callback(lambda: 1 // 0), lambda: seen.append(-2))
    assert len(graph.nodes()) == 6 and len(graph.edges()) == 5
    run = graph.instantiate()
    run.upload(queue)
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: unraisable.append(hook.exc_type))
    for _ in range(3):
        run.launch(queue)
    queue.sync()
    assert seen == [1, -1, -2, 3, -1, -2, 7, -1, -2] and view[0] == 14
    assert unraisable == [ZeroDivisionError] * 3
    run.close()


def test_cuda_core_graph_builder_captures_launches_and_callbacks(queue, kernels, word):
    """Captured launches and callbacks do not run before the graph is launched."""
    view, address = word
    add, _ = kernels
    seen: list[int] = []
    builder = queue.create_graph_builder()
    builder.begin_building()
    launch(builder, ONE, add, address, np.int32(3))
    builder.callback(lambda: seen.append(int(view[0])))
    launch(builder, ONE, add, address, np.int32(4))
    run = builder.end_building().complete()
    queue.sync()
    assert seen == [] and view[0] == 0
    for _ in range(2):
        run.launch(queue)
    queue.sync()
    assert seen == [3, 10] and view[0] == 14
    run.close()
    builder.close()


def test_library_functions_enumerate_kernels(core, image):
    """A library and its module return the same kernel handles.

    The kernel handles are invalid after the library was unloaded.
    """
    library = call(cu.cuLibraryLoadData, image, [], [], 0, [], [], 0)
    assert call(cu.cuLibraryGetKernelCount, library) == 2
    kernels = call(cu.cuLibraryEnumerateKernels, 2, library)
    assert {call(cu.cuKernelGetName, kernel) for kernel in kernels} == {b"add", b"twice"}
    add = call(cu.cuLibraryGetKernel, library, b"add")
    assert int(call(cu.cuKernelGetLibrary, add)) == int(library)
    function = call(cu.cuKernelGetFunction, add)
    module = call(cu.cuLibraryGetModule, library)
    assert int(call(cu.cuModuleGetFunction, module, b"add")) == int(function)
    call(cu.cuLibraryUnload, library)
    results = (
        cu.cuLibraryUnload(library),
        cu.cuKernelGetFunction(add),
        cu.cuLibraryGetKernelCount(library),
    )
    assert {result[0] for result in results} == {cu.CUresult.CUDA_ERROR_INVALID_HANDLE}


def test_cuda_core_allocates_from_memory_pools_and_in_graphs(core, queue):
    """cuda.core allocates device memory from a pool, also in a graph, and managed memory."""
    source, target = (LegacyPinnedMemoryResource().allocate(64) for _ in range(2))
    np.from_dlpack(source).view(np.int32)[:] = np.arange(16) - 7
    pool = DeviceMemoryResource(core, options=DeviceMemoryResourceOptions(max_size=1 << 20))
    middle = pool.allocate(64, stream=queue)
    managed = ManagedMemoryResource().allocate(64, stream=queue)
    middle.copy_from(source, stream=queue)
    managed.copy_from(middle, stream=queue)
    managed.copy_to(target, stream=queue)
    assert pool.attributes.used_mem_current == 64
    queue.sync()
    np.testing.assert_array_equal(np.from_dlpack(target).view(np.int32), np.arange(16) - 7)
    for buffer in (source, middle, managed, target):
        buffer.close()
    graph = GraphDefinition()
    node = graph.allocate(64)
    node.memset(node.dptr, 1, 64).deallocate(node.dptr)
    executable = graph.instantiate()
    executable.launch(queue)
    queue.sync()
