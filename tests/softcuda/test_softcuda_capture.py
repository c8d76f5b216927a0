"""Tests of stream capture on the soft device, which must follow the documentation of CUDA."""

from __future__ import annotations

import numpy as np
import pytest
from softcuda_util import USLEEP, address, code, codes, in_threads

GLOBAL = 0
THREAD_LOCAL = 1
RELAXED = 2
INVALIDATED = "STREAM_CAPTURE_INVALIDATED"


def fork(soft, stream, other, event) -> None:
    """Make the stream `other` join the capture of `stream` by waiting for an event."""
    soft.cuEventRecord(event, stream)
    soft.cuStreamWaitEvent(other, event, 0)


def end_capture(soft, stream) -> str:
    """End a capture and return the name of the error code."""
    return code(soft.d.cuStreamEndCapture(stream))


def status(soft, stream) -> int:
    """Return the capture status of a stream: 0 none, 1 active, 2 invalidated."""
    return int(soft.cuStreamIsCapturing(stream))


def capture_mode(soft):
    """Return the relaxed capture mode."""
    return soft.d.CUstreamCaptureMode(2)


def test_capture_forks_and_joins_through_events(soft, kernels, stream, other, event) -> None:
    """Waiting for events forks streams from a capture and joins them to the origin stream.

    A stream joins the capture when it waits for an event that was recorded in the capture. Its work
    is joined when the origin stream waits for an event that was recorded on it.
    """
    a = soft.ints(0)
    b = soft.ints(0)
    back = soft.cuEventCreate(2)
    soft.begin(stream)
    soft.cuMemsetD32Async(a, 1, 1, stream)
    fork(soft, stream, other, event)
    assert status(soft, other) == 1
    soft.cuMemsetD32Async(b, 1, 1, other)  # the branches use different data
    soft.launch_int(kernels.scale, b, 10, other)
    soft.launch_int(kernels.add, a, 4, stream)
    fork(soft, other, stream, back)
    info = soft.cuStreamGetCaptureInfo(stream)
    assert int(info[0]) == 1 and info[-1] == 2, "the next node depends on both branches"
    soft.launch_int(kernels.add, b, 1, stream)
    graph = soft.cuStreamEndCapture(stream)
    assert status(soft, other) == 0 and soft.cuGraphGetEdges(graph)[-1] == 5
    soft.replay(graph, stream)
    assert soft.value(a) == 5 and soft.value(b) == 11


def test_capture_with_unjoined_fork_fails(soft, stream, other, event) -> None:
    """cuStreamEndCapture fails if a forked stream was not joined to the origin stream.

    It succeeds if the test removes the dependencies of the forked stream explicitly.
    """
    a = soft.ints(0)
    live = soft.live()
    for removed in (False, True):
        soft.begin(stream)
        fork(soft, stream, other, event)
        soft.cuMemsetD32Async(a, 1, 1, other)
        if removed:
            soft.cuStreamUpdateCaptureDependencies(other, [], [], 0, 1)
            soft.cuGraphDestroy(soft.cuStreamEndCapture(stream))
        else:
            assert end_capture(soft, stream) == "STREAM_CAPTURE_UNJOINED"
        assert status(soft, stream) == status(soft, other) == 0
        assert soft.live()["graph"] == live["graph"]


def test_capture_continues_after_joined_stream_is_destroyed(soft, kernels) -> None:
    """Destroying a forked stream invalidates the capture unless the stream was joined before."""
    p = soft.ints(0)
    for joins in (True, False):
        main = soft.stream()
        side = soft.stream()
        event = soft.cuEventCreate(2)
        soft.begin(main, RELAXED)
        fork(soft, main, side, event)
        soft.launch_int(kernels.add, p, 1, side)
        soft.cuEventRecord(event, side)
        if joins:
            soft.cuStreamWaitEvent(main, event, 0)
        soft.cuStreamDestroy(side)
        if joins:
            soft.replay(soft.cuStreamEndCapture(main), main, 3)
        else:
            assert end_capture(soft, main) == INVALIDATED
    assert soft.value(p) == 3


