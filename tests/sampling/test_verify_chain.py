"""Chain verification against the NumPy oracle, and its rules one by one."""

from __future__ import annotations

import numpy as np
import numpy_sampling as ref
import pytest
from sampling_round import TableRound, pack_bits

V, K = 41, 3


def random_filter(rng: np.random.Generator) -> ref.Filter:
    """Any mix of filters; a third are greedy."""
    if rng.random() < 0.33:
        return ref.Filter(temperature=0.0)
    return ref.Filter(
        temperature=float(rng.choice([0.3, 1.0, 1.7])),
        top_k=int(rng.choice([0, 1, 5, 60])),
        top_p=float(rng.choice([1.0, 0.9, 0.4])),
        min_p=float(rng.choice([0.0, 0.05])),
    )


def random_slot(rng: np.random.Generator, logits: np.ndarray, limit: int) -> ref.Slot:
    """A slot with 0..K drafts, most of them likely, some illegal, with q tables near p."""
    n = int(rng.integers(3, 200))
    f = random_filter(rng)
    drafts: list[int] = []
    kinds: list[int] = []
    tables: list[np.ndarray] = []
    for j in range(int(rng.integers(0, K + 1))):
        mixed = np.exp(logits[j] + rng.normal(0, 0.7, V))
        q = mixed * (rng.random(V) < 0.8)
        q /= q.sum()
        kind = int(rng.random() < 0.3)
        likely = int(np.argmax(logits[j])) if rng.random() < 0.6 else int(rng.choice(V, p=q))
        d = int(rng.integers(0, V)) if rng.random() < 0.1 else likely
        drafts.append(d)
        kinds.append(kind)
        tables.append(q.astype(np.float32).astype(np.float64))
    return ref.Slot(
        n=n, last=int(rng.integers(V)), limit=n + int(rng.integers(2, 9)),
        seed=int(rng.integers(2**63)), filter=f, verify=int(rng.integers(2)),
        epoch=int(rng.integers(1, 5)), sample=int(rng.choice([0, 0, 7])),
        stop_ids=tuple(int(i) for i in rng.choice(V, int(rng.integers(0, 9)), replace=False)),
        drafts=tuple(drafts), kinds=tuple(kinds), q=tuple(tables),
    )  # fmt: skip


def random_masks(rng: np.random.Generator, slot: ref.Slot) -> list[ref.MaskRow]:
    """Mask rows 0..K: mostly ready or free, sometimes late, stale, dead or failed."""
    rows = []
    for j in range(K + 1):
        legal = rng.random(V) < rng.choice([0.2, 0.7, 1.0])
        if rng.random() < 0.9 and j < len(slot.drafts):
            legal[slot.drafts[j]] = True
        state = int(rng.choice([1, 2, 2, 2, 2, 2, 2, 0, 3, 4])) if rng.random() < 0.5 else ref.READY
        epoch = slot.epoch + int(rng.random() < 0.04)
        position = slot.n + j + int(rng.random() < 0.04)
        if not legal.any() and rng.random() < 0.5:
            legal[:] = True
        rows.append(ref.MaskRow(state, epoch, position, pack_bits(legal)))
    return rows


@pytest.fixture(params=[1, 64], ids=["block1", "block64"])
def block(request):
    """Both shapes of the row kernels: one thread a row, and many."""
    return request.param


