"""Pool of child processes for grammar work whose time and memory are not bounded."""

from __future__ import annotations

from graft.native.children.process import ProcessPool

__all__ = ["POOL"]

#: Each process of the pool imports the grammar package when it starts.
POOL = ProcessPool(preload=("graft.grammar",))
