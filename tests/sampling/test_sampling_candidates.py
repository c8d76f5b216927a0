"""Candidates for probed drafts against the NumPy oracle, and how the answers are taken."""

from __future__ import annotations

import numpy as np
import numpy_sampling as ref
import pytest
from sampling_round import TableRound, pack_bits
from test_sampling_draft import SLOTS, K, V, _random_slot

from graft.cudagraph.errors import OptionError

MOST = 5


@pytest.fixture(params=[1, 64], ids=["block1", "block64"])
def block(request):
    """Both shapes of the row kernels."""
    return request.param


def drafts_on(s: ref.Slot, j: int) -> bool:
    stopped = bool(s.drafts) and s.drafts[-1] in s.stop_ids
    return s.active and len(s.drafts) == j - 1 and s.n + j < s.limit and not stopped


def wanted(s: ref.Slot, j: int, logits: np.ndarray, ids: np.ndarray, limit: int) -> list[int]:
    """Ids in the order of the draw to come; what the filters take away comes last."""
    legal = (ids >= 0) & (ids < limit) & (logits > -np.inf)
    order = [int(c) for c in ref.ranking(logits) if legal[c]]
    if not s.filter.greedy and s.verify == ref.COUPLED:
        kept = ref.distribution(logits, legal, s.filter)
        scaled = logits.astype(np.float64) / np.float64(np.float32(s.filter.temperature))
        noise = ref.gumbel(ref.words(s.seed, s.n + j, ref.NOISE, np.maximum(ids, 0), s.sample))
        order = sorted(np.flatnonzero(legal), key=lambda c: (kept[c] <= 0, -scaled[c] - noise[c]))
    return [int(ids[c]) for c in order[:MOST]]


def joined(r: TableRound, rng: np.random.Generator, limit: int) -> list[ref.Slot]:
    """Random slots that have just committed a token; every fourth one has no grammar."""
    slots = [_random_slot(rng) for _ in range(SLOTS)]
    for i, s in enumerate(slots):
        r.put(i, s)
        r.write_mask(i, 0, ref.MaskRow(ref.FREE, s.epoch, s.n))
        r.field("row_state")[i, :, 3] = i % 4 == 0
    logits = rng.normal(0, 2, (SLOTS, 1, V)).astype(np.float32)
    r.rows(np.arange(SLOTS))
    r.verify(logits)
    for i, s in enumerate(slots):
        row = ref.MaskRow(ref.FREE, s.epoch, s.n)
        slots[i], _ = ref.verify(s, logits[i], [row], limit)
    r.field("row_state")[np.arange(SLOTS) % 4 != 0, :, 0] = ref.NOT_READY
    return slots


@pytest.mark.parametrize("mapped", [False, True], ids=["same", "pruned"])
def test_candidates_and_drafts_match_the_oracle(device, stream, block, mapped):
    """Order, ids and records are the oracle's; the answer is the draft, as a point mass; where none
    is legal the best of the row is; where nobody answered there is none."""
    rng = np.random.default_rng(31 + mapped)
    d2t = np.sort(rng.choice(V, 30, replace=False)).astype(np.int32) if mapped else None
    if d2t is not None:
        d2t[-1] = V + 3  # a broken map entry is never an address
    limit = V - 2
    r = TableRound(device, stream, slots=SLOTS, draft_length=K, vocab=V, token_limit=limit,
                   d2t=d2t, block=block, candidates=MOST)  # fmt: skip
    ids = np.arange(V) if d2t is None else d2t
    seen = {"answer": 0, "miss": 0, "silent": 0, "free": 0}
    for _ in range(6 if block == 1 else 2):
        slots = joined(r, rng, limit)
        for j in range(1, K + 1):
            logits = rng.normal(0, 2, (SLOTS, r.draft_vocab)).astype(np.float32)
            logits[rng.random(logits.shape) < 0.05] = -np.inf
            logits[rng.random(SLOTS) < 0.03, 4] = np.nan
            broken = np.isnan(logits).any(axis=1)
            r.candidates(j, logits)
            records, answers = r.field("candidates").copy(), r.field("answers")
            expected: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
            for i, s in enumerate(slots):
                kept = (s.drafts, s.kinds)
                if i % 4 == 0 or not drafts_on(s, j) or broken[i]:
                    assert tuple(records[i, :2]) != (r.replay, j)
                else:
                    order = wanted(s, j, logits[i], ids, limit)
                    count = len(order)
                    assert records[i, : 3 + count].tolist() == [r.replay, j, count, *order]
                    outcome = str(rng.choice(["answer", "miss", "silent", "stale"]))
                    if outcome == "answer":
                        pick = int(rng.choice(order))
                        answers[i] = (r.replay, j, pick)
                        kept = ((*s.drafts, pick), (*s.kinds, ref.POINT))
                    elif outcome == "miss":
                        legal = rng.random(V) < rng.choice([0.03, 0.5])
                        row = ref.MaskRow(ref.READY, s.epoch, s.n + j - 1, pack_bits(legal))
                        r.write_mask(i, j - 1, row)
                        answers[i] = (r.replay, j, -1)
                        point = s if s.verify == ref.COUPLED else ref.replace(
                            s, filter=ref.Filter(0.0))  # fmt: skip
                        after = ref.draft(point, j, logits[i], row, limit, d2t, V)
                        kept = (after.drafts, after.kinds)
                    elif outcome == "stale":
                        answers[i] = (r.replay - 1, j, order[0])
                    seen["silent" if outcome == "stale" else outcome] += 1
                expected[i] = kept
            for i in range(0, SLOTS, 4):  # requests without a grammar draw as ever
                s = slots[i]
                row = ref.MaskRow(ref.FREE, s.epoch, 0, more=1)
                r.write_mask(i, j - 1, row)
                after = ref.draft(s, j, logits[i], row, limit, d2t, V)
                seen["free"] += len(after.drafts) == j
                expected[i] = (after.drafts, after.kinds)
            r.draft(j, logits, masked=True)
            state, drafted = r.snapshot(), r.field("drafted")
            for i, (drafts, kinds) in expected.items():
                count = len(drafts)
                assert state["draft_len"][i] == count
                assert tuple(state["drafts"][i, :count]) == drafts
                assert tuple(state["q_kind"][i, :count]) == kinds
                if slots[i].active and r.field("committed")[i, 1]:
                    assert tuple(drafted[i, : 2 + count]) == (r.replay, count, *drafts)
                slots[i] = ref.replace(slots[i], drafts=drafts, kinds=kinds, q=(None,) * count)
    assert min(seen.values()) > 3, seen


def test_candidates_need_a_sampler_made_for_them(device, stream):
    """Asking for candidates without room for them raises OptionError."""
    r = TableRound(device, stream, slots=2, draft_length=1, vocab=8)
    with pytest.raises(OptionError, match="without candidates"):
        r.candidates(1, np.zeros((2, 8), np.float32))
