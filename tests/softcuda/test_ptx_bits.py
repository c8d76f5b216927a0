"""Kernels on PTX give the same bits as in the form that is compiled for the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ptx_bits import UNREPEATABLE

from graft.cudagraph.kernels import compiler, nvrtc

pytestmark = [
    pytest.mark.ptx,
    pytest.mark.skipif(nvrtc.missing_compiler() != "", reason="NVRTC is not installed"),
]
TESTS = Path(__file__).resolve().parents[1]
MODELS = ("kernel_library", "attention", "fp8", "eagle3", "dflash", "mtp", "row_invariance")
SAMPLING = ("target", "verify", "tree", "draft", "adjust", "mask_apply")
FILES = [f"models/test_{name}.py" for name in MODELS]
FILES += [f"sampling/test_{name}.py" for name in SAMPLING]
# The other tests of this file draw thousands of samples.
FILES += ["sampling/test_verify_drafts.py::test_draft_verifier_reads_arrays_in_place"]
#: Kernels without a form for GPUs.
CPU_ONLY = {"attention_thread", "linear_thread"}
#: Kernels that these tests run in graphs only or not at all. Tests of engines run them.
NOT_ON_STREAMS = {
    "add_parts", "copy_pages", "copy_rows_to_host", "end_failed", "loop_begin", "loop_decide",
    "propose_drafts", "propose_forced", "record_tokens",
    "slot_leave", "stamp_time",
}  # fmt: skip

_compared: dict[str, set[str]] = {}


def entries() -> set[str]:
    """Return the names of the kernels of models and sampling."""
    names = set()
    for package in ("models", "sampling"):
        for path in (compiler.INCLUDE_ROOT / package).glob("**/kernels/*.cu"):
            text = path.read_text()
            names |= set(re.findall(r"__global__\s+void\s+(?:__\w+__\([^;{]*?\)\s+)?(\w+)\(", text))
    return names


@pytest.mark.parametrize("file", FILES)
def test_ptx_results_equal_host_results_bit_for_bit(file, tmp_path):
    report = tmp_path / "report.json"
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "ptx_bits", "--ptx-bits", str(report)]
    paths = os.pathsep.join([str(TESTS / "softcuda"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-o", "faulthandler_timeout=0", TESTS / file],
        env={**os.environ, "GRAFT_DEVICE": "soft", "GRAFT_CODE": "ptx", "PYTHONPATH": paths},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    counts = json.loads(report.read_text())
    assert counts and {name: count for name, count in counts.items() if count[1]} == {}
    _compared[file] = set(counts)


def test_every_kernel_is_compared():
    if len(_compared) < len(FILES):
        pytest.skip("needs all comparisons of this file")
    found = set().union(*_compared.values())
    assert entries() - found == CPU_ONLY | NOT_ON_STREAMS | UNREPEATABLE & entries()
