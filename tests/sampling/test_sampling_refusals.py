"""Refusals of the sampling wrappers, by name and before anything is launched."""

from __future__ import annotations

import numpy as np
import pytest
from sampling_round import TableRound

from graft.cudagraph.errors import OptionError, ShapeError
from graft.cudagraph.pinned import PinnedSlots, Ring
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotState

GOOD = {"position": 5, "last": 1, "epoch": 1, "limit": 20}


@pytest.fixture
def small(device, stream):
    """Four slots, two drafts, forty tokens."""
    return TableRound(device, stream, slots=4, draft_length=2, vocab=40)


@pytest.mark.parametrize(
    "change,word",
    [
        ({"slot": 4}, "slot"), ({"slot": -1}, "slot"), ({"position": -1}, "position"),
        ({"limit": 6}, "limit"), ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"), ({"top_k": -1}, "top_k"),
        ({"top_p": 1.1}, "top_p"), ({"min_p": -0.1}, "min_p"), ({"verify": 2}, "verify"),
        ({"stop_ids": tuple(range(9))}, "8 stop ids"), ({"sample": 1 << 24}, "sample"),
    ],
)  # fmt: skip
def test_a_bad_join_is_refused_and_changes_nothing(small, change, word):
    """The error names the value; the slot stays as it was."""
    values = {"slot": 0, **GOOD, **change}
    with pytest.raises(OptionError, match=word):
        small.state.join(small.lane, values.pop("slot"), **values)
    assert not small.snapshot()["active"].any()


def test_join_and_leave_write_the_slot_and_no_other(small):
    """Every parameter lands in its array at the slot; leaving clears active and the drafts."""
    small.state.draft_len.copy_from(np.full(4, 2, np.int32))
    values = {"seed": -1, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125,
              "verify": 1, "sample": 6}  # fmt: skip
    small.state.join(small.lane, 2, **GOOD, stop_ids=(7, 9), **values)
    small.stream.synchronize()
    s = small.state
    wanted = {"n": 5, "last": 1, "epoch": 1, "limit": 20, "stop_count": 2, "active": 1,
              **values, "seed": 2**64 - 1}  # fmt: skip
    for name, value in wanted.items():
        got = getattr(s, name).to_host()
        assert got[2] == value, name
        assert not np.delete(got, 2).any(), name
    np.testing.assert_array_equal(s.stop_ids.to_host()[2], [7, 9] + [-1] * 6)
    np.testing.assert_array_equal(s.draft_len.to_host(), [2, 2, 0, 2])
    s.leave(small.lane, 3)
    s.leave(small.lane, 2)
    small.stream.synchronize()
    assert not s.active.to_host().any()
    np.testing.assert_array_equal(s.draft_len.to_host(), [2, 2, 0, 0])


def test_arrays_that_do_not_fit_are_refused_by_name(device, small):
    """Logits, row maps, widths and replay numbers of the wrong shape never reach a kernel."""
    lane, sampler, rows = small.lane, small.sampler, small.row_slot
    with pytest.raises(ShapeError, match=r"logits: shape \(4, 39\), expected .*V=40"):
        sampler.target(lane, device.zeros((4, 39), "float32"), rows, 1)
    with pytest.raises(ShapeError, match=r"B\*width=12"):
        sampler.target(lane, device.zeros((4, 40), "float32"), rows, 3)
    with pytest.raises(ShapeError, match="logits: dtype float16"):
        sampler.target(lane, device.zeros((4, 40), "float16"), rows, 1)
    with pytest.raises(OptionError, match="width"):
        sampler.target(lane, device.zeros((16, 40), "float32"), rows, 4)
    with pytest.raises(OptionError, match="batch rows"):
        sampler.target(lane, device.zeros((5, 40), "float32"), device.zeros((5,), "int32"), 1)
    with pytest.raises(ShapeError, match="row_slot"):
        sampler.target(lane, device.zeros((4, 40), "float32"), device.zeros((4,), "int64"), 1)
    with pytest.raises(ShapeError, match="replay_ptr"):
        sampler.verify(lane, rows, 1, device.zeros((2,), "int32"), small.ring)
    with pytest.raises(OptionError, match="after verify"):
        sampler.draft(lane, device.zeros((4, 40), "float32"), rows, 1, True)
    sampler.verify(lane, rows, 1, small.replay_ptr, small.ring)
    with pytest.raises(OptionError, match="j must be"):
        sampler.draft(lane, device.zeros((4, 40), "float32"), rows, 3, True)
    with pytest.raises(ShapeError, match="draft_logits"):
        sampler.draft(lane, device.zeros((3, 40), "float32"), rows, 1, True)


def test_a_sampler_whose_parts_do_not_fit_is_refused(device, small):
    """Sizes of state, exchange, maps and ring must agree with the sampler's own."""

    def make(state: SlotState = small.state, exchange: PinnedSlots = small.exchange, **change):
        options = {"vocab_size": 40, "token_limit": 40, "draft_length": 2, "draft_vocab": 40,
                   "d2t": None, "t2d": None, "max_batch": 4}  # fmt: skip
        return Sampler(device, state, exchange, **{**options, **change})

    with pytest.raises(OptionError, match="token_limit"):
        make(token_limit=41)
    with pytest.raises(OptionError, match="draft_length"):
        make(draft_length=1)
    with pytest.raises(OptionError, match="max_batch"):
        make(max_batch=5)
    with pytest.raises(OptionError, match="t2d"):
        make(d2t=device.zeros((40,), "int32"))
    with pytest.raises(ShapeError, match="t2d"):
        make(d2t=device.zeros((40,), "int32"), t2d=device.zeros((39,), "int32"))
    with pytest.raises(ShapeError, match=r"exchange\.mask"):
        make(vocab_size=80, token_limit=80)
    with pytest.raises(OptionError, match="draft_vocab 40 exceeds"):
        make(vocab_size=39, token_limit=39)
    short = {"mask": ("int32", (3, 2)), "row_state": ("int32", (3, 4)),
             "committed": ("int32", (3,)), "drafted": ("int32", (4,))}  # fmt: skip
    with pytest.raises(ShapeError, match=r"exchange\.committed"):
        make(exchange=PinnedSlots(device, 4, short))
    fields = {name: ("int32", (4,)) for name in ("slot", "count", "reason", "accepted")}
    ring = Ring(device, 2, {**fields, "draft_len": ("int32", (3,)), "tokens": ("int32", (4, 3))})
    with pytest.raises(ShapeError, match=r"out_ring\.draft_len"):
        small.sampler.verify(small.lane, small.row_slot, 1, small.replay_ptr, ring)
