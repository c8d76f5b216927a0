"""Tests of late slots and of the guided decoder's worker threads.

A slot is late if the work for its request exceeds the processor-time budget of a step. A worker
thread then continues the work while the graph proceeds.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref

import guide_util
import pytest
from guide_util import SPECS, PythonMatcher, Rig, joined
from reference_round import ERROR, READY
from round_simulator import exchange_for, run_work, write_committed

from graft.grammar import GuidedDecoder, GuidedRequest
from graft.grammar.decoder import default_threads
from graft.sampling.mode import DraftMode


def test_late_mask_row_truncates_round(backend):
    """A late slot keeps the mask rows that were filled in time, and a later commit is not lost.

    Rows that the worker thread fills for the state before this commit are never stamped as READY.
    """
    rig, requests = joined(backend, k=3, slots=2, held=True)
    rig.verify(1, *b"a", slot=(0, 1))
    rig.drafted(1, *b"bcc", slot=(0, 1))
    rig.decoder.publish(2, requests)
    rig.close_gate(4)  # the fourth call fills row 2, after accept, fill and accept
    rig.run(rig.open)
    assert rig.rows(0) == [(READY, 1, 11), (READY, 1, 12)]
    assert rig.rows(1) == [(READY, 2, 11), (READY, 2, 12), (READY, 2, 13), (READY, 2, 14)]
    assert rig.gate[1] == 1  # the matcher of slot 0 is blocked
    for slot, text in ((0, b"bc"), (1, b"bccc")):  # up to the last row that was ready
        rig.committed(2, *text, slot=slot)
    rig.run(rig.commit)
    assert rig.rows(0) == []
    assert rig.rows(1) == [(READY, 2, 15)]
    rig.start(3, requests)
    assert rig.rows(0) == []
    assert rig.decoder.counters()["committed_tokens"] == 1 + len(b"abccc")
    rig.committed(3)  # slot 0 takes no part in replay 3, so the device writes an empty commit
    rig.open_gate()
    assert rig.rows(0) == []  # nothing is stamped between steps
    rig.run(rig.commit)
    rig.decoder.retire(1)
    rig.start(4, requests)
    assert rig.rows(0) == [(READY, 1, 13)]
    rig.expect_row(b"abc")
    counters = rig.decoder.counters()
    assert counters["late_rows"] == 1 and counters["budget_stalls"] == 1
    assert counters["desyncs"] == counters["errors"] == 0


def test_late_slot_that_fails_reports_error_at_committed_position(backend):
    """The device has used the first rows of a step before the matcher fails at a later row.

    The error must have the position after the tokens that the device has committed, because the
    device ignores rows of other positions.
    """
    rig, requests = joined(backend, k=3, slots=2, held=True)
    rig.verify(1, *b"a", slot=(0, 1))
    rig.drafted(1, *b"bcc", slot=(0, 1))
    rig.decoder.publish(2, requests)
    rig.close_gate(4)  # the fourth call fills row 2
    rig.run(rig.open)

    def fail(row):
        raise RuntimeError("out of order")

    requests[0].matcher.inner.fill = fail
    rig.committed(2, *b"bc", slot=0)
    rig.open_gate()
    rig.run(rig.commit)
    assert rig.rows(0)[0] == (ERROR, 1, 13)
    assert "out of order" in rig.decoder.error(0)


def test_late_slot_accepts_new_request_only_when_idle(backend):
    """A new request in a late slot receives no mask rows or commits of the previous request.

    The matcher of the previous request stays alive while a worker thread uses the matcher.
    """
    rig = Rig(backend, k=3, slots=2, held=True)
    old = rig.request()
    rig.decoder.publish(1, [old])
    rig.close_gate(1)
    rig.run(rig.open)
    assert rig.rows(0) == []
    alive = weakref.ref(old.matcher)
    del old
    new = rig.request(epoch=2, position=30, gated=False)
    rig.decoder.publish(2, [new])
    rig.decoder.retire(1)
    rig.run(rig.open)
    rig.run(rig.commit)
    gc.collect()
    assert rig.rows(0) == [] and alive() is not None
    rig.open_gate()
    rig.decoder.publish(3, [new])
    rig.decoder.retire(2)
    rig.run(rig.open)
    gc.collect()
    assert rig.rows(0) == [(READY, 2, 30)] and alive() is None
    rig.expect_row(b"")


def test_late_slot_advances_one_token_per_round(backend):
    rig = Rig(backend, k=3, slots=2, held=True)
    requests = [rig.request(), rig.request(slot=1, epoch=2)]
    text = b"abccc"
    rounds = 0
    done = [0, 0]
    while done[0] < len(text):
        rounds += 1
        rig.decoder.publish(rounds, requests)
        rig.close_gate(1)
        rig.run(rig.open)
        ready = (READY, 1, 10 + done[0]) in rig.rows(0)
        for slot in (0, 1):
            rig.committed(rounds, *text[done[slot] :][:ready], slot=slot)
            done[slot] += ready
        rig.close_gate(1)
        rig.run(rig.commit)
        rig.open_gate()
        rig.decoder.retire(rounds)
        assert rounds <= 2 * len(text)
    assert rounds == len(text) + 1
    assert rig.decoder.counters()["late_rows"] == len(text) + 1


def play_by_processor_time(
    backend, slots: int, budget_us: float, steps: int = 40
) -> tuple[dict[str, int], bool]:
    """Run rounds with one grammar; return the counters and whether the grammar is trusted.

    A grammar is trusted if its matchers have often met the budget and were never late. The thread
    that runs a step then runs the matchers of the grammar itself, instead of passing them to worker
    threads.
    """
    size = backend.vocabulary.size
    exchange = exchange_for(slots, size, DraftMode.chain(0))
    decoder = GuidedDecoder(exchange, threads=1, budget_us=budget_us)
    compiled = backend.compile(SPECS["regex"])
    requests = [GuidedRequest(s, 1, compiled.matcher(), 0) for s in range(slots)]
    work = decoder.open_work()
    done = [0] * slots
    for replay in range(1, steps + 1):
        decoder.publish(replay, requests)
        run_work(work)
        for slot in range(slots):
            ready = bool(exchange.stamps["state"][slot, 0] == READY)
            text = b"ab".ljust(steps, b"c")[done[slot] :][:ready]
            done[slot] += len(text)
            write_committed(exchange, slot, replay, text)
        decoder.retire(replay)
    counters = decoder.counters()
    decoder.close()
    return counters, compiled.timing.trusted


@pytest.mark.parametrize("slots, budget_us, late", [(2, 1e9, 0), (2, 1.0, None), (1, 1.0, 0)])
def test_guide_trusts_fast_grammars(backend, slots, budget_us, late):
    """A grammar is trusted after 32 steps within the time budget. Once late, it is never trusted.

    The thread that runs a step runs the matchers of trusted grammars itself. A request that is the
    only request in its replay has a longer budget.
    """
    counters, trusted = play_by_processor_time(backend, slots, budget_us)
    assert trusted == (budget_us > 1)
    assert late is None or counters["late_rows"] == counters["budget_stalls"] == late
    assert slots > 1 or counters["fills"] == 40


class RunawayMatcher(PythonMatcher):
    """A matcher whose `accept` takes processor time and memory that is not freed.

    Parameters
    ----------
    inner
        The wrapped matcher.
    seconds, nbytes
        Processor time and memory of each call of `accept`. The call then waits for `seen`.
    """

    def __init__(self, inner, seconds, nbytes):
        super().__init__(inner)
        self.seconds = seconds
        self.nbytes = nbytes
        self.kept = []
        self.is_running = False  # whether `accept` is running
        self.seen = threading.Event()  # set after a step has returned while `accept` is running

    def accept(self, token):
        self.seen.clear()
        self.is_running = True
        start = time.thread_time()
        self.kept.append(b"x" * self.nbytes)
        while time.thread_time() - start < self.seconds:
            pass
        self.seen.wait(60)
        self.is_running = False
        return super().accept(token)


TOO_SLOW = "the grammar is too slow: its matcher took more than 400 times the budget"
TOO_LARGE = "the grammar needs too much memory: its state has grown by more than 256"


@pytest.mark.parametrize(
    "slots, seconds, nbytes, message",
    [
        pytest.param(1, 0.6, 0, TOO_SLOW, marks=pytest.mark.full),
        (2, 0.6, 0, TOO_SLOW),
        pytest.param(1, 0.1, 100 << 20, TOO_LARGE, marks=pytest.mark.full),
        (2, 0.05, 200 << 20, TOO_LARGE),
    ],
)
def test_guide_fails_runaway_matcher(xgrammar, slots, seconds, nbytes, message):
    """The request fails with an error. Steps do not wait for it, and its neighbor is unaffected."""
    compiled = xgrammar.compile(SPECS["regex"])
    exchange = exchange_for(slots, xgrammar.vocabulary.size, DraftMode.chain(0))
    decoder = GuidedDecoder(exchange, threads=2, budget_us=2500)
    matchers = [compiled.matcher() for _ in range(slots)]
    runaway = RunawayMatcher(matchers[0], seconds, nbytes)
    matchers[0] = runaway
    requests = [GuidedRequest(slot, 1, matcher, 0) for slot, matcher in enumerate(matchers)]
    work = decoder.open_work()
    text = b"ab".ljust(100_000, b"c")  # longer than the number of replays
    done = [0] * slots
    replay = 0
    deadline = time.monotonic() + 120
    returned_early = 0  # number of steps that have returned while the matcher was running
    while exchange.stamps["state"][0, 0] != ERROR:
        assert time.monotonic() < deadline
        replay += 1
        decoder.publish(replay, requests)
        run_work(work)
        if runaway.is_running:
            returned_early += 1
            runaway.seen.set()
        for slot in range(slots):
            ready = exchange.stamps["state"][slot, 0] == READY
            token = text[done[slot] : done[slot] + 1] if ready else b""
            done[slot] += len(token)
            write_committed(exchange, slot, replay, token)
        decoder.retire(replay)
        time.sleep(0.01)
    assert message in decoder.error(0)
    assert returned_early >= 2
    if slots == 2:
        assert decoder.error(1) == "" and exchange.stamps["state"][1, 0] == READY
        assert done[1] > 0.8 * replay
    decoder.close()


def test_late_probe_is_not_answered(backend):
    """If a probe is late, the device receives no answer and drafts nothing.

    The worker thread rolls back the tokens that it has accepted during the probe.
    """
    rig, requests = joined(backend, mode=DraftMode.chain(3, "probe", 4), slots=2, held=True)
    rig.verify(1, *b"a", slot=(0, 1))
    rig.exchange.candidates[:, :5] = (1, 1, 2, ord("!"), ord("b"))
    rig.close_gate(2)  # the second call belongs to the test of the second candidate
    rig.run(rig.drafts[0])
    assert rig.exchange.answer.tolist() == [(0, -1, -1), (1, 1, ord("b"))]
    rig.open_gate()
    rig.run(rig.drafts[1])
    assert rig.exchange.answer[0].tolist() == (0, -1, -1)
    rig.drafted(1, *b"b", slot=1)
    rig.start(2, requests)
    assert rig.rows(0) == [(READY, 1, 11)]
    assert rig.rows(1) == [(READY, 2, 11), (READY, 2, 12)]
    for slot in (0, 1):
        rig.expect_row(b"a", slot=slot)
    rig.expect_row(b"ab", slot=1, j=1)
    assert rig.decoder.counters()["desyncs"] == 0


def test_guide_close_waits_for_late_slots(backend):
    rig = Rig(backend, k=3, slots=2, held=True)
    rig.decoder.publish(1, [rig.request()])
    rig.close_gate(1)
    rig.run(rig.open)
    rig.decoder.retire(1)
    closer = threading.Thread(target=rig.decoder.close)
    closer.start()
    closer.join(0.02)
    assert closer.is_alive()
    rig.gate[0] = 0
    closer.join(60)
    assert not closer.is_alive()


FORKING = """
import gc, os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from round_simulator import exchange_for, run_work
from graft.grammar import GuidedDecoder
from graft.sampling.mode import DraftMode
decoder = GuidedDecoder(exchange_for(4, 270, DraftMode.chain(1)), threads=3)
work = decoder.open_work()
run_work(work)
child = os.fork()
del work, decoder
gc.collect()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_guide_can_be_destroyed_after_fork():
    """The destructor must not wait for worker threads, which do not exist in a forked process."""
    guide_util.output_of(FORKING, os.pathsep.join(sys.path))


def test_guide_default_threads():
    table = {
        (64, 1): 1,
        (64, 2): 1,
        (64, 3): 1,
        (8, 64): 1,
        (15, 8): 1,
        (16, 8): 2,
        (64, 64): 8,
        (64, 4): 2,
    }
    assert {key: default_threads(*key) for key in table} == table
