"""Nothing that a request gets depends on drafts, batch, overlap, transport, or on the others."""

import functools
import json
import random
import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from engine_util import (
    DEMO,
    DRAFTER,
    ROUND,
    TARGET,
    UNEVEN_DRAFTS,
    FixedDraftLengths,
    demo_engine,
    mixed_requests,
    patch_kernel_source,
    task_request,
)
from tiny_models import make_tiny_dflash, make_tiny_mtp, matrix, write_json, write_safetensors

from graft.cudagraph.dtypes import to_float32
from graft.models.drafters import CascadeDrafter, NGram, Suffix, UserDrafter
from graft.models.drafters.load import make_drafter
from graft.models.llm.checkpoint import Checkpoint
from graft.models.request import Request
from graft.tools.bench.demo_evaluation import task_grammar
from graft.tools.demo_tasks import held_out_tasks

MODES = {"greedy": {}, "coupled": {"temperature": 0.9, "top_p": 0.95, "verify": "coupled"}}


def workload(**options):
    """Guided and free requests that end in every way: stop ids, lengths, stop strings."""
    requests = mixed_requests(8, seed=17)
    requests = [
        replace(r, max_tokens=n) if n else r
        for r, n in zip(requests, (1, 0, 3, 0, 7, 0, 12, 0), strict=True)
    ]
    free = Request(tokens=[300, 301, 302], max_tokens=40)
    requests += [replace(free, stop=["e", "a"]), replace(free, tokens=[41]), free]
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    requests += [
        replace(requests[1], repetition_penalty=1.4, min_tokens=9, logprobs=2),
        replace(requests[3], **penalties, logit_bias={t: 2.0 for t in range(40, 90)}),
        replace(free, **penalties, banned_ids=range(100, 200, 3), logprobs=0, stop=["e", "a"]),
        replace(free, allowed_ids=range(4, 400), min_tokens=20, logprobs=20, presence_penalty=-1.5),
    ]
    return [replace(r, id=str(i), seed=500 + i, **options) for i, r in enumerate(requests)]


def answer(output):
    assert output.logprobs is None or len(output.logprobs) == len(output.tokens)
    return output.reason, output.tokens, output.text, output.logprobs


@contextmanager
def settled(engine):
    """Check that the engine holds nothing once its requests are done; then close it."""
    with engine:
        yield engine
        engine.synchronize()
        counters = engine.counters()
        assert not any(counters["held"].values()), counters["held"]
        grammar = counters["grammar"]
        assert not any(grammar[n] for n in ("desyncs", "errors", "missing_snapshots")), grammar


@pytest.fixture(scope="module")
def truth():
    """What each request gets alone: no drafter, one row, one round in flight."""
    with settled(demo_engine(speculation=False, max_batch_size=1, overlap=False)) as engine:
        return {
            name: [answer(engine.generate([r])[0]) for r in workload(**options)]
            for name, options in MODES.items()
        }


def check_disturbed(engine, truth, mode, seed):
    """Requests that come in over time, are preempted and cancelled on the way get what they get
    alone, as far as they are let; returns how many were preempted."""
    rng = random.Random(seed)
    requests = workload(**MODES[mode])
    coming = list(requests)
    done = {}
    preemptions = 0
    rng.shuffle(coming)
    while coming or engine.busy:
        for _ in range(min(rng.choice((0, 1, 1, 3)), len(coming))):
            engine.submit(coming.pop())
        for event in engine.step():
            if event.output is not None:
                done[event.id] = event.output
        names = [str(r.id) for r in rng.sample(requests, len(requests))]
        if rng.random() < 0.3 or not preemptions:
            preemptions += any(engine.preempt(name) for name in names)
        if rng.random() < 0.03:
            engine.cancel(names[-1])
    for request, expected in zip(requests, truth[mode], strict=True):
        output = done[request.id]
        where = (engine.options.max_batch_size, seed, request.id)
        if output.reason == "cancelled":
            assert output.tokens == expected[1][: len(output.tokens)], where
        else:
            assert answer(output) == expected, where
    return preemptions


