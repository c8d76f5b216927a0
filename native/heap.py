"""Return of free heap memory to the system."""

from __future__ import annotations

import ctypes

__all__ = ["return_free_memory"]

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_free_memory() -> None:
    """Return free memory of the heap to the system.

    glibc keeps freed memory for later allocations. On its own, it returns heap memory only above
    the last block in use. With other C libraries, this function has no effect.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
