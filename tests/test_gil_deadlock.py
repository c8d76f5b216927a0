"""The deadlock of a Python callback against a GIL-holding driver call, and what cures it."""

from __future__ import annotations

import pytest

from graft.tools import gil_deadlock
from graft.tools.gil_deadlock import CASES, Case, Verdict


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_comes_to_what_it_must(case):
    """The deadlock happens under the modelled lock, and each cure alone ends it."""
    verdict = gil_deadlock.play(case)
    assert verdict.outcome == case.expected, verdict.report


def test_both_sides_of_the_deadlock_are_named():
    """The report names the call that holds the GIL, the host function, and Python's stack."""
    (case,) = [case for case in CASES if case.expected == "deadlock"]
    report = gil_deadlock.play(case).report
    assert "is in cuMemAlloc" in report and "GIL HELD" in report
    assert "runs host function" in report and "holding the context lock" in report
    assert "in run_child" in report


def test_an_unexpected_verdict_fails_the_tool(monkeypatch, capsys):
    """The exit status is 1 as soon as one verdict is not the expected one."""
    wrong = Case("wrong", "python", False, 0, "deadlock", "")
    monkeypatch.setattr(gil_deadlock, "CASES", (wrong,))
    monkeypatch.setattr(gil_deadlock, "play", lambda case: Verdict(case, "finished", 0.1, ""))
    assert gil_deadlock.main([]) == 1
    assert "EXPECTED deadlock" in capsys.readouterr().out
