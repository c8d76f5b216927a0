"""Sampling of draft chains, compared with the reference."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import reference_round as ref
from test_verify import FORGED, add_drafts, forged_row, random_slot

from graft.sampling.mode import DraftMode

V = 45
K = 3
SLOTS = 16
MOST = 5


def random_row(rng: np.random.Generator, slot: ref.Slot, j: int) -> ref.MaskRow:
    """Return mask row j of a slot: ready, late, dead, forged_row or with a forced token."""
    legal = rng.random(V) < rng.choice([0.02, 0.5, 1.0])
    if rng.random() < 0.15:
        return forged_row(slot, j, str(rng.choice(list(FORGED))), legal)
    state = int(rng.choice([ref.FREE, ref.DEAD_END, ref.ERROR])) if rng.random() < 0.1 else 2
    detail = int(rng.integers(0, V)) if state == ref.READY and rng.random() < 0.1 else 0
    return ref.MaskRow(state, slot.epoch, slot.n + j, legal, detail)


MASKING = {"unmasked": "none", "masked": "fill", "probed": "probe"}


@pytest.mark.parametrize("mapped", [False, True], ids=["same", "pruned"])
@pytest.mark.parametrize("how", ["unmasked", "masked", "probed"])
def test_draft_chain_matches_reference(make_round, block, mapped, how):
    """Drafts, kinds, tables, candidates and records match over whole rounds.

    Slots that committed nothing do not change. A probed draft is the answer; if no candidate is
    legal, it is the best token of the mask row; without an answer to this probe there is none.
    Requests without a grammar are sampled.
    """
    rng = np.random.default_rng(100 + 2 * mapped + len(how))
    d2t = None
    if mapped:
        d2t = np.sort(rng.choice(V, 30, replace=False)).astype(np.int32)
        d2t[-1] = V + 3  # a broken map entry is illegal, never an address
    ids = np.arange(V) if d2t is None else d2t
    limit = V - 2
    probed = how == "probed"
    r = make_round(
        slots=SLOTS,
        mode=DraftMode.chain(K, MASKING[how], MOST if probed else 0),
        vocab=V,
        token_limit=limit,
        d2t=d2t,
        block=block,
    )
    seen: Counter = Counter()

    def probe(i: int, s: ref.Slot, j: int, logits: np.ndarray) -> tuple[int, ref.MaskRow]:
        """Check the candidates of a slot and answer randomly; return the answer and row j - 1."""
        asked = r.exchange.candidates[i]
        row = random_row(rng, s, j - 1)
        drafting = moved[i] and ref.is_drafting(s, j)
        wanted = ref.candidates(s, j, logits, ids, limit)[:MOST] if drafting else []
        assert (tuple(asked[:2]) == (r.replay, j)) == bool(wanted)
        if not wanted:
            return -1, row
        assert asked[2 : 3 + len(wanted)].tolist() == [len(wanted), *wanted]
        outcome = str(rng.choice(["answer", "miss", "silent", "replay before", "draft before"]))
        seen[outcome] += 1
        late = ref.MaskRow(ref.NOT_READY, s.epoch, s.n + j - 1)
        old = {"replay before": (r.replay - 1, j), "draft before": (r.replay, j - 1)}
        if outcome != "silent":
            answer = int(rng.choice(wanted)) if outcome != "miss" else -1
            r.exchange.answer[i] = (*old.get(outcome, (r.replay, j)), answer)
        return (answer if outcome == "answer" else -1), (row if outcome == "miss" else late)

    for _ in range(6):
        slots = [random_slot(rng, V, 5) for _ in range(SLOTS)]
        for s in slots:  # at most one of these is verified
            add_drafts(rng, s, rng.normal(0, 2, (K, V)), np.isin(np.arange(V), ids))
        free = [probed and i % 4 == 0 for i in range(SLOTS)]  # without a grammar
        rows = [
            [
                ref.MaskRow(
                    ref.FREE if rng.random() < 0.9 else ref.NOT_READY, s.epoch, s.n, detail=f
                ),
                *[ref.MaskRow(ref.NOT_READY, s.epoch, s.n)] * K,
            ]
            for s, f in zip(slots, free, strict=True)
        ]
        before = [s.n for s in slots]
        order = rng.permutation(SLOTS)
        r.play(slots, rng.normal(0, 2, (SLOTS, K + 1, V)).astype(np.float32), rows, order)
        moved = [s.n > n for s, n in zip(slots, before, strict=True)]
        for j in range(1, K + 1):
            logits = rng.normal(0, 2, (SLOTS, r.draft_vocab)).astype(np.float32)
            logits[rng.random(logits.shape) < 0.05] = -np.inf
            logits[rng.random(SLOTS) < 0.03, 4] = np.nan
            if probed:
                r.candidates(j, logits[order])
            for i, s in enumerate(slots):
                answer = -1
                row = random_row(rng, s, j - 1)
                if free[i]:
                    row = ref.MaskRow(ref.FREE, s.epoch, 0, detail=1)
                    assert tuple(r.exchange.candidates[i, :2]) != (r.replay, j)
                elif probed:
                    answer, row = probe(i, s, j, logits[i])
                r.write_mask(i, j - 1, row)
                mask = None if how == "unmasked" else row
                if moved[i]:
                    ref.draft(s, j, logits[i], mask, limit, d2t, V, probed=probed, answer=answer)
                    seen["free"] += free[i] and len(s.drafts) == j
            r.draft(j, logits[order])
        r.compare(slots)
        drafted = r.exchange.drafted
        tables = r.sampler.q.to_host()
        for i, s in enumerate(slots):
            count = len(s.drafts)
            seen["stalled"] += count > 0 and not moved[i]
            if moved[i]:
                seen[count] += 1
                assert tuple(drafted[i, : 2 + count]) == (r.replay, count, *s.drafts)
            for j in range(count):
                if s.kinds[j] == ref.DENSE:
                    inside = ids < V
                    wanted = s.q[j][ids[inside]]
                    got = tables[i, j][inside]
                    np.testing.assert_array_equal(got > 0, wanted > 1e-37)
                    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-37)
    assert {*range(K + 1), "stalled"} <= set(+seen)
    if probed:
        names = ("answer", "miss", "silent", "replay before", "draft before", "free")
        assert min(seen[name] for name in names) > 2, seen


@pytest.mark.parametrize("branch", [1, 3])
@pytest.mark.parametrize("mapped", [False, True], ids=["same", "pruned"])
def test_lattice_candidates_match_reference(make_round, block, mapped, branch):
    """The candidates of each level and their probabilities match those of level-by-level probing.

    A level with invalid logits has none. For trees, requests without a grammar get candidates.
    """
    rng = np.random.default_rng(5)
    levels = 4
    most = 6
    d2t = np.sort(rng.choice(V, 30, replace=False)).astype(np.int32) if mapped else None
    ids = np.arange(V) if d2t is None else d2t
    limit = V - 2
    r = make_round(
        slots=SLOTS,
        mode=DraftMode(
            drafts=levels,
            levels=levels,
            branch=branch,
            masking="lattice-probe",
            candidates=most,
        ),
        vocab=V,
        token_limit=limit,
        d2t=d2t,
        block=block,
    )
    seen: Counter = Counter()
    for _ in range(4):
        slots = [random_slot(rng, V, 5) for _ in range(SLOTS)]
        free = [i % 4 == 0 for i in range(SLOTS)]
        rows = [
            [ref.MaskRow(ref.FREE, s.epoch, s.n, detail=f)]
            for s, f in zip(slots, free, strict=True)
        ]
        before = [s.n for s in slots]
        order = rng.permutation(SLOTS)
        r.play(slots, rng.normal(0, 2, (SLOTS, K + 1, V)).astype(np.float32), rows, order)
        logits = rng.normal(0, 2, (levels, SLOTS, r.draft_vocab)).astype(np.float32)
        logits[rng.random(logits.shape) < 0.05] = -np.inf
        logits[rng.random((levels, SLOTS)) < 0.06, 4] = np.nan
        r.candidates(3, logits[:, order].reshape(levels * SLOTS, -1))
        for i, s in enumerate(slots):
            record = r.exchange.candidates[i]
            asked = s.n > before[i] and ref.is_drafting(s, 1) and (branch > 1 or not free[i])
            assert (tuple(record[:2]) == (r.replay, 3)) == asked
            seen["asked"] += asked
            if not asked:
                continue
            count = min(levels, s.limit - s.n - 1)
            assert record[2] == count
            offered = record[3 : 3 + levels * most].reshape(levels, most)
            told = record[3 + levels * most :].view(np.float32)[: levels * most]
            for level, shares in enumerate(told.reshape(levels, most)[:count]):
                wanted = ref.candidates(s, level + 1, logits[level, i], ids, limit)[:most]
                seen["broken"] += not wanted
                assert [*offered[level], -1][: len(wanted) + 1][:most] == [*wanted, -1][:most]
                race = ref.shares(s, level + 1, logits[level, i], ids, limit)
                np.testing.assert_allclose(
                    shares[: len(wanted)], [race[t] for t in wanted], rtol=1e-4, atol=1e-9
                )
    assert seen["asked"] > 20 and seen["broken"] > 1
