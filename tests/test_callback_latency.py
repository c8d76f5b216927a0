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
from graft.tools import callback_latency as lab
from graft.tools import latency_arms as arms

MEASURABLE = [name for name in arms.ARMS if not arms.unavailable(name)]


def test_quantiles_are_order_statistics_in_microseconds():
    """Each quantile is one of the samples, from the least to the greatest."""
    samples = np.arange(1, 1001, dtype=np.int64)[::-1] * 1000
    found = lab.quantiles(samples)
    assert found == {"min": 1.0, "p50": 501.0, "p90": 900.0, "p99": 990.0, "max": 1000.0}


@pytest.mark.parametrize("name", MEASURABLE)
def test_a_replay_runs_every_host_step_once(device, name):
    """Joins last, hops are there exactly where a driver's thread calls the body, none before 0."""
    arm = arms.make_arm(device, name, 3, arms.Hops(device))
    try:
        for _ in range(4):
            join, cpu, hops = arm.replay()
            assert 0 <= join < 30e9 and cpu >= 0
            if name in arms.HOPPING and device.kind == "soft":
                assert hops.shape == (3, 2) and (hops >= 0).all() and hops.sum() <= join
            else:
                assert hops is None
            assert len(arm.called) == (3 if name in ("python", "cuda.core") else 0)
    finally:
        arm.close()


def test_a_slow_host_step_is_in_the_join(device):
    """What the host steps take is in the join, so the tool measures the right interval."""
    arm = arms.GraftArm(device, "mailbox", 2, arms.Hops(device), PythonWork(time.sleep, 0.02))
    try:
        assert min(arm.replay()[0] for _ in range(3)) >= 40_000_000
    finally:
        arm.close()


@pytest.mark.parametrize("name", [n for n in ("python", "cuda.core") if n in MEASURABLE])
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
    arm = arms.make_arm(device, name, 2, arms.Hops(device))
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


def test_the_tool_writes_all_cells(device, tmp_path):
    """Every arm, number of steps and state of Python is in table, JSON and drawing.

    A process of its own: the thread is fresh only where no Python step ran before.
    """
    path, picture = tmp_path / "latency.json", tmp_path / "latency.svg"
    command = [sys.executable, "-m", "graft.tools.callback_latency", "--samples", "5",
               "--dropped", "1", "--callbacks", "1", "2", "--json", str(path), "--svg",
               str(picture)]
    shown = subprocess.run(command, env={**os.environ, "GRAFT_DEVICE": device.kind}, check=True,
                           text=True, capture_output=True, timeout=240).stdout
    said = json.loads(path.read_text())
    cells = {(cell["transport"], cell["callbacks"], cell["python"], cell["thread"])
             for cell in said["cells"]}
    peer = lab.PEER in MEASURABLE
    names = {"kept": MEASURABLE, "fresh": lab.FRESH if peer else ()}
    assert cells == {(t, n, p, thread) for thread in names for t in names[thread] for n in (1, 2)
                     for p in lab.PYTHON}
    for cell in said["cells"]:
        for figures in filter(None, (cell["join_us"], cell["hop_us"])):
            assert list(figures.values()) == sorted(figures.values())
        assert cell["samples"] == 5
    for key in ("driver", "cores", "processor", "system", "python", "load"):
        assert said[key]
    assert said["device"] in shown
    ElementTree.parse(picture)
    if said["kind"] == "soft":
        assert "a GPU's are not these" in shown and "no GPU" in picture.read_text()
        compared = {(row["transport"], row["cuda_core_thread"]) for row in said["ratios"]}
        pairs = {(t, thread) for t in ("native", "python") for thread in ("fresh", "kept")}
        assert compared == (pairs if peer else set())


def test_more_host_steps_than_hops_are_recorded_are_refused():
    """The number of steps is checked before anything is built."""
    with pytest.raises(SystemExit):
        lab.main(["--callbacks", "65"])
