"""Streams and events, and waiting for them without blocking in the driver.

Inside one graph lanes meet at marks. An :class:`Event` is for what leaves it: a node of a graph
records it in every replay, and another stream, another graph or the host goes on from there while
the rest of the replay still runs.
"""

from __future__ import annotations

import warnings

from graft.cudagraph.context import Context, wait_streams
from graft.cudagraph.driver import call, check_code, cu, enter, is_ready
from graft.cudagraph.errors import DeadlineError, OptionError
from graft.cudagraph.hostwork import check_captured, keep_captured, raise_eager_failure
from graft.cudagraph.stacks import describe_running
from graft.native import _native


class Stream:
    """An in-order queue of device work that never synchronises with the legacy NULL stream.

    Made by :meth:`Device.stream`. Dropping it lets enqueued work finish.
    """

    def __init__(self, context: Context, name: str = "") -> None:
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = int(call(cu.cuStreamCreate, flags))
        self._resource: _native.Resource | None = _native.Resource(
            _native.ResourceKind.STREAM, handle
        )
        context.streams.add(self)
        stale = _native.take_eager_failure(handle)
        if stale is not None:  # the driver may use a handle again
            warnings.warn(f"host step {stale[0]!r} failed on a dropped stream", stacklevel=3)
        self.name = name or f"stream {handle:#x}"

    @property
    def handle(self) -> int:
        """The CUstream as an integer."""
        if self._resource is None:
            raise OptionError(f"{self.name} is closed")
        return self._resource.handle

    @property
    def closed(self) -> bool:
        """Was the stream closed?"""
        return self._resource is None

    def query(self) -> bool:
        """Return whether all enqueued work has finished; DeviceError after a fault."""
        handle = self.handle
        enter("cuStreamQuery")
        return is_ready("cuStreamQuery", _native.query_stream(handle))

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until all enqueued work has finished. Ctrl-C is honoured.

        Raises
        ------
        DeadlineError
            After ``timeout_s`` seconds; names the host steps that run, and the work goes on.
        HostWorkError
            A host function enqueued on this stream, or in a captured graph, raised; each failure
            is raised once.
        DeviceError
            The device failed.
        """
        wait_streams([self.handle], timeout_s, self.name)
        raise_eager_failure(self.handle)
        check_captured()

    def close(self) -> None:
        """Give the stream back to the driver; work that is enqueued still finishes.

        HostWorkError of a host function that nobody was told of is raised when it is closed.
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
    """An event of the driver's; it lives as long as any graph that names it.

    What a launch of a graph means by its events is settled when it is launched: its wait nodes wait
    for what was recorded before, and who waits for an event from then on waits for the node that
    records it.

    Parameters
    ----------
    name : str
        Name for errors and drawings.
    timing : bool
        Whether :meth:`elapsed_s` can be asked; costs a little at each record.
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
        """What must be kept alive while a graph names the event."""
        return self._resource

    def record(self, stream: Stream) -> None:
        """Record what is enqueued on a stream; in a capture add a node that records it."""
        external = keep_captured(stream.handle, (self.owner,))
        call(cu.cuEventRecordWithFlags, self.handle, stream.handle, int(external))

    def wait(self, stream: Stream) -> None:
        """Let a stream wait for the event; in a capture add a node that waits."""
        external = keep_captured(stream.handle, (self.owner,))
        call(cu.cuStreamWaitEvent, stream.handle, self.handle, int(external))

    def query(self) -> bool:
        """Return whether what was recorded last has finished; True when nothing was."""
        enter("cuEventQuery")
        return is_ready("cuEventQuery", _native.query_event(self.handle))

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until what was recorded last has finished; see :meth:`Stream.synchronize`."""
        enter("cuEventQuery")
        finished, code = _native.wait_event(self.handle, timeout_s)
        if not finished:
            raise DeadlineError(
                f"event {self.name!r} was not reached in {timeout_s:g} s{describe_running()}"
            )
        check_code("cuEventQuery", code)

    def elapsed_s(self, since: Event) -> float:
        """Return seconds of the device's clock since another event; both were made with ``timing``,
        were recorded and have finished."""
        for event in (self, since):
            if not event.timing:
                raise OptionError(f"event {event.name!r} keeps no time: make it with timing=True")
        return float(call(cu.cuEventElapsedTime, since.handle, self.handle)) * 1e-3

    def __repr__(self) -> str:
        return f"<Event {self.name!r}>"
