"""What a graph can still run stays alive; what nobody can run is freed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import lifetime_util
import numpy as np
import pytest

from graft import native
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.graph import Graph, GraphExec
from graft.cudagraph.hostwork import NativeWork, PythonWork, hostfunc
from graft.cudagraph.kernels import load_text
from graft.native import _native

LIMIT_S = 5.0
TEXT = """
extern "C" __global__ void add(int* out, const int* in, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] += in[i];
}
"""


class Tracked:
    """A callable that can be watched."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """Start each test with nothing left to free."""
    lifetime_util.settled()
    yield


def wait_until(reached: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait until something is so; a driver may run destructors late, on a thread of its own."""
    end = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < end, (
            f"after {limit_s} s: {native.live_records()} records live, "
            f"{native.released_records()} released, {native.live_resources()} handles"
        )
        time.sleep(0.005)


def wait_for_release(count: int) -> None:
    """Wait until `count` records were released."""
    wait_until(lambda: native.released_records() >= count)


def resident_kib() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def test_a_dropped_graph_frees_its_records(device: Device, stream: Stream) -> None:
    """Five seconds after graph and executable are gone, so are records and callables."""
    live, released = native.live_records(), native.released_records()
    fn = Tracked()
    data, pinned = device.zeros((4,), "int32"), device.pinned((4,), "int32")
    graph = Graph(device, "dropped")
    lane = graph.lane("main")
    lane.host(fn)
    lane.copy(pinned, data)
    lane.host(fn)
    executable = graph.instantiate()
    for _ in range(3):
        executable.launch(stream)
    executable.synchronize(60)
    assert fn.calls == 6 and native.live_records() == live + 3
    watch = weakref.ref(fn)
    del fn, graph, lane
    gc.collect()
    executable.launch(stream)
    executable.synchronize(60)
    assert watch() is not None and native.live_records() == live + 3
    del executable
    wait_for_release(released + 3)
    assert watch() is None and native.live_records() == live


def test_operands_live_as_long_as_the_executable(device: Device, stream: Stream) -> None:
    """Arrays, pinned memory and kernels that a graph uses outlive every Python name of theirs."""
    kernel = load_text(device, TEXT, "operands.cu")["add"]
    source = device.from_host(np.arange(32, dtype=np.int32))
    target, out = device.zeros((32,), "int32"), device.pinned((32,), "int32")
    result = out.array
    graph = Graph(device, "operands")
    lane = graph.lane("main")
    lane.kernel(kernel, 1, 32, [target, source, 32])
    lane.copy(out, target)
    executable = graph.instantiate()
    source.close()
    del graph, lane, source, target, out, kernel
    gc.collect()
    _native.flush(LIMIT_S)
    fillers = [device.zeros((32,), "int32") for _ in range(50)]
    for _ in range(3):
        executable.launch(stream)
    executable.synchronize(60)
    assert result.tolist() == [3 * i for i in range(32)]
    assert not any(f.to_host().any() for f in fillers)


def test_native_work_keeps_its_owner(device: Device, stream: Stream) -> None:
    """NativeWork.keep lives until the graph that uses it is gone."""
    import ctypes

    released = native.released_records()
    post = ctypes.cast(ctypes.CDLL(None).sem_post, ctypes.c_void_p).value or 0
    semaphore = ctypes.create_string_buffer(64)
    owner = Tracked()
    owner.buffer = semaphore  # type: ignore[attr-defined]
    graph = Graph(device, "native owner")
    graph.lane("main").host(NativeWork(post, ctypes.addressof(semaphore), keep=owner, name="post"))
    executable = graph.instantiate()
    watch = weakref.ref(owner)
    del owner, graph
    gc.collect()
    for _ in range(5):
        executable.launch(stream)
    executable.synchronize(60)
    assert watch() is not None
    value = ctypes.c_int()
    ctypes.CDLL(None).sem_getvalue(semaphore, ctypes.byref(value))
    assert value.value == 5
    executable.close()
    wait_for_release(released + 1)
    assert watch() is None


def test_launches_in_flight_keep_what_they_use(device: Device) -> None:
    """Graph and executable may be dropped while a replay runs; it ends undisturbed."""
    released = native.released_records()
    stream = device.stream()
    entered, gate, done = threading.Event(), threading.Event(), threading.Event()
    array = np.zeros(4, np.int32)

    def step() -> None:
        entered.set()
        gate.wait(30)
        array[:] = 7
        done.set()

    graph = Graph(device, "in flight")
    graph.lane("main").host(step)
    executable = graph.instantiate()
    executable.launch(stream)
    assert entered.wait(30)
    del executable, graph, step
    gc.collect()
    gate.set()
    stream.synchronize(60)
    assert done.is_set() and array.tolist() == [7] * 4
    wait_for_release(released + 1)
    stream.close()


