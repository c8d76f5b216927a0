"""Trees that are drawn from tables, tested leaf by leaf: kernels against the reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import reference_round as ref
from test_verify import random_slot

from graft.cudagraph.errors import OptionError
from graft.sampling.tree import TreePlan, TreeSampler

V = 41
DRAFTS = 9
SLOTS = 24


def draw_tree(
    rng: np.random.Generator,
    s: ref.Slot,
    logits: np.ndarray,
    masks: list[ref.MaskRow],
    known: np.ndarray,
) -> None:
    """A tree of any shape, up to three siblings under a node, drawn near the target's law, from
    what its mask row leaves where the slot is probed; tables hold what it does not leave, too."""
    waiting = [0]
    fed = 0
    while waiting and len(s.drafts) < DRAFTS:
        node = waiting.pop(int(rng.integers(len(waiting))))
        near = np.where(known, np.exp(logits[node] + rng.normal(0, 1.0, V)), 0.0)
        near[rng.random(V) < 0.2] = 0.0
        mask = masks[node].allows(V, V - 2) if s.probed else True
        law = np.where(mask, near, 0.0)
        most = min(int(rng.integers(1, 4)), DRAFTS - len(s.drafts))
        for token in ref.siblings(s, fed, law, most) if law.any() else []:
            ref.keep(s, token, ref.SIBLING + fed, near.astype(np.float32).astype(float), node)
            if token not in s.stop_ids and rng.random() < 0.8:
                waiting.append(len(s.drafts))
        fed += 1


def mask_rows(rng: np.random.Generator, s: ref.Slot) -> list[ref.MaskRow]:
    """Mask rows, some of which are free, late, dead or failed."""
    rows = []
    for _ in range(DRAFTS + 1):
        legal = rng.random(V) < rng.choice([0.1, 0.6, 1.0])
        legal[int(rng.integers(V - 2))] = True
        often = [ref.READY] * 12
        state = int(rng.choice([*often, ref.FREE, ref.NOT_READY, ref.DEAD_END, ref.ERROR]))
        rows.append(ref.MaskRow(state, 1, s.n, legal))
    return rows


@pytest.mark.parametrize("pruned", [False, True], ids=["same", "pruned"])
@pytest.mark.parametrize("probed", [True, False], ids=["probed", "blind"])
def test_traversal_matches_the_reference(make_round, block, probed, pruned):
    """Random trees beside greedy and coupled ones: with filters, masks, rows that are not ready,
    stop ids and limits on the way, what is accepted and the token behind it are the reference's."""
    rng = np.random.default_rng(3)
    d2t = np.sort(rng.choice(V, 30, replace=False)).astype(np.int32) if pruned else None
    known = np.ones(V, bool) if d2t is None else np.isin(np.arange(V), d2t)
    known[V - 2 :] = False
    r = make_round(
        slots=SLOTS,
        draft_length=DRAFTS,
        vocab=V,
        token_limit=V - 2,
        d2t=d2t,
        block=block,
        candidates=8 if probed else 0,
        branch=3,
        tables=DRAFTS + 1,
    )
    seen: Counter = Counter()
    for _ in range(6 if block == 1 else 2):
        logits = rng.normal(0, 2, (SLOTS, DRAFTS + 1, V)).astype(np.float32)
        slots = []
        masks = []
        for i in range(SLOTS):
            s = replace(random_slot(rng, V, 5), verify=ref.TRAVERSAL, epoch=1, probed=probed)
            rows = mask_rows(rng, s)
            draw_tree(rng, s, logits[i], rows, known)
            if s.filter.greedy or i % 6 == 0:
                s.verify = s.verify if s.filter.greedy else ref.COUPLED
                s.kinds = (ref.POINT,) * len(s.drafts)
            rows = [
                ref.MaskRow(row.state, 1, s.n + len(s.tree.path(j)), row.legal)
                if j <= len(s.drafts)
                else row
                for j, row in enumerate(rows)
            ]
            slots.append(s)
            masks.append(rows)
        traversed = [ref.SIBLING in s.kinds for s in slots]
        order = rng.permutation(SLOTS)
        out = r.play(slots, logits, masks, order)
        for b, i in enumerate(order):
            if traversed[i]:
                seen["accepted", int(out["accepted"][b])] += 1
                seen["reason", int(out["reason"][b])] += 1
                seen["no token behind"] += out["count"][b] == out["accepted"][b] > 0
    if block == 1:
        assert {("accepted", n) for n in range(3)} <= set(seen)
        assert {("reason", why) for why in range(5)} <= set(seen) and seen["no token behind"] > 3
    assert r.sampler.faults.to_host()[0] == 0


def test_a_round_without_row_0_leaves_tables_and_drafts(make_round, block):
    """It waits, however often, and then tests what it would have tested at once."""
    logits = np.random.default_rng(0).normal(0, 2, (1, 4, V)).astype(np.float32)
    law = np.full(V, 1.0)
    tokens = []
    for stalls in (0, 2):
        s = ref.Slot(5, ref.chain(1), 40, seed=4, verify=ref.TRAVERSAL)
        for token in ref.siblings(s, 0, law, 3):
            ref.keep(s, token, ref.SIBLING, law, 0)
            logits[0, 0, token] = -9.0
        r = make_round(slots=1, draft_length=3, vocab=V, block=block, branch=3, tables=1)
        r.put(0, s)
        for state in (*[ref.NOT_READY] * stalls, ref.FREE):
            r.write_mask(0, 0, ref.MaskRow(state, 1, 5))
            out = r.verify(logits)
        tokens.append(out["tokens"][0, : out["count"][0]].tolist())
        assert (r.sampler.q.to_host() == 0).sum() == 3 and out["tested"][0] == 3
    wanted = ref.verify(s, logits[0], [ref.MaskRow(ref.FREE, 1, 5)] * 4, V)
    assert tokens[0] == tokens[1] == list(wanted.tokens)


@pytest.mark.parametrize("tree", [(2, 2), [(0,), (2,)], [(0,), (1,), (1, 1)]], ids=str)
def test_trees_that_cannot_be_drawn_are_refused(make_round, tree):
    """Those of the likeliest, and those that leave siblings out; also tables for fewer nodes."""
    plan = TreePlan.of(tree)
    r = make_round(
        slots=1,
        draft_length=4,
        vocab=V,
        branch=plan.branch,
        fed=9,
        tables=1 + (plan.levels - 1) * plan.branch,
    )
    with pytest.raises(OptionError, match="'traversal' needs a draft_tree whose shape is given"):
        TreeSampler(r.sampler, *plan)
    r.sampler.tables += 1
    with pytest.raises(OptionError, match="tables of the sampler"):
        TreeSampler(r.sampler, *plan)
