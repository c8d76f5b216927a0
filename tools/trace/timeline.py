"""Write the timeline of traced rounds: JSON for Perfetto, and an SVG picture of one round.

In the picture, time runs to the right and each lane is a row. An exposed wait is a time in which a
lane had no work to run because it waited for a host step. The picture shows these waits in red.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph.drawing import COLOURS, OTHER_COLOURS
from graft.tools.bench.chart import ticks
from graft.tools.trace.record import Trace, TraceEvent, Wait

WIDTH = 1200
LEFT = 90
RIGHT = 24
TOP = 110
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
    bottom
        Vertical position of the time axis in pixels.
    """

    def __init__(self, trace: Trace):
        self.begin_ns = trace.events[0].start_ns
        self.end_ns = max(event.end_ns for event in trace.events)
        self.lanes = list(dict.fromkeys(event.lane for event in trace.events))
        self.bottom = TOP + LANE_HEIGHT * len(self.lanes)
        pixels = WIDTH - LEFT - RIGHT
        self._pixels_per_ns = pixels / max(self.end_ns - self.begin_ns, 1)
        self._labels: dict[tuple[str, bool], list[tuple[float, float]]] = {}

    def x(self, time_ns: float) -> float:
        """Return the horizontal position of a time."""
        return LEFT + (time_ns - self.begin_ns) * self._pixels_per_ns

    def y(self, lane: str) -> float:
        """Return the upper edge of the boxes of a lane."""
        return TOP + LANE_HEIGHT * self.lanes.index(lane)

    def draw_axis(self) -> list[str]:
        """Return the SVG elements of the time axis and its grid lines."""
        right = WIDTH - RIGHT
        label_y = self.bottom + 18
        parts = [
            f'<path d="M{LEFT},{self.bottom} H{right}" stroke="black"/>',
            f'<text x="{LEFT - 10}" y="{label_y}" text-anchor="end">time in µs</text>',
        ]
        duration_us = (self.end_ns - self.begin_ns) / 1000
        for tick_us in ticks(duration_us):
            if tick_us > duration_us:
                continue
            x = self.x(self.begin_ns + 1000 * tick_us)
            parts.append(f'<path d="M{x:.1f},{TOP - 20} V{self.bottom}" stroke="#e5e7eb"/>')
            parts.append(
                f'<text x="{x:.1f}" y="{label_y}" text-anchor="middle">{tick_us:,g}</text>'
            )
        return parts

    def draw_box(
        self, lane: str, start_ns: int, end_ns: int, name: str, colours: tuple[str, str]
    ) -> str:
        """Return the box of an event or wait as an SVG element.

        Parameters
        ----------
        lane
            Lane in whose row the box is drawn.
        start_ns, end_ns
            Times of ``time.monotonic_ns``.
        name
            Label. It is drawn in the box, above the box, or not at all, depending on the space.
        colours
            Fill and stroke colours.
        """
        x = self.x(start_ns)
        y = self.y(lane)
        width = max((end_ns - start_ns) * self._pixels_per_ns, 0.6)
        duration_us = (end_ns - start_ns) / 1000
        offset_us = (start_ns - self.begin_ns) / 1000
        title = escape(f"{name}: {duration_us:.1f} µs at {offset_us:.1f} µs")
        fill, stroke = colours
        label = self._draw_label(lane, x + width / 2, width, name)
        return (
            f'<g><title>{title}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
            f'height="{BOX_HEIGHT}" fill="{fill}" stroke="{stroke}" stroke-width="0.5"/>'
            f"{label}</g>"
        )

    def _draw_label(self, lane: str, middle: float, width: float, name: str) -> str:
        """Return the label of a box as an SVG element; empty if there is no space for it."""
        half = CHARACTER_WIDTH * len(name) / 2
        above = 2 * half + 6 > width
        taken = self._labels.setdefault((lane, above), [])
        left, right = middle - half, middle + half
        if above:
            if left < 0 or right > WIDTH:
                return ""
            if any(left < other_right and other_left < right for other_left, other_right in taken):
                return ""
        taken.append((left, right))
        y = self.y(lane) + (-5 if above else BOX_HEIGHT / 2 + 4)
        return (
            f'<text x="{middle:.2f}" y="{y:.0f}" text-anchor="middle" '
            f'font-size="11">{escape(name)}</text>'
        )


def _draw_legend(trace: Trace) -> list[str]:
    """Return the SVG elements that explain the colours of the boxes."""
    entries = [(kind, COLOURS.get(kind, OTHER_COLOURS)) for kind in event_kinds(trace)]
    entries.append(("exposed wait", WAIT_COLOURS))
    parts = []
    x = 24.0
    for name, (fill, stroke) in entries:
        parts.append(
            f'<rect x="{x:.0f}" y="58" width="12" height="12" fill="{fill}" stroke="{stroke}"/>'
        )
        parts.append(f'<text x="{x + 18:.0f}" y="68">{escape(name)}</text>')
        x += 36 + CHARACTER_WIDTH * len(name)
    parts.append(
        f'<text x="{x:.0f}" y="68" fill="#374151">Boxes narrower than a pixel appear as lines. '
        "Hover over a box for its name and duration.</text>"
    )
    return parts


def event_kinds(trace: Trace) -> list[str]:
    """Return the kinds of the trace's events in the order of their first event."""
    return list(dict.fromkeys(event.kind for event in trace.events))


def draw(trace: Trace, title: str) -> str:
    """Return the timeline of one replay as SVG, with exposed waits in red."""
    timeline = _Timeline(trace)
    duration_us = (timeline.end_ns - timeline.begin_ns) / 1000
    exposed_us = sum(wait.end_ns - wait.start_ns for wait in trace.waits) / 1000
    note = f"{trace.device}; {duration_us:.0f} µs, of which {exposed_us:.1f} µs are exposed waits"
    if trace.clock_error_ns:
        note += f"; clock error at most {trace.clock_error_ns / 1000:.1f} µs"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{timeline.bottom + 30}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="24" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="24" y="48" fill="#374151">{escape(note)}</text>',
        *_draw_legend(trace),
        *timeline.draw_axis(),
    ]
    for lane in timeline.lanes:
        y = timeline.y(lane) + BOX_HEIGHT / 2 + 4
        parts.append(f'<text x="{LEFT - 10}" y="{y:.0f}" text-anchor="end">{escape(lane)}</text>')
    boxes: list[tuple[TraceEvent | Wait, str, tuple[str, str]]] = []
    for wait in trace.waits:
        boxes.append((wait, f"waits for {wait.cause}", WAIT_COLOURS))
    for event in trace.events:
        boxes.append((event, event.name, COLOURS.get(event.kind, OTHER_COLOURS)))
    # The longest boxes come first, so that they get the space for labels above the boxes.
    boxes.sort(key=lambda box: box[0].start_ns - box[0].end_ns)
    for timed, name, colours in boxes:
        parts.append(timeline.draw_box(timed.lane, timed.start_ns, timed.end_ns, name, colours))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
