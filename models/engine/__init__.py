"""The engine: admission, scheduling, continuous batching and results."""

from graft.models.engine.engine import Engine

__all__ = ["Engine"]
