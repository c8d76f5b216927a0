"""The process's one device."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph import chooser
from graft.cudagraph.driver import call, check, cu, is_current, set_context, set_fault_text
from graft.cudagraph.dtypes import dtype_name, from_float32, numpy_dtype
from graft.cudagraph.errors import DeviceError, OptionError, ShapeError
from graft.cudagraph.memory import DeviceArray, PinnedArray, check_shape
from graft.cudagraph.streams import Stream, wait_streams
from graft.native import _native

if TYPE_CHECKING:
    from graft.cudagraph.events import Event
    from graft.cudagraph.kernels import KernelModule

__all__ = ["Device", "Stream", "open_device"]

#: Host work that is still in Python when the interpreter ends is waited for so long.
EXIT_LIMIT_S = 5.0

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
        _device = Device(chooser.choose(wanted), ordinal or 0)
        return _device


class Device:
    """A GPU under NVIDIA's driver, or the soft device. Made by :func:`open_device`.

    Attributes
    ----------
    kind : {"cuda", "soft"}
    name : str
    ordinal : int
    compute_capability : tuple of int
    cores : int
        Multiprocessors, or worker threads of the soft device.
    """

    def __init__(self, kind: str, ordinal: int) -> None:
        self.kind = kind
        self.ordinal = ordinal
        if kind == "soft":
            chooser.preload_soft()
            from graft.cudagraph import softstats

            set_fault_text(softstats.explain)
        try:
            results = cu.cuInit(0)
        except Exception as error:  # the bindings raise what they like when there is no library
            raise DeviceError(f"NVIDIA's driver cannot be loaded: {error}") from error
        check("cuInit", results)
        count = check("cuDeviceGetCount", cu.cuDeviceGetCount())
        if not 0 <= ordinal < count:
            raise DeviceError(f"there is no {kind} device {ordinal}: the driver has {count}")
        handle = check("cuDeviceGet", cu.cuDeviceGet(ordinal))
        self._handle = handle
        self._lock = threading.RLock()
        _native.bind_driver(_native.loaded_library(chooser.SONAME), 0)
        self._retain()
        atexit.register(_native.close_gate, EXIT_LIMIT_S)

        def attribute(name: str) -> int:
            which = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(call(cu.cuDeviceGetAttribute, which, handle))

        self.name = call(cu.cuDeviceGetName, 128, handle).split(b"\0")[0].decode()
        self.compute_capability = (
            attribute("COMPUTE_CAPABILITY_MAJOR"),
            attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        self.cores = attribute("MULTIPROCESSOR_COUNT")
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        # Weak: what nobody's kernels use is unloaded.
        self._modules: weakref.WeakValueDictionary[tuple, KernelModule] = (
            weakref.WeakValueDictionary()
        )
        self._transfer_stream: Stream | None = None
        self._abandoned: list[tuple[object, ...]] = []

    def _retain(self) -> None:
        """Retain the primary context: the one CuPy and torch use, which is never reset."""
        with self._lock:
            context = check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(self._handle))
            _native.set_primary_context(int(context))
            set_context(context)

    def rest(self, timeout_s: float = 5.0) -> bool:
        """Give everything back that nobody uses any more, the context last.

        The device stays open: the next call that needs the context retains it again. Waits up to
        ``timeout_s`` seconds for what was dropped and is still being freed.

        Returns
        -------
        bool
            Whether nothing of graft's is left on the device. False where somebody still holds
            arrays, streams or graphs; they go on working.
        """
        with self._lock:
            if self._transfer_stream is not None:
                self._transfer_stream.close()
                self._transfer_stream = None
        deadline = time.monotonic() + timeout_s
        while _native.live_resources() or _native.live_records():
            if time.monotonic() > deadline:
                return False
            _native.flush(timeout_s)
            time.sleep(0.002)
        with self._lock:
            if _native.live_resources() == 0 and is_current():
                set_context(None, self._retain)
                _native.set_primary_context(0)
                check("cuDevicePrimaryCtxRelease", cu.cuDevicePrimaryCtxRelease(self._handle))
        return True

    def describe(self) -> str:
        """Return one line about the device."""
        major, minor = self.compute_capability
        if self.kind == "soft":
            return f"soft device on {self.cores} CPU workers (no GPU; timings say nothing of one)"
        return f"cuda:{self.ordinal} {self.name}, {self.cores} SMs, compute {major}.{minor}"

    def stream(self, name: str = "") -> Stream:
        """Make a non-blocking stream."""
        made = Stream(self, name)
        with self._lock:
            self._streams.add(made)
        return made

    def event(self, name: str = "event", *, timing: bool = False) -> Event:
        """Make an event, for what leaves a graph or meets outside of one."""
        from graft.cudagraph.events import Event

        return Event(self, name, timing=timing)

    def empty(self, shape: int | tuple[int, ...], dtype: str) -> DeviceArray:
        """Allocate an array with undefined contents."""
        numpy_dtype(dtype)
        return DeviceArray(self, check_shape(shape, "empty"), dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: str) -> DeviceArray:
        """Allocate an array of zeros."""
        made = self.empty(shape, dtype)
        pointer, nbytes = made.ptr, made.nbytes
        self.transfer(lambda s: call(cu.cuMemsetD8Async, pointer, 0, nbytes, s), (made.owner,))
        return made

    def from_host(self, array: NDArray, dtype: str | None = None) -> DeviceArray:
        """Copy a host array to the device.

        Parameters
        ----------
        array : ndarray
            Values in the storage dtype, or float32 values to be rounded to a 16-bit float.
        dtype : str, optional
            Element type; default the array's own.
        """
        source = np.asarray(array)
        name = dtype or dtype_name(source.dtype)
        if source.dtype == np.float32 and name in ("float16", "bfloat16"):
            source = from_float32(source, name)
        if source.dtype != numpy_dtype(name):
            raise ShapeError(f"host array is {source.dtype}; {name} is stored as "
                             f"{numpy_dtype(name)}")  # fmt: skip
        made = self.empty(source.shape, name)
        contiguous = np.ascontiguousarray(source)
        pointer, address = made.ptr, contiguous.ctypes.data
        self.transfer(
            lambda s: call(cu.cuMemcpyHtoDAsync, pointer, address, made.nbytes, s),
            (made.owner, contiguous),
        )
        return made

    def pinned(self, shape: int | tuple[int, ...], dtype: str) -> PinnedArray:
        """Allocate zeroed pinned host memory."""
        numpy_dtype(dtype)
        return PinnedArray(self, shape, dtype)

    def load(self, path: str | Path, defines: Mapping[str, object] | None = None) -> KernelModule:
        """Compile and load a kernel text, once per path and defines in this process."""
        from graft.cudagraph.kernels import load_module

        source = Path(path).resolve()
        macros = {key: str(value) for key, value in (defines or {}).items()}
        key = (source, tuple(sorted(macros.items())))
        with self._lock:
            found = self._modules.get(key)
        if found is None:
            made = load_module(self, source, macros)
            with self._lock:
                found = self._modules.setdefault(key, made)
        return found

    def transfer(self, enqueue: Callable[[int], object], buffers: tuple[object, ...] = ()) -> None:
        """Let ``enqueue(stream)`` start a copy or fill and wait until it is done.

        A stream of its own is used: the legacy NULL stream is not ordered with non-blocking ones,
        and a pageable copy on it may return before it has arrived. ``buffers`` is the memory that
        the copy uses.
        """
        with self._lock:
            if self._transfer_stream is None:
                self._transfer_stream = Stream(self, "transfers")
            stream = self._transfer_stream
        enqueue(stream.handle)
        try:
            stream.synchronize()
        except BaseException:
            # Ctrl-C left the wait, not the copy: its memory must not be used for anything else.
            self._abandoned.append(buffers)
            raise

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until the device is idle, other libraries' streams in this context included.

        Raises
        ------
        DeadlineError
            After ``timeout_s`` seconds, when graft's own streams are still busy.
        DeviceError
            The device failed.
        """
        with self._lock:
            streams = list(self._streams)
        handles = [stream.handle for stream in streams if not stream.closed]
        wait_streams(handles, timeout_s, "the device")
        call(cu.cuCtxSynchronize)

    def stats(self) -> dict[str, int | dict[str, int]]:
        """Return the soft device's counters; {} on CUDA."""
        if self.kind != "soft":
            return {}
        from graft.cudagraph import softstats

        return softstats.snapshot()

    def __repr__(self) -> str:
        return f"<Device {self.describe()}>"
