"""Tests of trees have power: with one rule of a kernel broken outputs change."""

import pytest
from engine_util import demo_engine, mixed_requests, swap_text

#: What is broken: file, text that stands in it once, text instead.
MUTANTS = {
    "a sibling among a row's ancestors": (
        "models/kernels/round.cu", "tree[r] = used ? path_of(slots[s], j) : 0;",
        "tree[r] = used ? path_of(slots[s], j) | (j > 1 ? 1ull << (j - 2) : 0) : 0;"),
    "the cache compacted one off": (
        "models/kernels/compact.cu", "const int target = row->old_n + i;",
        "const int target = row->old_n + i + 1;"),
    "features left where the tree had them": (
        "models/kernels/compact.cu", "to[e] = of[e];", "to[e] = to[e];"),
    "rows of a tree positioned as those of a chain": (
        "sampling/kernels/adjust.cu", "slots[index].n + depth_of(slots[index], j)",
        "slots[index].n + j"),
    "a stop id on the way ignored": (
        "sampling/kernels/verify.cu", "if (is_stop(slot, token)) {", "if (false) {"),
}  # fmt: skip


def outcome():
    """Tokens, reasons, drafts, fills and desyncs of guided requests whose drafts branch."""
    with demo_engine(draft_length=9, draft_tree=(3, 4), max_batch_size=4) as engine:
        coupled = {"temperature": 1.2, "verify": "coupled", "seed": 4}
        outputs = engine.generate(mixed_requests(4, max_tokens=40, **coupled))
        grammar = engine.counters()["grammar"]
        said = [(o.tokens, o.reason, o.drafted, o.accepted) for o in outputs]
        return said, grammar["fills"], grammar["desyncs"]


@pytest.fixture(scope="module")
def right():
    return outcome()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_of_trees_shows(monkeypatch, tmp_path, right, name):
    """In tokens, in the rounds that they take, or in a grammar that has lost its place."""
    swap_text(monkeypatch, tmp_path, *MUTANTS[name])
    assert outcome() != right
