"""Child processes in which the grammar package runs work that has no bound of its own."""

from __future__ import annotations

from graft.native.children.process import ProcessPool

__all__ = ["POOL"]

#: Processes that have imported the grammar package.
POOL = ProcessPool(preload=("graft.grammar",))
