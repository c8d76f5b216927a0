"""The picture of a trace: time runs to the right, every lane is a row."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from graft.cudagraph.drawing import COLOURS

if TYPE_CHECKING:
    from graft.cudagraph.trace import Trace

__all__ = ["draw"]

WIDTH, LEFT, RIGHT = 1200, 90, 24
TOP, ROW, BOX, GAP = 84, 74, 44, 16
CHAR = 6.6
WAIT = "#dc2626"
OTHER = ("#ffffff", "#374151")


def draw(trace: Trace, title: str) -> str:
    """Return the trace as an SVG document; names are in tooltips, and in boxes with room."""
    begin = min((event.start_ns for event in trace.events), default=0)
    end = max((event.end_ns for event in trace.events), default=1)
    scale = (WIDTH - LEFT - RIGHT) / max(end - begin, 1)
    lanes = list(dict.fromkeys(event.lane for event in trace.events))
    height = TOP + ROW * max(len(lanes), 1) + 52

    def x(ns: int) -> float:
        return LEFT + (ns - begin) * scale

    def y(lane: str) -> int:
        return TOP + ROW * lanes.index(lane)

    def box(lane: str, start: int, stop: int, name: str, fill: str, stroke: str) -> str:
        width, left = max((stop - start) * scale, 0.6), x(start)
        told = f"{name}: {(stop - start) / 1000:.1f} µs at {(start - begin) / 1000:.1f} µs"
        text = ""
        if width > CHAR * 4:
            room = int((width - 6) / CHAR)
            label = name if len(name) <= room else name[: room - 1] + "…"
            text = (
                f'<text x="{left + width / 2:.2f}" y="{y(lane) + BOX / 2 + 4:.0f}" '
                f'text-anchor="middle" font-size="11">{escape(label)}</text>'
            )
        return (
            f"<g><title>{escape(told)}</title>"
            f'<rect x="{left:.2f}" y="{y(lane)}" width="{width:.2f}" height="{BOX}" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="0.5"/>{text}</g>'
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="12">',
        f"<title>{escape(title or 'timeline')}</title>",
        '<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#fee2e2"/>'
        f'<line x1="0" y1="0" x2="0" y2="6" stroke="{WAIT}" stroke-width="2"/></pattern></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{RIGHT}" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="{RIGHT}" y="48" fill="#374151">{escape(_subtitle(trace))}</text>',
    ]
    for lane in lanes:
        parts.append(
            f'<text x="{LEFT - 10}" y="{y(lane) + BOX / 2 + 4:.0f}" text-anchor="end" '
            f'font-weight="bold" fill="#374151">{escape(lane)}</text>'
            f'<rect x="{LEFT}" y="{y(lane)}" width="{WIDTH - LEFT - RIGHT}" height="{BOX}" '
            'fill="#f9fafb"/>'
        )
    for wait in trace.waits:
        name = f"waits for {wait.cause}"
        parts.append(box(wait.lane, wait.start_ns, wait.end_ns, name, "url(#wait)", WAIT))
    for event in trace.events:
        fill, stroke = COLOURS.get(event.kind, OTHER)
        parts.append(box(event.lane, event.start_ns, event.end_ns, event.name, fill, stroke))
    bottom = TOP + ROW * len(lanes) - GAP
    parts += _axis(begin, end, bottom, scale) + _legend(trace, bottom + 40)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _subtitle(trace: Trace) -> str:
    exposed = sum(wait.ns for wait in trace.waits) / 1000
    text = f"{trace.device}; exposed waits {exposed:.1f} µs"
    if trace.clock_error_ns:
        text += f"; host and device clocks tied within {trace.clock_error_ns / 1000:.1f} µs"
    return text


def _axis(begin: int, end: int, y: int, scale: float) -> list[str]:
    step = 1
    while (end - begin) / step > 12:  # 1, 2, 5, 10, 20, ... ns
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    parts = []
    for at in range(0, end - begin + 1, step):
        x = LEFT + at * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 6}" stroke="#9ca3af"/>'
            f'<text x="{x:.1f}" y="{y + 19}" text-anchor="middle" fill="#6b7280" '
            f'font-size="10">{at / 1000:g} µs</text>'
        )
    return parts


def _legend(trace: Trace, y: int) -> list[str]:
    kinds = list(dict.fromkeys(event.kind for event in trace.events))
    entries = [(kind, *COLOURS.get(kind, OTHER)) for kind in kinds]
    if trace.waits:
        entries.append(("exposed wait", "url(#wait)", WAIT))
    parts = []
    x = float(LEFT)
    for name, fill, stroke in entries:
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" fill="{fill}" '
            f'stroke="{stroke}"/><text x="{x + 17:.0f}" y="{y}" fill="#374151">{name}</text>'
        )
        x += 34 + CHAR * len(name)
    return parts
