"""Counts of the sampling kernels that run as PTX: traffic with the host, and work per block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from counted_round import BATCH, CONSTRAINED, DRAFTS, MODES, SLOTS, VOCAB

from graft.cudagraph.kernels import nvrtc

pytestmark = [
    pytest.mark.ptx,
    pytest.mark.skipif(nvrtc.missing_compiler() != "", reason="NVRTC is not installed"),
]


@pytest.fixture(scope="module", params=MODES)
def counts(request, tmp_path_factory) -> tuple[str, list[dict]]:
    """Return a draft mode and the counts of the kernels of one round, by kernel and grid."""
    path = tmp_path_factory.mktemp("counts") / "counts.json"
    program = Path(__file__).parent / "counted_round.py"
    command = [sys.executable, "-m", "graft.tools.cli", "soft", "--code", "ptx"]
    paths = os.pathsep.join([path for path in sys.path if path])
    subprocess.run(
        [*command, "--count", str(path), "--", str(program), request.param],
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
        timeout=300,
    )
    return request.param, json.loads(path.read_text())


def test_kernels_read_host_memory_without_dependent_loads(counts):
    """The latencies of loads from host memory do not add up.

    A mask row is read if its stamp says that it is filled, and an entry of the input ring if it is
    published, so these loads depend on another.
    """
    found = {}
    for launch in counts[1]:
        loads = launch["dependent_host_loads"]
        found[launch["kernel"]] = max(loads, found.get(launch["kernel"], 0))
    limits = {"copy_mask_rows": 2, "round_begin": 2}
    assert len(found) >= 8
    assert {name: loads for name, loads in found.items() if loads > limits.get(name, 1)} == {}


def test_mask_rows_are_read_once_per_constrained_request(counts):
    """Copies read the masks of the batch's requests with a grammar, and stamps.

    No other kernel reads masks from host memory.
    """
    mode, launches = counts
    assert set(BATCH) < set(range(SLOTS))
    row_bytes = VOCAB // 8
    copied = {}  # mask rows of a launch, by the number of rows per slot
    other_bytes = 0
    for launch in launches:
        host_bytes = launch["loaded"].get("host", 0)
        if launch["kernel"] == "copy_mask_rows":
            copied[launch["grid"][1]] = host_bytes // launch["launches"] // row_bytes
        else:
            other_bytes = max(other_bytes, host_bytes / launch["launches"])
    assert copied.pop(DRAFTS + 1) == (DRAFTS + 1) * len(CONSTRAINED)
    assert copied == ({1: len(CONSTRAINED)} if mode in ("fill", "probe") else {})
    assert other_bytes < row_bytes


def test_sampled_drafts_share_steps_between_blocks(counts):
    """No block does more work for a draft than for a row of the target with the same filters."""
    mode, launches = counts
    longest = {}
    for launch in launches:
        name = launch["kernel"]
        longest[name] = max(launch["longest_block_instructions"], longest.get(name, 0))
    assert ("sample_draft" in longest) == (mode in ("fill", "probe"))
    assert longest.get("sample_draft", 0) <= 1.25 * longest["sample_target"]
