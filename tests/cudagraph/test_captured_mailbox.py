"""Mailboxes in captures that others began, and graphs that others instantiate and launch."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu
from lifetime_util import released, settled

from graft.cudagraph.captured_mailbox import spin_captured
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import HostWorkError, OptionError
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import check_captured
from graft.cudagraph.kernels import load_text
from graft.cudagraph.lanes import StreamLane
from graft.cudagraph.mailbox import MailboxWorker
from graft.native import _native

LIMIT_S = 60.0
GLOBAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
TEXT = """
extern "C" __global__ void unless(const int* status, int* data) { if (!status[0]) *data += 1; }
"""


def ok(result: tuple) -> Any:
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]


@pytest.fixture(autouse=True)
def told() -> Iterator[None]:
    yield
    while _native.take_captured_failure() is not None:
        pass


def until_told() -> None:
    """Wait until a failure is raised: the watchdog sees the device's word a little later."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        check_captured()
        time.sleep(0.002)


class Captured:
    """A capture of one mailbox, its answer's copy and a counter of good replays."""

    def __init__(self, device: Device, stream: Stream, work: object, **options: Any) -> None:
        self.stream = stream
        self.result, self.good = device.zeros((4,), "int32"), device.zeros((1,), "int32")
        output = device.pinned((4,), "int32")
        kernel = load_text(device, TEXT, "captured_mailbox_test.cu")["unless"]
        lane = StreamLane(stream)
        ok(cu.cuStreamBeginCapture(stream.handle, GLOBAL))
        self.status = lane.spin(work, output=output, name="asked", **options)  # type: ignore[arg-type]
        lane.copy(self.result, output)
        lane.kernel(kernel, 1, 1, [self.status, self.good])
        self.graph = ok(cu.cuStreamEndCapture(stream.handle))
        self.execs = [self.instantiate()]

    def instantiate(self) -> Any:
        return ok(cu.cuGraphInstantiate(self.graph, 0))

    def launch(self, which: int = 0, stream: Stream | None = None) -> None:
        ok(cu.cuGraphLaunch(self.execs[which], (stream or self.stream).handle))

    def drop(self) -> None:
        for executable in self.execs:
            ok(cu.cuGraphExecDestroy(executable))
        ok(cu.cuGraphDestroy(self.graph))


def test_a_captured_mailbox_is_answered_in_every_replay(device: Device, stream: Stream) -> None:
    """Bare driver calls launch the graph; the work lives and dies with it."""
    count = [0]

    def work(out: np.ndarray) -> None:
        count[0] += 1
        out[:] = count[0]

    before, watch = settled(), weakref.ref(work)
    captured = Captured(device, stream, work)
    del work
    gc.collect()
    for i in range(1, 101):
        captured.launch()
        if i % 10 == 0:
            stream.synchronize(LIMIT_S)
            assert captured.result.to_host().tolist() == [i] * 4
    assert captured.good.to_host()[0] == 100 and watch() is not None
    captured.drop()
    released(before + 1)
    end = time.monotonic() + LIMIT_S
    while watch() is not None:  # the watchdog may be looking at its mailbox
        assert time.monotonic() < end
        time.sleep(0.002)


def test_executables_take_turns(device: Device, stream: Stream) -> None:
    """Two executables and a clone share the words as long as they run one after another."""
    count = [0]

    def work(out: np.ndarray) -> None:
        count[0] += 1
        out[:] = count[0]

    captured = Captured(device, stream, work)
    clone = ok(cu.cuGraphClone(captured.graph))
    captured.execs += [captured.instantiate(), ok(cu.cuGraphInstantiate(clone, 0))]
    for i in range(1, 31):
        captured.launch(i % 3)
        stream.synchronize(LIMIT_S)
        assert captured.result.to_host().tolist() == [i] * 4
    ok(cu.cuGraphDestroy(clone))
    captured.drop()


