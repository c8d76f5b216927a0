"""Requests handed from one guided decoder to another, at any point."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from guide_util import SPECS, Device, SlotTruth, byte_vocabulary, oracle_row
from test_guide_threads import HeldRig

from graft.grammar import GrammarBackend, GuideError, make_backend


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request) -> GrammarBackend:
    return make_backend(request.param, byte_vocabulary())


def device(backend, rng: np.random.Generator, transport: str) -> Device:
    k = int(rng.integers(0, 4))
    return Device(
        backend, slots=3, draft_length=k, masked=k > 0, seed=int(rng.integers(1000)),
        transports=[transport], probe=k > 0 and bool(rng.random() < 0.5), illegal=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("anew", [False, True], ids=["compiled", "spec"])
def test_a_request_goes_on_elsewhere_bit_for_bit(backend, anew):
    """Between workers of any transport, draft length, legality and slot, again and again: every
    row is the one of a stock matcher that has taken all tokens from the start."""
    rng = np.random.default_rng(7 + anew)
    other = make_backend(backend.name.lower(), byte_vocabulary())
    moves = 0
    for spec in SPECS.values():
        here, slot = device(backend, rng, "native"), int(rng.integers(3))
        here.join(slot, backend.compile(spec), limit=60)
        here.publish()
        for _ in range(3):
            for _ in range(int(rng.integers(1, 6))):
                here.publish()
                here.run()
            here.run()  # the last replay that names the slot
            truth = here.slots[slot]
            assert truth is not None
            if not truth.active:
                break
            handed = here.decoders[0].handover(slot)
            assert handed.tokens == tuple(truth.history) and handed.position == truth.n
            here = device(backend, rng, str(rng.choice(["native", "python"])))
            slot = int(rng.integers(3))
            here.epoch += 1
            here.slots[slot] = SlotTruth(
                here.epoch, truth.start, handed.position, handed.position, truth.limit,
                history=list(handed.tokens), before=handed.tokens,
            )  # fmt: skip
            here.matchers[0][slot] = handed.matcher(other if anew else None)
            moves += 1
            here.publish()
            here.run()
            here.publish()
            truth = here.slots[slot]
            expected = oracle_row(truth.start, truth.history)
            if here.k and expected is not None and not (expected == -1).all():
                row = np.zeros_like(expected)
                assert here.decoders[0].rebuild(slot).fill(row)
                np.testing.assert_array_equal(row, expected)
        assert here.decoders[0].counters()["desyncs"] == 0
    assert moves > 5


def test_a_late_slot_is_handed_over_with_what_it_has_not_applied(backend):
    """handover() waits for the thread inside the matcher, then adds the commit it had kept."""
    rig = HeldRig(backend)
    requests = [rig.request(0)]
    rig.decoder.publish(1, requests)
    rig.step(rig.works[0])
    rig.write("committed", 0, 1, b"ab")
    rig.write("drafted", 0, 1, b"")
    rig.step(rig.works[1])
    rig.write("drafted", 0, 1, b"cc")
    rig.decoder.publish(2, requests)
    rig.decoder.retire(1)
    rig.close_gate(3)
    rig.step(rig.works[0])  # row 1 is made, then the thread stands in the next draft
    rig.write("committed", 0, 2, b"cc")
    rig.write("drafted", 0, 2, b"")
    rig.step(rig.works[1])
    with pytest.raises(GuideError, match="slot 0: a replay in flight"):
        rig.decoder.handover(0)
    rig.decoder.retire(2)
    found = []
    taker = threading.Thread(target=lambda: found.append(rig.decoder.handover(0)))
    taker.start()
    taker.join(0.02)
    assert not found
    rig.gate[0] = 0
    taker.join(60)
    assert found[0].tokens == tuple(b"abcc") and found[0].position == 14
    row = np.zeros(9, np.int32)
    found[0].matcher().fill(row)
    expected = oracle_row(lambda: backend.matcher(rig.compiled), b"abcc")
    np.testing.assert_array_equal(row, expected)


def test_only_joined_constrained_requests_are_handed_over(backend):
    """An empty or unconstrained slot has nothing to hand over."""
    rig = HeldRig(backend)
    with pytest.raises(GuideError, match="slot 1 has no constrained request"):
        rig.decoder.handover(1)
