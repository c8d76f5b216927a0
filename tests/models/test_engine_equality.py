"""Speculation changes nothing: outputs are those of decoding without it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from engine_util import demo_engine, mixed_requests

from graft.models.request import Output, Request


def tokens(outputs: list[Output]) -> list[tuple[str, list[int]]]:
    return [(o.reason, o.tokens) for o in outputs]


def one_by_one(requests: list[Request]) -> list[tuple[str, list[int]]]:
    """The reference: no drafter, one request at a time, one round in flight."""
    with demo_engine(speculation=False, max_batch_size=1, overlap=False) as engine:
        return [tokens(engine.generate([r]))[0] for r in requests]


def check_batches(requests: list[Request], *, mask_drafts: bool, batches: range) -> None:
    expected = one_by_one(requests)
    order = random.Random(3)
    for batch in batches:
        shuffled = list(range(len(requests)))
        order.shuffle(shuffled)
        with demo_engine(max_batch_size=batch, mask_drafts=mask_drafts) as engine:
            outputs = engine.generate([requests[i] for i in shuffled])
            grammar = engine.counters()["grammar"]
            assert engine.stats.speculated_rounds > 0
        for i, output in zip(shuffled, outputs, strict=True):
            assert (output.reason, output.tokens) == expected[i], f"request {i}, batch {batch}"
        assert grammar["desyncs"] == 0


@pytest.mark.parametrize("mask_drafts", [True, False], ids=["masked", "unmasked"])
def test_greedy_equality(mask_drafts: bool) -> None:
    """A dozen guided prompts, greedy: token for token the output without speculation."""
    check_batches(mixed_requests(12), mask_drafts=mask_drafts, batches=range(1, 9, 3))


@pytest.mark.full
@pytest.mark.parametrize("mask_drafts", [True, False], ids=["masked", "unmasked"])
def test_greedy_equality_two_hundred(mask_drafts: bool) -> None:
    """200 guided prompts, greedy, at every batch size from 1 to 8 in mixed order."""
    check_batches(mixed_requests(200), mask_drafts=mask_drafts, batches=range(1, 9))


def test_coupled_equality() -> None:
    """Coupled verification is token-identical to stochastic decoding without speculation."""
    requests = [
        replace(r, temperature=0.8, top_p=0.95, top_k=50, seed=1000 + i, verify="coupled")
        for i, r in enumerate(mixed_requests(8))
    ]
    check_batches(requests, mask_drafts=True, batches=range(8, 9))


def test_draft_lengths_agree() -> None:
    """Every draft length from 1 to 5 gives the same greedy output."""
    requests = mixed_requests(4, seed=11)
    expected = one_by_one(requests)
    for draft_length in range(1, 6):
        with demo_engine(max_batch_size=4, draft_length=draft_length) as engine:
            assert tokens(engine.generate(requests)) == expected