@dataclass(frozen=True)
class Meaningless:
    """A drafter of the demo's target with random weights, as an engine asks for it: so many modules
    of multi-token prediction, or none and a block drafter, one of DSpark given a rank."""

    modules: int = 0
    rank: int = 0

    def __call__(self, room):
        config = json.loads((TARGET / "config.json").read_text())
        with tempfile.TemporaryDirectory() as folder:
            if self.modules:
                make_tiny_mtp(Path(folder), config, modules=self.modules)
            else:
                make_tiny_dflash(Path(folder), config, layers=(0, 2), block=5, rank=self.rank)
            return make_drafter(folder, room)


@dataclass(frozen=True)
class Second:
    """The demo's block drafter as one of DFlash2: convolutions that change nothing, a random
    selector among so many ids, and windows as long as requests."""

    top_k: int = 16

    def __call__(self, room):
        checkpoint = Checkpoint(BLOCK)
        rng = np.random.default_rng(2)
        tensors = {name: to_float32(*checkpoint.get(name)) for name in checkpoint.names}
        hidden = room.target.config.hidden_size
        vocab = room.target.config.vocab_size
        for name in (f"layers.{i}.{part}_conv" for i in range(3) for part in ("attention", "mlp")):
            base = np.zeros((2, 2, hidden), "f4")
            projection = np.zeros((hidden // 4, hidden), "f4")
            base[:, 0] = 1.0
            tensors |= {f"{name}.base_kernel": base, f"{name}.kernel_projection.weight": projection}
        for name, rows in (
            ("hidden_projection.weight", 8),
            ("predecessor_codebook", vocab),
            ("successor_codebook", vocab),
        ):
            random = matrix(rng, rows, 8 if rows == vocab else hidden)
            tensors[f"candidate_selector.{name}"] = random
        config = json.loads((BLOCK / "config.json").read_text())
        config |= {
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            "use_sliding_window": True,
            "sliding_window": room.length,
            "layer_types": ["sliding_attention"] * 3,
        }
        config["dflash_config"] |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": self.top_k,
        }
        with tempfile.TemporaryDirectory() as folder:
            write_safetensors(Path(folder) / "model.safetensors", tensors, "float32")
            write_json(Path(folder) / "config.json", config)
            return make_drafter(folder, room)


def repeat(tokens):
    """Drafts on the host: three tokens from a little before."""
    return tokens[-9:-6]


def branch_off(tokens):
    """A tree of drafts on the host: two children of the last token, one of the first child."""
    ids = tokens[-4:-1]
    return ids, [0, 0, 1][: len(ids)]


def wandering(lengths, seed):
    """Any of the lengths, now and then none for a while."""
    rng = random.Random(seed)
    while True:
        yield rng.choice(lengths)
        yield from [0] * rng.choice((0, 0, 0, 5))


AHEAD = partial(CascadeDrafter, first=NGram)
LOOKUP_AHEAD = partial(AHEAD, then=DRAFTER)
BLOCK = DEMO / "dflash"
RANKS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]
GROWN = {"draft_length": 5, "draft_tree": (2, 3)}
CELLS = {
    "eagle3": {},
    "eagle3, tree": GROWN,
    "dflash": {"drafter": BLOCK},
    "dflash, tree": {"drafter": BLOCK, **GROWN},
    "dflash, walked": {"drafter": BLOCK, "draft_length": 6, "draft_masking": "probe"},
    "dspark": {"drafter": Meaningless(rank=8)},
    "dflash2": {"drafter": Second()},
    "dflash2, tree": {"drafter": Second(), **GROWN},
    "mtp": {"drafter": Meaningless(1), "draft_length": 2},
    "model": {"drafter": TARGET},
    "ngram": {"drafter": NGram},
    "suffix": {"drafter": Suffix},
    "suffix, tree": {"drafter": Suffix, **GROWN},
    "host": {"drafter": UserDrafter.of(repeat)},
    "host, tree": {"drafter": UserDrafter.of(branch_off, tree=True)},
    "forced": {"speculation": False, "forced_drafts": True},
    "ngram before eagle3": {"drafter": LOOKUP_AHEAD},
}
OTHER_TREES = {
    f"{name}, tree": {"drafter": drafter, **GROWN}
    for name, drafter in {
        "dspark": Meaningless(rank=8),
        "mtp": Meaningless(1),
        "model": TARGET,
        "ngram": NGram,
    }.items()
}
SHAPES = [
    {"max_batch_size": 1, "mask_drafts": False},
    {"max_batch_size": 4, "grammar_threads": 2, "grammar_budget_us": 1.0},
    {"max_batch_size": 5, "pages": 40, "page_size": 16, "max_length": 400},
    {"max_batch_size": 8, "grammar_transport": "mailbox", "programmatic": True},
    {"max_batch_size": 3, "composition": "two"},
    {"max_batch_size": 3, "draft_length": "auto"},
    {"max_batch_size": 3, "drafter": BLOCK, "draft_masking": "probe", "forced_drafts": True},
]
QUICK = len(SHAPES)
SHAPES += [{"max_batch_size": 3, **cell} for cell in (CELLS | OTHER_TREES).values()]
SHAPES += [{"max_batch_size": 2, **cell, "draft_length": "auto"} for cell in CELLS.values()]
SHAPES += [
    {"max_batch_size": 4, "draft_masking": "probe"},
    {"max_batch_size": 3, "speculation": False},
    {"max_batch_size": 6, "grammar_transport": "spinkernel", "draft_length": 2},
    {"max_batch_size": 3, "drafter": partial(Suffix, public=True), "draft_length": 5},
    {"max_batch_size": 5, "mask_drafts": False, "draft_length": 1, "overlap": False},
    {"max_batch_size": 4, "draft_length": 20, "draft_tree": (4, 5), "mask_drafts": False},
    {"max_batch_size": 3, "drafter": partial(AHEAD, then=Meaningless(3))},
    {"max_batch_size": 3, "draft_length": 9, "draft_tree": RANKS},
    {"max_batch_size": 2, "drafter": partial(NGram, longest=2, public=True, oldest=True)},
    {"max_batch_size": 2, "drafter": partial(NGram, match="all", drafts=2)},
    {"max_batch_size": 3, "drafter": partial(CascadeDrafter, first=Suffix, then=DRAFTER)},
    {"max_batch_size": 2, "drafter": BLOCK, "draft_length": 9, "draft_tree": RANKS},
    {"max_batch_size": 3, "draft_length": 9, "draft_tree": RANKS, "mask_drafts": False},
    {"max_batch_size": 3, "composition": "two", "mask_drafts": False},
    {"max_batch_size": 4, "composition": "two", "draft_masking": "probe", "draft_length": 5},
    {"max_batch_size": 2, "composition": "two", "grammar_transport": "mailbox"},
    {"max_batch_size": 3, "composition": "two", "draft_length": 7, "draft_tree": (3, 3)},
    {"max_batch_size": 3, "composition": "two", "speculation": False, "forced_drafts": True},
    {"max_batch_size": 3, "composition": "two", "drafter": LOOKUP_AHEAD, "draft_length": 4},
    {
        "max_batch_size": 4,
        "drafter": partial(CascadeDrafter, first=UserDrafter.of(repeat), then=DRAFTER),
    },
    {"max_batch_size": 2, "drafter": LOOKUP_AHEAD, "mask_drafts": False},
    {"max_batch_size": 3, "drafter": LOOKUP_AHEAD, "draft_masking": "probe"},
    {"max_batch_size": 3, "drafter": TARGET, "draft_masking": "probe"},
    {"max_batch_size": 2, "draft_length": 63, "draft_tree": (8, 8), "grammar_budget_us": 1.0},
    {"max_batch_size": 2, "drafter": Meaningless(1), "draft_length": 2, "draft_masking": "probe"},
    {"max_batch_size": 3, "drafter": partial(AHEAD, then=BLOCK), "mask_drafts": False},
    {"max_batch_size": 3, "drafter": partial(AHEAD, then=Meaningless(rank=8))},
    {"max_batch_size": 4, "drafter": Second(), "draft_masking": "probe", "forced_drafts": True},
    {"max_batch_size": 3, "drafter": Second(40), "draft_length": 9, "draft_tree": (3, 4)},
    {"max_batch_size": 2, "drafter": partial(AHEAD, then=Second()), "mask_drafts": False},
    {"max_batch_size": 2, "drafter": Second(), "draft_length": "auto", "composition": "two"},
    {"max_batch_size": 2, "drafter": partial(AHEAD, then=Meaningless(1)), "draft_length": 4},
    {"max_batch_size": 3, "draft_length": "auto", "draft_masking": "probe"},
    {"max_batch_size": 3, "draft_length": "auto", "mask_drafts": False, "overlap": False},
    {"max_batch_size": 2, "draft_length": "auto", "drafter": Meaningless(3)},
    {"max_batch_size": 2, "draft_length": "auto", "composition": "two"},
    {"max_batch_size": 2, "draft_length": "auto", "forced_drafts": True, "grammar_budget_us": 1.0},
    {"max_batch_size": 3, "drafter": BLOCK, "draft_masking": "probe", "grammar_budget_us": 1.0},
    {
        "max_batch_size": 2,
        "drafter": BLOCK,
        "draft_length": 20,
        "draft_tree": (4, 4),
        "grammar_transport": "mailbox",
        "grammar_threads": 2,
        "grammar_budget_us": 20.0,
    },
]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            id=re.sub(" at 0x[0-9a-f]+", "", str(shape)),
            marks=[pytest.mark.full] if number >= QUICK else [],
        )
        for number, shape in enumerate(SHAPES)
    ],
)
def test_disturbed_requests_get_the_same(truth, number, monkeypatch, tmp_path):
    """Greedy and coupled, joined late, preempted, cancelled, by every kind of drafts, transport and
    batch, late rows included, whoever has a place: all tokens as if each ran alone."""
    shape = SHAPES[number]
    mode = ("greedy", "coupled")[number % 2]
    cuts = set()
    if auto := shape.get("draft_length") == "auto":
        patch_kernel_source(monkeypatch, tmp_path, ROUND, *UNEVEN_DRAFTS)
    with settled(demo_engine(**shape)) as engine:
        if auto:
            engine._replays.on_row = lambda _, row: cuts.add(row.tested if row.cut else -1)
            engine._scheduler.budget = FixedDraftLengths(
                wandering(engine._built.budget.lengths, number)
            )
        preemptions = check_disturbed(engine, truth, mode, seed=number)
        assert preemptions == engine.stats.preemptions > 0
        assert (len(engine.stats.rounds_by_length) > 1) == auto == bool(cuts - {-1})
        drafts = shape.get("speculation", True) or shape.get("forced_drafts", False)
        assert (engine.stats.speculated_rounds > 0) == drafts
        probes = engine.counters()["grammar"]["probes"]
        probed = shape.get("draft_masking") == "probe" or engine._parts.decoder.probing
        assert (probes > 0) == (probed and shape.get("mask_drafts", True))


