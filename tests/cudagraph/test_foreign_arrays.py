"""Arrays of other libraries as arguments and operands, and graft's arrays in other libraries."""

from __future__ import annotations

import array
import ctypes
import gc
import weakref
from collections.abc import Callable
from threading import Timer
from typing import Any

import numpy as np
import pytest
from cudagraph_util import replay, wait_until, wait_until_freed

from graft.cudagraph import (
    Device,
    DeviceArray,
    DeviceError,
    Graph,
    KernelError,
    PinnedArray,
    ShapeError,
    Stream,
    StreamLane,
)
from graft.cudagraph.driver import dlpack
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.dtypes import DTYPES
from graft.native import _native

TEXT = """
extern "C" __global__ void add(float* y, const float* x, float a) {
  y[threadIdx.x] += a * x[threadIdx.x];
}
extern "C" __global__ void untyped(void* p) { ((unsigned char*)p)[threadIdx.x] = 7; }
extern "C" __global__ void integers(int* p) { p[threadIdx.x] = -1; }
extern "C" __global__ void bytes_of(const unsigned char* p, int* out) { out[0] = p[0]; }
extern "C" __global__ void complexes(float2* p) { p[threadIdx.x].y = 5; }
extern "C" __global__ void wait_for(const volatile int* word) { while (word[0] == 0) {} }
"""


class ByInterface:
    """An array with ``__cuda_array_interface__``, as numba-cuda has it."""

    def __init__(self, base: DeviceArray, **changes: Any) -> None:
        self.base = base
        self.changes = changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.base.__cuda_array_interface__, **self.changes}


class ByDlpack:
    """An array with DLPack only, of a library that implements it before version 1."""

    def __init__(self, base: DeviceArray | PinnedArray) -> None:
        self.base = base
        self.streams: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.base.__dlpack_device__()

    def __dlpack__(self, stream: int | None = None) -> object:
        self.streams.append(stream)
        device = self.__dlpack_device__()
        owner = (self, self.base.owner)
        address = self.base.ptr if device[0] == dlpack.CUDA else self.base.host_ptr
        return dlpack.export(device, address, self.base.shape, self.base.dtype, owner)


#: Functions that make an array of another library from an array of graft.
KINDS: dict[str, Callable[[Any], Any]] = {"interface": ByInterface, "dlpack": ByDlpack}


def device_array(device: Device, *values: float) -> DeviceArray:
    return device.from_host(np.array(values, np.float32))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_kernel_and_copies_use_foreign_device_arrays(
    device: Device, stream: Stream, module, make
) -> None:
    """The arrays are used in place, on a stream and in a graph."""
    x = device_array(device, 1, 2, 3)
    y = device.zeros((3,), np.float32)
    out = np.zeros(3, np.float32)
    graph = Graph(device)
    for lane in (StreamLane(stream), graph.lane("main")):
        lane.kernel(module["add"], 1, 3, [make(y), make(x), 2.0])
        lane.copy(out, make(y))
        lane.copy(make(x), make(y))
        lane.fill(make(y))
    stream.synchronize(60)
    assert out.tolist() == [2, 4, 6] and x.to_host().tolist() == [2, 4, 6]
    replay(graph, stream)
    assert out.tolist() == [4, 8, 12] and not y.to_host().any()


@pytest.mark.parametrize(
    "source",
    [
        np.arange(4, dtype=np.float32),
        array.array("f", range(4)),
        (ctypes.c_float * 4)(*range(4)),
        bytes(np.arange(4, dtype=np.float32)),
        memoryview(np.arange(4, dtype=np.float32)),
    ],
    ids=["numpy", "array", "ctypes", "bytes", "memoryview"],
)
def test_copy_reads_pageable_host_arrays(device: Device, stream: Stream, source) -> None:
    out = device.zeros((2, 4), np.float32)
    StreamLane(stream).copy(out[0], source)
    graph = Graph(device)
    graph.lane("main").copy(out[1], source)
    replay(graph, stream)
    assert out.to_host().tolist() == [[0, 1, 2, 3]] * 2


def test_copy_writes_buffers(device: Device, stream: Stream) -> None:
    target = bytearray(8)
    StreamLane(stream).copy(target, device.from_host(np.arange(8, dtype=np.uint8)))
    stream.synchronize(60)
    assert target == bytes(range(8))


