"""Stress tests of the native code under sanitizers: random graphs, faults and the guide worker.

``make test`` runs only the guide worker under AddressSanitizer. All other tests also compile the
soft device with a sanitizer, which takes minutes; ``make test-sanitize`` runs them.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graft.native.softcuda.compile import compile_cpu, compiler, included_files

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "native" / "tests"
BUILD = ROOT / "build" / "sanitize"
#: Settings of the soft device for both sanitizers; the first one is the default.
SETTINGS = ("", "DESTRUCTORS=inline")


@functools.cache
def has_sanitizer(kind: str) -> bool:
    """Return whether the compiler can build and link with a sanitizer."""
    BUILD.mkdir(parents=True, exist_ok=True)
    out = str(BUILD / f"try-{kind}")
    command = [*compiler(), f"-fsanitize={kind}", "-x", "c++", "-", "-o", out]
    done = subprocess.run(command, input=b"int main() {}", capture_output=True, check=False)
    return done.returncode == 0


@functools.cache
def program(name: str, kind: str) -> Path:
    """Return a stress program built with a sanitizer; skip if the compiler does not have it."""
    if not has_sanitizer(kind):
        pytest.skip(f"{' '.join(compiler())} has no {kind} sanitizer")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    ninja = ["-G", "Ninja"] if shutil.which("ninja", path=path) else []
    folder = BUILD / kind
    # The build may take longer than the time limit of a test, which would end the whole run.
    faulthandler.cancel_dump_traceback_later()
    for command in (  # a unity build takes half the time
        [
            "cmake",
            "-S",
            str(TESTS),
            "-B",
            str(folder),
            *ninja,
            f"-DGRAFT_SANITIZE={kind}",
            "-DCMAKE_UNITY_BUILD=ON",
            "-DCMAKE_UNITY_BUILD_BATCH_SIZE=30",
            f"-DPython_EXECUTABLE={sys.executable}",
        ],
        ["cmake", "--build", str(folder), "--parallel", "2", "--target", name],
    ):
        done = subprocess.run(
            ["nice", *command],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PATH": path},
            timeout=3600,
        )
        if done.returncode != 0 and "Development.Embed" in done.stderr:
            pytest.skip("libpython, which the stress program is linked with, is not installed")
        if done.returncode != 0:
            pytest.fail(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return folder / name


@functools.cache
def image() -> Path:
    """Return the path of the stress kernels compiled for the soft device."""
    text = TESTS / "kernels.cu"
    built = compile_cpu(
        text.read_text(),
        text.name,
        cache_dir=BUILD / "kernels",
        include_dirs=[TESTS, ROOT / "cudagraph" / "kernels"],
    )
    path = BUILD / "kernels.image"
    path.write_bytes(built)
    return path


def run(kind: str, *arguments: object, timeout_s: float = 60, **settings: str) -> str:
    """Run the stress program and return its output; fail the test on any finding."""
    return run_program(program("stress", kind), *arguments, timeout_s=timeout_s, **settings)


def run_program(path: Path, *arguments: object, timeout_s: float, **settings: str) -> str:
    """Run a program and return its output; fail the test on any finding."""
    done = execute([str(path), *map(str, arguments)], timeout_s, settings)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[:8000]}"
    return done.stdout


def execute(
    command: list[str], timeout_s: float, settings: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command with `settings`, and without inherited soft-device and sanitizer settings."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SOFTCUDA_", "ASAN_", "TSAN_", "UBSAN_", "LSAN_"))
    }
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=environment | settings,
    )


def graphs(
    kind: str, seed: int, count: int, threads: int, timeout_s: float = 60, **settings: str
) -> None:
    """Run random graphs. The program checks results and failures, and that nothing is leaked."""
    output = run(kind, "graphs", image(), seed, count, threads, timeout_s=timeout_s, **settings)
    assert re.match(rf"{count} graphs on {threads} threads; ", output)


def test_stressed_sources_do_not_include_nanobind():
    """The stress programs contain all files but the bindings, and are compiled without nanobind."""
    native = ROOT / "native"
    found = 0
    for folder in ("hostwork", "stacks", "guide/automaton"):
        for path in (native / folder).glob("*.cpp"):
            headers = included_files(path.read_text(), [path.parent, native])
            texts = [path.read_text(), *headers.values()]
            binds = any("#include <nanobind/" in text for text in texts)
            assert binds == path.name.startswith("bind"), path
            found += binds
    assert found > 3


@pytest.mark.full
@pytest.mark.parametrize("kind, first, count", [("address", 1, 150), ("undefined", 1, 400)])
def test_random_graphs_match_sequential_model(kind, first, count):
    """Random graphs with forks, joins, host steps and failures agree with the sequential model."""
    graphs(kind, first, count, 3, SOFTCUDA_WORKERS="3")


@pytest.mark.full
def test_device_fault_is_named_under_sanitizer():
    """The error names a kernel that writes out of bounds, and the sanitizer reports nothing."""
    assert "stray_cell" in run("address", "faults", image())


def test_guide_worker_rows_are_correct_under_sanitizer():
    """Mask rows contain the tokens that the grammar allows, and matchers are never shared.

    The cases vary the number of threads, time budgets, probes and forced drafts. Slots are reused,
    and some grammars are slow.
    """
    guide("address", 1, 6)


@pytest.mark.full
@pytest.mark.parametrize("kind, count", [("address", 0), ("undefined", 300), ("thread", 40)])
@pytest.mark.parametrize("setting", ["", "SOFTCUDA_PTX_SEED", "SOFTCUDA_RACECHECK"])
def test_ptx_modules_run_under_sanitizer(kind, count, setting, tmp_path, monkeypatch):
    """PTX modules run, and `count` mutants of them run or fault, without a sanitizer's finding."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "softcuda"))
    fuzz = importlib.import_module("ptx_fuzz")
    modules = [*fuzz.MODULES, *fuzz.mutants(count, 7)]
    path = tmp_path / "modules"
    path.write_bytes(b"".join(text.encode() + b"\0" for text in modules))
    settings = {"SOFTCUDA_PTX_STEPS": "5000", "SOFTCUDA_WORKERS": "2"}
    if setting:
        settings[setting] = "1"
    # The soft device loads the PTX library from its own folder.
    program("graft_ptx", kind)
    command = [str(program("ptx_run", kind)), str(path), "60"]
    done = execute(command, 60 + 4 * count, settings)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    lines = done.stdout.splitlines()
    assert len(lines) == len(modules)
    ran = [line.split()[1] == "ran" for line in lines]
    # Both blocks write their results to the same words, which is a race.
    for line in lines[: len(fuzz.MODULES)]:
        assert line.split()[1] == "ran" or (setting == "SOFTCUDA_RACECHECK" and "race in" in line)
    assert count == 0 or sum(ran) > count // 6


