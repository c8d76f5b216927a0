"""The native worker by itself: no GIL, nothing printed, failures that stay in their slot."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref

import numpy as np
import pytest
from guide_util import (
    DEAD_END,
    ERROR,
    FREE,
    KINDS,
    NOT_READY,
    READY,
    SPECS,
    ArrayExchange,
    Device,
    byte_vocabulary,
    oracle_row,
    run_work,
)

from graft.cudagraph.hostwork import NativeWork
from graft.grammar import GrammarSpec, GuidedDecoder, GuidedRequest, XGrammarBackend
from graft.native import _native

SIZE = 270


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(byte_vocabulary(SIZE))


class Rig:
    """A decoder of one slot with its exchange, driven by hand."""

    def __init__(self, backend, kind="native", *, k=2, slots=1, masked=True):
        self.backend, self.kind = backend, kind
        self.exchange = ArrayExchange(slots, k, SIZE)
        self.decoder = GuidedDecoder(
            self.exchange, slots=slots, draft_length=k, vocab_size=SIZE, masked_drafts=masked,
            ring=4,
        )  # fmt: skip
        self.open = self.decoder.open_work()
        self.commit = self.decoder.commit_work()
        self.drafts = [self.decoder.draft_work(j) for j in range(1, k)]

    def request(self, spec="regex", *, slot=0, epoch=1, position=10):
        matcher = self.backend.matcher(self.backend.compile(SPECS[spec]))
        return GuidedRequest(slot, epoch, KINDS[self.kind](matcher), position)

    def committed(self, replay, *tokens, slot=0):
        row = self.exchange.field("committed").array[slot]
        row[0], row[1] = replay, len(tokens)
        row[2 : 2 + len(tokens)] = tokens
        self.drafted(replay, slot=slot)

    def drafted(self, replay, *tokens, slot=0):
        row = self.exchange.field("drafted").array[slot]
        row[0], row[1] = replay, len(tokens)
        row[2 : 2 + len(tokens)] = tokens

    def expect_row(self, text, *, slot=0, j=0, spec="regex"):
        """Mask row j is that of a new matcher after the text."""
        compiled = self.backend.compile(SPECS[spec])
        row = oracle_row(lambda: self.backend.matcher(compiled), text)
        np.testing.assert_array_equal(self.exchange.field("mask").array[slot, j], row)

    def states(self, slot=0):
        """The slot's row states; a row that is not ready has no stamp to speak of."""
        rows = self.exchange.field("row_state").array[slot].tolist()
        return [row if row[0] != NOT_READY else [NOT_READY] for row in rows]


both = pytest.mark.parametrize("kind", KINDS)


def test_a_step_runs_while_another_thread_keeps_the_gil(backend):
    """A native step on a foreign thread ends although this thread holds the GIL meanwhile."""
    rig = Rig(backend)
    assert isinstance(rig.open, NativeWork)
    rig.decoder.publish(1, [rig.request()])
    libc = ctypes.PyDLL(None)  # PyDLL: calls keep the GIL
    thread = ctypes.c_void_p()
    assert (
        libc.pthread_create(
            ctypes.byref(thread), None, ctypes.c_void_p(rig.open.address),
            ctypes.c_void_p(rig.open.data),
        )
        == 0
    )  # fmt: skip
    deadline = (ctypes.c_long * 2)(int(time.time()) + 20, 0)
    assert libc.pthread_timedjoin_np(thread, None, ctypes.byref(deadline)) == 0
    assert rig.states()[0] == [READY, 1, 10, 0]


def test_nothing_is_ever_printed(backend, capfd):
    """Illegal, special, out-of-range and late tokens are refused without XGrammar's warnings."""
    rig = Rig(backend)
    request = rig.request()
    rig.decoder.publish(1, [request])
    run_work(rig.open)
    replay = 1
    for token in (-1, -(2**31), 2**31 - 1, SIZE, 266, ord("Z"), ord("!"), 256):
        rig.committed(replay, ord("c"))
        run_work(rig.commit)
        rig.drafted(replay, token, ord("c"))
        run_work(rig.drafts[0])
        rig.decoder.retire(replay)
        replay += 1
        rig.decoder.publish(replay, [request])
        run_work(rig.open)
        assert rig.states()[1][0] == NOT_READY, token
    rig.committed(replay, 256, ord("c"))  # a token after the end
    run_work(rig.commit)
    assert rig.states()[0][0] == ERROR
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""
    assert rig.decoder.counters()["refused_drafts"] == 7  # the stop id ends the chain, legally


@both
def test_rows_are_stamped_with_epoch_and_position(backend, kind):
    """Row j carries position n + j; n starts at the joining position and moves with commits."""
    rig = Rig(backend, kind)
    request = rig.request(epoch=7, position=41)
    rig.decoder.publish(1, [request])
    run_work(rig.open)
    assert rig.states() == [[READY, 7, 41, 0], [NOT_READY], [NOT_READY]]
    rig.committed(1, ord("a"), ord("b"))
    run_work(rig.commit)
    rig.drafted(1, ord("c"))
    run_work(rig.drafts[0])
    assert rig.states() == [[READY, 7, 43, 0], [READY, 7, 44, 0], [NOT_READY]]
    rig.drafted(1, ord("c"), ord("1"))
    rig.decoder.publish(2, [request])
    run_work(rig.open)
    assert rig.states()[2] == [READY, 7, 45, 0]


