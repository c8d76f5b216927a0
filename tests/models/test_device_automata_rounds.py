"""Engine with automata on the device: outputs are unchanged, and no host steps are left."""

import functools
from dataclasses import replace

import pytest
from engine_cases import (
    DFLASH,
    GROWN_TREE,
    MODES,
    SHORT,
    TREE_PATHS,
    WHOLE,
    answers,
    answers_and_drafts,
    check_disturbed,
    expected_answers,
    keep_some_on_host,
    settled,
    workload,
    workload_in_turn,
)
from engine_util import FREE, demo_engine

from graft.cudagraph.errors import DeviceError
from graft.grammar import GrammarSpec
from graft.grammar.automaton.device import DeviceAutomata
from graft.models.drafters import Suffix
from graft.models.request import Request

UNMASKED_TREE = {**GROWN_TREE, "draft_masking": "none"}
OPTIONS = {
    "chain": {"max_batch_size": 4},
    "unmasked tree": {"max_batch_size": 3, **UNMASKED_TREE},
    "few pages": {"max_batch_size": 5, "pages": 40, "page_size": 16, "max_length": 400},
    "unmasked chain": {"max_batch_size": 4, "draft_masking": "none"},
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
    "loops": {"max_batch_size": 3, "generation": "graph"},
    "loops, tree": {"max_batch_size": 3, "generation": "graph", **UNMASKED_TREE},
}


def compile_automata(engine, requests):
    """Compile the grammars of requests, with the automata of those that are regular."""
    for request in requests:
        if request.grammar is not None:
            engine._built.compiler.submit(request.grammar).result()


@pytest.mark.parametrize(
    "name, part",
    [
        pytest.param("chain", SHORT, id="chain, short"),
        *(pytest.param(name, WHOLE, id=name, marks=pytest.mark.full) for name in OPTIONS),
    ],
)
def test_device_automata_do_not_change_outputs(monkeypatch, name, part):
    """Requests on device and host join, are preempted and are cancelled at random times."""
    mode = ("greedy", "coupled")[len(name) % 2]
    keep_some_on_host(monkeypatch)
    with settled(demo_engine(device_automata=True, **OPTIONS[name])) as engine:
        requests = workload(**MODES[mode])[part]
        compile_automata(engine, requests)
        check_disturbed(engine, requests, expected_answers(mode)(part), seed=len(name))
        rounds = engine.stats.rounds_by_kind
        assert rounds["host"] > 0 and rounds["device"] + rounds["loop"] > 0
        assert sum(rounds.values()) == engine.stats.rounds


#: Engine options for each draft mode.
DRAFT_MODES = {
    "chain, fill": {},
    "tree": UNMASKED_TREE,
    "fixed tree": {**UNMASKED_TREE, "draft_length": 9, "draft_tree": TREE_PATHS},
    "chain, fill, 64 threads": {},
    "tree, 64 threads": UNMASKED_TREE,
}
SAMPLING = {**MODES, "rejection": {"temperature": 0.9, "verify": "rejection"}}


@pytest.mark.parametrize(
    "name, num_turns",
    [
        ("chain, fill", 1),
        *(pytest.param(name, len(SAMPLING), marks=pytest.mark.full) for name in DRAFT_MODES),
    ],
)
def test_device_automata_do_not_change_drafts(monkeypatch, name, num_turns):
    """If no mask row is late, outputs, rounds and drafts are equal in every draft mode.

    In each turn, the requests use the sampling methods one after another, and in the next turn
    every request uses the next method.
    """
    if name.endswith("threads"):
        monkeypatch.setattr("graft.grammar.automaton.device._CPU_BLOCK", 64)
    sampling = list(SAMPLING.values())
    turns = [workload_in_turn(sampling, first) for first in range(num_turns)]
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
            found.append([answers_and_drafts(engine.generate(turn)) for turn in turns])
            assert (engine.counters()["automata"].get("misses", 0) > 0) == device_automata
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


@functools.cache
def automaton_answers():
    """Return the answers to `automaton_requests`, which options of drafting must not change."""
    with settled(demo_engine(max_batch_size=2)) as engine:
        return answers(engine.generate(automaton_requests()))


