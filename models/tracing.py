"""Timelines of an engine's rounds: every node on the soft device, parts and host steps on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graft.cudagraph.clocks import tie_clocks
from graft.cudagraph.trace import Trace, TraceEvent, Wait
from graft.models.stamps import Part

if TYPE_CHECKING:
    from graft.models.engine import Engine
    from graft.models.replay import Flight

__all__ = ["RoundTimes", "time_rounds", "trace_rounds"]


@dataclass(frozen=True)
class RoundTimes:
    """One replay: its parts, and the stamps before, between and behind them, device nanoseconds."""

    replay: int
    parts: tuple[Part, ...]
    stamps: list[int]


@contextmanager
def time_rounds(engine: Engine) -> Iterator[list[RoundTimes]]:
    """Collect the stamps of every round inside the block, on any device; full afterwards."""
    engine.settle()
    replays = engine._replays
    rounds: list[RoundTimes] = []

    def collect(flight: Flight, stamps: list[int]) -> None:
        rounds.append(RoundTimes(flight.replay, flight.graph.timed, stamps))

    replays.on_parts = collect
    try:
        yield rounds
        engine.settle()
    finally:
        replays.on_parts = None


@contextmanager
def trace_rounds(engine: Engine) -> Iterator[Trace]:
    """Record the rounds that an engine replays inside the block; the trace is full afterwards.

    On the soft device the driver tells the begin and end of every node. On CUDA hardware the device
    stamps the borders of a round's parts, and host steps are timed on the host's clock, tied to the
    device's within ``Trace.clock_error_ns``.
    """
    engine.settle()  # rounds launched before the block do not belong to it
    if engine.device.kind == "soft":
        watched = {one.exec: one.graph for one in engine.rounds.values()}
        with Trace.record(engine.device, watched) as trace:
            yield trace
            engine.settle()
        return
    trace = Trace(engine.device.describe())
    first = engine._replays.number
    with time_rounds(engine) as rounds:
        yield trace
    tie = tie_clocks(engine.device)
    trace.clock_error_ns = tie.error_ns
    round_parts = next(iter(engine.rounds.values())).parts
    for one in rounds:
        _add_parts(trace, one, one.replay - first, [v and tie.host_ns(v) for v in one.stamps])
    for span in round_parts.decoder.timeline():
        if span.replay > first:
            trace.events.append(
                TraceEvent(span.step, "host", "grammar", "round", span.replay - first,
                           span.start_ns, span.end_ns)
            )  # fmt: skip
    trace.sort()


def _add_parts(trace: Trace, one: RoundTimes, replay: int, at: list[int]) -> None:
    for part, start, end in zip(one.parts, at, at[1:], strict=False):
        if not start or not end:
            continue
        if part.waits_for:
            wait = Wait("model", part.name, part.waits_for, replay, start, max(start, end))
            trace.waits.append(wait)
        else:
            trace.events.append(
                TraceEvent(part.name, "kernel", "model", "round", replay, start, end)
            )
