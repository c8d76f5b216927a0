"""Scheduling: chunked prefill, queue order, preemption, and KV-cache pages on demand."""

import random
from dataclasses import replace
from functools import partial

import pytest
from engine_cases import (
    DFLASH,
    GROWN_TREE,
    LOOKUP_CASCADE,
    TARGET,
    RandomDrafter,
    answers,
    answers_and_drafts,
    settled,
)
from engine_util import demo_engine, mixed_requests
from tiny_models import make_tiny_llama, make_tiny_tokenizer

from graft.models.drafters import NGram
from graft.models.engine.engine import Engine
from graft.models.engine.slots import SlotManager
from graft.models.request import Request
from graft.models.round.prefill import CHUNK_SIZES, PrefillScheduler, chunk_size

RUNNING = Request(tokens=[300, 301, 302], max_tokens=120, min_tokens=120, id="running")

#: Options that draft in other ways than the default, a chain of an EAGLE-3 head.
DRAFTERS = [
    {"draft_length": 6, "draft_tree": (2, 3)},
    {"drafter": NGram},
    {"drafter": TARGET},
    {"drafter": DFLASH},
]


def full_only(cases):
    """Return parameters that only the full run uses."""
    return [pytest.param(case, marks=pytest.mark.full) for case in cases]


def record_launches(engine):
    """Return a list to which the engine's launches are appended.

    For a prefill chunk, the entry is the chunk's number of rows. For a round, the entry is the set
    of its request ids.
    """
    launches = []
    prefill = engine._built.prefill
    replays = engine._replays
    run = prefill.run
    launch = replays.launch

    def recorded_run(*args):
        for chunk in run(*args):
            launches.append(chunk.rows)
            yield chunk

    def recorded_launch(graph, states, *args, **kwargs):
        launches.append({state.id for state in states})
        launch(graph, states, *args, **kwargs)

    prefill.run = recorded_run
    replays.launch = recorded_launch
    return launches


def test_chunked_prefill_interleaves_chunks_with_rounds():
    """A prompt is prefilled in chunks of 16 tokens, and a running request is in every round.

    Without a running request, the whole prompt is prefilled before the next round.
    """
    with settled(demo_engine(max_batch_size=2, prefill_rows=16)) as engine:
        launches = record_launches(engine)
        engine.submit(RUNNING)
        engine.step()
        prompt = [7 + i % 90 for i in range(280)]
        engine.submit(Request(tokens=prompt, max_tokens=3, id="long"))
        while "long" in engine._scheduler.unfinished:
            engine.step()
        rows_between_rounds = [0]
        rounds = [launch for launch in launches if isinstance(launch, set)]
        for launch in launches[launches.index({"running"}) :]:
            if isinstance(launch, set):
                rows_between_rounds.append(0)
            else:
                rows_between_rounds[-1] += launch
        assert max(rows_between_rounds) == 16
        assert sum(rows_between_rounds) == 280
        assert rows_between_rounds.count(16) == 17
        assert all("running" in ids for ids in rounds)
        assert {"running", "long"} in rounds
        engine.cancel("running")
        launches.clear()
        prompt = [9 + i % 80 for i in range(300)]
        engine.generate([Request(tokens=prompt, max_tokens=1)])
        assert [launch for launch in launches if isinstance(launch, int)] == [256, 44]


def test_prefill_reads_weights_once_per_1024_rows(tmp_path):
    """A prompt is prefilled in chunks of 1,024 rows. Its remainder fills smaller chunks.

    Only a chunk of up to 256 rows contains padding.
    """
    make_tiny_llama(tmp_path, num_hidden_layers=1, max_position_embeddings=4096)
    make_tiny_tokenizer(tmp_path)
    options = {"max_batch_size": 1, "max_length": 4096, "prefix_cache_bytes": 0}
    with settled(Engine(tmp_path, None, **options)) as engine:
        launches = record_launches(engine)
        for count, expected in ((2048, [1024, 1024]), (1950, [1024, 512, 256, 158])):
            launches.clear()
            prompt = [7 + i % 90 for i in range(count + 1)]  # a round processes the last token
            engine.generate([Request(tokens=prompt, max_tokens=1)])
            assert [rows for rows in launches if isinstance(rows, int)] == expected


