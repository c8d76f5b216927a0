"""Timelines of an engine's rounds: every node on the soft device, parts and host steps on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graft.cudagraph.clocks import tie_clocks
from graft.cudagraph.trace import Trace, TraceEvent, Wait
from graft.models.timing import RoundTiming

if TYPE_CHECKING:
    from graft.models.engine import Engine
    from graft.models.replay import Flight

__all__ = ["RoundTimes", "time_rounds", "trace_rounds"]


@dataclass(frozen=True)
class RoundTimes:
    """One replay: how many requests sat in it, and its stamps by name, device nanoseconds."""

    replay: int
    requests: int
    ns: dict[str, int]

    @property
    def round_ns(self) -> int:
        """From its beginning to its last stamp."""
        return max(self.ns.values()) - self.ns["begin"]

    def part_ns(self, span: tuple[str, str, str]) -> int:
        """Of one of `RoundTiming.spans`; 0 where it was not stamped."""
        _, start, end = span
        return self.ns[end] - self.ns[start] if self.ns[start] and self.ns[end] else 0


@contextmanager
def time_rounds(engine: Engine) -> Iterator[list[RoundTimes]]:
    """Collect the stamps of every round inside the block, on any device; full afterwards."""
    engine.settle()
    replays = engine._replays
    rounds: list[RoundTimes] = []

    def collect(flight: Flight, ns: dict[str, int]) -> None:
        rounds.append(RoundTimes(flight.replay, len(flight.seats), ns))

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
        at = {k: tie.host_ns(v) for k, v in one.ns.items() if v}
        _add_parts(trace, round_parts.timing, one.replay - first, at)
    for span in round_parts.decoder.timeline():
        if span.replay > first:
            trace.events.append(
                TraceEvent(span.step, "host", "grammar", "round", span.replay - first,
                           span.start_ns, span.end_ns)
            )  # fmt: skip
    trace.sort()


def _add_parts(trace: Trace, timing: RoundTiming, replay: int, at: dict[str, int]) -> None:
    waits = timing.waits
    for name, start, end in timing.spans:
        if start not in at or end not in at:
            continue
        if name in waits:
            trace.waits.append(
                Wait("model", name, waits[name], replay, at[start], max(at[start], at[end]))
            )
        else:
            trace.events.append(
                TraceEvent(name, "kernel", "model", "round", replay, at[start], at[end])
            )