def test_device_rounds_have_no_host_steps():
    """A batch whose requests are promoted runs no host work, and its graphs contain none."""
    requests = automaton_requests()
    expected = automaton_answers()
    with settled(demo_engine(max_batch_size=2, device_automata=True)) as engine:
        compile_automata(engine, requests)
        before = engine.counters()["grammar"]
        assert answers(engine.generate(requests)) == expected
        after = engine.counters()["grammar"]
        assert engine.stats.rounds_by_kind == {"device": engine.stats.rounds}
        rows = engine.counters()["automata"]
        assert answers(engine.generate(requests)) == expected
        again = engine.counters()["automata"]
        assert again["misses"] == rows["misses"] > 0  # all rows are in the cache
        assert again["hits"] > rows["hits"]
        assert {name for name in before if before[name] != after[name]} == set()
        for key, graph in engine.graphs.items():
            nodes = graph.graphs[0].nodes
            assert any(node.kind == "host" for node in nodes) == (key.kind == "host")
            copies = [node.name for node in nodes if node.name.startswith("mask rows")]
            assert bool(copies) == (key.kind == "host"), copies


@pytest.mark.parametrize(
    "options",
    [
        {"draft_masking": "probe"},
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in (GROWN_TREE, {"drafter": DFLASH, **GROWN_TREE})
        ),
    ],
)
def test_device_automata_have_no_effect_where_drafts_are_probed(caplog, options):
    requests = automaton_requests()
    with settled(demo_engine(max_batch_size=2, device_automata=True, **options)) as engine:
        compile_automata(engine, requests)
        assert answers(engine.generate(requests)) == automaton_answers()
        assert engine.counters()["automata"] == {}
        assert engine.counters()["grammar"]["probes"] > 0
    assert "grammar steps of all requests run on the host: drafts are probed" in caplog.text


def test_device_automata_have_no_effect_where_tokens_are_forced_without_drafter(caplog):
    requests = automaton_requests()
    options = {"max_batch_size": 2, "speculation": False, "forced_drafts": True}
    with settled(demo_engine(**options, generation="graph")) as engine:
        assert answers(engine.generate(requests)) == automaton_answers()
        assert engine.counters()["automata"] == {}
    assert "tokens are forced without a drafter" in caplog.text


def forced_requests(**options):
    """Return requests whose grammars force many tokens."""
    grammars = [
        GrammarSpec.choice(["alpha beta gamma delta", "alphabet soup for everyone"]),
        GrammarSpec.regex("(yes|no), the answer is [0-9]{2}"),
        GrammarSpec.json_schema(
            {
                "type": "object",
                "properties": {"first name": {"enum": ["Olga", "Ivo"]}, "age": {"const": 42}},
                "required": ["first name", "age"],
                "additionalProperties": False,
            }
        ),
    ]
    return [Request(prompt="x", grammar=grammar, seed=3, **options) for grammar in grammars]


@pytest.mark.parametrize(
    "composition, block", [pytest.param("one", 1, marks=pytest.mark.full), ("two", 1), ("one", 64)]
)
@pytest.mark.full("one-64")
def test_device_automata_draft_forced_tokens(monkeypatch, composition, block):
    """Drafts, outputs and the number of accepted forced tokens equal those of the host."""
    monkeypatch.setattr("graft.grammar.automaton.device._CPU_BLOCK", block)
    found = []
    for device_automata in (False, True):
        with settled(
            demo_engine(
                max_batch_size=2,
                forced_drafts=True,
                device_automata=device_automata,
                grammar_budget_us=None,
                composition=composition,
            )
        ) as engine:
            compile_automata(engine, forced_requests())
            engine.reset_stats()
            results = [
                answers_and_drafts(engine.generate(forced_requests(**mode)))
                for mode in SAMPLING.values()
            ]
            assert (engine.stats.rounds_by_kind["device"] > 0) == device_automata
            engine.synchronize()
            engine.counters()  # updates the number of forced tokens
            found.append((results, engine.stats.forced_tokens))
    assert found[0] == found[1]
    assert found[0][1] > 10


