"""Automatic draft length: lengths that are chosen for given acceptance and round times."""

import logging
from itertools import accumulate
from operator import mul

import pytest
from engine_util import TARGET, demo_engine

from graft.models.drafters import UserDrafter
from graft.models.request import Request
from graft.models.round.budget import (
    DECAY,
    DECISION_INTERVAL,
    EXPLORATION_PERIOD,
    EXPLORATION_ROUNDS,
    INITIAL_ACCEPTANCE,
    MIN_GAIN,
    DraftBudget,
    draft_lengths,
)


class FakeRequest:
    """Key for a request's averages. `DraftBudget` reads no attribute of requests."""


def budget(times, levels=None, **options):
    """Return a budget for one bucket of one batch row, and a list with one request.

    `times` has the time of an idle round in nanoseconds for each draft length.
    """
    max_depth = max(times) if levels is None else levels
    draft_budget = DraftBudget(list(times), max_depth, **options)
    for length, ns in times.items():
        draft_budget.record_time(1, length, ns, idle=True)
    return draft_budget, [FakeRequest()]


def chosen(draft_budget, requests, rounds):
    return [draft_budget.choose(1, requests) for _ in range(rounds)]


def record(draft_budget, request, length, accepted, size=1, before=None, known=None):
    """Record the acceptance of one round.

    By default, the previous round had the same draft length, and no draft was cut.
    """
    if before is None:
        before = draft_budget.drafts_to_generate(size, length)
    if known is None:
        known = before
    draft_budget.record_acceptance(request, size, length, before, known, accepted)


def accept(draft_budget, request, length, accepted, rounds=40):
    """Record `rounds` rounds with `accepted` accepted drafts each."""
    for _ in range(rounds):
        record(draft_budget, request, length, accepted)


def test_draft_lengths_double_up_to_maximum():
    """The lengths are 0, all lengths that are one less than a power of two, and the maximum."""
    assert [draft_lengths(n) for n in (0, 1, 2, 3, 5, 7)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 1, 3, 5],
        [0, 1, 3, 7],
    ]


def test_draft_budget_rates_are_expected_tokens_per_time():
    """The rate is the expected number of tokens of a round, divided by the round's time.

    The expected number is 1 plus the sum of the products of acceptance probabilities.
    """
    draft_budget, (one,) = budget({0: 10, 1: 12, 3: 20})
    other = FakeRequest()
    chances = [INITIAL_ACCEPTANCE] * 3
    for accepted in (2, 0, 3, 1, 1):
        record(draft_budget, one, 3, accepted)
        for j in range(min(3, accepted + 1)):
            chances[j] = DECAY * chances[j] + (1 - DECAY) * (j < accepted)
    s = list(accumulate(chances, mul))
    own = [(1 + sum(s[:k])) / t for k, t in ((0, 10), (1, 12), (3, 20))]
    assert draft_budget.expected_rates(1, [one]) == pytest.approx(own)
    # A new request starts with the average acceptance probabilities of all requests.
    for length, ns in ((0, 10), (1, 12), (3, 20)):
        draft_budget.record_time(2, length, ns, idle=True)
    assert draft_budget.expected_rates(2, [one, other]) == pytest.approx([2 * r for r in own])
    accept(draft_budget, other, 3, 0)
    assert draft_budget.expected_rates(1, [one]) == pytest.approx(own)
    both = [2 / 10, (2 + s[0] + s[1]) / 12, (2 + sum(s)) / 20]  # both rows go to the first request
    assert draft_budget.expected_rates(2, [one, other]) == pytest.approx(both, rel=1e-3)


def test_draft_budget_generates_next_greater_length():
    """With several batch rows, a round generates as many drafts as the next greater length."""
    draft_budget, _ = budget({0: 10, 1: 12, 3: 20, 7: 30})
    assert [draft_budget.drafts_to_generate(1, n) for n in draft_budget.lengths] == [0, 1, 3, 7]
    assert [draft_budget.drafts_to_generate(4, n) for n in draft_budget.lengths] == [0, 3, 7, 7]