def test_matches_the_oracle_on_random_rounds(device, stream, block):
    """Tokens, counts, reasons, state and records equal the oracle's in 400 random slots."""
    rng = np.random.default_rng(7)
    slots, limit = 20, 39
    seen: dict[tuple[int, bool], int] = {}
    for d2t in (None, np.sort(rng.choice(V, 29, replace=False)).astype(np.int32)):
        r = TableRound(device, stream, slots=slots, draft_length=K, vocab=V, token_limit=limit,
                       d2t=d2t, block=block)  # fmt: skip
        for _ in range(10 if block == 1 else 3):
            logits = rng.normal(0, 2, (slots, K + 1, V)).astype(np.float32)
            logits[rng.random(logits.shape) < 0.02] = -np.inf
            logits[rng.random(logits.shape[:2]) < 0.01] = np.nan
            states = [random_slot(rng, np.nan_to_num(lg, neginf=-9.0), limit) for lg in logits]
            if d2t is not None:  # a drafter cannot have drawn what it does not know
                known = np.isin(np.arange(V), d2t)
                states = [
                    ref.replace(s, q=tuple(np.where(known, q, 0.0) for q in s.q)) for s in states
                ]
            masks = [random_masks(rng, s) for s in states]
            for slot, (s, rows) in enumerate(zip(states, masks, strict=True)):
                r.put(slot, s)
                for j, row in enumerate(rows):
                    r.write_mask(slot, j, row)
            order = rng.permutation(slots)
            r.rows(order)
            out = r.verify(logits[order])
            after = r.snapshot()
            committed, drafted = r.field("committed"), r.field("drafted")
            for b, slot in enumerate(order):
                expected, outcome = ref.verify(states[slot], logits[slot], masks[slot], limit)
                count = len(outcome.tokens)
                seen[(outcome.reason, count > 0)] = seen.get((outcome.reason, count > 0), 0) + 1
                assert out["slot"][b] == slot
                assert tuple(out["tokens"][b, : out["count"][b]]) == outcome.tokens
                assert out["accepted"][b] == outcome.accepted
                assert out["reason"][b] == outcome.reason
                assert out["tested"][b] == len(states[slot].drafts)
                assert after["n"][slot] == expected.n
                assert after["last"][slot] == expected.last
                assert bool(after["active"][slot]) == expected.active
                assert after["draft_len"][slot] == len(expected.drafts)
                assert tuple(committed[slot, : 2 + count]) == (r.replay, count, *outcome.tokens)
                if count:
                    assert tuple(drafted[slot, :2]) == (r.replay, 0)
    wanted = {(reason, True) for reason in (ref.RUNNING, ref.STOP, ref.LENGTH)}
    assert wanted | {(ref.RUNNING, False), (ref.DEAD, False), (ref.FAULT, False)} <= set(seen)


# Rules, one by one. Logits make token 10 + j certain after row j unless said otherwise.

EYE = np.full((K + 1, V), -30.0, np.float32)
EYE[np.arange(K + 1), 10 + np.arange(K + 1)] = 30.0
GREEDY, SAMPLED = ref.Filter(0.0), ref.Filter(1.0)


def chain(f: ref.Filter = GREEDY, drafts: tuple[int, ...] = (10, 11, 12), **more) -> ref.Slot:
    """A slot with the given point drafts and nothing special."""
    q = np.zeros(V)
    values = {"n": 20, "last": 1, "limit": 100, "seed": 9, **more}
    return ref.Slot(filter=f, drafts=drafts, kinds=(ref.POINT,) * len(drafts),
                    q=(q,) * len(drafts), **values)  # fmt: skip


def run_one(device, stream, slot: ref.Slot, states=(1, 1, 1, 1), logits=EYE, masks=None, r=None):
    """One round of one slot under rows of the given states; returns (round, output of row 0)."""
    r = r or TableRound(device, stream, slots=1, draft_length=K, vocab=V)
    r.put(0, slot)
    for j, state in enumerate(states):
        bits = None if masks is None else pack_bits(masks[j])
        r.write_mask(0, j, ref.MaskRow(state, slot.epoch, slot.n + j, bits))
    out = r.verify(logits[None])
    return r, {name: values[0] for name, values in out.items()}


