"""The engine chooses the mode of each launch, such as round or loop, from measured times."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from graft.models.modes.automaton_steps import GRAMMAR_STEPS
from graft.models.modes.choice import (
    EXPLORED_SHARE,
    MAX_CHANGING_ROUNDS,
    MEASURED_ROUNDS,
    MIN_GAIN,
    PRIOR_ROUNDS,
    WINDOW,
    Bucket,
    Launch,
    ModeChoice,
)
from graft.models.modes.launch import GraphKey, LaunchModes
from graft.models.modes.promotion import Promotion
from graft.sampling.params import SamplingParams

BUCKET = Bucket("host", 4, 3)


class Clock:
    """Runs rounds of modes with given times, and adds up the time that each mode has taken."""

    def __init__(self, choice, seed=0, lag=2, bucket=BUCKET):
        self.choice = choice
        self.bucket = bucket
        self.rounds = []
        self.ns = {}
        self._lag = lag
        self._unrecorded = []
        self._rng = random.Random(seed)

    def run(self, rounds, times, *, tokens=(4,)):
        """Run rounds; the times of a round are recorded after `lag` more rounds were launched."""
        for _ in range(rounds):
            mode = self.choice.choose(self.bucket, tuple(times))
            ns = times[mode]() if callable(times[mode]) else times[mode]
            self.rounds.append(mode)
            self.ns[mode] = self.ns.get(mode, 0) + ns
            self._unrecorded.append((mode, ns, self._rng.choice(tokens)))
            if len(self._unrecorded) > self._lag:
                self.choice.record(self.bucket, *self._unrecorded.pop(0))
        return self.rounds[-rounds:]


@pytest.mark.parametrize("tokens", [(4,), (1, 2, 3, 4, 5, 6, 7)], ids=["constant", "varying"])
def test_mode_choice_finds_fastest_mode(tokens):
    times = {"a": 1000.0, "b": 800.0, "c": 900.0}
    for order in itertools.permutations(times):
        clock = Clock(ModeChoice())
        clock.run(200, {name: times[name] for name in order}, tokens=tokens)
        rounds = clock.run(2000, times, tokens=tokens)
        assert rounds.count("b") > 0.95 * len(rounds)


def test_mode_choice_measures_each_mode_first():
    clock = Clock(ModeChoice(), lag=0)
    rounds = clock.run(3 * MEASURED_ROUNDS, {"a": 1.0, "b": 9.0, "c": 5.0})
    assert rounds == [*"a" * MEASURED_ROUNDS, *"b" * MEASURED_ROUNDS, *"c" * MEASURED_ROUNDS]


def test_mode_choice_counts_tokens():
    """A mode whose rounds are slower but commit more tokens is better."""
    choice = ModeChoice()
    for _ in range(10 * WINDOW):
        mode = choice.choose(BUCKET, ("slow", "fast"))
        choice.record(BUCKET, mode, *((110.0, 6) if mode == "slow" else (100.0, 3)))
    assert choice.choose(BUCKET, ("slow", "fast")) == "slow"


def test_mode_choice_learns_tokens_of_faster_rounds():
    """A mode with faster rounds that commit too few tokens is not kept."""
    choice = ModeChoice()
    modes = []
    for _ in range(10_000):
        mode = choice.choose(BUCKET, ("many", "few"))
        modes.append(mode)
        choice.record(BUCKET, mode, *((150.0, 4) if mode == "many" else (100.0, 2)))
    assert modes[5000:].count("many") > 4800


def test_mode_choice_ends_measurement_that_never_happens():
    """If no round is completely in the mode to be measured again, the attempt ends."""
    choice = ModeChoice()
    Clock(choice, lag=0).run(1000, {"a": 100.0, "b": 200.0})
    while choice.choose(BUCKET, ("a", "b")) == "a":
        choice.record(BUCKET, "a", 100.0, 4)
    for _ in range(MAX_CHANGING_ROUNDS):
        assert choice.choose(BUCKET, ("a", "b")) == "b"
        choice.record_change(BUCKET, 150.0)
    assert choice.choose(BUCKET, ("a", "b")) == "a"


def test_mode_choice_ends_first_measurement_that_never_happens():
    """A mode that has never been measured completely does not block the others forever."""
    choice = ModeChoice()
    for _ in range(MEASURED_ROUNDS):
        assert choice.choose(BUCKET, ("a", "b")) == "a"
        choice.record(BUCKET, "a", 100.0, 4)
    for _ in range(MAX_CHANGING_ROUNDS):
        assert choice.choose(BUCKET, ("a", "b")) == "b"
        choice.record_change(BUCKET, 150.0)
    assert choice.choose(BUCKET, ("a", "b")) == "a"
    # When the time of the attempt has been repaid, there is another one.
    rounds = 0
    while choice.choose(BUCKET, ("a", "b")) == "a":
        choice.record(BUCKET, "a", 100.0, 4)
        rounds += 1
    assert rounds > 0.9 * MAX_CHANGING_ROUNDS * 1.5 / EXPLORED_SHARE
    for _ in range(MEASURED_ROUNDS):
        choice.record(BUCKET, "b", 50.0, 4)
    assert choice.choose(BUCKET, ("a", "b")) == "b"


class Graph(SimpleNamespace):
    """A graph for `LaunchModes`: its name is `mode`."""


def launch_modes(*, loops=True, **options):
    """Return modes with a round and a loop for one batch row and three drafts."""
    modes = LaunchModes({(1, 3): Graph(mode="round", repeats=False)}, **options)
    modes.promotion = SimpleNamespace(is_promoted=lambda state: state.promoted)
    modes.graphs = {
        GraphKey(1, 3, place, repeats): Graph(mode="loop" if repeats else place, repeats=repeats)
        for place in GRAMMAR_STEPS
        for repeats in (False, True)
    }
    if loops:
        modes.loops = SimpleNamespace(
            possible=True,
            grammar_place=lambda place, is_guided: place,
            reserve_pages=lambda states: None,
        )
    return modes


def request_state(*, promoted=False, has_grammar=True, has_automaton=True):
    """Return a request as `LaunchModes` sees it."""
    compiled = SimpleNamespace(automaton=object() if has_automaton else None)
    matcher = SimpleNamespace(compiled=compiled) if has_grammar else None
    return SimpleNamespace(
        promoted=promoted,
        matcher=matcher,
        slot=0,
        epoch=1,
        start_position=0,
        params=SamplingParams(),
    )


FREE_STATE = request_state(promoted=True, has_grammar=False)
HOST = request_state()
PROMOTED = request_state(promoted=True)
IRREGULAR = request_state(has_automaton=False)


@pytest.mark.parametrize(
    "states, place",
    [
        ([FREE_STATE], None),
        ([FREE_STATE, HOST], "host"),
        ([FREE_STATE, PROMOTED], "device"),
        ([HOST, PROMOTED], "mixed"),
        ([PROMOTED, IRREGULAR], None),
        ([IRREGULAR], None),
    ],
)
def test_promotion_is_judged_by_requests_with_automata(states, place):
    """Requests without a grammar do not matter; other grammars make the times incomparable."""
    modes = launch_modes(loops=False, chooses_promotion=True)
    launch = modes.select(1, 3, states, may_loop=True).launch
    assert launch.promotion == place


@dataclass(eq=False)
class JoiningRequest:
    """A request as `Promotion` sees it. Its matcher runs an automaton, or has none yet."""

    matcher: object
    id: str = "a"
    slot: int = 0
    epoch: int = 1


def test_promotion_is_decided_when_automaton_exists():
    """Whether to promote is asked for each automaton once, however late it is built."""
    asked = []

    def should_promote(num_requests):
        asked.append(num_requests)
        return False

    automata = SimpleNamespace(
        can_promote=lambda matcher: matcher.compiled.automaton is not None,
        may_promote_later=lambda matcher: matcher.compiled.automaton is None,
        join=lambda *_, allowed, num_unread: allowed,
    )
    promotion = Promotion(automata, None, should_promote)
    automata_of_requests = [object(), *[None] * 9]
    requests = [
        JoiningRequest(SimpleNamespace(compiled=SimpleNamespace(automaton=automaton)))
        for automaton in automata_of_requests
    ]
    for number, state in enumerate(requests, 1):
        promotion.start(state, number)
    assert asked == [1]
    assert not promotion.has_candidates(requests, 10)
    for state in requests[1:9]:  # more requests than are promoted at once
        state.matcher.compiled.automaton = object()
    assert not promotion.has_candidates(requests, 10)
    for _ in range(3):
        assert promotion.promote(requests, 10, []) == 0
    assert asked == [1, 10]
    assert not any(promotion.is_promoted(state) for state in requests)


def test_gap_of_rounds_must_be_known_to_compare_them_with_loops():
    """Rounds during prefill, which are launched at once, do not count as rounds without a gap."""
    modes = launch_modes(chooses_loops=True)
    for _ in range(4 * MEASURED_ROUNDS):
        graph, _, launch = modes.select(1, 3, [HOST], may_loop=True)
        assert launch.bucket.loops
        flight = SimpleNamespace(launch=launch, graph=graph)
        modes.record(flight, 100.0, None, 4)
        modes.record(flight, 100.0, 0.0 if graph.repeats else 50.0, 4)
        modes.loops.possible = False
        graph, _, prefill_launch = modes.select(1, 3, [HOST], may_loop=True)
        assert not graph.repeats and not prefill_launch.bucket.loops
        modes.record(SimpleNamespace(launch=prefill_launch, graph=graph), 100.0, None, 4)
        modes.loops.possible = True
    [report] = modes.choice.report()
    assert report["modes"]["round"]["round_us"] == pytest.approx(0.15)
    assert report["chosen"] == "loop"


def test_promotion_is_not_judged_by_mixed_rounds():
    """Joining requests change the place of a batch; rounds in between are slower than both."""
    places = {"device": 50.0, "host": 100.0, "mixed": 110.0}
    modes = LaunchModes({(8, 3): None}, chooses_promotion=True)
    rng = random.Random(1)
    running = []
    rounds = Counter()
    for number in range(40_000):
        while len(running) < 8:
            running.append([modes.should_promote(8), rng.randint(50, 400)])
        promoted = sum(is_promoted for is_promoted, _ in running)
        place = {0: "host", 8: "device"}.get(promoted, "mixed")
        if number >= 20_000:
            rounds[place] += 1
        flight = SimpleNamespace(launch=Launch(Bucket(place, 8, 3), 1, place), graph=None)
        modes.record(flight, places[place] * rng.uniform(0.95, 1.05), 0.0, 8)
        for request in running:
            request[1] -= 1
        running = [request for request in running if request[1]]
    assert rounds["device"] > 0.9 * rounds.total()


def test_mode_choice_follows_change():
    clock = Clock(ModeChoice())
    assert clock.run(1000, {"a": 100.0, "b": 130.0})[-1] == "a"
    # "a" gets slower: it is running, so this is noticed at once.
    rounds = clock.run(300, {"a": 200.0, "b": 130.0})
    assert rounds.index("b") < 3 * WINDOW and rounds[-100:].count("b") > 95
    # "a" gets faster again: this is noticed when it is measured again.
    rounds = clock.run(5000, {"a": 90.0, "b": 130.0})
    assert rounds[-100:].count("a") > 95


@pytest.mark.parametrize("ratio, rounds", [(1.1, 8_000), (2.0, 8_000), (50.0, 20_000)])
def test_mode_choice_bounds_time_of_other_modes(ratio, rounds):
    """Other modes take a limited share of the time, however slow they are."""
    clock = Clock(ModeChoice())
    times = {"a": 100.0 * ratio, "b": 100.0, "c": 120.0 * ratio}
    clock.run(200, times)
    clock.ns.clear()
    clock.run(rounds, times)
    others = clock.ns.get("a", 0) + clock.ns.get("c", 0)
    # The rounds that are launched before the last one is recorded exceed the share.
    assert others < (1 + 3 / MEASURED_ROUNDS) * EXPLORED_SHARE * sum(clock.ns.values())
    assert clock.rounds[200:].count("a") >= MEASURED_ROUNDS


def test_mode_choice_keeps_mode_if_others_are_equal():
    rng = random.Random(1)
    gain = 1 + (MIN_GAIN - 1) / 2
    clock = Clock(ModeChoice(), lag=0)
    times = {"a": lambda: rng.uniform(99, 101), "b": lambda: rng.uniform(99, 101) / gain}
    chosen = set()
    for _ in range(5000):
        clock.run(1, times)
        chosen.add(clock.choice.report()[0]["chosen"])
    assert len(chosen - {None}) == 1


def test_mode_choice_ignores_outliers():
    """A round that took 100 times as long does not change the choice."""
    numbers = itertools.count(1)
    clock = Clock(ModeChoice())
    outlier = {"a": lambda: 10_000.0 if next(numbers) % 30 == 3 else 100.0, "b": 130.0}
    rounds = clock.run(3000, outlier)
    assert rounds[100:].count("a") > 0.95 * len(rounds[100:])


def test_mode_choice_does_not_measure_single_mode():
    choice = ModeChoice()
    assert choice.choose(BUCKET, ("a",)) == "a"
    choice.record(BUCKET, "a", 1.0, 1)
    assert choice.report() == []


def test_mode_choice_keeps_modes_that_are_not_possible_now():
    """While only some modes are possible, the choice is among these."""
    clock = Clock(ModeChoice())
    clock.run(200, {"a": 100.0, "b": 50.0, "c": 70.0})
    assert set(clock.run(100, {"a": 100.0, "c": 70.0})) <= {"a", "c"}
    assert clock.run(100, {"a": 100.0, "b": 50.0, "c": 70.0}).count("b") > 90


def test_mode_choice_survives_rounds_without_tokens():
    clock = Clock(ModeChoice())
    assert set(clock.run(100, {"a": 100.0, "b": 50.0}, tokens=(0,))) == {"a", "b"}


def test_mode_choice_reports_averages_and_reason():
    choice = ModeChoice()
    for mode, ns, tokens in (("a", 2000.0, 2), ("b", 1000.0, 4)):
        for _ in range(3 * WINDOW):
            choice.choose(BUCKET, ("a", "b"))
            choice.record(BUCKET, mode, ns, tokens)
    choice.choose(BUCKET, ("a", "b"))
    [report] = choice.report()
    assert tuple(report[name] for name in BUCKET._fields) == BUCKET
    assert report["chosen"] == "b"
    assert report["modes"]["a"]["round_us"] == pytest.approx(2.0)
    assert report["modes"]["a"]["tokens_per_round"] == pytest.approx(2.0)
    # The bucket's 3 tokens per round count as much as `PRIOR_ROUNDS` rounds.
    rounds = 3 * WINDOW
    tokens_a = (2 * rounds + 3 * PRIOR_ROUNDS) / (rounds + PRIOR_ROUNDS)
    tokens_b = (4 * rounds + 3 * PRIOR_ROUNDS) / (rounds + PRIOR_ROUNDS)
    assert report["modes"]["a"]["us_per_token"] == pytest.approx(2.0 / tokens_a)
    assert report["modes"]["b"]["us_per_token"] == pytest.approx(1.0 / tokens_b)
    assert report["reason"] == (
        f"b: 0.3 us per token ({rounds} rounds); a: 0.9 us per token ({rounds} rounds)"
    )


def test_mode_choice_does_not_explore_again_before_time_is_repaid():
    """Rounds of an explored mode that follow its measurement count, too: a request may be long."""
    choice = ModeChoice()
    clock = Clock(choice, lag=0)
    clock.run(1000, {"a": 100.0, "b": 200.0})
    while choice.choose(BUCKET, ("a", "b")) == "a":
        choice.record(BUCKET, "a", 100.0, 4)
    for _ in range(100):
        choice.record(BUCKET, "b", 200.0, 4)
    rounds = clock.run(int(0.9 * 100 * 2 / EXPLORED_SHARE), {"a": 100.0, "b": 200.0})
    assert set(rounds) == {"a"}
