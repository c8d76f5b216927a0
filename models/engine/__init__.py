"""Engine: admission, scheduling with continuous batching, slots, replays and results."""

from graft.models.engine.engine import Engine

__all__ = ["Engine"]