def test_kernel_uses_pinned_memory_through_numpy_views(
    device: Device, stream: Stream, module
) -> None:
    """A NumPy array in pinned memory is a kernel argument; one in pageable memory is refused."""
    pinned = device.pinned((3,), "float32")
    x = device_array(device, 1, 2, 3)
    StreamLane(stream).kernel(module["add"], 1, 3, [pinned.array, x, 1.0])
    stream.synchronize(60)
    assert pinned.array.tolist() == [1, 2, 3]
    with pytest.raises(KernelError, match=r"'y' is a ndarray in pageable host memory.*from_host"):
        module["add"].pack([np.zeros(3, np.float32), x, 1.0])


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_wrap_returns_view_that_keeps_array_alive(
    device: Device, stream: Stream, module, make
) -> None:
    """A view, and a graph that uses it, keep the other library's object alive."""
    foreign = make(device_array(device, 1, 2, 3, 4))
    watch = weakref.ref(foreign)
    view = device.wrap(foreign).reshape(2, 2)[1]
    del foreign
    gc.collect()
    assert isinstance(view, DeviceArray) and view.dtype == "float32"
    assert view.to_host().tolist() == [3, 4]
    graph = Graph(device)
    graph.lane("main").kernel(module["add"], 1, 2, [view, view, 1.0])
    run = graph.instantiate()
    del graph, view
    wait_until_freed()
    assert watch() is not None
    replay(run, stream)
    run.close()
    del run
    wait_until(lambda: gc.collect() is not None and watch() is None)


def test_wrap_returns_pinned_array_for_pinned_memory(device: Device) -> None:
    pinned = device.pinned((2, 2), "int32")
    for view in (device.wrap(pinned.array), device.wrap(ByDlpack(pinned))):
        assert isinstance(view, PinnedArray) and view.ptr == pinned.ptr
        view.array[0, 1] += 1
    assert pinned.array.tolist() == [[0, 2], [0, 0]]
    assert device.wrap(pinned) is pinned


@pytest.mark.overlap
def test_stream_lane_keeps_foreign_arrays_alive_until_work_ends(
    device: Device, stream: Stream, module
) -> None:
    """Another library reuses memory once its owner is gone, so the lane keeps the owner."""
    word = device.pinned((1,), "int32")
    foreign = ByInterface(device_array(device, 1))
    watch = weakref.ref(foreign)
    lane = StreamLane(stream)
    lane.kernel(module["wait_for"], 1, 1, [word])
    lane.fill(foreign)
    del foreign
    gc.collect()
    assert watch() is not None
    word.array[0] = 1
    stream.synchronize(60)
    gc.collect()
    assert watch() is None


