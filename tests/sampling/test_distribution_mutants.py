"""The statistics have power: kernels with one rule broken are caught by the very same check."""

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
#: A file of the sampling kernels or a whole path, a text that stands in it once, the text instead,
#: and a case that shows it.
MUTANTS = {
    "one random number for draft and coin": (
        "philox.cuh",
        "#define PURPOSE_COIN 2u",
        "#define PURPOSE_COIN PURPOSE_DRAFT",
        CHAIN,
    ),
    "one random number for coin and residual": (
        "philox.cuh",
        "#define PURPOSE_RESIDUAL 3u",
        "#define PURPOSE_RESIDUAL PURPOSE_COIN",
        Case(3, PLAIN, verify=ref.PER_TOKEN, masked=False),
    ),
    "one random number for draft and residual": (
        "philox.cuh",
        "#define PURPOSE_RESIDUAL 3u",
        "#define PURPOSE_RESIDUAL PURPOSE_DRAFT",
        CHAIN,
    ),
    "random numbers by position alone, as if nothing had been looked at": (
        "philox.cuh",
        "static_cast<unsigned int>(noise.round)",
        "0u",
        SHARP,
    ),
    "the first draft that fails ends the chain": (
        "verify.cu",
        "} else if (slot.verify == VERIFY_PER_TOKEN) {",
        "} else {",
        SHARP,
    ),
    "what is left of p, not of P p": (
        "verify.cu",
        "const Residual residual = {weights[j], p,",
        "const Residual residual = {1.0f, p,",
        SHARP,
    ),
    "end of a chain as if it went on": (
        "verify.cu",
        "float win = weight;",
        "float win = fmul(weight, weight);",
        SHARP,
    ),
    "refused draft not removed from p": (
        "verify.cu",
        "noise, scratch, residual);",
        "noise, scratch, [p](int i) { return p[i]; });",
        ALONE,
    ),
    "refused point draft not removed from p": (
        "row.cuh",
        " || (!q && id == draft)",
        "",
        Case(3, PLAIN, forced=True),
    ),
    "illegal draft cut instead of refused": (
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
    "drafts drawn before the filters of their table": (
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
    "a first draft that has no place because of its own token": (
        ROUND,
        UNEVEN_DRAFTS[0],
        "const float accept_prob = slot.drafts[0] & 1 ? 1.0f : 0.0f;",
        replace(SHARP, placed=True),
    ),
}


#: Words in the names of those that others are much like, or that need many samples.
LONG = ("residual", "row alone", "position alone", "children", "went on", "instead of refused")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if any(word in name for word in LONG) else ())
        for name in MUTANTS
    ],
)
def test_a_broken_rule_is_caught(device, stream, tmp_path, monkeypatch, name):
    """The law is missed at p < .001 on both sets of seeds, in a case that the right kernels pass
    with as many samples."""
    file, old, new, case = MUTANTS[name]
    assert case in COVERING
    patch_kernel_source(
        monkeypatch, tmp_path, file if "/" in file else f"sampling/kernels/{file}", old, new
    )
    samples = 200_000 if case.verify == ref.PER_TOKEN else 40_000
    wrong, values = wrong_twice(device, stream, case, samples)
    assert wrong, f"the mutant passed: p-values {values}"
