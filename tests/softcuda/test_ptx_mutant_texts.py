"""The changes of `ptx_mutants.py` apply to the kernels, and PTX.md lists them."""

import re
from pathlib import Path

import pytest
from ptx_mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_text_that_mutant_replaces_occurs_once(mutant):
    for file, old, _ in mutant.changes:
        assert (ROOT / file).read_text().count(old) == 1


def test_page_lists_mutants_with_their_results():
    page = (ROOT / "native" / "softcuda" / "PTX.md").read_text()
    section = page.partition("## Incorrect kernels")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", section, re.MULTILINE)[1:]
    results = [(m.name, m.ptx or "not found", m.host or "not found") for m in MUTANTS]
    assert sorted(rows) == sorted(results)
    found = sum(mutant.host != "" for mutant in MUTANTS)
    assert f"All {len(MUTANTS)} errors" in section and f"and {found} of them" in section
