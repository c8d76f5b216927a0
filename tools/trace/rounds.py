"""Record timelines of an engine's decoding rounds.

A round is one replay of the engine's graph. On the soft device, a timeline contains every graph
node. On CUDA hardware, whose driver does not report when a node runs, it contains the host steps
and the parts of a round, such as the target forward pass. Kernels of the round write a time stamp
between two parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph.graph import Graph, GraphExec
from graft.cudagraph.lanes import StreamLane
from graft.models.engine.engine import Engine
from graft.models.engine.replay import ReplayInFlight
from graft.tools.trace.record import Trace, TraceEvent, Wait, record

CLOCK_KERNELS = Path(__file__).parents[1] / "kernels" / "clock.cu"
#: Number of measurements of the clock offset. The one with the smallest error is used.
CLOCK_SAMPLES = 16


def clock_offset(device: Device) -> tuple[int, int]:
    """Measure the offset between the device's clock and the host's clock, in nanoseconds.

    Return the offset and its maximum error. Device time plus offset is a ``time.monotonic_ns``
    value. A kernel reads the device's clock between two readings of the host's clock. The error is
    at most half the time between these two readings (Cristian's algorithm).
    """
    kernel = device.load(CLOCK_KERNELS)["stamp_ns"]
    stamps = device.zeros((1,), "uint64")
    stream = device.stream("clock")
    lane = StreamLane(stream)
    samples = []
    for _ in range(CLOCK_SAMPLES):
        before = time.monotonic_ns()
        lane.kernel(kernel, 1, 1, [stamps, 0])
        stream.synchronize()
        after = time.monotonic_ns()
        error_ns = (after - before + 1) // 2
        device_ns = int(stamps.to_host()[0])
        samples.append((error_ns, (before + after) // 2 - device_ns))
    stream.close()
    error_ns, offset_ns = min(samples)
    return offset_ns, error_ns


@contextmanager
def trace_rounds(engine: Engine) -> Iterator[Trace]:
    """Record the rounds that an engine replays while the block runs.

    The yielded trace is empty until the block ends. Each event has the name of its round graph,
    which contains the kind of the graph (`GraphKey`). On the soft device, the driver reports the
    start and the end of every node. On CUDA hardware, the engine must have been created with
    ``timeline=True``. There, the parts of a round are timed on the device's clock and converted to
    the host's clock; `Trace.clock_error_ns` bounds the error of the conversion.
    """
    engine.synchronize()  # exclude rounds that were launched before the block
    if engine.device.kind == "soft":
        watched: dict[GraphExec, Graph] = {}
        for round_graph in engine.graphs.values():
            watched.update(zip(round_graph.execs, round_graph.graphs, strict=True))
        with record(engine.device, watched) as trace:
            yield trace
            engine.synchronize()
        return
    if not engine.options.timeline:
        raise OptionError("tracing on CUDA hardware requires an engine with timeline=True")
    trace = Trace(engine.device.describe())
    replays = engine._replays
    launched_before = replays.launched
    stamped: list[tuple[ReplayInFlight, list[int]]] = []

    def collect(flight: ReplayInFlight, stamps: list[int]) -> None:
        stamped.append((flight, stamps))

    replays.on_parts = collect
    try:
        yield trace
        engine.synchronize()
    finally:
        replays.on_parts = None
    offset_ns, trace.clock_error_ns = clock_offset(engine.device)
    for flight, stamps in stamped:
        _add_parts(trace, flight, stamps, flight.number - launched_before, offset_ns)
    names = {flight.number: flight.graph.graphs[0].name for flight, _ in stamped}
    for span in engine._resources.decoder.timeline():
        if span.replay in names:
            times = (span.replay - launched_before, span.start_ns, span.end_ns)
            name = names[span.replay]
            trace.events.append(TraceEvent(span.step, "host", "grammar", name, *times))
    trace.sort()


def _add_parts(
    trace: Trace, flight: ReplayInFlight, stamps: list[int], replay: int, offset_ns: int
) -> None:
    """Add the parts of a completed replay to a trace.

    A part is a section of the round, such as verification, or a wait. `stamps` are the device times
    at which the parts begin and end; a time is 0 if no kernel wrote it. `offset_ns` converts device
    times to the host's clock. `replay` is the number of the replay in the trace.
    """
    for part, start, end in zip(flight.graph.timed, stamps, stamps[1:], strict=False):
        if start == 0 or end == 0:
            continue
        start_ns = start + offset_ns
        end_ns = max(start, end) + offset_ns
        times = (replay, start_ns, end_ns)
        if part.waits_for:
            trace.waits.append(Wait("model", part.name, part.waits_for, *times))
        else:
            name = flight.graph.graphs[0].name
            trace.events.append(TraceEvent(part.name, "kernel", "model", name, *times))
