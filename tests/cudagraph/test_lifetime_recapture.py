"""Captures come and go: what they captured goes with them."""

from __future__ import annotations

import pytest
from cuda.bindings import driver as cu
from lifetime_util import Step, released, resident_kib, settled

from graft import native
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.hostwork import hostfunc
from graft.cudagraph.lanes import StreamLane
from graft.cudagraph.mailbox import KERNELS, MailboxWorker

MODE = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def recapture(device: Device, stream: Stream, times: int, everything: bool = False) -> int:
    """Capture, replay and drop a graph; returns how often its host steps ran."""
    data, event = device.zeros((64,), "int32"), device.event()
    lane, step, worker = StreamLane(stream), Step(), MailboxWorker(wait="park")
    kernels = device.load(KERNELS)  # not anew for each capture
    for i in range(times):
        assert int(cu.cuStreamBeginCapture(stream.handle, MODE)[0]) == 0
        hostfunc(stream, step)
        lane.fill(data)
        if everything:
            lane.spin(step, worker=worker)
            lane.record_event(event)
        code, graph = cu.cuStreamEndCapture(stream.handle)
        assert int(code) == 0
        if i % 10 == 0:
            executable = cu.cuGraphInstantiate(graph, 0)[1]
            assert int(cu.cuGraphLaunch(executable, stream.handle)[0]) == 0
            assert int(cu.cuGraphExecDestroy(executable)[0]) == 0
        assert int(cu.cuGraphDestroy(graph)[0]) == 0
    stream.synchronize(60)
    del kernels
    return step.calls


def test_1000_recaptures_leave_nothing(device: Device, stream: Stream) -> None:
    """Every record of every capture is released."""
    before, live = settled(), native.live_records()
    assert recapture(device, stream, 1000) == 100
    released(before + 2000)
    assert native.live_records() == live


def test_recaptured_mailboxes_and_events_leave_nothing(device: Device, stream: Stream) -> None:
    """The same with a mailbox of leased words and an event node: five records a capture."""
    before, live = settled(), native.live_records()
    assert recapture(device, stream, 200, everything=True) == 40
    released(before + 1000)
    assert native.live_records() == live


@pytest.mark.full
@pytest.mark.parametrize("everything", [False, True])
def test_10000_recaptures_keep_memory_flat(
    device: Device, stream: Stream, everything: bool
) -> None:
    """Ten thousand recaptures weigh no more than the first thousand."""
    before, records = settled(), 5 if everything else 2
    recapture(device, stream, 1000, everything)
    released(before + 1000 * records)
    settled()
    resident = resident_kib()
    recapture(device, stream, 10_000, everything)
    released(before + 11_000 * records)
    settled()
    assert resident_kib() - resident < 8 * 1024
