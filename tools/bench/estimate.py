"""Means and ratios with their 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

#: Two-sided 95 % point of the normal distribution.
Z95 = 1.959964
#: Fewer independent parts give no interval.
LEAST = 4


def student95(freedom: int) -> float:
    """Two-sided 95 % point of Student's t (Abramowitz and Stegun 26.7.5), to 0.2 % from 3 on."""
    z = Z95
    series = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(series, 1))


def estimate(parts: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Ratio of two sums over independent parts, with its interval (Cochran, "Sampling", 1977, 6.3).

    Parts are what was drawn, such as prompts: (sum of the values in it, how many there are).
    """
    parts = [part for part in parts if part[1]]
    n = len(parts)
    below = sum(b for _, b in parts)
    if not n:
        return {"mean": None, "low": None, "high": None, "n": 0}
    mean = sum(a for a, _ in parts) / below
    if n < LEAST:
        return {"mean": mean, "low": None, "high": None, "n": n}
    spread = math.sqrt(n / (n - 1) * sum((a - mean * b) ** 2 for a, b in parts)) / below
    half = student95(n - 1) * spread
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n}


def estimate_mean(values: Sequence[float]) -> dict[str, Any]:
    """The mean of independent values, such as paired differences, with its interval."""
    return estimate([(value, 1) for value in values])