def test_draft_budget_ignores_missing_and_cut_drafts():
    """Drafts that could not be generated, and cut drafts, do not change the average acceptance."""
    draft_budget, (one,) = budget({0: 10, 1: 12, 3: 20})
    before = draft_budget.expected_rates(1, [one])
    record(draft_budget, one, 3, 0, before=0)
    assert draft_budget.expected_rates(1, [one]) == before
    record(draft_budget, one, 1, 1, before=3, known=1)
    record(draft_budget, one, 3, 1, before=1)
    first = 1 - (1 - INITIAL_ACCEPTANCE) * DECAY**2
    s = list(accumulate([first] * 3, mul))
    assert draft_budget.expected_rates(1, [one]) == pytest.approx(
        [0.1, (1 + s[0]) / 12, (1 + sum(s)) / 20]
    )
    record(draft_budget, one, 3, 2, before=2)
    s = list(accumulate([1 - (1 - first) * DECAY] * 3, mul))
    assert draft_budget.expected_rates(1, [one])[2] == pytest.approx((1 + sum(s)) / 20)


def test_draft_budget_counts_missing_drafts_as_rejected():
    """Drafts that the drafter could have generated, but did not, count as rejected.

    Here the drafter may generate three drafts per round and generates none.
    """
    draft_budget, (one,) = budget({0: 10, 3: 11})
    assert chosen(draft_budget, [one], 1) == [3]
    accept(draft_budget, one, 3, 0)
    assert draft_budget.expected_rates(1, [one]) == pytest.approx([1 / 10, 1 / 11], rel=1e-3)


def test_draft_budget_prefers_times_of_real_rounds():
    """The time of a draft length is the average time of its rounds.

    For a length without rounds, the idle time is multiplied by the ratio of measured times to idle
    times of the other lengths.
    """
    draft_budget, (one,) = budget({0: 10, 1: 12, 3: 20})
    idle = draft_budget.expected_rates(1, [one])
    draft_budget.record_time(1, 1, 30, idle=False)
    draft_budget.record_time(1, 1, 40, idle=False)
    live = DECAY * 30 + (1 - DECAY) * 40
    assert draft_budget.expected_rates(1, [one]) == pytest.approx([r * 12 / live for r in idle])
    draft_budget.record_time(1, 0, 10, idle=False)
    scale = (live + 10) / 22
    assert draft_budget.expected_rates(1, [one]) == pytest.approx(
        [idle[0], idle[1] * 12 / live, idle[2] / scale]
    )


def test_draft_budget_uses_minimum_idle_time():
    draft_budget, (one,) = budget({0: 900, 1: 10})
    draft_budget.record_time(1, 0, 10, idle=True)
    draft_budget.record_time(1, 0, 50, idle=True)
    assert draft_budget.expected_rates(1, [one]) == pytest.approx(
        [1 / 10, (1 + INITIAL_ACCEPTANCE) / 10]
    )


def test_draft_budget_disables_and_explores_drafting(caplog):
    """The budget chooses length 0 if no draft is accepted, and logs this once.

    The budget still tries a longer length at fixed intervals, and drafts again once drafts are
    accepted.
    """
    draft_budget, requests = budget({0: 10, 1: 12, 3: 14})
    num_exploited = EXPLORATION_PERIOD - EXPLORATION_ROUNDS
    explored = [1] * EXPLORATION_ROUNDS
    with caplog.at_level(logging.INFO, "graft"):
        lengths = chosen(draft_budget, requests, DECISION_INTERVAL)
        assert lengths == [3] * DECISION_INTERVAL
        accept(draft_budget, requests[0], 3, 0)
        lengths = chosen(draft_budget, requests, EXPLORATION_PERIOD - DECISION_INTERVAL)
        assert lengths == [0] * (num_exploited - DECISION_INTERVAL) + explored
        lengths = chosen(draft_budget, requests, EXPLORATION_PERIOD)
        assert lengths == [0] * num_exploited + explored
        accept(draft_budget, requests[0], 3, 3)
        lengths = chosen(draft_budget, requests, EXPLORATION_PERIOD)
        assert lengths == [3] * num_exploited + explored
        accept(draft_budget, requests[0], 3, 0)
        chosen(draft_budget, requests, 1)
    assert [r.message for r in caplog.records] == [caplog.records[0].message]
    assert "does not pay off for batches of 1" in caplog.text


