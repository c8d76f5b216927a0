"""Write the timeline of traced rounds: JSON for Perfetto, and an SVG picture of one round.

In the picture, time runs to the right and each lane is a row. An exposed wait is a time in which a
lane had no work to run because it waited for a host step. The picture shows these waits in red.
"""

from __future__ import annotations

import math
from pathlib import Path

from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import svg
from graft.cudagraph.graph.drawing import COLOURS, OTHER_COLOURS
from graft.tools.trace.record import Trace, TraceEvent, Wait

#: Sizes of the picture in pixels.
WIDTH = 1200
LEFT = 90
RIGHT = 24
TOP = 100
LANE_HEIGHT = 60
BOX_HEIGHT = 44
#: Fill and stroke colours of exposed waits.
WAIT_COLOURS = ("#fee2e2", "#dc2626")


def check_trace_path(path: Path) -> None:
    """Raise OptionError if a trace's path does not end in .json, or its folder does not exist."""
    if path.suffix != ".json":
        raise OptionError(f"--trace {path}: the name must end in .json")
    if not path.parent.is_dir():
        raise OptionError(f"--trace {path}: there is no folder {path.parent}")


def median_replay(trace: Trace) -> Trace:
    """Return the replay of median duration among the replays with the maximum number of events.

    Replays with fewer events were recorded only in part.
    """
    replays = [trace.select(graph, number) for graph, number in trace.replays()]
    max_events = max(len(replay.events) for replay in replays)
    complete = [replay for replay in replays if len(replay.events) == max_events]
    complete.sort(key=lambda replay: replay.end_ns - replay.start_ns)
    return complete[len(complete) // 2]


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace as JSON, and one replay as SVG to the same path with suffix ``.svg``.

    The replay is that of median duration. If the trace has no events, no picture is written.
    """
    path.write_text(trace.to_chrome())
    if trace.events:
        replay = median_replay(trace)
        first = replay.events[0]
        title = f"One {first.graph}, replay {first.replay}"
        path.with_suffix(".svg").write_text(draw(replay, title))


def draw(replay: Trace, title: str) -> str:
    """Return an SVG picture of the timeline of one replay, with exposed waits in red."""
    duration_us = (replay.end_ns - replay.start_ns) / 1000
    exposed_us = sum(wait.end_ns - wait.start_ns for wait in replay.waits) / 1000
    note = f"{replay.device}; {duration_us:.0f} µs, of which {exposed_us:.1f} µs are exposed waits"
    if replay.clock_error_ns:
        note += f"; clock error at most {replay.clock_error_ns / 1000:.1f} µs"
    lanes = list(dict.fromkeys(event.lane for event in replay.events))
    bottom = TOP + LANE_HEIGHT * len(lanes)
    scale = (WIDTH - LEFT - RIGHT) / max(duration_us, 0.001)  # pixels per microsecond
    parts = [svg.text(24, 46, note), *_draw_legend(replay), *_draw_axis(duration_us, scale, bottom)]
    for row, lane in enumerate(lanes):
        middle = TOP + LANE_HEIGHT * row + BOX_HEIGHT / 2
        parts.append(svg.text(LEFT - 10, middle + 4, lane, "end"))
    boxes: list[tuple[TraceEvent | Wait, str, tuple[str, str]]] = []
    for wait in replay.waits:
        boxes.append((wait, f"waits for {wait.cause}", WAIT_COLOURS))
    for event in replay.events:
        boxes.append((event, event.name, COLOURS.get(event.kind, OTHER_COLOURS)))
    for timed, name, colours in boxes:
        start_us = (timed.start_ns - replay.start_ns) / 1000
        length_us = (timed.end_ns - timed.start_ns) / 1000
        y = TOP + LANE_HEIGHT * lanes.index(timed.lane)
        hover = f"{name}: {length_us:.1f} µs at {start_us:.1f} µs"
        x = LEFT + start_us * scale
        width = max(length_us * scale, 0.6)
        parts.append(svg.box(x, y, width, BOX_HEIGHT, name, colours, hover))
    return svg.document(WIDTH, bottom + 30, title, parts)


def _draw_axis(duration_us: float, scale: float, bottom: float) -> list[str]:
    """Return the time axis, with 2 to 20 grid lines at multiples of a power of ten."""
    parts = [
        f'<path d="M{LEFT},{bottom} H{WIDTH - RIGHT}" stroke="black"/>',
        svg.text(LEFT - 10, bottom + 18, "time in µs", "end"),
    ]
    step_us = 10.0 ** math.floor(math.log10(max(duration_us, 0.001) / 2))
    for i in range(int(duration_us / step_us) + 1):
        x = LEFT + i * step_us * scale
        parts.append(f'<path d="M{x:.1f},{TOP - 10} V{bottom}" stroke="#e5e7eb"/>')
        parts.append(svg.text(x, bottom + 18, f"{i * step_us:,g}", "middle"))
    return parts


def _draw_legend(replay: Trace) -> list[str]:
    """Return the explanation of the colours of the boxes."""
    kinds = dict.fromkeys(event.kind for event in replay.events)
    entries = [(kind, COLOURS.get(kind, OTHER_COLOURS)) for kind in kinds]
    entries.append(("exposed wait", WAIT_COLOURS))
    parts = []
    x = 24.0
    for name, colours in entries:
        parts.append(svg.box(x, 60, 12, 12, "", colours))
        parts.append(svg.text(x + 18, 70, name))
        x += 36 + svg.CHARACTER_WIDTH * len(name)
    return [*parts, svg.text(x, 70, "Hover over a box for its name and duration.")]
