"""Errors of the models room. Each names the file or field and the offending value."""

from __future__ import annotations

from graft.cudagraph.errors import GraftError


class ConfigError(GraftError):
    """A model's configuration is malformed, absurd or asks for what graft does not implement."""


class CheckpointError(GraftError):
    """A checkpoint is damaged, incomplete, or does not have the tensors its config promises."""


class TokenizerError(GraftError):
    """A tokenizer is damaged or does not belong to the model it was given with."""


class RequestError(GraftError):
    """A request cannot be served as asked; it fails alone."""


class MigrationError(RequestError):
    """A request cannot go from one engine to the other, or was damaged on its way."""


class QueueFullError(RequestError):
    """As many requests wait as may; the same one can be served later."""


class RequestTimeoutError(RequestError):
    """A request was not done within its time."""


class EngineError(GraftError):
    """The engine has failed for good, by its device or in one of its rounds."""


class EngineUseError(EngineError):
    """An engine is called while another call of it runs, which goes on."""


class DrafterError(GraftError):
    """A drafter does not keep to what it declared of itself."""
