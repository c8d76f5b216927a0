"""Generation loops: one launch of a graph runs many rounds (``generation="graph"``)."""

import itertools
import signal
import threading
import weakref
from dataclasses import replace

import pytest
from engine_cases import (
    DFLASH,
    DRAFTER_OPTIONS,
    GROWN_TREE,
    MODES,
    MORE_TREE_OPTIONS,
    SHORT,
    WHOLE,
    answer,
    answers,
    answers_and_drafts,
    check_disturbed,
    expected_answers,
    keep_some_on_host,
    propose_repeat,
    settled,
    without_grammars,
    workload,
    workload_in_turn,
)
from engine_util import FREE, LONG, demo_engine, drain, patch_kernel_source
from test_device_automata_rounds import automaton_requests, compile_automata

from graft.cudagraph.errors import DeviceError, OptionError
from graft.models.drafters import Suffix, UserDrafter
from graft.models.engine import assembly, replay
from graft.models.engine.slots import LOOP_PAGES_AHEAD
from graft.models.request import Request
from graft.models.round.loop import LOOP_ENTRIES, LoopControl

UNMASKED_TREE = {**GROWN_TREE, "draft_masking": "none"}
DISTURBED_OPTIONS = {
    "chain": {},
    "tree": GROWN_TREE,
    "automatic length": {"draft_length": "auto"},
    "few pages": {"max_batch_size": 5, "pages": 40, "page_size": 16, "max_length": 400},
    "one launch at a time": {"overlap": False},
    "suffix, tree": {"drafter": Suffix, **GROWN_TREE},
    "block drafter": {"drafter": DFLASH},
    "no drafter": {"speculation": False},
}
GUIDED_OPTIONS = {
    "host": {"device_automata": False},
    "device": {"device_automata": True},
    "tree": GROWN_TREE,
    "device, tree": {"device_automata": True, **UNMASKED_TREE},
    "late": {"grammar_threads": 2, "grammar_budget_us": 1.0},
    "automatic length": {"draft_length": "auto"},
    "few pages": {"pages": 40, "page_size": 16, "max_length": 400},
}
LOOP_KERNELS = "models/round/kernels/loop.cu"
#: A request whose tokens fill the output ring of a loop more than once.
MEDIUM = replace(LONG, max_tokens=2 * LOOP_ENTRIES)
LOOP_MODES = {**MODES, "rejection": {"temperature": 0.9, "verify": "rejection"}}
ALL_OPTIONS = {**DRAFTER_OPTIONS, **MORE_TREE_OPTIONS}
#: Names of drafters that run on the host.
HOST_DRAFTERS = ("host", "host, tree")


def loop_engine(**options):
    return demo_engine(**{"max_batch_size": 2, "generation": "graph", **options})


@pytest.fixture(scope="module")
def shared_engine():
    """An engine with the default drafter. Each test must finish or cancel its requests."""
    with settled(loop_engine()) as engine:
        yield engine


@pytest.fixture(scope="module")
def undrafted_engine():
    """An engine without drafter. Each test must finish or cancel its requests."""
    with settled(loop_engine(speculation=False, max_batch_size=4)) as engine:
        yield engine


@pytest.mark.parametrize(
    "drafter, num_turns",
    [
        ("eagle3", 1),
        *(
            pytest.param(name, len(LOOP_MODES), marks=pytest.mark.full)
            for name in ALL_OPTIONS
            if name not in HOST_DRAFTERS
        ),
    ],
)
def test_loop_outputs_equal_outputs_of_rounds(drafter, num_turns):
    """Tokens, log probabilities and draft counts equal those without loops, also with sampling.

    In each turn, the requests use the modes one after another, and in the next turn every request
    uses the next mode.
    """
    options = {"max_batch_size": 3, "grammar_budget_us": None, **ALL_OPTIONS[drafter]}
    modes = list(LOOP_MODES.values())
    turns = [without_grammars(workload_in_turn(modes, first)) for first in range(num_turns)]
    with demo_engine(**options) as engine:
        expected = [answers_and_drafts(engine.generate(turn)) for turn in turns]
    with settled(loop_engine(**options)) as engine:
        for turn, answers_of_turn in zip(turns, expected, strict=True):
            assert answers_and_drafts(engine.generate(turn)) == answers_of_turn
        has_loops = not engine._resources.mode.is_lattice_tree
        assert (engine.stats.launches < engine.stats.rounds) == has_loops


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.full), 4])
def test_loops_are_launched_once_per_batch_size_if_nothing_joins(batch):
    """The requests end one after another, so the loops have four, two and one batch rows."""
    requests = [replace(FREE, tokens=[300 + i], max_tokens=20 + 5 * i) for i in range(batch)]
    with settled(loop_engine(max_batch_size=batch)) as engine:
        engine.generate(requests)
        # While prompts are prefilled, a round is launched after each chunk.
        rounds_before = engine.stats.launches - engine.stats.loops
        assert 1 <= engine.stats.loops <= batch.bit_length()
        assert rounds_before < batch
        assert engine.stats.rounds > 5 + rounds_before
        assert engine.stats.rounds_by_kind == {"loop": engine.stats.rounds}


