"""Stream capture on the soft device, against the rules of the driver's documentation."""

from __future__ import annotations

import numpy as np
import pytest
from softcuda_util import code, codes, in_threads

GLOBAL = 0
THREAD_LOCAL = 1
RELAXED = 2
INVALIDATED = "STREAM_CAPTURE_INVALIDATED"


def fork(soft, stream, other, event) -> None:
    soft.cuEventRecord(event, stream)
    soft.cuStreamWaitEvent(other, event, 0)


def ended(soft, stream) -> str:
    return code(soft.d.cuStreamEndCapture(stream))


def status(soft, stream) -> int:
    return int(soft.cuStreamIsCapturing(stream))


def test_fork_and_join_through_events(soft, kernels, stream, other, event) -> None:
    """Waiting for a captured event brings a stream into the capture; joining makes the edge."""
    a = soft.ints(0)
    b = soft.ints(0)
    back = soft.cuEventCreate(2)
    soft.begin(stream)
    soft.cuMemsetD32Async(a, 1, 1, stream)
    fork(soft, stream, other, event)
    assert status(soft, other) == 1
    soft.cuMemsetD32Async(b, 1, 1, other)  # the branches share no data
    soft.launch(kernels.scale, 1, 1, b, np.int32(10), stream=other)
    soft.launch(kernels.add, 1, 1, a, np.int32(4), stream=stream)
    fork(soft, other, stream, back)
    info = soft.cuStreamGetCaptureInfo(stream)
    assert int(info[0]) == 1 and info[-1] == 2, "the next node depends on both branches"
    soft.launch(kernels.add, 1, 1, b, np.int32(1), stream=stream)
    graph = soft.cuStreamEndCapture(stream)
    assert status(soft, other) == 0 and soft.cuGraphGetEdges(graph)[-1] == 5
    soft.replay(graph, stream)
    assert soft.value(a) == 5 and soft.value(b) == 11


def test_unjoined_forks_are_refused(soft, stream, other, event) -> None:
    """A fork with work of its own that never comes back ends the capture without a graph, unless
    its dependencies were taken out by hand."""
    a = soft.ints(0)
    live = soft.live()
    for taken_out in (False, True):
        soft.begin(stream)
        fork(soft, stream, other, event)
        soft.cuMemsetD32Async(a, 1, 1, other)
        if taken_out:
            soft.cuStreamUpdateCaptureDependencies(other, [], [], 0, 1)
            soft.cuGraphDestroy(soft.cuStreamEndCapture(stream))
        else:
            assert ended(soft, stream) == "STREAM_CAPTURE_UNJOINED"
        assert status(soft, stream) == status(soft, other) == 0
        assert soft.live()["graph"] == live["graph"]


def test_a_joined_side_stream_may_be_destroyed_while_captured(soft, kernels) -> None:
    """Fork, join, destroy: the capture goes on; unjoined, it is invalidated."""
    p = soft.ints(0)
    for joins in (True, False):
        main = soft.stream()
        side = soft.stream()
        event = soft.cuEventCreate(2)
        soft.begin(main, RELAXED)
        fork(soft, main, side, event)
        soft.launch(kernels.add, 1, 1, p, np.int32(1), stream=side)
        soft.cuEventRecord(event, side)
        if joins:
            soft.cuStreamWaitEvent(main, event, 0)
        soft.cuStreamDestroy(side)
        if joins:
            soft.replay(soft.cuStreamEndCapture(main), main, 3)
        else:
            assert ended(soft, main) == INVALIDATED
    assert soft.value(p) == 3


