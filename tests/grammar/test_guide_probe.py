"""Drafts made legal by probing: the first candidate that the grammar takes, rows filled later."""

from __future__ import annotations

import pytest
from guide_util import SPECS, Device, byte_vocabulary
from test_guide_rounds import play

from graft.grammar import GrammarBackend, make_backend


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request) -> GrammarBackend:
    return make_backend(request.param, byte_vocabulary())


@pytest.mark.parametrize("draft_length, threads", [(1, 1), (3, 1), (3, 3)])
def test_the_first_legal_candidate_is_answered_and_rows_come_later(backend, draft_length, threads):
    """Answers and rows are those of a stock matcher; a miss fills the row to draw from; matchers
    in Python do the same work."""
    device = Device(
        backend, slots=4, draft_length=draft_length, masked=True, seed=draft_length, probe=True,
        wrong=0.05, options={"threads": threads},
    )  # fmt: skip
    play(device, 120 if backend.name == "XGrammar" else 40)
    native, python = (decoder.counters() for decoder in device.decoders)
    for name, value in native.items():
        if not name.endswith("_ns"):
            assert value == python[name], name
    assert native["desyncs"] == native["errors"] > 0
    assert native["probes"] > native["probe_misses"] > 0
    assert native["terminations"] > 0 and native["dead_ends"] > 0


def test_a_probed_round_fills_at_most_k_plus_one_rows(backend):
    """Rows filled after a miss are the rows that the next open step needs: none is filled twice."""
    device = Device(
        backend, slots=2, draft_length=3, masked=True, seed=1, stall=0.0,
        probe=True,
    )
    grammar = backend.compile(SPECS["regex"])
    device.join(0, grammar, limit=10_000)
    device.publish()
    fills, probes = [], 0
    for _ in range(100):
        device.publish()
        before = device.decoders[0].counters()
        device.run()
        after = device.decoders[0].counters()
        fills.append(after["fills"] - before["fills"])
        probes += after["probes"] - before["probes"]
        device.clear_ended()
        if device.is_idle(0):
            device.join(0, grammar, limit=10_000)
    assert max(fills) <= 7  # misses of this round's drafts, and the rows of the last one's
    counters = device.decoders[0].counters()
    rounds = counters["commits"]
    assert counters["fills"] <= 4 * rounds + 4 and probes > rounds