def test_a_failed_node_leaves_no_record(device: Device) -> None:
    """When the driver refuses a node, what was attached for it is released again."""
    live = native.live_records()
    graph = Graph(device, "refused")
    watch: list[weakref.ref[Tracked]] = []

    def refuse(*_: object) -> object:
        raise RuntimeError("no node")

    def attach(handle: int) -> tuple:
        owner = Tracked()
        watch.append(weakref.ref(owner))
        return _native.attach_keep(handle, owner)

    with pytest.raises(RuntimeError, match="no node"):
        graph.add("kernel", "refused", graph.lane("main").name, attach, refuse)
    wait_until(lambda: native.live_records() == live)
    assert watch[0]() is None and not graph.nodes


def test_updates_release_the_old_definition(device: Device, stream: Stream) -> None:
    """Two hundred updates leave one definition's record."""
    executable: GraphExec | None = None
    counts: list[int] = []
    live = native.live_records()
    for i in range(200):
        graph = Graph(device, f"version {i}")
        graph.lane("main").host(PythonWork(counts.append, i))
        if executable is None:
            executable = graph.instantiate()
        else:
            executable.update(graph)
        executable.launch(stream)
        del graph
    assert executable is not None
    executable.synchronize(60)
    assert counts == list(range(200))
    wait_until(lambda: native.live_records() == live + 1)
    executable.close()
    wait_until(lambda: native.live_records() == live)


def test_eager_records_free_themselves(stream: Stream) -> None:
    """An eager record and its callable are gone after the one run."""
    live = native.live_records()
    fn = Tracked()
    watch = weakref.ref(fn)
    for _ in range(50):
        hostfunc(stream, fn)
    stream.synchronize(60)
    assert fn.calls == 50
    del fn
    wait_until(lambda: native.live_records() == live)
    assert watch() is None and _native.pending_eager() == 0


def test_closing_breaks_a_cycle_through_the_driver(device: Device) -> None:
    """A callable that refers to its own executable is freed once the executable is closed."""
    holder = Tracked()
    graph = Graph(device, "cycle")
    graph.lane("main").host(holder)
    holder.executable = graph.instantiate()  # type: ignore[attr-defined]
    watch = weakref.ref(holder)
    graph.close()
    holder.executable.close()  # type: ignore[attr-defined]
    del holder, graph
    gc.collect()
    wait_until(lambda: watch() is None)


def test_garbage_collection_in_a_callback_calls_no_driver(device: Device, stream: Stream) -> None:
    """Arrays, streams and graphs that die inside a host function are freed elsewhere, later."""
    failed, resources = native.failed_frees(), native.live_resources()

    def make_garbage() -> None:
        graph = Graph(device, "garbage")
        graph.lane("main").host(lambda: None)
        ring: list[object] = [device.zeros((4,), "int32"), device.pinned((4,), "int32"),
                              device.stream(), graph, graph.instantiate()]  # fmt: skip
        ring.append(ring)

    collected: list[int] = []
    gc.disable()
    try:
        make_garbage()
        hostfunc(stream, lambda: collected.append(gc.collect()))
        stream.synchronize(60)
    finally:
        gc.enable()
    assert collected and collected[0] > 0
    wait_until(lambda: native.live_resources() <= resources)
    assert native.failed_frees() == failed


def test_many_graphs_come_and_go(device: Device, stream: Stream) -> None:
    """Building, replaying and dropping graphs leaves no record and no memory behind."""

    def build() -> None:
        graph = Graph(device, "short-lived")
        lane = graph.lane("main")
        data = device.zeros((64,), "int32")
        for _ in range(4):
            lane.fill(data, 1)
            lane.host(Tracked())
        executable = graph.instantiate()
        executable.launch(stream)

    check_flat(build, 150)


def check_flat(make: Callable[[], None], times: int) -> None:
    """Records and handles are as many after `times` calls as before, once all is freed."""
    records, resources = native.live_records(), native.live_resources()
    for _ in range(times):
        make()
    wait_until(lambda: (native.live_records(), native.live_resources()) == (records, resources), 60)
    assert native.leaked_items() == 0


def test_a_fault_releases_eager_work_that_cannot_run() -> None:
    """After a device fault, host work that never ran is given up once and its callable freed."""
    code = """
import gc, weakref
from graft import native
from graft.cudagraph.device import open_device
from graft.cudagraph.errors import DeviceError
from graft.cudagraph.hostwork import hostfunc
from graft.cudagraph.kernels import load_text
from graft.cudagraph.lanes import StreamLane
from graft.native import _native
device = open_device("soft")
stream = device.stream()
text = '''extern "C" __global__ void wild(int* p) {
  for (int i = 0; i < 1 << 20; ++i) p[i] = 1;
}'''
data = device.zeros((4,), "int32")
StreamLane(stream).kernel(load_text(device, text, "wild.cu")["wild"], 1, 1, [data])
class Fn:
    def __call__(self): print("ran")
fn = Fn()
watch = weakref.ref(fn)
try:
    hostfunc(stream, fn)
    stream.synchronize(30)
except DeviceError as error:
    print(error.code_name, "wild" in str(error))
del fn
gc.collect()
_native.flush(5)
print(watch() is None, _native.pending_eager())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("CUDA_ERROR_") and lines[0].endswith("True"), done.stderr
    assert lines[1] == "True 0", done.stdout + done.stderr
