"""Guided decoding where other engines went wrong: lengths, stop ids, order, markers, snapshots."""

from __future__ import annotations

import numpy as np
import pytest
from guide_util import KINDS, SPECS, Rig, joined, run_work
from reference_round import NOT_READY, READY

from graft.grammar import GrammarError, GuidedRequest
from graft.grammar.statement import GrammarSpec

both = pytest.mark.parametrize("kind", KINDS)


@both
def test_draft_lengths_may_change_every_round(backend, kind):
    """From three drafts to none and back: what a longer round advanced is always undone."""
    rig, [request] = joined(backend, kind, k=3)
    history: list[int] = []
    for replay, length in enumerate([3, 0, 2, 0, 0, 3, 1, 3, 0], start=1):
        rig.committed(replay, ord("c"))  # every draft was refused
        history.append(ord("c"))
        rig.run(rig.commit)
        rig.expect_row(history)
        for j, work in enumerate(rig.drafts, start=1):
            rig.drafted(replay, *b"abc"[: min(j, length)])
            run_work(work)
            if j <= length:
                rig.expect_row([*history, *b"abc"[:j]], j=j)
        rig.drafted(replay, *b"abc"[:length])
        rig.decoder.retire(replay)
        rig.start(replay + 1, [request])
        ready = [row[0] == READY for row in rig.states()]
        assert ready == [j <= length for j in range(4)]
    assert rig.decoder.counters()["desyncs"] == 0


@both
@pytest.mark.parametrize("stops", [(256, 256), (256, 257), (257, 256), (257, ord("c"))])
def test_a_stop_id_as_the_first_draft_and_whatever_follows_it(backend, kind, stops):
    """No row is ready after a drafted stop id; it can be refused, drafted again, and accepted."""
    rig, [request] = joined(backend, kind, k=2)
    for replay in (1, 2, 3):
        rig.verify(replay, ord("c"))
        rig.expect_row([ord("c")] * replay)
        rig.draft(replay, stops[0])
        rig.drafted(replay, *stops)
        rig.decoder.retire(replay)
        rig.start(replay + 1, [request])
        assert [row[0] for row in rig.states()][1:] == [NOT_READY, NOT_READY]
    rig.verify(4, stops[0])
    assert rig.decoder.counters()["committed_tokens"] == 4
    assert rig.decoder.counters()["terminations"] == 1
    assert rig.decoder.counters()["desyncs"] == rig.decoder.counters()["errors"] == 0


@both
def test_batch_order_is_not_slot_order(backend, kind):
    """Slots in any order, an unconstrained one among them, each with its own count of tokens; what
    the host does to its list after publishing changes no replay."""
    rig = Rig(backend, kind, k=2, slots=3)
    first, last = rig.request("regex", slot=2, epoch=1), rig.request("choice", slot=0, epoch=3)
    free = GuidedRequest(1, 2, None, 7)
    requests = [first, free, last]
    rig.decoder.publish(1, requests)
    requests.clear()
    rig.run(rig.open)
    rig.committed(1, *b"ab", slot=2)
    rig.committed(1, ord("Q"), slot=1)
    rig.verify(1, *b"aba", slot=0)
    rig.expect_row(list(b"ab"), slot=2)
    rig.expect_row(list(b"aba"), spec="choice", slot=0)
    rig.drafted(1, ord("c"), slot=2)
    rig.draft(1, ord("b"), slot=0)
    rig.expect_row(list(b"abc"), j=1, slot=2)
    rig.decoder.publish(2, [last, first])  # the unconstrained one has left, the others changed
    rig.run(rig.open)
    rig.committed(2, ord("c"), slot=2)
    rig.verify(2, ord("b"), slot=0)
    rig.expect_row(list(b"abc"), slot=2)
    rig.expect_row(list(b"abab"), spec="choice", slot=0)


@both
def test_a_marker_that_ends_inside_the_drafts(backend, kind):
    """Rows before the marker's end are free text, the row after it is the grammar's first."""
    rig = Rig(backend, kind, k=4)
    request = rig.request("text, then choice")
    rig.start(1, [request])
    rig.verify(1, ord("x"))
    drafts = [*b'a":', ord("a")]
    for j, work in enumerate(rig.drafts, start=1):
        rig.drafted(1, *drafts[:j])
        run_work(work)
        rig.expect_row([ord("x"), *drafts[:j]], j=j, spec="text, then choice")
    rig.drafted(1, *drafts)
    rig.start(2, [request])
    rig.expect_row([ord("x"), *drafts], j=4, spec="text, then choice")
    rig.committed(2, *b'a"')  # the marker's last byte was refused
    rig.run(rig.commit)
    rig.expect_row(list(b'xa"'), spec="text, then choice")


def test_rows_that_are_not_contiguous_are_refused(backend):
    """The libraries ignore strides: a row with gaps must not be written as if it had none."""
    matcher = backend.compile(SPECS["regex"]).matcher()
    words = backend.vocabulary.words
    memory = np.full(2 * words, 7, np.int32)
    with pytest.raises((TypeError, ValueError, GrammarError)):
        matcher.fill(memory[::2])
    assert (memory == 7).all()
    with pytest.raises((TypeError, ValueError, RuntimeError, GrammarError)):
        matcher.fill(memory[: words - 1])
    assert (memory == 7).all()


def test_ids_out_of_range_and_after_the_end_change_nothing(backend, capfd):
    """-1, the size, 2**31 and a token after the stop id are refused, silently, without a trace;
    every stop id ends a complete grammar, until it is rolled back."""
    matcher = backend.compile(GrammarSpec.regex("ab+")).matcher()
    for token in (-1, 270, 2**31, -(2**31) - 1, 2**40):
        assert not matcher.accept(token)
    assert matcher.accept(ord("a")) and not matcher.accept(256) and matcher.accept(ord("b"))
    for stop in (256, 257):
        assert {256, 257} <= set(matcher.legal().tolist())
        assert matcher.accept(stop) and matcher.is_terminated()
        assert not matcher.accept(256) and not matcher.accept(ord("b"))
        with pytest.raises(GrammarError, match="terminated"):
            matcher.legal()
        matcher.rollback(1)
        assert matcher.accept(ord("b")) and not matcher.is_terminated()
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""
