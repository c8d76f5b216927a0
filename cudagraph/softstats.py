"""Counters and error descriptions of the soft device.

Usable after the soft device has been opened; every function queries the loaded library.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter, defaultdict

from graft.cudagraph.chooser import soft_library

TEXT_BYTES = 1 << 16
#: Groups of counters that are reported by name, and groups of which only the total is.
BY_NAME = ("live", "leaked", "count")
TOTALS = ("calls", "gil_held")


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(soft_library()))


def counters() -> dict[str, Counter[str]]:
    """Return all counters.

    Returns
    -------
    dict of str to Counter
        By group: "live" and "leaked" resources by kind, "count" of events by name, "calls" of
        driver functions by name, and "gil_held": calls by a thread that held the GIL.
    """
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for line in _text("counters").splitlines():
        group, name, number = line.split()
        groups[group][name] += int(number)
    return groups


def snapshot() -> dict[str, int | dict[str, int]]:
    """Return all counters, with the total number of "calls" and "gil_held"."""
    groups = counters()
    result: dict[str, int | dict[str, int]] = {}
    for name in BY_NAME:
        result[name] = dict(groups[name])
    for name in TOTALS:
        result[name] = groups[name].total()
    return result


def describe() -> str:
    """Return the calls in progress, the running host function and the running kernels."""
    return _text("describe")


def error_detail(fault: bool) -> str:
    """Return the cause of the last error.

    Parameters
    ----------
    fault
        True: the fault that lost the context. False: why the last rejected call was rejected.
    """
    return _text("last_fault" if fault else "last_refusal")


def _text(function: str) -> str:
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    getattr(_library(), f"softcuda_{function}")(buffer, ctypes.c_size_t(TEXT_BYTES))
    return buffer.value.decode(errors="replace").strip()
