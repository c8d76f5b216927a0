"""Exceptions of graft. Every message names the object and the value that caused it."""

from __future__ import annotations

from graft.native.errors import GraftError, OptionError

__all__ = [
    "DeadlineError",
    "DeviceError",
    "GraftError",
    "HostWorkError",
    "KernelError",
    "OptionError",
    "ShapeError",
    "SoftImportError",
]


class DeviceError(GraftError):
    """A driver call failed, the device cannot be opened, or a call is not allowed on the device.

    `api` names the driver function and `code_name` its result, such as
    ``CUDA_ERROR_OUT_OF_MEMORY``. Both are "" and `code` is 0 if no call was made. `detail` is the
    driver's description of the error.
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
    """A kernel does not compile, does not exist, or was given invalid arguments."""


class ShapeError(GraftError):
    """An array has the wrong shape, dtype or size."""


class DeadlineError(GraftError):
    """A wait exceeded its time limit."""


class HostWorkError(GraftError):
    """A host step failed. If it raised a Python exception, the exception is the ``__cause__``.

    `node` is the name of the host step. `replay` is the number of the replay, from 1, or 0 for host
    work that was enqueued on a stream.
    """

    def __init__(self, message: str, *, node: str, replay: int) -> None:
        super().__init__(message)
        self.node = node
        self.replay = replay
