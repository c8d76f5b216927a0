"""Timelines of an engine's rounds: every node on the soft device, parts and host steps on CUDA."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import StreamLane
from graft.models.engine.engine import Engine
from graft.models.engine.replay import ReplayInFlight
from graft.tools.trace.record import Trace, TraceEvent, Wait, record

CLOCK = Path(__file__).parents[1] / "kernels" / "clock.cu"
TRIES = 16


def tie_clocks(device: Device) -> tuple[int, int]:
    """Return (offset, error) in ns: device time plus offset is ``time.monotonic_ns`` within error.

    The device's clock is read between two readings of the host's, so half their distance bounds the
    error (Cristian's method); of several tries the closest pair counts.
    """
    kernel = device.load(CLOCK)["stamp_ns"]
    out = device.zeros((1,), "uint64")
    stream = device.stream("clock")
    lane = StreamLane(stream)
    found = []
    for _ in range(TRIES):
        before = time.monotonic_ns()
        lane.kernel(kernel, 1, 1, [out, 0])
        stream.synchronize()
        after = time.monotonic_ns()
        found.append(((after - before + 1) // 2, (before + after) // 2 - int(out.to_host()[0])))
    stream.close()
    error, offset = min(found)
    return offset, error


@contextmanager
def trace_rounds(engine: Engine) -> Iterator[Trace]:
    """Record the rounds that an engine replays inside the block; the trace is full afterwards.

    On the soft device the driver tells the begin and end of every node. On CUDA hardware the device
    stamps the borders of a round's parts, and host steps are timed on the host's clock, tied to the
    device's within ``Trace.clock_error_ns``.
    """
    engine.synchronize()  # rounds launched before the block do not belong to it
    if engine.device.kind == "soft":
        watched = {
            exe: graph
            for one in engine.round_graphs.values()
            for exe, graph in zip(one.execs, one.graphs, strict=True)
        }
        with record(engine.device, watched) as trace:
            yield trace
            engine.synchronize()
        return
    if not engine.options.timeline:
        raise OptionError("on CUDA rounds are traced of engines with timeline=True")
    trace = Trace(engine.device.describe())
    replays = engine._replays
    first = replays.launched
    stamped: list[tuple[ReplayInFlight, list[int]]] = []

    def collect(flight: ReplayInFlight, stamps: list[int]) -> None:
        stamped.append((flight, stamps))

    replays.on_parts = collect
    try:
        yield trace
        engine.synchronize()
    finally:
        replays.on_parts = None
    offset, trace.clock_error_ns = tie_clocks(engine.device)
    for flight, stamps in stamped:
        for part, start, end in zip(flight.graph.timed, stamps, stamps[1:], strict=False):
            if not (start and end):
                continue
            at = (flight.number - first, start + offset, max(start, end) + offset)
            if part.waits_for:
                trace.waits.append(Wait("model", part.name, part.waits_for, *at))
            else:
                trace.events.append(TraceEvent(part.name, "kernel", "model", "round", *at))
    parts = next(iter(engine.round_graphs.values())).parts
    for span in parts.decoder.timeline():
        if span.replay > first:
            at = (span.replay - first, span.start_ns, span.end_ns)
            trace.events.append(TraceEvent(span.step, "host", "grammar", "round", *at))
    trace.sort()
