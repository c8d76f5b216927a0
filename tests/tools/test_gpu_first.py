"""Tests of the GPU measurement (graft.tools.gpu_first) with small sizes."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest

from graft.grammar.errors import GrammarError
from graft.tools.gpu_first import __main__ as gpu_first
from graft.tools.gpu_first import model
from graft.tools.gpu_first.sections import SECTIONS

#: Program of a section that writes one measured value. A test appends the statement that ends it.
SECTION_PROGRAM = """
import json, os, sys, time
with open(sys.argv[1], "w") as file:
    file.write(json.dumps({"name": "x", "measured": 3.0, "unit": "us", "predicted": [1, 2],
                           "note": ""}) + "\\n")
print("the last line", flush=True)
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [("os.abort()", "exit status -6"), ("time.sleep(600)", "timed out after 3 s")],
)
def test_gpu_first_keeps_figures_of_section_that_crashes_or_hangs(tmp_path, ending, status):
    path = tmp_path / "figures"
    command = [sys.executable, "-c", SECTION_PROGRAM + ending, str(path)]
    result = gpu_first.run_section(command, path, 3.0)
    assert result["status"] == status
    assert "the last line" in result["output"]
    assert gpu_first.figure_rows(result["figures"]) == [("x", "1 to 2", "3 us", "2.00", "")]


def test_gpu_first_runs_sections_in_processes(device, tmp_path, capsys):
    path = tmp_path / "out.json"
    names = [name for name in SECTIONS if name not in ("rounds", "suite")]
    options = [
        "--small",
        "--minutes",
        "30",
        "--json",
        str(path),
        "--sections",
        *names,
    ]
    assert gpu_first.main(options) == 0
    report = json.loads(path.read_text())
    assert report["device"] == device.describe()
    assert list(report["sections"]) == names
    for name, section in report["sections"].items():
        assert section["status"] == "ok", section
        for figure in section["figures"]:
            # Values may be missing because older GPUs have no programmatic edges, and the soft
            # device has no cuBLAS.
            refused = name == "gaps" and figure["note"].startswith("refused")
            assert figure["measured"] is not None or refused or name == "cublas"
            assert figure["note"] != "0 rows usable"
    printed = capsys.readouterr().out
    assert all(f"\n{name}: ok" in printed for name in names)


def test_gpu_first_skips_sections_without_time_left(tmp_path):
    path = tmp_path / "out.json"
    options = ["--minutes", "0.01", "--json", str(path), "--sections", "gaps"]
    assert gpu_first.main(options) == 0
    assert json.loads(path.read_text())["sections"]["gaps"]["status"] == "no time left"


def test_gpu_first_placeholder_backend_implements_the_protocol():
    """From Python 3.12 on, isinstance checks the members of a protocol with getattr_static."""
    backend = model.UnusedBackend(None)
    for name in ("name", "vocabulary", "compile", "matcher"):
        inspect.getattr_static(backend, name)
    with pytest.raises(GrammarError, match="no grammar backend is installed"):
        backend.compile(None)


@pytest.mark.full
def test_gpu_first_measures_rounds_and_runs_tests(device, tmp_path: Path):
    path = tmp_path / "out.json"
    options = [
        "--small",
        "--minutes",
        "30",
        "--json",
        str(path),
        "--sections",
        "rounds",
        "suite",
    ]
    assert gpu_first.main(options) == 0
    sections = json.loads(path.read_text())["sections"]
    assert {section["status"] for section in sections.values()} == {"ok"}
    names = [figure["name"] for figure in sections["rounds"]["figures"]]
    for batch in (1, 8):
        assert f"batch {batch}, 3 drafts, programmatic: drafting" in names
    assert [figure["measured"] for figure in sections["suite"]["figures"]] == [0]
