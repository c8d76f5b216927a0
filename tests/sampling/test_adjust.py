"""Logit bias, penalties, min_tokens and log probabilities, compared with NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import reference_round as ref
from sampling_round import TableRound, even_rows

from graft.sampling.params import SamplingParams
from graft.sampling.state import LOGPROBS

VOCAB = 90
DRAFTS = 4
STOPS = (3, 70)
ADJUSTMENTS = [
    ref.Adjustment(SamplingParams()),
    ref.Adjustment(SamplingParams(logit_bias={4: 3.5, 7: -2.0, 70: 1e6})),
    ref.Adjustment(SamplingParams(allowed_ids=(1, 3, 5, 40, 70), logit_bias={5: 9.0})),
    ref.Adjustment(SamplingParams(banned_ids=tuple(range(0, 90, 2)))),
    ref.Adjustment(SamplingParams(presence_penalty=1.5), output=(5, 5, 8)),
    ref.Adjustment(SamplingParams(frequency_penalty=-0.7), output=(5, 5, 8)),
    ref.Adjustment(SamplingParams(repetition_penalty=1.7), prompt=(1, 1, 2, 9), output=(5, 8)),
    ref.Adjustment(
        SamplingParams(
            logit_bias={5: 2.0},
            banned_ids=(8,),
            presence_penalty=-2.0,
            frequency_penalty=0.3,
            repetition_penalty=0.6,
            min_tokens=5,
            logprobs=20,
        ),
        prompt=(5, 11),
        output=(5, 6, 6),
    ),
    ref.Adjustment(SamplingParams(min_tokens=1, logprobs=0)),
    ref.Adjustment(
        SamplingParams(
            logit_bias={5: 2.0},
            presence_penalty=1.0,
            min_tokens=4,
            logprobs=9,
            logprobs_masked=True,
        ),
        output=(5, 6),
    ),
    ref.Adjustment(SamplingParams(allowed_ids=STOPS, min_tokens=1)),
]


def slot_of(
    rng: np.random.Generator, adjustment: ref.Adjustment, verify: int, temperature: float
) -> ref.Slot:
    """Return a slot with random drafts, both sampled ones and point masses, that repeat tokens."""
    drafts = rng.choice([5, 5, 8, 40], rng.integers(0, DRAFTS + 1))
    tables = []
    kinds = []
    for d in drafts:
        table = rng.dirichlet(np.full(VOCAB, 0.3)).astype(np.float32)
        is_point = table[d] == 0 or rng.random() < 0.5
        tables.append(table)
        kinds.append(ref.POINT if is_point else ref.DENSE)
    return ref.Slot(
        n=10,
        tree=ref.chain(1, *map(int, drafts)),
        limit=100,
        seed=int(rng.integers(1 << 40)),
        filter=ref.Filter(temperature, top_k=30),
        verify=verify,
        stop_ids=STOPS,
        adjust=adjustment,
        kinds=tuple(kinds),
        q=tuple(tables),
    )


def masks_of(rng: np.random.Generator, slot: ref.Slot) -> list[ref.MaskRow]:
    """Return mask rows with and without a grammar, and some in which only stop ids are legal."""
    rows = []
    for j in range(DRAFTS + 1):
        legal = rng.random(VOCAB) < 0.7
        legal[[5, 8]] = True
        if rng.random() < 0.1:
            legal = np.isin(np.arange(VOCAB), STOPS)
        state = ref.READY if rng.random() < 0.8 else ref.FREE
        rows.append(ref.MaskRow(state, slot.epoch, slot.n + j, legal))
    return rows


def masked_logits(
    r: TableRound, slot: ref.Slot, j: int, logits: np.ndarray, row: ref.MaskRow
) -> np.ndarray:
    """Return the adjusted and masked logits of a row."""
    legal = row.allows(VOCAB, r.token_limit)
    if j >= len(slot.tree.token):
        return logits
    return np.where(legal, ref.adjusted(slot, j, logits, legal), -np.inf)


@pytest.mark.parametrize(
    "verify,temperature", [(0, 0.0), (0, 0.9), (1, 0.9)], ids=["greedy", "rejection", "coupled"]
)
def test_logit_adjustments_match_reference_in_all_modes(
    make_round, block, verify: int, temperature: float
) -> None:
    """Tokens, token counts and log probabilities of rounds with drafts match the reference."""
    rng = np.random.default_rng(verify + 10)
    r: TableRound = make_round(
        slots=len(ADJUSTMENTS), draft_length=DRAFTS, vocab=VOCAB, token_limit=VOCAB - 5, block=block
    )
    accepted = 0
    for _ in range(4):
        # A slot that gets a new logit adjustment in each round does not use the previous
        # adjustment.
        adjustments = [ADJUSTMENTS[i] for i in rng.permutation(len(ADJUSTMENTS))]
        slots = [slot_of(rng, adjustment, verify, temperature) for adjustment in adjustments]
        logits = rng.normal(0, 2, (len(slots), DRAFTS + 1, VOCAB)).astype(np.float32)
        logits[:, :, 5] += 6
        masks = [masks_of(rng, slot) for slot in slots]
        shaped = [
            [masked_logits(r, slot, j, logits[i, j], row) for j, row in enumerate(masks[i])]
            for i, slot in enumerate(slots)
        ]
        r.ring.row("logprobs", r.replay + 1)[:] = 0
        out = r.play(slots, logits, masks)
        accepted += int(out["accepted"].sum())
        tables = r.state.tables.to_host()
        reported = r.ring.row("logprobs", r.replay).view(LOGPROBS)
        for i, adjustment in enumerate(adjustments):
            params = adjustment.params
            tokens = out["tokens"][i, : out["count"][i]]
            if params.has_penalties:
                wanted = 2 * np.bincount([*adjustment.output, *tokens], minlength=VOCAB)
                wanted[list(adjustment.prompt)] += 1
                np.testing.assert_array_equal(tables[i, 1], wanted)
            if params.logprobs is None:
                assert not reported[i].view(np.int32).any()
                continue
            x = np.array(shaped[i] if params.logprobs_masked else logits[i]).astype(np.float64)
            x -= np.log(np.exp(x).sum(-1, keepdims=True))
            for j, token in enumerate(tokens):
                order = np.argsort(-x[j], kind="stable")
                best = order[: params.logprobs]
                np.testing.assert_allclose(reported[i, j]["logprob"], x[j, token], atol=2e-6)
                assert reported[i, j]["rank"] == 1 + list(order).index(token)
                np.testing.assert_array_equal(reported[i, j]["ids"][: params.logprobs], best)
                np.testing.assert_allclose(
                    reported[i, j]["logprobs"][: params.logprobs], x[j, best], atol=2e-6
                )
    assert accepted > 3


def test_logit_adjustments_are_exact_and_change_no_other_row(make_round, block) -> None:
    """Adjusted logits match the reference bit for bit, and other logits do not change.

    The logit of a banned token may be NaN.
    """
    rng = np.random.default_rng(3)
    r: TableRound = make_round(
        slots=len(ADJUSTMENTS), draft_length=DRAFTS, vocab=VOCAB, block=block
    )
    slots = [slot_of(rng, adjustment, 0, 1.0) for adjustment in ADJUSTMENTS]
    everything = np.ones(VOCAB, bool)
    logits = rng.normal(0, 2, (len(slots), DRAFTS + 1, VOCAB)).astype(np.float32)
    logits[3, :, 0] = np.nan
    for i, slot in enumerate(slots):
        r.put(i, slot)
        for j in range(DRAFTS + 1):
            r.write_mask(i, j, ref.MaskRow(ref.READY, slot.epoch, slot.n + j, everything))
    given = r.device.from_host(logits.reshape(-1, VOCAB), "float32")
    r.sampler.mask_rows.copy_to_device(r.lane, r.row_slot, 0, r.width)
    r.sampler.target.sample(r.lane, given, even_rows(r.device, r.row_slot, r.width))
    got = given.to_host().reshape(logits.shape)
    wanted = logits.copy()
    for i, slot in enumerate(slots):
        for j in range(len(slot.tree.token)):
            wanted[i, j] = ref.adjusted(slot, j, logits[i, j], everything)
    np.testing.assert_array_equal(got.view(np.int32), wanted.view(np.int32))
    for drafted in range(len(slots[3].tree.token)):
        assert r.sampler.arrays.row_status.to_host()[3 * r.width + drafted] == 1


def test_published_results_are_complete_when_host_sees_stamp(make_round) -> None:
    """The host reads the results of a round while the kernel that publishes them may still run."""
    rng = np.random.default_rng(4)
    r: TableRound = make_round(slots=3, draft_length=DRAFTS, vocab=VOCAB)
    r.waits_for_kernels = False
    for _ in range(10):
        slots = [slot_of(rng, ADJUSTMENTS[0], 0, 1.0) for _ in range(3)]
        logits = rng.normal(0, 2, (3, DRAFTS + 1, VOCAB)).astype(np.float32)
        r.play(slots, logits, [masks_of(rng, slot) for slot in slots])
        r.stream.synchronize()
