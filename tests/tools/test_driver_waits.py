"""Which driver calls wait for host work: the tool measures what the driver's documentation says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from graft.tools import driver_waits


@pytest.mark.parametrize("situation", driver_waits.SITUATIONS)
def test_waiting_and_returning_calls_are_told_apart(device, monkeypatch, situation):
    """cuCtxSynchronize waits for all work by its definition, making an event for none."""
    monkeypatch.setenv("GRAFT_DEVICE", device.kind)
    rows = driver_waits.measure(["cuCtxSynchronize", "cuEventCreate"], [situation], ["other"],
                                hold_s=3.0)
    assert [(row["error"], row["waits"]) for row in rows] == [("", True), ("", False)]
    shown = driver_waits.table(rows)
    assert "cuEventCreate" in shown and "waits" in shown


def test_a_call_that_fails_costs_its_row(device, monkeypatch):
    """A child that ends with an error is told in its row; nothing is claimed of the call."""
    monkeypatch.setenv("GRAFT_DEVICE", device.kind)
    rows = driver_waits.measure(["cuNoSuchCall"], ["host function"], ["same"])
    assert rows[0]["waits"] is None and "cuNoSuchCall" in rows[0]["error"]


def test_the_tool_writes_json(device, tmp_path):
    """The file has a row per call and situation, and names the device."""
    path = tmp_path / "waits.json"
    command = [sys.executable, "-m", "graft.tools.driver_waits", "--calls", "cuMemAlloc",
               "--json", str(path)]
    subprocess.run(command, env={**os.environ, "GRAFT_DEVICE": device.kind}, check=True,
                   capture_output=True, timeout=300)
    said = json.loads(path.read_text())
    assert said["kind"] == device.kind and len(said["calls"]) == 4
    assert {row["call"] for row in said["calls"]} == {"cuMemAlloc"}
