"""Tests of the speculation benchmark: metrics, command line, and small runs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from graft.grammar.grammar_spec import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.engine.stats import EngineStats
from graft.models.request import Request
from graft.tools.bench import speculation
from graft.tools.bench import speculation_metrics as metrics
from graft.tools.bench.speculation_metrics import RequestRound
from graft.tools.demo.command import SOFT_NOTE
from graft.tools.demo_model import demo_model


def make_configuration(**changes: Any) -> dict[str, Any]:
    """Return a configuration with only the keys that comparisons use."""
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
    } | changes


def test_acceptance_by_depth_stops_at_first_rejected_draft():
    chain = [
        RequestRound(tokens=3, tested=4, accepted=2),
        RequestRound(tokens=5, tested=4, accepted=4),
        RequestRound(tokens=1, tested=0, accepted=0),
        RequestRound(tokens=1, tested=1, accepted=0),
        RequestRound(tokens=3, tested=2, accepted=2),
    ]
    assert metrics.acceptance_by_depth(chain, 4) == ([4, 3, 2, 1], [3, 3, 1, 1])


def test_acceptance_by_depth_of_tree_matches_engine_stats():
    tree = [
        RequestRound(tokens=3, tested=6, accepted=2),
        RequestRound(tokens=2, tested=6, accepted=1),
    ]
    assert metrics.acceptance_by_depth(tree, 2) == ([2, 2], [2, 1])
    stats = EngineStats(draft_length=2)
    for one in tree:
        stats.count_row(*one)
    assert (stats.tested, stats.accepted) == ([2, 2], [2, 1])


def test_acceptance_length_excludes_rounds_without_drafts():
    rounds = [RequestRound(3, 4, 2), RequestRound(5, 4, 4), RequestRound(1, 0, 0)]
    others = [RequestRound(1, 1, 0), RequestRound(3, 2, 2)]
    found = metrics.length_estimates({0: rounds, 1: others})
    assert found["acceptance_length"] == {"mean": 3.0, "low": None, "high": None, "n": 2}
    assert found["tokens_per_round"]["mean"] == 13 / 5


def test_differences_compare_configurations_that_differ_in_one_key():
    configurations = [
        make_configuration(),
        make_configuration(length="auto"),
        make_configuration(length="auto", masking="none"),
        make_configuration(masking="none", by_prompt=[1.0, 2.5]),
        make_configuration(length=2),
        make_configuration(masking="probe", tree="2x3", by_prompt=[4.0, 3.5]),
        make_configuration(drafter="e", masking=None, by_prompt=[2.0, 3.5]),
        make_configuration(drafter="f", masking="lattice-probe", by_prompt=[2.0, 5.0]),
        make_configuration(verify="coupled", temperature=1.0),
        make_configuration(verify="rejection", temperature=1.0),
    ]
    found = {
        one["comparison"]: (one["mean"], one["length"], one["temperature"])
        for one in metrics.differences(configurations)
    }
    assert found == {
        "fill - none": (0.75, 4, 0.0),
        "2x3 - chain, fill": (1.25, 4, 0.0),
        "coupled - rejection": (0.0, 4, 1.0),
        "e - d, fill": (0.25, 4, 0.0),
        "f - d, fill": (1.0, 4, 0.0),
    }


def test_throughput_by_length_follows_from_survival_and_round_time():
    """The prediction for each length is computed from the rounds of the longest chain."""
    configurations = [
        make_configuration(
            drafter="none",
            masking=None,
            verify=None,
            length=0,
            round_us=100.0,
            tokens_per_second=1.0,
        ),
        make_configuration(length=1, round_us=120.0, tokens_per_second=2.0),
        make_configuration(
            length=3, round_us=200.0, tokens_per_second=3.0, accepted=[60, 30, 10], rounds=80
        ),
        make_configuration(length=2, tree="2x2", round_us=1.0, tokens_per_second=9.0),
    ]
    (found,) = metrics.throughput_by_length(configurations)
    lengths = found["lengths"]
    assert [(one["length"], one["rows"]) for one in lengths] == [(0, 2), (1, 4), (3, 8)]
    assert [one["measured_tokens_per_second"] for one in lengths] == [1.0, 2.0, 3.0]
    assert [one["predicted_tokens_per_second"] for one in lengths] == pytest.approx(
        [2 / 100e-6, 2 * 1.75 / 120e-6, 2 * 2.25 / 200e-6]
    )
    assert found["best"] == 1


# Runs ---------------------------------------------------------------------------------------------


def test_speculation_bench_figures_equal_engine_stats(tmp_path, capsys, device):
    """A run measures a chain and a tree, and lists a refused tree."""
    sizes = ["--tasks", "4", "--batches", "2", "--max-tokens", "9", "--lengths", "3"]
    drafts = ["--drafters", "eagle", "--masking", "auto", "--trees", "2x2", "4x9"]
    out = tmp_path / "speculation.json"
    assert speculation.main([*sizes, *drafts, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(out.read_text())
    configurations = {
        (one["drafter"], one["length"], one["tree"]): one for one in results["configurations"]
    }
    assert list(configurations) == [("none", 0, None), ("eagle", 3, None), ("eagle", 3, "2x2")]
    maskings = [one["masking"] for one in configurations.values()]
    assert maskings == [None, "fill", "probe"]
    assert "draft_tree (4, 9)" in results["refused"]["eagle, 3, (4, 9), auto"]
    assert results["gpu_times"] == (device.kind != "soft")
    assert (SOFT_NOTE in printed) == (device.kind == "soft")
    for one in configurations.values():
        assert one["same_outputs"] == one["outputs"] == 4
        assert 0 < one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])

    chain = configurations["eagle", 3, None]
    prompts = speculation.read_prompts(speculation.parse_options(sizes))
    target, head = demo_model()
    with Engine(target, head, max_batch_size=2, draft_length=3, max_length=1024) as engine:
        outputs = engine.generate(
            [
                Request(
                    prompt=row.request.prompt,
                    grammar=row.request.grammar,
                    max_tokens=9,
                    closing="off",
                )
                for _, row in prompts
            ]
        )
        stats = engine.stats
    assert (chain["tokens"], chain["rounds"]) == (stats.tokens, stats.row_rounds)
    assert (chain["tested"], chain["accepted"]) == (stats.tested, stats.accepted)
    assert chain["acceptance_length"]["mean"] == pytest.approx(stats.acceptance_length)
    assert chain["by_prompt"] == [pytest.approx(len(o.tokens) / o.rounds) for o in outputs]

    (difference,) = results["differences"]
    by_prompt = np.subtract(configurations["eagle", 3, "2x2"]["by_prompt"], chain["by_prompt"])
    assert difference["comparison"] == "2x2 - chain, fill"
    assert difference["mean"] == pytest.approx(np.mean(by_prompt))
    assert "2x2 - chain, fill" in printed
    assert "eagle probe 3 drafts 2x2" in printed
    acceptance, throughput, _ = speculation.report.charts(results)
    assert list(acceptance.series) == ["eagle fill 3 drafts", "eagle probe 3 drafts 2x2"]
    assert [x for x, _ in acceptance.series["eagle fill 3 drafts"]] == [1, 2, 3]
    assert throughput.series["eagle fill"] == [(3, chain["tokens_per_second"])]


@pytest.fixture
def quick(tmp_path):
    """Return the options of a run with two prompts and at most two tokens per output."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a/b/1", "prompt": "x"}\n{"prompt": "y", "choice": ["z"]}\n')
    sizes = ["--batches", "1", "--max-tokens", "2", "--lengths", "auto", "--trees"]
    return ["--prompts", str(path), *sizes, "--json", str(tmp_path / "speculation.json")]


def test_speculation_bench_reads_kinds_from_prompt_ids(quick):
    prompts = speculation.read_prompts(speculation.parse_options(quick))
    assert [prompt.kind for prompt in prompts] == ["a/b", "all"]
    assert prompts[1].row.request.grammar == GrammarSpec.choice(["z"])


def test_speculation_bench_reports_drafter_that_cannot_be_created(quick, tmp_path, capsys):
    """The benchmark measures the other drafter and exits with status 2."""
    assert speculation.main([*quick, "--drafters", "no.such:Drafter", "ngram"]) == 2
    printed = capsys.readouterr()
    assert "no engine could be created for drafter no.such:Drafter" in printed.err
    assert "No module named 'no'" in printed.out
    results = json.loads((tmp_path / "speculation.json").read_text())
    assert [one["length"] for one in results["configurations"]] == [0, "auto"]
    assert results["throughput_by_length"] == []
