"""The extension module of graft, and its counters for tests and tools."""

from __future__ import annotations

from graft.native._native import (
    failed_frees,
    live_records,
    live_resources,
    live_thread_states,
    released_records,
)

__all__ = [
    "failed_frees",
    "live_records",
    "live_resources",
    "live_thread_states",
    "released_records",
]
