"""Calls with invalid arguments: the error names the argument or the object, and adds no node."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from graft.cudagraph import (
    Device,
    DeviceArray,
    DeviceError,
    Graph,
    GraphLane,
    KernelError,
    KernelModule,
    MailboxWorker,
    NativeWork,
    OptionError,
    PinnedSlots,
    PythonWork,
    Ring,
    ShapeError,
    Stream,
    StreamLane,
    condition,
    hostfunc,
    if_,
    load_text,
    open_device,
    while_,
)

TEXT = """
extern "C" __global__ void scale(float* x, float by) { x[threadIdx.x] *= by; }
"""
TOO_LARGE = ctypes.c_int32 * 3
BROKEN = 'extern "C" __global__ void f(int* p) { p[0] = undeclared; }'


@dataclass
class Objects:
    """Objects that the calls use."""

    device: Device
    stream: Stream
    graph: Graph
    lane: GraphLane
    stream_lane: StreamLane
    module: KernelModule
    array: DeviceArray  # int32 [4, 2]
    small: DeviceArray  # int32 [2]
    closed: DeviceArray  # float32 [4], closed


@pytest.fixture
def objects(device: Device, stream: Stream, module: KernelModule) -> Objects:
    graph = Graph(device, "invalid")
    closed = device.zeros((4,), "float32")
    closed.close()
    return Objects(
        device=device,
        stream=stream,
        graph=graph,
        lane=graph.lane("main"),
        stream_lane=StreamLane(stream),
        module=module,
        array=device.zeros((4, 2), "int32"),
        small=device.zeros((2,), "int32"),
        closed=closed,
    )


async def coroutine() -> None:
    pass


def generator():
    yield


async def asynchronous_generator():
    yield


class AsynchronousCallable:
    async def __call__(self) -> None:
        pass


def open_other_kind(objects: Objects) -> None:
    open_device("cuda" if objects.device.kind == "soft" else "soft")


def synchronize_closed_stream(objects: Objects) -> None:
    stream = objects.device.stream("gone")
    stream.close()
    stream.synchronize()


def wait_for_stream_mark(objects: Objects) -> None:
    objects.lane.wait(objects.stream_lane.record())


def wait_for_mark_of_other_graph(objects: Objects) -> None:
    objects.lane.wait(Graph(objects.device, "other").lane("x").record("elsewhere"))


def copy_to_larger(lane: str, objects: Objects) -> None:
    getattr(objects, lane).copy(objects.array, objects.small)


def copy_from_object(lane: str, objects: Objects) -> None:
    getattr(objects, lane).copy(objects.small, object())


def copy_on_host(lane: str, objects: Objects) -> None:
    pinned = objects.device.pinned((2,), "int32")
    getattr(objects, lane).copy(pinned, pinned)


def fill_with_negative(lane: str, objects: Objects) -> None:
    getattr(objects, lane).fill(objects.small, -1)


def too_large(allocate: str, objects: Objects) -> None:
    getattr(objects.device, allocate)((1 << 40, 1 << 40), "int32")


def mailbox(options: dict[str, object], objects: Objects) -> None:
    objects.lane.mailbox(lambda: None, **options)


def spinkernel(options: dict[str, object], objects: Objects) -> None:
    objects.lane.spinkernel(lambda: None, **options)


def ctypes_row(slot: object, layout: object, objects: Objects) -> None:
    PinnedSlots(objects.device, 2, {"pair": ("int32", (2,))})["pair"].ctypes(slot, layout)


def ctypes_row_of_closed_slots(objects: Objects) -> None:
    slots = PinnedSlots(objects.device, 2, {"pair": ("int32", (2,))})
    field = slots["pair"]
    slots.close()
    field.ctypes(0)


def launch(grid: object, block: object, objects: Objects) -> None:
    objects.stream_lane.kernel(objects.module["scale"], grid, block, [None, 1.0])


def python_work(function: object, objects: Objects) -> None:
    PythonWork(function)  # type: ignore[arg-type]


def enqueue(stream: object, objects: Objects) -> None:
    hostfunc(stream, print)  # type: ignore[arg-type]


def worker(options: dict[str, object], objects: Objects) -> None:
    MailboxWorker(**options)


bind = functools.partial
Case = tuple[str, type[Exception], str, Callable[[Objects], object]]
CASES: list[Case] = [
    # id, error, words in the message, call
    ("device-kind", OptionError, "'tpu'", lambda o: open_device("tpu")),
    ("device-other-kind", OptionError, "cuda|soft", open_other_kind),
    ("device-ordinal", OptionError, "7", lambda o: open_device(o.device.kind, 7)),
    ("stream-closed", OptionError, "gone", synchronize_closed_stream),
    # arrays
    ("zeros-size", ShapeError, f"of int32 has {1 << 82} bytes", bind(too_large, "zeros")),
    ("empty-size", ShapeError, f"of int32 has {1 << 82} bytes", bind(too_large, "empty")),
    ("pinned-size", ShapeError, f"of int32 has {1 << 82} bytes", bind(too_large, "pinned")),
    ("zeros-dtype", ShapeError, "'complex128'", lambda o: o.device.zeros((1,), "complex128")),
    ("zeros-shape", ShapeError, "dimension 1", lambda o: o.device.zeros((4, 0), "int32")),
    (
        "from_host-dtype",
        ShapeError,
        "complex128",
        lambda o: o.device.from_host(np.zeros(3, complex)),
    ),
    (
        "copy_from-shape",
        ShapeError,
        r"\(3, 2\)",
        lambda o: o.array.copy_from(np.zeros((3, 2), np.int32)),
    ),
    (
        "copy_from-dtype",
        ShapeError,
        "int64",
        lambda o: o.array.copy_from(np.zeros((4, 2), np.int64)),
    ),
    ("reshape", ShapeError, "5", lambda o: o.array.reshape(5, -1)),
    ("index", ShapeError, "4", lambda o: o.array[4]),
    ("slice-empty", ShapeError, "empty", lambda o: o.array[2:2]),
    ("slice-step", ShapeError, "step", lambda o: o.array[::2]),
    ("index-two-axes", ShapeError, "leading axis", lambda o: o.array[0, 0]),  # type: ignore[index]
    ("array-fill", ShapeError, "256", lambda o: o.array.fill(256)),
    ("slots-count", OptionError, "slots", lambda o: PinnedSlots(o.device, 0, {})),
    (
        "slots-shape",
        ShapeError,
        "'bad'",
        lambda o: PinnedSlots(o.device, 1, {"bad": ("int32", (0,))}),
    ),
    (
        "slots-name",
        OptionError,
        "'masks'",
        lambda o: PinnedSlots(o.device, 1, {"mask": ("int32", ())})["masks"],
    ),
    ("slots-closed", DeviceError, "closed", ctypes_row_of_closed_slots),
    ("slots-slot", OptionError, "slot must be 0 to 1, not 2", bind(ctypes_row, 2, None)),
    ("slots-slot-negative", OptionError, "slot must be 0 to 1, not -1", bind(ctypes_row, -1, None)),
    ("slots-slot-type", OptionError, "slot must be 0 to 1, not 'x'", bind(ctypes_row, "x", None)),
    ("slots-layout", OptionError, "a ctypes type or a NumPy dtype", bind(ctypes_row, 0, int)),
    ("slots-layout-size", ShapeError, "12 bytes, but a row has 8", bind(ctypes_row, 0, TOO_LARGE)),
    ("ring-name", OptionError, "stamp", lambda o: Ring(o.device, 2, {"stamp": ("int32", (1,))})),
    # lanes
    ("graph-copy-size", ShapeError, "32 bytes", bind(copy_to_larger, "lane")),
    ("graph-copy-type", ShapeError, "not object", bind(copy_from_object, "lane")),
    ("graph-copy-host", ShapeError, "host step", bind(copy_on_host, "lane")),
    ("graph-fill", ShapeError, "-1", bind(fill_with_negative, "lane")),
    ("stream-copy-size", ShapeError, "32 bytes", bind(copy_to_larger, "stream_lane")),
    ("stream-copy-type", ShapeError, "not object", bind(copy_from_object, "stream_lane")),
    ("stream-copy-host", ShapeError, "host step", bind(copy_on_host, "stream_lane")),
    ("stream-fill", ShapeError, "-1", bind(fill_with_negative, "stream_lane")),
    ("graph-mark", OptionError, "'elsewhere'", wait_for_mark_of_other_graph),
    ("graph-stream-mark", OptionError, "mark on", wait_for_stream_mark),
    (
        "stream-graph-mark",
        OptionError,
        "here",
        lambda o: o.stream_lane.wait(o.lane.record("here")),  # type: ignore[arg-type]
    ),
    ("condition-default", OptionError, "default", lambda o: condition(o.graph, -1)),
    (
        "while-condition",
        OptionError,
        r"made by condition\(\)",
        lambda o: while_(o.lane, 1),  # type: ignore[arg-type]
    ),
    ("event-type", OptionError, "an Event, not int", lambda o: o.lane.record_event(3)),  # type: ignore[arg-type]
    # kernels
    ("grid-zero", KernelError, "scale", bind(launch, 0, 1)),
    ("block-zero", KernelError, "scale", bind(launch, 1, 0)),
    ("block-size", KernelError, "scale", bind(launch, 1, (1024, 2, 1))),
    ("grid-y", KernelError, r"\(1, 65536, 1\) is too large", bind(launch, (1, 65536, 1), 1)),
    ("grid-z", KernelError, r"\(1, 1, 65536\) is too large", bind(launch, (1, 1, 65536), 1)),
    ("block-z", KernelError, r"\(1, 1, 65\) is too large", bind(launch, 1, (1, 1, 65))),
    ("grid-pair", KernelError, "scale", bind(launch, (1, 2), 1)),
    ("grid-float", KernelError, "scale", bind(launch, 1.5, 1)),
    ("kernel-name", KernelError, "'nothing'", lambda o: o.module["nothing"]),
    ("kernel-file", KernelError, r"absent\.cu", lambda o: o.device.load("absent.cu")),
    ("kernel-source", KernelError, r"bad\.cu", lambda o: load_text(o.device, BROKEN, "bad.cu")),
    ("pack-closed", DeviceError, "closed", lambda o: o.module["scale"].pack([o.closed, 1.0])),
    # host work
    (
        "hostfunc-arguments",
        OptionError,
        "already has its arguments",
        lambda o: hostfunc(o.stream, PythonWork(print), 1),
    ),
    (
        "hostfunc-callable",
        OptionError,
        "callable",
        lambda o: hostfunc(o.stream, 7),  # type: ignore[arg-type]
    ),
    ("hostfunc-stream-negative", OptionError, "handle as an int, not -1", bind(enqueue, -1)),
    (
        "hostfunc-stream-large",
        OptionError,
        f"handle as an int, not {1 << 64}",
        bind(enqueue, 1 << 64),
    ),
    ("hostfunc-stream-text", OptionError, "handle as an int, not 'x'", bind(enqueue, "x")),
    ("hostfunc-stream-none", OptionError, "handle as an int, not None", bind(enqueue, None)),
    ("native-null", OptionError, "NULL", lambda o: NativeWork(0)),
    ("native-data", OptionError, "data", lambda o: NativeWork(1, data="x")),  # type: ignore[arg-type]
    ("coroutine", OptionError, "would never run", bind(python_work, bind(coroutine))),
    ("generator", OptionError, "would never run", bind(python_work, generator)),
    ("async-generator", OptionError, "would never run", bind(python_work, asynchronous_generator)),
    ("async-callable", OptionError, "would never run", bind(python_work, AsynchronousCallable())),
    # timeouts
    ("stream-timeout", OptionError, "not 'x'", lambda o: o.stream.synchronize("x")),
    ("stream-timeout-nan", OptionError, "not nan", lambda o: o.stream.synchronize(float("nan"))),
    ("stream-timeout-bool", OptionError, "not True", lambda o: o.stream.synchronize(True)),
    ("event-timeout", OptionError, "not -1", lambda o: o.device.event().synchronize(-1)),
    ("exec-timeout", OptionError, "not '1'", lambda o: o.graph.instantiate().synchronize("1")),
    ("exec-timeout-large", OptionError, "not 10", lambda o: o.graph.instantiate().wait(10**400)),
    # mailboxes
    ("deadline-zero", OptionError, "deadline_s", bind(mailbox, {"deadline_s": 0.0})),
    ("deadline-inf", OptionError, "deadline_s", bind(mailbox, {"deadline_s": float("inf")})),
    ("mailbox-worker", OptionError, "worker", bind(mailbox, {"worker": "me"})),
    ("replay-deadline", OptionError, "deadline", bind(mailbox, {"replay_deadline_s": -1.0})),
    ("mailbox-output", OptionError, "output", bind(mailbox, {"output": np.zeros(3)})),
    (
        "device-deadline-zero",
        OptionError,
        r"device_deadline_s must be .* not 0\.0",
        bind(spinkernel, {"device_deadline_s": 0.0}),
    ),
    ("device-deadline-text", OptionError, "'x'", bind(spinkernel, {"device_deadline_s": "x"})),
    ("spin-deadline-text", OptionError, "not 'x'", bind(spinkernel, {"deadline_s": "x"})),
    (
        "deadline-text",
        OptionError,
        "deadline_s must .* not 'x'",
        bind(mailbox, {"deadline_s": "x"}),
    ),
    ("deadline-bool", OptionError, "deadline_s must .* True", bind(mailbox, {"deadline_s": True})),
    ("deadline-large", OptionError, "deadline_s must", bind(mailbox, {"deadline_s": 10**400})),
    ("replay-deadline-text", OptionError, "'y'", bind(mailbox, {"replay_deadline_s": "y"})),
    ("worker-core", OptionError, "cpus|core", bind(worker, {"cpus": [10**6]})),
    ("worker-no-core", OptionError, "cpus|core", bind(worker, {"cpus": []})),
    ("worker-wait", OptionError, "hover", bind(worker, {"wait": "hover"})),
]


@pytest.mark.parametrize(
    ("error", "words", "attempt"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_invalid_argument_raises(
    objects: Objects, error: type[Exception], words: str, attempt: Callable[[Objects], object]
) -> None:
    with pytest.raises(error, match=words):
        attempt(objects)
    assert objects.graph.nodes == []


def test_objects_of_another_kind_are_named(device: Device) -> None:
    graph = Graph(device, "kinds")
    lane = graph.lane("main")
    stream = device.stream()
    with pytest.raises(OptionError, match=r"see open_device\(\), not 'name'"):
        Graph("name")  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="needs a kernel of a KernelModule, not 'add'"):
        StreamLane(stream).kernel("add", 1, 1, [])  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="needs a kernel of a KernelModule, not 'add'"):
        lane.kernel("add", 1, 1, [])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="needs a graph or the body of one, not <GraphLane"):
        condition(lane, 1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"must be 0 to 2\*\*32 - 1: 'on'"):
        condition(graph, "on")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="if 'if' needs a lane of a graph, not <"):
        if_(StreamLane(stream), condition(graph, 1))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="a positive integer or a tuple of them, not None"):
        device.zeros(None, "int32")  # type: ignore[arg-type]


def test_set_payload_refuses_other_objects(device: Device) -> None:
    graph = Graph(device, "payload")
    graph.lane("main").host(lambda value: None, payload=graph.payload(1))
    run = graph.instantiate()
    with pytest.raises(OptionError, match="needs the Payload of a graph, not 'p'"):
        run.set_payload("p", 1)  # type: ignore[arg-type]