def test_an_invalidated_capture_takes_nothing_until_its_end(soft, stream, event) -> None:
    """All that follows is an error, also for an event of the capture until it is recorded anew."""
    a = soft.ints(0)
    soft.begin(stream)
    soft.cuEventRecord(event, stream)
    assert code(soft.d.cuStreamSynchronize(stream)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert status(soft, stream) == 2
    assert code(soft.d.cuMemsetD32Async(a, 1, 1, stream)) == ended(soft, stream) == INVALIDATED
    assert status(soft, stream) == 0
    assert code(soft.d.cuEventSynchronize(event)) == "CAPTURED_EVENT"
    soft.cuEventRecord(event, stream)
    soft.cuEventSynchronize(event)


def test_dependencies_do_not_cross_the_border(soft, stream, other, event) -> None:
    """Events from outside, of another capture and of an ended one are refused by name."""
    soft.cuEventRecord(event, other)
    soft.begin(stream)
    wait = soft.d.cuStreamWaitEvent
    assert code(wait(stream, event, 0)) == "STREAM_CAPTURE_ISOLATION"
    assert ended(soft, stream) == INVALIDATED
    soft.begin(stream)
    soft.begin(other)
    soft.cuEventRecord(event, other)
    assert code(wait(stream, event, 0)) == "STREAM_CAPTURE_MERGE"
    assert ended(soft, stream) == ended(soft, other) == INVALIDATED
    soft.begin(stream)
    soft.cuEventRecord(event, stream)
    soft.cuStreamEndCapture(stream)
    assert code(wait(other, event, 0)) == "CAPTURED_EVENT"


def test_capture_ends_where_it_began(soft, stream, other, event) -> None:
    """Only the origin stream ends a capture, and only its thread unless it is relaxed."""
    soft.begin(stream)
    assert code(soft.d.cuStreamBeginCapture(stream, soft.mode(0))) == "ILLEGAL_STATE"
    assert in_threads(lambda s: ended(soft, s), stream) == ["STREAM_CAPTURE_WRONG_THREAD"]
    soft.cuStreamEndCapture(stream)
    soft.begin(stream, RELAXED)
    assert in_threads(lambda s: ended(soft, s), stream) == ["SUCCESS"]
    soft.begin(stream)
    fork(soft, stream, other, event)
    assert ended(soft, other) == "STREAM_CAPTURE_UNMATCHED"
    assert ended(soft, stream) == INVALIDATED


def test_unsafe_calls_by_mode(soft, stream) -> None:
    """cuMemAlloc is refused as cuThreadExchangeStreamCaptureMode documents, thread by thread."""

    def here() -> str:
        soft.cuCtxSetCurrent(soft.context)
        result = soft.d.cuMemAlloc(4)
        if int(result[0]) == 0:
            soft.cuMemFree(result[1])
        return code(result)

    def body(own: int) -> str:
        soft.cuThreadExchangeStreamCaptureMode(soft.mode(own))
        return here()

    def there(own: int = GLOBAL) -> str:
        return in_threads(body, own)[0]

    forbidden = "STREAM_CAPTURE_UNSUPPORTED"
    for captured, call, expected in (
        (GLOBAL, here, forbidden),
        (GLOBAL, there, forbidden),
        (THREAD_LOCAL, here, forbidden),
        (THREAD_LOCAL, there, "SUCCESS"),
        (RELAXED, here, "SUCCESS"),
        (RELAXED, there, "SUCCESS"),
    ):
        soft.begin(stream, captured)
        assert call() == expected, (captured, call)
        assert ended(soft, stream) == (INVALIDATED if expected == forbidden else "SUCCESS")
    soft.begin(stream)
    assert there(THREAD_LOCAL) == "SUCCESS"
    before = soft.cuThreadExchangeStreamCaptureMode(soft.mode(RELAXED))
    assert int(before) == GLOBAL
    assert here() == "SUCCESS"
    assert int(soft.cuThreadExchangeStreamCaptureMode(before)) == RELAXED
    soft.cuStreamEndCapture(stream)


def test_the_legacy_stream_stays_out(soft) -> None:
    """The legacy stream cannot capture, and cannot be used beside a blocking stream that does."""
    a = soft.ints(0)
    legacy = soft.d.CUstream(0)
    blocking = soft.cuStreamCreate(0)
    start = soft.d.cuStreamBeginCapture
    assert code(start(legacy, soft.mode(0))) == "STREAM_CAPTURE_UNSUPPORTED"
    soft.begin(blocking, RELAXED)
    assert code(soft.d.cuStreamIsCapturing(legacy)) == "STREAM_CAPTURE_IMPLICIT"
    assert status(soft, blocking) == 1
    assert code(soft.d.cuMemsetD8Async(a, 0, 4, legacy)) == "STREAM_CAPTURE_IMPLICIT"
    assert ended(soft, blocking) == INVALIDATED


def test_a_capturing_graph_is_not_touched(soft, kernels, stream) -> None:
    """The graph that a stream captures into can be used only after the end."""
    a = soft.ints(3)
    d = soft.d
    soft.begin(stream)
    soft.launch(kernels.scale, 1, 1, a, np.int32(5), stream=stream)
    graph = soft.cuStreamGetCaptureInfo(stream)[2]
    assert codes(d.cuGraphInstantiate(graph, 0), d.cuGraphDestroy(graph)) == {"ILLEGAL_STATE"}
    assert int(soft.cuStreamEndCapture(stream)) == int(graph)
    soft.replay(graph, stream)
    assert soft.value(a) == 15


def test_a_launched_graph_becomes_a_child(soft, kernels, stream, graph) -> None:
    """cuGraphLaunch on a capturing stream adds a child graph with that executable's parameters."""
    a = soft.ints(1)
    soft.add_kernel(graph, [], kernels.add, 1, 1, a, np.int32(2))
    executable = soft.cuGraphInstantiate(graph, 0)
    soft.begin(stream)
    soft.cuGraphLaunch(executable, stream)
    soft.launch(kernels.scale, 1, 1, a, np.int32(10), stream=stream)
    outer = soft.cuStreamEndCapture(stream)
    nodes, count = soft.cuGraphGetNodes(outer, 2)
    assert count == 2 and soft.cuGraphNodeGetType(nodes[0]).value == 4
    soft.cuGraphExecDestroy(executable)
    soft.cuGraphDestroy(graph)
    soft.replay(outer, stream, 2)
    assert soft.value(a) == (((1 + 2) * 10) + 2) * 10


@pytest.mark.parametrize("kind", [0, 1])
def test_dropping_the_stream_drops_its_capture(soft, kind) -> None:
    """A capture whose stream, blocking or not, is destroyed leaves no graph behind."""
    live = soft.live()
    stream = soft.cuStreamCreate(kind)
    soft.begin(stream)
    soft.cuStreamDestroy(stream)
    assert soft.live() == live
