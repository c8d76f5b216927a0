"""Results of the sampling kernels do not depend on the number of blocks per row."""

from __future__ import annotations

import numpy as np
import pytest
import reference_round as ref
from sampling_round import TableRound

from graft.sampling.params import Relaxed, SamplingParams

FILTERS = [
    ref.Filter(0.0),
    ref.Filter(1.0),
    ref.Filter(0.3, top_p=0.9),
    ref.Filter(1.0, top_k=40),
    ref.Filter(0.8, top_k=3000, top_p=0.999, min_p=1e-4),
    ref.Filter(1.0, min_p=0.02),
    ref.Filter(3.0, top_p=0.95),
    ref.Filter(1.0, top_k=1),
    ref.Filter(0.0),
    ref.Filter(1.0),
]
MODES = [0, 0, 0, ref.COUPLED, 0, ref.PER_TOKEN, 0, ref.COUPLED, ref.RELAXED, ref.RELAXED]
SLOTS = len(FILTERS)
DRAFTS = 2


def slot_of(rng: np.random.Generator, i: int, logits: np.ndarray, legal: np.ndarray) -> ref.Slot:
    """Return a slot with two drafts, as a tree where possible, and with adjustments if i is odd."""
    vocab = logits.shape[1]
    slot = ref.Slot(
        n=10,
        tree=ref.chain(1),
        limit=100,
        seed=77 + i,
        filter=FILTERS[i],
        verify=MODES[i],
        stop_ids=(2,),
        relaxed=Relaxed(5, 0.5, None),
        adjust=_adjustment(masked=i % 4 == 1) if i % 2 else None,
    )
    for j in range(DRAFTS):
        q = np.exp(logits[j] - logits[j].max()) * (rng.random(vocab) < 0.8)
        q = (q / q.sum()).astype(np.float32)
        d = int(q.argmax())
        if i % 3:
            d = int(np.argmax(np.where(legal, logits[j], -np.inf)))
        branches = FILTERS[i].greedy or MODES[i] == ref.COUPLED
        parent = 0 if branches else j
        is_point = i == 4 or branches or q[d] == 0
        if slot.tree.child(parent, d) is None:
            ref.keep(slot, d, int(is_point), q.astype(np.float64), parent)
    return slot


def _adjustment(masked: bool) -> ref.Adjustment:
    params = SamplingParams(
        logit_bias={5: 1.5},
        frequency_penalty=0.2,
        min_tokens=12,
        logprobs=3,
        logprobs_masked=masked,
    )
    return ref.Adjustment(params, output=(3, 3, 6))


def run_rounds(make_round, vocab: int, kinds: int, block: int, parts: int) -> list[bytes]:
    """Return all device and host arrays after two rounds."""
    rng = np.random.default_rng(vocab)
    d2t = np.sort(rng.choice(vocab, vocab // 2, replace=False)).astype(np.int32)
    r: TableRound = make_round(
        slots=kinds,
        draft_length=DRAFTS,
        vocab=vocab,
        d2t=d2t if vocab > 8 else None,
        block=block,
        token_limit=vocab - vocab // 9,
        parts=parts,
    )
    found = []
    for _ in range(2):
        logits = rng.normal(0, 2.5, (kinds, DRAFTS + 1, vocab)).astype(np.float32)
        logits[:, :, 4::7] = logits[:, :, 4:5]  # ties
        logits[-1] = np.round(logits[-1])
        legal = rng.random((kinds, vocab)) < 0.5
        legal[:, 3] = True
        for i in range(kinds):
            slot = slot_of(rng, i, logits[i], legal[i])
            r.put(i, slot)
            for j in range(DRAFTS + 1):
                depth = len(slot.tree.path(j)) if j < len(slot.tree.token) else j
                r.write_mask(i, j, ref.MaskRow(ref.READY, 1, 10 + depth, legal[i]))
        r.verify(logits)
        logprobs = r.ring.row("logprobs", r.replay).tobytes()
        state = r.state.to_host()
        for j in range(1, DRAFTS + 1):
            for i in range(kinds):
                r.write_mask(i, j - 1, ref.MaskRow(ref.READY, 1, state["n"][i] + j - 1, legal[i]))
            r.draft(j, rng.normal(0, 2.5, (kinds, r.draft_vocab)).astype(np.float32))
        s = r.sampler.arrays
        results = (s.target_tokens, s.row_status, s.results, s.faults)
        arrays = (s.probs, s.raw_logits, s.draft_probs, *results, r.state.array)
        found.append(logprobs)
        found += [array.to_host().tobytes() for array in arrays]
    assert not r.sampler.arrays.cross_block.to_host().any(), "scratch is not reset"
    return found


@pytest.mark.parametrize(
    "vocab,kinds,shapes",
    [
        (8, SLOTS, [(1, 2), (1, 32), (64, 8)]),
        (2048, SLOTS, [(1, 2), (1, 8), (1, 32), (64, 1), (64, 8)]),
        (49152, SLOTS, [(1, 8)]),
        pytest.param(128256, 4, [(1, 32), (512, 2)], marks=pytest.mark.full),
        pytest.param(49152, SLOTS, [(1, 2), (1, 32), (512, 8)], marks=pytest.mark.full),
        pytest.param(128256, SLOTS, [(1, 2), (1, 8), (1, 32), (512, 32)], marks=pytest.mark.full),
        pytest.param(151936, SLOTS, [(1, 2), (1, 8), (1, 32), (1024, 32)], marks=pytest.mark.full),
    ],
)
@pytest.mark.full("49152")
def test_sampling_is_bit_identical_for_any_blocks_per_row(make_round, vocab, kinds, shapes):
    """All arrays are bit-identical for any threads per block and blocks per row.

    The slots have chains and trees with greedy, filtered, coupled, relaxed and rejection-sampled
    rows.
    """
    alone = run_rounds(make_round, vocab, kinds, 1, 1)
    for block, parts in shapes:
        shared = run_rounds(make_round, vocab, kinds, block, parts)
        assert shared == alone, (block, parts)