def test_capture_rejects_calls_after_invalidation(soft, stream, event) -> None:
    """After a synchronization has invalidated a capture, calls on its streams fail.

    An event that was recorded in the capture cannot be used until it is recorded again.
    """
    a = soft.ints(0)
    soft.begin(stream)
    soft.cuEventRecord(event, stream)
    assert code(soft.d.cuStreamSynchronize(stream)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert status(soft, stream) == 2
    assert (
        code(soft.d.cuMemsetD32Async(a, 1, 1, stream)) == end_capture(soft, stream) == INVALIDATED
    )
    assert status(soft, stream) == 0
    assert code(soft.d.cuEventSynchronize(event)) == "CAPTURED_EVENT"
    soft.cuEventRecord(event, stream)
    soft.cuEventSynchronize(event)


def test_capture_rejects_events_of_other_captures(soft, stream, other, event) -> None:
    """A capturing stream cannot wait for an event that was recorded outside of its capture, in
    another capture, or in a capture that has ended."""
    soft.cuEventRecord(event, other)
    soft.begin(stream)
    wait = soft.d.cuStreamWaitEvent
    assert code(wait(stream, event, 0)) == "STREAM_CAPTURE_ISOLATION"
    assert end_capture(soft, stream) == INVALIDATED
    soft.begin(stream)
    soft.begin(other)
    soft.cuEventRecord(event, other)
    assert code(wait(stream, event, 0)) == "STREAM_CAPTURE_MERGE"
    assert end_capture(soft, stream) == end_capture(soft, other) == INVALIDATED
    soft.begin(stream)
    soft.cuEventRecord(event, stream)
    soft.cuStreamEndCapture(stream)
    assert code(wait(other, event, 0)) == "CAPTURED_EVENT"


def test_capture_must_end_on_origin_stream_and_thread(soft, stream, other, event) -> None:
    """A capture must be ended on its origin stream and by the thread that began it. A relaxed
    capture may be ended by any thread."""

    def end_in_thread() -> str:
        return in_threads(lambda origin: end_capture(soft, origin), stream)[0]

    soft.begin(stream)
    assert code(soft.d.cuStreamBeginCapture(stream, soft.mode(0))) == "ILLEGAL_STATE"
    assert end_in_thread() == "STREAM_CAPTURE_WRONG_THREAD"
    soft.cuStreamEndCapture(stream)
    soft.begin(stream, RELAXED)
    assert end_in_thread() == "SUCCESS"
    soft.begin(stream)
    fork(soft, stream, other, event)
    assert end_capture(soft, other) == "STREAM_CAPTURE_UNMATCHED"
    assert end_capture(soft, stream) == INVALIDATED


def test_capture_mode_decides_on_unsafe_calls(soft, stream) -> None:
    """The capture mode and the mode of the calling thread decide whether cuMemAlloc is allowed.

    cuMemAlloc is an unsafe call in the sense of cuThreadExchangeStreamCaptureMode. ``allocate``
    calls it on the capturing thread, and ``allocate_in_other_thread`` calls it on another thread.
    """

    def allocate() -> str:
        soft.cuCtxSetCurrent(soft.context)
        result = soft.d.cuMemAlloc(4)
        if int(result[0]) == 0:
            soft.cuMemFree(result[1])
        return code(result)

    def allocate_in_mode(mode: int) -> str:
        soft.cuThreadExchangeStreamCaptureMode(soft.mode(mode))
        return allocate()

    def allocate_in_other_thread(mode: int = GLOBAL) -> str:
        return in_threads(allocate_in_mode, mode)[0]

    forbidden = "STREAM_CAPTURE_UNSUPPORTED"
    for mode, call, expected in (
        (GLOBAL, allocate, forbidden),
        (GLOBAL, allocate_in_other_thread, forbidden),
        (THREAD_LOCAL, allocate, forbidden),
        (THREAD_LOCAL, allocate_in_other_thread, "SUCCESS"),
        (RELAXED, allocate, "SUCCESS"),
        (RELAXED, allocate_in_other_thread, "SUCCESS"),
    ):
        soft.begin(stream, mode)
        assert call() == expected, (mode, call)
        assert end_capture(soft, stream) == (INVALIDATED if expected == forbidden else "SUCCESS")
    soft.begin(stream)
    assert allocate_in_other_thread(THREAD_LOCAL) == "SUCCESS"
    before = soft.cuThreadExchangeStreamCaptureMode(soft.mode(RELAXED))
    assert int(before) == GLOBAL
    assert allocate() == "SUCCESS"
    assert int(soft.cuThreadExchangeStreamCaptureMode(before)) == RELAXED
    soft.cuStreamEndCapture(stream)


def test_capture_rejects_legacy_stream(soft) -> None:
    """The legacy stream cannot capture, and cannot be used while a blocking stream captures."""
    a = soft.ints(0)
    legacy = soft.d.CUstream(0)
    blocking = soft.cuStreamCreate(0)
    start = soft.d.cuStreamBeginCapture
    assert code(start(legacy, soft.mode(0))) == "STREAM_CAPTURE_UNSUPPORTED"
    soft.begin(blocking, RELAXED)
    assert code(soft.d.cuStreamIsCapturing(legacy)) == "STREAM_CAPTURE_IMPLICIT"
    assert status(soft, blocking) == 1
    assert code(soft.d.cuMemsetD8Async(a, 0, 4, legacy)) == "STREAM_CAPTURE_IMPLICIT"
    assert end_capture(soft, blocking) == INVALIDATED


def test_capture_graph_cannot_be_used_before_end(soft, kernels, stream) -> None:
    a = soft.ints(3)
    d = soft.d
    soft.begin(stream)
    soft.launch_int(kernels.scale, a, 5, stream)
    graph = soft.cuStreamGetCaptureInfo(stream)[2]
    assert codes(d.cuGraphInstantiate(graph, 0), d.cuGraphDestroy(graph)) == {"ILLEGAL_STATE"}
    assert int(soft.cuStreamEndCapture(stream)) == int(graph)
    soft.replay(graph, stream)
    assert soft.value(a) == 15


def test_capture_of_graph_launch_adds_child_graph(soft, kernels, stream, graph) -> None:
    """A captured graph launch becomes a child graph node.

    The child graph has the parameters of the executable graph. It remains valid after the
    executable graph is destroyed.
    """
    a = soft.ints(1)
    soft.add_kernel(graph, [], kernels.add, 1, 1, a, np.int32(2))
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.begin(stream)
    soft.cuGraphLaunch(executable, stream)
    soft.launch_int(kernels.scale, a, 10, stream)
    outer = soft.cuStreamEndCapture(stream)
    nodes, count = soft.cuGraphGetNodes(outer, 2)
    assert count == 2 and soft.cuGraphNodeGetType(nodes[0]).value == 4
    soft.cuGraphExecDestroy(executable)
    soft.cuGraphDestroy(graph)
    soft.replay(outer, stream, 2)
    assert soft.value(a) == (((1 + 2) * 10) + 2) * 10


@pytest.mark.parametrize("kind", [0, 1])
def test_capture_is_discarded_with_origin_stream(soft, kind) -> None:
    """Destroying the capturing stream also destroys the captured graph.

    This holds for blocking and for non-blocking streams.
    """
    live = soft.live()
    stream = soft.cuStreamCreate(kind)
    soft.begin(stream)
    soft.cuStreamDestroy(stream)
    assert soft.live() == live


def test_capture_to_graph_adds_nodes_to_existing_graph(soft, kernels, stream, graph):
    """The first captured node depends on the given nodes. A failed capture keeps the graph."""
    p = soft.ints(1)
    node = soft.add_int_kernel(graph, [], kernels.add, p, 2)
    soft.cuStreamBeginCaptureToGraph(stream, graph, [node], None, 1, capture_mode(soft))
    assert code(soft.d.cuGraphInstantiate(graph, 0)) == "ILLEGAL_STATE"
    soft.try_launch(kernels.scale, 1, 1, p, np.int32(10), stream=stream)
    assert int(soft.cuStreamEndCapture(stream)) == int(graph)
    soft.replay(graph, stream)
    assert soft.value(p) == 30
    soft.cuStreamBeginCaptureToGraph(stream, graph, [], None, 0, capture_mode(soft))
    assert code(soft.d.cuStreamSynchronize(stream)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert code(soft.d.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"
    assert soft.cuGraphGetNodes(graph)[-1] == 2


def test_capture_to_conditional_body_runs_if_it_has_no_host_function(soft, kernels, stream, graph):
    p = soft.ints(0)
    handle = soft.cuGraphConditionalHandleCreate(graph, soft.context, 1, 1)
    (body,) = soft.conditional(graph, [], handle, 0)[2]
    soft.cuStreamBeginCaptureToGraph(stream, body, [], None, 0, capture_mode(soft))
    soft.try_launch(kernels.add, 1, 1, p, np.int32(7), stream=stream)
    soft.cuStreamEndCapture(stream)
    soft.replay(graph, stream)
    assert soft.value(p) == 7
    soft.cuStreamBeginCaptureToGraph(stream, body, [], None, 0, capture_mode(soft))
    soft.cuLaunchHostFunc(stream, soft.d.CUhostFn(address(USLEEP)), 0)
    soft.cuStreamEndCapture(stream)
    assert code(soft.d.cuGraphInstantiate(graph, 0)) == "NOT_SUPPORTED"
