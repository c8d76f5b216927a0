"""Host work on streams and in graphs: execution, errors and skipped steps."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
from cudagraph_util import assert_raises, compile_library, mailbox_graph, replay, run_program

from graft.cudagraph import Device, Graph, GraphExec, Stream
from graft.cudagraph.driver.driver import cu
from graft.cudagraph.errors import DeviceError, HostWorkError, OptionError
from graft.cudagraph.graph.mailbox import MailboxWorker
from graft.cudagraph.host import hostwork
from graft.cudagraph.host.hostwork import NativeWork, PythonWork, hostfunc
from graft.native import _native

SOURCE = """
#include <stdexcept>
using Fail = void (*)(const char*);
using Replay = long long (*)();
using Output = int* (*)();
struct Api { Fail fail; Replay replay; Output output; long long seen[64]; int count; };
extern "C" void throws(void*) { throw std::runtime_error("native trouble"); }
extern "C" void throws_int(void*) { throw 42; }
extern "C" void fails(void* data) { static_cast<Api*>(data)->fail("native failure"); }
extern "C" void numbers(void* data) {
  auto* api = static_cast<Api*>(data);
  api->seen[api->count++ % 64] = api->replay();
}
extern "C" void answer(void* data) {
  auto* api = static_cast<Api*>(data);
  ++api->count;
  for (int i = 0; i < 4; ++i) api->output()[i] = 10 * i + api->count;
}
"""


class Api(ctypes.Structure):
    """Argument of the C functions in SOURCE (``struct Api``)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("fail", "replay", "output")),
        ("seen", ctypes.c_longlong * 64),
        ("count", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def native_functions(tmp_path_factory) -> ctypes.CDLL:
    """Library with the C functions in SOURCE, which run as native work."""
    return ctypes.CDLL(str(compile_library(SOURCE, tmp_path_factory.mktemp("native"))))


def work(functions: ctypes.CDLL, name: str, data: ctypes._SimpleCData | Api) -> NativeWork:
    """Return native work that calls one of the C functions with the address of `data`."""
    address = ctypes.cast(getattr(functions, name), ctypes.c_void_p).value or 0
    return NativeWork(address, ctypes.addressof(data), keep=(functions, data), name=name)


def api() -> Api:
    """Return a new argument for the C functions.

    It contains the addresses of graft's functions for native work, such as fail_current().
    """
    offered = _native.native_api()
    return Api(
        fail=offered["fail_current"],
        replay=offered["current_replay"],
        output=offered["current_output"],
    )


def one_step(device: Device, item, name: str | None = None) -> GraphExec:
    """Return the executable of a graph with one host step."""
    graph = Graph(device, "one step")
    graph.lane("main").host(item, name=name)
    return graph.instantiate()


@pytest.mark.parametrize("error", [ValueError("bad row"), KeyboardInterrupt(), SystemExit(3)])
def test_python_host_work_exception_skips_later_steps(
    device: Device, stream: Stream, error: BaseException
) -> None:
    """The error of a host step names node and replay; later steps are skipped until clear()."""
    ran: list[str] = []
    failing = [False]

    def first() -> None:
        if failing[0]:
            raise error
        ran.append("first")

    graph = Graph(device, "fragile")
    lane = graph.lane("main")
    lane.host(first, name="first step")
    lane.host(lambda: ran.append("second"))
    executable = replay(graph, stream)
    assert ran == ["first", "second"] and graph.status.array[0] == 0

    failing[0] = True
    with pytest.raises(HostWorkError, match="'first step'") as caught:
        replay(executable, stream)
    assert caught.value.__cause__ is error
    assert (caught.value.node, caught.value.replay) == ("first step", 2)
    assert graph.status.array[:2].tolist() == [1, 2]
    assert ran == ["first", "second"]
    for again in (lambda: executable.launch(stream), executable.check):
        with pytest.raises(HostWorkError, match="replay 2"):
            again()
    assert executable.launches == 2

    failing[0] = False
    executable.clear(60)
    assert graph.status.array[:2].tolist() == [0, 0]
    replay(executable, stream)
    assert ran == ["first", "second"] * 2


@pytest.mark.overlap
def test_host_work_failure_skips_replays_in_flight(device: Device, stream: Stream) -> None:
    gate = threading.Event()
    ran: list[int] = []

    def step() -> None:
        gate.wait(30)
        ran.append(1)
        raise RuntimeError("first replay")

    executable = one_step(device, step)
    for _ in range(4):
        executable.launch(stream)
    gate.set()
    with pytest.raises(HostWorkError, match="replay 1:"):
        executable.synchronize(60)
    assert ran == [1] and executable.launches == 4
    executable.clear(60)
    with pytest.raises(HostWorkError, match="replay 5:"):
        replay(executable, stream)
    assert ran == [1, 1]


@pytest.mark.parametrize(
    ("function", "words"),
    [("throws", "native trouble"), ("throws_int", "unknown"), ("fails", "native failure")],
)
def test_native_host_work_failure_raises_at_synchronize(
    device: Device, stream: Stream, native_functions, function: str, words: str
) -> None:
    """A C++ exception does not enter the driver. Native work can mark its replay as failed."""
    graph = Graph(device, "native trouble")
    graph.lane("main").host(work(native_functions, function, api()))
    ran: list[int] = []
    graph.lane("main").host(PythonWork(ran.append, 1))
    with pytest.raises(HostWorkError, match=words) as caught:
        replay(graph, stream)
    assert (caught.value.node, caught.value.replay) == (function, 1)
    assert graph.status.array[0] == 2 and not ran


def test_native_work_current_replay_counts_launches(
    device: Device, stream: Stream, native_functions
) -> None:
    """Native work reads its replay number, also after an update; in eager work it is 0."""
    data = api()
    item = work(native_functions, "numbers", data)
    executable = replay(one_step(device, item), stream, 3)
    other = Graph(device, "other")
    other.lane("main").host(item)
    executable.update(other)
    assert executable.status is other.status
    replay(executable, stream)
    hostfunc(stream, item)
    stream.synchronize(60)
    assert list(data.seen[: data.count]) == [1, 2, 3, 4, 0]


def test_native_work_current_output_is_published(
    device: Device, stream: Stream, native_functions
) -> None:
    item = work(native_functions, "answer", api())
    run, result = mailbox_graph(device, "mailbox", item, worker=MailboxWorker())
    for i in range(1, 101):
        replay(run, stream)
        assert result.to_host().tolist() == [i, 10 + i, 20 + i, 30 + i]


def test_eager_host_work_failures_are_raised_once_each(device: Device) -> None:
    stream = device.stream()

    def broken(text: str) -> None:
        raise LookupError(text)

    hostfunc(stream, broken, "one")
    with pytest.raises(HostWorkError, match="LookupError: one") as caught:
        stream.synchronize(60)
    assert caught.value.replay == 0 and "broken" in caught.value.node
    assert isinstance(caught.value.__cause__, LookupError)
    stream.synchronize(60)
    hostfunc(stream, broken, "two")
    device.synchronize(60)
    with pytest.raises(HostWorkError, match="two"):
        hostfunc(stream, print)
    hostfunc(stream, broken, "three")
    device.synchronize(60)
    with pytest.raises(HostWorkError, match="three"):
        stream.close()


def test_host_work_rejects_driver_calls(device: Device, stream: Stream) -> None:

    def calls_driver() -> None:
        for attempt in (
            lambda: device.zeros((1,), "int32"),
            lambda: hostfunc(stream, print),
            stream.synchronize,
            stream.query,
        ):
            assert_raises(DeviceError, {"host function": attempt})
            caught.append(attempt)

    caught: list[object] = []
    hostfunc(stream, calls_driver)
    stream.synchronize(60)
    assert len(caught) == 4


def test_exit_does_not_wait_for_hanging_host_work() -> None:
    done = run_program("""
import graft.cudagraph.device
graft.cudagraph.device.EXIT_LIMIT_S = 0.2
started = threading.Event()
def stuck():
    started.set()
    while True:
        time.sleep(0.05)
hostfunc(stream, stuck)
started.wait(30)
print("leaving", flush=True)
""")
    assert done.stdout.strip() == "leaving", done.stderr
    assert done.returncode == 0, done.stderr


def test_python_host_work_is_skipped_during_interpreter_shutdown() -> None:
    done = run_program("""
graph = Graph(device)
graph.lane("main").host(lambda: print("ran"))
executable = graph.instantiate()
_native.close_gate(1.0)
executable.launch(stream)
try:
    executable.synchronize(30)
except HostWorkError as error:
    print(graph.status.array[0], error)
""")
    assert done.stdout.startswith("3 ") and "shutting down" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_host_work_with_spin_runs_in_order(device: Device, stream: Stream) -> None:
    """Host work with ``spin``, on a stream or in a graph, keeps the order with other host work."""
    calls: list[str] = []
    hostfunc(stream, calls.append, "eager", spin="force")
    graph = Graph(device, "spin")
    lane = graph.lane("main")
    lane.host(lambda: calls.append("spins"), spin="force")
    lane.host(lambda: calls.append("blocks"))
    replay(graph, stream, 2)
    assert calls == ["eager"] + ["spins", "blocks"] * 2


def test_spin_requires_four_cores_unless_forced(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(OptionError, match=r"occupies a core.*4 usable cores; this process has 2"):
        hostfunc(stream, list, spin=True)
    with pytest.raises(OptionError, match="spin must be"):
        hostfunc(stream, list, spin="yes")  # type: ignore[arg-type]
    hostfunc(stream, list, spin="force")
    stream.synchronize(60)


@pytest.mark.parametrize("missing", ["driver", "cuda.bindings"])
def test_spin_without_support_warns_and_blocks(
    device: Device, stream: Stream, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """cuda.bindings 13.0 does not have the mode, even if the driver is newer."""
    if missing == "driver":
        monkeypatch.setattr(hostwork._native, "spin_supported", lambda: False)
    else:
        monkeypatch.delattr(cu, "CUhostTaskSyncMode", raising=False)
    calls: list[int] = []
    graph = Graph(device, "spin")
    with pytest.warns(UserWarning, match=r"CUDA 13\.2"):
        hostfunc(stream, calls.append, 1, spin="force")
    with pytest.warns(UserWarning, match=r"CUDA 13\.2"):
        graph.lane("main").host(lambda: calls.append(2), spin="force")
    replay(graph, stream)
    assert calls == [1, 2]
