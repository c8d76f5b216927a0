"""Files of traced rounds: JSON for Perfetto, and a picture of one round."""

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
#: Fill and stroke of exposed waits.
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
    """Return the replay of median duration among those with the most events."""
    replays = [trace.select(graph, number) for graph, number in trace.replays()]
    max_events = max(len(replay.events) for replay in replays)
    complete = [replay for replay in replays if len(replay.events) == max_events]
    complete.sort(key=lambda one: max(e.end_ns for e in one.events) - one.events[0].start_ns)
    return complete[len(complete) // 2]


def write_trace(trace: Trace, path: Path) -> None:
    """Write the trace as JSON, and its median replay as SVG with the same stem."""
    path.write_text(trace.to_chrome())
    if trace.events:
        replay = median_replay(trace)
        first = replay.events[0]
        title = f"One {first.graph}, replay {first.replay}"
        path.with_suffix(".svg").write_text(draw(replay, title))


class _Timeline:
    """Scales of a picture in which time runs to the right and each lane is a row."""

    def __init__(self, trace: Trace):
        self.begin_ns = trace.events[0].start_ns
        self.end_ns = max(event.end_ns for event in trace.events)
        self.lanes = list(dict.fromkeys(event.lane for event in trace.events))
        self._scale = (WIDTH - LEFT - RIGHT) / max(self.end_ns - self.begin_ns, 1)

    def draw_box(
        self, lane: str, start_ns: int, end_ns: int, name: str, colours: tuple[str, str]
    ) -> str:
        """Return an event as an SVG element."""
        x = LEFT + (start_ns - self.begin_ns) * self._scale
        y = TOP + LANE_HEIGHT * self.lanes.index(lane)
        width = max((end_ns - start_ns) * self._scale, 0.6)
        duration_us = (end_ns - start_ns) / 1000
        title = f"{name}: {duration_us:.1f} µs at {(start_ns - self.begin_ns) / 1000:.1f} µs"
        fill, stroke = colours
        return (
            f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
            f'height="{BOX_HEIGHT}" fill="{fill}" stroke="{stroke}" stroke-width="0.5"/>'
            f'<text x="{x + width / 2:.2f}" y="{y + BOX_HEIGHT / 2 + 4:.0f}" text-anchor="middle" '
            f'font-size="11">{escape(_fit(name, width))}</text></g>'
        )


def _fit(name: str, width: float) -> str:
    """Shorten a name to the width of a box; empty if fewer than four characters fit."""
    max_characters = int((width - 6) / CHARACTER_WIDTH)
    if len(name) <= max_characters:
        return name
    return f"{name[: max_characters - 1]}…" if max_characters > 3 else ""


def draw(trace: Trace, title: str) -> str:
    """Return the timeline of one replay as SVG, with exposed waits in red."""
    timeline = _Timeline(trace)
    duration_us = (timeline.end_ns - timeline.begin_ns) / 1000
    exposed_us = sum(wait.end_ns - wait.start_ns for wait in trace.waits) / 1000
    note = f"{trace.device}; {duration_us:.0f} µs, exposed waits (red) {exposed_us:.1f} µs"
    if trace.clock_error_ns:
        note += f"; clock error at most {trace.clock_error_ns / 1000:.1f} µs"
    height = TOP + LANE_HEIGHT * len(timeline.lanes) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="24" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="24" y="48" fill="#374151">{escape(note)}</text>',
    ]
    for i, lane in enumerate(timeline.lanes):
        y = TOP + LANE_HEIGHT * i + BOX_HEIGHT / 2 + 4
        parts.append(f'<text x="{LEFT - 10}" y="{y:.0f}" text-anchor="end">{escape(lane)}</text>')
    for wait in trace.waits:
        name = f"waits for {wait.cause}"
        box = timeline.draw_box(wait.lane, wait.start_ns, wait.end_ns, name, WAIT_COLOURS)
        parts.append(box)
    for event in trace.events:
        colours = COLOURS.get(event.kind, OTHER_COLOURS)
        box = timeline.draw_box(event.lane, event.start_ns, event.end_ns, event.name, colours)
        parts.append(box)
    return "\n".join([*parts, "</svg>"]) + "\n"
