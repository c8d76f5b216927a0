"""Tests of the guided decoder with the simulated device of `guide_device.py`."""

from __future__ import annotations

import pytest
from guide_device import Device
from guide_util import SPECS, byte_vocabulary
from reference_matchers import ReferenceLLGuidance

from graft.grammar import GrammarBackend


@pytest.fixture(scope="module")
def oracle(backend) -> GrammarBackend:
    """Return the backend of the reference matchers.

    For LLGuidance, the reference uses the library's Python interface. For XGrammar, the tested
    backend itself creates the reference matchers.
    """
    return backend if backend.name == "XGrammar" else ReferenceLLGuidance(byte_vocabulary())


def play(device: Device, requests: int) -> int:
    """Run rounds with random requests until `requests` requests have ended.

    Return the number of rounds.
    """
    grammars = [device.backend.compile(spec) for spec in SPECS.values()]
    device.publish()
    rounds = 0
    while len(device.ended) < requests:
        for slot in range(len(device.slots)):
            if device.is_idle(slot) and device.rng.random() < 0.7:
                pick = int(device.rng.integers(len(grammars) + 1))
                limit = int(device.rng.integers(2, 24))
                device.join(slot, grammars[pick] if pick < len(grammars) else None, limit=limit)
        # The next replay is published before this replay runs, that is, before the host knows which
        # requests end in this replay.
        absent = [s for s in range(len(device.slots)) if device.rng.random() < 0.05]
        device.publish(leave_out=absent)
        device.run()
        if rounds % 3 == 0:
            device.clear_ended()
        rounds += 1
    return rounds


def equal_counters(device: Device) -> dict[str, int]:
    """Check that both decoders have equal counters, apart from times, and return the counters."""
    native, python = (decoder.counters() for decoder in device.decoders)
    for name, value in native.items():
        assert name.endswith("_ns") or value == python[name], name
    return native


@pytest.mark.parametrize(
    "draft_length, masked, threads, probe",
    [
        (3, True, 1, False),
        (0, False, 3, False),
        (3, True, 3, False),
        (3, True, 3, True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (3, False, 1, False),
                (3, True, 1, True),
                (0, False, 1, False),
                (1, True, 1, False),
                (2, False, 3, False),
                (1, True, 1, True),
            )
        ),
    ],
)
@pytest.mark.full("xgrammar-3-True-1-False", "llguidance-3-True-3-True")
def test_guide_rows_equal_reference_matcher(
    backend, oracle, pytestconfig, draft_length, masked, threads, probe
):
    """After every step, mask rows and stamps equal the rows and stamps of a reference matcher.

    The reference matcher accepts the text from the start. Native and Python matchers must have the
    same rows, stamps and counters, with any number of threads. A probe must return the first legal
    candidate. If no candidate is legal, the probe must fill the mask row. There are more requests
    with --full.
    """
    device = Device(
        backend,
        oracle=oracle,
        slots=4 if probe else 3 + threads,
        draft_length=draft_length,
        masked=masked,
        seed=draft_length,
        probe=probe,
        wrong=0.05 * probe,
        options={"threads": threads},
    )
    requests = (120, 40) if probe else (400 // threads, 100 // threads)
    if not pytestconfig.getoption("full"):
        requests = (60, 40) if probe else (150 // threads, 100 // threads)
    play(device, requests[backend.name != "XGrammar"])
    native = equal_counters(device)
    assert native["missing_snapshots"] == native["late_rows"] == native["budget_stalls"] == 0
    assert native["dead_ends"] > 0 and native["terminations"] > 0
    assert native["desyncs"] == native["errors"] and (native["errors"] > 0) == probe
    assert (native["refused_drafts"] > 0) == (draft_length > 0 and not probe)
    assert not probe or native["probes"] > native["probe_misses"] > 0
