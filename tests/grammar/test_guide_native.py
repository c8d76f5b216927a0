"""Tests of the guided decoder and its native worker.

The subjects are execution without the GIL, errors that affect a single request, lifetimes of
objects, and argument checks of the decoder's methods.
"""

from __future__ import annotations

import ctypes
import gc
import time
import weakref

import numpy as np
import pytest
from guide_device import Device
from guide_util import MATCHER_KINDS, SPECS, Rig, byte_vocabulary, joined
from reference_round import ERROR, FREE, READY
from round_simulator import exchange_for, run_work

from graft.cudagraph.errors import OptionError
from graft.cudagraph.host.hostwork import NativeWork
from graft.grammar import GrammarBackend, GuidedDecoder, GuidedRequest, GuideError, XGrammarBackend
from graft.native import _native
from graft.sampling.mode import DraftMode

SIZE = 270


@pytest.fixture
def backend(xgrammar) -> GrammarBackend:
    return xgrammar


both = pytest.mark.parametrize("kind", MATCHER_KINDS)


def test_guide_step_does_not_need_gil(backend):
    """A native step on another thread completes while this thread holds the GIL."""
    rig = Rig(backend)
    assert isinstance(rig.open, NativeWork)
    rig.decoder.publish(1, [rig.request()])
    libc = ctypes.PyDLL(None)  # calls through PyDLL do not release the GIL
    thread = ctypes.c_void_p()
    step = ctypes.c_void_p(rig.open.address), ctypes.c_void_p(rig.open.data)
    assert libc.pthread_create(ctypes.byref(thread), None, *step) == 0
    deadline = (ctypes.c_long * 2)(int(time.time()) + 20, 0)
    assert libc.pthread_timedjoin_np(thread, None, ctypes.byref(deadline)) == 0
    assert rig.states()[0] == [READY, 1, 10, 0]


@both
def test_guide_marks_unconstrained_requests_as_free(backend, kind):
    """The first open step marks all mask rows of a request without a matcher as FREE.

    Later steps do no work for the request.
    """
    rig = Rig(backend, kind)
    request = GuidedRequest(0, 3, None, 5)
    for replay in (1, 2, 3):
        rig.start(replay, [request])
        rig.verify(replay, 1, 2)
        assert [row[:2] for row in rig.states()] == [[FREE, 3]] * 3
        rig.decoder.retire(replay)
    counters = rig.decoder.counters()
    assert counters["joins"] == 1 and counters["free_rows"] == 9
    assert counters["fills"] == counters["accepts"] == counters["commits"] == 0


@both
def test_guide_skips_unpublished_replays(backend, kind):
    """The steps of a replay that was not published write nothing and increment a counter."""
    rig, [request] = joined(backend, kind)
    before = rig.exchange.masks.copy(), rig.exchange.stamps.copy()
    rig.run(rig.open)  # replay 2 was never published
    rig.verify(2, ord("a"), ord("b"))
    rig.run(rig.drafts[0])
    np.testing.assert_array_equal(rig.exchange.masks, before[0])
    np.testing.assert_array_equal(rig.exchange.stamps, before[1])
    assert rig.decoder.counters()["missing_snapshots"] == 1
    # The commit of replay 2 is not lost. Replay 3 is the next replay with this slot and applies it.
    rig.decoder.publish(2, [])
    rig.start(3, [request])
    assert rig.states()[0] == [READY, 1, 12, 0]
    rig.expect_row(b"ab")


@both
def test_guide_fails_request_with_inconsistent_commit(backend, kind):
    """A request fails if its commit record is invalid, and a commit is never applied twice.

    A commit record is invalid if it belongs to a future replay, has too many tokens or drafts, or
    has tokens after a stop id.
    """
    rig, requests = joined(backend, kind, slots=2)
    rig.committed(2, ord("c"), slot=0)  # a future replay
    rig.verify(1, ord("c"), slot=1)
    assert rig.states(0)[0][0] == ERROR
    assert rig.states(1)[0] == [READY, 2, 11, 0]
    rig.start(2, requests)
    rig.run(rig.commit)  # slot 1 still contains the commit record of replay 1
    rig.expect_row(b"c", slot=1)
    counters = rig.decoder.counters()
    assert counters["committed_tokens"] == counters["desyncs"] == counters["errors"] == 1
    for name, behind in (("committed", b""), ("drafted", b""), ("the end", (256, ord("c")))):
        rig, [request] = joined(backend, kind)
        rig.committed(1, ord("c"), *behind)
        if name == "committed":
            rig.exchange.committed[0, 1] = 99
        rig.run(rig.commit)
        if name == "drafted":
            rig.exchange.drafted[0, 1] = 99
        rig.start(2, [request])
        assert rig.states()[0][0] == ERROR


