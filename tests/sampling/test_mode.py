"""Draft modes: values of ``DRAFT_MODE_*`` and derived sizes."""

from __future__ import annotations

from graft.sampling.mode import MASKINGS, TREE_CANDIDATES, DraftMode


def test_draft_mode_values_are_distinct():
    """Each combination of draft kind and masking has a different ``DRAFT_MODE_*`` value."""
    modes = [DraftMode(drafts=3)]
    for branch in (1, 2):
        for masking in MASKINGS:
            candidates = TREE_CANDIDATES if "probe" in masking else 0
            if (branch, masking) != (2, "fill"):
                modes.append(
                    DraftMode(
                        drafts=3, levels=3, branch=branch, masking=masking, candidates=candidates
                    )
                )
    assert sorted(mode.value for mode in modes) == list(range(8))


def test_draft_mode_sizes():
    chain = DraftMode.chain(5, "probe", 16)
    assert (chain.kind, chain.levels, chain.fed_nodes, chain.recorded_drafts) == ("chain", 5, 0, 5)
    assert (chain.candidate_words, chain.answer_words, chain.tables) == (16, 0, 5)
    tree = DraftMode(drafts=7, levels=4, branch=3, masking="probe", candidates=TREE_CANDIDATES)
    assert (tree.kind, tree.grows_tree, tree.fed_nodes, tree.recorded_drafts) == (
        "tree",
        True,
        9,
        9,
    )
    assert (tree.candidate_words, tree.answer_words, tree.tables) == (96, 3, 1)
    lattice = DraftMode(drafts=7, levels=4, branch=3, masking="lattice-probe", candidates=8)
    assert (lattice.grows_tree, lattice.is_lattice, lattice.recorded_drafts) == (False, True, 7)
    assert (lattice.candidate_words, lattice.answer_words, lattice.tables) == (64, 14, 4)
    assert DraftMode.chain(0) == DraftMode(drafts=0)
