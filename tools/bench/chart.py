"""Draw line charts as SVG. Both axes start at 0, and the legend is on the right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

#: Width and minimum height of a chart in pixels.
WIDTH = 960
HEIGHT = 440
#: Margins around the plot area in pixels.
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
    first_power = math.floor(math.log10(maximum / MAX_TICKS))
    steps = []
    for power in (first_power, first_power + 1):
        for factor in (1, 2, 5):
            steps.append(factor * 10.0**power)
    step = next(step for step in steps if maximum / step <= MAX_TICKS)
    # Subtracting a small number keeps rounding errors from adding a tick above the maximum.
    last = math.ceil(maximum / step - 1e-9)
    return [i * step for i in range(last + 1)]


def _text(x: float, y: float, content: str, anchor: str = "start", attributes: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes}>{escape(content)}</text>'
    )


@dataclass(frozen=True)
class _Frame:
    """Plot area of a chart, and the scales of its axes.

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
        x_pixel = LEFT + width * x / self.x_ticks[-1]
        y_pixel = self.bottom - height * y / self.y_ticks[-1]
        return x_pixel, y_pixel

    def draw_axes(self, x_label: str, y_label: str) -> list[str]:
        """Return the SVG elements of the axes, grid lines, tick values and labels."""
        middle_x = (LEFT + self.right) / 2
        middle_y = (TOP + self.bottom) / 2
        rotation = f' transform="rotate(-90 16 {middle_y:.1f})"'
        parts = [
            _text(middle_x, self.height - 12, x_label, "middle"),
            _text(16, middle_y, y_label, "middle", rotation),
        ]
        for x in self.x_ticks:
            x_pixel = self.to_pixels(x, 0)[0]
            parts.append(_text(x_pixel, self.bottom + 18, f"{x:g}", "middle"))
        for y in self.y_ticks:
            y_pixel = self.to_pixels(0, y)[1]
            parts.append(_text(LEFT - 8, y_pixel + 4, f"{y:g}", "end"))
            parts.append(f'<path d="M{LEFT},{y_pixel:.1f} H{self.right}" stroke="#e5e7eb"/>')
        parts.append(
            f'<path d="M{LEFT},{TOP} V{self.bottom} H{self.right}" fill="none" stroke="black"/>'
        )
        return parts

    def draw_series(self, number: int, name: str, points: Points) -> list[str]:
        """Return the SVG elements of one line, its points and its entry in the legend.

        Parameters
        ----------
        number
            Number of the series, which determines its colour and its row in the legend. There are
            fewer colours than possible series; when a colour is used again, its line is dashed.
        name
            Name of the series.
        points
            Points (x, y) of the series.
        """
        colour = COLOURS[number % len(COLOURS)]
        dash = 4 * (number // len(COLOURS))
        pixels = [self.to_pixels(x, y) for x, y in points]
        coordinates = [f"{x:.1f},{y:.1f}" for x, y in pixels]
        path = " ".join(coordinates)
        dash_array = dash or "none"
        parts = [
            f'<polyline points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="2" stroke-dasharray="{dash_array}"/>'
        ]
        for (x, y), (x_value, y_value) in zip(pixels, points, strict=True):
            title = escape(f"{name}: {x_value:g}, {y_value:.4g}")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
                f"<title>{title}</title></circle>"
            )
        legend_y = TOP + 20 * number
        parts.append(_text(self.right + 20, legend_y, name, attributes=f' fill="{colour}"'))
        return parts


def chart(title: str, note: str, x_label: str, y_label: str, series: Mapping[str, Points]) -> str:
    """Return a line chart as SVG.

    Parameters
    ----------
    title, note
        Two lines of text above the chart.
    x_label, y_label
        Labels of the axes.
    series
        Points (x, y) of each series by its name, in the order in which they are connected. Values
        must not be negative.
    """
    points = [point for line in series.values() for point in line]
    max_x = max((x for x, _ in points), default=0.0)
    max_y = max((y for _, y in points), default=0.0)
    legend_height = 20 * len(series)
    height = max(HEIGHT, TOP + BOTTOM + legend_height)
    frame = _Frame(height, ticks(max_x), ticks(max_y))
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
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
