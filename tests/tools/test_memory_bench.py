"""Tests of the benchmarks of memory and of grammar overhead."""

import json

import pytest

from graft.tools.bench import grammar_overhead, memory


def test_memory_benchmark_reports_a_series(tmp_path, capsys):
    path = tmp_path / "memory.json"
    assert memory.main(["--requests", "6", "--samples", "2", "--json", str(path)]) == 0
    series = json.loads(path.read_text())["series"]
    assert [one["requests"] for one in series] == [3, 6]
    assert all(one["anonymous_bytes"] > 1 << 20 and one["live"]["module"] > 0 for one in series)
    assert "anonymous MiB" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        memory.main(["--requests", "1", "--samples", "2"])
    assert "--samples must be at most --requests, 1" in capsys.readouterr().err


def test_grammar_overhead_is_the_mean_ratio_of_pairs(tmp_path, capsys):
    path = tmp_path / "overhead.json"
    options = ["--batches", "1", "2", "--pairs", "4", "--tokens", "6", "--json", str(path)]
    assert grammar_overhead.main(options) == 0
    results = json.loads(path.read_text())
    assert [one["batch"] for one in results["batches"]] == [1, 2]
    for one in results["batches"]:
        ratios = [guided / unguided for guided, unguided in one["guided_unguided_us"]]
        assert len(ratios) == one["ratio"]["n"] == 4
        assert one["ratio"]["mean"] == pytest.approx(sum(ratios) / 4)
        assert one["ratio"]["low"] < one["ratio"]["mean"] < one["ratio"]["high"]
    assert "guided / unguided" in capsys.readouterr().out


def test_grammar_overhead_needs_enough_pairs_for_an_interval(capsys):
    with pytest.raises(SystemExit):
        grammar_overhead.main(["--pairs", "3"])
    assert "--pairs must be at least 4, not 3" in capsys.readouterr().err