@both
def test_unconstrained_slots_are_free_once_and_cost_nothing(backend, kind):
    """A request without a matcher gets FREE rows when it joins; no fill, no accept follows."""
    rig = Rig(backend, kind)
    request = GuidedRequest(0, 3, None, 5)
    for replay in (1, 2, 3):
        rig.decoder.publish(replay, [request])
        run_work(rig.open)
        rig.committed(replay, 1, 2)
        run_work(rig.commit)
        assert [row[:2] for row in rig.states()] == [[FREE, 3]] * 3
        rig.decoder.retire(replay)
    counters = rig.decoder.counters()
    assert counters["joins"] == 1 and counters["free_rows"] == 9
    assert counters["fills"] == counters["accepts"] == counters["commits"] == 0


@both
def test_a_replay_without_a_snapshot_stands_down(backend, kind):
    """Steps of a replay nobody published write nothing and are counted."""
    rig = Rig(backend, kind)
    request = rig.request()
    rig.decoder.publish(1, [request])
    run_work(rig.open)
    before = {name: rig.exchange.field(name).array.copy() for name in ("mask", "row_state")}
    run_work(rig.open)  # replay 2 was never published
    rig.committed(2, ord("a"), ord("b"))
    run_work(rig.commit)
    run_work(rig.drafts[0])
    for name, array in before.items():
        np.testing.assert_array_equal(rig.exchange.field(name).array, array)
    assert rig.decoder.counters()["missing_snapshots"] == 1
    # What that replay committed is applied by the next one that names the slot.
    rig.decoder.publish(2, [])
    rig.decoder.publish(3, [request])
    run_work(rig.open)
    assert rig.states()[0] == [READY, 1, 12, 0]
    rig.expect_row(b"ab")


@both
def test_a_device_that_counts_replays_differently_is_noticed(backend, kind):
    """A commit stamped with a future replay fails the slot; an old one is never applied twice."""
    rig = Rig(backend, kind, slots=2)
    requests = [rig.request(), rig.request(slot=1, epoch=2)]
    rig.decoder.publish(1, requests)
    run_work(rig.open)
    rig.committed(2, ord("c"), slot=0)  # one ahead
    rig.committed(1, ord("c"), slot=1)
    run_work(rig.commit)
    assert rig.states(0)[0][0] == ERROR
    assert rig.states(1)[0] == [READY, 2, 11, 0]
    rig.decoder.publish(2, requests)
    run_work(rig.open)
    run_work(rig.commit)  # slot 1's stamp is still that of replay 1
    rig.expect_row(b"c", slot=1)
    counters = rig.decoder.counters()
    assert counters["committed_tokens"] == counters["desyncs"] == counters["errors"] == 1


@both
def test_a_count_out_of_range_fails_the_slot(backend, kind):
    """More committed tokens or drafts than a round can have are an error of that slot."""
    for name in ("committed", "drafted"):
        rig = Rig(backend, kind)
        request = rig.request()
        rig.decoder.publish(1, [request])
        run_work(rig.open)
        rig.committed(1, ord("c"))
        if name == "committed":
            rig.exchange.field("committed").array[0, 1] = 99
        run_work(rig.commit)
        if name == "drafted":
            rig.exchange.field("drafted").array[0, 1] = 99
        rig.decoder.publish(2, [request])
        run_work(rig.open)
        assert rig.states()[0][0] == ERROR


def test_an_internal_error_stays_in_its_slot(backend):
    """When XGrammar raises in one slot, that slot gets ROW_ERROR and the others go on."""
    exchange = ArrayExchange(2, 1, 64)
    fields = [exchange.field(n) for n in ("mask", "row_state", "committed", "drafted")]
    # The worker is told a mask of 64 columns; the backend's own check refuses it.
    worker = _native.guide.Worker(
        *((field.host_ptr, field.stride) for field in fields),
        slots=2, draft_length=1, vocab_size=64, ring=4,
    )  # fmt: skip
    matcher = backend.matcher(backend.compile(SPECS["regex"]))
    assert worker.publish(1, [(0, 1, 5, matcher.native), (1, 1, 5, None)])
    step = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_native.guide.STEP)
    step(worker.record(0, 0))
    states = exchange.field("row_state").array
    assert states[0, 0].tolist() == [ERROR, 1, 5, 0]
    assert states[1, 0, 0] == FREE
    assert worker.counters()["errors"] == 1 and worker.first_error()
    with pytest.raises(IndexError):
        worker.publish(2, [(2, 1, 5, matcher.native)])
    with pytest.raises(ValueError, match="not one of an XGrammar matcher"):
        _native.guide.XGrammarMatcher(
            matcher.compiled.native.__chandle__(), np.zeros(9, np.int32).ctypes.data, SIZE
        )


