"""Argument checks of SlotState and Sampler, before any launch."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
from sampling_round import TableRound, even_rows

from graft.cudagraph.errors import OptionError, ShapeError
from graft.sampling.exchange import Exchange
from graft.sampling.mode import DraftMode
from graft.sampling.params import VERIFY_MODES, SamplingParams
from graft.sampling.sampler import DraftVocab, Sampler, output_ring
from graft.sampling.state import SLOT, SlotRequest

GOOD = {"position": 5, "last": 1, "epoch": 1, "limit": 20}


@pytest.fixture
def small(make_round) -> TableRound:
    """Return a round with four slots, two drafts and forty token ids."""
    return make_round(slots=4, draft_length=2, vocab=40)


@pytest.mark.parametrize(
    "change,word",
    [
        ({"slot": 4}, "slot"),
        ({"slot": -1}, "slot"),
        ({"position": -1}, "position"),
        ({"limit": 6}, "limit"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"verify": "traversal"}, "verify"),
        ({"stop_ids": tuple(range(65))}, "64 stop ids"),
        ({"sample": 1 << 24}, "sample"),
    ],
)
def test_slot_join_rejects_invalid_values(small, change, word):
    """Joining with an invalid value raises OptionError, and the slot stays inactive."""
    values = {"slot": 0, **GOOD, **change}
    names = [f.name for f in fields(SamplingParams) if f.name in values]
    params = SamplingParams(**{name: values.pop(name) for name in names})
    slot = values.pop("slot")
    with pytest.raises(OptionError, match=word):
        small.state.join(small.lane, slot, SlotRequest(params=params, **values))
    assert not small.state.to_host()["active"].any()


def test_slot_join_and_leave_change_only_their_slot(small):
    """Joining writes every parameter to its field; leaving clears `active` and the drafts."""
    before = np.zeros(4, SLOT)
    before["draft_len"] = 2
    small.state.copy_from(before)
    values = {
        "seed": 2**64 - 1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "sample": 6,
    }
    params = SamplingParams(stop_ids=(7, 9), verify="coupled", **values)
    small.state.join(small.lane, 2, SlotRequest(params=params, **GOOD))
    after = small.state.to_host()
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
    small.state.leave(small.lane, 3)
    small.state.leave(small.lane, 2)
    left = small.state.to_host()
    assert not left["active"].any()
    np.testing.assert_array_equal(left["draft_len"], [2, 2, 0, 0])


def test_sampler_rejects_arrays_that_do_not_fit(device, small):
    """Arrays of the wrong shape or dtype are rejected by name."""
    draft = small.sampler.draft
    rows = small.row_slot
    five = device.zeros((5,), "int32")
    long = device.zeros((4,), "int64")

    def target(
        lane,
        logits,
        row_slot,
        width,
        **change,
    ):
        small.sampler.target(lane, logits, replace(even_rows(device, row_slot, width), **change))

    for call, size, *arguments, error, word in (
        (
            target,
            (4, 39),
            rows,
            1,
            ShapeError,
            r"logits is float32\[4, 39\], expected .*V=40",
        ),
        (target, (4, 40), rows, 3, ShapeError, r"R=12"),
        (target, (16, 40), rows, 4, OptionError, "rows R"),
        (target, (5, 40), five, 1, OptionError, "batch rows"),
        (target, (4, 40), long, 1, ShapeError, "row_slot"),
        (
            partial(target, first=five),
            (4, 40),
            rows,
            1,
            ShapeError,
            "first",
        ),
        (
            partial(target, map=five[:3]),
            (3, 40),
            rows,
            1,
            OptionError,
            "rows R",
        ),
        (partial(target, map=long), (4, 40), rows, 1, ShapeError, "map"),
        (draft, (4, 40), rows, 3, OptionError, "j must be"),
        (draft, (3, 40), rows, 1, ShapeError, "draft_logits"),
        (
            small.sampler.candidates,
            (4, 40),
            rows,
            1,
            OptionError,
            "requires a probe mode",
        ),
    ):
        with pytest.raises(error, match=word):
            call(small.lane, device.zeros(size, "float32"), *arguments)
    with pytest.raises(ShapeError, match="logits is float16"):
        target(small.lane, device.zeros((4, 40), "float16"), rows, 1)


def test_sampler_rejects_parts_that_do_not_fit(device, small):
    """State, exchange, row map and output ring of different sizes are rejected."""

    def make(**change):
        parts = {
            "state": small.state,
            "exchange": small.exchange,
            "replay": small.replay_ptr,
            "token_limit": 40,
            "draft_vocab": DraftVocab(40),
            "max_batch": 4,
        }
        return Sampler(**{**parts, **change})

    def exchange(**change):
        sizes = {
            "slots": 4,
            "vocab_size": 40,
            "mode": DraftMode.chain(2),
            **change,
        }
        return {"exchange": Exchange(device, **sizes)}

    ids = device.zeros((40,), "int32")
    for change, error, word in (
        ({"token_limit": 41}, OptionError, "token_limit"),
        ({"max_batch": 5}, OptionError, "max_batch"),
        ({"draft_vocab": DraftVocab(40, ids)}, OptionError, "t2d"),
        ({"draft_vocab": DraftVocab(40, ids, ids[:39])}, ShapeError, "t2d"),
        ({"draft_vocab": DraftVocab(41)}, OptionError, "draft vocabulary"),
        ({"replay": device.zeros((2,), "int32")}, ShapeError, "replay"),
        (exchange(slots=3), OptionError, "exchange slots"),
    ):
        with pytest.raises(error, match=word):
            make(**change)
    for sizes in ({"slots": 0}, {"vocab_size": 0}):
        with pytest.raises(OptionError, match=next(iter(sizes))):
            exchange(**sizes)
    for slots, drafts, word in ((4, 1, "words of an output row"), (3, 2, "output rows")):
        ring = output_ring(device, 2, slots, drafts)
        with pytest.raises(OptionError, match=word):
            small.sampler.verify(small.lane, even_rows(device, small.row_slot, 1), ring)
