"""Programs that use cuda.core or numba-cuda, run unchanged by ``graft soft``.

The programs in the folder ``programs`` check their own results. They run in the interpreter
``$GRAFT_FOREIGN_PYTHON``, by default the one that runs the tests. A program is skipped if the
library that it uses is not installed there.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ptx

PROGRAMS = sorted((Path(__file__).resolve().parent / "programs").glob("*.py"))
PYTHON = os.environ.get("GRAFT_FOREIGN_PYTHON") or sys.executable
#: Modules that a program imports, by the first word of its name.
LIBRARIES = {"core": "cuda.core", "numba": "numba_cuda"}


@functools.cache
def is_installed(module: str) -> bool:
    """Return whether the interpreter of the programs finds a module."""
    code = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({module!r}))"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def test_programs_are_found() -> None:
    names = [path.stem.partition("_")[0] for path in PROGRAMS]
    assert len(names) >= 20 and set(names) == set(LIBRARIES)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_program_of_other_library_runs(path: Path) -> None:
    module = LIBRARIES[path.stem.partition("_")[0]]
    if not is_installed(module):
        pytest.skip(f"{module} is not installed for {PYTHON} (see GRAFT_FOREIGN_PYTHON)")
    program = [PYTHON, "-W", "ignore", str(path)]
    command = [sys.executable, "-m", "graft.tools.cli", "soft", "--", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() and not done.stderr
