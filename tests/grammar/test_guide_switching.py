"""Replays of a request differ in how mask rows are made: filled, probed or checked."""

from dataclasses import replace

import pytest
from guide_util import Rig
from reference_round import CHECKED, NOT_READY, READY, UNCHECKED
from test_guide_checks import PROPOSED, optimistic, write_sampled

from graft.cudagraph.errors import OptionError
from graft.sampling.mode import DraftMode

POSITION = 10
PROBED = DraftMode.chain(2, "probe", 4)
FILLED = DraftMode.chain(2)


def filled(requests):
    return [replace(request, optimistic=False) for request in requests]


def next_replay(rig, number, requests, *, is_optimistic, fills_drafts=False):
    """Retire a replay, publish the next one and run its open step."""
    rig.decoder.retire(number - 1)
    requests = requests if is_optimistic else filled(requests)
    rig.decoder.publish(number, requests, fills_drafts=fills_drafts)
    rig.run(rig.open)


def test_filled_replay_fills_rows_that_were_not_checked(backend):
    """Nothing was committed, so the matcher's state is the same as before."""
    rig = Rig(backend, mode=PROPOSED)
    requests = [optimistic(rig)]
    rig.start(1, requests)
    assert rig.rows() == [(UNCHECKED, 1, POSITION)]
    rig.verify(1)
    next_replay(rig, 2, requests, is_optimistic=False)
    assert rig.rows() == [(READY, 1, POSITION)]
    rig.expect_row([])


def test_filled_replay_withdraws_check(backend):
    rig = Rig(backend, mode=PROPOSED)
    requests = [optimistic(rig)]
    rig.start(1, requests)
    write_sampled(rig, 1, [ord("a")])
    rig.run(rig.decoder.check_work())
    assert rig.rows() == [(CHECKED, 1, POSITION)]
    rig.verify(1)
    next_replay(rig, 2, requests, is_optimistic=False)
    assert rig.rows() == [(READY, 1, POSITION)]
    rig.expect_row([])


def test_optimistic_replay_keeps_filled_rows(backend):
    """Row 0 was filled by the commit step of a filled replay, and row 1 is missing."""
    rig = Rig(backend, mode=PROBED)
    requests = [optimistic(rig)]
    rig.decoder.publish(1, filled(requests), fills_drafts=True)
    rig.run(rig.open)
    rig.verify(1, ord("a"), ord("b"))
    rig.drafted(1, ord("c"))
    next_replay(rig, 2, requests, is_optimistic=True)
    assert rig.rows() == [(READY, 1, POSITION + 2), (UNCHECKED, 1, POSITION + 3)]
    rig.expect_row(b"ab")


@pytest.mark.parametrize("still_busy", [True, False])
def test_filled_replay_has_no_unchecked_row_of_late_slot(backend, still_busy):
    """A late slot is left out of the replay: without a check, its token would remain unmasked."""
    rig = Rig(backend, slots=2, mode=PROPOSED, held=True)
    requests = [optimistic(rig, slot=slot, epoch=slot + 1) for slot in range(2)]
    rig.start(1, requests)
    for slot in range(2):
        write_sampled(rig, 1, [ord("a")], slot)
    rig.close_gate(1)
    rig.run(rig.decoder.check_work())
    assert rig.rows(0) == [(UNCHECKED, 1, POSITION)]
    rig.committed(1, slot=0)
    rig.committed(1, ord("a"), slot=1)
    rig.run(rig.commit)
    if not still_busy:
        rig.open_gate()
    next_replay(rig, 2, requests, is_optimistic=False)
    if still_busy:
        assert rig.states(0)[0] == [NOT_READY]
        rig.open_gate()
        rig.committed(2, slot=0)
        rig.committed(2, slot=1)
        rig.run(rig.commit)
        next_replay(rig, 3, requests, is_optimistic=False)
    assert rig.rows(0) == [(READY, 1, POSITION)]
    rig.expect_row([])
    assert rig.decoder.counters()["desyncs"] == 0


def write_candidates(rig, replay, draft, *tokens):
    record = rig.exchange.candidates[0]
    record[:3] = replay, draft, len(tokens)
    record[3 : 3 + len(tokens)] = tokens


def test_draft_steps_follow_mode_of_their_replay(backend):
    """Draft steps probe or fill. The commit step fills row 0 only if they fill."""
    rig = Rig(backend, mode=PROBED)
    requests = filled([optimistic(rig)])
    rig.decoder.publish(1, requests)
    rig.run(rig.open)
    rig.verify(1, ord("a"))
    assert rig.rows() == []
    write_candidates(rig, 1, 1, ord("a"), ord("b"))
    rig.run(rig.drafts[0])
    assert rig.exchange.answer[0].tolist() == (1, 1, ord("b"))
    rig.drafted(1, ord("b"))
    next_replay(rig, 2, requests, is_optimistic=False, fills_drafts=True)
    assert [row[0] for row in rig.rows()] == [READY, READY]
    rig.verify(2, ord("b"))
    assert rig.rows() == [(READY, 1, POSITION + 2)]
    rig.expect_row(b"ab")
    rig.drafted(2, ord("c"))
    rig.run(rig.decoder.draft_work(1, FILLED))
    assert rig.rows()[1] == (READY, 1, POSITION + 3)
    rig.expect_row(b"abc", j=1)
    assert rig.exchange.answer[0]["replay"] == 1
    # The candidates of replay 1 are not those of replay 3.
    next_replay(rig, 3, requests, is_optimistic=False)
    rig.verify(3, ord("c"))
    rig.drafted(3)
    rig.run(rig.drafts[0])
    assert rig.exchange.answer[0]["replay"] == 1
    assert rig.decoder.counters()["desyncs"] == 0


def test_draft_work_checks_number_by_mode_of_graph(backend):
    rig = Rig(backend, mode=PROBED)
    rig.decoder.draft_work(2)
    with pytest.raises(OptionError, match=r"draft step 2 is outside \[1, 2\)"):
        rig.decoder.draft_work(2, FILLED)


def test_exchange_refuses_mode_whose_records_do_not_fit(backend):
    rig = Rig(backend, mode=FILLED)
    with pytest.raises(OptionError, match=r"record candidate_ids of .* does not fit"):
        rig.exchange.of(PROBED)
