"""Tests of kernels in child processes, with a changed kernel source."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutated_sources import write_sources

from graft.cudagraph.kernels import compiler, kernels

TESTS = Path(__file__).resolve().parents[1]
#: Environment of a run on PTX with all checks.
PTX = {
    "GRAFT_DEVICE": "soft",
    "GRAFT_CODE": "ptx",
    "SOFTCUDA_PTX_SEED": "1",
    "SOFTCUDA_RACECHECK": "1",
}
#: Environment of a run of the kernels that are compiled for the CPU.
HOST = {"GRAFT_DEVICE": "soft", "GRAFT_CODE": "host"}


@dataclass(frozen=True)
class Mutant:
    """A change of a kernel source that makes the kernel incorrect.

    Attributes
    ----------
    name
        Description of the change.
    file
        Path of the source, relative to the package.
    old, new
        Text that occurs exactly once in the file, and its replacement.
    test
        Test that passes with the unchanged source, relative to the folder of the tests.
    ptx, host
        How the test fails on PTX and with kernels compiled for the CPU: "race", "fault" or
        "result"; "" if it passes.
    also
        Further changes: path, text and replacement.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    ptx: str
    host: str
    also: tuple[tuple[str, str, str], ...] = ()

    @property
    def changes(self) -> tuple[tuple[str, str, str], ...]:
        return ((self.file, self.old, self.new), *self.also)


def changed_sources(*changes: tuple[str, str, str]) -> Path:
    """Return a folder with copies of all kernel sources, in which texts have been replaced.

    Each change is a path, a text that occurs once in the file, and its replacement.
    """
    root = compiler.INCLUDE_ROOT
    sources = {}
    paths = [*(root / "native" / "records").glob("*.h")]
    for package in ("cudagraph", "models", "sampling"):
        paths += (root / package).glob("**/kernels/*.cu*")
    for path in sorted(paths):
        sources[path.relative_to(root)] = path.read_text()
    for file, old, new in changes:
        text = sources[Path(file)]
        assert text.count(old) == 1, f"{file} contains {old!r} {text.count(old)} times"
        sources[Path(file)] = text.replace(old, new)
    return write_sources(sources)


def use_sources(folder: Path) -> None:
    """Let this process compile its kernels from copies of the sources in `folder`."""
    original_root = compiler.INCLUDE_ROOT
    original_load = kernels.load
    compiler.INCLUDE_ROOT = folder
    compiler.KERNELS = folder / compiler.KERNELS.relative_to(original_root)

    def load(context: Any, source: str | Path, defines: Any = None) -> Any:
        path = Path(source).resolve()
        copy = folder / os.path.relpath(path, original_root)
        if copy.exists():
            print("loaded", copy.relative_to(folder), file=sys.__stderr__)
        return original_load(context, copy if copy.exists() else path, defines)

    for module in list(sys.modules.values()):
        if getattr(module, "load", None) is original_load:
            module.load = load  # type: ignore[attr-defined]


CHILD = """
import sys
import cudagraph_util
import pytest
import ptx_mutation
from graft.cudagraph.driver import softstats
cudagraph_util.LIMIT_S = 10.0  # for replays whose answer is lost
folder = {folder!r}
if folder:
    ptx_mutation.use_sources(ptx_mutation.Path(folder))
options = ["-x", "-q", "--tb=short", "--full", "-p", "no:cacheprovider", "-p", "no:xdist"]
status = pytest.main([*options, {test!r}])
print(softstats.error_detail(True))
sys.exit(status)
"""


def run_test(test: str, folder: Path | None = None, limit: int = 60, **env: str) -> tuple[str, str]:
    """Run a test in a child process.

    Returns
    -------
    tuple of str and str
        How the test fails: "race", "fault", "result" for a wrong result, or "hang" after `limit`
        seconds; "" if it passes. And the output of the test.
    """
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD.format(folder=str(folder or ""), test=str(TESTS / test))],
            env={**os.environ, **env, "PYTHONPATH": paths},
            cwd=TESTS.parent,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return "hang", str(error.stdout)
    text = done.stdout + done.stderr
    if done.returncode == 0:
        return "", text
    assert "collected 0 items" not in text and re.search(r"^(FAILED|ERROR)", text, re.M), text
    if re.search(r"\brace in\b", text):
        return "race", text
    return ("fault" if "PTX line" in text or "DeviceError" in text else "result"), text
