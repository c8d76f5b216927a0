"""Rounds of the guided decoder against a device in NumPy and a stock matcher per row."""

from __future__ import annotations

import pytest
from guide_device import Device
from guide_util import KINDS, SPECS, byte_vocabulary
from stock import StockLLGuidance

from graft.grammar import GrammarBackend, GrammarError


@pytest.fixture(scope="module")
def oracle(backend) -> GrammarBackend:
    """The same library by its Python API alone; that of XGrammar is the backend's own."""
    return backend if backend.name == "XGrammar" else StockLLGuidance(byte_vocabulary())


def play(device: Device, requests: int) -> int:
    """Keep the slots busy with random requests until so many have ended; returns the rounds."""
    grammars = [device.backend.compile(spec) for spec in SPECS.values()]
    device.publish()
    rounds = 0
    while len(device.ended) < requests:
        for slot in range(len(device.slots)):
            if device.is_idle(slot) and device.rng.random() < 0.7:
                pick = int(device.rng.integers(len(grammars) + 1))
                limit = int(device.rng.integers(2, 24))
                device.join(slot, grammars[pick] if pick < len(grammars) else None, limit=limit)
        # One replay is published ahead: the next runs before the host has seen this one's end.
        absent = [s for s in range(len(device.slots)) if device.rng.random() < 0.05]
        device.publish(leave_out=absent)
        device.run()
        if rounds % 3 == 0:
            device.clear_ended()
        rounds += 1
    return rounds


def equal_counters(device: Device) -> dict[str, int]:
    """The native matchers' counters, which those in Python share but for times."""
    native, python = (decoder.counters() for decoder in device.decoders)
    for name, value in native.items():
        assert name.endswith("_ns") or value == python[name], name
    return native


@pytest.mark.parametrize("draft_length, masked, threads, probe", [
    (0, False, 1, False), (1, True, 1, False), (3, True, 1, False), (3, False, 1, False),
    (0, False, 3, False), (3, True, 3, False), (2, False, 3, False), (1, True, 1, True),
    (3, True, 1, True), (3, True, 3, True),
])  # fmt: skip
def test_rows_equal_a_stock_matcher_fed_from_the_start(
    backend, oracle, draft_length, masked, threads, probe
):
    """After every step each row's mask and stamp are those of a fresh matcher; matchers in Python
    give the same rows, stamps and counters as native ones; so do several threads. With probes the
    first legal candidate is answered, and a miss fills the row to draw from."""
    device = Device(
        backend, oracle=oracle, slots=4 if probe else 3 + threads, draft_length=draft_length,
        masked=masked, seed=draft_length, probe=probe, wrong=0.05 * probe,
        options={"threads": threads},
    )  # fmt: skip
    requests = (120, 40) if probe else (400 // threads, 100 // threads)
    play(device, requests[backend.name != "XGrammar"])
    native = equal_counters(device)
    assert native["missing_snapshots"] == native["late_rows"] == native["budget_stalls"] == 0
    assert native["dead_ends"] > 0 and native["terminations"] > 0
    assert native["desyncs"] == native["errors"] and (native["errors"] > 0) == probe
    assert not probe or native["probes"] > native["probe_misses"] > 0


def test_committed_tokens_the_grammar_refuses_fail_their_slot_alone(backend):
    """An illegal committed token (illegal, special, out of range) gives ROW_ERROR in that slot."""
    device = Device(backend, slots=3, draft_length=2, masked=True, seed=5, wrong=0.05)
    play(device, 300 if backend.name == "XGrammar" else 150)
    counters = equal_counters(device)
    confused = [truth for truth in device.ended if truth.confused]
    assert len(confused) > 10
    assert {truth.reason for truth in confused} <= {1, 2, 4}
    assert any(truth.reason == 4 for truth in confused)
    assert counters["desyncs"] == counters["errors"] > 0


@pytest.mark.parametrize("probe", [False, True], ids=["fill", "probe"])
def test_a_masked_round_fills_at_most_k_plus_one_rows(backend, probe):
    """With every draft accepted or not, K masked drafts cost K + 1 rows a slot; rows filled after a
    miss are those that the next open step needs, so none is filled twice."""
    device = Device(backend, slots=2, draft_length=3, masked=True, seed=1, stall=0.0, probe=probe,
                    **({} if probe else {"illegal": 0.0}))  # fmt: skip
    grammar = backend.compile(SPECS["regex"])
    device.join(0, grammar, limit=10_000)
    device.publish()
    fills = []
    for _ in range(100):
        device.publish()
        before = device.decoders[0].counters()["fills"]
        device.run()
        fills.append(device.decoders[0].counters()["fills"] - before)
        device.clear_ended()
        if device.is_idle(0):
            device.join(0, grammar, limit=10_000)
    # with probes: misses of this round's drafts, and the rows of the last one's
    assert max(fills) <= 7 if probe else max(fills) == 4
    counters = device.decoders[0].counters()
    assert counters["fills"] <= 4 * counters["commits"] + 4
    assert (counters["probes"] > counters["commits"]) == probe


def test_a_request_goes_on_elsewhere_from_its_tokens(backend):
    """A matcher made from a request's tokens gives, in another decoder and slot, the rows of one
    that has taken them from the start; tokens that the grammar refuses are named."""
    compiled = backend.compile(SPECS["text, then choice"])
    here = Device(backend, slots=2, draft_length=2, masked=True, seed=9, illegal=0.0)
    here.join(0, compiled, limit=4)
    here.publish()
    for _ in range(6):
        here.publish()
        here.run()
    tokens = here.slots[0].history
    there = Device(backend, slots=2, draft_length=3, masked=False, seed=1)
    there.join(1, compiled, limit=60)
    there.slots[1].history = list(tokens)
    for kind, matchers in zip(there.kinds, there.matchers, strict=True):
        matchers[1] = KINDS[kind](compiled.matcher(tokens=tokens))
    for _ in range(3):
        there.publish()
        there.run()  # checks every row
    assert len(tokens) > 1 and len(there.slots[1].history) > len(tokens)
    with pytest.raises(GrammarError, match="refuses token 270, number 1"):
        backend.compile(SPECS["regex"]).matcher(tokens=[97, 270])
