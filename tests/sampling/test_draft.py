"""Sampling of draft chains, compared with the reference."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import reference_round as ref
from reference_trees import candidates, shares
from test_verify import FORGED, add_drafts, forged_row, random_adjustment, random_slot

from graft.sampling.mode import DraftMode

V = 45
K = 3
SLOTS = 16
MAX_CANDIDATES = 5
MASKING = {"unmasked": "none", "masked": "fill", "probed": "probe"}
#: What a test's grammar does with a probe: accept a candidate, accept none, not answer, or answer a
#: previous replay or a previous draft.
PROBE_OUTCOMES = ("answer", "miss", "silent", "previous replay", "previous draft")


def random_row(rng: np.random.Generator, slot: ref.Slot, j: int) -> ref.MaskRow:
    """Return a random mask row j of a slot.

    In most cases the row is ready. It may be free, a dead end or failed, it may have the stamp of
    another row, or it may force a token.
    """
    legal = rng.random(V) < rng.choice([0.02, 0.5, 1.0])
    if rng.random() < 0.15:
        name = str(rng.choice(list(FORGED)))
        return forged_row(slot, j, name, legal)
    state = ref.READY
    if rng.random() < 0.1:
        state = int(rng.choice([ref.FREE, ref.DEAD_END, ref.ERROR]))
    detail = 0
    if state == ref.READY and rng.random() < 0.1:
        detail = int(rng.integers(0, V))
    return ref.MaskRow(state, slot.epoch, slot.n + j, legal, detail)


def random_vocabulary(rng: np.random.Generator) -> np.ndarray:
    """Return the target ids of a drafter's columns. The last one is invalid."""
    d2t = np.sort(rng.choice(V, 30, replace=False)).astype(np.int32)
    d2t[-1] = V + 3  # an invalid map entry makes the column illegal
    return d2t


def check_tables(slot: ref.Slot, tables: np.ndarray, ids: np.ndarray) -> None:
    """Assert that the stored distributions of a slot's sampled drafts match the reference."""
    inside = ids < V
    for j, kind in enumerate(slot.kinds):
        if kind != ref.DENSE:
            continue
        wanted = slot.q[j][ids[inside]]
        got = tables[j][inside]
        np.testing.assert_array_equal(got > 0, wanted > 1e-37)
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("mapped", [False, True], ids=["same", "pruned"])
@pytest.mark.parametrize("how", ["unmasked", "masked", "probed"])
@pytest.mark.full(
    "block64-unmasked-same",
    "block64-masked-pruned",
    "block64-probed-same",
    "block1-unmasked-pruned",
    "block1-masked-same",
    "block1-probed-pruned",
)
def test_draft_chain_matches_reference(make_round, block, mapped, how):
    """Drafts, draft kinds, probability tables, candidates and records match the reference.

    Half of the slots have logit adjustments, which apply to the drafter too. Slots that committed
    nothing do not change. With probes, the draft is the candidate that the grammar accepts. If no
    candidate is legal, the draft is sampled under the mask row. Without an answer to the current
    probe, there is no draft. Requests without a grammar are not probed.
    """
    rng = np.random.default_rng(100 + 2 * mapped + len(how))
    d2t = random_vocabulary(rng) if mapped else None
    ids = np.arange(V) if d2t is None else d2t
    limit = V - 2
    probed = how == "probed"
    r = make_round(
        slots=SLOTS,
        mode=DraftMode.chain(K, MASKING[how], MAX_CANDIDATES if probed else 0),
        vocab=V,
        token_limit=limit,
        d2t=d2t,
        block=block,
    )
    seen: Counter = Counter()

    def probe(i: int, s: ref.Slot, j: int, logits: np.ndarray) -> tuple[int, ref.MaskRow]:
        """Check the candidates of a slot and answer randomly; return the answer and row j - 1."""
        record = r.exchange.candidates[i]
        row = random_row(rng, s, j - 1)
        wanted = []
        if moved[i] and ref.is_drafting(s, j):
            wanted = candidates(s, j, logits, ids, limit)[:MAX_CANDIDATES]
        is_probed = tuple(record[:2]) == (r.replay, j)
        assert is_probed == bool(wanted)
        if not wanted:
            return -1, row
        assert record[2 : 3 + len(wanted)].tolist() == [len(wanted), *wanted]
        outcome = str(rng.choice(PROBE_OUTCOMES))
        seen[outcome] += 1
        candidate = int(rng.choice(wanted))
        answers = {
            "answer": (r.replay, j, candidate),
            "miss": (r.replay, j, -1),
            "previous replay": (r.replay - 1, j, candidate),
            "previous draft": (r.replay, j - 1, candidate),
        }
        if outcome in answers:
            r.exchange.answer[i] = answers[outcome]
        if outcome == "miss":
            return -1, row
        late = ref.MaskRow(ref.NOT_READY, s.epoch, s.n + j - 1)
        return (candidate if outcome == "answer" else -1), late

    for _ in range(4):
        slots = [random_slot(rng, V, 5) for _ in range(SLOTS)]
        known = np.isin(np.arange(V), ids)
        for s in slots:  # only row 0 is ready, so at most one of these drafts is verified
            add_drafts(rng, s, rng.normal(0, 2, (K, V)), known)
            s.adjust = random_adjustment(rng, V)
        free = [probed and i % 4 == 0 for i in range(SLOTS)]  # without a grammar
        rows = []
        for s, has_no_grammar in zip(slots, free, strict=True):
            state = ref.FREE if rng.random() < 0.9 else ref.NOT_READY
            first = ref.MaskRow(state, s.epoch, s.n, detail=has_no_grammar)
            late = ref.MaskRow(ref.NOT_READY, s.epoch, s.n)
            rows.append([first, *[late] * K])
        before = [s.n for s in slots]
        order = rng.permutation(SLOTS)
        target_logits = rng.normal(0, 2, (SLOTS, K + 1, V)).astype(np.float32)
        r.play(slots, target_logits, rows, order)
        moved = [s.n > n for s, n in zip(slots, before, strict=True)]
        for j in range(1, K + 1):
            logits = rng.normal(0, 2, (SLOTS, r.draft_vocab)).astype(np.float32)
            logits[rng.random(logits.shape) < 0.05] = -np.inf
            logits[rng.random(SLOTS) < 0.03, 4] = np.nan
            uploaded = r.upload(logits[order])
            if probed:
                r.candidates(j, uploaded)
            for i, s in enumerate(slots):
                answer = -1
                row = random_row(rng, s, j - 1)
                adjusted = ref.adjusted_draft(s, s.drafts[: j - 1], logits[i], ids, V)
                if free[i]:
                    row = ref.MaskRow(ref.FREE, s.epoch, 0, detail=1)
                    assert tuple(r.exchange.candidates[i, :2]) != (r.replay, j)
                elif probed:
                    answer, row = probe(i, s, j, adjusted)
                r.write_mask(i, j - 1, row)
                mask = None if how == "unmasked" else row
                if moved[i]:
                    seen["adjusted"] += s.adjust is not None
                    ref.draft(s, j, adjusted, mask, limit, d2t, V, probed=probed, answer=answer)
                    seen["free"] += free[i] and len(s.drafts) == j
            r.draft(j, uploaded)
        r.compare(slots)
        drafted = r.exchange.drafted
        tables = r.sampler.arrays.draft_probs.to_host()
        for i, s in enumerate(slots):
            count = len(s.drafts)
            if moved[i]:
                seen[count] += 1
                assert tuple(drafted[i, : 2 + count]) == (r.replay, count, *s.drafts)
            elif count > 0:
                seen["stalled"] += 1
            check_tables(s, tables[i], ids)
    assert {*range(K + 1), "stalled"} <= set(+seen)
    assert seen["adjusted"] > 20
    if probed:
        assert min(seen[name] for name in (*PROBE_OUTCOMES, "free")) > 2, seen


