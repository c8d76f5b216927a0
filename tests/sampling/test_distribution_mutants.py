"""The statistical tests detect kernels in which one rule is broken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference_round as ref
from engine_util import ROUND, UNEVEN_DRAFTS, patch_kernel_source
from table_model import COVERING, NUCLEUS, PLAIN, Case, wrong_twice

CHAIN = Case(3, PLAIN, masked=False)
SHARP = Case(4, PLAIN, masked=False, sharp=True)
ALONE = Case(1, PLAIN, masked=False)
LATE = Case(2, PLAIN, masked=True, late=True)
#: File (of the sampling kernels, or a path), text that occurs once in it, replacement, and a case
#: that detects the change.
MUTANTS = {
    "same random numbers for drafts and acceptance tests": (
        "philox.cuh",
        "#define PURPOSE_COIN 2u",
        "#define PURPOSE_COIN PURPOSE_DRAFT",
        CHAIN,
    ),
    "same random numbers for acceptance tests and residual": (
        "philox.cuh",
        "#define PURPOSE_RESIDUAL 3u",
        "#define PURPOSE_RESIDUAL PURPOSE_COIN",
        Case(3, PLAIN, verify=ref.PER_TOKEN, masked=False),
    ),
    "same random numbers for drafts and residual": (
        "philox.cuh",
        "#define PURPOSE_RESIDUAL 3u",
        "#define PURPOSE_RESIDUAL PURPOSE_DRAFT",
        CHAIN,
    ),
    "random numbers by position only, reused by the next round": (
        "philox.cuh",
        "static_cast<unsigned int>(noise.round)",
        "0u",
        SHARP,
    ),
    "first failed test ends the chain in block verification": (
        "verify.cu",
        "} else if (slot.verify == VERIFY_PER_TOKEN) {",
        "} else {",
        SHARP,
    ),
    "residual without the weight of the chain": (
        "verify.cu",
        "const Residual residual = {weights[j], p,",
        "const Residual residual = {1.0f, p,",
        SHARP,
    ),
    "wrong acceptance probability at the end of the chain": (
        "verify.cu",
        "float win = weight;",
        "float win = fmul(weight, weight);",
        SHARP,
    ),
    "residual includes the rejected draft": (
        "verify.cu",
        "noise, scratch, residual);",
        "noise, scratch, [p](int i) { return p[i]; });",
        ALONE,
    ),
    "residual includes a rejected point-mass draft": (
        "row.cuh",
        " || (!q && id == draft)",
        "",
        Case(3, PLAIN, forced=True),
    ),
    "illegal draft cut instead of rejected": (
        "verify.cu",
        "noise, scratch, residual);",
        "noise, scratch, [=](int i) { return p[slot.drafts[j]] > 0.0f ? residual(i) : p[i]; });",
        ALONE,
    ),
    "mask row off by one": (
        "sample.cu",
        "mask_of(masks, layout, index, j)",
        "mask_of(masks, layout, index, j > 0 ? j - 1 : 0)",
        LATE,
    ),
    "drafts not sampled from their stored table": (
        "sample.cu",
        "    if (d2t) token = d2t[token];",
        "    const auto flat = [table](int i) { return table[i] > 0.0f ? 1.0f : 0.0f; };\n"
        "    if (!greedy) token = draw_column(draft_vocab, d2t, noise, scratch, flat);",
        LATE,
    ),
    "bonus after a stop id": (
        "verify.cu",
        "while (j > 0 && reason == REASON_NONE);",
        "while (j > 0 && reason != REASON_LENGTH);",
        Case(2, NUCLEUS, masked=True, stop_ids=(3, 6)),
    ),
    "forward rows assigned by the token of the draft": (
        ROUND,
        UNEVEN_DRAFTS[0],
        "const float accept_prob = slot.drafts[0] & 1 ? 1.0f : 0.0f;",
        replace(SHARP, placed=True),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.full
def test_distribution_test_detects_broken_kernel(device, stream, monkeypatch, name):
    """The distribution test fails for each broken kernel, with p < 0.001 on two sets of seeds.

    Correct kernels pass the same case.
    """
    file, old, new, case = MUTANTS[name]
    assert case in COVERING
    patch_kernel_source(monkeypatch, file if "/" in file else f"sampling/kernels/{file}", old, new)
    samples = 200_000 if case.verify == ref.PER_TOKEN else 40_000
    wrong, values = wrong_twice(device, stream, case, samples)
    assert wrong, f"the mutant passed: p-values {values}"