@pytest.mark.full
def test_guide_worker_has_no_data_race():
    """The guide worker runs with more settings under Thread- and UndefinedBehaviorSanitizer."""
    guide("thread", 1000, 60, timeout_s=600)
    guide("undefined", 2000, 100, timeout_s=600)


def guide(kind: str, seed: int, cases: int, timeout_s: float = 120) -> None:
    """Run 40 requests per case through the guide worker, a host thread and a device thread."""
    output = run_program(program("stress_guide", kind), seed, cases, timeout_s=timeout_s)
    numbers = re.match(r"(\d+) requests, (\d+) late, (\d+) probes, (\d+) forced", output)
    assert numbers and int(numbers[1]) == 40 * cases
    assert all(int(number) > 0 for number in numbers.groups())


@pytest.mark.full
@pytest.mark.parametrize("kind, cases", [("address", 3000), ("undefined", 3000), ("thread", 300)])
def test_automata_run_under_sanitizer(kind, cases):
    """Random grammars compile or are refused, threads share them, and damaged data is harmless.

    Machines that count repetitions allow the same tokens as machines that do not.
    """
    output = run_program(program("stress_automaton", kind), 1, cases, timeout_s=300)
    numbers = re.match(r"(\d+) compiled, (\d+) counting, (\d+) refused, (\d+) loaded", output)
    assert numbers and all(int(number) > cases // 20 for number in numbers.groups())


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, finding",
    [
        ("address", "AddressSanitizer: heap-use-after-free"),
        ("thread", "ThreadSanitizer: data race"),
    ],
)
def test_sanitizers_report_planted_errors(kind, finding):
    """A data race and a use after free in a host step are reported and fail the run."""
    done = execute([str(program("stress", kind)), "broken"], 60, {})
    assert done.returncode != 0
    assert finding in done.stderr


@pytest.mark.full
def test_plan_edit_after_launch_has_no_data_race():
    """A kernel node is changed after it has run, without waiting for the launch."""
    assert run("thread", "plans", image(), 300) == "300 plans\n"


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, seed, count, setting",
    [
        *(("thread", 50_000, 1500, setting) for setting in ("WORKERS=4", *SETTINGS)),
        *(
            ("undefined", 10_000, 4000, setting)
            for setting in ("WORKERS=1", "WORKERS=6", "LOCK_MODEL=1", "POISON=1", *SETTINGS)
        ),
    ],
)
def test_random_graphs_match_model_under_all_settings(kind, seed, count, setting):
    """Four threads run graphs with each soft-device setting of workers, locks and destructors."""
    name, _, value = setting.partition("=")
    graphs(kind, seed, count, 4, timeout_s=600, **{f"SOFTCUDA_{name}": value} if name else {})
