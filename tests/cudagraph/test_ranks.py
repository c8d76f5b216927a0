"""Deadlines of a rank that waits for the next request of rank 0."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest

from graft.cudagraph import DeadlineError
from graft.cudagraph.ranks import ranks
from graft.cudagraph.ranks.ranks import HEADER_WORDS, RankGroup


def waiting_group(monkeypatch, arrivals, seconds_per_poll: float) -> tuple[RankGroup, list[bool]]:
    """Return rank 1 of a group with a deadline of 3 s and the list of its polls.

    No header ever arrives. `arrivals` contains for each poll whether a heartbeat arrives.
    """
    group = object.__new__(RankGroup)
    group.rank = 1
    group.deadline_s = 3.0
    group._kept_buffers = []
    group._mpi = types.SimpleNamespace(failure="rank 0 did not answer within 3 s")
    polls: list[bool] = []
    messages = types.SimpleNamespace(wait=lambda _: False, abandon=lambda: None)

    def take_heartbeats() -> bool:
        polls.append(next(arrivals))
        return polls[-1]

    clock = itertools.count(0.0, seconds_per_poll)
    monkeypatch.setattr(ranks, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(group, "_messages", lambda *_: messages)
    monkeypatch.setattr(group, "_take_heartbeats", take_heartbeats)
    return group, polls


@pytest.mark.parametrize(
    ("heartbeats", "seconds_per_poll", "polls"),
    [(0, 0.5, 7), (10, 0.5, 17), (0, 1000.0, 4)],
    ids=["no-heartbeat", "heartbeats", "suspended-process"],
)
def test_receive_header_ends_at_deadline_after_last_heartbeat(
    monkeypatch, heartbeats: int, seconds_per_poll: float, polls: int
) -> None:
    """A poll adds at most one second, because the process may have been suspended during it."""
    arrivals = itertools.chain([True] * heartbeats, itertools.repeat(False))
    group, polled = waiting_group(monkeypatch, arrivals, seconds_per_poll)
    with pytest.raises(DeadlineError, match="rank 1: rank 0 did not answer within 3 s"):
        group.receive_header(np.zeros(HEADER_WORDS, np.int64))
    assert len(polled) == polls