@pytest.mark.overlap
def test_interrupted_query_keeps_foreign_arrays_alive(
    device: Device, stream: Stream, module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives while graft looks for foreign arrays whose work has ended."""

    def interrupt(_event: int) -> int:
        raise KeyboardInterrupt

    word = device.pinned((1,), "int32")
    foreign = ByInterface(device_array(device, 1))
    watch = weakref.ref(foreign)
    lane = StreamLane(stream)
    lane.kernel(module["wait_for"], 1, 1, [word])
    lane.fill(foreign)
    del foreign
    with monkeypatch.context() as patch:
        patch.setattr(_native, "query_event", interrupt)
        with pytest.raises(KeyboardInterrupt):
            device.stream("other").synchronize(60)
    gc.collect()
    assert watch() is not None
    word.array[0] = 1
    stream.synchronize(60)
    gc.collect()
    assert watch() is None


@pytest.mark.overlap
def test_wrap_waits_for_stream_of_interface(device: Device, stream: Stream, module) -> None:
    """wrap() and graph nodes wait on the host; a stream lane makes its own stream wait."""
    word = device.pinned((1,), "int32")
    x = device.zeros((1,), np.uint8)
    producer = StreamLane(stream)
    producer.kernel(module["wait_for"], 1, 1, [word])
    producer.fill(x, 5)
    foreign = ByInterface(x, stream=stream.handle)
    other = device.stream("consumer")
    StreamLane(other).copy(device.pinned((1,), np.uint8), foreign)
    event = device.event()
    event.record(other)
    assert not event.query()
    Timer(0.05, word.array.fill, [1]).start()
    assert device.wrap(foreign).to_host().tolist() == [5]
    assert word.array[0] == 1 and stream.query()
    other.synchronize(60)


def test_dlpack_import_names_stream(device: Device, stream: Stream, module) -> None:
    """The exporter receives the stream of the lane, or a stream that graft waits for."""
    x = ByDlpack(device_array(device, 1))
    StreamLane(stream).kernel(module["untyped"], 1, 1, [x])
    StreamLane(0).kernel(module["untyped"], 1, 1, [x])
    device.wrap(x)
    assert x.streams[:2] == [stream.handle, 1] and x.streams[2] not in (None, 0, 1, stream.handle)


def test_kernel_checks_dtypes_of_arrays(device: Device, module) -> None:
    """Integers of the same size are accepted for each other, other types are not."""
    f32 = device.zeros((4,), np.float32)
    i32 = device.zeros((4,), np.int32)
    module["add"].pack([f32, f32, 1.0])
    for wrong in (i32, ByInterface(i32), device.pinned((4,), "int32"), device.zeros((4,), "int8")):
        with pytest.raises(KernelError, match="'y' is a pointer to float32, but an array of int"):
            module["add"].pack([wrong, f32, 1.0])
    module["integers"].pack([device.zeros((1,), "uint32")])
    with pytest.raises(KernelError, match="'p' is a pointer to int32, but an array of float32"):
        module["integers"].pack([f32])
    for dtype in ("uint8", "int8", "bool", "float8_e4m3fn"):
        module["bytes_of"].pack([device.zeros((1,), dtype), i32])
    with pytest.raises(KernelError, match="pointer to uint8, but an array of float16"):
        module["bytes_of"].pack([device.zeros((1,), "float16"), i32])
    for dtype in DTYPES:
        module["untyped"].pack([device.zeros((1,), dtype)])
    module["complexes"].pack([device.zeros((1,), "complex64")])
    module["complexes"].pack([f32])


READ_ONLY = np.zeros(4, np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("wrap.. needs a DeviceArray.*not object", lambda d: object()),
        ("wrap.. needs.*not int", lambda d: 3),
        ("pageable host memory.*from_host", lambda d: np.zeros(3)),
        (
            "C-contiguous.*strides of .8,.",
            lambda d: ByInterface(d.zeros((4,), "int32"), strides=(8,)),
        ),
        ("C-contiguous", lambda d: d.pinned((4, 4), "int32").array[:, :2]),
        ("read-only", lambda d: ByInterface(x := d.zeros((4,), "int32"), data=(x.ptr, True))),
        ("'<c16' is not one of", lambda d: ByInterface(d.zeros((4,), "int32"), typestr="<c16")),
        (
            "'>f4' is not in native byte order",
            lambda d: ByInterface(d.zeros((4,), "int32"), typestr=">f4"),
        ),
        (
            "dimension 0 of shape .0,.",
            lambda d: ByInterface(d.zeros(1, "int8"), shape=(0,), data=(0, False)),
        ),
        ("not memory of this device", lambda d: ByInterface(d.zeros(1, "int8"), data=(64, False))),
        ("masked", lambda d: ByInterface(d.zeros(1, "int8"), mask=1)),
        ("masked", lambda d: np.ma.masked_array([1.0], [True])),
        ("stream 0 is not allowed", lambda d: ByInterface(d.zeros(1, "int8"), stream=0)),
    ],
)
def test_wrap_refuses_unusable_arrays(device: Device, words: str, make) -> None:
    with pytest.raises(ShapeError, match=words):
        device.wrap(make(device))


def test_operations_refuse_unusable_arrays(device: Device, stream: Stream, module) -> None:
    """Strided arrays are not copied element by element, and read-only ones are not written."""
    x = device_array(device, 1, 2, 3, 4)
    lane = StreamLane(stream)
    strided = np.zeros((4, 4, 2), np.float32)[::2, ::2, 0]
    with pytest.raises(ShapeError, match=r"copy source cannot be .*strides of \(96, 8\)"):
        lane.copy(x, np.zeros((8, 3, 2), np.float32)[::4, :2, 0])
    for wrong in (np.zeros(4, np.float32)[::-1], np.broadcast_to(np.float32(1), (4,)), strided.T):
        with pytest.raises(ShapeError, match="only contiguous arrays and parts of matrices"):
            lane.copy(x, wrong)
    with pytest.raises(ShapeError, match=r"fill destination ndarray \(4,\) is not contiguous"):
        lane.fill(np.zeros((4, 2), np.float32)[:, 0])
    with pytest.raises(ShapeError, match=r"copy destination must be writable.*read-only"):
        lane.copy(READ_ONLY, x)
    lane.copy(x, READ_ONLY)
    with pytest.raises(ShapeError, match=r"fill destination .* is in host memory"):
        lane.fill(np.zeros(3))
    constant = ByInterface(x, data=(x.ptr, True))
    with pytest.raises(KernelError, match=r"'y' is a read-only array, but .* no const pointer"):
        module["add"].pack([constant, x, 1.0])
    module["add"].pack([x, constant, 1.0])
    with pytest.raises(KernelError, match="argument 1 of kernel 'add' needs a C-contiguous"):
        module["add"].pack([x, ByInterface(x, strides=(16,)), 1.0])
    with pytest.raises(KernelError, match="'a' is a float of 4 bytes, but a pointer was given"):
        module["add"].pack([x, x, x])
    with pytest.raises(KernelError, match="'y' cannot be a list"):
        module["add"].pack([[1.0], x, 1.0])
    with pytest.raises(ShapeError, match="both in host memory"):
        lane.copy(np.zeros(4), np.ones(4))
    with pytest.raises(ShapeError, match=r"16 bytes \(ndarray \(2,\)\) and .*DeviceArray"):
        lane.copy(device.zeros(1, "int8"), np.zeros(2))


#: Parts of an array [6, 8] that a copy of rows can express.
PARTS = {
    "columns": np.s_[:, 2:5],
    "one column": np.s_[:, 3],
    "rows": np.s_[1:4],
    "every other row": np.s_[::2],
    "tile": np.s_[2:5, 4:],
    "one element": np.s_[2:3, 1:2],
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_copy_of_parts_of_matrices(device: Device, stream: Stream, part) -> None:
    """Rows of the same distance are copied in both directions, on a stream and in a graph."""
    matrix = np.arange(48, dtype=np.int32).reshape(6, 8)
    expected = np.ascontiguousarray(matrix[part])
    packed = device.zeros(expected.shape, "int32")
    for use in ("stream", "graph"):
        target = np.zeros((6, 8), np.int32)
        packed.fill(0)
        graph = Graph(device)
        lane = StreamLane(stream) if use == "stream" else graph.lane("main")
        lane.copy(packed, matrix[part])
        lane.copy(target[part], packed)
        if use == "graph":
            replay(graph, stream)
        stream.synchronize(60)
        np.testing.assert_array_equal(packed.to_host(), expected)
        wanted = np.zeros((6, 8), np.int32)
        wanted[part] = expected
        np.testing.assert_array_equal(target, wanted)


def test_copy_between_strided_device_arrays(device: Device, stream: Stream) -> None:
    """Both arrays have rows: their numbers must be equal."""
    source = device.from_host(np.arange(24, dtype=np.float32).reshape(4, 6))
    target = device.zeros((4, 8), np.float32)
    left = ByInterface(source, shape=(4, 3), strides=(24, 4))
    right = ByInterface(target, shape=(4, 3), strides=(32, 4))
    StreamLane(stream).copy(right, left)
    stream.synchronize(60)
    assert target.to_host()[:, :3].tolist() == source.to_host()[:, :3].tolist()
    assert not target.to_host()[:, 3:].any()
    other = ByInterface(target, shape=(2, 6), strides=(32, 4))
    with pytest.raises(ShapeError, match="copy source has 4 rows and destination 2"):
        StreamLane(stream).copy(other, left)


def test_numpy_reads_pinned_but_not_device_arrays(device: Device) -> None:
    """np.asarray() of device memory raises at once and says what to call."""
    with pytest.raises(DeviceError, match=r"DeviceArray \(4,\) float32.*to_host\(\)"):
        np.asarray(device_array(device, 1, 2, 3, 4))
    with pytest.raises(DeviceError, match="to_host"):
        np.testing.assert_array_equal(device_array(device, 1), [1])
    pinned = device.pinned((3,), "int16")
    view = np.asarray(pinned)
    view[1] = 5
    assert pinned.array.tolist() == [0, 5, 0] and np.array(pinned, "float64").tolist() == [0, 5, 0]
    assert pinned.__buffer__(0).shape == (3,) and np.shares_memory(pinned.__buffer__(0), view)
    assert np.array(pinned) is not view and np.shares_memory(np.from_dlpack(pinned), view)
    with pytest.raises(BufferError):
        pinned.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        pinned.__dlpack__(dl_device=(2, 0))


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"bfloat16", "float8_e4m3fn"}))
def test_arrays_of_all_dtypes_are_exported_and_imported(device: Device, dtype: str) -> None:
    """Values survive DLPack and the interface, and dtypes are given by name or NumPy type."""
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    given = device.from_host(values)
    assert given.dtype == dtype == device.zeros(1, np.dtype(dtype)).dtype
    assert device.zeros(1, np.dtype(dtype).type).dtype == dtype
    for view in (device.wrap(ByDlpack(given)), device.wrap(ByInterface(given))):
        assert (view.dtype, view.shape, view.ptr) == (dtype, (2, 3), given.ptr)
        np.testing.assert_array_equal(view.to_host(), values)
    pinned = device.pinned((2, 3), dtype)
    pinned.array[:] = values
    np.testing.assert_array_equal(np.from_dlpack(pinned), values)


def test_dlpack_exports_types_that_numpy_lacks(device: Device) -> None:
    for dtype in ("bfloat16", "float8_e4m3fn"):
        given = device.zeros((2,), dtype)
        assert device.wrap(ByDlpack(given)).dtype == dtype


def test_dlpack_capsule_keeps_memory_until_it_is_dropped(device: Device) -> None:
    wait_until_freed()
    live = _native.live_resources()
    capsule = device.zeros((2,), "int32").__dlpack__(stream=-1)
    wait_until_freed()
    assert _native.live_resources() == live + 1
    del capsule
    wait_until_freed()
    assert _native.live_resources() == live


@pytest.mark.overlap
def test_dlpack_export_waits_unless_told_not_to(device: Device, stream: Stream, module) -> None:
    word = device.pinned((1,), "int32")
    x = device.zeros((1,), np.uint8)
    lane = StreamLane(stream)
    lane.kernel(module["wait_for"], 1, 1, [word])
    lane.fill(x, 9)
    x.__dlpack__(stream=-1)
    assert not stream.query()
    word.array[0] = 1
    x.__dlpack__(stream=1)
    assert stream.query()


def test_dtype_errors_name_value(device: Device) -> None:
    for wrong in (None, "float31", np.complex128, object, 5):
        with pytest.raises(ShapeError, match="is not one of float16, bfloat16"):
            device.empty((1,), wrong)


def test_cuda_core_reads_arrays_and_gives_buffers(device: Device, stream: Stream, module) -> None:
    """A buffer of cuda.core is wrapped through DLPack, and cuda.core views arrays of graft."""
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    utils = pytest.importorskip("cuda.core.utils")
    core_device = core.Device(device.ordinal)
    core_device.set_current()
    queue = core_device.create_stream(stream)
    buffer = core_device.allocate(16, stream=queue)
    view = device.wrap(buffer)
    assert view.nbytes == 16 and view.ptr == int(buffer.handle)
    lane = StreamLane(queue)
    lane.kernel(module["untyped"], 1, 16, [buffer])
    stream.synchronize(60)
    assert view.to_host().tolist() == [7] * 16
    x = device.zeros((2, 3), np.float32)
    for strided in (
        utils.StridedMemoryView.from_dlpack(x, stream_ptr=stream.handle),
        utils.StridedMemoryView.from_cuda_array_interface(x, stream_ptr=stream.handle),
    ):
        assert (strided.ptr, strided.shape, strided.dtype) == (x.ptr, (2, 3), np.float32)
        assert strided.is_device_accessible and not strided.readonly
    del view
    stream.synchronize(60)
    buffer.close()


def test_torch_tensors_are_copy_operands(device: Device, stream: Stream) -> None:
    """Tensors of torch in host memory; bfloat16 is read through DLPack."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.arange(4, dtype=torch.float32)
    on_device = device.zeros((4,), np.float32)
    lane = StreamLane(stream)
    lane.copy(on_device, x)
    back = torch.zeros(4)
    lane.copy(back, on_device)
    half = device.zeros((2,), "bfloat16")
    lane.copy(half, torch.ones(2, dtype=torch.bfloat16))
    stream.synchronize(60)
    assert back.tolist() == [0, 1, 2, 3] and half.to_host().tolist() == [0x3F80] * 2
    pinned = device.pinned((2,), "bfloat16")
    assert torch.from_dlpack(pinned).dtype == torch.bfloat16
    with pytest.raises(ShapeError, match=r"Tensor cannot be exported.*gradient"):
        lane.copy(on_device, torch.ones(4, requires_grad=True))


def test_managed_memory_is_wrapped_as_device_array(device: Device) -> None:
    flags = cu.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
    address = int(call(cu.cuMemAllocManaged, 16, flags))
    view = np.ctypeslib.as_array((ctypes.c_int32 * 4).from_address(address))
    view[:] = 3
    wrapped = device.wrap(view)
    assert isinstance(wrapped, DeviceArray) and wrapped.to_host().tolist() == [3] * 4
    wrapped.close()
    call(cu.cuMemFree, address)


def test_wrapped_array_can_be_closed(device: Device) -> None:
    foreign = ByInterface(device_array(device, 1))
    watch = weakref.ref(foreign)
    view = device.wrap(foreign)
    del foreign
    view.close()
    gc.collect()
    assert watch() is None
    with pytest.raises(DeviceError, match="wrapped ByInterface is closed"):
        _ = view.ptr


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data": None}, "cannot unpack"),
        ({"data": 4096}, "cannot unpack"),
        ({"data": ("a", False)}, "cannot be interpreted as an integer"),
        ({"data": (-1, False)}, "the address is -0x1"),
        ({"data": (1 << 65, False)}, "the address is 0x2"),
        ({"shape": 4}, "not iterable"),
        ({"strides": (4, 4)}, r"shape \(4,\) has 1 axes"),
        ({"strides": 4}, "not iterable"),
        ({"stream": "main"}, "cannot be interpreted as an integer"),
        ({"typestr": ">f4"}, "'>f4' is not in native byte order"),
    ],
)
def test_malformed_cuda_array_interface_raises_shape_error(
    device: Device, changes: dict[str, Any], problem: str
) -> None:
    x = device.zeros((4,), "float32")
    with pytest.raises(ShapeError, match=problem):
        device.wrap(ByInterface(x, **changes))