@pytest.mark.parametrize(
    "options", [{}, pytest.param(UNMASKED_TREE, marks=pytest.mark.full)], ids=["chain", "tree"]
)
def test_loop_runs_requests_with_automata_on_device(options):
    """A loop runs the grammar steps of promoted requests, and the host runs none."""
    requests = automaton_requests()
    with demo_engine(max_batch_size=4, **options) as engine:
        expected = answers(engine.generate(requests))
    with settled(loop_engine(max_batch_size=4, device_automata=True, **options)) as engine:
        compile_automata(engine, requests)
        before = engine.counters()["grammar"]
        assert answers(engine.generate(requests)) == expected
        assert engine.counters()["grammar"] == before
        assert engine.stats.rounds_by_kind == {"loop": engine.stats.rounds}
        assert engine.stats.launches < engine.stats.rounds


@pytest.mark.parametrize("options", DISTURBED_OPTIONS.values(), ids=DISTURBED_OPTIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.full
def test_loops_do_not_change_outputs(options, mode):
    """Requests join, are preempted and are cancelled at random times."""
    requests = without_grammars(workload(**MODES[mode]))
    with settled(loop_engine(**{"max_batch_size": 3, **options})) as engine:
        expected = expected_answers(mode, False)(WHOLE)
        check_disturbed(engine, requests, expected, seed=len(options))
        assert engine.stats.launches < engine.stats.rounds


@pytest.mark.parametrize(
    "options, mode, part",
    [
        pytest.param(GUIDED_OPTIONS["device"], "coupled", SHORT, id="device, short"),
        *(
            pytest.param(options, mode, WHOLE, id=f"{mode}-{name}", marks=pytest.mark.full)
            for name, options in GUIDED_OPTIONS.items()
            for mode in MODES
        ),
    ],
)
def test_loops_with_grammars_do_not_change_outputs(monkeypatch, options, mode, part):
    """Batches with grammar steps on the host run in rounds, and others in loops."""
    keep_some_on_host(monkeypatch)
    with settled(loop_engine(max_batch_size=4, **options)) as engine:
        requests = workload(**MODES[mode])[part]
        check_disturbed(engine, requests, expected_answers(mode)(part), seed=1)
        assert engine.stats.rounds_by_kind["host"] > 0
        if options.get("device_automata"):
            # The number of rounds of a loop depends on when requests join it.
            assert engine.stats.rounds_by_kind["loop"] > 0


def published(engine):
    """Return the number of the last replay whose results the device has published."""
    return int(engine._resources.outputs.stamp.array.max())


def drain_events(engine):
    """Run the engine until it is idle and return all events."""
    events = []
    while engine.busy:
        events += engine.step()
    return events


def start_loop(engine, *requests):
    """Submit requests and step until a loop with all of them is running."""
    ids = [engine.submit(request) for request in requests]
    while not engine._replays.looping or len(engine._replays.unread[0].rows) < len(ids):
        engine.step()
    return ids


def end_by_cancelling(engine, ids):
    engine.cancel(ids[0])


def end_by_preempting(engine, ids):
    engine.preempt(ids[0])


def end_by_joining(engine, ids):
    engine.submit(replace(FREE, max_tokens=2))
    while engine._replays.looping and not engine._scheduler.slots.num_prefilling:
        engine.step()


def end_by_migrating(engine, ids):
    engine.migrate_out(ids[0])


def end_by_timeout(engine, ids):
    state = engine._scheduler.unfinished[ids[0]]
    engine._scheduler._deadlines.append((0.0, -1, weakref.ref(state)))
    engine.step()


def end_by_closing(engine, ids):
    engine._replays.leave_loop()  # what `close` does first


ENDS = [
    end_by_cancelling,
    end_by_joining,
    *(
        pytest.param(end, marks=pytest.mark.full)
        for end in (end_by_preempting, end_by_migrating, end_by_timeout, end_by_closing)
    ),
]


def check_loop_ends(engine, end, request=LONG):
    """Check that a loop ends at most two replays after the host has asked for it."""
    ids = start_loop(engine, request, replace(request, seed=2))
    # if `end` is `migrate_out`, it returns only after the loop has ended
    limit = published(engine) + 200
    end(engine, ids)
    limit = min(limit, published(engine) + 2)
    engine._replays._stream.synchronize()
    assert published(engine) <= limit
    for request_id in ids:
        engine.cancel(request_id)
    drain(engine)


@pytest.fixture
def long_ring(monkeypatch):
    """Make the output ring so long that loops do not end because the host reads too slowly."""
    monkeypatch.setattr(assembly, "LOOP_ENTRIES", 2048)


@pytest.fixture(scope="module")
def medium_answer():
    with demo_engine(max_batch_size=1) as engine:
        return answer(engine.generate([MEDIUM])[0])


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.full
def test_loop_ends_within_two_rounds(end, long_ring, medium_answer):
    with settled(loop_engine()) as engine:
        check_loop_ends(engine, end)
        assert answer(engine.generate([MEDIUM])[0]) == medium_answer


def test_counters_end_loop_before_they_wait_for_device(long_ring):
    with settled(loop_engine(device_automata=True)) as engine:
        ids = start_loop(engine, LONG, replace(LONG, seed=2))
        limit = published(engine) + 200
        assert engine.counters()["automata"]["hits"] >= 0
        assert published(engine) <= limit
        for request_id in ids:
            engine.cancel(request_id)
        drain(engine)


def check_join(engine):
    [first] = start_loop(engine, MEDIUM)
    second = engine.submit(replace(FREE, max_tokens=2))
    finished = [event.id for event in drain_events(engine) if event.finished]
    assert finished == [second, first]


def test_waiting_request_joins_running_loop(shared_engine):
    check_join(shared_engine)


@pytest.mark.full
def test_waiting_request_joins_running_loop_without_overlap():
    with settled(loop_engine(max_batch_size=2, overlap=False)) as engine:
        check_join(engine)


@pytest.mark.overlap
def test_waiting_request_gets_pages_of_request_that_ends_in_loop():
    """A request that waits for pages joins when a request of the loop has ended."""
    options = {"pages": 34, "page_size": 16, "max_length": 400, "prefix_cache_bytes": 0}
    with settled(loop_engine(max_batch_size=3, **options)) as engine:
        prompt = list(range(10, 200))
        short = replace(LONG, tokens=prompt, max_tokens=40)
        short, long = start_loop(engine, short, replace(LONG, max_tokens=220))
        waiting = engine.submit(replace(FREE, tokens=prompt[1:], max_tokens=2))
        finished = [event.id for event in drain_events(engine) if event.finished]
        assert finished == [short, waiting, long]


def check_stats(engine):
    """Check that the statistics count each round of the engine's loops once."""
    requests = [replace(LONG, seed=i, max_tokens=20 + 9 * i) for i in range(5)]
    engine.synchronize()
    engine.reset_stats()
    launched = engine._replays.launched
    engine.generate(requests)
    assert engine.stats.launches < engine.stats.rounds
    assert engine.stats.rounds == engine._replays.launched - launched


def test_stats_count_each_round_of_loops_once(shared_engine):
    check_stats(shared_engine)


@pytest.mark.full
def test_stats_count_each_round_of_loops_once_without_overlap():
    with settled(loop_engine(max_batch_size=2, overlap=False)) as engine:
        check_stats(engine)


def check_full_ring(engine, expected):
    """Check that a loop waits for a host that reads no results, and that none is lost."""
    [request_id] = start_loop(engine, MEDIUM)
    engine._replays._stream.synchronize()
    read = engine._replays.unread[0].number - 1
    assert published(engine) - read == LOOP_ENTRIES - 1
    assert answer(drain(engine)[request_id]) == expected


@pytest.mark.overlap
def test_loop_ends_when_output_ring_is_full(medium_answer):
    with settled(loop_engine(max_batch_size=1)) as engine:
        check_full_ring(engine, medium_answer)
        assert engine.stats.loops > 1


def test_loop_results_are_lost_without_check_of_ring(monkeypatch, medium_answer):
    """Mutant: without the check, the device overwrites results that the host has not read."""
    monkeypatch.setattr(replay, "ROUND_DEADLINE_S", 1.0)
    check = "goes_on = active != 0 && unable == 0 && has_entry"
    without = check.removesuffix(" && has_entry")
    patch_kernel_source(monkeypatch, LOOP_KERNELS, check, without)
    engine = loop_engine(max_batch_size=1)
    with engine, pytest.raises((AssertionError, DeviceError)):
        check_full_ring(engine, medium_answer)


@pytest.mark.overlap
@pytest.mark.parametrize(
    "end",
    [
        end_by_joining,
        *(
            pytest.param(end, marks=pytest.mark.full)
            for end in (end_by_preempting, end_by_timeout, end_by_closing)
        ),
    ],
)
def test_loop_goes_on_without_exit_word(end, monkeypatch, long_ring):
    """Mutant: if the word of the host is lost, the loop does not end when it must.

    `migrate_out` is left out, because it waits until the loop has ended in any case.
    """
    monkeypatch.setattr(LoopControl, "end", lambda control, first: None)
    with loop_engine() as engine, pytest.raises(AssertionError):
        check_loop_ends(engine, end)


@pytest.mark.parametrize("pages", [12, pytest.param(20, marks=pytest.mark.full)])
def test_loop_ends_before_pages_run_out(pages):
    """With few pages, requests are preempted, and loops end when a request needs more pages."""
    requests = [replace(LONG, seed=i, max_tokens=70, verify="coupled") for i in range(4)]
    options = {"max_batch_size": 3, "pages": pages, "page_size": 16, "max_length": 150}
    with demo_engine(**options) as engine:
        expected = answers(engine.generate(requests))
    with settled(demo_engine(**options, generation="graph")) as engine:
        assert answers(engine.generate(requests)) == expected
        assert engine.stats.loops > 2


@pytest.mark.overlap
def test_loops_do_not_accumulate_reserved_pages():
    """The additional pages of a request do not grow with the number of its loops."""
    options = {"pages": 120, "page_size": 4, "max_length": 400, "prefix_cache_bytes": 0}
    with settled(loop_engine(max_batch_size=2, **options)) as engine:
        start_loop(engine, replace(LONG, max_tokens=200))
        [state] = engine._scheduler.slots.running.values()
        loops = engine.stats.loops
        excess = []
        while engine.busy:
            engine._replays.leave_loop()
            engine.step()
            if state.slot >= 0:
                excess.append(state.reserved_positions - state.num_tokens)
        assert engine.stats.loops > loops + 5
        # The request had fewer tokens when the loop that is read now was launched. A round commits
        # at most four tokens.
        assert max(excess) <= 4 * (LOOP_PAGES_AHEAD + 1) + 3 * 4 + 4


def test_loop_is_replaced_when_a_smaller_graph_suffices(undrafted_engine, monkeypatch):
    """A request that outlives the others of its loop continues in a graph for one request."""
    long = replace(LONG, max_tokens=6 * LOOP_ENTRIES)
    requests = [long, *(replace(FREE, tokens=[310 + i], max_tokens=9) for i in range(3))]
    graphs = []
    replays = undrafted_engine._replays
    monkeypatch.setattr(replays, "on_row", lambda *_: graphs.append(replays.unread[0].graph))
    outputs = undrafted_engine.generate(requests)
    # The device may run replays of the larger loop before the host has read that the others ended.
    small = [graph for graph in graphs if (graph.batch, graph.kind) == (1, "loop")]
    length = len(outputs[0].tokens)
    assert length > 5 * LOOP_ENTRIES
    assert len(small) > length - 9 - 2 * LOOP_ENTRIES


def test_loop_is_not_replaced_because_the_round_before_it_had_more_rows():
    """The round before a loop may still be unread when the loop is launched."""
    requests = [replace(LONG, seed=i) for i in range(3)]
    with settled(loop_engine(max_batch_size=4, prefill_rows=4)) as engine:
        ids = [engine.submit(request) for request in requests]
        ids.append(engine.submit(replace(LONG, tokens=range(10, 300), max_tokens=9)))
        slots = engine._scheduler.slots
        while len(slots.running) < 3 or not slots.num_prefilling:
            engine.step()
        for request_id in ids[1:]:
            engine.cancel(request_id)
        engine.step()
        first, *_ = engine._replays.unread
        assert (first.graph.batch, first.repeats, engine.stats.loops) == (1, True, 1)
        assert engine._replays._control.words["end_loop"].array.item() != first.number
        engine.cancel(ids[0])
        drain(engine)


def test_loop_counts_no_stale_rows_for_requests_that_ended(undrafted_engine):
    """The device does not run the row of a request that has ended in a loop."""
    requests = [replace(LONG, max_tokens=count, tokens=[300 + count]) for count in (5, 6, 60)]
    undrafted_engine.reset_stats()
    outputs = undrafted_engine.generate(requests)
    assert undrafted_engine.stats.stale_rows == undrafted_engine.stats.surplus_tokens == 0
    assert [len(output.tokens) for output in outputs] == [5, 6, 60]


def test_loops_keep_prefix_cache_hits():
    """Loops reserve free pages, and evict at most a few pages per request.

    The requests end long before they reach their maximum number of tokens.
    """
    prompts = [list(range(60 * i, 60 * i + 50)) for i in range(12)]
    requests = [Request(tokens=prompt, max_tokens=400, stop_ids=(7,)) for prompt in prompts]
    options = {"max_batch_size": 2, "page_size": 4, "pages": 300, "max_length": 500}
    hits = {}
    for generation in ("rounds", "graph"):
        with demo_engine(speculation=False, **options, generation=generation) as engine:
            for request in requests + requests:
                engine.generate([replace(request, logit_bias={7: 60.0})])
            hits[generation] = engine.counters()["prefixes"]["hit_tokens"]
    assert hits["graph"] == hits["rounds"] >= 12 * 48 * 0.9


def test_loop_evicts_few_pages_of_prefix_cache():
    """Unused pages of the prefix cache do not end loops."""
    requests = [replace(LONG, tokens=range(40 * i, 40 * i + 40), max_tokens=60) for i in range(6)]
    with settled(loop_engine(max_batch_size=1, max_length=128)) as engine:
        for request in requests:
            engine.generate([request])
        assert engine.counters()["prefixes"]["evictions"] > 0
        assert engine.stats.loops == len(requests)


def test_loop_engine_generate_raises_keyboard_interrupt(shared_engine, medium_answer, monkeypatch):
    """Ctrl-C during a loop cancels the requests, and the engine still works."""
    count = itertools.count()

    def interrupt(*_):
        if next(count) == 20:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(shared_engine._replays, "on_row", interrupt)
    with pytest.raises(KeyboardInterrupt):
        shared_engine.generate([MEDIUM, replace(MEDIUM, seed=2)])
    assert not shared_engine.busy
    assert answer(shared_engine.generate([MEDIUM])[0]) == medium_answer


def test_close_ends_running_loop(long_ring):
    engine = loop_engine()
    start_loop(engine, LONG)
    last = published(engine)
    stamps = engine._resources.outputs.stamp.array
    engine.close()
    assert stamps.max() < last + 200  # of about 1000


def test_loop_engine_cancel_from_thread(shared_engine, medium_answer, monkeypatch):
    """A request can be cancelled by another thread while a call reads the results of a loop."""
    engine = shared_engine
    ids = [engine.submit(replace(MEDIUM, seed=2)), engine.submit(MEDIUM)]
    count = itertools.count()

    def cancel(*_):
        if next(count) == 20:
            thread = threading.Thread(target=engine.cancel, args=[ids[0]])
            thread.start()
            thread.join()

    monkeypatch.setattr(engine._replays, "on_row", cancel)
    found = drain(engine)
    assert found[ids[0]].reason == "cancelled"
    assert answer(found[ids[1]]) == medium_answer


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"drafter": lambda context: UserDrafter(context, propose=propose_repeat)},
            "drafter that runs on the device.*propose_repeat",
        ),
        ({"composition": "two"}, "composition='one'"),
        ({"generation": "loop"}, "generation must be one of rounds, graph, got"),
    ],
)
def test_loop_engine_rejects_options(options, message):
    with pytest.raises(OptionError, match=message):
        loop_engine(**options)