def test_guide_internal_error_fails_one_slot(backend):
    exchange = exchange_for(2, 64, DraftMode.chain(1))
    # The worker fills mask rows for 64 columns, which XGrammar refuses.
    worker = _native.guide.Worker(
        exchange.host_ptr, exchange.layout.tobytes(), vocab_size=64, ring=4
    )
    matcher = backend.compile(SPECS["regex"]).matcher()
    assert worker.publish(1, [(0, 1, 5, matcher.native, -1), (1, 1, 5, None, -1)])
    step = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_native.guide.STEP)
    step(worker.record(0, 0))
    assert exchange.stamps[0, 0].tolist() == (ERROR, 1, 5, 0)
    assert exchange.stamps["state"][1, 0] == FREE
    assert worker.counters()["errors"] == 1 and worker.error(0)
    with pytest.raises(IndexError):
        worker.publish(2, [(2, 1, 5, matcher.native, -1)])
    with pytest.raises(ValueError, match="not one of an XGrammar matcher"):
        ids = np.zeros(9, np.int32).ctypes.data
        handle = matcher.compiled.native.__chandle__()
        _native.guide.XGrammarMatcher(handle, ids, ids, ids, 1, SIZE)


def test_guide_fills_rows_while_drafting_only_if_all_candidates_are_illegal(backend):
    """Draft steps fill no mask row if a candidate is legal."""
    rig = Rig(backend, mode=DraftMode.chain(2, "probe", 3))
    rig.start(1, [rig.request()])
    rig.verify(1, *b"ab")
    before = rig.decoder.counters()
    legal = ord("c")
    candidates = rig.exchange.candidates[0]
    for j, tokens, answer in ((1, [120, 121, legal], legal), (2, [120, 121, 122], -1)):
        rig.drafted(1, *[legal][: j - 1])
        candidates[:6] = (1, j, 3, *tokens)
        rig.run(rig.drafts[j - 1])
        assert rig.exchange.answer[0].tolist() == (1, j, answer)
    after = rig.decoder.counters()
    assert after["probes"] - before["probes"] == 6
    assert after["probe_misses"] - before["probe_misses"] == 1
    assert after["fills"] - before["fills"] == 1
    assert rig.rows() == [(READY, 1, 13)]


def test_guide_timeline_and_counters(backend):
    """The timeline contains the steps of the last 256 replays, sorted by time.

    The time counters equal the sums of the durations of the steps.
    """
    rig = Rig(backend)
    start = time.monotonic_ns()
    for replay in range(1, 4):
        rig.decoder.publish(replay, [])
        rig.run(rig.open, rig.commit, *rig.drafts)
        rig.decoder.retire(replay)
    end = time.monotonic_ns()
    spans = rig.decoder.timeline()
    assert [(s.replay, s.step) for s in spans] == [
        (replay, step) for replay in (1, 2, 3) for step in ("open", "commit", "draft 1")
    ]
    times = [t for span in spans for t in (span.start_ns, span.end_ns)]
    assert times == sorted(times) and start <= times[0] and times[-1] <= end
    counters = rig.decoder.counters()
    for step in ("open", "commit", "draft"):
        assert counters[f"{step}_calls"] == 3
        assert counters[f"{step}_ns"] == sum(
            s.end_ns - s.start_ns for s in spans if s.step.startswith(step)
        )
    for _ in range(297):
        rig.run(rig.open, rig.commit, *rig.drafts)
    assert {span.replay for span in rig.decoder.timeline()} == set(range(45, 301))


@both
def test_guide_keeps_matchers_until_replay_retires(backend, kind):
    rig = Rig(backend, kind)
    request = rig.request()
    alive = weakref.ref(request.matcher)
    rig.decoder.publish(1, [request])
    rig.decoder.publish(2, [request])
    del request
    gc.collect()
    rig.run(rig.open)
    rig.run(rig.open)
    assert rig.states()[0][0] == READY
    rig.decoder.retire(1)
    rig.start(3, [GuidedRequest(0, 2, None, 0)])
    gc.collect()
    assert alive() is not None  # replay 2 still refers to it
    rig.decoder.retire(2)
    rig.decoder.retire(3)
    gc.collect()
    assert alive() is None


