"""The soft device's counters and its words about what went wrong.

Usable once the soft device is open; each function asks the loaded library.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter, defaultdict

from graft.cudagraph.chooser import soft_library

TEXT_BYTES = 1 << 16


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(soft_library()))


def counters() -> dict[str, Counter[str]]:
    """Return all counters by name: "live" and "leaked", resources that exist now or were given up,
    by kind; "count", how often what happened; "calls" and "gil_held", driver calls, and those by a
    thread that held the GIL, by function."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for line in _text("counters").splitlines():
        which, name, number = line.split()
        found[which][name] += int(number)
    return found


def snapshot() -> dict[str, int | dict[str, int]]:
    """Return all counters, of calls the sums."""
    found = counters()
    return {
        **{which: dict(found[which]) for which in ("live", "leaked", "count")},
        **{which: found[which].total() for which in ("calls", "gil_held")},
    }


def describe() -> str:
    """Return the calls in progress, the running host function and the running kernels."""
    return _text("describe")


def explain(fault: bool) -> str:
    """Return what the fault that lost the context was, or why the last refused call was refused."""
    return _text("last_fault" if fault else "last_refusal")


def _text(function: str) -> str:
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    getattr(_library(), f"softcuda_{function}")(buffer, ctypes.c_size_t(TEXT_BYTES))
    return buffer.value.decode(errors="replace").strip()
