"""Verification, compared with the reference, and its rules one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import reference_round as ref
from sampling_round import TableRound

from graft.sampling.params import Relaxed

V = 41
K = 3
GREEDY = ref.Filter(0.0)
SAMPLED = ref.Filter(1.0)
both = pytest.mark.parametrize("f", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def random_filter(rng: np.random.Generator) -> ref.Filter:
    """Return a random filter; a third are greedy."""
    if rng.random() < 0.33:
        return GREEDY
    return ref.Filter(
        float(rng.choice([0.3, 1.0, 1.7])),
        top_k=int(rng.choice([0, 1, 5, 60])),
        top_p=float(rng.choice([1.0, 0.9, 0.4])),
        min_p=float(rng.choice([0.0, 0.05])),
    )


def random_slot(rng: np.random.Generator, vocab: int = V, stops: int = 8) -> ref.Slot:
    """Return a slot without drafts, with at most `stops` stop ids."""
    n = int(rng.integers(3, 200))
    return ref.Slot(
        n=n,
        tree=ref.chain(int(rng.integers(vocab))),
        limit=n + int(rng.integers(2, 9)),
        seed=int(rng.integers(2**63)),
        filter=random_filter(rng),
        verify=int(rng.integers(4)),
        epoch=int(rng.integers(1, 5)),
        sample=int(rng.choice([0, 0, 7])),
        stop_ids=tuple(rng.choice(vocab, rng.integers(0, stops + 1), replace=False).tolist()),
        relaxed=Relaxed(
            int(rng.choice([1, 2, 40])),
            float(rng.choice([0.0, 0.2, 1.0])),
            int(rng.integers(vocab)),
        ),
    )


def add_drafts(rng: np.random.Generator, slot: ref.Slot, logits: np.ndarray, known: np.ndarray):
    """Append random drafts from the known ids: mostly likely, some illegal, with tables near p.

    They form a tree if rows sample their own token, and sometimes otherwise.
    """
    most = logits.shape[0] - 1
    size = logits.shape[1]
    branches = slot.filter.greedy or slot.verify == ref.COUPLED or rng.random() < 0.2
    for _ in range(int(rng.integers(0, most + 1))):
        last = len(slot.drafts)
        j = int(rng.integers(0, last + 1)) if branches and rng.random() < 0.5 else last
        q = np.exp(logits[j] + rng.normal(0, 0.7, size)) * (rng.random(size) < 0.8)
        q /= q.sum()
        likely = int(np.argmax(logits[j])) if rng.random() < 0.6 else int(rng.choice(size, p=q))
        d = int(rng.integers(0, size)) if rng.random() < 0.1 else likely
        table = np.where(known, q.astype(np.float32).astype(np.float64), 0.0)
        if slot.tree.child(j, d) is None:
            ref.keep(slot, d, int(rng.random() < 0.3), table, j)


#: Stamps that make a row unusable: state, offsets of epoch and position, and `detail`.
FORGED = {
    "older epoch": (ref.READY, -1, 0),
    "newer epoch": (ref.READY, 1, 0),
    "position before": (ref.READY, 0, -1),
    "position behind": (ref.READY, 0, 1),
    "row of another draft": (ref.READY, 0, 2),
    "late": (ref.NOT_READY, 0, 0),
    "free, of another request": (ref.FREE, 1, 0),
    "free, elsewhere": (ref.FREE, 0, 1),
    "free for all, of another request": (ref.FREE, -1, 0, 1),
    "dead end, elsewhere": (ref.DEAD_END, 0, -1),
    "unknown state": (77, 0, 0),
}


def forged_row(slot: ref.Slot, j: int, name: str, legal: np.ndarray) -> ref.MaskRow:
    """Return row j with a stamp of another request, position or epoch."""
    state, epoch, position, *detail = FORGED[name]
    return ref.MaskRow(state, slot.epoch + epoch, slot.n + j + position, legal, *detail)


def random_masks(rng: np.random.Generator, slot: ref.Slot, most: int = K) -> list[ref.MaskRow]:
    """Mask rows: mostly ready or free, sometimes late, dead, failed or with a wrong stamp."""
    rows = []
    for j in range(most + 1):
        legal = rng.random(V) < rng.choice([0.2, 0.7, 1.0])
        if rng.random() < 0.9:
            children = [i for i, parent in enumerate(slot.tree.parent) if i and parent == j]
            legal[[slot.tree.token[i] for i in children]] = True
        state = int(rng.choice([1, 2, 2, 2, 2, 2, 2, 0, 3, 4])) if rng.random() < 0.5 else ref.READY
        depth = len(slot.tree.path(j)) if j < len(slot.tree.token) else j
        position = slot.n + depth + int(state == ref.FREE and rng.random() < 0.3)
        if not legal.any() and rng.random() < 0.5:
            legal[:] = True
        detail = int(rng.random() < 0.3)
        row = ref.MaskRow(state, slot.epoch, position, legal, detail)
        rows.append(
            forged_row(slot, j, str(rng.choice(list(FORGED))), legal)
            if rng.random() < 0.08
            else row
        )
    return rows


def test_verification_matches_reference_on_random_rounds(make_round, block):
    """Tokens, counts, reasons, state and records match in 400 random slots."""
    rng = np.random.default_rng(7)
    slots = 20
    limit = 39
    seen = set()
    for most, d2t in ((9, None), (K, np.sort(rng.choice(V, 29, replace=False)).astype(np.int32))):
        how = {"token_limit": limit, "d2t": d2t, "block": block}
        r = make_round(slots=slots, draft_length=most, vocab=V, **how)
        known = np.ones(V, bool) if d2t is None else np.isin(np.arange(V), d2t)
        for _ in range(10 if block == 1 else 3):
            logits = rng.normal(0, 2, (slots, most + 1, V)).astype(np.float32)
            logits[rng.random(logits.shape) < 0.02] = -np.inf
            logits[rng.random(logits.shape[:2]) < 0.01] = np.nan
            states = [random_slot(rng) for _ in range(slots)]
            for s, lg in zip(states, logits, strict=True):
                add_drafts(rng, s, np.nan_to_num(lg, neginf=-9.0), known)
            masks = [random_masks(rng, s, most) for s in states]
            out = r.play(states, logits, masks, rng.permutation(slots))
            seen |= set(zip(out["reason"].tolist(), (out["count"] > 0).tolist(), strict=True))
    wanted = {(reason, True) for reason in (ref.RUNNING, ref.STOP, ref.LENGTH)}
    assert wanted | {(ref.RUNNING, False), (ref.DEAD, False), (ref.FAULT, False)} <= seen


@pytest.mark.parametrize("pruned", [False, True], ids=["same", "pruned"])
def test_rejection_sampling_matches_reference(make_round, block, pruned):
    """Block and per-token verification match for sampled drafts, point masses and late rows."""
    rng = np.random.default_rng(11)
    most = 6
    slots = 32
    ids = np.sort(rng.choice(V, 29, replace=False)).astype(np.int32) if pruned else np.arange(V)
    r = make_round(
        slots=slots, draft_length=most, vocab=V, d2t=ids if pruned else None, block=block
    )
    accepted = Counter()
    for _ in range(4 if block == 1 else 2):
        logits = rng.normal(0, 2, (slots, most + 1, V)).astype(np.float32)
        states = []
        masks = []
        for i in range(slots):
            verify = ref.PER_TOKEN if rng.random() < 0.3 else ref.REJECTION
            f = ref.Filter(1.0, int(rng.choice([0, 12])))
            seed = int(rng.integers(2**63))
            s = ref.Slot(9, ref.chain(1), 40, seed=seed, verify=verify, filter=f)
            for j in range(most):
                near = (logits[i, j] + rng.normal(0, 0.5, V))[ids].astype(np.float32)
                answer = int(ids[near.argmax()]) if rng.random() < 0.1 else -1
                ref.draft(s, j + 1, near, None, V, ids, V, answer=answer)
            late = int(rng.integers(1, 20))
            states.append(s)
            masks.append(
                [
                    ref.MaskRow(ref.NOT_READY if j == late else ref.READY, 1, 9 + j, ALL)
                    for j in range(most + 1)
                ]
            )
        accepted.update(r.play(states, logits, masks)["accepted"].tolist())
    assert set(accepted) == set(range(most + 1))


# Rules, one by one. Logits make token 10 + j certain after row j.

EYE = np.full((K + 1, V), -30.0, np.float32)
EYE[np.arange(K + 1), 10 + np.arange(K + 1)] = 30.0
ALL = np.ones(V, bool)
FREE = ref.FREE
LATE = ref.NOT_READY
DEAD = ref.DEAD_END
FAULT = ref.ERROR


def slot_of(f=GREEDY, drafts=(10, 11, 12), kind=ref.POINT, q=None, **changes) -> ref.Slot:
    """Return a slot with the given drafts."""
    tables = q if isinstance(q, tuple) else (q,) * len(drafts)
    return ref.Slot(
        **{
            "n": 20,
            "tree": ref.chain(1, *drafts),
            "limit": 100,
            "seed": 9,
            "filter": f,
            "kinds": (kind,) * len(drafts),
            "q": tables,
            **changes,
        }
    )


def rows_of(slot: ref.Slot, *states: int, legal=ALL) -> list[ref.MaskRow]:
    """Return rows of the given states, followed by ready rows."""
    states = (*states, *(ref.READY,) * (K + 1 - len(states)))
    return [ref.MaskRow(s, slot.epoch, slot.n + j, legal) for j, s in enumerate(states)]


@pytest.fixture
def small(make_round) -> TableRound:
    return make_round(slots=2, draft_length=K, vocab=V)


def one(r: TableRound, slot: ref.Slot, rows: list[ref.MaskRow]) -> tuple:
    """Run a round of one slot; return tokens, accepted drafts and reason."""
    out = r.play([slot], EYE[None], [rows])
    count = out["count"][0]
    return out["tokens"][0, :count].tolist(), int(out["accepted"][0]), int(out["reason"][0])


#: What is special about slot and row states; tokens, accepted, reason.
RULES = {
    "all drafts and the bonus": ({}, (), ([10, 11, 12, 13], 3, 0)),
    "a wrong draft ends with what comes instead": ({"drafts": (10, 30, 12)}, (), ([10, 11], 1, 0)),
    "an accepted stop id has no bonus": ({"stop_ids": (11,)}, (), ([10, 11], 2, ref.STOP)),
    "a stop id instead of a draft": (
        {"drafts": (10, 30), "stop_ids": (3, 11)},
        (),
        ([10, 11], 1, ref.STOP),
    ),
    "stop before length": ({"limit": 22, "stop_ids": (10,)}, (), ([10], 1, ref.STOP)),
    "limit after one token": ({"limit": 22}, (), ([10], 1, ref.LENGTH)),
    "limit after two tokens": ({"limit": 23}, (), ([10, 11], 2, ref.LENGTH)),
    "limit after three tokens": ({"limit": 24}, (), ([10, 11, 12], 3, ref.LENGTH)),
    "limit after the bonus token": ({"limit": 25}, (), ([10, 11, 12, 13], 3, ref.LENGTH)),
    "row 2 late": ({}, (FREE, FREE, LATE), ([10, 11], 2, 0)),
    "row 2 dead": ({}, (FREE, FREE, DEAD), ([10, 11], 2, 0)),
    "row 2 failed": ({}, (FREE, FREE, FAULT), ([10, 11], 2, 0)),
    "row 0 late": ({}, (LATE,), ([], 0, 0)),
    "row 0 dead": ({}, (DEAD,), ([], 0, ref.DEAD)),
    "row 0 failed": ({}, (FAULT,), ([], 0, ref.FAULT)),
}


@both
@pytest.mark.parametrize("rule", RULES)
def test_verification_rules(small, f, rule):
    """Tokens and reason are as expected; an ended slot is inactive and does not change."""
    changes, states, expected = RULES[rule]
    slot = slot_of(f, **changes)
    rows = rows_of(slot, *states)
    assert one(small, slot, rows) == expected
    assert slot.active == (expected[2] == 0)
    if not slot.active:
        again = small.verify(EYE[None])
        assert (again["slot"][0], again["count"][0], again["reason"][0]) == (0, 0, 0)


@both
@pytest.mark.parametrize("kind", [ref.DENSE, ref.POINT], ids=["dense", "point"])
@pytest.mark.parametrize(
    "wrong, seed",
    [
        (10, 9),
        (V, 9),
        (-1, 9),
        (2**31 - 1, 9),
        (10, 1155247),  # found by search: its coin is 0
    ],
)
def test_verification_rejects_illegal_draft(small, f, kind, wrong, seed):
    """A draft outside the mask or vocabulary is never accepted, even with a coin of exactly 0."""
    assert (ref.coin(seed, 21, 0, 20) == 0.0) == (seed != 9)
    slot = slot_of(f, (wrong, 11, 12), kind, q=np.eye(V)[10], seed=seed)
    tokens, accepted, _ = one(small, slot, rows_of(slot, legal=np.arange(V) != 10))
    assert (len(tokens), accepted) == (1, 0) and tokens[0] not in (wrong, 10)


def test_verification_rejects_negative_draft_id(small):
    """Draft -1 of slot 1 is rejected although the array element before its row is 1."""
    logits = np.stack([EYE, EYE])
    logits[0, K] = -30.0
    logits[0, K, V - 1] = 30.0
    slots = [slot_of(SAMPLED), slot_of(SAMPLED, (-1,))]
    out = small.play(slots, logits, [rows_of(s) for s in slots])
    assert list(out["tokens"][0]) == [10, 11, 12, V - 1]
    assert (out["count"][1], out["accepted"][1], out["tokens"][1, 0]) == (1, 0, 10)


def test_verification_counts_impossible_drafts_as_faults(small):
    """A dense draft with q(d) = 0 is rejected and counted as a fault.

    If p equals q up to rounding and the draft is rejected, the token is sampled from p.
    """
    p = ref.distribution(EYE[0], ALL, SAMPLED).astype(np.float32).astype(np.float64)
    for drafts, q in (((30,), np.maximum(p, 0.5)), ((30, 11, 12), np.zeros(V))):
        assert small.sampler.faults.to_host()[0] == 0
        slot = slot_of(SAMPLED, drafts, ref.DENSE, q=q)
        assert one(small, slot, rows_of(slot)) == ([10], 0, 0)
    assert small.sampler.faults.to_host()[0] == 3


#: With probabilities .5, .3, .15, .05 of ids 10 .. 13: how, an illegal id, drafts; what comes.
LIKELY = {
    "second best": (Relaxed(2, 0.21), -1, (11, 11), ([11, 11, 10], 2)),
    "not among the best": (Relaxed(1, 1.0), -1, (11, 11), ([10], 0)),
    "too far below the best": (Relaxed(9, 0.19), -1, (11, 10), ([10], 0)),
    "among what is legal": (Relaxed(2, 0.31), 10, (12, 11), ([12, 11, 11], 2)),
    "illegal": (Relaxed(40, 1.0), 10, (10, 11), ([11], 0)),
    "no token": (Relaxed(40, 1.0), -1, (V, 11), ([10], 0)),
    "behind the end": (Relaxed(2, 0.21, until=11), -1, (11, 11), ([11, 10], 1)),
    "exact to the end": (Relaxed(2, 0.21, until=10), -1, (10, 11), ([10, 10], 1)),
}


@both
@pytest.mark.parametrize("name", LIKELY)
def test_relaxed_verification_accepts_likely_drafts(small, f, name):
    """Likely legal drafts are accepted up to `until`; then the request is coupled."""
    how, illegal, drafts, expected = LIKELY[name]
    logits = np.full((K + 1, V), -30.0, np.float32)
    logits[:, 10:14] = np.log([0.5, 0.3, 0.15, 0.05])
    slot = slot_of(f, drafts, verify=ref.RELAXED, relaxed=how)
    out = small.play([slot], logits[None], [rows_of(slot, legal=np.arange(V) != illegal)])
    tokens = out["tokens"][0, : out["count"][0]].tolist()
    accepted = int(out["accepted"][0])
    assert (tokens, accepted) == expected or (f is SAMPLED and accepted >= expected[1])
    ended = how.until in tokens
    assert small.state.to_host()["verify"][0] == (ref.COUPLED if ended else ref.RELAXED)


def test_accept_prob_follows_past_rounds(make_round):
    """Acceptance probabilities are moving averages that recover to 0.7 ** j and do not increase."""
    rng = np.random.default_rng(8)
    most = 5
    count = 60
    r = make_round(slots=count, draft_length=most, vocab=V)
    logits = rng.normal(0, 3, (count, most + 1, V)).astype(np.float32)
    slots = [random_slot(rng) for _ in range(count)]
    for i, slot in enumerate(slots):
        add_drafts(rng, slot, logits[i], np.ones(V, bool))
        r.put(i, slot)
        for j in range(most + 1):
            r.write_mask(i, j, ref.MaskRow(ref.FREE, slot.epoch, 0, detail=1))
    state = r.state.to_host()
    first = np.cumprod(np.full(most, 0.7, np.float32))
    np.testing.assert_array_equal(state["accept_prob"][:, :most], np.tile(first, (count, 1)))
    before = np.sort(rng.random((count, most), np.float32))[:, ::-1]
    state["accept_prob"][:, :most] = before
    r.state.copy_from(state)
    out = r.verify(logits)
    got = r.state.to_host()["accept_prob"]
    deepest = 0
    for i, slot in enumerate(slots):
        node = 0
        reached = np.zeros(most, np.float32)
        for token in out["tokens"][i, : out["count"][i]]:
            node = slot.tree.child(node, int(token))
            if node is None:
                break
            reached[node - 1] = 1
        tested = np.arange(most) < len(slot.drafts)
        deepest = max(deepest, reached.sum())
        own = np.where(
            tested,
            reached + np.float32(0.8) * (before[i] - reached),
            before[i] + np.float32(1 / 64) * (first - before[i]),
        )
        np.testing.assert_array_equal(got[i, :most], np.minimum.accumulate(own))
    assert deepest > 2
