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
    RandomDFlash2,
    RandomDrafter,
    answer,
    answers,
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


@pytest.fixture(scope="module")
def expected_answers():
    """Expected answers by mode, generated one by one without drafter and without overlap."""
    expected = {}
    with settled(demo_engine(speculation=False, max_batch_size=1, overlap=False)) as engine:
        for mode, options in MODES.items():
            expected[mode] = []
            for request in workload(**options):
                [output] = engine.generate([request])
                expected[mode].append(answer(output))
    return expected


def check_disturbed(engine, expected_answers, mode, seed):
    """Submit, preempt and cancel requests at random times, and check the answers.

    Return the number of preemptions.
    """
    rng = random.Random(seed)
    requests = workload(**MODES[mode])
    pending = list(requests)
    found = {}
    preemptions = 0
    rng.shuffle(pending)
    while pending or engine.busy:
        num_submitted = min(rng.choice((0, 1, 1, 3)), len(pending))
        for _ in range(num_submitted):
            engine.submit(pending.pop())
        for event in engine.step():
            if event.output is not None:
                found[event.id] = event.output
        ids = [str(r.id) for r in rng.sample(requests, len(requests))]
        if rng.random() < 0.3 or not preemptions:
            preemptions += any(engine.preempt(request_id) for request_id in ids)
        if rng.random() < 0.03:
            engine.cancel(ids[-1])
    for request, expected in zip(requests, expected_answers[mode], strict=True):
        output = found[request.id]
        where = (engine.options.max_batch_size, seed, request.id)
        if output.reason == "cancelled":
            assert output.tokens == expected[1][: len(output.tokens)], where
        else:
            assert answer(output) == expected, where
    return preemptions


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[pytest.mark.full] if number % 4 != 1 else [])
        for number in range(len(CONFIGURATIONS))
    ],
)
@pytest.mark.full("[1]", "[9]", "[17]")
def test_engine_output_is_unchanged_by_join_cancel_and_preemption(
    expected_answers, number, monkeypatch
):
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
        preemptions = check_disturbed(engine, expected_answers, mode, seed=number)
        assert preemptions == engine.stats.preemptions > 0
        has_many_lengths = len(engine.stats.rounds_by_length) > 1
        assert has_many_lengths == auto == bool(tested_when_cut)
        has_drafts = options.get("speculation", True) or options.get("forced_drafts", False)
        assert (engine.stats.speculated_rounds > 0) == has_drafts
        probes = engine.counters()["grammar"]["probes"]
        assert (probes > 0) == engine._resources.mode.probes


@functools.cache
def prompts_and_answers(count):
    """Return requests and their expected answers, generated without drafts.

    For each of `count` tasks there are four requests: greedy and coupled, with and without grammar.
    If `count` is less than 100, the shortest tasks are chosen and the outputs are short.
    """
    is_quick = count < 100
    tasks = [t for t in held_out_tasks(2 * count + 40, seed=29) if task_grammar(t) is not None]
    if is_quick:
        tasks.sort(key=lambda task: len(task.text))
    requests = []
    for seed, task in enumerate(tasks[:count]):
        request = task_request(task, max_tokens=6 if is_quick else 48)
        for sampling in MODES.values():
            requests.append(replace(request, seed=seed, **sampling))
    requests += [replace(request, grammar=None) for request in requests]
    with settled(demo_engine(speculation=False, max_batch_size=1, overlap=False)) as engine:
        return requests, answers(engine.generate(requests))


ALL_DRAFTER_OPTIONS = DRAFTER_OPTIONS | MORE_TREE_OPTIONS


@pytest.mark.parametrize(
    "drafter, count",
    [
        *((drafter, 8) for drafter in ("eagle3", "dflash2", "host, tree")),
        *(pytest.param(name, 200, marks=pytest.mark.full) for name in ALL_DRAFTER_OPTIONS),
    ],
)
def test_drafts_do_not_change_outputs(drafter, count):
    """Each drafter, as chain and as tree, runs all requests in random order in mixed batches."""
    requests, expected = prompts_and_answers(count)
    order = random.Random(drafter).sample(range(len(requests)), len(requests))
    with settled(demo_engine(max_batch_size=5, **ALL_DRAFTER_OPTIONS[drafter])) as engine:
        outputs = engine.generate([requests[i] for i in order])
        assert engine.stats.speculated_rounds > 0
    different = []
    for i, output in zip(order, outputs, strict=True):
        if answer(output) != expected[i]:
            different.append((output.reason, output.error, requests[i]))
    assert len(requests) == 4 * count
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
@pytest.mark.full("lookup")
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
def test_engine_output_is_unchanged_in_many_disturbed_runs(expected_answers, transport, masking):
    """Requests join, are preempted and cancelled at random, in five runs for each batch size."""
    for batch in range(1, 9):
        options = {"grammar_transport": transport, "draft_masking": masking}
        with settled(demo_engine(max_batch_size=batch, **options)) as engine:
            for seed in range(5):
                mode = "greedy" if seed % 2 else "coupled"
                check_disturbed(engine, expected_answers, mode, seed=1000 * batch + seed)


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
            outputs = engine.generate(mixed_requests(6, max_tokens=40))
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
def test_lattice_probe_runs_one_grammar_step_per_round(tree) -> None:
    """The grammar step of a round returns only legal drafts.

    A drafter with trained weights commits more tokens per round than one with random weights.
    """
    options = {"draft_length": 4, "draft_masking": "probe", "draft_tree": tree}
    tokens_per_round = []
    for drafter in (RandomDrafter(), DFLASH):
        with settled(demo_engine(max_batch_size=3, drafter=drafter, **options)) as engine:
            engine.generate(mixed_requests(3, max_tokens=30))
            engine.synchronize()
            grammar = engine.counters()["grammar"]
            tokens_per_round.append(engine.stats.tokens_per_round)
        assert grammar["draft_calls"] == grammar["replays"] == grammar["commit_calls"]
        assert grammar["probes"] > grammar["refused_drafts"] == 0
    assert tokens_per_round[1] > 1.5 * tokens_per_round[0]
