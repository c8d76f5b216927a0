"""Tests of the recorded results: provenance, charts, and acceptance lengths."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from graft.tools.bench import speculation
from graft.tools.demo.smollm import cache_folder

ROOT = Path(__file__).resolve().parents[2]
#: Smallest permitted ratio of an acceptance length to the recorded one.
MIN_RATIO = 0.95


def load_script(name: str) -> Any:
    """Import a script of the folder ``results``."""
    spec = importlib.util.spec_from_file_location(
        f"results_{name}", ROOT / "results" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record = load_script("record")
plots = load_script("plots")
FOLDER = plots.FOLDER


def read(name: str) -> dict[str, Any]:
    """Read a recorded file."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def test_recorded_files_have_provenance_and_are_described():
    files = sorted(FOLDER.glob("*.json"))
    page = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert {"acceptance", "memory"} <= {file.stem for file in files}
    for file in files:
        found = read(file.stem)
        assert re.fullmatch(r"[0-9a-f]{12}", found["commit"]), file
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]), file
        assert found["machine"] and "soft device" in found["device"], file
        assert found["command"] == f"python -m graft.tools.{record.COMMANDS[file.stem]}", file
        assert f"({FOLDER.name}/{file.name})" in page


@pytest.mark.parametrize("name", sorted(plots.CHARTS))
@pytest.mark.parametrize("scheme", sorted(plots.STYLES))
def test_charts_show_the_recorded_results(name, scheme):
    """If this test fails, run ``make charts``."""
    text = (FOLDER / f"{name}_{scheme}.svg").read_text(encoding="utf-8")
    assert text.splitlines()[-1] == f"<!-- data: {plots.data_hash(name)} -->"


def test_charts_are_drawn_from_the_recorded_results(tmp_path, monkeypatch):
    """Changed results change the markers of the chart and its hash."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "FOLDER", tmp_path)
    (tmp_path / "acceptance.json").write_bytes((FOLDER / "acceptance.json").read_bytes())
    changed = read("memory")
    changed["series"] = changed["series"][:3]
    (tmp_path / "memory.json").write_text(json.dumps(changed))
    plots.main()
    drawn = (tmp_path / "acceptance_dark.svg").read_text()
    points = sum(len(series) for series in plots.acceptance_charts()[0].series.values())
    assert drawn.count("<use") >= points
    assert plots.data_hash("memory") in (tmp_path / "memory_light.svg").read_text()
    recorded = (FOLDER / "memory_light.svg").read_text()
    assert plots.data_hash("memory") not in recorded


def check_acceptance(name: str, *more: str) -> None:
    """Repeat a recorded measurement and compare its acceptance lengths with the recorded ones.

    `more` has options that replace those of the recorded command.
    """
    recorded = read(name)
    expected = {}
    for one in recorded["configurations"]:
        expected[one["drafter"], one["length"]] = one["acceptance_length"]["mean"]
    arguments = [*shlex.split(recorded["command"])[3:], *more]
    results = speculation.run(speculation.parse_options(arguments))
    drafters = {drafter for drafter, _ in expected}
    assert {one["drafter"] for one in results["configurations"]} == drafters
    lower = {}
    for one in results["configurations"]:
        assert one["same_outputs"] == one["outputs"], one["drafter"]
        if one["drafter"] != "none":
            length = one["acceptance_length"]["mean"]
            wanted = expected[one["drafter"], one["length"]]
            print(f"{one['drafter']}, {one['length']} drafts: {length:.4f}, recorded {wanted:.4f}")
            if length < MIN_RATIO * wanted:
                lower[one["drafter"], one["length"]] = (length, wanted)
    assert lower == {}


@pytest.mark.full
def test_acceptance_lengths_of_demo_model_do_not_decrease():
    check_acceptance("acceptance", "--lengths", "3")


@pytest.mark.full
def test_acceptance_lengths_of_smollm_do_not_decrease(monkeypatch):
    if not cache_folder().is_dir():
        pytest.skip(f"{cache_folder()} does not exist; create it with graft demo --llm")
    monkeypatch.chdir(ROOT)  # the command names a drafter in the repository
    check_acceptance("acceptance_smollm")
