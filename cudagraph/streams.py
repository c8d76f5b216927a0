"""Streams, and waiting for them without blocking in the driver."""

from __future__ import annotations

import warnings

from graft.cudagraph.context import Context, wait_streams
from graft.cudagraph.driver import call, cu, enter, is_ready
from graft.cudagraph.errors import OptionError
from graft.cudagraph.hostwork import check_captured, raise_eager_failure
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
