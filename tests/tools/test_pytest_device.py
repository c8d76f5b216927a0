"""The pytest plugin graft.tools.pytest_device isolates the tests after a device fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

TESTS = """
import pytest
from graft.cudagraph import DeviceError, StreamLane, load_text, open_device

TEXT = 'extern "C" __global__ void store(int* p, int n) { for (int i = 0; i < n; ++i) p[i] = i; }'


def store(count):
    device = open_device()
    stream = device.stream()
    data = device.zeros((4,), "int32")
    StreamLane(stream).kernel(load_text(device, TEXT, "store.cu")["store"], 1, 1, [data, count])
    stream.synchronize(60)
    return data.to_host().tolist()


def test_before():
    assert store(4) == [0, 1, 2, 3]


def test_fault():
    with pytest.raises(DeviceError):
        store(4096)


def test_after():
    assert store(3) == [0, 1, 2, 0]


@pytest.mark.parametrize("wanted", [2])
def test_wrong(wanted):
    assert store(1)[1] == wanted - 1


def test_skipped():
    pytest.skip("not today")
"""


def run_tests(tmp_path, *options: str) -> str:
    """Run TESTS with pytest in a new process on the soft device, and return the output."""
    (tmp_path / "test_faults.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *options, str(tmp_path)],
        env={
            **os.environ,
            "GRAFT_DEVICE": "soft",
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "" if "-n" in options else "1",  # xdist is one
        },
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    return done.stdout + done.stderr


@pytest.mark.full
def test_without_plugin_all_tests_after_fault_fail(tmp_path):
    text = run_tests(tmp_path)
    assert re.search(r"2 failed, 2 passed, 1 skipped", text), text


@pytest.mark.parametrize(
    "options", [(), pytest.param(("-n", "1"), marks=pytest.mark.full)], ids=["one process", "xdist"]
)
def test_plugin_runs_each_test_after_fault_in_separate_process(tmp_path, options):
    if options:
        pytest.importorskip("xdist")
    text = run_tests(tmp_path, "-p", "graft.tools.pytest_device", *options)
    assert re.search(r"1 failed, 3 passed, 1 skipped", text), text
    assert "test_wrong[2]" in text and "assert 0 == (2 - 1)" in text and "not today" in text
    if not options:
        assert (
            "test_fault left the device unusable; 3 later tests ran in separate processes" in text
        )
