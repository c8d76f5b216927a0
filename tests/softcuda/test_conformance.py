"""The conformance table of the soft device: complete, and every answer the documented one."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft.tools import conformance
from graft.tools.conformance_calls import calls
from graft.tools.conformance_child import STATES, split, wrong

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def answers():
    """Every function, called in every state."""
    return conformance.collect()


def test_every_answer_is_the_documented_one(answers):
    """Right and wrong arguments, and every state of the driver: no answer differs."""
    differing = [a for a in answers if not a.right]
    assert differing == []


def test_every_function_of_the_driver_is_in_the_table(answers):
    """What cuGetProcAddress knows is called; each form rightly and at least once wrongly."""
    functions = conformance.by_function(answers)
    assert {name.split("@")[0] for name in functions} == set(conformance.exported())
    for name, own in functions.items():
        assert sum(a.behaviour == "right arguments" for a in own) == 1, name
        always = {"cuInit", "cuGetExportTable"}
        assert name in always or any(a.expected not in ("SUCCESS", "NOT_SUPPORTED") for a in own), (
            name
        )
    assert {a.state for a in answers} == set(STATES)


def test_absent_functions_are_not_found(answers):
    """Nothing pretends: what is not in the table cannot be looked up."""
    absent = {a.function for a in answers if a.state == "absent"}
    assert len(absent) > 200 and {"cuMemCreate", "cuTexObjectCreate"} <= absent
    assert not absent & set(conformance.exported())


def test_the_committed_table_is_of_these_functions(answers):
    """The page beside the other results has a line for each function, and no wrong answer."""
    page = (ROOT / "tools" / "results" / "softcuda_conformance.md").read_text()
    assert ", 0 answers other than documented" in page
    for call in calls():
        assert f"| {call.name} | {call.expected} |" in page, f"{call.name}: make the page anew"


def test_tables_tell_what_was_answered():
    """A wrong answer is counted, and the page shows what was got."""
    own = [conformance.Answer(call.name, "arguments", "right arguments", "SUCCESS", "SUCCESS")
           for call in calls()]  # fmt: skip
    bad = conformance.Answer("cuInit", "arguments", "1 for 0 (argument 1)", "INVALID_VALUE",
                             "SUCCESS")  # fmt: skip
    page = conformance.to_markdown([*own, bad])
    assert "1 answers other than documented" in page
    assert "| cuInit | SUCCESS | SUCCESS: 1 for 0 (1) |" in page


def test_parameters_are_read_as_written():
    """Marks of the table: wrong integers, optional results, other codes."""
    assert list(wrong("0|4:NOT_SUPPORTED|9")) == [
        ("4 for 0", 4, "NOT_SUPPORTED"), ("9 for 0", 9, "INVALID_VALUE"),
    ]  # fmt: skip
    assert list(wrong("out?")) == [] and split("out?") == ("out", "", True)
    assert [row[2] for p in ("stream", "dev", "graph~INVALID_VALUE") for row in wrong(p)] == [
        "INVALID_HANDLE", "INVALID_DEVICE", "INVALID_VALUE",
    ]  # fmt: skip
