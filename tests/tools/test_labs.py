"""Tests of graft.tools.labs: callback latency and GIL deadlocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from graft.cudagraph.host.hostwork import PythonWork
from graft.native import live_thread_states
from graft.tools.labs.callback_latency import __main__ as latency
from graft.tools.labs.callback_latency import transports
from graft.tools.labs.callback_latency.transports import CUDA_CORE, TransportGraph
from graft.tools.labs.gil_deadlock import __main__ as deadlock
from graft.tools.labs.gil_deadlock import case as deadlock_case
from graft.tools.labs.gil_deadlock.case import Case

# Callback latency ---------------------------------------------------------------------------------


@pytest.fixture
def build(device):
    """Return a function that builds a graph, and close all graphs after the test.

    The function skips the test if the transport is not available.
    """
    graphs = []

    def build(transport: str, callbacks: int, work=None) -> TransportGraph:
        reason = transports.unavailable(transport)
        if reason:
            pytest.skip(reason)
        graphs.append(TransportGraph(device, transport, callbacks, work))
        return graphs[-1]

    yield build
    for graph in graphs:
        graph.close()


@pytest.mark.parametrize("transport", transports.TRANSPORTS)
def test_callback_latency_replay_runs_every_host_step_once(build, device, transport):
    """The time of a replay (`join`) is at least the sum of its callbacks' latencies (`hop`)."""
    graph = build(transport, 3)
    samples = graph.replay(4)
    assert samples.join.shape == (4,)
    assert (samples.join >= 0).all()
    assert (samples.join < 30e9).all()
    if transport in transports.DRIVER_CALLED and device.kind == "soft":
        assert samples.hop.shape == (4, 3, 2)
        assert (samples.hop >= 0).all()
        assert (samples.hop.sum(axis=(1, 2)) <= samples.join).all()
    else:
        assert samples.hop is None
    assert len(graph.called) == (12 if transport in transports.PYTHON_BODIES else 0)


def test_callback_latency_join_includes_host_steps(build):
    samples = build("mailbox", 2, PythonWork(time.sleep, 0.02)).replay(3)
    assert samples.join.min() >= 40_000_000


@pytest.mark.parametrize("transport", ["python", CUDA_CORE])
def test_callback_latency_hop_is_the_time_before_and_after_the_body(
    build, device, monkeypatch, transport
):
    if device.kind != "soft":
        pytest.skip("only the soft device records hops")

    def slow_body(graph):
        time.sleep(0.01)
        graph.called.append(time.monotonic_ns())
        time.sleep(0.03)

    monkeypatch.setattr(TransportGraph, "body", lambda graph: partial(slow_body, graph))
    hop = build(transport, 2).replay(1).hop
    assert (hop[..., 0] >= 10_000_000).all()
    assert (hop[..., 1] >= 30_000_000).all()


def test_callback_latency_graphs_do_not_share_python_thread_state(build, device):
    """Only graft's Python steps leave a Python thread state on the driver's callback thread."""
    if device.kind != "soft":
        pytest.skip("the number of threads that call host functions depends on the driver")
    counts = []
    for transport in (CUDA_CORE, "python", CUDA_CORE):
        graph = build(transport, 1)
        graph.prepare()
        counts.append(live_thread_states())
        graph.replay(1)
    others = counts[0]  # thread states of other threads of the process
    assert counts == [others, others + 1, others]


@pytest.mark.parametrize("transport", ["native", "python"])
def test_callback_latency_busy_thread_holds_gil(build, transport):
    """Callbacks begin while the busy thread holds the GIL. Python callbacks wait for it."""
    (found,) = latency.measure([build(transport, 1)], 20, ["busy"], 60.0)
    assert len(np.concatenate(found.join)) == 20
    assert np.concatenate(found.gil_held).mean() >= latency.MIN_BUSY_SHARE
    if transport == "python":
        assert np.median(np.concatenate(found.join)) >= 0.8e9 * sys.getswitchinterval()


def test_callback_latency_gil_was_held_unless_callback_is_within_gap():
    begun = np.array([[100, 0], [250, 200], [900, 300], [1000, 950]])
    held = latency.gil_was_held(begun, [(190, 400), (940, 2000)])
    assert held.tolist() == [True, False, True, False]
    assert latency.gil_was_held(begun, []).all()


def test_callback_latency_quantiles_are_samples():
    nanoseconds = np.arange(1, 1001)[::-1] * 1000
    assert latency.quantiles(nanoseconds) == {"p50": 501.0, "p99": 990.0, "max": 1000.0}


def run_latency_program(device, options):
    """Run the lab as a program and return what it prints."""
    return subprocess.run(
        [sys.executable, "-m", "graft.tools.labs.callback_latency", *options],
        env={**os.environ, "GRAFT_DEVICE": device.kind},
        check=True,
        text=True,
        capture_output=True,
        timeout=240,
    ).stdout


