"""Requests that go from one engine to another, and the ways for what they take along."""

import multiprocessing
import signal
from collections import defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from engine_util import DEMO, demo_engine, drain
from test_engine_equality import MODES, answer, settled, workload

from graft.cudagraph.errors import OptionError
from graft.models import Request, RequestError
from graft.models.drafters import NGram
from graft.models.engine import migrate as handing
from graft.models.engine.migrate import MigratedRequest
from graft.models.errors import MigrationError
from graft.models.transfer import Mooncake, SharedMemory

FREE = Request(tokens=[300, 301, 302] * 7, min_tokens=20, max_tokens=30, id="free")
ASKED = [r for i in range(3) for r in workload()[i::5]]


def moved(first, second, requests):
    """Outputs of requests that `second` goes on with: of some before they have a slot, of others
    behind their first tokens, or later. Their events must say the same."""
    way = SharedMemory()
    ended = {}
    tokens = defaultdict(list)
    texts = defaultdict(str)
    after = {first.submit(request): (0, 1, 9)[i % 3] for i, request in enumerate(requests)}
    pages = 0
    while first.busy or second.busy:
        for name in [name for name, least in after.items() if len(tokens[name]) >= least]:
            ticket = way.send(first.migrate_out(name))
            over = way.receive(tuple(ticket))
            way.free(ticket)
            assert second.migrate_in(over) == name
            pages += over.cached
            del after[name]
        for engine in (first, second):
            for event in engine.step() if engine.busy else ():
                tokens[event.id] += event.tokens
                texts[event.id] += event.text
                if event.output is not None and event.output.reason != "moved":
                    ended[event.id] = event.output
                    after.pop(event.id, None)
    assert all((tokens[n], texts[n]) == (o.tokens, o.text) for n, o in ended.items())
    return [ended[request.id] for request in requests], pages


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_length": 6, "draft_tree": (2, 3)},
        pytest.param(
            {"drafter": DEMO / "dflash", "draft_masking": "probe"}, marks=pytest.mark.full
        ),
        pytest.param({"drafter": NGram}, marks=pytest.mark.full),
        pytest.param({"speculation": False}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_outputs_are_those_of_one_engine(options):
    """Guided and free, greedy and coupled, with penalties, stop strings and log probabilities:
    handed over at any time, a request's output is what it was, and its pages need no forward."""
    asked = [
        replace(request, id=f"{request.id} {mode}", **how)
        for mode, how in MODES.items()
        for request in ASKED
    ]
    engines = [demo_engine(max_batch_size=4, page_size=4, **options) for _ in range(2)]
    with settled(engines[0]) as first, settled(engines[1]) as second:
        outputs, pages = moved(first, second, asked)
        one = first.generate(asked)
    assert [answer(o) for o in outputs] == [answer(o) for o in one]
    assert pages > 20 and sum(o.cached_tokens for o in outputs) >= 4 * pages


@pytest.fixture(scope="module")
def pair():
    """Two engines without a drafter, alike but for the grammars' backend that is named."""
    with demo_engine(speculation=False) as first, demo_engine(speculation=False) as second:
        yield first, second


def over_of(engine, request=FREE):
    """A hand-over behind the first tokens, and these."""
    engine.submit(request)
    while not (events := engine.step()):
        pass
    return engine.migrate_out(request.id), list(events[0].tokens)


def test_what_is_moved_has_ended_here_and_keeps_its_time(pair):
    """The sender's output ends with what was told of it; counts and the time since it was
    submitted go along, and a deadline that has passed meanwhile ends it."""
    first, second = pair
    over, tokens = over_of(first, replace(FREE, timeout_s=1000.0))
    output = drain(first)["free"]
    assert (output.reason, output.tokens) == ("moved", tokens) and over.cached == 1
    second.migrate_in(MigratedRequest({**over.about, "age_s": 990.0}, over.pages))
    done = drain(second)["free"]
    assert done.finished or done.reason == "length"
    assert done.total_s > 990 and done.tokens[: len(tokens)] == tokens
    assert done.rounds > output.rounds > 0 and done.first_token_s == output.first_token_s
    second.migrate_in(MigratedRequest({**over.about, "age_s": 1001.0}, over.pages))
    assert drain(second)["free"].reason == "timeout"


def test_what_cannot_go_on_is_refused_before_anything_is_touched(pair):
    """By name: who is not there or there already, engines that differ, caches that keep nothing,
    and an output that has ended."""
    first, second = pair
    with pytest.raises(RequestError, match="'nobody'"):
        first.migrate_out("nobody")
    over, _ = over_of(first)
    second.submit(FREE)
    with pytest.raises(RequestError, match="'free' is running"):
        second.migrate_in(over)
    ended = {**over.about["request"], "max_tokens": 1, "min_tokens": 0, "id": "late"}
    second.migrate_in(MigratedRequest({**over.about, "request": ended}, over.pages))
    assert "'late' was handed over when its output had ended" in drain(second)["late"].error
    for told, options in {
        "page_size 16, this one 8": {"speculation": False, "page_size": 8},
        "drafter NoneType, this one [0-9a-f]{32}": {},
        "grammar_backend auto": {"speculation": False, "grammar_backend": "xgrammar"},
        "keeps 0 at most .prefix_cache": {"speculation": False, "prefix_cache_bytes": 0},
    }.items():
        with demo_engine(**options) as other:
            with pytest.raises(MigrationError, match=told):
                other.migrate_in(over)
            assert not other.busy and other.counters()["prefixes"]["pages"] == 0
            if "keeps 0" in told:
                bare, _ = over_of(other)
                assert bare.cached == 0 and first.migrate_in(bare) == "free"
                assert drain(first)["free"].reason in ("stop", "length")


def some():
    """A hand-over of pages that nobody wrote."""
    about = {"request": {"tokens": [1, 2, 3]}, "output": {"tokens": [4]}}
    return MigratedRequest(about, tuple(np.full((2, 1, 1, n), -n, np.int32) for n in (3, 8)))


def same(one, other):
    return one.about == other.about and all(map(np.array_equal, one.pages, other.pages))


def offer(way, tickets):
    """A sender in a process of its own, which goes on until it is killed."""
    way = way()
    tickets.put(way.send(some()))
    signal.pause()


@pytest.mark.parametrize("make", [SharedMemory, partial(Mooncake, "127.0.0.1")])
def test_a_sender_may_die_and_a_receiver_too(make):
    """What was sent comes from another process as it was, again and again; once its sender is gone
    or has freed it that is said; and nobody else has anything to free."""
    try:
        way = make()
    except OptionError as error:
        assert "pip install 'graft-cuda[transfer]'" in str(error)
        pytest.skip(str(error))
    context = multiprocessing.get_context("spawn")
    tickets = context.SimpleQueue()
    sender = context.Process(target=offer, args=(make, tickets))
    sender.start()
    ticket = tickets.get()
    assert all(same(way.receive(ticket), some()) for _ in range(2))
    sender.kill()
    sender.join()
    with pytest.raises(MigrationError, match="Ticket"):
        way.receive(ticket)
    own = way.send(some())
    way.free(own)
    way.free(own)
    with pytest.raises(MigrationError, match="Ticket"):
        way.receive(own)


class Meddler(SharedMemory):
    """A way on which bytes change."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def fetch(self, ticket):
        return self.change(super().fetch(ticket).copy())


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d[:-8],
        lambda d: d[:0],
        lambda d: np.concatenate([d, d]),
        lambda d: np.where(np.arange(len(d)) == len(d) - 12, d ^ 1, d),
        lambda d: d * 0,
    ],
)
def test_what_was_damaged_on_its_way_is_refused(change):
    """Cut short, emptied, too long, one bit of a page changed, or nothing but zeros."""
    way = Meddler(change)
    with pytest.raises(MigrationError, match="not those that were sent"):
        way.receive(way.send(some()))
    way.close()
    assert not way.sent


def test_another_format_is_refused(monkeypatch):
    """Whoever wrote it: a graft of another format, or nobody that graft knows."""
    whole = np.frombuffer(b"".join(some().parts()), np.uint8)
    assert same(MigratedRequest.read(whole), some())
    monkeypatch.setattr(handing, "FORMAT", 2)
    for data in (whole, whole[:0], np.zeros(99, np.uint8)):
        with pytest.raises(MigrationError, match="no hand-over of format 2"):
            MigratedRequest.read(data)
