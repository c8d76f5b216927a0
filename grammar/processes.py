"""Child processes of the grammar package, for work whose time and memory are not bounded."""

from __future__ import annotations

from graft.native.children.process import ProcessPool

__all__ = ["POOL"]

#: Processes that have imported the grammar package.
POOL = ProcessPool(preload=("graft.grammar",))
