"""The latency laboratory: every cell is measured, ordered, explained, and measures what it says."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from xml.etree import ElementTree

import numpy as np
import pytest

from graft.cudagraph.hostwork import PythonWork
from graft.native import live_thread_states
from graft.tools import callback_latency as lab
from graft.tools import latency_arms as arms
from graft.tools import latency_bars, latency_harm, latency_peers

PYTHON_ARMS = ("python", *latency_peers.CORE, "cupy")


def make(device, name: str, callbacks: int, hops: arms.Hops | None = None) -> arms.Arm:
    """An arm, or a skip that says why there is none."""
    why = latency_peers.unavailable(name, device)
    if why:
        pytest.skip(why)
    return latency_peers.make_arm(device, name, callbacks, hops or arms.Hops(device))


def test_quantiles_are_order_statistics_in_microseconds():
    """Each quantile is one of the samples, from the least to the greatest."""
    samples = np.arange(1, 1001, dtype=np.int64)[::-1] * 1000
    found = lab.quantiles(samples)
    assert found == {"min": 1.0, "p50": 501.0, "p90": 900.0, "p99": 990.0, "max": 1000.0}


@pytest.mark.parametrize("name", latency_peers.ARMS)
def test_a_replay_runs_every_host_step_once(device, name):
    """Joins last, hops are there exactly where a driver's thread calls the body, none before 0."""
    arm = make(device, name, 3)
    try:
        for _ in range(4):
            join, cpu, hops = arm.replay()
            assert 0 <= join < 30e9 and cpu >= 0
            if name in arms.HOPPING and device.kind == "soft":
                assert hops.shape == (3, 2) and (hops >= 0).all() and hops.sum() <= join
            else:
                assert hops is None
            assert len(arm.called) == (3 if name in PYTHON_ARMS else 0)
    finally:
        arm.close()


def test_a_slow_host_step_is_in_the_join(device):
    """What the host steps take is in the join, so the tool measures the right interval."""
    arm = arms.GraftArm(device, "mailbox", 2, arms.Hops(device), PythonWork(time.sleep, 0.02))
    try:
        assert min(arm.replay()[0] for _ in range(3)) >= 40_000_000
    finally:
        arm.close()


@pytest.mark.parametrize("name", ["python", "cuda.core", "cuda.core builder"])
def test_the_hop_is_what_lies_outside_the_body(device, monkeypatch, name):
    """Time before the body's stamp is on the way there, time after it on the way back."""
    if device.kind != "soft":
        pytest.skip("only the soft device records hops")

    def slow(self):
        def body():
            time.sleep(0.01)
            self.called.append(time.monotonic_ns())
            time.sleep(0.03)

        return body

    monkeypatch.setattr(arms.Arm, "body", slow)
    arm = make(device, name, 2)
    try:
        _, _, hops = arm.replay()
    finally:
        arm.close()
    assert (hops[:, 0] >= 10_000_000).all() and (hops[:, 1] >= 30_000_000).all()


def test_cells_take_turns_in_random_order_and_the_first_are_dropped():
    """Each turn takes every cell once; what was dropped is in no cell; orders differ."""
    log = []

    class Cell(lab.Cell):
        def take(self):
            log.append(self.python)
            self.join.append(len(log))

    cells = [Cell(None, name) for name in "abcd"]
    lab.measure(cells, 20, 5, 60.0, random.Random(1))
    turns = ["".join(log[i:i + 4]) for i in range(0, len(log), 4)]
    assert len(turns) == 25 and {"".join(sorted(turn)) for turn in turns} == {"abcd"}
    assert len(set(turns)) > 5
    assert sorted(n for cell in cells for n in cell.join) == list(range(21, 101))


def test_the_time_limit_leaves_fewer_samples_and_never_none():
    """At the limit every cell keeps the same number of samples, at least one."""

    class Cell(lab.Cell):
        def take(self):
            self.join.append(1)

    cells = [Cell(None, "a"), Cell(None, "b")]
    lab.measure(cells, 1000, 3, 0.0, random.Random(1))
    assert [len(cell.join) for cell in cells] == [1, 1]


def test_each_arm_finds_the_thread_as_if_it_were_alone(device):
    """graft's Python steps meet the thread state they left, cuda.core meets none unless asked."""
    if device.kind != "soft":
        pytest.skip("how many threads call host functions is the driver's business")
    names = ("cuda.core", "python", "cuda.core kept", "cuda.core", "cuda.core kept", "cuda.core")
    seen = []
    for name in names:
        arm = make(device, name, 1)
        arm.prepare()
        seen.append(live_thread_states())
        arm.replay()
        arm.close()
    none = seen[0]  # other threads of the process may keep theirs
    assert seen == [none, none + 1, none + 1, none, none + 1, none]