@pytest.mark.parametrize(
    "is_program", [pytest.param(True, marks=pytest.mark.full, id="program"), False]
)
def test_callback_latency_writes_table_and_json(device, tmp_path, monkeypatch, capsys, is_program):
    path = tmp_path / "latency.json"
    samples = 10 if is_program else 4
    options = ["--samples", str(samples), "--callbacks", "1", "2", "--json", str(path)]
    if is_program:
        printed = run_latency_program(device, options)
    else:
        monkeypatch.setenv("GRAFT_DEVICE", device.kind)
        monkeypatch.setattr(latency, "BATCH", 2)
        assert latency.main(options) == 0
        printed = capsys.readouterr().out
    report = json.loads(path.read_text())
    names = [name for name in transports.TRANSPORTS if not transports.unavailable(name)]
    expected = {(name, n, p) for name in names for n in (1, 2) for p in latency.PYTHON_STATES}
    measurements = report["measurements"]
    found = [(one["transport"], one["callbacks"], one["python"]) for one in measurements]
    assert len(found) == len(expected)
    assert set(found) == expected
    for one in measurements:
        assert one["samples"] == samples
        for quantiles in (one["join_us"], one["hop_us"]):
            if quantiles is not None:
                assert list(quantiles.values()) == sorted(quantiles.values())
    assert 0 < report["wake_up_us"]["p50"] <= report["wake_up_us"]["p99"]
    assert "waking a sleeping thread takes" in printed
    assert report["device"] in printed


# GIL deadlocks ------------------------------------------------------------------------------------

CASES = [
    # The callback holds the context lock and waits for the GIL. The allocation holds the GIL and
    # waits for the context lock.
    ("alloc:python:1", "hangs"),
    # The same call with the GIL released.
    ("alloc:python:1:released", "completes"),
    # The same driver call, but the callback is native and does not need the GIL.
    ("alloc:native:1", "completes"),
    # Model 0 has no driver locks, so nothing hangs. The detector still reports that the GIL and the
    # driver were requested in both orders.
    ("alloc:python:0", "potential"),
    # A mailbox worker runs while no lock of the driver is held.
    ("alloc:mailbox-python:1", "completes"),
    # In lock model 4, enqueueing a host function does not wait for the running one.
    ("hostfunc:ctypes:4", "potential"),
    # In lock model 4, the first launch waits for a slow callback, which ends because it does not
    # need the GIL.
    ("first-launch:native:4", "completes"),
]


@pytest.mark.parametrize(("name", "outcome"), CASES, ids=[name for name, _ in CASES])
@pytest.mark.full("alloc:python:1:released", "alloc:native:1", "first-launch")
def test_gil_deadlock_outcome_follows_from_lock_model(name, outcome):
    case = Case.parse(name)
    result = deadlock.run_case(case)
    assert result.outcome == deadlock.expected_outcome(case) == outcome, result.report
    if outcome == "hangs":
        # The report has the native stacks of both threads, and the Python stack of the thread that
        # waits in cuMemAlloc.
        waiting, running = result.report.split("runs host function")
        assert "is in cuMemAlloc" in waiting
        assert "GIL HELD" in waiting
        assert "cuMemAlloc_v2" in waiting
        assert "in run" in waiting
        assert "holding the context lock" in running
        assert "PyGILState_Ensure" in running


@pytest.mark.full
def test_gil_deadlock_all_outcomes_follow_from_lock_models(capsys, monkeypatch):
    monkeypatch.setenv("GRAFT_DEVICE", "soft")
    status = deadlock.main([])
    printed = capsys.readouterr().out
    assert status == 0, printed
    count = len(deadlock.PATTERNS) * len(deadlock.TRANSPORTS) * len(deadlock.LOCK_MODELS)
    assert f"{count} cases, 0 unexpected" in printed
    assert "released" in printed
    assert "hangs" in printed


def test_gil_deadlock_skips_transport_without_package(monkeypatch):
    monkeypatch.setattr(deadlock_case.importlib.util, "find_spec", lambda name: None)
    result = deadlock.run_case(Case("alloc", "cuda.core", 1))
    assert result.as_expected
    assert "pip install cuda-core" in deadlock.table([result])


def test_gil_deadlock_exit_status_is_1_for_unexpected_outcome(monkeypatch, capsys):
    monkeypatch.setenv("GRAFT_DEVICE", "soft")

    def complete_all(cases, soft, jobs):
        return [
            deadlock.Result(case, "completes", deadlock.expected_outcome(case), 0.1, "")
            for case in cases
        ]

    monkeypatch.setattr(deadlock, "run_all", complete_all)
    assert deadlock.main(["--case", "alloc:native:1"]) == 0
    assert deadlock.main(["--case", "alloc:python:1"]) == 1
    assert "EXPECTED hangs" in capsys.readouterr().out


def test_gil_deadlock_lab_prints_progress_and_keeps_results_after_interrupt(monkeypatch, capsys):
    """Without a terminal, each case prints a line. Ctrl-C does not lose the completed cases."""
    cases = [Case("alloc", "native", model) for model in range(4)]

    def run(case: Case, soft: bool) -> deadlock.Result:
        if case.model == 2:
            raise KeyboardInterrupt
        return deadlock.Result(case, deadlock.COMPLETES, deadlock.COMPLETES, 0.0, "")

    results = deadlock.run_all(cases, True, 1, run)
    assert [result.case.model for result in results] == [0, 1]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["1/4 alloc:native:0: completes", "2/4 alloc:native:1: completes"]
    monkeypatch.setattr(deadlock, "run_all", lambda cases, soft, jobs: results)
    assert deadlock.main([]) == 130
    assert "interrupted: " in capsys.readouterr().out
