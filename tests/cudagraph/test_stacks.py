"""Errors of exceeded deadlines contain the stacks of the waiting thread and of the host step."""

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
    """An event on which a Python host step of a running replay waits."""
    gate = threading.Event()
    entered = threading.Event()

    def blocked_host_step() -> None:
        entered.set()
        gate.wait(LIMIT_S)

    graph = Graph(device, "stuck")
    graph.lane("main").host(blocked_host_step, name="row 3")
    run = graph.instantiate()
    run.launch(stream)
    assert entered.wait(LIMIT_S)
    gate.run = run  # type: ignore[attr-defined]
    yield gate
    gate.set()
    run.synchronize(LIMIT_S)
    assert run.query()


def error_text(error: type[GraftError], wait: Callable[[], object]) -> str:
    """Call a function that waits, and return the message and notes of the error that it raises."""

    def waiting_function() -> None:
        wait()

    with pytest.raises(error) as caught:
        waiting_function()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def check_both_sides(message: str) -> None:
    """Check that a message has the Python and native stacks of waiting thread and host step."""
    waiting, running = message.split("running: ")
    assert "waiting: thread 'MainThread'" in waiting
    assert "in waiting_function" in waiting
    assert re.search(r"native stack, innermost frame first:\n    \S+\+0x", waiting)
    assert running.startswith("host step 'row 3' (replay 1) for ")
    assert "in blocked_host_step" in running
    native = running[running.index("native stack, innermost frame first:") :]
    assert "PyThread_acquire_lock_timed" in native, "the thread waits for the lock of the event"


@pytest.mark.overlap
def test_deadline_report_of_graph_stream_and_device_waits(
    stuck: threading.Event, stream: Stream, device: Device
) -> None:
    """Every kind of wait reports the stacks, and on the soft device also the calls in progress."""
    run = stuck.run  # type: ignore[attr-defined]
    assert not run.query()
    for wait in (run.synchronize, run.clear, stream.synchronize, device.synchronize):
        text = error_text(DeadlineError, lambda wait=wait: wait(timeout_s=0.02))
        check_both_sides(text)
    if device.kind == "soft":
        assert "soft device:\n  thread" in text and "runs host function" in text


@pytest.mark.overlap
def test_deadline_report_of_ring_wait(stuck: threading.Event, device: Device) -> None:
    ring = Ring(device, 2, {"token": ("int32", (1,))})
    check_both_sides(error_text(DeadlineError, lambda: ring.synchronize(1, timeout_s=0.02)))


@pytest.mark.overlap
def test_deadline_report_of_engine_round(
    stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "ROUND_DEADLINE_S", 0.0)
    monkeypatch.setattr(replay, "POLL_S", 0.001)
    rounds = SimpleNamespace(
        _stream=SimpleNamespace(query=lambda: False, handle=0),
        _resources=SimpleNamespace(
            outputs=SimpleNamespace(wait=lambda number, timeout_s, stream: time.sleep(timeout_s))
        ),
    )
    shield = SimpleNamespace(check=lambda: None)
    text = error_text(
        DeviceError, lambda: replay.Replays._wait_until_published(rounds, 7, shield, lambda: 0)
    )
    assert text.startswith("replay 7 published no result")
    check_both_sides(text)


def test_deadline_report_without_running_host_work(device: Device) -> None:
    ring = Ring(device, 2, {"token": ("int32", (1,))})
    text = error_text(DeadlineError, lambda: ring.synchronize(1, timeout_s=0.01))
    assert "running: no host step of graft" in text


def test_mailbox_deadline_report_has_stack_of_worker(
    device: Device, stream: Stream, transport: str
) -> None:
    """A missed mailbox deadline reports the worker's native stack, and in a note its Python stack.

    The watchdog takes the native stack when the deadline passes. The note is added when the error
    is raised, because the work is then still running.
    """
    gate = threading.Event()

    def slow_work() -> None:
        gate.wait(LIMIT_S)

    graph = Graph(device, "late")
    getattr(graph.lane("main"), transport)(slow_work, name="grammar", deadline_s=1.0)
    run = graph.instantiate()
    run.launch(stream)
    with pytest.raises(HostWorkError) as caught:
        run.synchronize(LIMIT_S)
    native = str(caught.value)
    notes = "\n".join(caught.value.__notes__)
    gate.set()
    assert re.search(r"it ran in thread \d+, native stack, innermost frame first:\n", native)
    assert "PyThread_acquire_lock_timed" in native
    assert "host step 'grammar' (replay 1)" in notes and "in slow_work" in notes
    run.clear(LIMIT_S)


def test_native_stack_of_missing_thread_is_empty() -> None:
    assert _native.thread_stack(2**22 + 1, 5.0) == []
    assert any("PyEval" in frame or "Py" in frame for frame in _native.thread_stack(0, 0.0))
