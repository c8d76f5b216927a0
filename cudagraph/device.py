"""The process's one device: how a user gets memory, streams, kernels. Nothing here imports it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from numpy.typing import NDArray

from graft.cudagraph import chooser, softstats
from graft.cudagraph.context import Context
from graft.cudagraph.driver import call, cu
from graft.cudagraph.dtypes import numpy_dtype
from graft.cudagraph.errors import OptionError
from graft.cudagraph.kernels import KernelModule, load
from graft.cudagraph.memory import DeviceArray, PinnedArray, check_shape, from_host, zeros
from graft.cudagraph.streams import Event, Stream
from graft.native import _native

#: Host work that is still in Python when the interpreter ends is waited for so long.
EXIT_LIMIT_S = 5.0
#: Failures told at exit, of those that nobody asked for.
MOST_TOLD = 8

_lock = threading.Lock()
_device: Device | None = None


def open_device(kind: str | None = None, ordinal: int | None = None) -> Device:
    """Open the device of this process, or return it when it is open.

    Parameters
    ----------
    kind : {"auto", "cuda", "soft"}, optional
        NVIDIA's driver or the soft device; "auto" takes CUDA where a device answers. Default: the
        environment variable GRAFT_DEVICE, else "auto".
    ordinal : int, optional
        Which CUDA device; default 0.

    Raises
    ------
    OptionError
        The kind is unknown, or another device is open: a process has one.
    DeviceError
        The device cannot be opened.
    """
    global _device
    wanted = kind or os.environ.get("GRAFT_DEVICE") or "auto"
    with _lock:
        if _device is not None:
            if wanted not in chooser.KINDS:
                chooser.choose(wanted)
            other_kind = kind not in (None, "auto", _device.kind)
            if other_kind or ordinal not in (None, _device.ordinal):
                raise OptionError(
                    f"device {kind or _device.kind}:{ordinal or 0} was asked for, but this process "
                    f"runs on {_device.kind}:{_device.ordinal}"
                )
            return _device
        kind, why = chooser.choose(wanted)
        _device = Device(kind, ordinal or 0, why)
        return _device


class Device(Context):
    """A GPU under NVIDIA's driver, or the soft device. Made by :func:`open_device`.

    Attributes
    ----------
    kind : {"cuda", "soft"}
    name : str
    ordinal : int
    compute_capability : tuple of int
    cores : int
        Multiprocessors, or worker threads of the soft device.
    why : str
        Why "auto" took the soft device; else empty.
    """

    def __init__(self, kind: str, ordinal: int, why: str = "") -> None:
        super().__init__(kind, ordinal)
        self.why = why
        atexit.register(_end)
        self.name = call(cu.cuDeviceGetName, 128, self._handle).split(b"\0")[0].decode()
        major = "COMPUTE_CAPABILITY_MAJOR"
        minor = "COMPUTE_CAPABILITY_MINOR"
        self.compute_capability = (self.attribute(major), self.attribute(minor))
        self.cores = self.attribute("MULTIPROCESSOR_COUNT")

    def describe(self) -> str:
        """Return one line about the device, and why it is not CUDA where nobody asked for that."""
        major, minor = self.compute_capability
        if self.kind == "soft":
            said = f"soft device on {self.cores} CPU workers (no GPU; timings say nothing of one)"
            return f"{said}, as CUDA did not answer: {self.why}" if self.why else said
        return f"cuda:{self.ordinal} {self.name}, {self.cores} SMs, compute {major}.{minor}"

    def stream(self, name: str = "") -> Stream:
        """Make a non-blocking stream."""
        return Stream(self, name)

    def event(self, name: str = "event", *, timing: bool = False) -> Event:
        """Make an event, for what leaves a graph or meets outside of one."""
        return Event(name, timing=timing)

    def empty(self, shape: int | tuple[int, ...], dtype: str) -> DeviceArray:
        """Allocate an array with undefined contents."""
        numpy_dtype(dtype)
        return DeviceArray(self, check_shape(shape, "empty"), dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: str) -> DeviceArray:
        """Allocate an array of zeros."""
        return zeros(self, shape, dtype)

    def from_host(self, array: NDArray, dtype: str | None = None) -> DeviceArray:
        """Copy a host array to the device.

        Parameters
        ----------
        array : ndarray
            Values in the storage dtype, or float32 values to be rounded to a 16-bit float.
        dtype : str, optional
            Element type; default the array's own.
        """
        return from_host(self, array, dtype)

    def pinned(self, shape: int | tuple[int, ...], dtype: str) -> PinnedArray:
        """Allocate zeroed pinned host memory."""
        numpy_dtype(dtype)
        return PinnedArray(self, shape, dtype)

    def load(self, path: str | Path, defines: Mapping[str, object] | None = None) -> KernelModule:
        """Compile and load a kernel text, once per path and defines in this process."""
        return load(self, path, defines)

    def stats(self) -> dict[str, int | dict[str, int]]:
        """Return the soft device's counters; {} on CUDA."""
        if self.kind != "soft":
            return {}
        return softstats.snapshot()

    def __repr__(self) -> str:
        return f"<Device {self.describe()}>"


def _end() -> None:
    """Let no thread enter Python any more, then tell what failed and nobody asked for."""
    _native.close_gate(EXIT_LIMIT_S)
    untold = _native.take_untold()
    for node, replay, exception, message in untold[:MOST_TOLD]:
        when = f" in replay {replay}" if replay else ""
        said = f"{type(exception).__name__}: {exception}" if exception is not None else message
        print(f"graft: host step {node!r} failed{when}, and nobody asked: {said}", file=sys.stderr)
    if len(untold) > MOST_TOLD:
        print(f"graft: {len(untold) - MOST_TOLD} more failures were not told", file=sys.stderr)
