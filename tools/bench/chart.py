"""Line charts as SVG, with both axes starting at 0 and a legend on the right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 960
HEIGHT = 440
LEFT = 70
TOP = 70
RIGHT = 300
BOTTOM = 56
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#374151")
#: Maximum number of tick intervals of an axis.
MAX_TICKS = 8

Points = Sequence[tuple[float, float]]


def ticks(maximum: float) -> list[float]:
    """Return tick values from 0 to the first one that is at least `maximum`.

    The step is 1, 2 or 5 times a power of ten.
    """
    if maximum <= 0:
        return [0.0, 1.0]
    power = math.floor(math.log10(maximum / MAX_TICKS))
    steps = [n * 10.0**p for p in (power, power + 1) for n in (1, 2, 5)]
    step = next(step for step in steps if maximum / step <= MAX_TICKS)
    return [i * step for i in range(math.ceil(maximum / step - 1e-9) + 1)]


def _text(x: float, y: float, content: str, anchor: str = "start", attributes: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes}>{escape(content)}</text>'
    )


@dataclass(frozen=True)
class _Frame:
    """Plot area of a chart and the scales of its axes.

    Attributes
    ----------
    height
        Height of the picture in pixels.
    x_ticks, y_ticks
        Tick values of the axes.
    """

    height: int
    x_ticks: list[float]
    y_ticks: list[float]

    @property
    def right(self) -> float:
        return WIDTH - RIGHT

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def to_pixels(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel coordinates of a data point."""
        width = self.right - LEFT
        height = self.bottom - TOP
        return LEFT + width * x / self.x_ticks[-1], self.bottom - height * y / self.y_ticks[-1]

    def draw_axes(self, x_label: str, y_label: str) -> list[str]:
        """Return SVG elements of axes, grid lines, tick values and labels."""
        middle = (TOP + self.bottom) / 2
        rotation = f' transform="rotate(-90 16 {middle:.1f})"'
        parts = [
            _text((LEFT + self.right) / 2, self.height - 12, x_label, "middle"),
            _text(16, middle, y_label, "middle", rotation),
        ]
        for x in self.x_ticks:
            parts.append(_text(self.to_pixels(x, 0)[0], self.bottom + 18, f"{x:g}", "middle"))
        for y in self.y_ticks:
            y_pixel = self.to_pixels(0, y)[1]
            parts.append(_text(LEFT - 8, y_pixel + 4, f"{y:g}", "end"))
            parts.append(f'<path d="M{LEFT},{y_pixel:.1f} H{self.right}" stroke="#e5e7eb"/>')
        parts.append(
            f'<path d="M{LEFT},{TOP} V{self.bottom} H{self.right}" fill="none" stroke="black"/>'
        )
        return parts

    def draw_series(self, number: int, name: str, points: Points) -> list[str]:
        """Return SVG elements of one line, its points and its entry in the legend."""
        colour = COLOURS[number % len(COLOURS)]
        dash = 4 * (number // len(COLOURS))
        pixels = [self.to_pixels(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        parts = [
            f'<polyline points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="2" stroke-dasharray="{dash or "none"}"/>'
        ]
        for (x, y), (x_value, y_value) in zip(pixels, points, strict=True):
            title = escape(f"{name}: {x_value:g}, {y_value:.4g}")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
                f"<title>{title}</title></circle>"
            )
        legend = _text(self.right + 20, TOP + 20 * number, name, attributes=f' fill="{colour}"')
        return [*parts, legend]


def chart(title: str, note: str, x_label: str, y_label: str, series: Mapping[str, Points]) -> str:
    """Return a line chart as SVG.

    Parameters
    ----------
    title, note
        Two lines above the chart.
    x_label, y_label
        Labels of the axes.
    series
        Points (x, y) by name of the series, in the order in which they are connected. No value is
        negative.
    """
    points = [point for line in series.values() for point in line]
    frame = _Frame(
        max(HEIGHT, TOP + BOTTOM + 20 * len(series)),
        ticks(max((x for x, _ in points), default=0.0)),
        ticks(max((y for _, y in points), default=0.0)),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{frame.height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(24, 28, title, attributes=' font-size="16" font-weight="bold"'),
        _text(24, 48, note, attributes=' fill="#374151"'),
        *frame.draw_axes(x_label, y_label),
    ]
    for number, (name, line) in enumerate(series.items()):
        parts += frame.draw_series(number, name, line)
    return "\n".join([*parts, "</svg>"]) + "\n"
