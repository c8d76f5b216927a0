"""Line charts as SVG: both axes begin at 0, a legend stands beside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 960
HEIGHT = 440
LEFT = 70
TOP = 70
RIGHT = 300
BOTTOM = 56
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#374151")
#: Steps of an axis, at most.
TICKS = 8


def ticks(top: float) -> list[float]:
    """From 0 in steps of 1, 2 or 5 times a power of ten to the first that is not below `top`."""
    if top <= 0:
        return [0.0, 1.0]
    power = math.floor(math.log10(top / TICKS))
    step = next(
        s for s in (n * 10.0**p for p in (power, power + 1) for n in (1, 2, 5)) if top / s <= TICKS
    )
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def chart(
    title: str, note: str, across: str, up: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Return series of points, joined in their order, as SVG.

    Parameters
    ----------
    title, note : above the chart.
    across, up : what the axes show.
    series : points (x, y) by name, none below 0.
    """
    points = [point for line in series.values() for point in line]
    axes = [ticks(max((point[i] for point in points), default=0.0)) for i in (0, 1)]
    high = max(HEIGHT, TOP + BOTTOM + 20 * len(series))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * x / axes[0][-1],
            high - BOTTOM - (high - TOP - BOTTOM) * y / axes[1][-1],
        )

    def text(x: float, y: float, said: str, anchor: str = "start", more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(said)}</text>'

    (left, bottom), (right, top) = place(0, 0), place(axes[0][-1], axes[1][-1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{high}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        text(24, 28, title, more=' font-size="16" font-weight="bold"'),
        text(24, 48, note, more=' fill="#374151"'),
        text((left + right) / 2, high - 12, across, "middle"),
        text(
            16,
            (top + bottom) / 2,
            up,
            "middle",
            f' transform="rotate(-90 16 {(top + bottom) / 2:.1f})"',
        ),
    ]
    parts += [text(place(x, 0)[0], bottom + 18, f"{x:g}", "middle") for x in axes[0]]
    for y in axes[1]:
        at = place(0, y)[1]
        parts.append(text(left - 8, at + 4, f"{y:g}", "end"))
        parts.append(f'<path d="M{left},{at:.1f} H{right}" stroke="#e5e7eb"/>')
    parts.append(f'<path d="M{left},{top} V{bottom} H{right}" fill="none" stroke="black"/>')
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        dash = 4 * (number // len(COLOURS))
        placed = [place(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="2" stroke-dasharray="{dash or "none"}"/>'
        )
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>'
            f"{escape(f'{name}: {a:g}, {b:.4g}')}</title></circle>"
            for (x, y), (a, b) in zip(placed, line, strict=True)
        ]
        parts.append(text(right + 20, TOP + 20 * number, name, more=f' fill="{colour}"'))
    return "\n".join([*parts, "</svg>"]) + "\n"
