"""Captures come and go: what they captured goes with them."""

from __future__ import annotations

import gc

import pytest
from cuda.bindings import driver as cu
from lifetime_util import Step, released, resident_kib, settled

from graft import native
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.hostwork import hostfunc
from graft.cudagraph.lanes import StreamLane

MODE = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def recapture(device: Device, stream: Stream, times: int) -> int:
    """Capture, replay and drop a graph; returns how often its host step ran."""
    data = device.zeros((64,), "int32")
    lane, step = StreamLane(stream), Step()
    for i in range(times):
        assert int(cu.cuStreamBeginCapture(stream.handle, MODE)[0]) == 0
        hostfunc(stream, step)
        lane.fill(data)
        code, graph = cu.cuStreamEndCapture(stream.handle)
        assert int(code) == 0
        if i % 10 == 0:
            executable = cu.cuGraphInstantiate(graph, 0)[1]
            assert int(cu.cuGraphLaunch(executable, stream.handle)[0]) == 0
            assert int(cu.cuGraphExecDestroy(executable)[0]) == 0
        assert int(cu.cuGraphDestroy(graph)[0]) == 0
    stream.synchronize(60)
    return step.calls


def test_1000_recaptures_leave_nothing(device: Device, stream: Stream) -> None:
    """Every record of every capture is released."""
    before, live = settled(), native.live_records()
    assert recapture(device, stream, 1000) == 100
    released(before + 2000)
    assert native.live_records() == live


@pytest.mark.full
def test_10000_recaptures_keep_memory_flat(device: Device, stream: Stream) -> None:
    """Ten thousand recaptures weigh no more than the first thousand."""
    before = settled()
    recapture(device, stream, 1000)
    released(before + 2000)
    gc.collect()
    resident = resident_kib()
    recapture(device, stream, 10_000)
    released(before + 22_000)
    gc.collect()
    assert resident_kib() - resident < 8 * 1024