@both
def test_dead_ends_at_row_zero_and_inside_drafts(backend, kind):
    """A state without a legal id gives ROW_DEAD_END, in row 0 and in the row after a draft."""
    rig = Rig(backend, kind)
    request = rig.request("dead end")
    rig.decoder.publish(1, [request])
    run_work(rig.open)
    rig.committed(1, ord("a"))
    run_work(rig.commit)
    rig.drafted(1, ord("b"))  # only Z may follow, and no token spells it
    run_work(rig.drafts[0])
    assert [row[0] for row in rig.states()] == [READY, DEAD_END, NOT_READY]
    rig.decoder.publish(2, [request])
    run_work(rig.open)
    rig.committed(2, ord("b"))
    run_work(rig.commit)
    assert rig.states()[0] == [DEAD_END, 1, 12, 0]
    assert rig.decoder.counters()["dead_ends"] == 2


@both
def test_termination_inside_drafts_is_undone_until_committed(backend, kind):
    """A drafted stop id leaves later rows not ready; refusing it lets the matcher go on."""
    rig = Rig(backend, kind, k=3)
    request = rig.request("regex")
    rig.decoder.publish(1, [request])
    run_work(rig.open)
    rig.committed(1, ord("c"))
    run_work(rig.commit)
    rig.drafted(1, 256, 256)
    for work in rig.drafts:
        run_work(work)
    assert [row[0] for row in rig.states()] == [READY, NOT_READY, NOT_READY, NOT_READY]
    rig.decoder.publish(2, [request])
    run_work(rig.open)
    rig.committed(2, ord("c"))  # verification refused the stop id
    run_work(rig.commit)
    assert rig.states()[0] == [READY, 1, 12, 0]
    rig.drafted(2)
    rig.decoder.publish(3, [request])
    run_work(rig.open)
    rig.committed(3, ord("1"), 257)  # the other stop id
    run_work(rig.commit)
    counters = rig.decoder.counters()
    assert counters["terminations"] == 1 and counters["desyncs"] == 0
    assert counters["committed_tokens"] == 4


@both
def test_steps_are_timed_by_kind_and_replay(backend, kind):
    """The timeline holds each step's span in order on the monotonic clock; counters add them up."""
    rig = Rig(backend, kind)
    start = time.monotonic_ns()
    for replay in range(1, 4):
        rig.decoder.publish(replay, [])
        for work in (rig.open, rig.commit, *rig.drafts):
            run_work(work)
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


@both
def test_the_timeline_holds_the_last_replays(backend, kind):
    """Of 300 replays the spans of the last 256 are kept."""
    rig = Rig(backend, kind)
    for _ in range(300):
        for work in (rig.open, rig.commit, *rig.drafts):
            run_work(work)
    spans = rig.decoder.timeline()
    assert {span.replay for span in spans} == set(range(45, 301))
    assert len(spans) == 256 * 3


@both
def test_snapshots_keep_matchers_until_their_replay_retires(backend, kind):
    """A matcher dropped by its owner lives while a replay names it, and dies afterwards."""
    rig = Rig(backend, kind)
    request = rig.request()
    alive = weakref.ref(request.matcher)
    rig.decoder.publish(1, [request])
    rig.decoder.publish(2, [request])
    del request
    gc.collect()
    run_work(rig.open)
    run_work(rig.open)
    assert rig.states()[0][0] == READY
    rig.decoder.retire(1)
    rig.decoder.publish(3, [GuidedRequest(0, 2, None, 0)])
    run_work(rig.open)
    gc.collect()
    assert alive() is not None  # replay 2 still names it
    rig.decoder.retire(2)
    rig.decoder.retire(3)
    gc.collect()
    assert alive() is None


def test_works_keep_the_decoder_and_its_memory(backend):
    """A native step's record outlives the decoder's other references."""
    device = Device(backend, slots=1, draft_length=0, masked=False, seed=0, kinds=["native"])
    work = device.decoders[0].open_work()
    assert isinstance(work, NativeWork)
    decoder = weakref.ref(device.decoders[0])
    del device
    gc.collect()
    assert decoder() is not None
    run_work(work)  # no snapshot: stands down
    kept = work.keep
    assert isinstance(kept, GuidedDecoder)
    assert kept.counters()["missing_snapshots"] == 1
    del work, kept
    gc.collect()
    assert decoder() is None


def test_large_grammars_run_equal_with_matchers_in_python(backend):
    """A schema with strings, numbers and arrays gives equal rows, counters and endings."""
    spec = GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {
                "abc": {"type": "string", "maxLength": 4},
                "n": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
            },
            "required": ["abc", "n"],
        }
    )
    device = Device(backend, slots=2, draft_length=4, masked=True, seed=3)
    grammar = backend.compile(spec)
    device.publish()
    while len(device.ended) < 15:
        for slot in (0, 1):
            if device.is_idle(slot):
                device.join(slot, grammar, limit=60)
        device.publish()
        device.run()
        device.clear_ended()
    assert {truth.reason for truth in device.ended} <= {1, 2}
