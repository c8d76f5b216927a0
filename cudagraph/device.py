"""The device of the process, through which users create memory, streams and kernels."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike, NDArray

from graft.cudagraph.driver import chooser, softstats
from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.dtypes import dtype_name
from graft.cudagraph.driver.memory import (
    DeviceArray,
    PinnedArray,
    check_shape,
    from_host,
    wrap,
    zeros,
)
from graft.cudagraph.errors import OptionError
from graft.cudagraph.kernels.kernels import KernelModule, load
from graft.cudagraph.kernels.ptx import soft_device_runs_ptx
from graft.cudagraph.streams import Event, Stream
from graft.native import _native

#: Seconds to wait at exit for host work that is still running Python code.
EXIT_LIMIT_S = 5.0
#: Maximum number of unreported failures that are printed at exit.
MAX_PRINTED_FAILURES = 8

_lock = threading.Lock()
_device: Device | None = None


def open_device(kind: str | None = None, ordinal: int | None = None) -> Device:
    """Open the device of this process, or return it if it is already open.

    Parameters
    ----------
    kind : {"auto", "cuda", "soft"}, optional
        NVIDIA's driver or the soft device. "auto" selects CUDA if a device is available. Default:
        the environment variable GRAFT_DEVICE, otherwise "auto".
    ordinal : int, optional
        Index of the CUDA device. Default: 0.

    Raises
    ------
    OptionError
        The kind is unknown, or a different device is already open: a process has only one.
    DeviceError
        The device cannot be opened.
    """
    global _device
    requested = kind or os.environ.get("GRAFT_DEVICE") or "auto"
    with _lock:
        if _device is None:
            selected, reason = chooser.choose(requested)
            _device = Device(selected, ordinal or 0, reason)
            return _device
        if requested not in chooser.KINDS:
            chooser.choose(requested)  # raises OptionError
        same_kind = kind in (None, "auto", _device.kind)
        if not same_kind or ordinal not in (None, _device.ordinal):
            raise OptionError(
                f"device {kind or _device.kind}:{ordinal or 0} was requested, but this process "
                f"runs on {_device.kind}:{_device.ordinal}; a process can open only one device"
            )
        return _device


class Device(Context):
    """A GPU under NVIDIA's driver, or the soft device. Created by :func:`open_device`.

    `kind` is "cuda" or "soft". The soft device counts its worker threads as multiprocessors.
    `fallback_reason` says why "auto" selected the soft device; it is "" otherwise.
    """

    def __init__(self, kind: str, ordinal: int, fallback_reason: str = "") -> None:
        super().__init__(kind, ordinal)
        self.fallback_reason = fallback_reason
        atexit.register(_at_exit)
        self.name = call(cu.cuDeviceGetName, 128, self._handle).split(b"\0")[0].decode()
        major = self.attribute("COMPUTE_CAPABILITY_MAJOR")
        minor = self.attribute("COMPUTE_CAPABILITY_MINOR")
        self.compute_capability = (major, minor)
        self.multiprocessor_count = self.attribute("MULTIPROCESSOR_COUNT")

    @property
    def runs_gpu_code(self) -> bool:
        """Whether kernels run the code for GPUs instead of the code for CPUs.

        This is the case on CUDA and, with ``GRAFT_CODE=ptx``, on the soft device.
        """
        return self.kind == "cuda" or soft_device_runs_ptx()

    def describe(self) -> str:
        """Describe the device in one line.

        If "auto" selected the soft device, the line also says why CUDA is not available.
        """
        count = self.multiprocessor_count
        if self.kind == "soft":
            line = f"soft device on {count} CPU workers (no GPU; its timings are not GPU timings)"
            if soft_device_runs_ptx():
                line += ", kernels run as PTX"
            if self.fallback_reason:
                line += f", because CUDA is not available: {self.fallback_reason}"
            return line
        major, minor = self.compute_capability
        return f"cuda:{self.ordinal} {self.name}, {count} SMs, compute {major}.{minor}"

    def stream(self, name: str = "") -> Stream:
        """Create a non-blocking stream."""
        return Stream(self, name)

    def event(self, name: str = "event", *, timing: bool = False) -> Event:
        """Create an event, for synchronization between graphs, streams and the host.

        `timing` enables :meth:`Event.elapsed_s`.
        """
        return Event(name, timing=timing)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Allocate an array with undefined contents.

        `dtype` is the name of an element type (see :mod:`graft.cudagraph.driver.dtypes`) or the
        NumPy dtype of this name.
        """
        return DeviceArray(self, check_shape(shape, "empty"), dtype_name(dtype))

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Allocate an array of zeros."""
        return zeros(self, shape, dtype)

    def from_host(self, array: NDArray, dtype: DTypeLike | None = None) -> DeviceArray:
        """Copy a host array to the device.

        `dtype` is the element type on the device; default: that of `array`. `array` must have the
        NumPy type in which graft stores `dtype`, such as uint16 for ``"bfloat16"``. If `dtype` is
        an 8- or 16-bit float, `array` may also be float32; its values are then rounded.
        """
        return from_host(self, array, dtype)

    def pinned(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> PinnedArray:
        """Allocate zeroed pinned host memory."""
        return PinnedArray(self, shape, dtype_name(dtype))

    def wrap(self, array: Any) -> DeviceArray | PinnedArray:
        """Return a view of an array of another library, without a copy.

        The array has `__dlpack__`, `__cuda_array_interface__`, `__array_interface__` or the buffer
        protocol. The result is a DeviceArray for device and managed memory and a PinnedArray for
        pinned host memory. It keeps the array alive, and so does every graph that uses the result.
        Arrays of graft are returned unchanged.

        The call waits until earlier work on the array has finished: the work on the stream that its
        ``__cuda_array_interface__`` names, or, with DLPack, the work for which the other library
        makes consumers wait. Work that the other library enqueues later is not waited for.

        Raises
        ------
        ShapeError
            The object is not an array, or the array is not C-contiguous, empty, read-only, of an
            unsupported type, in pageable host memory or on another device.
        """
        return wrap(self, array)

    def load(self, path: str | Path, defines: Mapping[str, object] | None = None) -> KernelModule:
        """Compile and load a kernel source file with the macros `defines`.

        If the file is already loaded with the same macros, return the loaded module.
        """
        return load(self, path, defines)

    def stats(self) -> dict[str, int | dict[str, int]]:
        """Return the counters of the soft device; {} on CUDA."""
        if self.kind != "soft":
            return {}
        return softstats.snapshot()

    def __repr__(self) -> str:
        return f"<Device {self.describe()}>"


def _at_exit() -> None:
    """Stop host work from entering Python, then print host-step failures that were never raised."""
    _native.close_gate(EXIT_LIMIT_S)
    failures = _native.take_unreported_failures()
    for node, replay, exception, message in failures[:MAX_PRINTED_FAILURES]:
        when = f" in replay {replay}" if replay else ""
        if exception is not None:
            message = f"{type(exception).__name__}: {exception}"
        print(
            f"graft: host step {node!r} failed{when}; the error was not raised: {message}",
            file=sys.stderr,
        )
    omitted = len(failures) - MAX_PRINTED_FAILURES
    if omitted > 0:
        print(f"graft: {omitted} more failures are not shown", file=sys.stderr)
