"""Every wait that passes its deadline tells both sides' stacks, Python's and native."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from graft.cudagraph import Device, Graph, Ring, Stream
from graft.cudagraph.errors import DeadlineError, DeviceError, GraftError, HostWorkError
from graft.models.engine import replay
from graft.native import _native

LIMIT_S = 120.0


@pytest.fixture
def stuck(device: Device, stream: Stream) -> Iterator[threading.Event]:
    """A Python host step that stands at a gate in a replay of its own; the gate."""
    gate = threading.Event()
    entered = threading.Event()

    def stands_at_the_gate() -> None:
        entered.set()
        gate.wait(LIMIT_S)

    graph = Graph(device, "stuck")
    graph.lane("main").host(stands_at_the_gate, name="row 3")
    run = graph.instantiate()
    run.launch(stream)
    assert entered.wait(LIMIT_S)
    gate.run = run  # type: ignore[attr-defined]
    yield gate
    gate.set()
    run.synchronize(LIMIT_S)
    assert run.query()


def said_by(error: type[GraftError], wait: Callable[[], object]) -> str:
    """What a wait says when it gives up."""

    def a_function_that_waits() -> None:
        wait()

    with pytest.raises(error) as caught:
        a_function_that_waits()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def check_both_sides(message: str) -> None:
    """The waiter's Python and native stack, then the host step's."""
    waiting, running = message.split("running: ")
    assert "waiting: thread 'MainThread'" in waiting
    assert "in a_function_that_waits" in waiting
    assert re.search(r"native stack, innermost frame first:\n    \S+\+0x", waiting)
    assert running.startswith("host step 'row 3' (replay 1) has been running for")
    assert "in stands_at_the_gate" in running
    native = running[running.index("native stack, innermost frame first:") :]
    assert "PyThread_acquire_lock_timed" in native, "the thread waits for the gate's lock"


def test_waits_for_graphs_streams_and_devices(
    stuck: threading.Event, stream: Stream, device: Device
) -> None:
    """An executable's, a stream's and the device's deadline, and the clearing of a failure; the
    soft device adds what it sees."""
    run = stuck.run  # type: ignore[attr-defined]
    assert not run.query()
    for wait in (run.synchronize, run.clear, stream.synchronize, device.synchronize):
        said = said_by(DeadlineError, lambda wait=wait: wait(timeout_s=0.02))
        check_both_sides(said)
    if device.kind == "soft":
        assert "soft device:\n  thread" in said and "runs host function" in said


def test_a_wait_for_a_ring(stuck: threading.Event, device: Device) -> None:
    """A ring whose entry nobody stamps."""
    ring = Ring(device, 2, {"token": ("int32", (1,))})
    check_both_sides(said_by(DeadlineError, lambda: ring.synchronize(1, timeout_s=0.02)))


def test_a_wait_for_a_round(stuck: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's deadline of a round that publishes nothing."""
    monkeypatch.setattr(replay, "ROUND_DEADLINE_S", 0.0)
    monkeypatch.setattr(replay, "POLL_S", 0.001)
    rounds = SimpleNamespace(
        _stream=SimpleNamespace(query=lambda: False),
        _parts=SimpleNamespace(
            outputs=SimpleNamespace(wait=lambda number, timeout_s: time.sleep(timeout_s))
        ),
    )
    shield = SimpleNamespace(check=lambda: None)
    said = said_by(DeviceError, lambda: replay.Replays._await(rounds, 7, shield, lambda: 0))
    assert said.startswith("replay 7 published no result")
    check_both_sides(said)


def test_nothing_running_is_said(device: Device) -> None:
    """A ring that waits for nobody's work says so, instead of nothing."""
    ring = Ring(device, 2, {"token": ("int32", (1,))})
    said = said_by(DeadlineError, lambda: ring.synchronize(1, timeout_s=0.01))
    assert "running: no host step of graft" in said


def test_a_released_mailbox_tells_where_its_work_stood(
    device: Device, stream: Stream, transport: str
) -> None:
    """The watchdog takes the worker's native stack, whoever waits; Python's is told while it is
    there to be told."""
    gate = threading.Event()

    def answers_too_late() -> None:
        gate.wait(LIMIT_S)

    graph = Graph(device, "late")
    getattr(graph.lane("main"), transport)(answers_too_late, name="grammar", deadline_s=0.1)
    run = graph.instantiate()
    run.launch(stream)
    with pytest.raises(HostWorkError) as caught:
        run.synchronize(LIMIT_S)
    native = str(caught.value)
    notes = "\n".join(caught.value.__notes__)
    gate.set()
    assert re.search(r"it ran in thread \d+, native stack, innermost first:\n", native)
    assert "PyThread_acquire_lock_timed" in native
    assert "host step 'grammar' (replay 1)" in notes and "in answers_too_late" in notes
    run.clear(LIMIT_S)


def test_a_thread_that_is_gone_has_no_stack() -> None:
    """Asking for the stack of a thread that ended, or never was, answers nothing at once."""
    assert _native.thread_stack(2**22 + 1, 5.0) == []
    assert any("PyEval" in frame or "Py" in frame for frame in _native.thread_stack(0, 0.0))
