"""Slots: the fields that joining and leaving write."""

from __future__ import annotations

import numpy as np

from graft.sampling.params import VERIFY_MODES, SamplingParams
from graft.sampling.state import SLOT, SlotRequest


def test_slot_join_and_leave_change_only_their_slot(make_round):
    """Joining writes every parameter to its field; leaving clears `active` and the drafts."""
    r = make_round(slots=4, draft_length=2, vocab=40)
    before = np.zeros(4, SLOT)
    before["draft_len"] = 2
    r.state.copy_from(before)
    values = {
        "seed": 2**64 - 1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "sample": 6,
    }
    params = SamplingParams(stop_ids=(7, 9), verify="coupled", **values)
    request = SlotRequest(params=params, position=5, last=1, epoch=1, limit=20)
    r.state.join(r.lane, 2, request)
    after = r.state.to_host()
    wanted = {
        "n": 5,
        "last": 1,
        "epoch": 1,
        "limit": 20,
        "num_stop_ids": 2,
        "active": 1,
        **values,
        "verify": VERIFY_MODES.index("coupled"),
        "draft_len": 0,
    }
    for name, value in wanted.items():
        assert after[2][name] == value, name
    np.testing.assert_array_equal(after[2]["stop_ids"][:3], [7, 9, 0])
    np.testing.assert_array_equal(np.delete(after, 2), np.delete(before, 2))
    r.state.leave(r.lane, 3)
    r.state.leave(r.lane, 2)
    left = r.state.to_host()
    assert not left["active"].any()
    np.testing.assert_array_equal(left["draft_len"], [2, 2, 0, 0])
