"""Errors of graft.models. Each message names the file, field or option and the invalid value."""

from __future__ import annotations

from graft.cudagraph.errors import GraftError


class ConfigError(GraftError):
    """A model configuration is malformed, out of range or not supported."""


class CheckpointError(GraftError):
    """A checkpoint is damaged, incomplete or inconsistent with its configuration."""


class TokenizerError(GraftError):
    """A tokenizer is damaged or does not match its model."""


class RequestError(GraftError):
    """A request is invalid or cannot be served. Other requests are not affected."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MigrationError(RequestError):
    """A request cannot be migrated between two engines, or its data is damaged."""


class QueueFullError(RequestError):
    """The limits on waiting requests are reached. The request can be submitted again later."""


class TemplateUnavailableError(TokenizerError):
    """A chat template could not be rendered, although it may be valid. Try again later.

    The child process that renders templates could not be started, was killed or got no processor
    time.
    """


class RequestTimeoutError(RequestError):
    """A request did not finish within its timeout."""


class EngineError(GraftError):
    """The engine has failed permanently because of its device or one of its rounds."""


class EngineUseError(EngineError):
    """An engine was called while another call of the engine was running. That call continues."""


class DrafterError(GraftError):
    """A drafter does not match its declared shape, or returned invalid drafts."""