@functools.cache
def prompts(count):
    """So many, in every mode, with a grammar and without, and what each gets alone; of few the
    shortest that a generator draws, and of their outputs the beginnings."""
    few = count < 100
    tasks = [t for t in held_out_tasks(2 * count + 40, seed=29) if task_grammar(t) is not None]
    tasks = sorted(tasks, key=lambda task: len(task.text))[:count] if few else tasks[:count]
    guided = [task_request(task, max_tokens=6 if few else 48) for task in tasks]
    asked = [replace(r, seed=i, **MODES[mode]) for i, r in enumerate(guided) for mode in MODES]
    asked += [replace(request, grammar=None) for request in asked]
    with settled(demo_engine(speculation=False, max_batch_size=1, overlap=False)) as engine:
        return asked, [answer(output) for output in engine.generate(asked)]


@pytest.mark.parametrize(
    "cell, count",
    [
        *((cell, 8) for cell in CELLS),
        *(pytest.param(cell, 200, marks=pytest.mark.full) for cell in CELLS | OTHER_TREES),
    ],
)
def test_no_draft_changes_an_output(cell, count):
    """Every drafter, chains and trees, greedy and coupled, with a grammar and without: prompts of
    all four together, in any order, get what each gets alone without drafts."""
    asked, expected = prompts(count)
    order = random.Random(cell).sample(range(len(asked)), len(asked))
    with settled(demo_engine(max_batch_size=5, **(CELLS | OTHER_TREES)[cell])) as engine:
        outputs = engine.generate([asked[i] for i in order])
        assert engine.stats.speculated_rounds > 0
    differ = [
        (output.reason, output.error, asked[i])
        for i, output in zip(order, outputs, strict=True)
        if answer(output) != expected[i]
    ]
    assert len(asked) == 4 * count and not differ, differ


