"""The process's one primary context: what memory, streams, events, kernels and graphs stand on."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from graft.cudagraph import chooser, softstats
from graft.cudagraph.driver import (
    call,
    check,
    check_code,
    cu,
    enter,
    is_current,
    set_context,
    set_fault_text,
)
from graft.cudagraph.errors import DeadlineError, DeviceError
from graft.cudagraph.stacks import describe_running
from graft.native import _native


class Context:
    """The primary context of one device, retained once and never reset.

    Parameters
    ----------
    kind : {"cuda", "soft"}
    ordinal : int

    Attributes
    ----------
    streams : WeakSet
        Streams that :meth:`synchronize` waits for.
    """

    def __init__(self, kind: str, ordinal: int) -> None:
        self.kind = kind
        self.ordinal = ordinal
        if kind == "soft":
            chooser.preload_soft()
            set_fault_text(softstats.explain)
        try:
            results = cu.cuInit(0)
        except Exception as error:  # the bindings raise what they like when there is no library
            raise DeviceError(f"NVIDIA's driver cannot be loaded: {error}") from error
        check("cuInit", results)
        count = check("cuDeviceGetCount", cu.cuDeviceGetCount())
        if not 0 <= ordinal < count:
            raise DeviceError(f"there is no {kind} device {ordinal}: the driver has {count}")
        self._handle = check("cuDeviceGet", cu.cuDeviceGet(ordinal))
        self._lock = threading.RLock()
        _native.bind_driver(_native.loaded_library(chooser.SONAME), 0)
        self._retain()
        self.streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._transfers: _native.Resource | None = None
        self._abandoned: list[tuple[object, ...]] = []

    def _retain(self) -> None:
        """Retain the primary context: the one CuPy and torch use, which is never reset."""
        with self._lock:
            context = check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(self._handle))
            _native.set_primary_context(int(context))
            set_context(context)

    def attribute(self, name: str) -> int:
        """Return a device attribute by the driver's name."""
        which = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(cu.cuDeviceGetAttribute, which, self._handle))

    def rest(self, timeout_s: float = 5.0) -> bool:
        """Give everything back that nobody uses any more, the context last.

        The device stays open: the next call that needs the context retains it again. Waits up to
        ``timeout_s`` seconds for what was dropped and is still being freed. Returns False where
        somebody still holds arrays, streams or graphs; they go on working.
        """
        with self._lock:
            self._transfers = None
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

    def transfer(self, enqueue: Callable[[int], object], buffers: tuple[object, ...] = ()) -> None:
        """Let ``enqueue(stream)`` start a copy or fill and wait until it is done.

        A stream of its own is used: the legacy NULL stream is not ordered with non-blocking ones,
        and a pageable copy on it may return before it has arrived. ``buffers`` is the memory that
        the copy uses.
        """
        with self._lock:
            if self._transfers is None:
                made = int(call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
                self._transfers = _native.Resource(_native.ResourceKind.STREAM, made)
            stream = self._transfers
        enqueue(stream.handle)
        try:
            wait_streams([stream.handle], None, "transfers")
        except BaseException:
            # Ctrl-C left the wait, not the copy: its memory must not be used for anything else.
            self._abandoned.append(buffers)
            raise

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until the device is idle, other libraries' streams in this context included.

        DeadlineError after ``timeout_s`` seconds says that graft's own streams are still busy.
        """
        with self._lock:
            streams = list(self.streams)
        handles = [stream.handle for stream in streams if not stream.closed]
        wait_streams(handles, timeout_s, "the device")
        call(cu.cuCtxSynchronize)


def wait_streams(handles: list[int], timeout_s: float | None, what: str) -> None:
    """Poll until each stream was seen idle once."""
    enter("cuStreamQuery")
    finished, code = _native.wait_streams(handles, timeout_s)
    if not finished:
        raise DeadlineError(f"{what} was busy for {timeout_s:g} s{describe_running()}")
    check_code("cuStreamQuery", code)
