"""Streams of other libraries, wherever graft takes a stream."""

from __future__ import annotations

import ctypes
import gc
import weakref

import numpy as np
import pytest

from graft.cudagraph import Device, Graph, OptionError, Stream, StreamLane, hostfunc
from graft.cudagraph.driver.driver import cu
from graft.cudagraph.driver.handles import stream_handle
from graft.cudagraph.driver.pinned import Ring


class ProtocolStream:
    """A stream as cuda.core, CuPy, torch and numba-cuda have it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class PropertyStream(ProtocolStream):
    """A stream of an early version of the protocol."""

    __cuda_stream__ = property(lambda self: (0, self._handle))


class TorchStream:
    """A stream of an older version of torch."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class CupyStream:
    """A stream of an older version of CuPy."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


class NumbaStream:
    """A stream of an older version of numba, whose handle is a ctypes pointer."""

    def __init__(self, handle: int) -> None:
        self.handle = ctypes.c_void_p(handle)


KINDS = {
    "graft": lambda stream: stream,
    "protocol": lambda stream: ProtocolStream(stream.handle),
    "property": lambda stream: PropertyStream(stream.handle),
    "torch": lambda stream: TorchStream(stream.handle),
    "cupy": lambda stream: CupyStream(stream.handle),
    "numba": lambda stream: NumbaStream(stream.handle),
    "bindings": lambda stream: cu.CUstream(stream.handle),
    "int": lambda stream: stream.handle,
    "numpy": lambda stream: np.uint64(stream.handle),
}


@pytest.mark.parametrize("kind", KINDS)
def test_functions_take_streams_of_other_libraries(
    device: Device, stream: Stream, kind: str
) -> None:
    """Launches, lanes, events and host functions are enqueued on the stream that was given."""
    foreign = KINDS[kind](stream)
    out = device.zeros((1,), "int32")
    graph = Graph(device)
    graph.lane("main").fill(out, 1)
    run = graph.instantiate()
    run.upload(foreign)
    run.launch(foreign)
    seen: list[str] = []
    hostfunc(foreign, seen.append, "hostfunc")
    lane = StreamLane(foreign)
    lane.host(lambda: seen.append("lane"))
    event = device.event()
    event.record(foreign)
    event.wait(foreign)
    lane.wait(lane.record())
    stream.synchronize(60)
    assert seen == ["hostfunc", "lane"] and event.query()
    assert out.to_host().tolist() == [0x01010101]
    ring = Ring(device, 2, {"x": ("int32", (1,))})
    assert not ring.wait(1, 0.01, stream=foreign)


def test_stream_handle_accepts_default_streams() -> None:
    assert stream_handle(ProtocolStream(0), "f()") == 0
    assert stream_handle(NumbaStream(0), "f()") == 0  # ctypes gives None for a null pointer
    assert stream_handle(cu.CUstream(cu.CU_STREAM_PER_THREAD), "f()") == 2


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda device: None, id="none"),
        pytest.param(lambda device: True, id="bool"),
        pytest.param(lambda device: -1, id="negative"),
        pytest.param(lambda device: 1 << 64, id="large"),
        pytest.param(lambda device: "stream", id="str"),
        pytest.param(lambda device: device, id="device"),
        pytest.param(lambda device: device.event(), id="event"),
        pytest.param(lambda device: device.zeros((1,), "int32"), id="array"),
        pytest.param(lambda device: Graph(device), id="graph"),
        pytest.param(lambda device: ProtocolStream, id="class"),
        pytest.param(lambda device: ProtocolStream(None), id="broken"),
    ],
    ids=[
        "none",
        "bool",
        "negative",
        "large",
        "str",
        "device",
        "event",
        "array",
        "graph",
        "class",
        "broken",
    ],
)
def test_functions_refuse_other_objects_as_streams(device: Device, make) -> None:
    """An event or array has a handle too, but is not a stream. The error names what is allowed."""
    run = Graph(device).instantiate()
    wrong = make(device)
    for name, take in {
        r"launch\(\)": run.launch,
        r"upload\(\)": run.upload,
        r"StreamLane\(\)": StreamLane,
        r"hostfunc\(\)": lambda stream: hostfunc(stream, print),
        r"Event\.record\(\)": device.event().record,
        r"Event\.wait\(\)": device.event().wait,
    }.items():
        with pytest.raises(OptionError, match=f"^{name} needs a stream of graft.*__cuda_stream__"):
            take(wrong)


def test_stream_lane_keeps_foreign_stream_alive(device: Device, stream: Stream) -> None:
    foreign = ProtocolStream(stream.handle)
    watch = weakref.ref(foreign)
    lane = StreamLane(foreign)
    del foreign
    gc.collect()
    assert watch() is not None
    lane.fill(device.zeros((1,), "int32"))
    stream.synchronize(60)
    del lane
    gc.collect()
    assert watch() is None


def test_cuda_core_uses_stream_of_graft_and_reverse(device: Device, stream: Stream) -> None:
    """cuda.core reads the handle of a stream of graft, and graft that of cuda.core."""
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    assert int(core.Stream.from_handle(stream.handle).handle) == stream.handle
    core_device = core.Device(device.ordinal)
    core_device.set_current()
    ours = core_device.create_stream(stream)
    assert int(ours.handle) == stream.handle
    own = core_device.create_stream()
    seen: list[int] = []
    hostfunc(own, seen.append, 1)
    own.sync()
    assert seen == [1]
    builder = own.create_graph_builder()
    builder.begin_building()
    hostfunc(builder, seen.append, 2)
    run = builder.end_building().complete()
    run.launch(ours)
    stream.synchronize(60)
    assert seen == [1, 2]
    run.close()
    builder.close()
