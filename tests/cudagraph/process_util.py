"""Shared by tests that run other programs: Python in a process of its own, and C++ of their own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_python(
    code: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip


def compiled(source: str, folder: Path) -> ctypes.CDLL:
    """Load a library of C++ functions; skips where no compiler is found."""
    (folder / "work.cpp").write_text(source)
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", str(folder / "work.so"),
               str(folder / "work.cpp")]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip(f"no C++ compiler ({command[0]})")
    return ctypes.CDLL(str(folder / "work.so"))
