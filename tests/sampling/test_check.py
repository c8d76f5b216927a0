"""Tokens that are sampled without masks, checked, and sampled again if they are illegal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference_round as ref
from engine_util import patch_kernel_source
from sampling_round import TableRound
from test_verify import K, V, add_drafts, random_adjustment, random_masks, random_slot

LIMIT = 39


class CheckedRound(TableRound):
    """A round whose ready rows are sampled without masks.

    The test plays the grammar's check step. The masks in device memory forbid every token, so that
    a kernel that reads them for an unchecked row fails the test.

    Attributes
    ----------
    checked
        Tokens that were checked, and whether they were legal.
    unreached
        Set of (slot, row) that the check step does not reach.
    outdated
        Set of (slot, row) whose stamp is of an earlier replay.
    """

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.checked: list[tuple[int, bool]] = []
        self.unreached: set[tuple[int, int]] = set()
        self.outdated: set[tuple[int, int]] = set()

    def sample(self, logits, rows) -> None:
        self.stream.synchronize()
        stamps = self.exchange.stamps
        ready = np.argwhere(stamps["state"] == ref.READY)
        masks = self.exchange.device_masks.to_host()
        masks[ready[:, 1], ready[:, 0]] = 0
        self.exchange.device_masks.copy_from(masks)
        for slot, j in ready:
            stamps["state"][slot, j] = ref.UNCHECKED
        super().sample(logits, rows)
        self.sampler.publish_sampled(self.lane, rows)
        self.stream.synchronize()
        for slot, j in ready.tolist():
            self.check(slot, j)
        self.sampler.resample(self.lane, logits, rows)

    def check(self, slot: int, j: int) -> None:
        """Check the token of a row as the check step of the grammar does."""
        replay, token = self.exchange.sampled[slot, j].tolist()
        if replay != self.replay or (slot, j) in self.unreached:
            return
        stamp = self.exchange.stamps[slot, j]
        legal = token in ref.bits(self.exchange.masks[slot, j])
        self.checked.append((token, legal))
        if legal:
            stamp["detail"] = replay - ((slot, j) in self.outdated)
        stamp["state"] = ref.CHECKED if legal else ref.READY


@pytest.fixture
def make_checked(device, stream):
    """Return a function that creates a `CheckedRound`."""

    def make(**options) -> CheckedRound:
        return CheckedRound(device, stream, **options)

    return make


def optimistic_slot(rng: np.random.Generator) -> ref.Slot:
    """Return a random slot whose tokens may be sampled without a mask."""
    slot = random_slot(rng)
    verify = int(rng.choice([ref.REJECTION, ref.COUPLED, ref.PER_TOKEN]))
    kept = ref.Filter(slot.filter.temperature)
    adjust = random_adjustment(rng, V)
    if adjust is not None and adjust.params.min_tokens:
        adjust = None
    return replace(slot, filter=kept, verify=verify, adjust=adjust)


def test_checked_rounds_match_reference(make_checked, block):
    """Rounds with checked tokens have the results of rounds whose tokens are sampled under masks.

    The reference does not know of checks. Slots have chains and trees of drafts that are point
    masses or were sampled, and logits that are NaN or minus infinity.
    """
    rng = np.random.default_rng(9)
    num_slots = 20
    r = make_checked(slots=num_slots, draft_length=6, vocab=V, token_limit=LIMIT, block=block)
    seen = set()
    for _ in range(12 if block == 1 else 2):
        logits = rng.normal(0, 2, (num_slots, 7, V)).astype(np.float32)
        logits[rng.random(logits.shape) < 0.02] = -np.inf
        logits[rng.random(logits.shape[:2]) < 0.01] = np.nan
        logits[rng.random(logits.shape) < 0.002] = np.nan
        slots = [optimistic_slot(rng) for _ in range(num_slots)]
        for slot, rows in zip(slots, logits, strict=True):
            add_drafts(rng, slot, np.nan_to_num(rows, neginf=-9.0), np.ones(V, bool))
        masks = [random_masks(rng, slot, 6) for slot in slots]
        out = r.play(slots, logits, masks, rng.permutation(num_slots))
        seen |= set(zip(out["reason"].tolist(), (out["count"] > 1).tolist(), strict=True))
    assert {(ref.RUNNING, True), (ref.RUNNING, False), (ref.DEAD, False), (ref.STOP, False)} <= seen
    legal = [is_legal for _, is_legal in r.checked]
    assert 0.2 < np.mean(legal) < 0.9
    assert any(token < 0 for token, _ in r.checked)


@pytest.mark.parametrize("reason", ["unreached", "outdated"])
def test_round_ends_before_row_without_result_of_check(make_checked, reason):
    """A row that was not checked, or was checked in an earlier replay, is not ready."""
    drafts = (3, 4, 5)
    logits = np.zeros((1, K + 1, V), np.float32)
    logits[0, np.arange(K), drafts] = 9.0
    for j in range(K + 1):
        r = make_checked(slots=1, draft_length=K, vocab=V, token_limit=LIMIT)
        tree = ref.chain(0, *drafts)
        slot = ref.Slot(
            n=10,
            tree=tree,
            limit=100,
            seed=5,
            filter=ref.Filter(0.0),
            kinds=(ref.POINT,) * K,
            q=(None,) * K,
        )
        everything = np.ones(V, bool)
        rows = [ref.MaskRow(ref.READY, slot.epoch, 10 + i, everything) for i in range(K + 1)]
        getattr(r, reason).add((0, j))
        r.put(0, slot)
        for i, row in enumerate(rows):
            r.write_mask(0, i, row)
        out = r.verify(logits)
        assert out["count"][0] == j
        assert out["reason"][0] == ref.RUNNING


@pytest.mark.parametrize("gap", [-1e-2, -1e-5, 0.0, 1e-5, 1e-2])
def test_close_race_is_sampled_under_the_mask(make_checked, block, gap):
    """A token whose score is within the rounding error of another one is not published.

    With other rounding errors, the other token could win under the mask.
    """
    r = make_checked(slots=1, draft_length=0, vocab=V, token_limit=LIMIT, block=block)
    slot = ref.Slot(n=10, tree=ref.chain(0), limit=100, seed=5, filter=ref.Filter(1.0))
    noise = ref.gumbel(ref.words(slot.seed, 11, ref.NOISE, np.arange(V)))
    logits = np.full(V, -30.0)
    logits[[7, 20]] = [1.0 - noise[7], 1.0 - noise[20] + gap]
    r.put(0, slot)
    r.write_mask(0, 0, ref.MaskRow(ref.READY, slot.epoch, 10, np.ones(V, bool)))
    out = r.verify(logits.astype(np.float32)[None, None])
    winner = 20 if gap > 0 else 7
    published = -1 if abs(gap) < 1e-3 else winner
    assert r.checked == [(published, published >= 0)]
    if gap:
        assert out["tokens"][0, 0] == winner


@pytest.mark.full
@pytest.mark.parametrize(
    "old, new",
    [
        ("if (state == ROW_CHECKED) return;", "return;"),
        ("stamp->detail != *replay_number", "false"),
        ("#define CLOSE_SCORES 1.00003f", "#define CLOSE_SCORES 1.0f"),
    ],
    ids=["never resampled", "any replay", "no margin"],
)
def test_checks_detect_broken_kernels(make_checked, monkeypatch, old, new):
    """One of the tests of this file fails if a rule of the kernels is broken."""
    patch_kernel_source(monkeypatch, "sampling/kernels/check.cu", old, new)
    with pytest.raises(AssertionError):
        test_checked_rounds_match_reference(make_checked, 1)
        for reason in ("unreached", "outdated"):
            test_round_ends_before_row_without_result_of_check(make_checked, reason)
        for gap in (1e-5, 1e-2):
            test_close_race_is_sampled_under_the_mask(make_checked, 1, gap)
