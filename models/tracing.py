"""Timelines of an engine's rounds: every node on the soft device, parts and host steps on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from graft.cudagraph.clocks import tie_clocks
from graft.cudagraph.trace import Trace, TraceEvent, Wait
from graft.models.round import PARTS

if TYPE_CHECKING:
    from graft.models.engine import Engine

__all__ = ["trace_rounds"]

#: Parts of a round that are waits, and the host step that is waited for.
WAITS = {"wait for masks": "open: missing rows", "wait for row 0": "commit, fill row 0"}


@contextmanager
def trace_rounds(engine: Engine) -> Iterator[Trace]:
    """Record the rounds that an engine replays inside the block; the trace is full afterwards.

    On the soft device the driver tells the begin and end of every node. On CUDA hardware the device
    stamps the borders of a round's parts, and host steps are timed on the host's clock, tied to the
    device's within ``Trace.clock_error_ns``; the last replay of the block has no parts there.
    """
    if engine.device.kind == "soft":
        watched = {one.exec: one.graph for one in engine.rounds.values()}
        with Trace.record(engine.device, watched) as trace:
            yield trace
        return
    trace = Trace(engine.device.describe())
    parts: dict[int, dict[str, int]] = {}
    replays = engine._replays
    replays.on_parts = parts.__setitem__
    first = replays.number
    try:
        yield trace
    finally:
        replays.on_parts = None
    engine.device.synchronize()
    tie = tie_clocks(engine.device)
    trace.clock_error_ns = tie.error_ns
    for replay, stamps in parts.items():
        if replay > first:
            _add_parts(trace, replay - first, {k: tie.host_ns(v) for k, v in stamps.items() if v})
    decoder = next(iter(engine.rounds.values())).parts.decoder
    for span in decoder.timeline():
        if span.replay > first:
            trace.events.append(
                TraceEvent(span.step, "host", "grammar", "round", span.replay - first,
                           span.start_ns, span.end_ns)
            )  # fmt: skip
    trace.sort()


def _add_parts(trace: Trace, replay: int, at: dict[str, int]) -> None:
    for name, start, end in PARTS:
        if start not in at or end not in at:
            continue
        if name in WAITS:
            trace.waits.append(
                Wait("model", name, WAITS[name], replay, at[start], max(at[start], at[end]))
            )
        else:
            trace.events.append(
                TraceEvent(name, "kernel", "model", "round", replay, at[start], at[end])
            )
