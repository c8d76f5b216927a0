"""The extension module of graft, and its counters for tests and tools."""

from __future__ import annotations

import sys

from graft.native._native import (
    failed_frees,
    live_records,
    live_resources,
    live_thread_states,
    released_records,
)


def check_gil(is_gil_enabled: bool) -> None:
    """Raise ImportError if the interpreter runs without the GIL."""
    if not is_gil_enabled:
        raise ImportError(
            "graft needs the GIL, which -X gil=0 or PYTHON_GIL=0 has disabled: do not set them"
        )


# Importing the extension module enables the GIL of a free-threaded interpreter, unless the user has
# disabled it explicitly. Python before 3.13 always has the GIL.
check_gil(getattr(sys, "_is_gil_enabled", lambda: True)())

__all__ = [
    "failed_frees",
    "live_records",
    "live_resources",
    "live_thread_states",
    "released_records",
]
