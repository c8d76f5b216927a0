"""The laboratories: every cell is measured, a busy one is busy, and deadlocks are what they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from graft.cudagraph.hostwork import PythonWork
from graft.native import live_thread_states
from graft.tools.labs.callback_latency import __main__ as lab
from graft.tools.labs.callback_latency import arms
from graft.tools.labs.gil_deadlock import __main__ as deadlock
from graft.tools.labs.gil_deadlock import cell as deadlock_cell
from graft.tools.labs.gil_deadlock.cell import Cell


@pytest.fixture
def make(device):
    """Builds arms, which are closed afterwards; skips those that cannot be measured here."""
    made = []

    def build(name: str, callbacks: int, work=None) -> arms.Arm:
        why = arms.unavailable(name)
        if why:
            pytest.skip(why)
        made.append(arms.Arm(device, name, callbacks, work))
        return made[-1]

    yield build
    for arm in made:
        arm.close()


@pytest.mark.parametrize("name", arms.ARMS)
def test_a_replay_runs_every_host_step_once(make, device, name):
    """Joins last, hops are there exactly where a driver's thread calls the body, none before 0."""
    arm = make(name, 3)
    found = arm.replay(4)
    assert found.join.shape == (4,) and (found.join >= 0).all() and (found.join < 30e9).all()
    if name in arms.HOPPING and device.kind == "soft":
        assert found.hop.shape == (4, 3, 2) and (found.hop >= 0).all()
        assert (found.hop.sum(axis=(1, 2)) <= found.join).all()
    else:
        assert found.hop is None
    assert len(arm.called) == (12 if name in arms.PYTHON else 0)


def test_a_slow_host_step_is_in_the_join(make):
    """What the host steps take is in the join, so the tool measures the right interval."""
    assert make("mailbox", 2, PythonWork(time.sleep, 0.02)).replay(3).join.min() >= 40_000_000


@pytest.mark.parametrize("name", ["python", arms.PEER])
def test_the_hop_is_what_lies_outside_the_body(make, device, monkeypatch, name):
    """Time before the body's stamp is on the way there, time after it on the way back."""
    if device.kind != "soft":
        pytest.skip("only the soft device records hops")

    def slow(self):
        time.sleep(0.01)
        self.called.append(time.monotonic_ns())
        time.sleep(0.03)

    monkeypatch.setattr(arms.Arm, "body", lambda self: partial(slow, self))
    hops = make(name, 2).replay(1).hop
    assert (hops[..., 0] >= 10_000_000).all() and (hops[..., 1] >= 30_000_000).all()


def test_each_arm_finds_the_thread_as_if_it_were_alone(make, device):
    """graft's Python steps meet the thread state they left, cuda.core meets none."""
    if device.kind != "soft":
        pytest.skip("how many threads call host functions is the driver's business")
    seen = []
    for name in (arms.PEER, "python", arms.PEER):
        arm = make(name, 1)
        arm.prepare()
        seen.append(live_thread_states())
        arm.replay(1)
    none = seen[0]  # other threads of the process may keep theirs
    assert seen == [none, none + 1, none]


@pytest.mark.parametrize("name", ["native", "python"])
def test_callbacks_beside_a_busy_thread_meet_a_held_gil(make, name):
    """Replays begin while the busy thread has the GIL, so a Python step waits its interval."""
    (found,) = lab.measure([make(name, 1)], 20, ["busy"], 60.0)
    assert np.concatenate(found.held).mean() >= lab.BUSY_SHARE
    if name == "python":
        assert np.median(np.concatenate(found.join)) >= 0.8e9 * sys.getswitchinterval()


def test_what_meets_no_busy_thread_and_what_a_quantile_is():
    """What begins before the busy thread has ticked again did not meet a held GIL; a quantile is
    one of the samples."""
    begun = np.array([[100, 0], [250, 200], [900, 300], [1000, 950]])
    assert lab.held(begun, [(190, 400), (940, 2000)]).tolist() == [True, False, True, False]
    assert lab.held(begun, []).all()
    assert lab.quantiles(np.arange(1, 1001)[::-1] * 1000) == {
        "p50": 501.0,
        "p99": 990.0,
        "max": 1000.0,
    }


