"""Tests of graft.tools.bench.estimate and graft.tools.bench.chart."""

from __future__ import annotations

import math
import random
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from graft.tools.bench.chart import chart, ticks
from graft.tools.bench.estimate import estimate_mean, estimate_ratio, student_t_95

#: Two-sided 95 % quantiles of Student's t from printed tables, by degrees of freedom.
STUDENT_T = {3: 3.1824, 4: 2.7764, 6: 2.4469, 9: 2.2622, 30: 2.0423, 200: 1.9719}


def test_student_t_quantiles_match_tables():
    assert {n: student_t_95(n) for n in STUDENT_T} == pytest.approx(STUDENT_T, rel=0.002)


@pytest.mark.parametrize("size", [4, 60])
def test_estimate_mean_interval_has_95_percent_coverage(size):
    """About 95 % of the intervals of random samples contain the mean of their distribution."""
    rng = random.Random(5)
    covered = 0
    for _ in range(1000):
        found = estimate_mean([rng.gauss(0.3, 2.0) for _ in range(size)])
        covered += found["low"] <= 0.3 <= found["high"]
    share = covered / 1000
    standard_error = math.sqrt(0.95 * 0.05 / 1000)
    assert abs(share - 0.95) < 4 * standard_error


def test_estimate_ratio_interval_matches_jackknife():
    rng = np.random.default_rng(3)
    counts = rng.integers(3, 9, size=400)
    samples = [(float(rng.normal(2.5, 0.4) * n), int(n)) for n in counts]
    found = estimate_ratio([*samples, (0.0, 0)])
    array = np.array(samples)
    numerator, denominator = array.sum(axis=0)
    left_out = (numerator - array[:, 0]) / (denominator - array[:, 1])
    squares = np.sum((left_out - left_out.mean()) ** 2)
    half = 1.966 * math.sqrt(399 / 400 * squares)
    assert found["n"] == 400
    assert found["mean"] == pytest.approx(numerator / denominator)
    assert found["high"] - found["mean"] == pytest.approx(half, rel=0.01)


def test_estimate_ratio_without_enough_samples_has_no_interval():
    three_samples = [(2.0, 1), (3.0, 1), (4.0, 1)]
    assert estimate_ratio(three_samples)["low"] is None
    assert estimate_ratio([(0, 0)])["mean"] is None


@pytest.mark.parametrize("maximum", [0.04, 0.9, 1.0, 7.0, 8.5, 1234.0])
def test_chart_ticks_cover_the_maximum(maximum):
    values = ticks(maximum)
    assert values[0] == 0
    assert values[-2] < maximum <= values[-1] * (1 + 1e-9)
    assert len(values) <= 9


def test_chart_places_points_on_axes():
    """Points at both ends of the axes are drawn at the corners of the plot area."""
    series = {"s & t": [(0, 0), (4, 0.5), (8, 1)], "none": []}
    root = ElementTree.fromstring(chart("a < b", "note", "x", "y", series))
    lines = [node.get("points") for node in root if node.tag.endswith("polyline")]
    points = np.array([list(map(float, point.split(","))) for point in lines[0].split()])
    assert lines[1] == ""
    assert points[1] == pytest.approx((points[0] + points[2]) / 2)
    assert points[2, 0] > points[0, 0]
    assert points[2, 1] < points[0, 1]
    axes = next(node for node in root if node.get("stroke") == "black").get("d")
    left, top, bottom, right = map(float, re.findall(r"[\d.]+", axes))
    assert points[[0, 2]].ravel() == pytest.approx([left, bottom, right, top], abs=0.1)


def test_chart_without_series_is_valid_svg():
    assert ElementTree.fromstring(chart("", "", "", "", {})) is not None
