"""Overlapped rounds: launches, reuse of batch rows, and surplus tokens.

With overlap, a round is launched before the host has read the previous one.
"""

from dataclasses import replace

import pytest
from engine_cases import answers, settled, workload
from engine_util import demo_engine

from graft.models.request import Request


@pytest.mark.full
def test_overlap_and_composition_do_not_change_rejection_sampling() -> None:
    """Outputs of rejection sampling are equal with overlap, without it, and with composition "two".

    All three modes generate the same drafts. With composition "two", a round consists of five
    graphs: the first one ends after verification, and each later one ends at a grammar step for
    which the model waits.
    """
    requests = workload(temperature=0.9, verify="rejection")
    outputs = []
    for graphs, options in ((1, {}), (1, {"overlap": False}), (5, {"composition": "two"})):
        with settled(demo_engine(max_batch_size=4, **options)) as engine:
            outputs.append(answers(engine.generate(requests)))
            assert {len(round_graph.graphs) for round_graph in engine.graphs.values()} == {graphs}
    assert outputs[0] == outputs[1] == outputs[2]


def test_overlap_launches_next_round_before_reading() -> None:
    """When a step returns, one round is in flight with overlap, and none without overlap.

    All graphs of a round run, with composition "two" as well: later rounds have drafts.
    """
    for options, in_flight in (({}, 1), ({"overlap": False}, 0), ({"composition": "two"}, 0)):
        with demo_engine(max_batch_size=2, **options) as engine:
            for seed in range(2):
                engine.submit(Request(tokens=[300, 301, 302 + seed], max_tokens=40))
            for _ in range(3):
                engine.step()
                assert engine.counters()["held"]["unread_replays"] == in_flight
            engine.synchronize()
            assert engine.stats.speculated_rounds > 0


def test_batch_row_is_reused_in_next_round() -> None:
    """When a request finishes, the next request uses its batch row in the next round.

    N requests of one token each therefore take at most N + 2 rounds.
    """
    requests = [Request(tokens=[60 + i, 70], max_tokens=1) for i in range(24)]
    with settled(demo_engine(max_batch_size=2, prefill_rows=64)) as engine:
        assert all(o.reason == "length" for o in engine.generate(requests))
        assert engine.stats.row_rounds == len(requests)
        assert engine.stats.rounds <= len(requests) + 2
        assert engine.stats.surplus_tokens == 0


def test_surplus_tokens_of_stale_rows_are_discarded() -> None:
    """When the host finds a stop string, the next round has already been launched.

    The tokens of that round are counted as surplus and are not part of the output.
    """
    free = Request(tokens=[300, 301, 302], max_tokens=40)
    with settled(demo_engine(max_batch_size=1)) as engine:
        (whole,) = engine.generate([free])
        engine.synchronize()
        engine.reset_stats()
        (cut,) = engine.generate([replace(free, stop=[whole.text[2]])])
        engine.synchronize()
        assert cut.reason == "stop_string"
        assert cut.tokens == whole.tokens[: len(cut.tokens)] and len(cut.tokens) < 40
        assert engine.stats.stale_rows == 1 and engine.stats.surplus_tokens > 0
