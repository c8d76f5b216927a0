"""The measurement of rounds with and without grammar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graft.cudagraph.device import Device
from graft.tools import round_time


def test_every_arm_is_measured(device: Device, tmp_path: Path, capsys) -> None:
    """Four arms with full rounds; waits belong to guided ones; the ratio is theirs."""
    out = tmp_path / "rounds.json"
    arguments = ["--batch", "2", "--requests", "6", "--repeats", "1", "--json", str(out)]
    assert round_time.main(arguments) == 0
    said = json.loads(out.read_text())
    assert said["device"] == device.describe() and said["batch"] == 2
    arms = said["arms"]
    assert list(arms) == [f"{g}, {f}" for f in ("two in flight", "one by one")
                          for g in ("guided", "free")]  # fmt: skip
    for name, arm in arms.items():
        assert arm["rounds"] > 0 and 0 <= arm["exposed_share"] < 1
        assert 0 < arm["round_p10_us"] <= arm["round_us"] <= arm["round_p90_us"]
        assert (arm["row_us"] > 0) == name.startswith("guided")
    for flight, ratio in said["ratios"].items():
        whole = arms[f"guided, {flight}"]["round_us"] / arms[f"free, {flight}"]["round_us"]
        assert ratio["guided_to_free"] == pytest.approx(whole)
    assert "exposed" in capsys.readouterr().out


def test_no_full_round_is_said(capsys) -> None:
    """More rows than requests leave nothing to compare."""
    assert round_time.main(["--batch", "4", "--requests", "2", "--repeats", "1"]) == 2
    assert "had all its rows taken" in capsys.readouterr().err
