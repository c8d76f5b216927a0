"""The first measurements on a GPU: every section runs, and none takes others with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from graft.tools.gpu_first import __main__ as gpu_first
from graft.tools.gpu_first.sections import SECTIONS

DIES = """
import json, os, sys, time
with open(sys.argv[1], "w") as file:
    file.write(json.dumps({"what": "x", "measured": 3.0, "unit": "us", "predicted": [1, 2],
                           "note": ""}) + "\\n")
print("the last word", flush=True)
"""


@pytest.mark.parametrize(
    ("end", "said"), [("os.abort()", "exit status -6"), ("time.sleep(600)", "not over in 3 s")]
)
def test_a_section_that_dies_or_hangs_keeps_its_figures(tmp_path, end: str, said: str) -> None:
    """What was measured before is kept and tabled, and how it ended is told."""
    lines = tmp_path / "lines"
    done = gpu_first.play([sys.executable, "-c", DIES + end, str(lines)], lines, 3.0)
    assert done["ended"] == said and "the last word" in done["said"]
    assert gpu_first.figure_rows(done["figures"]) == [("x", "1 to 2", "3 us", "2.00", "")]


def test_sections_go_on_behind_one_another(device, tmp_path, capsys) -> None:
    """Small sizes of every section are measured in processes of their own, till time is up."""
    out = tmp_path / "out.json"
    names = [name for name in SECTIONS if name not in ("rounds", "suite")]
    assert (
        gpu_first.main(["--small", "--minutes", "30", "--json", str(out), "--sections", *names])
        == 0
    )
    found = json.loads(out.read_text())
    assert found["device"] == device.describe() and list(found["sections"]) == names
    for name, section in found["sections"].items():
        assert section["ended"] == "ok", section
        figures = {figure["what"]: figure for figure in section["figures"]}
        assert name == "cublas" or all(
            one["measured"] is not None or (name == "gaps" and one["note"].startswith("refused"))
            for one in figures.values()
        )  # an older GPU has no programmatic edges
        assert all(figure["note"] != "0 rows usable" for figure in figures.values())
    printed = capsys.readouterr().out
    assert all(f"\n{name}: ok" in printed for name in names)
    assert gpu_first.main(["--minutes", "0.01", "--json", str(out), "--sections", "gaps"]) == 0
    assert json.loads(out.read_text())["sections"]["gaps"]["ended"] == "no time was left"


@pytest.mark.full
def test_whole_rounds_and_test_files_are_played(device, tmp_path: Path) -> None:
    """Rounds on random weights tell their parts; a test file tells how many failed."""
    out = tmp_path / "out.json"
    assert (
        gpu_first.main(
            ["--small", "--minutes", "30", "--json", str(out), "--sections", "rounds", "suite"]
        )
        == 0
    )
    sections = json.loads(out.read_text())["sections"]
    assert {s["ended"] for s in sections.values()} == {"ok"}
    told = [figure["what"] for figure in sections["rounds"]["figures"]]
    for batch in (1, 8):
        assert f"batch {batch}, 3 drafts, programmatic: drafting" in told
    assert [f["measured"] for f in sections["suite"]["figures"]] == [0.0]
