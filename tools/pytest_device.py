"""Pytest plugin that reports which CUDA driver the tests used.

Usage: ``pytest -p graft.tools.pytest_device``.
"""

from __future__ import annotations

import ctypes
import os

import pytest


def describe_driver() -> str:
    """Return a description of the library libcuda.so.1 that this process has loaded.

    For the soft device, the description contains the numbers of launched kernels and graphs.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return "no driver was loaded"
    if not hasattr(library, "softcuda_count"):
        return "NVIDIA's driver"
    library.softcuda_count.restype = ctypes.c_int64
    kernels = library.softcuda_count(b"kernel_launch")
    graphs = library.softcuda_count(b"graph_launch")
    return f"graft's soft device, {kernels} kernels and {graphs} graphs"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add a line that describes the driver to pytest's summary."""
    terminalreporter.write_line(f"cuda: {describe_driver()}")
