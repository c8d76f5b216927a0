"""The timeline of traced rounds, for Perfetto and as a picture."""

from __future__ import annotations

from html import escape
from pathlib import Path

from graft.cudagraph.drawing import COLOURS, OTHER_COLOURS
from graft.cudagraph.errors import OptionError
from graft.tools.trace.record import Trace

WIDTH = 1200
LEFT = 90
TOP = 70
ROW = 74
BOX = 44
CHAR = 6.6
WAIT = "#dc2626"


def check_trace_path(path: Path) -> None:
    """Refuse a path that could not be written later."""
    if path.suffix != ".json":
        raise OptionError(f"--trace {path}: the name must end in .json")
    if not path.parent.is_dir():
        raise OptionError(f"--trace {path}: there is no folder {path.parent}")


def typical(trace: Trace) -> Trace:
    """The replay of median length, of those with the most events."""
    parts = [trace.only(*which) for which in trace.replays()]
    most = max(len(part.events) for part in parts)
    full = [part for part in parts if len(part.events) == most]
    full.sort(key=lambda part: max(e.end_ns for e in part.events) - part.events[0].start_ns)
    return full[len(full) // 2]


def write_trace(trace: Trace, path: Path) -> None:
    """Write the whole trace as JSON and one typical round as a picture beside it."""
    path.write_text(trace.to_chrome())
    if trace.events:
        one = typical(trace)
        title = f"One {one.events[0].graph}, replay {one.events[0].replay}"
        path.with_suffix(".svg").write_text(draw(one, title))


def draw(trace: Trace, title: str) -> str:
    """Return a replay as SVG: time runs to the right, a row per lane, exposed waits in red."""
    begin = trace.events[0].start_ns
    end = max(event.end_ns for event in trace.events)
    scale = (WIDTH - LEFT - 24) / max(end - begin, 1)
    lanes = list(dict.fromkeys(event.lane for event in trace.events))
    height = TOP + ROW * len(lanes) + 10

    def box(lane: str, start: int, stop: int, name: str, fill: str, stroke: str) -> str:
        width = max((stop - start) * scale, 0.6)
        x = LEFT + (start - begin) * scale
        y = TOP + ROW * lanes.index(lane)
        room = int((width - 6) / CHAR)
        told = f"{name}: {(stop - start) / 1000:.1f} µs at {(start - begin) / 1000:.1f} µs"
        label = name if len(name) <= room else f"{name[: room - 1]}…" if room > 3 else ""
        return (
            f'<g><title>{escape(told)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
            f'height="{BOX}" fill="{fill}" stroke="{stroke}" stroke-width="0.5"/>'
            f'<text x="{x + width / 2:.2f}" y="{y + BOX / 2 + 4:.0f}" text-anchor="middle" '
            f'font-size="11">{escape(label)}</text></g>'
        )

    exposed = sum(wait.end_ns - wait.start_ns for wait in trace.waits) / 1000
    told = f"{trace.device}; {(end - begin) / 1000:.0f} µs, exposed waits (red) {exposed:.1f} µs"
    if trace.clock_error_ns:
        told += f"; clocks tied within {trace.clock_error_ns / 1000:.1f} µs"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="24" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="24" y="48" fill="#374151">{escape(told)}</text>',
    ]
    for i, lane in enumerate(lanes):
        y = TOP + ROW * i + BOX / 2 + 4
        parts.append(f'<text x="{LEFT - 10}" y="{y:.0f}" text-anchor="end">{escape(lane)}</text>')
    for w in trace.waits:
        parts.append(box(w.lane, w.start_ns, w.end_ns, f"waits for {w.cause}", "#fee2e2", WAIT))
    for e in trace.events:
        parts.append(box(e.lane, e.start_ns, e.end_ns, e.name, *COLOURS.get(e.kind, OTHER_COLOURS)))
    return "\n".join([*parts, "</svg>"]) + "\n"
