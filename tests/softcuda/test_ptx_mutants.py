"""Incorrect kernels: the tests find each on PTX, and many only there."""

from __future__ import annotations

import pytest
from ptx_mutants import MUTANTS
from ptx_mutation import HOST, PTX, Mutant, changed_sources, run_test

from graft.cudagraph.kernels import nvrtc

pytestmark = [
    pytest.mark.ptx,
    pytest.mark.skipif(nvrtc.missing_compiler() != "", reason="NVRTC is not installed"),
]


def name_of(mutant: Mutant) -> str:
    return mutant.name


@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_ptx_finds_mutant(mutant):
    folder = changed_sources(*mutant.changes)
    found, text = run_test(mutant.test, folder, limit=120, **PTX)
    changed = [file for file, _, _ in mutant.changes if file.endswith(".cu")]
    assert all(f"loaded {file}" in text for file in changed), text[-2000:]
    assert found == mutant.ptx, text[-2000:]


@pytest.mark.parametrize("test", sorted({mutant.test for mutant in MUTANTS}))
def test_unchanged_kernels_pass_tests_of_mutants(test):
    found, text = run_test(test, limit=120, **PTX)
    assert found == "", text[-2000:]


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_host_form_finds_mutant_as_documented(mutant):
    if "not initialised" in mutant.name:
        pytest.skip("the values of uninitialised variables depend on the compiler")
    folder = changed_sources(*mutant.changes)
    found, text = run_test(mutant.test, folder, limit=120, **HOST)
    assert found == mutant.host, text[-2000:]
