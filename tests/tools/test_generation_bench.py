"""Test of the benchmark of generation loops (graft.tools.bench.generation)."""

import json

import pytest

from graft.tools.bench import generation


@pytest.mark.parametrize(
    "kind", ["device", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("free", "host"))]
)
def test_generation_bench_counts_launches(kind, capsys, tmp_path):
    """Both engines run the same rounds; with loops, few of them are launched by the host."""
    out = tmp_path / "generation.json"
    options = ["--tokens", "24", "--runs", "1", "--kind", kind, "--out", str(out)]
    assert generation.main(options) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    results = json.loads(out.read_text())["results"]
    assert [(result["generation"], result["load"]) for result in results] == [
        (mode, load) for mode in ("rounds", "graph") for load in ("idle", "process", "thread")
    ]
    for result, line in zip(results, lines, strict=True):
        rounds, launches = result["rounds"], result["launches"]
        assert rounds > 5
        assert launches == (rounds if result["generation"] == "rounds" else 1)
        assert 0 < result["p50_us"] <= result["p90_us"] <= result["p99_us"] <= result["max_us"]
        assert line.split()[-2:] == [str(rounds), str(launches)]
