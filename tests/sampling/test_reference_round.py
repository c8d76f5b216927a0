"""The reference implementation, compared with sequential decoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import reference_round as ref
from table_model import MIXED, V, make_table

GREEDY = ref.Filter(0.0)
PLAIN = ref.Filter(1.0)


def grow(rng, slot: ref.Slot, nodes: int) -> None:
    """Add up to `nodes` random drafts to a slot's tree."""
    for _ in range(nodes):
        node = int(rng.integers(len(slot.tree.token)))
        token = int(rng.integers(V))
        if ref.may_grow(slot, node) and slot.tree.child(node, token) is None:
            slot.tree = slot.tree.grow(node, token)


@pytest.mark.parametrize("f", [GREEDY, PLAIN, MIXED], ids=["greedy", "plain", "mixed"])
@pytest.mark.parametrize("stop_ids", [(), (3, 6)], ids=["endless", "stop"])
def test_reference_trees_do_not_change_greedy_and_coupled_tokens(f, stop_ids):
    """Decoding with random trees yields the same tokens as decoding without drafts.

    The trees have illegal nodes and late rows. Siblings and deep nodes are accepted in some rounds.
    """
    table = make_table(17)
    rng = np.random.default_rng(5)
    start = ref.Slot(
        n=5, tree=ref.chain(1), limit=15, filter=f, verify=ref.COUPLED, stop_ids=stop_ids
    )
    accepted: Counter = Counter()

    def decode(seed: int, nodes: int) -> tuple[list[int], int]:
        slot = replace(start, seed=seed)
        tokens = [0, 1]
        reason = ref.RUNNING
        while slot.active:
            slot.tree = ref.chain(slot.last)
            grow(rng, slot, nodes)
            paths = [(*tokens, *slot.tree.path(j))[-2:] for j in range(len(slot.tree.token))]
            rows = []
            for j, path in enumerate(paths):
                is_late = nodes > 0 and rng.random() < 0.1
                has_wrong_epoch = nodes > 0 and rng.random() < 0.05
                state = ref.NOT_READY if is_late else ref.READY
                position = slot.n + len(slot.tree.path(j))
                epoch = slot.epoch + has_wrong_epoch
                rows.append(ref.MaskRow(state, epoch, position, table.legal[path]))
            logits = np.stack([table.target[path] for path in paths])
            outcome = ref.verify(slot, logits, rows, V)
            tokens += outcome.tokens
            accepted[outcome.accepted] += nodes
            reason = outcome.reason
        return tokens, reason

    for seed in range(25):
        assert decode(seed, 14) == decode(seed, 0), seed
    assert accepted[0] and accepted[1] and accepted[2]


@pytest.mark.parametrize("verify", [ref.REJECTION, ref.PER_TOKEN], ids=["block", "per-token"])
def test_rejection_sampling_uses_no_random_number_twice(monkeypatch, verify):
    """No random number is used twice in a request.

    Block verification also reads the numbers of the drafts after the last accepted one, so the next
    round must use others.
    """
    rng = np.random.default_rng(12)
    k = 3
    vocab = 41
    used: list[tuple] = []
    original = ref.words

    def spy(seed, position, purpose, ids, *rest):
        used.append((seed, position, purpose, *rest))
        return original(seed, position, purpose, ids, *rest)

    monkeypatch.setattr(ref, "words", spy)
    everything = [ref.MaskRow(ref.FREE, 1, 0, detail=1)] * (k + 1)
    for seed in range(4):
        slot = ref.Slot(n=5, tree=ref.chain(0), limit=40, seed=seed, verify=verify)
        while slot.active:
            ref.verify(slot, rng.normal(0, 2, (k + 1, vocab)), everything, vocab)
            for j in range(1, k + 1):
                ref.draft(slot, j, rng.normal(0, 2, vocab), None, vocab, None, vocab)
    assert len(used) == len(set(used)) > 250
