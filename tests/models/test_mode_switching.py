"""Engines that change the mode of launches at random give the same outputs.

A mode says whether a launch is a round or a loop, and whether mask rows are filled or tokens are
checked. The expected outputs come from an engine without a drafter that fills every mask row and
runs one request at a time.
"""

from dataclasses import replace

import pytest
import test_engine_equality
from engine_cases import (
    DFLASH,
    DRAFTER_OPTIONS,
    GROWN_TREE,
    MORE_TREE_OPTIONS,
    answer,
    answers,
    answers_and_drafts,
    settled,
    workload,
)
from engine_util import RandomChoice, demo_engine, mixed_requests
from test_device_automata_rounds import automaton_requests
from test_engine_equality import check_disturbed
from test_optimistic import GRAMMARS

from graft.models.engine.options import Options

MODES = {
    "greedy": {},
    "coupled": {"temperature": 0.9, "verify": "coupled"},
    "filtered": {"temperature": 0.9, "top_p": 0.95, "verify": "coupled"},
}
AUTO = {"generation": "auto", "draft_masking": "auto"}
SWITCHED_OPTIONS = {
    name: options
    for name, options in (DRAFTER_OPTIONS | MORE_TREE_OPTIONS).items()
    if "draft_masking" not in options and "forced_drafts" not in options
} | {
    "none": {"speculation": False},
    "late": {"grammar_threads": 2, "grammar_budget_us": 1.0},
    "late, tree": {"grammar_threads": 2, "grammar_budget_us": 1.0, **GROWN_TREE},
    "late, lattice": {"grammar_threads": 2, "grammar_budget_us": 1.0, "drafter": DFLASH},
    "automata": {"device_automata": True},
    "automata, tree": {"device_automata": True, **GROWN_TREE},
    "automata, lattice": {"device_automata": True, "drafter": DFLASH},
    "some automata": {"device_automata": "auto"},
    "some automata, tree": {"device_automata": "auto", **GROWN_TREE},
    "automatic length": {"draft_length": "auto"},
    "few pages": {"pages": 40, "page_size": 16, "max_length": 400},
    "mailbox": {"grammar_transport": "mailbox"},
    "spinkernel": {"grammar_transport": "spinkernel"},
    "two graphs": {"composition": "two"},
    "one launch at a time": {"overlap": False},
    "forced": {"forced_drafts": True},
}
QUICK = ("eagle3", "some automata")
#: Options without generation loops.
WITHOUT_LOOPS = ("host", "host, tree", "two graphs")


def switching_engine(seed, **options):
    """Return an engine that changes modes at random."""
    engine = demo_engine(**{"max_batch_size": 4, **AUTO, **options})
    engine._modes.choice = RandomChoice(seed)
    return engine


def switched_requests(**options):
    """Return the requests of `workload` and requests with other kinds of grammars."""
    requests = workload(**options)
    kinds = GRAMMARS[2:] + GRAMMARS
    for number, grammar in enumerate(kinds, start=len(requests)):
        request = replace(requests[3], grammar=grammar, id=str(number), seed=500 + number)
        requests.append(replace(request, max_tokens=24))
    return requests


@pytest.fixture(scope="module")
def filled_answers():
    """Expected answers by mode, generated one by one without drafter."""
    options = {"speculation": False, "max_batch_size": 1, "overlap": False}
    with settled(demo_engine(**options)) as engine:
        return {
            name: [answer(engine.generate([request])[0]) for request in switched_requests(**mode)]
            for name, mode in MODES.items()
        }


@pytest.mark.parametrize(
    "mode, name",
    [
        pytest.param(mode, name, marks=() if is_quick else pytest.mark.full)
        for mode in MODES
        for name in SWITCHED_OPTIONS
        for is_quick in [name in QUICK and mode == "coupled"]
    ],
)
def test_random_modes_do_not_change_outputs(filled_answers, monkeypatch, mode, name):
    """Requests join, are preempted and are cancelled while the modes of their rounds change."""
    monkeypatch.setattr(test_engine_equality, "workload", switched_requests)
    monkeypatch.setattr(test_engine_equality, "MODES", MODES)
    with settled(switching_engine(len(name), **SWITCHED_OPTIONS[name])) as engine:
        check_disturbed(engine, filled_answers, mode, seed=len(mode))
        used = set(engine.stats.rounds_by_mode)
        assert len(used) > 1
        if "device_automata" not in SWITCHED_OPTIONS[name]:  # few batches need the host
            assert any(mode.startswith("optimistic") for mode in used)
            assert len(engine._modes.choice.modes) == (2 if name in WITHOUT_LOOPS else 4)


