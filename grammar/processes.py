"""Pool of child processes for work on grammars that could take unbounded time or memory."""

from __future__ import annotations

from graft.native.children.process import ProcessPool

__all__ = ["POOL"]

#: Each process of the pool imports the grammar package when it starts.
POOL = ProcessPool(preload=("graft.grammar",))
