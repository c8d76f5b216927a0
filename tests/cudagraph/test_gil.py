"""The GIL and the driver: who holds what, when."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from cudagraph_util import Semaphore, replay, run_program, run_python

from graft import native
from graft.cudagraph import (
    Device,
    Graph,
    Stream,
    StreamLane,
    hostfunc,
    load_text,
    softstats,
)
from graft.native import _native

TEXT = 'extern "C" __global__ void one(int* p) { p[0] += 1; }'


@pytest.fixture
def never_switch() -> Iterator[None]:
    """Let Python keep the GIL for as long as it runs bytecode."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def use_everything(device: Device) -> None:
    """Call every driver function that graft has a use for."""
    stream = device.stream("everything")
    lane = StreamLane(stream)
    data = device.from_host(np.zeros(4, np.int32))
    pinned = device.pinned((4,), "int32")
    kernel = load_text(device, TEXT, "one.cu")["one"]
    lane.kernel(kernel, 1, 1, [data])
    lane.copy(pinned, data)
    lane.copy(data, pinned)
    lane.copy(data[1:2], data[0:1])
    lane.fill(data, 1)
    lane.host(lambda: None)
    other = device.stream()
    StreamLane(other).wait(lane.record())
    stream.synchronize(60)
    stream.query()
    device.synchronize(60)
    for first in (True, False):
        graph = Graph(device, "everything")
        one = graph.lane("one")
        two = graph.lane("two")
        one.kernel(kernel, 1, 1, [data])
        one.copy(pinned, data)
        one.fill(data, 0)
        two.wait(one.record())
        two.host(lambda: None)
        if first:
            executable = graph.instantiate()
            executable.upload(stream)
        else:
            executable.update(graph)
        replay(executable, stream)
        executable.query()
    executable.close()
    graph.close()
    data.to_host()
    data.copy_from(np.zeros(4, np.int32))
    data.close()
    pinned.close()
    stream.close()
    other.close()
    assert _native.flush(10)


def test_no_driver_call_holds_the_gil(device: Device) -> None:
    """The soft device looks at every entry whether the caller holds the GIL: never in graft."""
    if device.kind != "soft":
        pytest.skip("only the soft device records who holds the GIL")
    before = softstats.counters()
    use_everything(device)
    after = softstats.counters()
    assert after["calls"].total() > before["calls"].total() + 50, "the counter counts"
    assert after["gil_held"] == before["gil_held"]


def test_native_work_runs_while_python_keeps_the_gil(
    device: Device, stream: Stream, never_switch: None
) -> None:
    """A native step finishes though the launching thread never lets go of the GIL."""
    semaphore = Semaphore()
    graph = Graph(device, "native")
    graph.lane("main").host(semaphore.work())
    executable = graph.instantiate()
    executable.launch(stream)
    for _ in range(500):
        if semaphore.value:
            break
        semaphore.libc.usleep(10_000)
    assert semaphore.value == 1
    executable.synchronize(60)


@pytest.mark.parametrize("model", ["1", "2", "4", "7"])
def test_no_deadlock_under_any_lock_model(model: str) -> None:
    """With locks that drivers were seen to hold, Python callbacks and driver calls get through."""
    done = run_program(
        """
other = device.stream()
done = []
def step(): done.append(sum(range(2000)))
graph = Graph(device)
for _ in range(6): graph.lane("main").host(step)
executable = graph.instantiate()
stop = threading.Event()
def allocate():
    while not stop.is_set():
        device.zeros((8,), "int32").close()
thread = threading.Thread(target=allocate)
thread.start()
for _ in range(15):
    executable.launch(stream)
    hostfunc(stream, step)
    hostfunc(other, step)
    device.zeros((4,), "int32").to_host()
    executable.synchronize(60)
stream.synchronize(60)
other.synchronize(60)
stop.set()
thread.join()
print(len(done))
""",
        GRAFT_DEVICE="soft",
        SOFTCUDA_LOCK_MODEL=model,
        SOFTCUDA_WATCHDOG="20",
    )
    assert done.stdout.strip() == str(15 * 8), done.stderr


def test_a_foreign_thread_gives_its_state_back(device: Device) -> None:
    """A thread that ran a Python step and ends leaves no thread state behind."""
    seen: list[int] = []
    graph = Graph(device, "foreign thread")
    work = (lambda: seen.append(threading.get_ident()), (), 0, 0)
    attached = _native.attach_host(graph.handle, graph.state, "step", work, None, None)
    function, data = attached[3:]
    before = native.live_thread_states()
    libc = ctypes.CDLL(None)
    libc.pthread_create.argtypes = (ctypes.c_void_p,) * 4
    libc.pthread_join.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    for _ in range(3):
        thread = ctypes.c_void_p()
        assert libc.pthread_create(ctypes.byref(thread), None, function, data) == 0
        libc.pthread_join(thread, None)
    assert len(seen) == 3 and native.live_thread_states() == before


def test_threads_keep_their_python_state(device: Device, stream: Stream) -> None:
    """Callbacks run on few threads, each of which makes its Python state once."""
    threads: set[int] = set()
    states: list[int] = []
    for _ in range(2):
        for _ in range(300):
            hostfunc(stream, lambda: threads.add(threading.get_ident()))
        stream.synchronize(60)
        states.append(native.live_thread_states())
    assert 1 <= len(threads) <= states[0] == states[1]


def test_a_sub_interpreter_is_refused_by_name() -> None:
    """Threads of the driver enter the main interpreter only, so graft is imported nowhere else."""
    done = run_python("""
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
child = interpreters.create()
said = None
try:
    said = interpreters.run_string(child, "import graft.native._native")  # 3.13 returns the error
except interpreters.RunFailedError as error:
    said = error
print(said)
""")
    assert "main interpreter" in done.stdout or "subinterpreters" in done.stdout, done