def test_draft_budget_requires_minimum_gain():
    """The length changes only at a decision, and only if the rate grows by at least `MIN_GAIN`."""
    draft_budget, (one,) = budget({0: 100, 1: 170 / MIN_GAIN})
    assert chosen(draft_budget, [one], 1) == [1]
    draft_budget.record_time(1, 1, 170 * 1.04, idle=False)
    draft_budget.record_time(1, 0, 100, idle=False)
    assert set(chosen(draft_budget, [one], DECISION_INTERVAL)) == {1}
    changed = []
    for _ in range(5 * DECISION_INTERVAL):
        draft_budget.record_time(1, 1, 170 * 1.08, idle=False)
        changed += chosen(draft_budget, [one], 1)
    first = changed.index(0)
    assert first % DECISION_INTERVAL == DECISION_INTERVAL - 1
    assert set(changed[first:]) == {0}


def test_draft_budget_counts_rounds_of_loops():
    """A launch may run many rounds; the length is chosen anew after `DECISION_INTERVAL` of them."""
    draft_budget, (one,) = budget({0: 100, 1: 170 / MIN_GAIN})
    assert chosen(draft_budget, [one], 1) == [1]
    draft_budget.record_time(1, 0, 100, idle=False)
    for _ in range(40):
        draft_budget.record_time(1, 1, 170 * 1.08, idle=False)
    assert chosen(draft_budget, [one], 1) == [0]


def test_draft_budget_decides_per_bucket():
    """Where additional rows are expensive, a larger bucket uses fewer drafts."""
    draft_budget, (one,) = budget({0: 10, 3: 11})
    for length, ns in ((0, 10), (3, 40)):
        draft_budget.record_time(8, length, ns, idle=True)
    assert [draft_budget.choose(size, [one] * size) for size in (1, 8)] == [3, 0]


def test_draft_budget_tracks_tree_sizes_separately():
    """Each tree size has its own averages, and a path has at most `max_depth` drafts."""
    draft_budget, (one,) = budget({0: 10, 1: 10, 7: 10}, levels=3, is_tree=True)
    first = list(accumulate([INITIAL_ACCEPTANCE] * 3, mul))
    assert draft_budget.expected_rates(1, [one]) == pytest.approx(
        [0.1, (1 + INITIAL_ACCEPTANCE) / 10, (1 + sum(first)) / 10]
    )
    record(draft_budget, one, 1, 1, before=7, known=1)
    accept(draft_budget, one, 7, 1)
    assert draft_budget.expected_rates(1, [one]) == pytest.approx(
        [0.1, (1 + INITIAL_ACCEPTANCE) / 10, 0.2], rel=1e-3
    )


@pytest.mark.parametrize(
    "drafter, wanted", [(TARGET, 7), (UserDrafter.of(lambda _: [5] * 7), 0)], ids=["right", "wrong"]
)
def test_engine_auto_draft_length_follows_acceptance(drafter, wanted):
    """With draft_length="auto", an engine drafts the maximum if all drafts are accepted.

    It stops drafting if all drafts are rejected.
    """
    request = Request(tokens=[300, 301, 302], max_tokens=120, min_tokens=120, banned_ids=[5])
    with demo_engine(drafter=drafter, max_batch_size=1, draft_length="auto") as engine:
        budget = engine._scheduler.budget
        budget._idle_ns = {(1, 0): 10, (1, 1): 11, (1, 3): 13, (1, 7): 16}
        budget.record_time = lambda *args, **kwargs: None
        engine.generate([request])
        by_length = engine.stats.rounds_by_length
        assert by_length.most_common(1)[0][0] == wanted
        assert by_length[3] <= DECISION_INTERVAL + 1


def test_draft_budget_with_single_length_keeps_it():
    draft_budget = DraftBudget([3], 3)
    request = FakeRequest()
    record(draft_budget, request, 3, 2)
    lengths = chosen(draft_budget, [request], 2 * EXPLORATION_PERIOD)
    assert set(lengths) == {3}