def chunk_cost(fixed, each, rows):
    """Return the simulated time of `rows` prefill rows in seconds.

    Parameters
    ----------
    fixed
        Seconds per graph launch.
    each
        Seconds per row. Fewer than four rows take as long as four.
    rows
        Number of rows.
    """
    return fixed + each * max(rows, 4)


@pytest.mark.parametrize("fixed, each", [(0.0, 1e-4), (2e-3, 1e-5), (9e-3, 1e-6), (1e-3, 0.0)])
@pytest.mark.parametrize("round_s", [1e-3, 4e-3, 1e-2])
@pytest.mark.parametrize("warmed", [False, True])
def test_prefill_scheduler_chooses_chunks_of_about_one_round(fixed, each, round_s, warmed):
    """The scheduler chooses the largest chunk that takes at most 0.8 of a round, or four tokens.

    Chunks almost never take more than 1.5 rounds. A size that has not been measured is chosen only
    if twice the measured time of half this size is short enough. After a single slow chunk, the
    scheduler soon returns to its previous choice.
    """
    cost = partial(chunk_cost, fixed, each)
    scheduler = PrefillScheduler(None)
    chosen = []
    slow = [100, 300]
    for size in CHUNK_SIZES if warmed else (256, 64):
        scheduler.record_time(size, cost(size))
    for number in range(2000):
        rows = scheduler.rows(round_s)
        chosen.append(rows)
        slowdown = 10 if number in slow else 1
        scheduler.record_time(rows, cost(rows) * slowdown)
        scheduler.record_time(1, cost(4))  # the last row of a prompt
    assert set(chosen) <= set(CHUNK_SIZES)
    late = [rows for rows in chosen if rows > 4 and cost(rows) > 1.5 * round_s]
    assert len(late) <= 3
    fits = [rows for rows in CHUNK_SIZES if cost(rows) <= 0.8 * round_s] or [4]
    halves = [rows for rows in fits if 2 * cost(rows // 2) <= 0.8 * round_s] or [4]
    if warmed:
        assert chosen[-1] == fits[-1]
    else:
        assert halves[-1] <= chosen[-1] <= fits[-1]


@pytest.mark.parametrize("fixed, each", [(0.0, 1e-4), (2e-3, 1e-5), (9e-3, 1e-6), (1e-3, 0.0)])
def test_prefill_scheduler_counts_short_chunks_by_their_time(fixed, each):
    """A short chunk counts as the number of rows that a full chunk processes in the same time.

    If `prefill_rows` is a fixed number, a chunk counts as its own number of rows.
    """
    cost = partial(chunk_cost, fixed, each)
    fixed_scheduler = PrefillScheduler(77)
    assert fixed_scheduler.rows(1e-3) == 77
    assert fixed_scheduler.charged_rows(5, 77) == 5
    scheduler = PrefillScheduler(None)
    for size in CHUNK_SIZES:
        scheduler.record_time(size, cost(size))
    for rows, allowed in ((5, 64), (8, 16), (200, 256), (9, 256), (60, 512), (60, 700)):
        charged = scheduler.charged_rows(rows, allowed)
        assert rows <= charged <= allowed
        chunk = chunk_size(allowed)
        time_share = cost(chunk_size(rows)) / cost(chunk)
        assert charged in (rows, allowed) or abs(charged / chunk - time_share) < 1 / chunk


@pytest.mark.parametrize(
    "options", [{}, *full_only(DRAFTERS), *full_only([{"speculation": False}])], ids=str
)
@pytest.mark.full
def test_chunked_prefill_size_does_not_change_outputs(options):
    """The chunk size changes neither tokens nor drafts of greedy and coupled requests."""
    requests = [replace(r, prompt=r.prompt * 3) for r in mixed_requests(3, seed=5, max_tokens=12)]
    requests.append(
        Request(
            tokens=[3 + i % 250 for i in range(290)],
            max_tokens=9,
            seed=4,
            temperature=0.9,
            verify="coupled",
        )
    )
    results = []
    for rows in (512, 16, 100):
        with settled(demo_engine(max_batch_size=2, prefill_rows=rows, **options)) as engine:
            outputs = engine.generate(requests)
            results.append(answers_and_drafts(outputs))
    assert results[0] == results[1] == results[2]


def finish_order(engine, requests):
    """Submit requests together, and return their ids in the order in which they finish."""
    return [event.id for event in engine.stream(requests) if event.finished]


def test_scheduler_admits_by_priority_then_prefix_cache_hits():
    """Requests are admitted by priority, then by prefix-cache hits, then in order of submission.

    The first request in the queue is bypassed at most 16 times.
    """
    options = {"max_tokens": 1, "grammar": None}
    shared = list(range(50, 70))
    with settled(demo_engine(max_batch_size=1, page_size=4)) as engine:
        engine.warm(Request(tokens=shared))
        # For each request: a token that occurs in no other request, the number of tokens that it
        # shares with the cached prompt, and its priority.
        cases = {
            "cold": (90, 0, 0),
            "half": (91, 8, 0),
            "most": (92, 19, 0),
            "late": (93, 0, 0),
            "low": (94, 19, -1),
            "urgent": (95, 0, 2),
            "same": (96, 19, 0),
        }
        requests = []
        for name, (token, num_shared, priority) in cases.items():
            tokens = [*shared[:num_shared], *[token] * 6]
            requests.append(Request(tokens=tokens, priority=priority, id=name, **options))
        expected = ["urgent", "most", "same", "half", "cold", "late", "low"]
        assert finish_order(engine, requests) == expected
        cold = Request(tokens=[97] * 9, id="cold", **options)
        warm = [Request(tokens=[*shared, 100 + i], id=str(i), **options) for i in range(20)]
        order = finish_order(engine, [cold, *warm])
        assert order == [*map(str, range(16)), "cold", *map(str, range(16, 20))]


def test_slot_manager_predicts_which_requests_can_join(monkeypatch):
    """`may_join` returns exactly the requests that can join.

    An exact prediction matters, because an attempt to join reads the whole prompt.
    """
    joined = []
    refused = []
    join, may_join = SlotManager.join, SlotManager.may_join

    def checked_join(self, state, params):
        joined.append(join(self, state, params))
        return joined[-1]

    def checked_may_join(self, states):
        found = may_join(self, states)
        for state in states:
            if state not in found and self.has_free_slot:
                refused.append(state)
                assert not join(self, state, state.params)
        return found

    monkeypatch.setattr(SlotManager, "join", checked_join)
    monkeypatch.setattr(SlotManager, "may_join", checked_may_join)
    rng = random.Random(3)
    requests = []
    for _ in range(24):
        tokens = [300 + rng.randrange(2)] * rng.choice([10, 30, 60])
        tokens += [310 + rng.randrange(30) for _ in range(rng.randrange(20))]
        length = rng.choice([2, 20, 60])
        requests.append(Request(tokens=tokens, min_tokens=length, max_tokens=length, seed=1))
    with settled(demo_engine(max_batch_size=4, page_size=4, pages=56, max_length=200)) as engine:
        outputs = engine.generate(requests)
        assert engine.stats.preemptions > 0
    assert {output.reason for output in outputs} <= {"stop", "length"}
    assert len(joined) >= len(requests) and all(joined)
    assert len(refused) > 20


def test_scheduler_admits_requests_that_fit_before_those_that_do_not():
    """A waiting request for which there are too few pages does not block smaller requests.

    The first request of the queue is bypassed at most 16 times, whether it fits or not.
    """
    running = Request(tokens=[60] * 20, min_tokens=100, max_tokens=100, id="running", priority=1)
    shared = list(range(70, 90))
    options = {"speculation": False, "max_batch_size": 2, "page_size": 4, "pages": 40}
    with settled(demo_engine(**options)) as engine:
        engine.warm(Request(tokens=shared))
        small = Request(tokens=[61] * 8, max_tokens=1, id="small")
        cached = Request(tokens=[*shared, *[62] * 130], max_tokens=1, id="cached")
        order = finish_order(engine, [running, cached, small])
        assert order == ["small", "running", "cached"]
        large = Request(tokens=[63] * 150, max_tokens=1, id="large")
        several = [replace(small, tokens=[61, *[64 + i] * 7], id=str(i)) for i in range(24)]
        order = finish_order(engine, [running, large, *several])
        assert order[:17] == [*map(str, range(16)), "running"]
        assert "large" in order[17:20]


@pytest.mark.parametrize(
    "options",
    [
        {},
        *full_only(DRAFTERS),
        *full_only(
            [
                {"speculation": False, "overlap": False},
                {"prefix_cache_bytes": 0},
                {"draft_length": "auto"},
                {"drafter": DFLASH, "draft_length": 6, "draft_tree": (2, 3)},
                {"composition": "two"},
                {"draft_masking": "probe"},
            ]
        ),
    ],
    ids=str,
)
def test_scheduler_preempts_lowest_priority_when_pages_run_out(options):
    """Four requests run together, although the KV cache has pages for only one at its full length.

    The outputs are the same as with enough pages for all. The request with the highest priority is
    never preempted. A request that would need more pages than the cache has is refused.
    """
    free = Request(tokens=range(300, 309), max_tokens=48, min_tokens=48)
    requests = [
        *mixed_requests(3, seed=5, max_tokens=40),
        free,
        replace(free, tokens=range(60, 80)),
    ]
    requests += [
        replace(request, temperature=0.9, verify="coupled", seed=i)
        for i, request in enumerate(requests)
    ]
    requests = [replace(r, id=str(i), priority=int(i == 4)) for i, r in enumerate(requests)]
    with settled(demo_engine(speculation=False, max_batch_size=4)) as engine:
        expected = engine.generate(requests)
    longest = 0
    for output, request in zip(expected, requests, strict=True):
        longest = max(longest, output.prompt_tokens + request.max_tokens)
    slack = 0
    if options.get("draft_tree") is not None:
        slack = 6
    elif options.get("drafter") == DFLASH:  # it processes whole blocks of three drafts
        slack = 3
    pages = -(-(longest + slack) // 4)
    sizes = {"max_batch_size": 4, "page_size": 4, "pages": pages}
    # With 512 prefill rows, all requests join at once.
    with settled(demo_engine(**sizes, prefill_rows=512, **options)) as engine:
        too_large = replace(free, max_tokens=4 * pages - slack)
        *outputs, refused = engine.generate([*requests, too_large])
        assert answers(outputs) == answers(expected)
        assert sum(o.preempted for o in outputs) == engine.stats.preemptions > 0
        assert outputs[4].preempted == 0 and refused.error_type == "RequestError"


@pytest.mark.parametrize(
    "options",
    [
        {"draft_length": 6, "draft_tree": (2, 3)},
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in (
                {},
                {"drafter": TARGET},
                {"drafter": DFLASH},
                {"drafter": DFLASH, **GROWN_TREE},
                {"drafter": RandomDrafter(1)},
                {"drafter": LOOKUP_CASCADE},
            )
        ),
    ],
    ids=str,
)
def test_kv_pages_cover_all_drafts_in_flight(options, monkeypatch):
    """Pages are allocated early enough for all positions that drafts can write.

    Each page has one position, so a missing page would change the drafts. The results are compared
    with those of an engine that allocates all pages of a request when the request gets its slot.
    """
    running = replace(RUNNING, max_tokens=50, min_tokens=50)
    requests = [*mixed_requests(2, seed=5, max_tokens=50), running]
    results = []

    def whole_request(slots, state):
        return state.position_limit + slots._slack_positions

    for _ in range(2):
        with settled(demo_engine(max_batch_size=2, page_size=1, **options)) as engine:
            outputs = engine.generate(requests)
            results.append(answers_and_drafts(outputs))
        monkeypatch.setattr(SlotManager, "_required_positions", whole_request)
    assert results[0] == results[1]
