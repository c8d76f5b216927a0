"""Exponential moving average."""

from __future__ import annotations

import math

__all__ = ["Ema"]


class Ema:
    """Exponential moving average of a positive quantity.

    Parameters
    ----------
    weight
        Weight of a new sample, from 0 to 1. The first sample becomes the average.
    max_ratio
        Samples greater than this multiple of the average are clamped to it, so that a single
        outlier has little effect.

    Attributes
    ----------
    value : float or None
        Current average; None before the first sample.
    """

    def __init__(self, weight: float, max_ratio: float = math.inf) -> None:
        self._weight = weight
        self._max_ratio = max_ratio
        self.value: float | None = None

    def update(self, sample: float) -> None:
        """Add a sample."""
        if not self.value:
            self.value = sample
            return
        clamped = min(sample, self._max_ratio * self.value)
        self.value += self._weight * (clamped - self.value)

    def scale(self, factor: float) -> None:
        """Multiply the average by a factor; without samples, do nothing."""
        if self.value is not None:
            self.value *= factor
