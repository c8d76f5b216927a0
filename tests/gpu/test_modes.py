"""Rounds, loops and automata on the device generate the same tokens."""

import functools
from dataclasses import replace

import pytest
from engine_util import FREE, LONG, demo_engine, mixed_requests

#: Options of engines that must generate the same tokens, by name. The first one is the reference.
MODES = {
    "rounds, host nodes": {"grammar_transport": "native"},
    "rounds, mailboxes": {"grammar_transport": "mailbox"},
    "rounds, spinning kernels": {"grammar_transport": "spinkernel"},
    "loops": {"generation": "graph"},
    "automata": {"device_automata": True},
    "loops with automata": {"generation": "graph", "device_automata": True},
}
#: The mode that a short test run compares with the reference.
SHORT_RUN = "loops with automata"


@functools.cache
def generate(mode, has_grammar):
    """Return the tokens of each request."""
    requests = [FREE, replace(LONG, max_tokens=40), FREE]
    if has_grammar:
        requests = mixed_requests(4, max_tokens=24)
    with demo_engine(max_batch_size=4, **MODES[mode]) as engine:
        outputs = engine.generate(requests)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.tokens for output in outputs]


@pytest.mark.parametrize(
    "mode",
    [
        *(pytest.param(mode, marks=pytest.mark.full) for mode in MODES if mode != SHORT_RUN),
        SHORT_RUN,
    ],
)
@pytest.mark.parametrize("has_grammar", [False, True], ids=["no grammar", "grammar"])
def test_mode_generates_tokens_of_rounds(mode, has_grammar):
    assert generate(mode, has_grammar) == generate(next(iter(MODES)), has_grammar)