@pytest.mark.parametrize("branch", [1, 3])
@pytest.mark.parametrize("mapped", [False, True], ids=["same", "pruned"])
@pytest.mark.full("block1-same-1", "block1-pruned-3", "block64-same-3", "block64-pruned-1")
def test_lattice_candidates_match_reference(make_round, block, mapped, branch):
    """A lattice probe, which covers all levels, has the candidates of one probe per level.

    Their probabilities match the reference. Penalties count only committed tokens, because the
    drafts of earlier levels are not known. A level with invalid logits has no candidates. If the
    drafts are a tree, requests without a grammar get candidates, too.
    """
    rng = np.random.default_rng(5)
    levels = 4
    max_candidates = 6
    d2t = None
    if mapped:
        d2t = np.sort(rng.choice(V, 30, replace=False)).astype(np.int32)
    ids = np.arange(V) if d2t is None else d2t
    limit = V - 2
    r = make_round(
        slots=SLOTS,
        mode=DraftMode(
            drafts=levels,
            levels=levels,
            branch=branch,
            masking="lattice-probe",
            candidates=max_candidates,
        ),
        vocab=V,
        token_limit=limit,
        d2t=d2t,
        block=block,
    )
    seen: Counter = Counter()
    for _ in range(4):
        slots = [random_slot(rng, V, 5) for _ in range(SLOTS)]
        for s in slots:
            s.adjust = random_adjustment(rng, V)
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
            is_drafting = s.n > before[i] and ref.is_drafting(s, 1)
            wants_probe = is_drafting and (branch > 1 or not free[i])
            is_probed = tuple(record[:2]) == (r.replay, 3)
            assert is_probed == wants_probe
            if not is_probed:
                continue
            seen["probed"] += 1
            count = min(levels, s.limit - s.n - 1)
            assert record[2] == count
            size = levels * max_candidates
            found_ids = record[3 : 3 + size].reshape(levels, max_candidates)
            found_probs = (
                record[3 + size : 3 + 2 * size].view(np.float32).reshape(levels, max_candidates)
            )
            for level in range(count):
                adjusted = ref.adjusted_draft(s, (), logits[level, i], ids, V, depth=level)
                arguments = (s, level + 1, adjusted, ids, limit)
                wanted = candidates(*arguments)[:max_candidates]
                seen["without candidates"] += not wanted
                terminated = [*wanted, -1][:max_candidates]
                assert found_ids[level, : len(terminated)].tolist() == terminated
                probs = shares(*arguments)
                wanted_probs = [probs[token] for token in wanted]
                found = found_probs[level, : len(wanted)]
                np.testing.assert_allclose(found, wanted_probs, rtol=1e-4, atol=1e-9)
    assert seen["probed"] > 20
    assert seen["without candidates"] > 1
