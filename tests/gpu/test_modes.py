"""Rounds, loops and automata on the device generate the same tokens."""

import functools
from dataclasses import replace

import pytest
from engine_util import FREE, LONG, demo_engine, mixed_requests

#: Options of the engine that the others are compared with: rounds with host nodes.
REFERENCE = {"grammar_transport": "native"}
#: Options of engines that must generate the same tokens as the reference, by name.
MODES = {
    "rounds, mailboxes": {"grammar_transport": "mailbox"},
    "rounds, spinning kernels": {"grammar_transport": "spinkernel"},
    "loops": {"generation": "graph"},
    "automata": {"device_automata": True},
    "loops with automata": {"generation": "graph", "device_automata": True},
}
#: The mode that a short test run compares with the reference.
SHORT_RUN = "loops with automata"


def generate(has_grammar, options):
    """Return the tokens of each request."""
    requests = [FREE, replace(LONG, max_tokens=40), FREE]
    if has_grammar:
        requests = mixed_requests(4, max_tokens=24)
    with demo_engine(max_batch_size=4, **options) as engine:
        outputs = engine.generate(requests)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.tokens for output in outputs]


@functools.cache
def reference_tokens(has_grammar):
    return generate(has_grammar, REFERENCE)


@pytest.mark.parametrize(
    "mode",
    [
        *(pytest.param(mode, marks=pytest.mark.full) for mode in MODES if mode != SHORT_RUN),
        SHORT_RUN,
    ],
)
@pytest.mark.parametrize("has_grammar", [False, True], ids=["no grammar", "grammar"])
def test_mode_generates_tokens_of_rounds(mode, has_grammar):
    assert generate(has_grammar, MODES[mode]) == reference_tokens(has_grammar)
