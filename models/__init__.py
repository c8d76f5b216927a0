"""Target models, drafters, and the engine: continuous batching with speculative decoding."""

from graft.models.drafters import Drafter, DrafterContext, DraftVocab, Eagle3, Feed, TreeShape
from graft.models.engine.engine import Engine
from graft.models.engine.migrate import MigratedRequest
from graft.models.engine.options import Options
from graft.models.errors import (
    CheckpointError,
    ConfigError,
    DrafterError,
    EngineError,
    EngineUseError,
    MigrationError,
    QueueFullError,
    RequestError,
    TokenizerError,
)
from graft.models.request import Event, Limits, Logprob, Output, Relaxed, Request

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DraftVocab",
    "Drafter",
    "DrafterError",
    "DrafterContext",
    "Eagle3",
    "Engine",
    "EngineError",
    "EngineUseError",
    "Event",
    "Feed",
    "MigratedRequest",
    "MigrationError",
    "Limits",
    "Logprob",
    "Options",
    "Output",
    "QueueFullError",
    "Relaxed",
    "Request",
    "RequestError",
    "TokenizerError",
    "TreeShape",
]
