"""Pytest plugin for tests that use a CUDA device.

Usage: ``pytest -p graft.tools.pytest_device``.

A kernel fault makes the device unusable for the rest of the process, so all later tests would fail.
After such a fault, the plugin runs each later test in a separate process. The summary names the
faulting test, the number of later tests and the CUDA driver that the tests used.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Literal

import pytest

Outcome = Literal["passed", "failed", "skipped"]

#: Results of cuStreamQuery that do not mean that the context is lost: success, not initialized,
#: deinitialized, no device, no current or another context, and pending work.
_USABLE = frozenset({0, 3, 4, 100, 201, 600})
#: Time limit in seconds of a test that runs in a separate process.
_LIMIT_S = 600.0


def _driver() -> ctypes.CDLL | None:
    """Return the library libcuda.so.1 that this process has loaded, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def describe_driver() -> str:
    """Return a description of the library libcuda.so.1 that this process has loaded.

    For the soft device, the description contains the numbers of launched kernels and graphs.
    """
    library = _driver()
    if library is None:
        return "no driver was loaded"
    if not hasattr(library, "softcuda_count"):
        return "NVIDIA's driver"
    library.softcuda_count.restype = ctypes.c_int64
    kernels = library.softcuda_count(b"kernel_launch")
    graphs = library.softcuda_count(b"graph_launch")
    return f"graft's soft device, {kernels} kernels and {graphs} graphs"


def device_has_faulted() -> bool:
    """Return whether a fault has made the device unusable for this process."""
    library = _driver()
    return library is not None and library.cuStreamQuery(None) not in _USABLE


class IsolatedTests:
    """Runs each test after a device fault in a separate process."""

    def __init__(self) -> None:
        #: Id of the test that left the device unusable; empty if there was none.
        self.faulting = ""
        self.count = 0  #: number of tests that ran in separate processes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Run a test in a child process if the device of this process is unusable."""
        if not self.faulting:
            return None
        self.count += 1
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        outcome, text = run_in_child(item)
        report = pytest.TestReport(
            item.nodeid,
            item.location,
            dict.fromkeys(item.keywords, 1),
            outcome,
            (str(item.path), item.location[1] or 0, text) if outcome == "skipped" else text,
            "call",
        )
        item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Record the id of the test if the test has left the device unusable."""
        if not self.faulting and device_has_faulted():
            self.faulting = item.nodeid

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Add lines about the driver and about a device fault to pytest's summary."""
        terminalreporter.write_line(f"cuda: {describe_driver()}")
        if self.faulting:
            terminalreporter.write_line(
                f"cuda: {self.faulting} left the device unusable; {self.count} later tests ran in "
                "separate processes"
            )


def run_in_child(item: pytest.Item) -> tuple[Outcome, str]:
    """Run a test with pytest in a new process.

    Return the outcome, and a text: why the test was skipped, or the output of the child process.
    """
    with tempfile.TemporaryDirectory(prefix="graft-pytest-") as folder:
        path = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", item.nodeid, f"--junitxml={path}"]
        command += [f"--rootdir={item.config.rootpath}", "-p", "no:cacheprovider"]
        if item.config.inipath is not None:
            command += ["-c", str(item.config.inipath)]
        if item.config.pluginmanager.hasplugin("xdist"):
            command += ["-n", "0"]
        try:
            done = subprocess.run(
                command,
                cwd=item.config.rootpath,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return "failed", f"the test did not end within {_LIMIT_S:g} s in its own process"
        cases = list(ET.parse(path).iter("testcase")) if path.exists() else []
    if done.returncode != 0 or len(cases) != 1:
        return "failed", done.stdout
    skipped = cases[0].find("skipped")
    if skipped is not None:
        return "skipped", skipped.get("message", "")
    return "passed", ""


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin's hooks."""
    config.pluginmanager.register(IsolatedTests(), "graft-isolated-tests")
