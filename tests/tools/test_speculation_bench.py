"""The benchmark of speculation counts what an engine counts, and its formulas are right."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from graft.grammar.grammar_spec import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.engine.stats import EngineStats
from graft.models.request import Request
from graft.tools.bench import speculation
from graft.tools.bench.chart import chart, ticks
from graft.tools.bench.estimate import estimate, estimate_mean, student95
from graft.tools.bench.speculation import Row
from graft.tools.demo_model import demo_model

#: Two-sided 95 % points of Student's t, as tables print them.
STUDENT = {3: 3.1824, 4: 2.7764, 6: 2.4469, 9: 2.2622, 30: 2.0423, 200: 1.9719}


@pytest.mark.parametrize("size", [4, 60])
def test_intervals_cover_the_mean_as_often_as_they_say(size):
    """Of intervals over normal samples of known mean about 95 % cover it, few samples or many."""
    assert {n: student95(n) for n in STUDENT} == pytest.approx(STUDENT, rel=0.002)
    rng = random.Random(5)
    covered = 0
    for _ in range(1000):
        found = estimate_mean([rng.gauss(0.3, 2.0) for _ in range(size)])
        covered += found["low"] <= 0.3 <= found["high"]
    assert abs(covered / 1000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 1000)


def test_a_ratio_of_sums_has_the_spread_of_its_jackknife():
    """Its interval agrees with leaving out one prompt at a time; empty prompts count nothing."""
    rng = np.random.default_rng(3)
    counts = rng.integers(3, 9, size=400)
    parts = [(float(rng.normal(2.5, 0.4) * n), int(n)) for n in counts]
    found = estimate([*parts, (0.0, 0)])
    sums = np.sum(parts, axis=0)
    left = (sums[0] - np.array(parts)[:, 0]) / (sums[1] - np.array(parts)[:, 1])
    half = 1.966 * math.sqrt(399 / 400 * np.sum((left - left.mean()) ** 2))
    assert found["mean"] == pytest.approx(sums[0] / sums[1]) and found["n"] == 400
    assert found["high"] - found["mean"] == pytest.approx(half, rel=0.01)
    assert estimate(parts[:3])["low"] is None and estimate([(0, 0)])["mean"] is None


@pytest.mark.parametrize(("rate", "drafts"), [(0.0, 3), (0.7, 0), (0.7, 5), (1.0, 4)])
def test_the_expected_length_is_that_of_all_outcomes(rate, drafts):
    """It is the mean of accepted drafts and bonus over what coins of one rate may bring."""
    mean = sum(
        math.prod(rate if coin else 1 - rate for coin in coins)
        * (1 + next((j for j, coin in enumerate(coins) if not coin), drafts))
        for coins in itertools.product((0, 1), repeat=drafts)
    )
    assert speculation.expected_length(rate, drafts) == pytest.approx(mean)


def test_depths_are_counted_up_to_the_first_refusal():
    """What was refused was reached; what lies behind it, or where no drafts were, was not."""
    rows = [Row(3, 4, 2), Row(5, 4, 4), Row(1, 0, 0), Row(1, 1, 0), Row(3, 2, 2)]
    assert speculation.by_depth(rows, 4) == ([4, 3, 2, 1], [3, 3, 1, 1])
    tree = [Row(3, 6, 2), Row(2, 6, 1)]  # six drafts, two levels
    assert speculation.by_depth(tree, 2) == ([2, 2], [2, 1])
    stats = EngineStats(draft_length=2)
    for row in tree:
        stats.count_row(*row)
    assert (stats.tested, stats.accepted) == ([2, 2], [2, 1])
    found = speculation.lengths({0: rows[:3], 1: rows[3:]})
    assert found["acceptance_length"] == {
        "mean": 3.0,
        "low": None,
        "high": None,
        "n": 2,
        "variance": pytest.approx(8 / 3),
    }
    assert found["tokens_a_round"]["mean"] == 13 / 5


def cell(**told: Any) -> dict[str, Any]:
    """A cell with nothing but what is told."""
    return {
        "drafter": "d",
        "masking": "fill",
        "length": 4,
        "tree": None,
        "verify": "greedy",
        "temperature": 0.0,
        "batch": 2,
        "by_prompt": [2.0, 3.0],
        "round_us": None,
    } | told


def test_differences_are_of_cells_that_differ_in_one_thing():
    """Masked against blind, a tree against chains of as many drafts, one verification and other,
    drafters against the first."""
    cells = [
        cell(),
        cell(length="auto"),
        cell(length="auto", masking="none"),
        cell(masking="none", by_prompt=[1.0, 2.5]),
        cell(length=2),
        cell(masking="probe", tree="2x3", by_prompt=[4.0, 3.5]),
        cell(drafter="e", masking=None, by_prompt=[2.0, 3.5]),
        cell(drafter="f", masking="lattice-probe", by_prompt=[2.0, 5.0]),
        cell(verify="coupled", temperature=1.0),
        cell(verify="rejection", temperature=1.0),
    ]
    found = {
        one["of"]: (one["mean"], one["length"], one["temperature"])
        for one in speculation.differences(cells)
    }
    assert found == {
        "fill - blind": (0.75, 4, 0.0),
        "2x3 - chain, fill": (1.25, 4, 0.0),
        "coupled - rejection": (0.0, 4, 1.0),
        "e - d, fill": (0.25, 4, 0.0),
        "f - d, fill": (1.0, 4, 0.0),
    }


def test_costs_weigh_tokens_by_survival_against_the_time_of_rows():
    """The longest chain's survival and each length's own round say how many drafts pay."""
    cells = [
        cell(
            drafter="none",
            masking=None,
            verify=None,
            length=0,
            round_us=100.0,
            tokens_a_second=1.0,
        ),
        cell(length=1, round_us=120.0, tokens_a_second=2.0),
        cell(length=3, round_us=200.0, tokens_a_second=3.0, accepted=[60, 30, 10], rounds=80),
        cell(length=2, tree="2x2", round_us=1.0, tokens_a_second=9.0),
    ]
    (found,) = speculation.costs(cells)
    assert [(at["length"], at["rows"], at["measured"]) for at in found["lengths"]] == [
        (0, 2, 1.0),
        (1, 4, 2.0),
        (3, 8, 3.0),
    ]
    assert [at["tokens_a_second"] for at in found["lengths"]] == pytest.approx(
        [2 / 100e-6, 2 * 1.75 / 120e-6, 2 * 2.25 / 200e-6]
    )
    assert found["best"] == 1


def test_charts_place_points_by_their_axes():
    """A point at the end of both axes stands where they end; names are escaped; empty is fine."""
    for top in (0.04, 0.9, 1.0, 7.0, 8.5, 1234.0):
        marks = ticks(top)
        assert marks[0] == 0 and marks[-2] < top <= marks[-1] * (1 + 1e-9) and len(marks) <= 9
    drawn = chart("a < b", "note", "x", "y", {"s & t": [(0, 0), (4, 0.5), (8, 1)], "none": []})
    root = ElementTree.fromstring(drawn)
    lines = [node.get("points") for node in root if node.tag.endswith("polyline")]
    points = np.array([list(map(float, point.split(","))) for point in lines[0].split()])
    assert points[1] == pytest.approx((points[0] + points[2]) / 2) and lines[1] == ""
    assert points[2, 0] > points[0, 0] and points[2, 1] < points[0, 1]
    frame = next(node for node in root if node.get("stroke") == "black").get("d")
    x, top, bottom, right = map(float, re.findall(r"[\d.]+", frame))
    assert points[[0, 2]].ravel() == pytest.approx([x, bottom, right, top], abs=0.1)
    assert ElementTree.fromstring(chart("", "", "", "", {})) is not None


def test_figures_are_those_of_the_engine(tmp_path, capsys, device):
    """Acceptance equals the engine's own counters, and all files tell of the same cells."""
    asked = ["--tasks", "4", "--batches", "2", "--max-tokens", "9", "--lengths", "3"]
    assert (
        speculation.main(
            [
                *asked,
                "--drafters",
                "eagle",
                "--masking",
                "fill",
                "--trees",
                "2x2",
                "4x9",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "speculation.json").read_text())
    cells = {(one["drafter"], one["length"], one["tree"]): one for one in found["cells"]}
    assert list(cells) == [("none", 0, None), ("eagle", 3, None), ("eagle", 3, "2x2")]
    assert [one["masking"] for one in cells.values()] == [None, "fill", "probe"]
    assert "draft_tree (4, 9) has no place" in found["refused"]["eagle, 3, (4, 9), fill"]
    target, head = demo_model()
    prompts = speculation.read_prompts(speculation.read_arguments(asked))
    with Engine(target, head, max_batch_size=2, draft_length=3, max_length=1024) as engine:
        outputs = engine.generate(
            [
                Request(prompt=one.request.prompt, grammar=one.request.grammar, max_tokens=9)
                for _, one in prompts
            ]
        )
        stats = engine.stats
    chain = cells["eagle", 3, None]
    assert (chain["tokens"], chain["rounds"]) == (stats.tokens, stats.row_rounds)
    assert (chain["reached"], chain["accepted"]) == (stats.tested, stats.accepted)
    assert chain["acceptance_length"]["mean"] == pytest.approx(stats.acceptance_length)
    assert chain["by_prompt"] == [pytest.approx(len(o.tokens) / o.rounds) for o in outputs]
    assert all(one["same_outputs"] == one["outputs"] == 4 for one in cells.values())
    assert all(
        0 < one["tokens_a_second"] == pytest.approx(one["tokens"] / one["seconds"])
        for one in cells.values()
    )
    (apart,) = found["differences"]
    assert apart["of"] == "2x2 - chain, fill" and apart["mean"] == pytest.approx(
        np.mean(np.subtract(cells["eagle", 3, "2x2"]["by_prompt"], chain["by_prompt"]))
    )
    assert found["times_are_a_gpus"] == (device.kind != "soft") == ("GPU's" not in said)
    with (tmp_path / "speculation.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * (1 + len(found["prompts"]))
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "acceptance.svg",
        "speed.svg",
        "front.svg",
    }
    for path in tmp_path.glob("*.svg"):
        assert "eagle" in ElementTree.fromstring(path.read_text())[-1].text
    assert "2x2 - chain, fill" in said and "eagle probe 3 drafts 2x2" in said


def test_prompts_of_a_file_have_kinds_and_what_cannot_be_measured_is_refused(tmp_path, capsys):
    """A kind is what stands before the id's last slash; a drafter that fits nowhere ends it."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a/b/1", "prompt": "x"}\n{"prompt": "y", "choice": ["z"]}\n')
    read = speculation.read_prompts(speculation.read_arguments(["--prompts", str(file)]))
    assert [kind for kind, _ in read] == ["a/b", "all"]
    assert read[1][1].request.grammar == GrammarSpec.choice(["z"])
    quick = [
        "--prompts",
        str(file),
        "--batches",
        "1",
        "--max-tokens",
        "2",
        "--lengths",
        "auto",
        "--trees",
        "--out",
        str(tmp_path),
    ]
    assert speculation.main([*quick, "--drafters", "no.such:Drafter", "ngram"]) == 2
    said = capsys.readouterr()
    assert "measured in no way: no.such:Drafter" in said.err and "No module named 'no'" in said.out
    found = json.loads((tmp_path / "speculation.json").read_text())
    assert [one["length"] for one in found["cells"]] == [0, "auto"] and found["costs"] == []
    assert speculation.main([*quick, "--max-length", "4"]) == 2
    assert "request 0 refused" in capsys.readouterr().err
    assert speculation.main([*quick, "--batches", "0"]) == 2
    with pytest.raises(speculation.OptionError, match="eagle is the demo model's own"):
        speculation.choose("ngram+eagle", None)
    assert speculation.read_arguments(["--most", "5"]).batches == [1, 2, 4]