def test_a_neighbour_computes_beside_every_arm(device):
    """The neighbour's kernels run alone and beside the arms; its time is positive, alone is 1."""
    built = [make(device, name, 1) for name in (arms.BASELINE, "native", "python")]
    try:
        found = latency_harm.harm(device, built, 2, random.Random(1))
    finally:
        for arm in built:
            arm.close()
    assert [row["transport"] for row in found] == ["alone", arms.BASELINE, "native", "python"]
    assert all(row["neighbour_us"] > 0 for row in found) and found[0]["of_alone"] == 1.0


def test_bars_compare_the_figures_they_name():
    """Every bar is the quotient of two rows' quantiles, and holds or not by its limit."""

    def row(name, python, hop, join):
        return {"transport": name, "callbacks": 1, "python": python, "pause_us": 0,
                "hop_us": None if hop is None else {"p50": hop},
                "join_us": {"p50": join, "p99": 10 * join}}

    rows = [row("python", "idle", 2.0, 5.0), row("native", "idle", 0.6, 3.0),
            row("cuda.core", "idle", 10.0, 9.0), row("mailbox", "idle", None, 2.0),
            row("python", "busy", 50.0, 100.0), row("native", "busy", 0.1, 4.0),
            row("mailbox", "busy", None, 11.0)]
    soft = {bar["what"]: (bar["value"], bar["holds"]) for bar in latency_bars.bars(rows, "soft")}
    assert soft == {
        "median hop of python / cuda.core, 1 steps, idle": (0.2, True),
        "median hop of native / cuda.core, 1 steps, idle": (0.06, False),
        "p99 join of native / python, 1 steps, busy": (0.04, True),
        "p99 join of mailbox / python, 1 steps, busy": (0.11, False),
    }
    cuda = latency_bars.bars(rows, "cuda")
    assert cuda[-1] == {"what": "median join of mailbox / native host node, 1 steps, idle",
                        "value": 2 / 3, "limit": 0.5, "holds": False}
    assert {r["transport"]: r["of_cuda_core"] for r in latency_bars.ratios(rows)
            if r["python"] == "idle"} == {"python": 0.2, "native": 0.06}


def test_the_tool_writes_all_cells(device, tmp_path):
    """Every arm, number of steps, state of Python and pause is in table, JSON and drawing."""
    path, picture = tmp_path / "latency.json", tmp_path / "latency.svg"
    command = [sys.executable, "-m", "graft.tools.callback_latency", "--samples", "5",
               "--dropped", "1", "--callbacks", "1", "2", "--pauses-us", "0", "50",
               "--harm-repeats", "1", "--json", str(path), "--svg", str(picture)]
    shown = subprocess.run(command, env={**os.environ, "GRAFT_DEVICE": device.kind}, check=True,
                           text=True, capture_output=True, timeout=240).stdout
    said = json.loads(path.read_text())
    cells = [(cell["transport"], cell["callbacks"], cell["python"], cell["pause_us"])
             for cell in said["cells"]]
    names = [n for n in latency_peers.ARMS if not latency_peers.unavailable(n, device)]
    assert sorted(cells) == sorted(
        [(t, n, p, 0) for t in names for n in (1, 2) for p in lab.PYTHON]
        + [(t, 1, "idle", 50) for t in names])
    assert {*said["unavailable"], *names} == set(latency_peers.ARMS)
    for cell in said["cells"]:
        for figures in filter(None, (cell["join_us"], cell["hop_us"])):
            assert list(figures.values()) == sorted(figures.values())
        assert cell["samples"] == 5
    for key in ("driver", "cores", "processor", "system", "python", "load", "clock_tick_ns"):
        assert said[key]
    assert [row["transport"] for row in said["harm"]] == ["alone", *names]
    assert said["device"] in shown
    ElementTree.parse(picture)
    if said["kind"] == "soft":
        assert "a GPU's are not these" in shown and "no GPU" in picture.read_text()


def test_more_host_steps_than_hops_are_recorded_are_refused():
    """The number of steps is checked before anything is built."""
    with pytest.raises(SystemExit):
        lab.main(["--callbacks", "65"])
