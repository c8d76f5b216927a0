"""Drafts, batch size, overlap, grammar transport and other requests do not change outputs.

The expected outputs come from an engine without a drafter that runs one request at a time. Only
greedy and coupled requests are compared. Outputs of rejection sampling depend on the drafts,
because the random numbers that it uses depend on them.
"""

import functools
import random
from dataclasses import replace

import pytest
from engine_cases import (
    CONFIGURATIONS,
    DFLASH,
    DRAFTER_OPTIONS,
    MODES,
    MORE_TREE_OPTIONS,
    SHORT,
    WHOLE,
    RandomDFlash2,
    RandomDrafter,
    answer,
    answers,
    check_disturbed,
    expected_answers,
    propose_repeat,
    random_lengths,
    settled,
    workload,
)
from engine_util import (
    ROUND,
    TARGET,
    UNEVEN_DRAFTS,
    FixedDraftLengths,
    demo_engine,
    mixed_requests,
    patch_kernel_source,
    task_request,
)
from round_simulator import read_draft_tree

from graft.models.drafters import NGram, UserDrafter
from graft.models.request import Request
from graft.tools.bench.demo_evaluation import task_grammar
from graft.tools.demo.tasks import held_out_tasks


@pytest.mark.parametrize(
    "number, part",
    [
        pytest.param(13, SHORT, id="13, short"),
        *(
            pytest.param(number, WHOLE, id=str(number), marks=pytest.mark.full)
            for number in range(len(CONFIGURATIONS))
        ),
    ],
)
def test_engine_output_is_unchanged_by_join_cancel_and_preemption(number, part, monkeypatch):
    """Outputs do not change if requests are submitted, preempted and cancelled at random times.

    Weights and grammar backend of the configurations are not used, because outputs depend on them.
    """
    options = dict(CONFIGURATIONS[number])
    for name in ("weights", "grammar_backend"):
        options.pop(name, None)
    # With relaxed verification, outputs of greedy requests depend on the drafts.
    mode = "coupled" if options["verify"] == "relaxed" else ("greedy", "coupled")[number // 3 % 2]
    tested_when_cut = set()
    auto = options.get("draft_length") == "auto"
    if auto:
        patch_kernel_source(monkeypatch, ROUND, *UNEVEN_DRAFTS)
    with settled(demo_engine(**options)) as engine:
        if auto:

            def record_cut(_, row):
                if row.cut:
                    tested_when_cut.add(row.tested)

            engine._replays.on_row = record_cut
            lengths = random_lengths(engine._built.budget.lengths, number)
            engine._scheduler.budget = FixedDraftLengths(lengths)
        requests = workload(**MODES[mode])[part]
        preemptions = check_disturbed(engine, requests, expected_answers(mode)(part), seed=number)
        assert preemptions == engine.stats.preemptions > 0
        has_many_lengths = len(engine.stats.rounds_by_length) > 1
        assert has_many_lengths == auto == bool(tested_when_cut)
        has_drafts = options.get("speculation", True) or options.get("forced_drafts", False)
        assert (engine.stats.speculated_rounds > 0) == has_drafts
        probes = engine.counters()["grammar"]["probes"]
        assert (probes > 0) == engine._resources.mode.probes


@functools.cache
def prompts_and_answers():
    """Return requests and their expected answers, generated without drafts.

    For each of 200 tasks there are four requests: greedy and coupled, with and without grammar.
    """
    tasks = [task for task in held_out_tasks(440, seed=29) if task_grammar(task) is not None]
    requests = []
    for seed, task in enumerate(tasks[:200]):
        request = task_request(task, max_tokens=48)
        for sampling in MODES.values():
            requests.append(replace(request, seed=seed, **sampling))
    requests += [replace(request, grammar=None) for request in requests]
    with settled(demo_engine(speculation=False, max_batch_size=1, overlap=False)) as engine:
        return requests, answers(engine.generate(requests))


ALL_DRAFTER_OPTIONS = DRAFTER_OPTIONS | MORE_TREE_OPTIONS


@pytest.mark.parametrize("drafter", ALL_DRAFTER_OPTIONS)
@pytest.mark.full
def test_drafts_do_not_change_outputs(drafter):
    """Each drafter, as chain and as tree, runs all requests in random order in mixed batches."""
    requests, expected = prompts_and_answers()
    order = random.Random(drafter).sample(range(len(requests)), len(requests))
    with settled(demo_engine(max_batch_size=5, **ALL_DRAFTER_OPTIONS[drafter])) as engine:
        outputs = engine.generate([requests[i] for i in order])
        assert engine.stats.speculated_rounds > 0
    different = []
    for i, output in zip(order, outputs, strict=True):
        if answer(output) != expected[i]:
            different.append((output.reason, output.error, requests[i]))
    assert len(requests) == 800
    assert not different


def drafts_by_position(lengths, **options):
    """Run a coupled request with given draft lengths; return the draft tree after each round.

    The keys of the result are the positions of the last committed token.
    """
    coupled = {"temperature": 0.9, "verify": "coupled", "seed": 3}
    request = Request(tokens=[300, 301, 302], max_tokens=60, min_tokens=60, **coupled)
    found = {}
    options = {"max_batch_size": 1, "overlap": False, "draft_length": "auto"} | options
    with settled(demo_engine(**options)) as engine:
        engine._scheduler.budget = FixedDraftLengths(lengths)
        engine.submit(request)
        while engine.busy:
            engine.step()
            engine.synchronize()
            for state in engine._scheduler.unfinished.values():
                slot = engine._resources.state.to_host()[state.slot]
                found[int(slot["n"])] = read_draft_tree(slot)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drafter": NGram},
        {"draft_tree": (3, 2)},
        *(
            pytest.param({"drafter": drafter}, marks=pytest.mark.full)
            for drafter in (
                RandomDrafter(3),
                TARGET,
                RandomDrafter(rank=8),
                UserDrafter.of(propose_repeat),
            )
        ),
    ],
    ids=["eagle3", "lookup", "tree", "mtp", "model", "block", "host"],
)
@pytest.mark.full("eagle3", "lookup")
def test_drafter_continues_after_rounds_without_drafts(options):
    """A drafter that had to pause for some rounds generates the same drafts as one that had not.

    During the pause, the engine requests no drafts, and the drafter only processes the committed
    tokens.
    """
    always = drafts_by_position([3] * 60, **options)
    # If all drafts are accepted, a round commits four tokens. During the pause, eight rounds commit
    # one token each, so that later rounds are at the same positions in both runs.
    paused = drafts_by_position([3] * 3 + [0] * 7 + [3] * 60, **options)
    assert sum(len(tree.token) == 1 for tree in paused.values()) >= 4
    both = [n for n in always if n in paused and len(paused[n].token) > 1]
    assert max(both) - min(both) > 40 and len(both) > 8
    assert [paused[n] for n in both] == [always[n] for n in both]


