"""Draws the benchmark's times: for each subject, time by quantile, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["plot"]

_COLOURS = ("#0b6e4f", "#c8553d", "#e0a458", "#3d5a80", "#7d4f9e")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 360, 260, 60, 40, 90
_TICKS = ((0.0, "0"), (0.5, "50"), (0.9, "90"), (0.99, "99"), (0.999, "99.9"))


def plot(answers: dict[str, list[dict[str, Any]]]) -> str:
    """An SVG with two panels: compile times in milliseconds, mask fills in microseconds."""
    compiles = {
        name: [a["compile_s"] * 1e3 for a in found if a["outcome"] == "compiled"]
        for name, found in answers.items()
    }
    fills = {
        name: [ns / 1e3 for a in found if a["outcome"] == "compiled" for ns in a["fill_ns"]]
        for name, found in answers.items()
    }
    total = _LEFT + 2 * _WIDTH + _GAP + 20
    body = _panel("first compile, ms", compiles, _LEFT)
    body += _panel("mask fill, us", fills, _LEFT + _WIDTH + _GAP)
    for i, name in enumerate(answers):
        at = _LEFT + 130 * i
        body.append(f'<rect x="{at}" y="8" width="14" height="4" fill="{_COLOURS[i % 5]}"/>')
        body.append(f'<text x="{at + 20}" y="14">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{_HEIGHT + 90}" '
        'font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="white"/>' + "".join(body) + "</svg>\n"
    )


def _panel(title: str, series: dict[str, list[float]], left: int) -> list[str]:
    values = [v for found in series.values() for v in found if v > 0]
    low = math.floor(math.log10(min(values, default=1.0)))
    high = max(low + 1, math.ceil(math.log10(max(values, default=10.0))))

    def x(quantile: float) -> float:
        """The tail gets room: the scale is -log10(1 - q), cut at 99.99 %."""
        return left + _WIDTH * -math.log10(max(1 - quantile, 1e-4)) / 4

    def y(value: float) -> float:
        share = (math.log10(max(value, 10.0**low)) - low) / (high - low)
        return _TOP + _HEIGHT * (1 - share)

    out = [f'<text x="{left}" y="{_TOP - 8}">{title}, by quantile (%)</text>']
    for power in range(low, high + 1):
        at = y(10.0**power)
        out.append(_line(left, at, left + _WIDTH, at))
        out.append(f'<text x="{left - 8}" y="{at + 4}" text-anchor="end">{10.0**power:g}</text>')
    for quantile, label in _TICKS:
        at, foot = x(quantile), _TOP + _HEIGHT
        out.append(_line(at, _TOP, at, foot))
        out.append(f'<text x="{at}" y="{foot + 18}" text-anchor="middle">{label}</text>')
    for i, found in enumerate(series.values()):
        out.append(_curve(found, x, y, _COLOURS[i % 5]))
    return out


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _curve(values: Sequence[float], x: Any, y: Any, colour: str) -> str:
    if not values:
        return ""
    quantiles = 1 - np.logspace(0, -4, 120)
    levels = np.quantile(np.asarray(values), quantiles)
    points = " ".join(f"{x(q):.1f},{y(v):.1f}" for q, v in zip(quantiles, levels, strict=True))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
