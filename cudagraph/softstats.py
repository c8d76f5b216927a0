"""The soft device's counters and its words about what went wrong.

Usable once the soft device is open; each function asks the loaded library.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator

from graft.cudagraph.chooser import soft_library

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


def counter(which: str, name: str | None = None) -> int:
    """Return one of the soft device's counters.

    Parameters
    ----------
    which : {"live", "leaked", "count", "calls", "gil_held"}
        Resources that exist now or were given up, how often something happened, driver calls, and
        those by a thread that held the GIL.
    name : str, optional
        Kind of resource, what happened, or the driver function; without it all calls.
    """
    return int(getattr(_library(), f"softcuda_{which}")(None if name is None else name.encode()))


def gil_held_by_name() -> dict[str, int]:
    """Return the driver functions that were called with the GIL held, and how often."""
    return {name: held for name in _names("api_name") if (held := counter("gil_held", name))}


def describe() -> str:
    """Return the calls in progress, the running host function and the running kernels."""
    return _text("describe")


def explain(fault: bool) -> str:
    """Return what the fault that lost the context was, or why the last refused call was refused."""
    return _text("last_fault" if fault else "last_refusal")


def snapshot() -> dict[str, int | dict[str, int]]:
    """Return all counters: live and leaked by kind, counts, calls and calls with the GIL held."""
    kinds = list(_names("kind_name"))
    return {
        "live": {kind: counter("live", kind) for kind in kinds},
        "leaked": {kind: counter("leaked", kind) for kind in kinds},
        "count": {what: counter("count", what) for what in _names("count_name")},
        "calls": counter("calls"),
        "gil_held": counter("gil_held"),
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