@pytest.mark.full
@pytest.mark.parametrize("masking", ["auto", "none"], ids=["masked", "unmasked"])
@pytest.mark.parametrize("transport", ["native", "mailbox", "spinkernel"])
def test_engine_output_is_unchanged_in_many_disturbed_runs(transport, masking):
    """Requests join, are preempted and cancelled at random, in five runs for each batch size."""
    for batch in range(1, 9):
        options = {"grammar_transport": transport, "draft_masking": masking}
        with settled(demo_engine(max_batch_size=batch, **options)) as engine:
            for seed in range(5):
                mode = "greedy" if seed % 2 else "coupled"
                requests = workload(**MODES[mode])
                expected = expected_answers(mode)(WHOLE)
                check_disturbed(engine, requests, expected, seed=1000 * batch + seed)


@pytest.mark.parametrize(
    "mode", [pytest.param("greedy", marks=pytest.mark.full), "coupled", "rejection"]
)
@pytest.mark.full("rejection")
def test_probe_masking_drafts_equal_fill_masking(mode: str) -> None:
    """Outputs, rounds and acceptance with probe masking equal those with fill masking.

    This does not hold for rejection sampling, or with filters such as top_p, which no request here
    has. With probe masking, only the mask rows that verification reads are filled.
    """
    options = {} if mode == "greedy" else {"temperature": 0.8, "verify": mode}
    requests = [replace(r, seed=1000 + i, **options) for i, r in enumerate(mixed_requests(3))]
    rounds = {}
    for masking in ("auto", "probe"):
        with settled(demo_engine(max_batch_size=4, draft_masking=masking)) as engine:
            outputs = engine.generate(requests)
            assert {o.reason for o in outputs} <= {"stop", "length"}
            rounds[masking] = [(answer(o), o.accepted, o.rounds) for o in outputs]
            assert not engine._resources.sampler.arrays.faults.to_host().any()
            grammar = engine.counters()["grammar"]
        assert sum(accepted for _, accepted, _ in rounds[masking]) > 0
    if mode != "rejection":
        assert rounds["probe"] == rounds["auto"]
    assert grammar["probes"] > 0 and grammar["refused_drafts"] == 0
    assert grammar["fills"] <= 4 * (grammar["commits"] + len(requests))


