"""Engines that have run for months, whose replay numbers and slot epochs exceed 32 bits."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import answers_and_drafts, settled
from engine_util import FREE, demo_engine, mixed_requests
from test_device_automata_rounds import automaton_requests, compile_automata

from graft.cudagraph.driver.pinned import replay_word
from graft.cudagraph.lanes import StreamLane
from graft.models.engine.loop_replays import LoopReplays
from graft.models.engine.slots import MAX_EPOCH

#: Replay numbers at which a run begins. During the run, the lower 32 bits become negative, or are
#: negative from the first use of a slot on, or begin to repeat.
NUMBERS = [2**31 - 8, 2**31 + 1000, 2**32 - 8]
OPTIONS = {
    "rounds": {},
    "one launch at a time": {"overlap": False},
    "mailbox": {"grammar_transport": "mailbox"},
    "probe": {"draft_masking": "probe"},
    "loops": {"generation": "graph"},
    "automata": {"device_automata": True},
    "automata in loops": {"device_automata": True, "generation": "graph"},
    "no speculation": {"speculation": False},
}
QUICK = [("rounds", 2**32 - 8), ("loops", 2**31 + 1000), ("automata in loops", 2**32 - 8)]


def continue_from(engine, number):
    """Continue the replay numbers after `number`, and the epochs just before the greatest one."""
    engine.synchronize()
    replays = engine._replays
    parts = engine._resources
    replays.launched = replays.retired = number
    parts.decoder._last_published = number
    for ring in (parts.inputs, parts.outputs):  # as if each entry had been used
        for replay in range(number - ring.entries + 1, number + 1):
            ring.stamp.array[replay % ring.entries] = replay_word(replay)
    word = engine.device.pinned(1, "int32")
    word.array[0] = replay_word(number)
    StreamLane(engine._built.stream).copy(parts.replay, word, name="replay number")
    engine._built.stream.synchronize()
    if isinstance(replays, LoopReplays):
        replays._control.release(number)
    engine._scheduler.slots._last_epoch = MAX_EPOCH - 3


def cases():
    """Return all cases; those that are not in `QUICK` carry the mark full."""
    found = []
    for name in OPTIONS:
        for number in NUMBERS:
            marks = () if (name, number) in QUICK else pytest.mark.full
            found.append(pytest.param(name, number, marks=marks, id=f"{name}-{number}"))
    return found


@pytest.mark.parametrize("name, number", cases())
@pytest.mark.full("[loops-")
def test_engine_continues_after_replay_numbers_exceed_32_bits(name, number):
    """Outputs and drafts are the same whatever the numbers of replays and epochs are."""
    options = {"max_batch_size": 2, "grammar_budget_us": None, **OPTIONS[name]}
    requests = [*mixed_requests(3, max_tokens=40), replace(FREE, max_tokens=30)]
    if "automata" in name:
        requests += automaton_requests()[:3]
    found = []
    for first in (None, number):
        with settled(demo_engine(**options)) as engine:
            if "automata" in name:
                compile_automata(engine, requests)
            if first is not None:
                continue_from(engine, first)
            found.append(answers_and_drafts(engine.generate(requests)))
            assert engine.counters()["grammar"]["desyncs"] == 0
            if first is not None:
                engine.synchronize()
                assert engine._replays.launched > first + 20
                assert engine._resources.replay.to_host()[0] == replay_word(
                    engine._replays.launched
                )
                assert 1 <= engine._scheduler.slots._last_epoch < MAX_EPOCH - 3
    assert found[0] == found[1]


def test_replay_word_is_the_lower_32_bits():
    numbers = [1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**40 + 7]
    words = [replay_word(number) for number in numbers]
    assert words == np.array(numbers, np.int64).astype(np.int32).tolist()
