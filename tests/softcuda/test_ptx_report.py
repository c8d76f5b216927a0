"""Reports and exit status of ``graft soft``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ptx_util import module

pytestmark = pytest.mark.ptx

RACE = module("st.global.u32 [%rd0], %r1;", 1)
#: Two blocks store to one word. The program ignores the error code.
PROGRAM = """
import sys
import numpy as np
from cuda.bindings import driver as d
d.cuInit(0)
context = d.cuDevicePrimaryCtxRetain(0)[1]
d.cuCtxSetCurrent(context)
function = d.cuModuleGetFunction(d.cuModuleLoadData({text!r}.encode() + b"\\0")[1], b"k")[1]
pointer = np.array([int(d.cuMemAlloc(64)[1])], np.uint64)
table = np.array([pointer.ctypes.data], np.uint64)
d.cuLaunchKernel(function, {blocks}, 1, 1, 32, 1, 1, 0, 0, table.ctypes.data, 0)
d.cuCtxSynchronize()
sys.exit(3)
"""


def run_soft(blocks: int, *options: str) -> tuple[int, str]:
    """Return the exit status and the standard error of a program under ``graft soft``."""
    program = PROGRAM.format(text=RACE, blocks=blocks)
    command = [sys.executable, "-m", "graft.tools.cli", "soft", "--racecheck", *options]
    done = subprocess.run(
        [*command, "--", "-c", program], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_soft_prints_and_reports_race_that_program_ignores(tmp_path):
    report = tmp_path / "faults.json"
    status, text = run_soft(2, "--report", str(report))
    assert status == 3 and "race in global memory" in text
    (fault,) = [json.loads(line) for line in report.read_text().splitlines()]
    assert fault["kind"] == "race" and fault["error"] == "CUDA_ERROR_LAUNCH_FAILED"
    assert "st.global.u32" in fault["text"] and "kernel 'k'" in fault["text"]


@pytest.mark.parametrize(("blocks", "status"), [(2, 9), (1, 3)], ids=["race", "no race"])
def test_soft_error_exitcode_replaces_status_after_fault(blocks, status):
    found, text = run_soft(blocks, "--error-exitcode", "9")
    assert found == status and ("race in global memory" in text) == (status == 9)