@pytest.mark.full
@pytest.mark.parametrize("name", ["eagle3", "dflash", "eagle3, tree", "late", "automata"])
def test_many_random_modes_do_not_change_outputs(filled_answers, monkeypatch, name):
    monkeypatch.setattr(test_engine_equality, "workload", switched_requests)
    monkeypatch.setattr(test_engine_equality, "MODES", MODES)
    for seed in range(6):
        options = {**SWITCHED_OPTIONS[name], "max_batch_size": 1 + seed}
        with settled(switching_engine(seed, **options)) as engine:
            check_disturbed(engine, filled_answers, ("greedy", "coupled")[seed % 2], seed=seed)


@pytest.mark.parametrize(
    "verify",
    [
        "rejection",
        *(pytest.param(mode, marks=pytest.mark.full) for mode in ("per_token", "relaxed")),
    ],
)
def test_requests_that_depend_on_drafts_are_reproducible(verify):
    """Their drafts are always sampled under filled rows, whatever else runs."""
    sampled = workload(temperature=0.9, verify=verify)[::2]
    options = {"max_batch_size": 4, "grammar_budget_us": None}
    others = [
        replace(request, id=f"{i} greedy") for i, request in enumerate(mixed_requests(8, seed=5))
    ]
    with settled(demo_engine(**options)) as engine:
        expected = answers_and_drafts(engine.generate(sampled))
        expected_others = answers(engine.generate(others))
    mixed = [*sampled[:3], *others[:2], *sampled[3:], *others[2:]]
    with settled(switching_engine(3, **options)) as engine:
        outputs = engine.generate(mixed)
        assert "optimistic round" in engine.stats.rounds_by_mode
    found = [output for output in outputs if "greedy" not in output.id]
    assert answers_and_drafts(found) == expected
    assert answers([output for output in outputs if "greedy" in output.id]) == expected_others


def test_engine_reports_chosen_modes():
    requests = [replace(request, max_tokens=60) for request in workload() if request.grammar]
    with settled(demo_engine(max_batch_size=4, **AUTO)) as engine:
        for _ in range(4):
            engine.generate(requests)
        reports = engine.counters()["engine"]["modes"]
        guided = {name for r in reports if r["grammar"] == "host" for name in r["modes"]}
        assert {"fill round", "fill loop", "optimistic round", "optimistic loop"} == guided
        rounds = engine.stats.rounds_by_mode
        measured = sum(mode["rounds"] for r in reports for mode in r["modes"].values())
        # Rounds with a single possible mode, and the last one, are not measured.
        assert 0 < measured <= sum(rounds.values()) == engine.stats.rounds
        engine.reset_stats()
        assert engine.stats.modes == reports


def test_engine_chooses_place_of_grammar_steps():
    """Requests with automata are promoted or not when they join, and both places are measured."""
    requests = automaton_requests()
    with demo_engine(max_batch_size=4) as engine:
        expected = answers(engine.generate(requests))
    with settled(demo_engine(max_batch_size=4, device_automata="auto")) as engine:
        for _ in range(12):
            assert answers(engine.generate(requests)) == expected
        [report] = [r for r in engine.stats.modes if (r["grammar"], r["batch"]) == ("promotion", 4)]
        assert set(report["modes"]) == {"device", "host"}
        assert report["chosen"] in report["modes"]
        places = engine.stats.rounds_by_grammar
        assert places["device"] > 0 and places["host"] > 0


def test_engine_without_auto_measures_no_modes():
    assert {Options().generation, Options().draft_masking} == {"rounds", "fill"}
    with settled(demo_engine(max_batch_size=2)) as engine:
        engine.generate(workload()[:4])
        assert engine.stats.modes == []
        assert engine.stats.rounds_by_mode == {"fill round": engine.stats.rounds}
