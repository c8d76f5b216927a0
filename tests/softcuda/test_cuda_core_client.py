"""cuda.core, unmodified, as a client of the soft device."""

from __future__ import annotations

import sys

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="cuda.core is not installed (pip install cuda-core==1.2.2)")

from cuda.core import LaunchConfig, LegacyPinnedMemoryResource, ObjectCode, launch
from cuda.core._utils.cuda_utils import CUDAError
from cuda.core.graph import GraphDefinition, GraphNode
from softcuda_util import compile_kernel

from graft.cudagraph.driver import call, cu

ONE = LaunchConfig(grid=1, block=1)
TEXT = """
extern "C" __global__ void add(int* p, int n) { p[0] += n; }
extern "C" __global__ void twice(int* p) { p[0] *= 2; }
"""


@pytest.fixture
def core(device):
    """cuda.core's Device on the soft device."""
    if device.kind != "soft":
        pytest.skip("NVIDIA's own driver is not what is tested here")
    from cuda.core import Device

    made = Device(device.ordinal)
    made.set_current()
    return made


@pytest.fixture
def queue(core):
    """A stream of cuda.core's."""
    made = core.create_stream()
    yield made
    made.close()


@pytest.fixture
def image():
    """Object code of two kernels."""
    return compile_kernel(TEXT, "core.cu")


@pytest.fixture
def kernels(core, image):
    """The two of them."""
    code = ObjectCode.from_cubin(image)
    return code.get_kernel("add"), code.get_kernel("twice")


@pytest.fixture
def word(core):
    """One int32 in pinned memory: (its value as a view, its address on the device)."""
    buffer = LegacyPinnedMemoryResource().allocate(64)
    view = np.from_dlpack(buffer).view(np.int32)
    view[:] = 0
    yield view, np.uint64(int(call(cu.cuMemHostGetDevicePointer, buffer.handle, 0)))
    del view
    buffer.close()


def test_device_streams_and_events(core, queue):
    """The device says what it is; events of streams order and finish."""
    assert core.name == "graft soft device" and core.compute_capability == (9, 0)
    other = core.create_stream()
    event = queue.record()
    other.wait(event)
    event.sync()
    other.sync()
    assert event.is_done
    event.close()
    other.close()


def test_kernels_from_object_code(queue, image, kernels, word, tmp_path):
    """Kernels of memory or of a file are found by name, know their parameters and run with what
    they are given; a missing file, an absent kernel and a GPU's code are refused by name."""
    (view, address), (add, twice) = word, kernels
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
    foreign = image[:18] + (190).to_bytes(2, "little") + image[20:]
    for what, name, said in (
        (code, "absent", "NOT_FOUND"),
        (ObjectCode.from_cubin("/absent"), "add", "FILE_NOT_FOUND"),
        (ObjectCode.from_cubin(foreign), "add", "NO_BINARY_FOR_GPU"),
    ):
        with pytest.raises(CUDAError, match=f"CUDA_ERROR_{said}"):
            what.get_kernel(name)


def test_explicit_graphs_with_callbacks(queue, kernels, word, monkeypatch):
    """Kernels and Python callbacks run in the graph's order, in every replay; what a callback
    raises is reported as unraisable, and what comes after it runs."""
    (view, address), (add, twice) = word, kernels
    seen: list[int] = []
    told: list[type] = []
    graph = GraphDefinition()
    node = graph.launch(ONE, add, address, np.int32(1))
    node = node.callback(lambda: seen.append(int(view[0])))
    node = GraphNode.callback(node, lambda: seen.append(-1))
    node = GraphNode.launch(node, ONE, twice, address)
    GraphNode.callback(node.callback(lambda: 1 // 0), lambda: seen.append(-2))
    assert len(graph.nodes()) == 6 and len(graph.edges()) == 5
    run = graph.instantiate()
    run.upload(queue)
    monkeypatch.setattr(sys, "unraisablehook", lambda said: told.append(said.exc_type))
    for _ in range(3):
        run.launch(queue)
    queue.sync()
    assert seen == [1, -1, -2, 3, -1, -2, 7, -1, -2] and view[0] == 14
    assert told == [ZeroDivisionError] * 3
    run.close()


def test_captured_graphs_with_callbacks(queue, kernels, word):
    """A graph builder captures launches and callbacks; nothing runs before the replay."""
    (view, address), (add, _) = word, kernels
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


def test_libraries_name_their_kernels(core, image):
    """The library calls agree with each other, and handles are refused once it is unloaded."""
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
    gone = (
        cu.cuLibraryUnload(library),
        cu.cuKernelGetFunction(add),
        cu.cuLibraryGetKernelCount(library),
    )
    assert {said[0] for said in gone} == {cu.CUresult.CUDA_ERROR_INVALID_HANDLE}


def test_buffers_without_pools(core, queue):
    """cuda.core allocates device memory though there are no pools, and copies to it and back; for
    nodes that allocate it says which function the driver has not."""
    source, target = (LegacyPinnedMemoryResource().allocate(64) for _ in range(2))
    np.from_dlpack(source).view(np.int32)[:] = np.arange(16) - 7
    middle = core.allocate(64, stream=queue)
    middle.copy_from(source, stream=queue)
    middle.copy_to(target, stream=queue)
    queue.sync()
    np.testing.assert_array_equal(np.from_dlpack(target).view(np.int32), np.arange(16) - 7)
    for buffer in (source, middle, target):
        buffer.close()
    with pytest.raises(RuntimeError, match="cuGraphAddMemAllocNode"):
        GraphDefinition().allocate(64)  # graph memory needs pools
