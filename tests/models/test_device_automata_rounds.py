"""Engine with automata on the device: outputs are unchanged, and no host steps are left."""

from dataclasses import replace

import pytest
from engine_cases import (
    DFLASH,
    GROWN_TREE,
    MODES,
    TREE_PATHS,
    answers,
    answers_and_drafts,
    settled,
    workload,
)
from engine_util import FREE, demo_engine
from test_engine_equality import check_disturbed, expected_answers

from graft.cudagraph.errors import OptionError
from graft.grammar import GrammarSpec
from graft.models.drafters import Suffix
from graft.models.request import Request

__all__ = ["expected_answers"]  # a fixture

UNMASKED_TREE = {**GROWN_TREE, "mask_drafts": False}
OPTIONS = {
    "chain": {"max_batch_size": 4},
    "unmasked tree": {"max_batch_size": 3, **UNMASKED_TREE},
    "few pages": {"max_batch_size": 5, "pages": 40, "page_size": 16, "max_length": 400},
    "unmasked chain": {"max_batch_size": 2, "mask_drafts": False},
    "no drafter": {"max_batch_size": 4, "speculation": False},
    "mailbox": {"max_batch_size": 3, "grammar_transport": "mailbox"},
    "late": {"max_batch_size": 4, "grammar_threads": 2, "grammar_budget_us": 1.0},
    "two graphs": {"max_batch_size": 3, "composition": "two"},
    "suffix": {"max_batch_size": 3, "drafter": Suffix},
    "suffix, tree": {"max_batch_size": 3, "drafter": Suffix, **GROWN_TREE},
    "block drafter": {"max_batch_size": 3, "drafter": DFLASH},
    "block drafter, tree": {"max_batch_size": 3, "drafter": DFLASH, **UNMASKED_TREE},
    "automatic length": {"max_batch_size": 3, "draft_length": "auto"},
    "one launch at a time": {"max_batch_size": 5, "overlap": False},
    "probe": {"max_batch_size": 3, "draft_masking": "probe"},
    "optimistic": {"max_batch_size": 3, "draft_masking": "optimistic"},
    "optimistic tree": {"max_batch_size": 3, "draft_masking": "optimistic", **GROWN_TREE},
    "loops": {"max_batch_size": 3, "generation": "graph"},
    "loops, tree": {"max_batch_size": 3, "generation": "graph", **GROWN_TREE},
    "loops, lattice": {
        "max_batch_size": 3,
        "generation": "graph",
        "drafter": DFLASH,
        **GROWN_TREE,
    },
}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_device_automata_do_not_change_outputs(expected_answers, name):
    """Requests with and without automata join, are preempted and are cancelled at random times."""
    mode = ("greedy", "coupled")[len(name) % 2]
    with settled(demo_engine(device_automata=True, **OPTIONS[name])) as engine:
        check_disturbed(engine, expected_answers, mode, seed=len(name))
        rounds = engine.stats.rounds_by_grammar
        assert rounds["mixed"] > 0 and rounds["device"] > 0
        assert sum(rounds.values()) == engine.stats.rounds


#: Engine options for each draft mode; the first `NUM_QUICK_MODES` run in the quick suite.
DRAFT_MODES = {
    "chain, fill": {},
    "tree, probe": GROWN_TREE,
    "chain, lattice": {"drafter": DFLASH, "draft_length": 6, "draft_masking": "probe"},
    "chain, probe": {"draft_masking": "probe"},
    "tree, lattice": {"drafter": DFLASH, **GROWN_TREE},
    "tree": UNMASKED_TREE,
    "wide tree, probe": {"draft_length": 20, "draft_tree": (4, 5)},
    "fixed tree, probe": {"draft_length": 9, "draft_tree": TREE_PATHS},
    "block, fixed tree": {"drafter": DFLASH, "draft_length": 9, "draft_tree": TREE_PATHS},
    "chain, probe, 64 threads": {"draft_masking": "probe"},
    "wide tree, probe, 64 threads": {"draft_length": 20, "draft_tree": (4, 5)},
    "tree, lattice, 64 threads": {"drafter": DFLASH, **GROWN_TREE},
}
NUM_QUICK_MODES = 1
SAMPLING = {**MODES, "rejection": {"temperature": 0.9, "verify": "rejection"}}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if number >= NUM_QUICK_MODES else [])
        for number, name in enumerate(DRAFT_MODES)
    ],
)
def test_device_automata_do_not_change_drafts(monkeypatch, name):
    """Without late rows, outputs, numbers of rounds, and drafts are equal in all draft modes."""
    if name.endswith("threads"):
        monkeypatch.setattr("graft.grammar.automaton.device._CPU_BLOCK", 64)
    sampling = SAMPLING.values()
    found = []
    for device_automata in (False, True):
        with settled(
            demo_engine(
                max_batch_size=4,
                device_automata=device_automata,
                grammar_budget_us=None,
                **DRAFT_MODES[name],
            )
        ) as engine:
            found.append([answers_and_drafts(engine.generate(workload(**o))) for o in sampling])
            assert (engine.stats.rounds_by_grammar["mixed"] > 0) == device_automata
    assert found[0] == found[1]


def automaton_requests():
    """Return requests whose grammars have automata, and one without a grammar."""
    grammars = [
        GrammarSpec.choice(["alpha", "alphabet", "beta"]),
        GrammarSpec.regex("[0-9]{3}-(foo|bar)+"),
        GrammarSpec.regex("[a-z ]{1,40}"),
    ]
    requests = [replace(FREE, id="free")]
    for number, grammar in enumerate(grammars):
        requests.append(Request(prompt="x", grammar=grammar, max_tokens=30, id=str(number)))
    return requests


def test_device_rounds_have_no_host_steps():
    """A batch whose requests are promoted runs no host work, and its graphs contain none."""
    requests = automaton_requests()
    with settled(demo_engine(max_batch_size=4)) as engine:
        expected = answers(engine.generate(requests))
    with settled(demo_engine(max_batch_size=4, device_automata=True)) as engine:
        before = engine.counters()["grammar"]
        assert answers(engine.generate(requests)) == expected
        after = engine.counters()["grammar"]
        assert engine.stats.rounds_by_grammar == {"device": engine.stats.rounds}
        rows = engine.counters()["automata"]
        assert answers(engine.generate(requests)) == expected
        again = engine.counters()["automata"]
        assert again["misses"] == rows["misses"] > 0  # all rows are in the cache
        assert again["hits"] > rows["hits"]
        assert {name for name in before if before[name] != after[name]} == set()
        for key, graph in engine._modes.graphs.items():
            kinds = {node.kind for node in graph.graphs[0].nodes}
            assert ("host" in kinds) == (key.grammar == "mixed")
            assert ("copy" in kinds) == (key.grammar == "mixed"), kinds


def test_device_automata_refuse_forced_drafts():
    with pytest.raises(OptionError, match="device_automata cannot be combined with forced_drafts"):
        demo_engine(device_automata=True, forced_drafts=True)