def test_the_tool_writes_all_cells(device, tmp_path):
    """Every arm, number of steps and state of Python is told, and what waking costs."""
    path = tmp_path / "latency.json"
    command = [
        sys.executable,
        "-m",
        "graft.tools.labs.callback_latency",
        "--samples",
        "20",
        "--callbacks",
        "1",
        "2",
        "--json",
        str(path),
    ]
    shown = subprocess.run(
        command,
        env={**os.environ, "GRAFT_DEVICE": device.kind},
        check=True,
        text=True,
        capture_output=True,
        timeout=240,
    ).stdout
    said = json.loads(path.read_text())
    names = [name for name in arms.ARMS if not arms.unavailable(name)]
    assert sorted((c["transport"], c["callbacks"], c["python"]) for c in said["cells"]) == sorted(
        (t, n, p) for t in names for n in (1, 2) for p in lab.PYTHON
    )
    for cell in said["cells"]:
        assert cell["samples"] == 20
        for figures in filter(None, (cell["join_us"], cell["hop_us"])):
            assert list(figures.values()) == sorted(figures.values())
    assert 0 < said["wake_up_us"]["p50"] <= said["wake_up_us"]["p99"]
    assert "waking a sleeping thread takes" in shown and said["device"] in shown
    for lines in (["--callbacks", "65"], ["--samples", "0"]):
        with pytest.raises(SystemExit):
            lab.main(lines)


#: What each must come to follows from what its call waits for; see the comments.
CHOSEN = [
    # The callback runs under the context lock, asks for the GIL; the allocation waits for the lock.
    ("alloc:python:1", "hangs"),
    # The same call, but the GIL is released around it.
    ("alloc:python:1:released", "completes"),
    # The same call, but the callback needs no GIL.
    ("alloc:native:1", "completes"),
    # Nobody holds a lock, this time: both were asked for in both orders.
    ("alloc:python:0", "potential"),
    # A mailbox's worker is called under no lock of the driver's.
    ("alloc:mailbox-python:1", "completes"),
    # Enqueueing waits for nothing in model 4; a first launch waits for slow work that ends.
    ("hostfunc:ctypes:4", "potential"),
    ("first-launch:native:4", "completes"),
]


@pytest.mark.parametrize(("name", "outcome"), CHOSEN, ids=[name for name, _ in CHOSEN])
def test_a_cell_comes_to_what_follows_from_its_model(name, outcome):
    """The verdict is the one that the waiting relations imply, and the tool expects the same."""
    cell = deadlock.parse_cell(name)
    verdict = deadlock.play(cell)
    assert verdict.outcome == deadlock.expected(cell) == outcome, verdict.report
    if outcome == "hangs":
        # Both sides, each with its native stack, and the Python stack of the side that has one.
        waiting, running = verdict.report.split("runs host function")
        assert "is in cuMemAlloc" in waiting and "GIL HELD" in waiting
        assert "cuMemAlloc_v2" in waiting and "in play" in waiting
        assert "holding the context lock" in running and "PyGILState_Ensure" in running


@pytest.mark.full
def test_every_cell_comes_to_what_follows_from_the_models(capsys, monkeypatch):
    """The whole matrix has no unexpected verdict."""
    monkeypatch.setenv("GRAFT_DEVICE", "soft")
    assert deadlock.main([]) == 0, capsys.readouterr().out
    cells = len(deadlock.PATTERNS) * len(deadlock.TRANSPORTS) * len(deadlock.MODELS)
    table = capsys.readouterr().out
    assert "released" in table and "hangs" in table and f"{cells} cells, 0 unexpected" in table


def test_unexpected_verdicts_fail_the_tool_and_missing_packages_do_not(monkeypatch, capsys):
    """The exit status is 1 for one unexpected verdict; what is not installed is named."""
    monkeypatch.setenv("GRAFT_DEVICE", "soft")
    monkeypatch.setattr(deadlock_cell.importlib.util, "find_spec", lambda name: None)
    lacking = deadlock.play(Cell("alloc", "cuda.core", 1))
    assert lacking.as_expected and "pip install cuda-core" in deadlock.table([lacking])
    monkeypatch.setattr(
        deadlock,
        "play_all",
        lambda cells, soft, jobs: [
            deadlock.Verdict(cell, "completes", deadlock.expected(cell), 0.1, "") for cell in cells
        ],
    )
    assert deadlock.main(["--cell", "alloc:native:1"]) == 0
    assert deadlock.main(["--cell", "alloc:python:1"]) == 1
    assert "EXPECTED hangs" in capsys.readouterr().out
    for name in ("alloc", "alloc:python", "alloc:telepathy:1", "sleep:python:1", "alloc:python:x"):
        with pytest.raises(SystemExit) as stop:
            deadlock.main(["--cell", name])
        assert stop.value.code == 2
    assert "--cell" in capsys.readouterr().err
