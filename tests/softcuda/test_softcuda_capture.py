"""Stream capture on the soft device, against the rules of the driver's documentation."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
import softcuda_util as util
from softcuda_util import short_code as code

KERNELS = r"""
extern "C" __global__ void add(int* p, int value) { *p += value; }
extern "C" __global__ void scale(int* p, int value) { *p *= value; }
"""
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


@pytest.fixture
def other(soft):
    made = soft.stream()
    yield made
    soft.ok(soft.d.cuStreamDestroy(made))


def mode(soft, value: int):
    return soft.d.CUstreamCaptureMode(value)


def begin(soft, stream, value: int = GLOBAL) -> None:
    soft.ok(soft.d.cuStreamBeginCapture(stream, mode(soft, value)))


def end(soft, stream):
    return soft.ok(soft.d.cuStreamEndCapture(stream))


def status(soft, stream) -> int:
    return int(soft.ok(soft.d.cuStreamIsCapturing(stream)))


def run(soft, graph, stream, launches: int = 1) -> None:
    util.replay(soft, graph, stream, launches)
    soft.ok(soft.d.cuGraphDestroy(graph))


def edges(soft, graph) -> int:
    return int(soft.ok(soft.d.cuGraphGetEdges(graph))[-1])


def test_captured_work_runs_only_when_the_graph_does(soft, module, stream) -> None:
    """Kernels, copies, fills and host functions of a capture become one chain of nodes."""
    a, b = soft.alloc(4), soft.alloc(4)
    host = soft.ok(soft.d.cuMemHostAlloc(64, 3))
    value = ctypes.c_int.from_address(host)
    value.value = -1
    seen: list[int] = []
    callback = CALLBACK(lambda _: seen.append(value.value))
    begin(soft, stream)
    assert status(soft, stream) == 1
    soft.ok(soft.d.cuMemsetD32Async(a, 5, 1, stream))
    soft.launch(soft.function(module, "add"), 1, 1, a, np.int32(2), stream=stream)
    soft.ok(soft.d.cuMemcpyDtoDAsync(b, a, 4, stream))
    soft.launch(soft.function(module, "scale"), 1, 1, b, np.int32(3), stream=stream)
    soft.ok(soft.d.cuMemcpyDtoHAsync(host, b, 4, stream))
    fn = soft.d.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)
    soft.ok(soft.d.cuLaunchHostFunc_v2(stream, fn, 0, 0))
    graph = end(soft, stream)
    assert status(soft, stream) == 0
    soft.ok(soft.d.cuStreamSynchronize(stream))
    assert value.value == -1 and seen == []
    assert edges(soft, graph) == 5
    run(soft, graph, stream, 3)
    assert seen == [21, 21, 21]
    soft.free(a, b)
    soft.ok(soft.d.cuMemFreeHost(host))


def test_fork_and_join_through_events(soft, module, stream, other, event) -> None:
    """Waiting for a captured event brings a stream into the capture; joining makes the edge."""
    a, b = soft.alloc(4), soft.alloc(4)
    back = soft.ok(soft.d.cuEventCreate(2))
    add, scale = soft.function(module, "add"), soft.function(module, "scale")
    begin(soft, stream)
    soft.ok(soft.d.cuMemsetD32Async(a, 1, 1, stream))
    soft.ok(soft.d.cuEventRecord(event, stream))
    soft.ok(soft.d.cuStreamWaitEvent(other, event, 0))
    assert status(soft, other) == 1
    soft.ok(soft.d.cuMemsetD32Async(b, 1, 1, other))  # the branches share no data
    soft.launch(scale, 1, 1, b, np.int32(10), stream=other)
    soft.launch(add, 1, 1, a, np.int32(4), stream=stream)
    soft.ok(soft.d.cuEventRecord(back, other))
    soft.ok(soft.d.cuStreamWaitEvent(stream, back, 0))
    info = soft.ok(soft.d.cuStreamGetCaptureInfo(stream))
    assert int(info[0]) == 1 and info[-1] == 2, "the next node depends on both branches"
    soft.launch(add, 1, 1, b, np.int32(1), stream=stream)
    graph = end(soft, stream)
    assert status(soft, other) == 0 and edges(soft, graph) == 5
    run(soft, graph, stream)
    assert soft.get(a, 1, np.int32)[0] == 5 and soft.get(b, 1, np.int32)[0] == 11
    soft.free(a, b)
    soft.ok(soft.d.cuEventDestroy(back))


def test_unjoined_forks_are_refused(soft, stream, other, event) -> None:
    """A fork with work of its own that never comes back ends the capture without a graph."""
    a = soft.alloc(4)
    live = soft.live()
    begin(soft, stream)
    soft.ok(soft.d.cuEventRecord(event, stream))
    soft.ok(soft.d.cuStreamWaitEvent(other, event, 0))
    soft.ok(soft.d.cuMemsetD32Async(a, 1, 1, other))
    result = soft.d.cuStreamEndCapture(stream)
    assert code(result) == "STREAM_CAPTURE_UNJOINED"
    assert status(soft, stream) == status(soft, other) == 0
    assert soft.live()["graph"] == live["graph"]
    soft.free(a)


def test_dependencies_taken_out_by_hand_need_no_join(soft, stream, other, event) -> None:
    """A stream whose dependency set was replaced does not count as unjoined."""
    a = soft.alloc(4)
    begin(soft, stream)
    soft.ok(soft.d.cuEventRecord(event, stream))
    soft.ok(soft.d.cuStreamWaitEvent(other, event, 0))
    soft.ok(soft.d.cuMemsetD32Async(a, 1, 1, other))
    soft.ok(soft.d.cuStreamUpdateCaptureDependencies(other, [], [], 0, 1))
    soft.ok(soft.d.cuGraphDestroy(end(soft, stream)))
    result = soft.d.cuStreamUpdateCaptureDependencies(stream, [], [], 0, 1)
    assert code(result) == "ILLEGAL_STATE"
    soft.free(a)


def test_queries_and_waits_invalidate(soft, stream, event) -> None:
    """Waiting for what is only captured is an error, and so is all that follows until the end."""
    a = soft.alloc(4)
    begin(soft, stream)
    assert code(soft.d.cuStreamSynchronize(stream)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert status(soft, stream) == 2
    assert code(soft.d.cuMemsetD32Async(a, 1, 1, stream)) == "STREAM_CAPTURE_INVALIDATED"
    assert code(soft.d.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"
    assert status(soft, stream) == 0
    begin(soft, stream)
    assert code(soft.d.cuStreamQuery(stream)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert code(soft.d.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"
    begin(soft, stream)
    soft.ok(soft.d.cuEventRecord(event, stream))
    assert code(soft.d.cuEventQuery(event)) == "CAPTURED_EVENT"
    assert code(soft.d.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"
    assert code(soft.d.cuEventSynchronize(event)) == "CAPTURED_EVENT"
    soft.ok(soft.d.cuEventRecord(event, stream))
    soft.ok(soft.d.cuEventSynchronize(event))
    begin(soft, stream, RELAXED)
    assert code(soft.d.cuCtxSynchronize()) == "STREAM_CAPTURE_UNSUPPORTED"
    assert code(soft.d.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"
    soft.ok(soft.d.cuMemsetD32Async(a, 1, 1, stream))
    soft.ok(soft.d.cuStreamSynchronize(stream))
    soft.free(a)


def test_dependencies_do_not_cross_the_border(soft, stream, other, event) -> None:
    """Events from outside, of another capture and of an ended one are refused by name."""
    soft.ok(soft.d.cuEventRecord(event, other))
    begin(soft, stream)
    result = soft.d.cuStreamWaitEvent(stream, event, 0)
    assert code(result) == "STREAM_CAPTURE_ISOLATION"
    assert code(soft.d.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"
    begin(soft, stream)
    begin(soft, other)
    soft.ok(soft.d.cuEventRecord(event, other))
    assert code(soft.d.cuStreamWaitEvent(stream, event, 0)) == "STREAM_CAPTURE_MERGE"
    for s in (stream, other):
        assert code(soft.d.cuStreamEndCapture(s)) == "STREAM_CAPTURE_INVALIDATED"
    begin(soft, stream)
    soft.ok(soft.d.cuEventRecord(event, stream))
    soft.ok(soft.d.cuGraphDestroy(end(soft, stream)))
    assert code(soft.d.cuStreamWaitEvent(other, event, 0)) == "CAPTURED_EVENT"


def test_capture_ends_where_it_began(soft, stream, other, event) -> None:
    """Only the origin stream ends a capture, and only its thread unless it is relaxed."""
    assert code(soft.d.cuStreamEndCapture(stream)) == "ILLEGAL_STATE"
    begin(soft, stream)
    assert code(soft.d.cuStreamBeginCapture(stream, mode(soft, 0))) == "ILLEGAL_STATE"
    results: list[str] = []

    def elsewhere() -> None:
        soft.ok(soft.d.cuCtxSetCurrent(soft.context))
        results.append(code(soft.d.cuStreamEndCapture(stream)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert results == ["STREAM_CAPTURE_WRONG_THREAD"]
    soft.ok(soft.d.cuGraphDestroy(end(soft, stream)))
    begin(soft, stream, RELAXED)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert results[1] == "SUCCESS" or results[1].endswith("SUCCESS")
    begin(soft, stream)
    soft.ok(soft.d.cuEventRecord(event, stream))
    soft.ok(soft.d.cuStreamWaitEvent(other, event, 0))
    assert code(soft.d.cuStreamEndCapture(other)) == "STREAM_CAPTURE_UNMATCHED"
    assert code(soft.d.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"


def test_unsafe_calls_by_mode(soft, stream) -> None:
    """cuMemAlloc is refused as cuThreadExchangeStreamCaptureMode documents, thread by thread."""

    def allocate() -> str:
        soft.ok(soft.d.cuCtxSetCurrent(soft.context))
        result = soft.d.cuMemAlloc(4)
        if int(result[0]) == 0:
            soft.free(int(result[1]))
        return code(result)

    def there(own: int = GLOBAL) -> str:
        said: list[str] = []

        def body() -> None:
            soft.ok(soft.d.cuThreadExchangeStreamCaptureMode(mode(soft, own)))
            said.append(allocate())

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        return said[0]

    forbidden = "STREAM_CAPTURE_UNSUPPORTED"
    for captured, here, elsewhere in (
        (GLOBAL, forbidden, forbidden),
        (THREAD_LOCAL, forbidden, "CUDA_SUCCESS"),
        (RELAXED, "CUDA_SUCCESS", "CUDA_SUCCESS"),
    ):
        for call, expected in ((allocate, here), (there, elsewhere)):
            begin(soft, stream, captured)
            assert call() == expected, (captured, call)
            result = soft.d.cuStreamEndCapture(stream)
            if expected == forbidden:
                assert code(result) == "STREAM_CAPTURE_INVALIDATED"
            else:
                soft.ok(soft.d.cuGraphDestroy(soft.ok(result)))
    begin(soft, stream)
    assert there(THREAD_LOCAL) == "CUDA_SUCCESS"
    before = soft.ok(soft.d.cuThreadExchangeStreamCaptureMode(mode(soft, RELAXED)))
    assert int(before) == GLOBAL
    assert allocate() == "CUDA_SUCCESS"
    assert int(soft.ok(soft.d.cuThreadExchangeStreamCaptureMode(before))) == RELAXED
    soft.ok(soft.d.cuGraphDestroy(end(soft, stream)))


def test_the_legacy_stream_stays_out(soft) -> None:
    """The legacy stream cannot capture, and cannot be used beside a blocking stream that does."""
    a = soft.alloc(4)
    result = soft.d.cuStreamBeginCapture(soft.d.CUstream(0), mode(soft, 0))
    assert code(result) == "STREAM_CAPTURE_UNSUPPORTED"
    blocking = soft.ok(soft.d.cuStreamCreate(0))
    begin(soft, blocking, RELAXED)
    legacy = soft.d.CUstream(0)
    assert code(soft.d.cuStreamIsCapturing(legacy)) == "STREAM_CAPTURE_IMPLICIT"
    assert code(soft.d.cuMemsetD8Async(a, 0, 4, legacy)) == "STREAM_CAPTURE_IMPLICIT"
    assert code(soft.d.cuStreamEndCapture(blocking)) == "STREAM_CAPTURE_INVALIDATED"
    soft.ok(soft.d.cuStreamDestroy(blocking))
    soft.free(a)


def test_capture_into_a_graph_and_its_info(soft, module, stream) -> None:
    """Nodes go on behind the given ones; the graph can be used only after the end."""
    a = soft.put(np.array([3], np.int32))
    graph = soft.ok(soft.d.cuGraphCreate(0))
    first = soft.add_kernel(graph, [], soft.function(module, "add"), 1, 1, a, np.int32(1))
    soft.ok(soft.d.cuStreamBeginCaptureToGraph(stream, graph, [first], None, 1, mode(soft, GLOBAL)))
    info = soft.ok(soft.d.cuStreamGetCaptureInfo(stream))
    assert int(info[0]) == 1 and int(info[2]) == int(graph)
    assert [int(n) for n in info[3]] == [int(first)]
    soft.launch(soft.function(module, "scale"), 1, 1, a, np.int32(5), stream=stream)
    assert code(soft.d.cuGraphInstantiate(graph, 0)) == "ILLEGAL_STATE"
    assert code(soft.d.cuGraphDestroy(graph)) == "ILLEGAL_STATE"
    assert int(end(soft, stream)) == int(graph)
    assert edges(soft, graph) == 1
    run(soft, graph, stream)
    assert soft.get(a, 1, np.int32)[0] == 20
    soft.free(a)


def test_a_launched_graph_becomes_a_child(soft, module, stream) -> None:
    """cuGraphLaunch on a capturing stream adds a child graph with that executable's parameters."""
    a = soft.put(np.array([1], np.int32))
    inner = soft.ok(soft.d.cuGraphCreate(0))
    soft.add_kernel(inner, [], soft.function(module, "add"), 1, 1, a, np.int32(2))
    executable = soft.ok(soft.d.cuGraphInstantiate(inner, 0))
    begin(soft, stream)
    soft.ok(soft.d.cuGraphLaunch(executable, stream))
    soft.launch(soft.function(module, "scale"), 1, 1, a, np.int32(10), stream=stream)
    graph = end(soft, stream)
    nodes, count = soft.ok(soft.d.cuGraphGetNodes(graph, 2))
    assert count == 2 and soft.ok(soft.d.cuGraphNodeGetType(nodes[0])).value == 4
    soft.ok(soft.d.cuGraphExecDestroy(executable))
    soft.ok(soft.d.cuGraphDestroy(inner))
    run(soft, graph, stream, 2)
    assert soft.get(a, 1, np.int32)[0] == (((1 + 2) * 10) + 2) * 10
    soft.free(a)


def test_dropping_the_stream_drops_its_capture(soft) -> None:
    """A capture whose stream is destroyed leaves no graph behind."""
    live = soft.live()
    stream = soft.stream()
    begin(soft, stream)
    soft.ok(soft.d.cuStreamDestroy(stream))
    assert soft.live() == live
