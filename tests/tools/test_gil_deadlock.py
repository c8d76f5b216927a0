"""The deadlock laboratory: driver calls made with the GIL held against callbacks that want it."""

from __future__ import annotations

import json

import pytest

from graft.tools import gil_deadlock, gil_deadlock_cell
from graft.tools.gil_deadlock import Cell, Verdict, parse_cell
from graft.tools.zygote import Zygote


@pytest.fixture(scope="module")
def zygote():
    """Forks the cells' processes."""
    with Zygote() as made:
        yield made


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
def test_a_cell_comes_to_what_follows_from_its_model(zygote, name, outcome):
    """The verdict is the one that the waiting relations imply, and the tool expects the same."""
    cell = parse_cell(name)
    verdict = gil_deadlock.play(cell, zygote)
    assert verdict.outcome == outcome, verdict.report
    assert gil_deadlock.expected(cell) == outcome
    if outcome == "hangs":
        # Both sides, each with its native stack, and the Python stack of the side that has one.
        waiting, running = verdict.report.split("runs host function")
        assert "is in cuMemAlloc" in waiting and "GIL HELD" in waiting
        assert "cuMemAlloc_v2" in waiting and "in play" in waiting
        assert "holding the context lock" in running and "PyGILState_Ensure" in running


@pytest.mark.full
def test_every_cell_comes_to_what_follows_from_the_models(tmp_path, capsys, monkeypatch):
    """The whole matrix has no unexpected verdict, and is written as a table and as JSON."""
    monkeypatch.setenv("GRAFT_DEVICE", "soft")
    assert gil_deadlock.main(["--json", str(tmp_path / "m.json")]) == 0, capsys.readouterr().out
    said = json.loads((tmp_path / "m.json").read_text())
    cells = len(gil_deadlock.PATTERNS) * len(gil_deadlock.TRANSPORTS) * len(gil_deadlock.MODELS)
    assert said["device"] == "soft" and len(said["cells"]) == cells
    table = capsys.readouterr().out
    assert "released" in table and "hangs" in table and f"{cells} cells, 0 unexpected" in table


def test_an_unexpected_verdict_fails_the_tool(monkeypatch, capsys):
    """The exit status is 1 as soon as one verdict is not the expected one."""
    monkeypatch.setenv("GRAFT_DEVICE", "soft")
    monkeypatch.setattr(gil_deadlock, "play_all", lambda cells, soft, jobs: [
        Verdict(cell, "completes", gil_deadlock.expected(cell), 0.1, "") for cell in cells])
    assert gil_deadlock.main(["--cell", "alloc:native:1"]) == 0
    assert gil_deadlock.main(["--cell", "alloc:python:1"]) == 1
    assert "EXPECTED hangs" in capsys.readouterr().out


def test_a_cell_without_its_package_says_so(monkeypatch, capsys):
    """What cannot run is no failure: the table names the package that is missing."""
    monkeypatch.setattr(gil_deadlock_cell.importlib.util, "find_spec", lambda name: None)
    verdict = gil_deadlock.play(Cell("alloc", "cuda.core", 1), None)
    assert verdict.as_expected
    assert "pip install cuda-core" in gil_deadlock.table([verdict])


def test_wrong_cells_are_refused(capsys):
    """A cell that does not exist is a usage error."""
    for name in ("alloc", "alloc:python", "alloc:telepathy:1", "sleep:python:1", "alloc:python:x"):
        with pytest.raises(SystemExit) as stop:
            gil_deadlock.main(["--cell", name])
        assert stop.value.code == 2
    assert "--cell" in capsys.readouterr().err
