"""The statistics have power: kernels with one rule broken are caught by the very same check."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace

import pytest
import reference_round as ref
from engine_util import ROUND, UNEVEN, swap_text
from table_model import COVERING, NUCLEUS, PLAIN, TREE, Case, wrong_twice

from graft.sampling import loading, sampler, tree


@dataclass(frozen=True)
class Mutant:
    """A wrong kernel: in ``file``, each old text (which must occur once) becomes the new one."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    case: Case
    samples: int = 40_000


FOREST = Case(6, PLAIN, verify=ref.TRAVERSAL, masked=False, sharp=True, tree=TREE)
MUTANTS = [
    Mutant("one random number for draft and coin", "philox.cuh",
        (("#define PURPOSE_COIN 2u", "#define PURPOSE_COIN PURPOSE_DRAFT"),),
        Case(3, PLAIN, masked=False)),
    Mutant("one random number for coin and residual", "philox.cuh",
        (("#define PURPOSE_RESIDUAL 3u", "#define PURPOSE_RESIDUAL PURPOSE_COIN"),),
        Case(3, PLAIN, verify=ref.PER_TOKEN, masked=False), 200_000),
    Mutant("one random number for draft and residual", "philox.cuh",
        (("#define PURPOSE_RESIDUAL 3u", "#define PURPOSE_RESIDUAL PURPOSE_DRAFT"),),
        Case(3, PLAIN, masked=False)),
    Mutant("random numbers by position alone, as if nothing had been looked at", "philox.cuh",
        (("static_cast<unsigned int>(noise.turn)", "0u"),),
        Case(4, PLAIN, masked=False, sharp=True)),
    Mutant("the first draft that fails ends the chain", "verify.cu",
        (("} else if (slot.verify == VERIFY_PER_TOKEN) {", "} else {"),),
        Case(4, PLAIN, masked=False, sharp=True)),
    Mutant("what is left of p, not of P p", "verify.cu",
        (("const Left left = {weights[j], p,", "const Left left = {1.0f, p,"),),
        Case(4, PLAIN, masked=False, sharp=True)),
    Mutant("end of a chain as if it went on", "verify.cu",
        (("float win = weight;", "float win = fmul(weight, weight);"),),
        Case(4, PLAIN, masked=False, sharp=True)),
    Mutant("refused draft not removed from p", "verify.cu",
        (("noise, scratch, left);", "noise, scratch, [p](int i) { return p[i]; });"),),
        Case(1, PLAIN, masked=False)),
    Mutant("refused point draft not removed from p", "row.cuh",
        ((" || (!q && id == draft)", ""),),
        Case(3, PLAIN, forced="beside")),
    Mutant("illegal draft cut instead of refused", "verify.cu",
        (("noise, scratch, left);",
          "noise, scratch, [=](int i) { return p[slot.drafts[j]] > 0.0f ? left(i) : p[i]; });"),),
        Case(1, PLAIN, masked=False)),
    Mutant("mask row off by one", "sample.cu",
        (("mask_of(masks, layout, index, j)", "mask_of(masks, layout, index, j > 0 ? j - 1 : 0)"),),
        Case(2, PLAIN, masked=True, late=True)),
    Mutant("top-p before the mask", "row.cuh",
        (("const bool ok = legal<MAPPED>(row, word, base + l);",
          "const bool ok = STORE || legal<MAPPED>(row, word, base + l);"),
         ("    if (word == 0u) {", "    if (word == 0u && !STORE) {"),
         ("      if (!legal<MAPPED>(row, word, column) || order_key",
          "      if ((!STORE && !legal<MAPPED>(row, word, column)) || order_key"),
         ("    row_normalise(w, {meeting.end, meeting.floor, meeting.sum}, own);",
          "    const Cut cut = {meeting.end, meeting.floor, 0};\n    u64 kept = 0;\n"
          "    for (int i = 0; i < row.size; ++i) {\n"
          "      if (!legal<false>(row, legal_word<false>(row, i & ~31), i)) work[i] = 0.0f;\n"
          "      if (work[i] > 0.0f && cut.keeps(w, i)) kept += fixed_point(work[i]);\n    }\n"
          "    row_normalise(w, {cut.end, cut.floor, kept}, own);")),
        Case(3, NUCLEUS, point=True, masked=False)),
    Mutant("drafts drawn before the filters of their table", "sample.cu",
        (("    if (d2t) token = d2t[token];",
          "    const auto flat = [table](int i) { return table[i] > 0.0f ? 1.0f : 0.0f; };\n"
          "    if (!greedy) token = draw_column(draft_vocab, d2t, noise, scratch, flat);"),),
        Case(2, PLAIN, masked=True, late=True)),
    Mutant("bonus after a stop id", "verify.cu",
        (("while (j > 0 && reason == REASON_NONE);", "while (j > 0 && reason != REASON_LENGTH);"),),
        Case(2, NUCLEUS, masked=True, stop_ids=(3, 6))),
    Mutant("what a node's children leave of its law as if it still summed up to 1", "traverse.cu",
        (("if (sum > 0) nodes[u].whole = win;", ""),),
        FOREST),
    Mutant("siblings tested as if none had been drawn before them", "traverse.cu",
        (("if (column >= 0) table_of(node)[column] = 0.0f;", ""),),
        FOREST),
    Mutant("trees tested with random numbers by row alone", "philox.cuh",
        (("static_cast<unsigned int>(noise.turn)", "0u"),),
        FOREST),
    Mutant("nodes that draw with one noise", "tree.cu",
        (("draws ? slot.n + node + 1 : position", "slot.n + 1"),),
        FOREST),
    Mutant("a table as if all of it were legal", "traverse.cu",
        (("const u32* mask = masked ?", "const u32* mask = masked && b < 0 ?"),),
        replace(FOREST, masked=True, sharp=False)),
]  # fmt: skip