def drafts_by_position(lengths, **options):
    """What a coupled request drafts at the end of each round: ids and parents, by position."""
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
            for running in engine._scheduler.unfinished.values():
                slot = engine._parts.state.to_host()[running.slot]
                ids, parents = (slot[name][: slot["draft_len"]] for name in ("drafts", "parent"))
                found[int(slot["n"])] = ids.tolist(), parents.tolist()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drafter": NGram},
        {"draft_tree": (3, 2)},
        *(
            pytest.param({"drafter": drafter}, marks=pytest.mark.full)
            for drafter in (Meaningless(3), TARGET, Meaningless(rank=8), UserDrafter.of(repeat))
        ),
    ],
    ids=["eagle3", "lookup", "tree", "mtp", "model", "block", "host"],
)
def test_rounds_without_drafts_leave_no_gap(options):
    """A drafter that only took in what was committed for some rounds then drafts what it would have
    drafted in any case."""
    always = drafts_by_position([3] * 60, **options)
    paused = drafts_by_position([3] * 3 + [0] * 4 + [3] * 60, **options)
    assert sum(not ids for ids, _ in paused.values()) >= 4
    both = [n for n in always if n in paused and paused[n][0]]
    assert max(both) - min(both) > 40 and len(both) > 8
    assert [paused[n] for n in both] == [always[n] for n in both]


