"""The soft device alone: its own CMake project and its own test, which do not need graft."""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import softcuda_util as util

from graft.cudagraph.driver import chooser
from graft.native.softcuda.compile import compiler


def run(*command: str | Path, folder: Path) -> str:
    """Run a command that must succeed, and return its output."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SOFTCUDA_")}
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=inherited | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_soft_device_passes_its_own_test(tmp_path):
    library = chooser.soft_library()
    program = tmp_path / "driver_test"
    source = util.SOURCE / "tests" / "driver_test.cpp"
    link = [library, f"-Wl,-rpath,{library.parent}"]
    run(*compiler(), "-std=c++17", "-Werror", source, *link, "-o", program, folder=tmp_path)
    assert run(program, folder=tmp_path) == "passed\n"


@pytest.mark.full
def test_soft_device_builds_alone(tmp_path):
    """The project builds with its PTX library, and ctest runs both tests."""
    # The build may take longer than the time limit of a test, which would end the whole run.
    faulthandler.cancel_dump_traceback_later()
    ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = ["-DSOFTCUDA_PTX=ON", "-DSOFTCUDA_PTX_EXTRA_FLAGS=-O0", "-DCMAKE_BUILD_TYPE=Debug"]
    run("cmake", "-S", util.SOURCE, "-B", tmp_path, *ninja, *options, folder=tmp_path)
    run("cmake", "--build", tmp_path, "--parallel", "2", folder=tmp_path)
    output = run("ctest", folder=tmp_path)
    assert "100% tests passed" in output and output.count("Passed") == 2
