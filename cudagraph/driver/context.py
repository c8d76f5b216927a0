"""The primary context of the process, in which all memory, streams, kernels and graphs live."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from graft.cudagraph.driver import chooser, softstats
from graft.cudagraph.driver.driver import (
    call,
    check,
    check_code,
    check_timeout,
    cu,
    is_context_retained,
    prepare_driver_call,
    set_context,
    set_error_detail_source,
)
from graft.cudagraph.driver.driverlog import DriverLog
from graft.cudagraph.driver.held import drop_finished
from graft.cudagraph.driver.stacks import describe_running
from graft.cudagraph.errors import DeadlineError, DeviceError
from graft.native import _native

RELEASE_POLL_S = 0.002


class Context:
    """The primary context of one device, retained when the device is opened and never reset."""

    def __init__(self, kind: str, ordinal: int) -> None:
        self.kind = kind
        self.ordinal = ordinal
        if kind == "soft":
            chooser.preload_soft()
            set_error_detail_source(softstats.error_detail)
        try:
            results = cu.cuInit(0)
        except Exception as error:
            # If libcuda is missing, cuda.bindings raises exceptions of various types.
            raise DeviceError(f"NVIDIA's driver cannot be loaded: {error}") from error
        if kind == "cuda":
            library = ctypes.CDLL(_native.loaded_library(chooser.SONAME))
            set_error_detail_source(DriverLog(library))
        check("cuInit", results)
        count = check("cuDeviceGetCount", cu.cuDeviceGetCount())
        if not 0 <= ordinal < count:
            raise DeviceError(f"there is no {kind} device {ordinal}: the driver has {count}")
        self._handle = check("cuDeviceGet", cu.cuDeviceGet(ordinal))
        self._lock = threading.RLock()
        _native.bind_driver(_native.loaded_library(chooser.SONAME), 0)
        self._retain()
        # The streams that synchronize() waits for. The lock is held while they are changed or read.
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._transfer_stream: _native.Resource | None = None
        # Stream and buffers of each transfer that Ctrl-C interrupted and that may still run.
        self._interrupted_transfers: list[tuple[_native.Resource, tuple[object, ...]]] = []

    def _retain(self) -> None:
        """Retain the primary context, which CuPy and torch use as well."""
        with self._lock:
            context = check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(self._handle))
            _native.set_primary_context(int(context))
            set_context(context)

    def attribute(self, name: str) -> int:
        """Return the device attribute ``CU_DEVICE_ATTRIBUTE_<name>``."""
        attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(cu.cuDeviceGetAttribute, attribute, self._handle))

    def release_unused(self, timeout_s: float = 5.0) -> bool:
        """Free all unused resources, then release the primary context.

        The device stays open: the next call that needs the context retains it again. The call waits
        up to ``timeout_s`` seconds until dropped objects are freed. Return False if arrays, streams
        or graphs are still in use; they continue to work.
        """
        with self._lock:
            self._transfer_stream = None
        deadline = time.monotonic() + timeout_s
        drop_finished()
        while _native.live_resources() or _native.live_records():
            if time.monotonic() > deadline:
                return False
            _native.flush(timeout_s)
            time.sleep(RELEASE_POLL_S)
        with self._lock:
            if _native.live_resources() == 0 and is_context_retained():
                set_context(None, self._retain)
                _native.set_primary_context(0)
                check("cuDevicePrimaryCtxRelease", cu.cuDevicePrimaryCtxRelease(self._handle))
        return True

    def transfer(
        self, buffers: tuple[object, ...], function: Callable[..., tuple], *args: object
    ) -> None:
        """Enqueue a copy or fill by ``function(*args, stream)`` and wait until it has finished.

        The stream is used for such transfers only. The legacy NULL stream cannot be used, because
        it is not ordered with non-blocking streams, and a copy from pageable memory on it may
        return before the data has arrived. `buffers` are the objects that own the memory of the
        operation. If Ctrl-C interrupts this call, they are kept alive until a later transfer has
        finished.
        """
        with self._lock:
            if self._transfer_stream is None:
                handle = int(call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
                self._transfer_stream = _native.Resource(_native.ResourceKind.STREAM, handle)
            stream = self._transfer_stream
            earlier = [entry for entry in self._interrupted_transfers if entry[0] is stream]
        try:
            call(function, *args, stream.handle)
            wait_streams([stream.handle], None, "transfers")
        except BaseException:
            # Ctrl-C may arrive after the driver has enqueued the operation, which then still
            # accesses the buffers.
            with self._lock:
                self._interrupted_transfers.append((stream, buffers))
            raise
        if earlier:
            # A stream runs its operations in order. So the transfers that Ctrl-C interrupted before
            # this transfer was enqueued have finished too, and their buffers may be freed.
            with self._lock:
                self._interrupted_transfers = [
                    entry
                    for entry in self._interrupted_transfers
                    if not any(entry is finished for finished in earlier)
                ]

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until the device is idle, including streams of other libraries in this context.

        DeadlineError is raised if streams of graft are still busy after ``timeout_s`` seconds. The
        wait for streams of other libraries has no time limit.
        """
        with self._lock:
            streams = list(self._streams)
        # The owners keep streams valid that other threads close during the wait.
        owners = [owner for stream in streams if (owner := stream.owner) is not None]
        wait_streams([owner.handle for owner in owners], timeout_s, "the device")
        call(cu.cuCtxSynchronize)
        drop_finished()

    def add_stream(self, stream: Any) -> None:
        """Let :meth:`synchronize` wait for a `Stream` as long as the object exists."""
        with self._lock:
            self._streams.add(stream)


def wait_streams(handles: list[int], timeout_s: float | None, subject: str) -> None:
    """Wait until all work on the streams `handles` (CUstreams) has finished.

    Ctrl-C interrupts the wait. DeadlineError is raised if a stream is still busy after
    ``timeout_s`` seconds; `subject` names the streams in the message.
    """
    check_timeout(timeout_s)
    prepare_driver_call("cuStreamQuery")
    finished, code = _native.wait_streams(handles, timeout_s)
    if not finished:
        raise DeadlineError(f"{subject} was busy for {timeout_s:g} s{describe_running()}")
    check_code("cuStreamQuery", code)