def test_device_automata_keep_byte_bounds():
    """Automata and mask rows use at most the memory of the options."""
    requests = automaton_requests()
    expected = automaton_answers()
    options = {"automaton_bytes": 1 << 10, "mask_row_bytes": 1 << 10}
    with settled(demo_engine(max_batch_size=2, device_automata=True, **options)) as engine:
        compile_automata(engine, requests)
        for _ in range(2):
            assert answers(engine.generate(requests)) == expected
        counters = engine.counters()["automata"]
        assert 0 < counters["table_bytes"] <= 1 << 10
        assert 0 < counters["row_bytes"] <= 1 << 10
        assert counters["tables_refused"] > 0 and counters["evicted"] > 0
    with settled(demo_engine(max_batch_size=2, device_automata=True, mask_row_bytes=0)) as engine:
        compile_automata(engine, requests)
        assert answers(engine.generate(requests)) == expected
        assert engine.counters()["automata"]["row_bytes"] == 0


def test_device_error_during_promotion_leaves_request_on_host(monkeypatch):
    """If no pinned memory is left for a table, the request runs on the host."""
    requests = automaton_requests()
    expected = automaton_answers()
    failures = []

    def acquire(automata, lane, grammar):
        failures.append(grammar)
        raise DeviceError("out of pinned memory")

    with settled(demo_engine(max_batch_size=2, device_automata=True)) as engine:
        compile_automata(engine, requests)
        monkeypatch.setattr(DeviceAutomata, "_acquire", acquire)
        assert answers(engine.generate(requests)) == expected
        assert failures and engine.failure is None


def closing_requests(first_budget=6, count=6):
    """Return requests of several grammars, sampled and greedy, with small numbers of tokens."""
    specs = [
        GrammarSpec.regex("[0-9]{2}-(foo|bar)+;"),
        GrammarSpec.regex("([a-c]+ )*[A-C]{3}"),
        GrammarSpec.json_schema({"type": "array", "items": {"enum": ["a", "bb", "ccc"]}}),
    ]
    modes = [{}, {"temperature": 1.3}, {"temperature": 1.0, "verify": "rejection"}]
    return [
        Request(
            prompt="x",
            grammar=spec,
            max_tokens=max_tokens,
            seed=max_tokens,
            id=f"{number}, {max_tokens} tokens",
            **modes[max_tokens % 3],
        )
        for number, spec in enumerate(specs)
        for max_tokens in range(first_budget, first_budget + count)
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"generation": "graph"}, pytest.param(UNMASKED_TREE, marks=pytest.mark.full)],
    ids=["rounds", "loops", "tree"],
)
@pytest.mark.full("rounds")
def test_device_automata_complete_outputs_like_the_host(options):
    """Near max_tokens, kernels narrow the mask rows as the host does: every output is complete."""
    requests = closing_requests()
    drafting = {name: value for name, value in options.items() if name != "generation"}
    found = []
    for device_automata in (False, True):
        # Both engines use the same drafter options: drafts of trees are not verified by rejection
        # sampling, so a tree and a chain have different outputs.
        chosen = options if device_automata else drafting
        automata = {} if chosen.get("generation") else {"device_automata": device_automata}
        with settled(demo_engine(max_batch_size=2, **automata, **chosen)) as engine:
            compile_automata(engine, requests)
            outputs = engine.generate(requests)
            assert {(output.reason, output.closing) for output in outputs} == {
                ("stop", "guaranteed")
            }
            found.append(answers(outputs))
            if device_automata:
                assert engine.stats.rounds_by_kind["host"] == 0
                counters = engine.counters()["automata"]
                assert counters["narrowed_rows"] > 0 and counters["closed"] > 0
    assert found[0] == found[1]


def test_request_with_a_deep_stack_continues_on_the_host():
    """The model opens as many arrays as max_tokens allows, more than the device's stack holds."""
    schema = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    spec = GrammarSpec.json_schema(schema)
    found = []
    for options in ({"device_automata": True}, {"generation": "graph"}):
        with settled(demo_engine(max_batch_size=2, **options)) as engine:
            bracket = engine.tokenizer.encode("[")[-1]
            request = Request(prompt="x", grammar=spec, max_tokens=150, logit_bias={bracket: 100.0})
            compile_automata(engine, [request])
            [output] = engine.generate([request])
            depth = len(output.text) // 2
            assert depth > 70
            assert output.text == "[" * depth + "]" * depth
            assert output.preempted
            found.append(output.tokens)
    assert found[0] == found[1]
