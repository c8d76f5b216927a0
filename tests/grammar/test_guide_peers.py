"""Guided decoding where other engines went wrong: lengths, stop ids, order, markers, snapshots."""

from __future__ import annotations

import numpy as np
import pytest
from guide_util import KINDS, SPECS, joined
from reference_round import NOT_READY

from graft.grammar import GrammarError
from graft.grammar.statement import GrammarSpec

both = pytest.mark.parametrize("kind", KINDS)


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
