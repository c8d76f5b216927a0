"""Test of the benchmark of generation loops (graft.tools.bench.generation)."""

import json
import os
import subprocess
import sys

import pytest

from graft.tools.bench import generation


@pytest.mark.parametrize("kind", ["device", pytest.param("free", marks=pytest.mark.full)])
def test_generation_bench_counts_launches(kind, capsys, tmp_path):
    """Both engines run the same rounds; with loops, few of them are launched by the host."""
    out = tmp_path / "generation.json"
    options = ["--tokens", "24", "--runs", "1", "--kind", kind, "--json", str(out)]
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


_PRINT_CORES = """
import os
import time
from pathlib import Path
from graft.tools.bench import generation

generation._reserve_core(min(os.sched_getaffinity(0)))
cores = {}
deadline = time.monotonic() + 30
while "softcuda-sm0" not in cores:  # a thread sets its name after it has started
    assert time.monotonic() < deadline
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("softcuda"):
            cores[name] = os.sched_getaffinity(int(task.name))
cores["main"] = os.sched_getaffinity(0)
for name, numbers in cores.items():
    print(name, *numbers)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two usable cores")
def test_device_core_is_used_by_the_device_only():
    """The threads of the soft device run on the reserved core, all others on other cores."""
    core, *others = sorted(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", _PRINT_CORES], check=True, capture_output=True, text=True
    )
    cores = {}
    for line in done.stdout.splitlines():
        name, *numbers = line.split()
        cores[name] = sorted(map(int, numbers))
    assert cores.pop("main") == others
    assert "softcuda-sm0" in cores
    assert "softcuda-sm1" not in cores
    assert set(map(tuple, cores.values())) == {(core,)}


def test_device_core_must_be_usable(capsys):
    """A core that the process may not use is refused before an engine is created."""
    assert generation.main(["--device-core", "100000"]) == 2
    assert "--device-core must be one of" in capsys.readouterr().err