@pytest.mark.full
@pytest.mark.parametrize("mask_drafts", [True, False], ids=["masked", "unmasked"])
@pytest.mark.parametrize("transport", ["native", "mailbox", "spinkernel"])
def test_disturbed_for_long(truth, transport, mask_drafts):
    """Forty disturbed runs at every batch size from 1 to 8, by every transport."""
    for batch in range(1, 9):
        options = {"grammar_transport": transport, "mask_drafts": mask_drafts}
        with settled(demo_engine(max_batch_size=batch, **options)) as engine:
            for seed in range(5):
                mode = "greedy" if seed % 2 else "coupled"
                check_disturbed(engine, truth, mode, seed=1000 * batch + seed)


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_probed_drafts(mode: str) -> None:
    """Without filters, drafts are those of filled rows, hence rounds and acceptance; by rejection
    they are those of coupled requests. No more rows are filled than verification reads."""
    options = {} if mode == "greedy" else {"temperature": 0.8, "verify": mode}
    requests = [replace(r, seed=1000 + i, **options) for i, r in enumerate(mixed_requests(3))]
    rounds = {}
    for masking in ("fill", "probe"):
        with settled(demo_engine(max_batch_size=4, draft_masking=masking)) as engine:
            outputs = engine.generate(requests)
            assert {o.reason for o in outputs} <= {"stop", "length"}
            rounds[masking] = [(answer(o), o.accepted, o.rounds) for o in outputs]
            assert not engine._parts.sampler.faults.to_host().any()
            grammar = engine.counters()["grammar"]
        assert sum(accepted for _, accepted, _ in rounds[masking]) > 0
    if mode != "rejection":
        assert rounds["probe"] == rounds["fill"]
    assert grammar["probes"] > 0 and grammar["refused_drafts"] == 0
    assert grammar["fills"] <= 4 * (grammar["commits"] + len(requests))