#: Kernels that a mutated file changes; the others are taken as they are.
USED_BY = {
    "philox.cuh": {"verify", "sample", "tree", "traverse"},
    "row.cuh": {"sample", "verify", "traverse"}, "verify.cu": {"verify"}, "sample.cu": {"sample"},
    "traverse.cu": {"traverse"}, "tree.cu": {"tree"},
}  # fmt: skip


@pytest.mark.parametrize("mutant", [
    pytest.param(mutant, marks=pytest.mark.full if "residual" in mutant.name else (),
                 id=mutant.name.replace(" ", "-")) for mutant in MUTANTS])
def test_a_broken_rule_is_caught(device, stream, tmp_path, monkeypatch, mutant):
    """The law is missed at p < .001 on both sets of seeds, in a case that the right kernels pass
    with more samples."""
    assert mutant.case in COVERING
    folder = tmp_path / "kernels"
    shutil.copytree(loading.KERNELS, folder)
    text = (folder / mutant.file).read_text()
    for old, new in mutant.edits:
        assert text.count(old) == 1, f"{mutant.file} has {text.count(old)} of {old!r}"
        text = text.replace(old, new)
    (folder / mutant.file).write_text(text)

    def load(device, name, block):
        if name not in USED_BY[mutant.file]:
            return loading.load(device, name, block)
        return device.load(folder / f"{name}.cu", defines={"SAMPLE_BLOCK": str(block)})

    monkeypatch.setattr(sampler, "load", load)
    monkeypatch.setattr(tree, "load", load)
    wrong, values = wrong_twice(device, stream, mutant.case, mutant.samples)
    assert wrong, f"the mutant passed: p-values {values}"


def test_places_by_what_was_drafted_are_caught(device, stream, tmp_path, monkeypatch):
    """A first draft may have no place because of its own token: no law is followed then."""
    swap_text(monkeypatch, tmp_path, ROUND, UNEVEN[0],
              "const float reach = slot.drafts[0] & 1 ? 1.0f : 0.0f;")
    (case,) = (case for case in COVERING if case.placed and case.sharp)
    wrong, values = wrong_twice(device, stream, case, 40_000)
    assert wrong, f"the mutant passed: p-values {values}"
