"""GIL and driver locks: no driver call holds the GIL, and native work does not need it."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from cudagraph_util import Semaphore, replay, run_program, run_python

from graft import native
from graft.cudagraph import Device, Graph, Stream, StreamLane, hostfunc, load_text
from graft.cudagraph.driver import softstats
from graft.native import _native, check_gil

TEXT = 'extern "C" __global__ void one(int* p) { p[0] += 1; }'


@pytest.fixture
def never_switch() -> Iterator[None]:
    """Prevent Python threads from switching while bytecode runs."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def use_everything(device: Device) -> None:
    """Call every driver function that graft uses."""
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


def test_driver_calls_release_gil(device: Device) -> None:
    """No thread holds the GIL during a driver call. The soft device counts violations."""
    if device.kind != "soft":
        pytest.skip("only the soft device counts calls that hold the GIL")
    before = softstats.counters()
    use_everything(device)
    after = softstats.counters()
    assert after["calls"].total() > before["calls"].total() + 50, "calls are counted"
    assert after["gil_held"] == before["gil_held"]


def test_native_host_work_runs_while_gil_is_held(
    device: Device, stream: Stream, never_switch: None
) -> None:
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
@pytest.mark.full("[2]", "[4]")
def test_callbacks_and_driver_calls_do_not_deadlock(model: str) -> None:
    """Host functions, launches and allocations of several threads make progress.

    The test runs with several lock models of the soft device. A lock model is a set of locks that
    the device holds during driver calls and host functions, as real drivers were observed to do.
    """
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


def test_foreign_thread_releases_python_state_at_exit(device: Device) -> None:
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


def test_driver_threads_create_python_state_once(device: Device, stream: Stream) -> None:
    threads: set[int] = set()
    states: list[int] = []
    for _ in range(2):
        for _ in range(300):
            hostfunc(stream, lambda: threads.add(threading.get_ident()))
        stream.synchronize(60)
        states.append(native.live_thread_states())
    assert 1 <= len(threads) <= states[0] == states[1]


def test_import_in_subinterpreter_is_rejected() -> None:
    """The import of graft in a subinterpreter raises an error.

    Driver threads can enter only the main interpreter.
    """
    done = run_python("""
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
child = interpreters.create()
outcome = None
try:
    # Python 3.13 returns the error.
    outcome = interpreters.run_string(child, "import graft.native._native")
except interpreters.RunFailedError as error:
    outcome = error
print(outcome)
""")
    assert "main interpreter" in done.stdout or "subinterpreters" in done.stdout, done


def test_import_without_gil_is_refused() -> None:
    """On a free-threaded interpreter without the GIL, the import error says what to change."""
    check_gil(True)
    with pytest.raises(ImportError, match=r"needs the GIL.*-X gil=0"):
        check_gil(False)