@pytest.mark.parametrize(
    "tree",
    [pytest.param(None, id="chain"), pytest.param((3, 4), id="tree", marks=pytest.mark.full)],
)
def test_grammar_tests_ids_that_dflash2_offers(tree) -> None:
    """The ids that DFlash2 offers are tested, and others if these are illegal, in all maskings.

    The selector keeps the best id of each level, so the order of the ids equals that of DFlash.
    """
    options = {"max_batch_size": 4, "draft_length": 6, "draft_tree": tree}
    found = {}
    for drafter, masking in (
        (DFLASH, "probe"),
        (RandomDFlash2(1), "auto"),
        (RandomDFlash2(1), "probe"),
    ):
        with settled(demo_engine(drafter=drafter, draft_masking=masking, **options)) as engine:
            outputs = engine.generate(mixed_requests(4, max_tokens=16))
            name = masking if drafter is not DFLASH else "dflash"
            grammar = engine.counters()["grammar"]
            accepted = sum(o.accepted for o in outputs)
            found[name] = ([answer(o) for o in outputs], accepted, grammar["probes"])
        assert grammar["refused_drafts"] == 0
        assert grammar["probes"] > 0
    assert all(answers == found["dflash"][0] for answers, _, _ in found.values())
    assert found["auto"] == found["probe"]
    assert found["auto"][1] > 0.8 * found["dflash"][1]


@pytest.mark.parametrize("tree", [None, (3, 4)], ids=["chain", "tree"])
@pytest.mark.full("chain")
def test_lattice_probe_runs_one_grammar_step_per_round(tree) -> None:
    """The grammar step of a round returns only legal drafts.

    A drafter with trained weights commits more tokens per round than one with random weights.
    """
    options = {"draft_length": 4, "draft_masking": "probe", "draft_tree": tree}
    tokens_per_round = []
    for drafter in (RandomDrafter(), DFLASH):
        with settled(demo_engine(max_batch_size=3, drafter=drafter, **options)) as engine:
            engine.generate(mixed_requests(3, max_tokens=20))
            engine.synchronize()
            grammar = engine.counters()["grammar"]
            tokens_per_round.append(engine.stats.tokens_per_round)
        assert grammar["draft_calls"] == grammar["replays"] == grammar["commit_calls"]
        assert grammar["probes"] > grammar["refused_drafts"] == 0
    assert tokens_per_round[1] > 1.5 * tokens_per_round[0]
