"""The latency tool: every cell is measured, ordered and explained."""

from __future__ import annotations

import json

import numpy as np
import pytest

from graft.tools import callback_latency


def test_quantiles_are_order_statistics_in_microseconds():
    """Each quantile is one of the samples, from the least to the greatest."""
    samples = np.arange(1, 1001, dtype=np.int64)[::-1] * 1000
    found = callback_latency.quantiles(samples)
    assert found == {"min": 1.0, "p50": 501.0, "p90": 900.0, "p99": 990.0, "max": 1000.0}


@pytest.mark.parametrize("transport", callback_latency.TRANSPORTS)
def test_a_host_step_is_waited_for(device, transport):
    """The second stamp is never before the first: the kernel after the host step waits for it."""
    taken = callback_latency.measure(device, transport, 5)
    assert taken.shape == (5,) and (taken >= 0).all() and (taken < 30e9).all()


def test_a_slow_host_step_shows(device, monkeypatch):
    """What the host step takes is in the figure, so the tool measures the right interval."""
    import time

    from graft.cudagraph.hostwork import PythonWork

    monkeypatch.setattr(callback_latency, "empty_work",
                        lambda transport: PythonWork(time.sleep, 0.02))
    assert (callback_latency.measure(device, "python", 3) >= 20_000_000).all()


def test_the_tool_writes_all_cells(tmp_path, capsys):
    """Every transport and the floor, idle and busy, are in table and JSON with their device."""
    path = tmp_path / "latency.json"
    assert callback_latency.main(["--samples", "10", "--json", str(path)]) == 0
    said = json.loads(path.read_text())
    cells = {(cell["transport"], cell["python"]) for cell in said["cells"]}
    assert cells == {(t, p) for t in callback_latency.TRANSPORTS for p in ("idle", "busy")}
    for cell in said["cells"]:
        values = list(cell["us"].values())
        assert values == sorted(values) and cell["samples"] == 10
    assert said["device"] in capsys.readouterr().out
