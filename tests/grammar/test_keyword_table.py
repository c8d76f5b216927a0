"""The list of what is enforced and what is refused says what the router does today."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft.grammar.schema.enforcement import ENFORCEMENT
from graft.tools import keyword_table
from graft.tools.keyword_table import EXAMPLES, document, examples_table, main, suite_table

pytest.importorskip("llguidance")

WRITTEN = Path(__file__).parents[2] / "grammar" / "REFUSALS.md"


def test_the_table_of_keywords_is_current():
    """Routing every example again gives the table that is written down."""
    assert examples_table() in WRITTEN.read_text(encoding="utf-8"), (
        "run: python -m graft.tools.keyword_table --suite ... --write grammar/REFUSALS.md"
    )


def test_the_table_of_the_official_suite_is_current(shared_data):
    """Routing the suite's groups again gives the list of refusals that is written down."""
    path = shared_data / "json-schema-test-suite" / "draft7.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no test suite at {path}")
    assert suite_table(path) in WRITTEN.read_text(encoding="utf-8")


def test_every_keyword_that_backends_know_has_an_example():
    """No keyword of the preflight's tables is missing from the list, save its twins."""
    known = {keyword for levels in ENFORCEMENT["xgrammar"].values() for keyword in levels}
    shown = {keyword for keyword, *_ in EXAMPLES}
    assert known - shown <= {"then", "else", "minContains", "maxContains", "$recursiveRef"}


def test_the_tool_writes_the_document(tmp_path, capsys, monkeypatch):
    """With --write into a file, else to standard output; without the suite its part is absent."""
    monkeypatch.setattr(keyword_table, "EXAMPLES", EXAMPLES[:3])
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed == document(None) and "official test suite" not in printed
    assert main(["--write", str(tmp_path / "out.md")]) == 0
    assert (tmp_path / "out.md").read_text() == printed
