"""Events: points that streams, graphs and the host wait for across graphs.

Inside one graph lanes meet at marks. An :class:`Event` is for what leaves it: a node of a graph
records it in every replay, and another stream, another graph or the host goes on from there while
the rest of the replay still runs.
"""

from __future__ import annotations

from graft.cudagraph.driver import call, check_code, cu, enter, is_ready
from graft.cudagraph.errors import DeadlineError, OptionError
from graft.cudagraph.hostwork import capture_of, keep_captured
from graft.cudagraph.stacks import describe_running
from graft.cudagraph.streams import Stream
from graft.native import _native


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
        self.name, self.timing = name, timing
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
        if capture_of(stream.handle) is None:
            call(cu.cuEventRecord, self.handle, stream.handle)
            return
        keep_captured(stream.handle, (self.owner,))
        external = cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        call(cu.cuEventRecordWithFlags, self.handle, stream.handle, int(external))

    def wait(self, stream: Stream) -> None:
        """Let a stream wait for the event; in a capture add a node that waits."""
        if capture_of(stream.handle) is None:
            call(cu.cuStreamWaitEvent, stream.handle, self.handle, 0)
            return
        keep_captured(stream.handle, (self.owner,))
        external = cu.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL
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
