"""Streams and events, with waits that do not block in the driver.

Lanes of one graph synchronize at marks. An :class:`Event` synchronizes a graph with work outside
the graph: a node of the graph records the event in every replay. Another stream, another graph or
the host waits for the event and continues while the rest of the replay still runs.
"""

from __future__ import annotations

import warnings

from graft.cudagraph.driver.context import Context, wait_streams
from graft.cudagraph.driver.driver import (
    call,
    check_code,
    check_timeout,
    cu,
    is_ready,
    prepare_driver_call,
)
from graft.cudagraph.driver.handles import StreamLike, stream_handle
from graft.cudagraph.driver.held import drop_finished
from graft.cudagraph.driver.stacks import describe_running
from graft.cudagraph.errors import DeadlineError, OptionError
from graft.cudagraph.host.hostwork import check_captured, keep_captured, raise_eager_failure
from graft.native import _native


class Stream:
    """An in-order queue of device work that does not synchronize with the legacy NULL stream.

    Created by :meth:`Device.stream`. If the object is dropped, the enqueued work still finishes.
    """

    def __init__(self, context: Context, name: str = "") -> None:
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = int(call(cu.cuStreamCreate, flags))
        self._resource: _native.Resource | None = _native.Resource(
            _native.ResourceKind.STREAM, handle
        )
        context.add_stream(self)
        # The driver reuses handles. A failure that is pending under this handle belongs to a
        # stream that was dropped. Report it now, so that it is not attributed to the new stream.
        failure = _native.take_eager_failure(handle)
        if failure is not None:
            warnings.warn(f"host step {failure[0]!r} failed on a dropped stream", stacklevel=3)
        self.name = name or f"stream {handle:#x}"

    @property
    def handle(self) -> int:
        """The CUstream as an integer."""
        if self._resource is None:
            raise OptionError(f"{self.name} is closed")
        return self._resource.handle

    @property
    def owner(self) -> _native.Resource | None:
        """Object that destroys the CUstream when it is freed; None if the stream was closed."""
        return self._resource

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (0, handle), through which cuda.core, CuPy and numba-cuda use the stream."""
        return 0, self.handle

    @property
    def closed(self) -> bool:
        """Whether the stream was closed."""
        return self._resource is None

    def query(self) -> bool:
        """Return whether all enqueued work has finished. A failure of the device is raised."""
        handle = self.handle
        prepare_driver_call("cuStreamQuery")
        return is_ready("cuStreamQuery", _native.query_stream(handle))

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until all enqueued work has finished. Ctrl-C interrupts the wait.

        Raises
        ------
        DeadlineError
            The work did not finish within ``timeout_s`` seconds. The work continues. The message
            names the host steps that are running.
        HostWorkError
            Host work enqueued on this stream, or in a captured graph, failed. Each failure is
            raised once.
        DeviceError
            The device failed.
        """
        wait_streams([self.handle], timeout_s, self.name)
        drop_finished()
        raise_eager_failure(self.handle)
        check_captured()

    def close(self) -> None:
        """Close the stream. Enqueued work still finishes.

        If host work on this stream failed and the failure was not raised yet, HostWorkError is
        raised after the stream is closed.
        """
        if self._resource is None:
            return
        handle = self._resource.handle
        self._resource = None
        raise_eager_failure(handle)

    def __repr__(self) -> str:
        state = " (closed)" if self._resource is None else ""
        return f"<Stream {self.name!r}{state}>"


class Event:
    """A CUDA event. Graphs that use it keep it alive.

    Waits and records of an event are matched in the order in which they are enqueued. The event
    nodes of a graph count as enqueued when a replay is launched. An event wait node therefore waits
    for the last record before the launch. A wait that is enqueued after the launch waits for the
    event record node of that replay.

    With `timing`, the event records the time for :meth:`elapsed_s`, which adds a small cost to
    every record.
    """

    def __init__(self, name: str = "event", *, timing: bool = False) -> None:
        flags = cu.CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        self.name = name
        self.timing = timing
        self._resource = _native.Resource(
            _native.ResourceKind.EVENT, int(call(cu.cuEventCreate, flag))
        )

    @property
    def handle(self) -> int:
        """The CUevent as an integer."""
        return self._resource.handle

    @property
    def owner(self) -> object:
        """Object that destroys the CUevent when it is freed.

        A graph that uses the event must keep a reference to this object.
        """
        return self._resource

    def record(self, stream: StreamLike) -> None:
        """Record the event on a stream; in a capture, add a node that records it."""
        handle = stream_handle(stream, "Event.record()")
        external = keep_captured(handle, (self.owner,))
        call(cu.cuEventRecordWithFlags, self.handle, handle, int(external))

    def wait(self, stream: StreamLike) -> None:
        """Make a stream wait for the event; in a capture, add a node that waits."""
        handle = stream_handle(stream, "Event.wait()")
        external = keep_captured(handle, (self.owner,))
        call(cu.cuStreamWaitEvent, handle, self.handle, int(external))

    def query(self) -> bool:
        """Return whether the work before the last record of the event has finished.

        An event that was never recorded counts as finished.
        """
        prepare_driver_call("cuEventQuery")
        return is_ready("cuEventQuery", _native.query_event(self.handle))

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until the work before the last record of the event has finished.

        DeadlineError is raised if it does not finish within ``timeout_s`` seconds.
        """
        check_timeout(timeout_s)
        prepare_driver_call("cuEventQuery")
        finished, code = _native.wait_event(self.handle, timeout_s)
        if not finished:
            raise DeadlineError(
                f"event {self.name!r} was not reached in {timeout_s:g} s{describe_running()}"
            )
        check_code("cuEventQuery", code)

    def elapsed_s(self, since: Event) -> float:
        """Return the seconds of device time from the event ``since`` to this one.

        Both events must have been created with ``timing=True``, recorded and reached by the device.
        """
        for event in (self, since):
            if not event.timing:
                raise OptionError(
                    f"event {event.name!r} records no time: create it with timing=True"
                )
        return float(call(cu.cuEventElapsedTime, since.handle, self.handle)) * 1e-3

    def __repr__(self) -> str:
        return f"<Event {self.name!r}>"
