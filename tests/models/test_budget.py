"""How many drafts pay: acceptance and time in, lengths out, against the sums written out."""

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


class Anyone:
    """Whose drafts they are."""


def budget(times, levels=None, **options):
    """A budget of lengths whose idle replays take so long in bucket 1, and a request."""
    made = DraftBudget(list(times), max(times) if levels is None else levels, **options)
    for length, ns in times.items():
        made.record_time(1, length, ns, idle=True)
    return made, [Anyone()]


def chosen(made, requests, rounds):
    """Lengths of so many rounds in bucket 1."""
    return [made.choose(1, requests) for _ in range(rounds)]


def brought(made, request, length, accepted, size=1, before=None, known=None):
    """A round's drafts, made by one of the same length, and all known of, unless it is said."""
    before = made.drafts_to_generate(size, length) if before is None else before
    made.record_acceptance(
        request, size, length, before, before if known is None else known, accepted
    )


def accept(made, request, length, accepted, rounds=40):
    """So many rounds, each with so many drafts accepted."""
    for _ in range(rounds):
        brought(made, request, length, accepted)


def test_lengths_double_up_to_the_most():
    """Zero drafts, then rows that are powers of two, then the most there are."""
    assert [draft_lengths(n) for n in (0, 1, 2, 3, 5, 7)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 1, 3, 5],
        [0, 1, 3, 7],
    ]


def test_rates_are_expected_tokens_per_time():
    """Chances are averages with the decay, survival their products, the rate the sum over time."""
    made, (one,) = budget({0: 10, 1: 12, 3: 20})
    other = Anyone()
    chances = [INITIAL_ACCEPTANCE] * 3
    for accepted in (2, 0, 3, 1, 1):
        brought(made, one, 3, accepted)
        for j in range(min(3, accepted + 1)):
            chances[j] = DECAY * chances[j] + (1 - DECAY) * (j < accepted)
    s = list(accumulate(chances, mul))
    own = [(1 + sum(s[:k])) / t for k, t in ((0, 10), (1, 12), (3, 20))]
    assert made.expected_rates(1, [one]) == pytest.approx(own)
    # A request that nobody knows begins with the average of all: here the same.
    for length, ns in ((0, 10), (1, 12), (3, 20)):
        made.record_time(2, length, ns, idle=True)
    assert made.expected_rates(2, [one, other]) == pytest.approx([2 * r for r in own])
    accept(made, other, 3, 0)
    assert made.expected_rates(1, [one]) == pytest.approx(own)
    both = [2 / 10, (2 + s[0] + s[1]) / 12, (2 + sum(s)) / 20]  # both places are the first one's
    assert made.expected_rates(2, [one, other]) == pytest.approx(both, rel=1e-3)


def test_of_several_more_drafts_are_made_than_have_a_place():
    """Places are given away afterwards, to whose are likely to be accepted: the next length, but
    without any none, and no more than there are."""
    made, _ = budget({0: 10, 1: 12, 3: 20, 7: 30})
    assert [made.drafts_to_generate(1, n) for n in made.lengths] == [0, 1, 3, 7]
    assert [made.drafts_to_generate(4, n) for n in made.lengths] == [0, 3, 7, 7]


def test_what_was_not_drafted_says_nothing_and_what_was_cut_neither():
    """A round's drafts were made by the one before, and no more are tested than it tests. A draft
    that never was is like the one before it."""
    made, (one,) = budget({0: 10, 1: 12, 3: 20})
    before = made.expected_rates(1, [one])
    brought(made, one, 3, 0, before=0)
    assert made.expected_rates(1, [one]) == before
    brought(made, one, 1, 1, before=3, known=1)
    brought(made, one, 3, 1, before=1)
    first = 1 - (1 - INITIAL_ACCEPTANCE) * DECAY**2
    s = list(accumulate([first] * 3, mul))
    assert made.expected_rates(1, [one]) == pytest.approx([0.1, (1 + s[0]) / 12, (1 + sum(s)) / 20])
    brought(made, one, 3, 2, before=2)
    s = list(accumulate([1 - (1 - first) * DECAY] * 3, mul))
    assert made.expected_rates(1, [one])[2] == pytest.approx((1 + sum(s)) / 20)


def test_a_drafter_that_finds_nothing_is_refused():
    """Rounds that could have had drafts and had none count against them."""
    made, (one,) = budget({0: 10, 3: 11})
    assert chosen(made, [one], 1) == [3]
    accept(made, one, 3, 0)
    assert made.expected_rates(1, [one]) == pytest.approx([1 / 10, 1 / 11], rel=1e-3)


def test_live_rounds_count_instead_of_idle_ones():
    """The time of a length that runs is an average of its rounds; others are scaled alike."""
    made, (one,) = budget({0: 10, 1: 12, 3: 20})
    idle = made.expected_rates(1, [one])
    made.record_time(1, 1, 30, idle=False)
    made.record_time(1, 1, 40, idle=False)
    live = DECAY * 30 + (1 - DECAY) * 40
    assert made.expected_rates(1, [one]) == pytest.approx([r * 12 / live for r in idle])
    made.record_time(1, 0, 10, idle=False)
    scale = (live + 10) / 22
    assert made.expected_rates(1, [one]) == pytest.approx(
        [idle[0], idle[1] * 12 / live, idle[2] / scale]
    )