def test_guide_step_keeps_decoder_alive(backend):
    device = Device(backend, slots=1, draft_length=0, masked=False, seed=0, kinds=["native"])
    work = device.decoders[0].open_work()
    assert isinstance(work, NativeWork)
    decoder = weakref.ref(device.decoders[0])
    del device
    gc.collect()
    assert decoder() is not None
    run_work(work)  # does nothing, because no replay is published
    kept = work.keep
    assert isinstance(kept, GuidedDecoder)
    assert kept.counters()["missing_snapshots"] == 1
    del work, kept
    gc.collect()
    assert decoder() is None


def make(**changes) -> GuidedDecoder:
    exchange = exchange_for(2, SIZE, changes.pop("mode", DraftMode.chain(3)))
    return GuidedDecoder(exchange, **{"max_in_flight": 3, **changes})


@pytest.fixture
def decoder() -> GuidedDecoder:
    return make()


def matcher(backend):
    return backend.compile(SPECS["regex"]).matcher()


def test_guide_publish_requires_order_and_retired_replays(decoder):
    with pytest.raises(GuideError, match="replay 2 published after replay 0"):
        decoder.publish(2, [])
    for replay in (1, 2, 3):
        decoder.publish(replay, [])
    with pytest.raises(GuideError, match="replay 4 cannot be published before replay 1"):
        decoder.publish(4, [])
    decoder.retire(1)
    decoder.publish(4, [])
    with pytest.raises(GuideError, match="replay 1 is not in flight"):
        decoder.retire(1)


def test_guide_publish_rejects_invalid_requests(decoder, backend):
    """If one request of a replay is rejected, no request of the replay is published."""
    foreign = matcher(XGrammarBackend(byte_vocabulary(300)))
    shared = matcher(backend)
    for requests, message in (
        ([GuidedRequest(2, 1, None, 0)], "slot 2"),
        ([GuidedRequest(-1, 1, None, 0)], "slot -1"),
        ([GuidedRequest(0, 1, None, 0), GuidedRequest(0, 2, None, 0)], "listed twice"),
        ([GuidedRequest(0, 1, foreign, 0)], "300 columns"),
        ([GuidedRequest(0, 1, shared, 0), GuidedRequest(1, 2, shared, 0)], "already belongs"),
    ):
        with pytest.raises(GuideError, match=message):
            decoder.publish(1, requests)
    decoder.publish(
        1, [GuidedRequest(0, 1, shared, 0)]
    )  # the rejected replays did not claim the matcher
    for other in (GuidedRequest(0, 1, matcher(backend), 0), GuidedRequest(0, 1, shared, 5)):
        with pytest.raises(GuideError, match="epoch 1 belongs to another request"):
            decoder.publish(2, [other])
    with pytest.raises(GuideError, match="already belongs"):
        decoder.publish(2, [GuidedRequest(1, 2, shared, 0)])
    decoder.publish(2, [GuidedRequest(0, 1, shared, 0)])


def test_guide_close(decoder, backend):
    """close() raises while replays are in flight. After close(), steps do nothing."""
    work = decoder.open_work()
    decoder.publish(1, [GuidedRequest(0, 1, matcher(backend), 0)])
    with pytest.raises(GuideError, match=r"replays \[1\] have not been retired"):
        decoder.close()
    decoder.retire(1)
    decoder.close()
    run_work(work)
    assert decoder.counters()["missing_snapshots"] == 1
    with pytest.raises(GuideError, match="closed"):
        decoder.publish(2, [])
    with pytest.raises(GuideError, match="closed"):
        decoder.commit_work()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_in_flight": 1}, "max_in_flight is 1"),
        ({"transport": "python"}, "'python', must be one of native, mailbox, spinkernel"),
        ({"threads": 0}, "threads is 0"),
        ({"budget_us": 0.5}, "budget_us is 0.5"),
        ({"budget_us": float("nan")}, "budget_us is nan"),
    ],
)
def test_guide_rejects_invalid_options(changes, message):
    with pytest.raises(OptionError, match=message):
        make(**changes)


def test_guide_draft_work_range():
    """Draft steps have the numbers 1 to K - 1; the next open step fills the row after draft K."""
    decoder = make()
    for j in (0, 3, 4):
        with pytest.raises(OptionError, match=f"draft step {j}"):
            decoder.draft_work(j)
    with pytest.raises(OptionError, match="does not mask drafts"):
        make(mode=DraftMode.chain(3, "none")).draft_work(1)
