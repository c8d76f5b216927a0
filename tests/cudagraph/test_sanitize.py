"""The native parts under sanitizers: random graphs against a sequential model, faults, guides.

``make test`` runs the short form (address sanitizer, some hundred graphs); ``make test-sanitize``
adds the sanitizers of undefined behaviour and threads, more graphs and other settings.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graft.native.softcuda.compile import compile_cpu, compiler

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "native" / "tests"
BUILD = ROOT / "build" / "sanitize"
#: Settings of the soft device for both sanitizers; the first changes nothing.
SETTINGS = ("", "DESTRUCTORS=inline")


@functools.cache
def has_sanitizer(kind: str) -> bool:
    """Whether the compiler can build and link with a sanitizer."""
    BUILD.mkdir(parents=True, exist_ok=True)
    out = str(BUILD / f"try-{kind}")
    command = [*compiler(), f"-fsanitize={kind}", "-x", "c++", "-", "-o", out]
    done = subprocess.run(command, input=b"int main() {}", capture_output=True, check=False)
    return done.returncode == 0


@functools.cache
def stress(kind: str) -> Path:
    """The stress program, built with one sanitizer; skips where the compiler has none."""
    if not has_sanitizer(kind):
        pytest.skip(f"{' '.join(compiler())} has no {kind} sanitizer")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    ninja = ["-G", "Ninja"] if shutil.which("ninja", path=path) else []
    folder = BUILD / kind
    # How long a compiler takes says nothing of a hang, and that watch would end the whole run.
    faulthandler.cancel_dump_traceback_later()
    for command in (  # files together take half as long
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
        ["cmake", "--build", str(folder), "--parallel", "2"],
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
            pytest.skip("there is no libpython to link the stress program with")
        if done.returncode != 0:
            pytest.fail(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return folder / "stress"


@functools.cache
def image() -> Path:
    """The stress kernels as an image for the soft device."""
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
    """Run the stress program and return what it said; a finding fails the test."""
    command = [str(stress(kind)), *map(str, arguments)]
    done = execute(command, timeout_s, settings)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[:8000]}"
    return done.stdout


def execute(
    command: list[str], timeout_s: float, settings: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command without the caller's own settings of device and sanitizers."""
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
    """Run random graphs; the program checks payloads, failures, and that nothing is left."""
    said = run(kind, "graphs", image(), seed, count, threads, timeout_s=timeout_s, **settings)
    assert re.match(rf"{count} graphs on {threads} threads; ", said)


@pytest.mark.parametrize(
    "kind, first, count",
    [
        ("address", 1, 150),
        pytest.param("undefined", 1, 400, marks=pytest.mark.full),
    ],
)
def test_random_graphs_agree_with_a_sequential_model(kind, first, count):
    """Forks, joins, host steps, failures, updates and drops: right, and no memory error or leak."""
    graphs(kind, first, count, 3, SOFTCUDA_WORKERS="3")


def test_a_fault_is_named_and_everything_later_is_refused():
    """A kernel that writes out of bounds costs the context, and no sanitizer finds more."""
    assert "stray_cell" in run("address", "faults", image())


def test_late_and_probed_slots_of_the_guide_get_their_own_rows():
    """Threads, budgets, probes, forced drafts, reused slots, slow grammars: every row that is ready
    is the grammar's at its place, nobody meets another in a matcher, and no memory error."""
    guide("address", 1, 6)


@pytest.mark.full
def test_threads_and_budgets_of_the_guide_have_no_data_race():
    """The same under the thread sanitizer, with many more settings; and more under the other."""
    guide("thread", 1000, 60, timeout_s=600)
    guide("undefined", 2000, 100, timeout_s=600)


def guide(kind: str, seed: int, cases: int, timeout_s: float = 120) -> None:
    """Run the guided worker between a host and a device; 40 requests a case."""
    said = run(kind, "guide", seed, cases, timeout_s=timeout_s)
    numbers = re.match(r"(\d+) requests, (\d+) late, (\d+) probes, (\d+) forced", said)
    assert numbers and int(numbers[1]) == 40 * cases
    assert all(int(number) > 0 for number in numbers.groups())


@pytest.mark.parametrize(
    "kind, finding",
    [
        ("address", "AddressSanitizer: heap-use-after-free"),
        pytest.param("thread", "ThreadSanitizer: data race", marks=pytest.mark.full),
    ],
)
def test_the_sanitizers_find_what_is_wrong(kind, finding):
    """A race and a use after free in a host step of a graph are reported, and fail the run."""
    done = execute([str(stress(kind)), "broken"], 60, {})
    assert done.returncode != 0
    assert finding in done.stderr


@pytest.mark.full
def test_work_is_freed_after_the_worker_that_ran_it():
    """A plan edited in place straight after its launch, which nobody waited for: no data race."""
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
def test_many_random_graphs_under_other_settings(kind, seed, count, setting):
    """The same on four threads under every way in which the soft device can free, order and lock;
    and no data race, fibers and barriers included."""
    name, _, value = setting.partition("=")
    graphs(kind, seed, count, 4, timeout_s=600, **{f"SOFTCUDA_{name}": value} if name else {})