def test_the_least_of_idle_replays_counts():
    """The first replay of a graph loads what is loaded lazily."""
    made, (one,) = budget({0: 900, 1: 10})
    made.record_time(1, 0, 10, idle=True)
    made.record_time(1, 0, 50, idle=True)
    assert made.expected_rates(1, [one]) == pytest.approx([1 / 10, (1 + INITIAL_ACCEPTANCE) / 10])


def test_drafts_that_do_not_pay_end_are_tried_and_come_back(caplog):
    """Off and on again, once told of; a fixed schedule tries the neighbours in between."""
    made, requests = budget({0: 10, 1: 12, 3: 14})
    with caplog.at_level(logging.INFO, "graft"):
        assert chosen(made, requests, DECISION_INTERVAL) == [3] * DECISION_INTERVAL
        accept(made, requests[0], 3, 0)
        assert chosen(made, requests, EXPLORATION_PERIOD - DECISION_INTERVAL) == (
            [0] * (EXPLORATION_PERIOD - DECISION_INTERVAL - EXPLORATION_ROUNDS)
            + [1] * EXPLORATION_ROUNDS
        )
        assert (
            chosen(made, requests, EXPLORATION_PERIOD)
            == [0] * (EXPLORATION_PERIOD - EXPLORATION_ROUNDS) + [1] * EXPLORATION_ROUNDS
        )
        accept(made, requests[0], 3, 3)
        assert (
            chosen(made, requests, EXPLORATION_PERIOD)
            == [3] * (EXPLORATION_PERIOD - EXPLORATION_ROUNDS) + [1] * EXPLORATION_ROUNDS
        )
        accept(made, requests[0], 3, 0)
        chosen(made, requests, 1)
    assert [r.message for r in caplog.records] == [caplog.records[0].message]
    assert "does not pay off for batches of 1" in caplog.text


def test_a_little_better_is_not_enough():
    """Within the margin the length stays; beyond, it changes, at the next choice."""
    made, (one,) = budget({0: 100, 1: 170 / MIN_GAIN})
    assert chosen(made, [one], 1) == [1]
    made.record_time(1, 1, 170 * 1.04, idle=False)
    made.record_time(1, 0, 100, idle=False)
    assert set(chosen(made, [one], DECISION_INTERVAL)) == {1}
    for _ in range(40):
        made.record_time(1, 1, 170 * 1.08, idle=False)
    changed = chosen(made, [one], DECISION_INTERVAL)
    assert changed == [1] * (DECISION_INTERVAL - 1) + [0]


def test_buckets_choose_for_themselves():
    """Where more rows cost more, fewer drafts pay in a larger bucket."""
    made, (one,) = budget({0: 10, 3: 11})
    for length, ns in ((0, 10), (3, 40)):
        made.record_time(8, length, ns, idle=True)
    assert [made.choose(size, [one] * size) for size in (1, 8)] == [3, 0]


def test_of_trees_each_length_knows_its_own():
    """A larger tree does not tell what a smaller one would bring, nor does a cut one; no path is
    longer than there are levels."""
    made, (one,) = budget({0: 10, 1: 10, 7: 10}, levels=3, is_tree=True)
    first = list(accumulate([INITIAL_ACCEPTANCE] * 3, mul))
    assert made.expected_rates(1, [one]) == pytest.approx(
        [0.1, (1 + INITIAL_ACCEPTANCE) / 10, (1 + sum(first)) / 10]
    )
    brought(made, one, 1, 1, before=7, known=1)
    accept(made, one, 7, 1)
    assert made.expected_rates(1, [one]) == pytest.approx(
        [0.1, (1 + INITIAL_ACCEPTANCE) / 10, 0.2], rel=1e-3
    )


@pytest.mark.parametrize(
    "drafter, wanted", [(TARGET, 7), (UserDrafter.of(lambda _: [5] * 7), 0)], ids=["right", "wrong"]
)
def test_an_engine_drafts_what_pays(drafter, wanted):
    """With times that are given, drafts that are always right become longer and wrong ones end."""
    request = Request(tokens=[300, 301, 302], max_tokens=120, min_tokens=120, banned_ids=[5])
    with demo_engine(drafter=drafter, max_batch_size=1, draft_length="auto") as engine:
        budget = engine._scheduler.budget
        budget._idle_ns = {(1, 0): 10, (1, 1): 11, (1, 3): 13, (1, 7): 16}
        budget.record_time = lambda *args, **kwargs: None
        engine.generate([request])
        by_length = engine.stats.rounds_by_length
        assert by_length.most_common(1)[0][0] == wanted
        assert by_length[3] <= DECISION_INTERVAL + 1


def test_a_lone_length_is_always_chosen():
    """Of an engine with a number of drafts nothing is measured or kept."""
    made = DraftBudget([3], 3)
    brought(made, one := Anyone(), 3, 2)
    assert chosen(made, [one], 2 * EXPLORATION_PERIOD) == [3] * 2 * EXPLORATION_PERIOD
