"""Means and ratios with 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

#: Two-sided 95 % quantile of the normal distribution.
Z95 = 1.959964
#: Smallest number of samples for which an interval is computed.
MIN_SAMPLES = 4


def student_t_95(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution.

    The quantile is computed with the expansion 26.7.5 of Abramowitz and Stegun. Its error is below
    0.2 % for three or more degrees of freedom.
    """
    z = Z95
    z3 = z**3
    z5 = z**5
    z7 = z**7
    z9 = z**9
    terms = (
        (z3 + z) / 4,
        (5 * z5 + 16 * z3 + 3 * z) / 96,
        (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / 384,
        (79 * z9 + 776 * z7 + 1482 * z5 - 1920 * z3 - 945 * z) / 92160,
    )
    correction = 0.0
    for power, term in enumerate(terms, 1):
        correction += term / degrees**power
    return z + correction


def estimate_ratio(samples: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Estimate the ratio of two sums over independent samples.

    The variance is computed as for the ratio estimator (Cochran, "Sampling Techniques", 1977, 6.3).

    Parameters
    ----------
    samples
        Pairs (numerator, denominator), one per independent sample. If a sample is a prompt, for
        example, the numerator is the sum of the values measured for the prompt, and the
        denominator is the number of these values. Samples whose denominator is 0 are ignored.

    Returns
    -------
    dict
        ``mean``, the limits ``low`` and ``high`` of the 95 % confidence interval, and the number
        ``n`` of samples. ``mean`` is None if there are no samples. The limits are None if there are
        fewer than `MIN_SAMPLES` samples.
    """
    samples = [sample for sample in samples if sample[1]]
    n = len(samples)
    if not n:
        return {"mean": None, "low": None, "high": None, "n": 0}
    numerator = sum(a for a, _ in samples)
    denominator = sum(b for _, b in samples)
    mean = numerator / denominator
    if n < MIN_SAMPLES:
        return {"mean": mean, "low": None, "high": None, "n": n}
    squares = 0.0
    for a, b in samples:
        squares += (a - mean * b) ** 2
    standard_error = math.sqrt(n / (n - 1) * squares) / denominator
    half = student_t_95(n - 1) * standard_error
    low = mean - half
    high = mean + half
    return {"mean": mean, "low": low, "high": high, "n": n}


def estimate_mean(values: Sequence[float]) -> dict[str, Any]:
    """Estimate the mean of independent values, such as paired differences."""
    return estimate_ratio([(value, 1) for value in values])