def test_what_a_selector_leaves_out_is_drafted_if_nothing_else_is_legal() -> None:
    """One that selects from one id is of no effect, and under a grammar drafts what comes next, so
    that rounds and acceptance are those of a block drafter without."""
    rounds = []
    for drafter in (BLOCK, Second(1)):
        with settled(demo_engine(max_batch_size=4, draft_length=6, drafter=drafter)) as engine:
            outputs = engine.generate(mixed_requests(6, max_tokens=40))
            rounds.append([(answer(o), o.accepted, o.rounds) for o in outputs])
    assert rounds[0] == rounds[1]
    assert sum(accepted for _, accepted, _ in rounds[0]) > 60


@pytest.mark.parametrize("tree", [None, (3, 4)], ids=["chain", "tree"])
def test_the_grammar_joins_once_a_round(tree) -> None:
    """Whatever a block drafter's levels are, it is asked once, and drafts nothing illegal; the
    demo's own is right far more often than one that has learnt nothing."""
    options = {"draft_length": 4, "draft_masking": "probe", "draft_tree": tree}
    brought = []
    for drafter in (Meaningless(), BLOCK):
        with settled(demo_engine(max_batch_size=3, drafter=drafter, **options)) as engine:
            engine.generate(mixed_requests(3, max_tokens=30))
            engine.synchronize()
            grammar = engine.counters()["grammar"]
            brought.append(engine.stats.tokens_per_round)
        assert grammar["draft_calls"] == grammar["replays"] == grammar["commit_calls"]
        assert grammar["probes"] > grammar["refused_drafts"] == 0
    assert brought[1] > 1.5 * brought[0]


@pytest.mark.full
def test_overlap_keeps_rejection_sampling(truth) -> None:
    """Neither overlap nor composition moves a round's boundary, so even rejection sampling draws
    the same tokens; in two, a graph ends with verification and with each step that is waited for.
    """
    requests = workload(temperature=0.9, verify="rejection")
    outputs = []
    for graphs, options in ((1, {}), (1, {"overlap": False}), (5, {"composition": "two"})):
        with settled(demo_engine(max_batch_size=4, **options)) as engine:
            outputs.append([answer(o) for o in engine.generate(requests)])
            assert {len(one.graphs) for one in engine.round_graphs.values()} == {graphs}
    assert outputs[0] == outputs[1] == outputs[2]


def test_rounds_are_launched_ahead() -> None:
    """In mid-generation one round is still unread when a step returns; without overlap none is."""
    for options, ahead in (({}, 1), ({"overlap": False}, 0), ({"composition": "two"}, 0)):
        with demo_engine(max_batch_size=2, **options) as engine:
            for seed in range(2):
                engine.submit(Request(tokens=[300, 301, 302 + seed], max_tokens=40))
            for _ in range(3):
                engine.step()
                assert engine.counters()["held"]["unread_replays"] == ahead


def test_rows_do_not_idle_between_requests() -> None:
    """A request's row is taken over in the round after the one that was launched too early."""
    requests = [Request(tokens=[60 + i, 70], max_tokens=1) for i in range(24)]
    with settled(demo_engine(max_batch_size=2, prefill_rows=64)) as engine:
        assert all(o.reason == "length" for o in engine.generate(requests))
        assert engine.stats.row_rounds == len(requests)
        assert engine.stats.rounds <= len(requests) + 2
        assert engine.stats.surplus_tokens == 0


def test_surplus_tokens_are_counted_and_dropped() -> None:
    """A stop string is seen one round late: what came meanwhile is in no output."""
    free = Request(tokens=[300, 301, 302], max_tokens=40)
    with settled(demo_engine(max_batch_size=1)) as engine:
        (whole,) = engine.generate([free])
        engine.synchronize()
        engine.reset_stats()
        (cut,) = engine.generate([replace(free, stop=[whole.text[2]])])
        engine.synchronize()
        assert cut.reason == "stop_string"
        assert cut.tokens == whole.tokens[: len(cut.tokens)] and len(cut.tokens) < 40
        assert engine.stats.stale_rows == 1 and engine.stats.surplus_tokens > 0
