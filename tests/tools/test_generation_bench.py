"""Test of the benchmark of generation loops (graft.tools.bench.generation)."""

import pytest

from graft.tools.bench import generation


@pytest.mark.parametrize("kind", ["free", pytest.param("host", marks=pytest.mark.full)])
def test_generation_bench_counts_launches(kind, capsys):
    """Both engines run the same rounds; with loops, few of them are launched by the host."""
    options = ["--tokens", "24", "--runs", "1", "--kind", kind]
    assert generation.main(options) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    rows = {tuple(line.split()[:2]): line.split()[-2:] for line in lines}
    assert list(rows) == [
        (mode, python) for mode in ("rounds", "graph") for python in ("idle", "busy")
    ]
    for (mode, _), (rounds, launches) in rows.items():
        assert int(rounds) > 5
        assert int(launches) == (int(rounds) if mode == "rounds" else 1)
