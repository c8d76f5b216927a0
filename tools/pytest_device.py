"""Pytest plugin that reports the driver of the tests: ``pytest -p graft.tools.pytest_device``."""

from __future__ import annotations

import ctypes
import os

import pytest


def device_line() -> str:
    """Which libcuda.so.1 answered in this process, and what it did."""
    try:
        library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return "no driver was loaded"
    if not hasattr(library, "softcuda_count"):
        return "NVIDIA's driver"
    library.softcuda_count.restype = ctypes.c_int64
    done = (library.softcuda_count(what) for what in (b"kernel_launch", b"graph_launch"))
    return "graft's soft device, {} kernels and {} graphs".format(*done)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the line."""
    terminalreporter.write_line(f"cuda: {device_line()}")
