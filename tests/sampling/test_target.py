"""Target rows: filtered distributions, ties, invalid logits, and rows that are not processed."""

from __future__ import annotations

import numpy as np
import pytest
import reference_round as ref
from sampling_round import TableRound

FILTERS = [
    ref.Filter(1.0),
    ref.Filter(0.2),
    ref.Filter(5.0),
    ref.Filter(1.0, top_k=1),
    ref.Filter(0.7, top_k=7),
    ref.Filter(1.0, top_p=0.5),
    ref.Filter(1.0, top_p=0.999),
    ref.Filter(1.3, top_p=1e-6),
    ref.Filter(1.0, min_p=0.1),
    ref.Filter(1.0, min_p=1.0),
    ref.Filter(1.1, top_k=20, top_p=0.9, min_p=0.02),
    ref.Filter(1.0, top_k=10**6),
    ref.Filter(1.0, top_p=1e-6),
    ref.Filter(2e-5),
    ref.Filter(0.0),
]


def simple(f: ref.Filter) -> ref.Slot:
    """Return a slot with a filter and default parameters."""
    return ref.Slot(n=10, tree=ref.chain(0), limit=100, seed=5, filter=f)


def run_rows(r: TableRound, logits: np.ndarray, slots: list[ref.Slot], legal: np.ndarray):
    """Run a round without drafts; return the results and the probabilities of each slot's row."""
    masks = []
    for s, legal_ids in zip(slots, legal, strict=True):
        masks.append([ref.MaskRow(ref.READY, s.epoch, s.n, legal_ids)])
    out = r.play(slots, logits[:, None, :], masks)
    return out, r.sampler.arrays.probs.to_host()[: len(slots)]


@pytest.mark.parametrize("vocab", [8, 70, 500, 4097])
def test_filtered_distribution_matches_reference(make_round, block, vocab):
    """The filtered distribution has the reference's zeros; other values match up to rounding.

    Ties keep the smaller ids, and -0 equals +0.
    """
    rng = np.random.default_rng(vocab)
    count = len(FILTERS)
    limit = vocab - vocab // 7 - 1
    r = make_round(slots=count, draft_length=0, vocab=vocab, token_limit=limit, block=block)
    for density, coarse in ((1.0, False), (0.4, False), (0.7, True)):
        logits = rng.normal(0, 2.5, (count, vocab)).astype(np.float32)
        if coarse:  # the greatest logits are zeros of both signs
            logits = np.round(logits) * (logits < 0.5)
        legal = rng.random((count, vocab)) < density
        legal[:, rng.integers(0, limit)] = True
        _, probs = run_rows(r, logits, [simple(f) for f in FILTERS], legal)
        bound = np.arange(vocab) < limit
        for i, f in enumerate(FILTERS[:-1]):  # the last filter is greedy and has no distribution
            wanted = ref.distribution(logits[i], legal[i] & bound, f)
            kept = wanted > 1e-37
            found = probs[i]
            np.testing.assert_array_equal(found > 0, kept, err_msg=str(f))
            np.testing.assert_allclose(found[kept], wanted[kept], rtol=2e-5, err_msg=str(f))


def test_row_without_legal_token_ends_request(make_round, block):
    """A row without a legal token is a dead end; a row with a legal NaN or +inf is an error.

    A token is illegal without a mask bit, at or beyond the limit, or with a logit of -inf.
    """
    vocab = 64
    limit = 40
    logits = np.zeros((8, vocab), np.float32)
    legal = np.ones((8, vocab), bool)
    legal[0] = False
    legal[1] = np.arange(vocab) >= limit
    logits[2] = -np.inf
    logits[3, 7] = np.nan
    logits[4, 7] = np.inf
    # The logits of illegal tokens are not read.
    logits[5, 7] = np.nan
    legal[5, 7] = False
    logits[6, 50] = np.nan
    logits[7, 7] = -np.float32(np.nan)
    for f in (ref.Filter(0.0), ref.Filter(1.0)):
        r = make_round(slots=8, draft_length=0, vocab=vocab, token_limit=limit, block=block)
        slots = [simple(f) for _ in range(8)]
        out, _ = run_rows(r, logits, slots, legal)
        reasons = [ref.DEAD, ref.DEAD, ref.DEAD, ref.FAULT, ref.FAULT, 0, 0, ref.FAULT]
        np.testing.assert_array_equal(out["reason"], reasons)
        np.testing.assert_array_equal(out["count"], [0, 0, 0, 0, 0, 1, 1, 0])


def test_unused_rows_are_not_processed(make_round, block):
    """Rows without a request, rows beyond the drafts and rows without a stamp get no token."""
    vocab = 40
    width = 3
    r = make_round(slots=5, draft_length=2, vocab=vocab, block=block)
    marker = np.full(r.sampler.arrays.probs.shape, 7.0, np.float32)
    slots = [simple(ref.Filter(1.0)) for _ in range(5)]
    slots[1].active = False
    everything = np.ones(vocab, bool)
    for i, s in enumerate(slots):
        r.put(i, s)
        for j in range(width):
            epoch = s.epoch + (i == 2)
            r.write_mask(i, j, ref.MaskRow(ref.READY, epoch, s.n + j, everything))
    before = r.state.to_host()
    for _ in range(3):  # so that every entry of the ring has been used
        r.verify(np.zeros((5, width, vocab), np.float32))
        r.state.copy_from(before)
    r.sampler.arrays.probs.copy_from(marker)
    r.rows([0, 1, 2, -1])
    out = r.verify(np.zeros((4, width, vocab), np.float32))
    np.testing.assert_array_equal(out["slot"], [0, 1, 2, -1, -1])
    np.testing.assert_array_equal(out["count"][:4], [1, 0, 0, 0])
    np.testing.assert_array_equal(r.state.to_host()["n"] - before["n"], [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(r.sampler.arrays.results.to_host()[:4, 1], [1, 0, 0, 0])
    probs = r.sampler.arrays.probs.to_host().reshape(5, width, vocab)
    assert (probs[0, 0] != 7).all()
    probs[0, 0] = 7
    np.testing.assert_array_equal(probs, 7)
    ok = r.sampler.arrays.row_status.to_host()[: 4 * width].reshape(4, width)
    assert ok[0, 0] == 1
    assert ok.sum() == 1
