"""Draft sampling against the NumPy oracle: masks, vocabulary maps, tables, and where it stops."""

from __future__ import annotations

import numpy as np
import numpy_sampling as ref
import pytest
from sampling_round import TableRound, pack_bits
from test_verify_chain import random_filter

V, K, SLOTS = 45, 3, 16


@pytest.fixture(params=[1, 64], ids=["block1", "block64"])
def block(request):
    """Both shapes of the row kernels."""
    return request.param


def _random_slot(rng: np.random.Generator) -> ref.Slot:
    n = int(rng.integers(3, 100))
    stops = tuple(int(i) for i in rng.choice(V, int(rng.integers(0, 6)), replace=False))
    return ref.Slot(
        n=n, last=int(rng.integers(V)), limit=n + int(rng.integers(2, 7)),
        seed=int(rng.integers(2**63)), filter=random_filter(rng), verify=int(rng.integers(2)),
        stop_ids=stops, epoch=int(rng.integers(1, 4)), sample=int(rng.choice([0, 3])),
    )  # fmt: skip


def _random_row(rng: np.random.Generator, slot: ref.Slot, j: int) -> ref.MaskRow:
    """Row j of the slot's present state; sometimes late, dead, stale or without a known token."""
    legal = rng.random(V) < rng.choice([0.02, 0.5, 1.0])
    state = int(rng.choice([0, 1, 3, 4])) if rng.random() < 0.15 else ref.READY
    stale = int(rng.random() < 0.04)
    return ref.MaskRow(state, slot.epoch + stale, slot.n + j, pack_bits(legal))


@pytest.mark.parametrize("mapped", [False, True], ids=["same", "pruned"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
def test_matches_the_oracle(device, stream, block, mapped, masked):
    """Drafts, kinds, tables, lengths and records equal the oracle's through whole rounds."""
    rng = np.random.default_rng(100 + 2 * mapped + masked)
    d2t = None
    if mapped:
        d2t = np.sort(rng.choice(V, 30, replace=False)).astype(np.int32)
        d2t[-1] = V + 3  # a broken map entry is illegal, never an address
    limit = V - 2
    r = TableRound(device, stream, slots=SLOTS, draft_length=K, vocab=V, token_limit=limit,
                   d2t=d2t, block=block)  # fmt: skip
    lengths: list[int] = []
    for _ in range(6 if block == 1 else 2):
        slots = [_random_slot(rng) for _ in range(SLOTS)]
        for i, s in enumerate(slots):
            r.put(i, s)
            state = ref.FREE if rng.random() < 0.9 else ref.NOT_READY
            r.write_mask(i, 0, ref.MaskRow(state, s.epoch, s.n))
        logits = rng.normal(0, 2, (SLOTS, 1, V)).astype(np.float32)
        order = rng.permutation(SLOTS)
        r.rows(order)
        out = r.verify(logits)
        for b, slot in enumerate(order):
            state, epoch, position = (int(x) for x in r.field("row_state")[slot, 0][:3])
            row = ref.MaskRow(state, epoch, position)
            slots[slot], outcome = ref.verify(slots[slot], logits[b], [row], limit)
            assert out["count"][b] == len(outcome.tokens)
        moved = {int(order[b]) for b in range(SLOTS) if out["count"][b] > 0}
        for j in range(1, K + 1):
            draft_logits = rng.normal(0, 2, (SLOTS, r.draft_vocab)).astype(np.float32)
            draft_logits[rng.random(draft_logits.shape) < 0.05] = -np.inf
            draft_logits[rng.random(SLOTS) < 0.03, 4] = np.nan
            for b, slot in enumerate(order):
                s = slots[slot]
                row = _random_row(rng, s, j - 1)
                r.write_mask(slot, j - 1, row)
                if slot in moved:
                    slots[slot] = ref.draft(
                        s, j, draft_logits[b], row if masked else None, limit, d2t, V
                    )
            r.draft(j, draft_logits, masked)
        after, drafted, tables = r.snapshot(), r.field("drafted"), r.sampler.q.to_host()
        for slot, s in enumerate(slots):
            count = len(s.drafts)
            assert after["draft_len"][slot] == count
            assert tuple(after["drafts"][slot, :count]) == s.drafts
            assert tuple(after["q_kind"][slot, :count]) == s.kinds
            if slot in moved:
                lengths.append(count)
                assert tuple(drafted[slot, : 2 + count]) == (r.replay, count, *s.drafts)
            for j in range(count):
                if s.kinds[j] == ref.DENSE:
                    columns = np.arange(V) if d2t is None else d2t
                    inside = columns < V
                    wanted = s.q[j][columns[inside]]
                    got = tables[slot, j][inside]
                    np.testing.assert_array_equal(got > 0, wanted > 1e-37)
                    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-37)
    assert set(lengths) == {0, 1, 2, 3}


def test_slots_that_committed_nothing_keep_their_drafts(device, stream, block):
    """A stalled slot's drafts, kinds and tables survive the drafting of the others."""
    r = TableRound(device, stream, slots=2, draft_length=2, vocab=16, block=block)
    q = np.full(16, 1 / 16)
    stalled = ref.Slot(n=5, last=1, limit=50, seed=1, filter=ref.Filter(1.0), drafts=(3, 4),
                       kinds=(0, 0), q=(q, q))  # fmt: skip
    r.put(0, stalled)
    r.put(1, ref.replace(stalled, drafts=(), kinds=(), q=()))
    r.write_mask(0, 0, ref.MaskRow(ref.NOT_READY, 1, 5))
    r.write_mask(1, 0, ref.MaskRow(ref.FREE, 1, 5))
    out = r.verify(np.zeros((2, 3, 16), np.float32))
    np.testing.assert_array_equal(out["count"], [0, 1])
    before = r.sampler.q.to_host()[0].copy()
    for j in (1, 2):
        r.draft(j, np.zeros((2, 16), np.float32), masked=False)
    after = r.snapshot()
    assert tuple(after["draft_len"]) == (2, 2)
    assert tuple(after["drafts"][0]) == (3, 4)
    np.testing.assert_array_equal(r.sampler.q.to_host()[0], before)
    assert r.field("drafted")[0, 0] == 0, "its record is of no replay yet"
