"""Errors that graft raises. Each names the thing and the value, before any work starts."""

from __future__ import annotations


class GraftError(Exception):
    """Base of every error that graft raises on purpose."""


class DeviceError(GraftError):
    """A driver call failed, or the device cannot be opened or used that way.

    ``api`` is the driver call, ``code`` its result, ``code_name`` the result's name, such as
    ``CUDA_ERROR_OUT_OF_MEMORY``, ``detail`` what the driver says; "" and 0 where none was made.
    """

    def __init__(
        self, message: str, *, api: str = "", code: int = 0, code_name: str = "", detail: str = ""
    ) -> None:
        super().__init__(message)
        self.api = api
        self.code = code
        self.code_name = code_name
        self.detail = detail


class SoftImportError(DeviceError, ImportError):
    """A package that needs NVIDIA's driver was imported on the soft device."""


class KernelError(GraftError):
    """A kernel does not compile, does not exist, or was given wrong arguments."""


class ShapeError(GraftError):
    """An array has the wrong shape, dtype or size."""


class OptionError(GraftError):
    """An option has a value that graft does not accept, or calls do not fit together."""


class DeadlineError(GraftError):
    """A wait passed its deadline."""


class HostWorkError(GraftError):
    """The host step ``node`` failed; its exception, if it was Python, is the cause.

    ``replay`` is the number of the replay, from 1; 0 for work enqueued on a stream.
    """

    def __init__(self, message: str, *, node: str, replay: int) -> None:
        super().__init__(message)
        self.node = node
        self.replay = replay
