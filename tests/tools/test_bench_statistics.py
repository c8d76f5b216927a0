"""Tests of the statistics, the command line and the charts that benchmarks share."""

from __future__ import annotations

import math
import random
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from graft.tools.bench import generation, serving
from graft.tools.bench.harness import Chart, draw
from graft.tools.bench.speculation_metrics import estimate_mean, estimate_ratio, student_t_95

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


def test_chart_shows_titles_and_series(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.svg"
    series = {"s & t": [(0, 0), (4, 0.5), (8, 1)], "one point": [(2, 1)]}
    draw([Chart("a < b", "x", "y", series), Chart("without series", "x", "y", {})], "note", path)
    text = path.read_text()
    ElementTree.fromstring(text)
    for words in ("a &lt; b", "s &amp; t", "one point", "without series"):
        assert words in text


def test_chart_without_matplotlib_is_refused_before_measuring(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(serving, "measure", lambda _: pytest.fail("measured"))
    assert serving.main(["--chart", str(tmp_path / "chart.svg")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "0"], "--tokens: must be a whole number of at least 1, not 0"),
        (["--runs", "2.5"], "--runs: must be a whole number of at least 1, not 2.5"),
    ],
)
def test_bench_counts_are_refused_by_name_and_value(capsys, options, words):
    with pytest.raises(SystemExit) as exit_info:
        generation.main(options)
    assert exit_info.value.code == 2
    assert words in capsys.readouterr().err