def test_a_second_executable_at_the_same_time_fails_closed(device: Device, stream: Stream) -> None:
    """The one without the lease asks nothing and goes on; both sides know; then all is well."""
    entered, go = threading.Event(), threading.Event()
    answers: list[int] = []

    def work(out: np.ndarray) -> None:
        answers.append(1)
        entered.set()
        assert go.wait(LIMIT_S)
        out[:] = 8

    captured = Captured(device, stream, work)
    captured.execs.append(captured.instantiate())
    other = device.stream("other")
    captured.launch(0)
    assert entered.wait(LIMIT_S)
    captured.launch(1, other)
    with pytest.raises(HostWorkError, match="another executable of the captured graph") as failed:
        other.synchronize(LIMIT_S)  # it does not wait for the answer of the first
        until_told()
    go.set()
    stream.synchronize(LIMIT_S)
    assert failed.value.node == "asked"
    assert captured.good.to_host()[0] == 1  # the first one's answer came, the other's did not
    assert len(answers) == 1
    assert captured.status.array[0] == 0
    for which in (1, 0):
        captured.launch(which)
        stream.synchronize(LIMIT_S)
    assert captured.good.to_host()[0] == 3 and captured.result.to_host().tolist() == [8] * 4
    other.close()
    captured.drop()


def test_failures_and_deadlines_fail_the_replay(device: Device, stream: Stream) -> None:
    """What the work raises, and a worker that does not answer in time, are raised by name."""
    mode, go = ["raise"], threading.Event()

    def work(out: np.ndarray) -> None:
        if mode[0] == "raise":
            raise KeyError("no such rule")
        if mode[0] == "late":
            go.wait(LIMIT_S)
        out[:] = 3

    captured = Captured(device, stream, work, deadline_s=LIMIT_S)
    captured.launch()
    with pytest.raises(HostWorkError, match="no such rule"):
        stream.synchronize(LIMIT_S)
    mode[0] = "fine"
    captured.launch()
    stream.synchronize(LIMIT_S)
    assert captured.good.to_host()[0] == 1 and captured.result.to_host().tolist() == [3] * 4
    captured.drop()
    mode[0] = "late"
    captured = Captured(device, stream, work, deadline_s=0.1)
    captured.launch()
    with pytest.raises(HostWorkError, match=r"no answer within 0\.1 s"):
        stream.synchronize(LIMIT_S)
    go.set()
    assert captured.good.to_host()[0] == 0 and captured.result.to_host().tolist() == [0] * 4
    captured.drop()


def test_a_captured_mailbox_joins_a_graph_of_ours(device: Device, stream: Stream) -> None:
    """As a child graph its failures are the parent's, and its status words follow the parent's."""
    bad = [False]

    def work(out: np.ndarray) -> None:
        if bad[0]:
            raise ValueError("told to")
        out[:] = 6

    captured = Captured(device, stream, work)
    graph = Graph(device, "around")
    graph.add_child(captured.graph, name="theirs")
    run = graph.instantiate()
    captured.drop()
    run.launch(stream)
    run.synchronize(LIMIT_S)
    assert captured.good.to_host()[0] == 1
    bad[0] = True
    run.launch(stream)
    with pytest.raises(HostWorkError, match="told to"):
        run.synchronize(LIMIT_S)
    assert captured.status.array[0] == graph.status.array[0] == 1
    bad[0] = False
    run.clear(LIMIT_S)
    assert captured.status.array[0] == 0
    run.launch(stream)
    run.synchronize(LIMIT_S)
    assert captured.good.to_host()[0] == 2
    run.close()


def test_refusals(device: Device, stream: Stream) -> None:
    """No capture, memory operations, wrong options: refused by name, and the capture is intact."""
    lane = StreamLane(stream)
    with pytest.raises(OptionError, match="'masks' needs a graph"):
        lane.spin(print, name="masks")
    ok(cu.cuStreamBeginCapture(stream.handle, GLOBAL))
    with pytest.raises(OptionError, match=r"'masks'.*each other's answers"):
        lane.mailbox(print, name="masks")
    with pytest.raises(OptionError, match="deadline_s"):
        spin_captured(device, stream.handle, print, deadline_s=-1.0)
    with pytest.raises(OptionError, match="MailboxWorker"):
        lane.spin(print, worker=3)  # type: ignore[arg-type]
    spin_captured(device, stream.handle, lambda: None, worker=MailboxWorker(threads=2))
    graph = ok(cu.cuStreamEndCapture(stream.handle))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphLaunch(executable, stream.handle))
    stream.synchronize(LIMIT_S)
    ok(cu.cuGraphExecDestroy(executable))
    ok(cu.cuGraphDestroy(graph))