@pytest.mark.parametrize("f", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_accepted_drafts_and_bonus(device, stream, f):
    """All drafts right: K drafts and the bonus of row K; one wrong: what comes instead, no more."""
    _, out = run_one(device, stream, chain(f))
    assert list(out["tokens"]) == [10, 11, 12, 13] and out["accepted"] == 3
    _, out = run_one(device, stream, chain(f, (10, 30, 12)))
    assert list(out["tokens"][:2]) == [10, 11] and (out["count"], out["accepted"]) == (2, 1)


@pytest.mark.parametrize("f", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_accepted_stop_id_ends_the_request_without_a_bonus(device, stream, f):
    """d_2 is a stop id: two tokens, reason stop, nothing behind it; so for a sampled stop id."""
    r, out = run_one(device, stream, chain(f, stop_ids=(11,)))
    assert list(out["tokens"][:2]) == [10, 11]
    assert (out["count"], out["accepted"], out["reason"]) == (2, 2, ref.STOP)
    assert r.snapshot()["active"][0] == 0
    _, out = run_one(device, stream, chain(f, (10, 30), stop_ids=(3, 11)))
    assert (out["count"], out["accepted"], out["reason"]) == (2, 1, ref.STOP)


@pytest.mark.parametrize("f", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_no_position_at_or_beyond_the_limit_is_produced(device, stream, f, room):
    """With room for r tokens exactly r are committed, reason length, draft or bonus alike."""
    r, out = run_one(device, stream, chain(f, limit=21 + room))
    assert list(out["tokens"][:room]) == [10, 11, 12, 13][:room]
    assert (out["count"], out["accepted"], out["reason"]) == (room, min(room, 3), ref.LENGTH)
    assert r.snapshot()["n"][0] == 20 + room


def test_a_stop_id_at_the_last_position_is_a_stop(device, stream):
    """When both apply the reason is stop."""
    _, out = run_one(device, stream, chain(limit=22, stop_ids=(10,)))
    assert (out["count"], out["reason"]) == (1, ref.STOP)


@pytest.mark.parametrize("f", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_late_row_ends_the_round_after_the_drafts_before_it(device, stream, f):
    """Row 2 not ready (or dead, or stale): d_1 and d_2 are kept, there is no bonus."""
    for state in (ref.NOT_READY, ref.DEAD_END, ref.ERROR):
        r, out = run_one(device, stream, chain(f), states=(1, 1, state, 1))
        assert list(out["tokens"][:2]) == [10, 11]
        assert (out["count"], out["accepted"], out["reason"]) == (2, 2, ref.RUNNING)
        after = r.snapshot()
        assert (after["last"][0], after["n"][0], after["active"][0]) == (11, 22, 1)


@pytest.mark.parametrize("f", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_stalled_round_changes_nothing_and_can_be_repeated(device, stream, f):
    """Row 0 not ready: no token, state and drafts as before, and the next round is as if first."""
    slot = chain(f)
    r, out = run_one(device, stream, slot, states=(0, 1, 1, 1))
    assert (out["count"], out["reason"], out["tested"]) == (0, ref.RUNNING, 3)
    after = r.snapshot()
    assert (after["n"][0], after["last"][0], after["draft_len"][0]) == (20, 1, 3)
    assert tuple(after["drafts"][0]) == slot.drafts
    assert tuple(r.field("committed")[0, :2]) == (r.replay, 0)
    r.write_mask(0, 0, ref.MaskRow(ref.FREE, slot.epoch, slot.n))
    again = r.verify(EYE[None])
    assert list(again["tokens"][0]) == [10, 11, 12, 13]


def test_stamps_of_another_request_or_position_are_not_ready(device, stream):
    """A row counts only with this epoch, and with this position, unless FREE for all."""
    slot = chain()
    everything = pack_bits(np.ones(V, bool))
    for row in (
        ref.MaskRow(ref.READY, slot.epoch + 1, slot.n, everything),
        ref.MaskRow(ref.READY, slot.epoch, slot.n + 1, everything),
        ref.MaskRow(ref.FREE, slot.epoch - 1, slot.n, everything),
        ref.MaskRow(ref.FREE, slot.epoch - 1, slot.n, everything, more=1),
        ref.MaskRow(ref.FREE, slot.epoch, slot.n - 1, everything),
        ref.MaskRow(ref.DEAD_END, slot.epoch, slot.n - 1, everything),
    ):
        r = TableRound(device, stream, slots=1, draft_length=K, vocab=V)
        r.put(0, slot)
        r.write_mask(0, 0, row)
        out = r.verify(EYE[None])
        assert (out["count"][0], out["reason"][0]) == (0, ref.RUNNING), row


@pytest.mark.parametrize("state,reason", [(ref.DEAD_END, ref.DEAD), (ref.ERROR, ref.FAULT)])
def test_row_zero_dead_or_failed_ends_the_request(device, stream, state, reason):
    """Nothing is committed and the slot is inactive; further rounds leave it alone."""
    r, out = run_one(device, stream, chain(), states=(state, 1, 1, 1))
    assert (out["count"], out["reason"]) == (0, reason)
    again = r.verify(EYE[None])
    assert (again["slot"][0], again["count"][0], again["reason"][0]) == (0, 0, ref.RUNNING)


@pytest.mark.parametrize("f", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", [ref.DENSE, ref.POINT], ids=["dense", "point"])
def test_an_illegal_draft_is_refused_and_replaced(device, stream, f, kind):
    """A draft outside its mask, or no token at all, never passes, however likely its logit."""
    for wrong in (10, V, -1, 2**31 - 1):
        masks = np.ones((K + 1, V), bool)
        masks[0, 10] = False
        q = np.zeros(V)
        q[10] = 1.0
        slot = ref.replace(chain(f, (wrong, 11, 12)), kinds=(kind,) * 3, q=(q,) * 3)
        _, out = run_one(device, stream, slot, states=(2, 2, 2, 2), masks=masks)
        assert (out["count"], out["accepted"]) == (1, 0)
        assert out["tokens"][0] not in (wrong, 10)


def test_a_negative_draft_does_not_borrow_its_neighbours_probability(device, stream):
    """Draft -1 of slot 1 is refused although the cell before its row, slot 0's, holds 1."""
    r = TableRound(device, stream, slots=2, draft_length=K, vocab=V)
    logits = np.stack([EYE, EYE])
    logits[0, K], logits[0, K, V - 1] = -30.0, 30.0
    for i, drafts in enumerate([(10, 11, 12), (-1,)]):
        r.put(i, chain(SAMPLED, drafts))
        for j in range(K + 1):
            r.write_mask(i, j, ref.MaskRow(ref.FREE, 1, 20 + j))
    out = r.verify(logits)
    assert list(out["tokens"][0]) == [10, 11, 12, V - 1]
    assert (out["count"][1], out["accepted"][1], out["tokens"][1, 0]) == (1, 0, 10)


def test_a_zero_coin_does_not_accept_an_impossible_draft(device, stream):
    """The coin can be exactly 0: 0 * q < p stays false for p = 0."""
    seed = 575083  # found by search
    assert ref.coin(seed, 21) == 0.0
    masks = np.ones((K + 1, V), bool)
    masks[0, 10] = False
    q = np.full(V, 1 / V)
    for kind in (ref.DENSE, ref.POINT):
        slot = ref.replace(chain(SAMPLED, (10,), seed=seed), kinds=(kind,), q=(q,))
        _, out = run_one(device, stream, slot, states=(2, 2, 2, 2), masks=masks)
        assert (out["count"], out["accepted"]) == (1, 0)


def test_a_draft_that_its_table_calls_impossible_is_refused_and_counted(device, stream):
    """q(d) = 0 for a dense draft is a fault: refused although p(d) = 1, and counted."""
    slot = ref.replace(chain(SAMPLED), kinds=(ref.DENSE,) * 3)
    r, out = run_one(device, stream, slot)
    assert (out["count"], out["accepted"], out["tokens"][0]) == (1, 0, 10)
    assert r.sampler.faults.to_host()[0] == 1


def test_when_nothing_is_left_of_p_it_is_p_that_is_sampled(device, stream):
    """p = q up to rounding, and a refusal all the same: the token comes from p."""
    p = ref.distribution(EYE[0], np.ones(V, bool), SAMPLED).astype(np.float32).astype(np.float64)
    slot = ref.replace(chain(SAMPLED, (30,)), kinds=(ref.DENSE,), q=(np.maximum(p, 0.5),))
    _, out = run_one(device, stream, slot)
    assert (out["count"], out["accepted"], out["tokens"][0]) == (1, 0, 10)


def test_padding_rows_and_unused_entries_are_marked(device, stream):
    """Padding and the rows beyond the batch carry slot -1, and no state moves for them."""
    r = TableRound(device, stream, slots=4, draft_length=1, vocab=V)
    for i in range(4):
        r.put(i, chain(drafts=()))
        r.write_mask(i, 0, ref.MaskRow(ref.FREE, 1, 20, more=1))
    for _ in range(5):  # every entry of the ring has been used
        r.rows([0, 1, 2, 3])
        r.verify(np.repeat(EYE[None, :2], 4, axis=0))
    r.rows([2, -1])
    before = r.snapshot()["n"]
    out = r.verify(EYE[None, :2].repeat(2, axis=0))
    np.testing.assert_array_equal(out["slot"], [2, -1, -1, -1])
    np.testing.assert_array_equal(out["count"][:2], [1, 0])
    np.testing.assert_array_equal(r.snapshot()["n"] - before, [0, 0, 1, 0])
    np.testing.assert_array_equal(r.sampler.rows.to_host()[:2, 1], [1, 0])


def test_a_narrower_round_tests_fewer_drafts(device, stream):
    """A graph of smaller K tests its K drafts and takes the bonus from its last row."""
    r = TableRound(device, stream, slots=1, draft_length=K, vocab=V)
    r.put(0, chain())
    for j in range(2):
        r.write_mask(0, j, ref.MaskRow(ref.FREE, 1, 20 + j))
    out = r.verify(EYE[None, :2])
    assert list(out["tokens"][0, :2]) == [10, 11]
    assert (out["count"][0], out["accepted"][0], out["tested"][0]) == (2, 1, 1)


def test_no_random_number_is_used_twice_for_one_kept_token(monkeypatch):
    """Rejection sampling: for every kept token the named draws (draft, coin, residual, bonus) are
    all different, by the oracle that the kernels equal."""
    rng = np.random.default_rng(12)
    used: list[tuple[int, int, int]] = []
    original = ref.words

    def record(seed, position, purpose, ids, sample=0):
        used.append((seed, position, purpose))
        return original(seed, position, purpose, ids, sample)

    monkeypatch.setattr(ref, "words", record)
    everything = [ref.MaskRow(ref.FREE, 1, 0, more=1)] * (K + 1)
    kept = 0
    for seed in range(25):
        slot = ref.Slot(n=5, last=0, limit=40, seed=seed, filter=SAMPLED)
        named: dict[int, list[tuple[int, int, int]]] = {}
        while slot.active:
            used.clear()
            before = slot.n
            slot, outcome = ref.verify(slot, rng.normal(0, 2, (K + 1, V)), everything, V)
            for draw in used:
                if draw[1] <= slot.n:
                    named.setdefault(draw[1], []).append(draw)
            kept += len(outcome.tokens)
            assert slot.n == before + len(outcome.tokens)
            for j in range(1, K + 1):
                used.clear()
                slot = ref.draft(slot, j, rng.normal(0, 2, V), None, V, None, V)
                for draw in used:  # a draft of a dropped position is drawn anew, for another prefix
                    named[draw[1]] = [draw]
        for position, draws in named.items():
            assert len(draws) == len(set(draws)), f"position {position}: {draws}"
    assert kept == 25 * 34