@pytest.mark.parametrize("key", ["data", "shape", "typestr"])
def test_incomplete_cuda_array_interface_raises_shape_error(device: Device, key: str) -> None:
    x = device.zeros((4,), "float32")

    class Incomplete:
        __cuda_array_interface__ = dict(x.__cuda_array_interface__)  # noqa: RUF012

    del Incomplete.__cuda_array_interface__[key]
    with pytest.raises(ShapeError, match=f"of Incomplete cannot be read: KeyError: '{key}'"):
        device.wrap(Incomplete())


def test_error_of_the_owner_of_an_array_becomes_shape_error(device: Device) -> None:
    class Refusing:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise ValueError("requires gradients")

    class Exporter:
        def __init__(self, result: Any) -> None:
            self.result = result

        def __dlpack_device__(self) -> tuple[int, int]:
            return (dlpack.CUDA, 0)

        def __dlpack__(self, **_: Any) -> object:
            if isinstance(self.result, Exception):
                raise self.result
            return self.result

    with pytest.raises(ShapeError, match="Refusing cannot be read: requires gradients"):
        device.wrap(Refusing())
    for result in (ValueError("a view"), AssertionError("a view"), BufferError("a view")):
        with pytest.raises(ShapeError, match="Exporter cannot be exported with DLPack: a view"):
            device.wrap(Exporter(result))
    with pytest.raises(ShapeError, match="returned no unused capsule, but None"):
        device.wrap(Exporter(None))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_dlpack_consumer_that_refuses_the_capsule_keeps_its_error(device: Device) -> None:
    x = device.zeros((4,), "float32")
    exported = len(dlpack._exported)
    with pytest.raises((RuntimeError, BufferError), match=r"[Uu]nsupported device"):
        np.from_dlpack(x)  # NumPy frees the capsule while its exception is raised
    assert len(dlpack._exported) == exported
