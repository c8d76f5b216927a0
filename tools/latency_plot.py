"""Histograms of the latency laboratory as one SVG: a panel per cell on one logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

import numpy as np

__all__ = ["histograms"]

WIDTH, HEIGHT, LEFT, GAP, BINS = 640, 44, 250, 14, 80


def histograms(title: str, series: Mapping[str, np.ndarray]) -> str:
    """Draw nanoseconds as histograms over microseconds.

    Parameters
    ----------
    title : str
        Heading; says which device it is.
    series : mapping of str to ndarray
        Label and samples in nanoseconds; values below 0.01 us are drawn there.
    """
    logs = {label: np.log10(np.maximum(values / 1000.0, 0.01)) for label, values in series.items()}
    low = math.floor(min(float(v.min()) for v in logs.values()))
    high = max(low + 1, math.ceil(max(float(v.max()) for v in logs.values())))
    total = 40 + len(logs) * (HEIGHT + GAP) + 40
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" '
           f'height="{total}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="10" y="20">{escape(title)}</text>']
    top = 40
    for label, values in logs.items():
        counts, _ = np.histogram(values, bins=BINS, range=(low, high))
        foot, step = top + HEIGHT, WIDTH / BINS
        out.append(f'<text x="{LEFT - 8}" y="{foot - 4}" text-anchor="end">{escape(label)}</text>')
        for i, count in enumerate(counts):
            tall = HEIGHT * count / counts.max()
            if count:
                out.append(f'<rect x="{LEFT + i * step:.1f}" y="{foot - tall:.1f}" '
                           f'width="{step - 0.5:.1f}" height="{max(tall, 0.5):.1f}" fill="#47c"/>')
        out.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{foot}" y2="{foot}" stroke="#999"/>')
        top += HEIGHT + GAP
    for power in range(low, high + 1):
        x = LEFT + WIDTH * (power - low) / (high - low)
        out.append(f'<text x="{x:.1f}" y="{top + 8}" text-anchor="middle">'
                   f"{10.0**power:g} us</text>")
    return "\n".join([*out, "</svg>\n"])
