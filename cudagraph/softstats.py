"""The soft device's counters and its words about what went wrong.

Usable once the soft device is open; each function asks the loaded library.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator

from graft.cudagraph.chooser import soft_library

__all__ = [
    "calls",
    "calls_by_name",
    "count",
    "describe",
    "explain",
    "gil_held",
    "gil_held_by_name",
    "last_fault",
    "last_refusal",
    "leaked",
    "live",
    "snapshot",
]

TEXT_BYTES = 1 << 16


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(soft_library()))
    for name in ("live", "leaked", "count", "calls", "gil_held"):
        function = getattr(library, f"softcuda_{name}")
        function.restype = ctypes.c_int64
        function.argtypes = (ctypes.c_char_p,)
    for name in ("kind_name", "count_name", "api_name"):
        function = getattr(library, f"softcuda_{name}")
        function.restype = ctypes.c_char_p
        function.argtypes = (ctypes.c_uint,)
    for name in ("describe", "last_fault", "last_refusal"):
        function = getattr(library, f"softcuda_{name}")
        function.restype = ctypes.c_size_t
        function.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    return library


def live(kind: str) -> int:
    """Return how many resources of a kind ("stream", "event", ...) exist now."""
    return int(_library().softcuda_live(kind.encode()))


def leaked(kind: str) -> int:
    """Return how many resources of a kind were given up."""
    return int(_library().softcuda_leaked(kind.encode()))


def count(what: str) -> int:
    """Return how often something ("launch", "host", ...) happened."""
    return int(_library().softcuda_count(what.encode()))


def calls(api: str | None = None) -> int:
    """Return the number of calls of one driver function, or of all."""
    return int(_library().softcuda_calls(None if api is None else api.encode()))


def gil_held(api: str | None = None) -> int:
    """Return how many of them were made by a thread that held the GIL."""
    return int(_library().softcuda_gil_held(None if api is None else api.encode()))


def calls_by_name() -> dict[str, int]:
    """Return the calls of each driver function that was called."""
    return {name: calls(name) for name in _names("api_name")}


def gil_held_by_name() -> dict[str, int]:
    """Return the driver functions that were called with the GIL held, and how often."""
    return {name: held for name in _names("api_name") if (held := gil_held(name))}


def describe() -> str:
    """Return the calls in progress, the running host function and the running kernels."""
    return _text("describe")


def last_fault() -> str:
    """Return what the fault that lost the context was; "" when there was none."""
    return _text("last_fault")


def last_refusal() -> str:
    """Return why the most recent refused call was refused."""
    return _text("last_refusal")


def explain(fault: bool) -> str:
    """Return the words for an error message after a fault or a refusal."""
    return last_fault() if fault else last_refusal()


def snapshot() -> dict[str, int | dict[str, int]]:
    """Return all counters: live and leaked by kind, counts, calls and calls with the GIL held."""
    kinds = list(_names("kind_name"))
    return {
        "live": {kind: live(kind) for kind in kinds},
        "leaked": {kind: leaked(kind) for kind in kinds},
        "count": {what: count(what) for what in _names("count_name")},
        "calls": calls(),
        "gil_held": gil_held(),
    }


def _names(function: str) -> Iterator[str]:
    ask: Callable[[int], bytes | None] = getattr(_library(), f"softcuda_{function}")
    index = 0
    while (name := ask(index)) is not None:
        yield name.decode()
        index += 1


def _text(function: str) -> str:
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    getattr(_library(), f"softcuda_{function}")(buffer, TEXT_BYTES)
    return buffer.value.decode(errors="replace").strip()
