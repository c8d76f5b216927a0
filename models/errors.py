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


class EngineError(GraftError):
    """The engine has failed for good, by its device or in one of its rounds."""
