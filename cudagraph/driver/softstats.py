"""Counters and error descriptions of the soft device, graft's CPU implementation of the driver.

Every function queries the loaded library. Open the soft device before calling these functions.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter, defaultdict

from graft.cudagraph.driver.chooser import soft_library

TEXT_BYTES = 1 << 16
#: Groups of counters that `snapshot` reports by name.
BY_NAME = ("live", "leaked", "count")
#: Groups of counters of which `snapshot` reports only the sum.
TOTALS = ("calls", "gil_held")


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(soft_library()))


def counters() -> dict[str, Counter[str]]:
    """Return all counters of the soft device by group and name.

    "live" and "leaked" count resources by kind. "count" counts events, such as executed nodes, by
    name. "calls" counts calls of driver functions, and "gil_held" counts the calls that were made
    by a thread holding the GIL.
    """
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for line in _text("counters").splitlines():
        group, name, number = line.split()
        groups[group][name] += int(number)
    return groups


def snapshot() -> dict[str, int | dict[str, int]]:
    """Return `counters`, but of the groups "calls" and "gil_held" only the sum over all names."""
    groups = counters()
    result: dict[str, int | dict[str, int]] = {}
    for name in BY_NAME:
        result[name] = dict(groups[name])
    for name in TOTALS:
        result[name] = groups[name].total()
    return result


def describe() -> str:
    """Describe the driver calls in progress, the running host function and the running kernels."""
    return _text("describe")


def error_detail(fault: bool) -> str:
    """Return the explanation of the last fault or, without `fault`, of the last rejected call."""
    return _text("last_fault" if fault else "last_refusal")


def _text(function: str) -> str:
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    getattr(_library(), f"softcuda_{function}")(buffer, ctypes.c_size_t(TEXT_BYTES))
    return buffer.value.decode(errors="replace").strip()
