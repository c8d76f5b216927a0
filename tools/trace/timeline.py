"""Write the timeline of traced rounds: JSON for Perfetto, and an SVG picture of one round.

An exposed wait is a time in which the device had no work on a lane because it waited for a host
step; the picture shows these waits in red.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from graft.cudagraph.drawing import COLOURS, OTHER_COLOURS
from graft.cudagraph.errors import OptionError
from graft.tools.trace.record import Trace

WIDTH = 1200
LEFT = 90
RIGHT = 24
TOP = 70
LANE_HEIGHT = 74
BOX_HEIGHT = 44
CHARACTER_WIDTH = 6.6
#: Fill and stroke colours of exposed waits.
WAIT_COLOURS = ("#fee2e2", "#dc2626")


def check_trace_path(path: Path) -> None:
    """Check that a trace can be written to a path.

    Raises
    ------
    OptionError
        If the name does not end in ``.json`` or the folder does not exist.
    """
    if path.suffix != ".json":
        raise OptionError(f"--trace {path}: the name must end in .json")
    if not path.parent.is_dir():
        raise OptionError(f"--trace {path}: there is no folder {path.parent}")


def median_replay(trace: Trace) -> Trace:
    """Return the replay of median duration among the replays with the most events.

    Replays with fewer events were recorded only in part.
    """
    replays = [trace.select(graph, number) for graph, number in trace.replays()]
    max_events = max(len(replay.events) for replay in replays)
    complete = [replay for replay in replays if len(replay.events) == max_events]
    complete.sort(key=_duration_ns)
    return complete[len(complete) // 2]


def _duration_ns(replay: Trace) -> int:
    """Return the time from the first start to the last end of an event."""
    end_ns = max(event.end_ns for event in replay.events)
    return end_ns - replay.events[0].start_ns


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace as JSON, and its median replay as SVG to the same path with suffix ``.svg``.

    If the trace has no events, no picture is written.
    """
    path.write_text(trace.to_chrome())
    if trace.events:
        replay = median_replay(trace)
        first = replay.events[0]
        title = f"One {first.graph}, replay {first.replay}"
        path.with_suffix(".svg").write_text(draw(replay, title))


class _Timeline:
    """Scales of a picture in which time runs to the right and each lane is a row.

    Attributes
    ----------
    begin_ns, end_ns
        Start of the first event and end of the last one.
    lanes
        Names of the lanes, from top to bottom.
    """

    def __init__(self, trace: Trace):
        self.begin_ns = trace.events[0].start_ns
        self.end_ns = max(event.end_ns for event in trace.events)
        self.lanes = list(dict.fromkeys(event.lane for event in trace.events))
        pixels = WIDTH - LEFT - RIGHT
        self._pixels_per_ns = pixels / max(self.end_ns - self.begin_ns, 1)

    def draw_box(
        self,
        lane: str,
        start_ns: int,
        end_ns: int,
        name: str,
        colours: tuple[str, str],
    ) -> str:
        """Return the box of an event or wait as an SVG element.

        Parameters
        ----------
        lane
            Lane in whose row the box is drawn.
        start_ns, end_ns
            Times of ``time.monotonic_ns``.
        name
            Text of the box, shortened to its width.
        colours
            Fill and stroke colours.
        """
        offset_ns = start_ns - self.begin_ns
        duration_ns = end_ns - start_ns
        x = LEFT + offset_ns * self._pixels_per_ns
        y = TOP + LANE_HEIGHT * self.lanes.index(lane)
        width = max(duration_ns * self._pixels_per_ns, 0.6)
        text_x = x + width / 2
        text_y = y + BOX_HEIGHT / 2 + 4
        text = escape(_fit(name, width))
        duration_us = duration_ns / 1000
        offset_us = offset_ns / 1000
        title = escape(f"{name}: {duration_us:.1f} µs at {offset_us:.1f} µs")
        fill, stroke = colours
        return (
            f'<g><title>{title}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
            f'height="{BOX_HEIGHT}" fill="{fill}" stroke="{stroke}" stroke-width="0.5"/>'
            f'<text x="{text_x:.2f}" y="{text_y:.0f}" text-anchor="middle" '
            f'font-size="11">{text}</text></g>'
        )


def _fit(name: str, width: float) -> str:
    """Shorten a name to the width of a box in pixels.

    The result is empty if the name must be shortened to fewer than four characters.
    """
    max_characters = int((width - 6) / CHARACTER_WIDTH)
    if len(name) <= max_characters:
        return name
    if max_characters <= 3:
        return ""
    return name[: max_characters - 1] + "…"


def draw(trace: Trace, title: str) -> str:
    """Return the timeline of one replay as SVG, with exposed waits in red."""
    timeline = _Timeline(trace)
    duration_us = (timeline.end_ns - timeline.begin_ns) / 1000
    exposed_us = sum(wait.end_ns - wait.start_ns for wait in trace.waits) / 1000
    note = f"{trace.device}; {duration_us:.0f} µs, exposed waits (red) {exposed_us:.1f} µs"
    if trace.clock_error_ns:
        note += f"; clock error at most {trace.clock_error_ns / 1000:.1f} µs"
    height = TOP + LANE_HEIGHT * len(timeline.lanes) + 10
    heading = escape(title)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="24" y="28" font-size="16" font-weight="bold">{heading}</text>',
        f'<text x="24" y="48" fill="#374151">{escape(note)}</text>',
    ]
    for i, lane in enumerate(timeline.lanes):
        y = TOP + LANE_HEIGHT * i + BOX_HEIGHT / 2 + 4
        x = LEFT - 10
        parts.append(f'<text x="{x}" y="{y:.0f}" text-anchor="end">{escape(lane)}</text>')
    for wait in trace.waits:
        name = f"waits for {wait.cause}"
        box = timeline.draw_box(
            wait.lane,
            wait.start_ns,
            wait.end_ns,
            name,
            WAIT_COLOURS,
        )
        parts.append(box)
    for event in trace.events:
        colours = COLOURS.get(event.kind, OTHER_COLOURS)
        box = timeline.draw_box(
            event.lane,
            event.start_ns,
            event.end_ns,
            event.name,
            colours,
        )
        parts.append(box)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
