"""Models, drafters, and the engine that runs them in rounds."""

from graft.models.drafters import (
    Drafter,
    DrafterRoom,
    DraftVocab,
    Eagle3,
    Feed,
    TreeShape,
)
from graft.models.engine.engine import Engine
from graft.models.engine.migrate import HandOver
from graft.models.engine.options import Options
from graft.models.errors import (
    CheckpointError,
    ConfigError,
    DrafterError,
    EngineError,
    EngineUseError,
    HandOverError,
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
    "DrafterRoom",
    "Eagle3",
    "Engine",
    "EngineError",
    "EngineUseError",
    "Event",
    "Feed",
    "HandOver",
    "HandOverError",
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
