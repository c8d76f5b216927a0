"""Verification of drafts: comparison with the reference, and one test per rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference_round as ref
from sampling_round import TableRound

from graft.sampling.params import Relaxed, SamplingParams

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


def random_adjustment(rng: np.random.Generator, vocab: int) -> ref.Adjustment | None:
    """Return random logit adjustments after an output of two tokens, or None."""
    some = tuple(rng.choice(vocab, 12, replace=False).tolist())
    choices: list[dict[str, Any]] = [
        {"allowed_ids": some},
        {"banned_ids": some},
        {"logit_bias": dict.fromkeys(some, 3.0)},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": 1.5},
        {"min_tokens": 5, "logit_bias": dict.fromkeys(some, -2.0)},
    ]
    index = int(rng.integers(2 * len(choices)))
    if index >= len(choices):
        return None
    params = SamplingParams(**choices[index])
    return ref.Adjustment(params, prompt=some[:3], output=some[2:4])


def add_drafts(rng: np.random.Generator, slot: ref.Slot, logits: np.ndarray, known: np.ndarray):
    """Append random drafts to a slot.

    Most drafts are likely, and some are illegal. Their tables are close to the target distribution
    and contain only `known` ids. The drafts form a tree if rows sample their own token, and
    sometimes otherwise.
    """
    max_drafts = logits.shape[0] - 1
    size = logits.shape[1]
    branches = slot.filter.greedy or slot.verify == ref.COUPLED or rng.random() < 0.2
    for _ in range(int(rng.integers(0, max_drafts + 1))):
        parent = len(slot.drafts)
        if branches and rng.random() < 0.5:
            parent = int(rng.integers(0, parent + 1))
        noise = rng.normal(0, 0.7, size)
        q = np.exp(logits[parent] + noise) * (rng.random(size) < 0.8)
        q /= q.sum()
        token = int(rng.choice(size, p=q))
        if rng.random() < 0.6:
            token = int(np.argmax(logits[parent]))
        if rng.random() < 0.1:
            token = int(rng.integers(0, size))
        q32 = q.astype(np.float32).astype(np.float64)
        table = np.where(known, q32, 0.0)
        if slot.tree.child(parent, token) is None:
            kind = int(rng.random() < 0.3)
            ref.keep(slot, token, kind, table, parent)


#: Stamps that make a row unusable: state, offsets of epoch and position, and `detail`.
FORGED = {
    "older epoch": (ref.READY, -1, 0),
    "newer epoch": (ref.READY, 1, 0),
    "previous position": (ref.READY, 0, -1),
    "next position": (ref.READY, 0, 1),
    "row of another draft": (ref.READY, 0, 2),
    "late": (ref.NOT_READY, 0, 0),
    "free, of another request": (ref.FREE, 1, 0),
    "free, at another position": (ref.FREE, 0, 1),
    "no grammar, of another request": (ref.FREE, -1, 0, 1),
    "dead end, at another position": (ref.DEAD_END, 0, -1),
    "unknown state": (77, 0, 0),
}


def forged_row(slot: ref.Slot, j: int, name: str, legal: np.ndarray) -> ref.MaskRow:
    """Return row j with a stamp of another request, position or epoch."""
    state, epoch, position, *detail = FORGED[name]
    return ref.MaskRow(state, slot.epoch + epoch, slot.n + j + position, legal, *detail)


#: States from which a random row's state is chosen; most rows are ready.
RANDOM_STATES = [ref.FREE, *[ref.READY] * 6, ref.NOT_READY, ref.DEAD_END, ref.ERROR]


def random_mask(rng: np.random.Generator, slot: ref.Slot, j: int) -> ref.MaskRow:
    """Return row j, which in most cases is ready or free and allows the drafts below node j."""
    legal = rng.random(V) < rng.choice([0.2, 0.7, 1.0])
    if rng.random() < 0.9:
        legal[[slot.tree.token[child] for child in slot.tree.children(j)]] = True
    if not legal.any() and rng.random() < 0.5:
        legal[:] = True
    if rng.random() < 0.08:
        name = str(rng.choice(list(FORGED)))
        return forged_row(slot, j, name, legal)
    state = ref.READY
    if rng.random() < 0.5:
        state = int(rng.choice(RANDOM_STATES))
    depth = len(slot.tree.path(j)) if j < len(slot.tree.token) else j
    position = slot.n + depth
    if state == ref.FREE and rng.random() < 0.3:
        position += 1
    detail = int(rng.random() < 0.3)
    return ref.MaskRow(state, slot.epoch, position, legal, detail)


def random_masks(
    rng: np.random.Generator, slot: ref.Slot, max_drafts: int = K
) -> list[ref.MaskRow]:
    """Return the mask rows of a slot."""
    return [random_mask(rng, slot, j) for j in range(max_drafts + 1)]


def test_verification_matches_reference_on_random_rounds(make_round, block):
    """The results of hundreds of random slots match the reference.

    Compared are tokens, counts, end reasons, slot states and the records for the grammar worker.
    """
    rng = np.random.default_rng(7)
    num_slots = 20
    pruned = np.sort(rng.choice(V, 29, replace=False)).astype(np.int32)
    seen = set()  # (reason, whether tokens were committed)
    for max_drafts, d2t in ((9, None), (K, pruned)):
        r = make_round(
            slots=num_slots, draft_length=max_drafts, vocab=V, token_limit=39, d2t=d2t, block=block
        )
        known = np.ones(V, bool) if d2t is None else np.isin(np.arange(V), d2t)
        for _ in range(6 if block == 1 else 2):
            logits = rng.normal(0, 2, (num_slots, max_drafts + 1, V)).astype(np.float32)
            logits[rng.random(logits.shape) < 0.02] = -np.inf
            logits[rng.random(logits.shape[:2]) < 0.01] = np.nan
            slots = [random_slot(rng) for _ in range(num_slots)]
            for slot, rows in zip(slots, logits, strict=True):
                add_drafts(rng, slot, np.nan_to_num(rows, neginf=-9.0), known)
            masks = [random_masks(rng, slot, max_drafts) for slot in slots]
            out = r.play(slots, logits, masks, rng.permutation(num_slots))
            has_tokens = out["count"] > 0
            seen |= set(zip(out["reason"].tolist(), has_tokens.tolist(), strict=True))
    with_tokens = {(reason, True) for reason in (ref.RUNNING, ref.STOP, ref.LENGTH)}
    without_tokens = {(reason, False) for reason in (ref.RUNNING, ref.DEAD, ref.FAULT)}
    assert with_tokens | without_tokens <= seen


@pytest.mark.parametrize("pruned", [False, True], ids=["same", "pruned"])
@pytest.mark.full("block1-pruned", "block64-same")
def test_rejection_sampling_matches_reference(make_round, block, pruned):
    """Block and per-token verification match the reference.

    The chains have sampled drafts, point masses and mask rows that are not ready.
    """
    rng = np.random.default_rng(11)
    max_drafts = 6
    num_slots = 32
    d2t = None
    ids = np.arange(V)
    if pruned:
        d2t = ids = np.sort(rng.choice(V, 29, replace=False)).astype(np.int32)
    r = make_round(slots=num_slots, draft_length=max_drafts, vocab=V, d2t=d2t, block=block)
    accepted = set()
    for _ in range(2):
        logits = rng.normal(0, 2, (num_slots, max_drafts + 1, V)).astype(np.float32)
        slots = []
        masks = []
        for rows in logits:
            slot = ref.Slot(9, ref.chain(1), 40)
            slot.verify = ref.PER_TOKEN if rng.random() < 0.3 else ref.REJECTION
            slot.filter = ref.Filter(1.0, top_k=int(rng.choice([0, 12])))
            slot.seed = int(rng.integers(2**63))
            for j in range(max_drafts):
                noise = rng.normal(0, 0.5, V)
                draft_logits = (rows[j] + noise)[ids].astype(np.float32)
                answer = -1
                if rng.random() < 0.1:
                    answer = int(ids[draft_logits.argmax()])
                ref.draft(slot, j + 1, draft_logits, None, V, ids, V, answer=answer)
            states = [ref.READY] * (max_drafts + 1)
            late = int(rng.integers(1, 20))
            if late <= max_drafts:
                states[late] = ref.NOT_READY
            slots.append(slot)
            masks.append([ref.MaskRow(state, 1, 9 + j, ALL) for j, state in enumerate(states)])
        out = r.play(slots, logits, masks)
        accepted.update(out["accepted"].tolist())
    assert accepted == set(range(max_drafts + 1))


# The following tests check one rule each. Their logits make token 10 + j certain after row j.

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
    rows = []
    for j in range(K + 1):
        state = states[j] if j < len(states) else ref.READY
        rows.append(ref.MaskRow(state, slot.epoch, slot.n + j, legal))
    return rows


@pytest.fixture
def small(make_round) -> TableRound:
    return make_round(slots=2, draft_length=K, vocab=V)


def one(r: TableRound, slot: ref.Slot, rows: list[ref.MaskRow]) -> tuple:
    """Run a round of one slot; return tokens, accepted drafts and reason."""
    out = r.play([slot], EYE[None], [rows])
    count = out["count"][0]
    tokens = out["tokens"][0, :count].tolist()
    return tokens, int(out["accepted"][0]), int(out["reason"][0])


#: Cases by name: fields of the slot, states of the first rows, and (expected tokens, accepted
#: drafts, reason).
RULES = {
    "all drafts and the bonus": ({}, (), ([10, 11, 12, 13], 3, 0)),
    "a wrong draft is replaced by the target's token": (
        {"drafts": (10, 30, 12)},
        (),
        ([10, 11], 1, 0),
    ),
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
    """Each case yields the expected tokens and end reason; an ended slot does not change again."""
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
    rows = rows_of(slot, legal=np.arange(V) != 10)
    tokens, accepted, _ = one(small, slot, rows)
    assert (len(tokens), accepted) == (1, 0)
    assert tokens[0] not in (wrong, 10)


def test_verification_rejects_negative_draft_id(small):
    """A draft with token id -1 is rejected.

    The array element at index -1 is the last probability of the row before, which is 1.
    """
    logits = np.stack([EYE, EYE])
    logits[0, K] = -30.0
    logits[0, K, V - 1] = 30.0
    slots = [slot_of(SAMPLED), slot_of(SAMPLED, (-1,))]
    out = small.play(slots, logits, [rows_of(s) for s in slots])
    assert list(out["tokens"][0]) == [10, 11, 12, V - 1]
    assert (out["count"][1], out["accepted"][1], out["tokens"][1, 0]) == (1, 0, 10)


def test_verification_counts_impossible_drafts_as_faults(small):
    """A sampled draft d with draft probability q(d) = 0 is rejected and counted as a fault.

    If p equals q up to rounding and the draft is rejected, the token is sampled from p.
    """
    p = ref.distribution(EYE[0], ALL, SAMPLED).astype(np.float32).astype(np.float64)
    for drafts, q in (((30,), np.maximum(p, 0.5)), ((30, 11, 12), np.zeros(V))):
        assert small.sampler.arrays.faults.to_host()[0] == 0
        slot = slot_of(SAMPLED, drafts, ref.DENSE, q=q)
        assert one(small, slot, rows_of(slot)) == ([10], 0, 0)
    assert small.sampler.arrays.faults.to_host()[0] == 3


#: Ids 10 .. 13 have the probabilities .5, .3, .15 and .05. Cases by name: acceptance criterion, an
#: illegal id or -1, the drafts, and (expected tokens, accepted drafts).
LIKELY = {
    "second best": (Relaxed(2, 0.21), -1, (11, 11), ([11, 11, 10], 2)),
    "not among the best": (Relaxed(1, 1.0), -1, (11, 11), ([10], 0)),
    "too far below the best": (Relaxed(9, 0.19), -1, (11, 10), ([10], 0)),
    "among what is legal": (Relaxed(2, 0.31), 10, (12, 11), ([12, 11, 11], 2)),
    "illegal": (Relaxed(40, 1.0), 10, (10, 11), ([11], 0)),
    "no token": (Relaxed(40, 1.0), -1, (V, 11), ([10], 0)),
    "after until": (Relaxed(2, 0.21, until=11), -1, (11, 11), ([11, 10], 1)),
    "draft is until": (Relaxed(2, 0.21, until=10), -1, (10, 11), ([10, 10], 1)),
}


@both
@pytest.mark.parametrize("name", LIKELY)
def test_relaxed_verification_accepts_likely_drafts(small, f, name):
    """Relaxed verification accepts likely legal drafts up to the token `until`.

    After this token, the verification mode of the request is "coupled".
    """
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
    """Acceptance probabilities are moving averages, and they do not increase with the draft.

    In rounds that do not test draft j, its probability recovers towards 0.7 ** j.
    """
    rng = np.random.default_rng(8)
    max_drafts = 5
    count = 60
    r = make_round(slots=count, draft_length=max_drafts, vocab=V)
    logits = rng.normal(0, 3, (count, max_drafts + 1, V)).astype(np.float32)
    slots = [random_slot(rng) for _ in range(count)]
    for i, slot in enumerate(slots):
        add_drafts(rng, slot, logits[i], np.ones(V, bool))
        r.put(i, slot)
        for j in range(max_drafts + 1):
            r.write_mask(i, j, ref.MaskRow(ref.FREE, slot.epoch, 0, detail=1))
    state = r.state.to_host()
    first = np.cumprod(np.full(max_drafts, 0.7, np.float32))
    np.testing.assert_array_equal(state["accept_prob"][:, :max_drafts], np.tile(first, (count, 1)))
    before = np.sort(rng.random((count, max_drafts), np.float32))[:, ::-1]
    state["accept_prob"][:, :max_drafts] = before
    r.state.copy_from(state)
    out = r.verify(logits)
    got = r.state.to_host()["accept_prob"]
    deepest = 0
    for i, slot in enumerate(slots):
        node = 0
        reached = np.zeros(max_drafts, np.float32)
        for token in out["tokens"][i, : out["count"][i]]:
            node = slot.tree.child(node, int(token))
            if node is None:
                break
            reached[node - 1] = 1
        tested = np.arange(max_drafts) < len(slot.drafts)
        deepest = max(deepest, reached.sum())
        averaged = reached + np.float32(0.8) * (before[i] - reached)
        recovered = before[i] + np.float32(1 / 64) * (first - before[i])
        wanted = np.where(tested, averaged, recovered)
        np.testing.assert_array_equal(got[i, :max_drafts], np.minimum.accumulate(wanted))
    assert deepest > 2
