"""Mailboxes in stream captures, whoever began the capture and whoever launches the graph.

A captured graph may be instantiated and cloned by others, and all of its executables share the
words that its nodes carry. Two of them at work at the same time would take each other's answers.
So request and wait are one kernel here, which takes a lease first: the second of two fails, typed
and on both sides, and asks nothing. A wait of memory operations cannot tell whose answer it takes,
so :meth:`StreamLane.mailbox` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from graft.cudagraph.driver import call, check_code, cu, enter
from graft.cudagraph.errors import OptionError
from graft.cudagraph.hostwork import HostWork, as_work, capture_of, check_captured
from graft.cudagraph.mailbox import (
    ACK,
    COUNTER,
    GAVE_UP,
    LEASE,
    REFUSED,
    REQUEST,
    Limits,
    Mailbox,
    MailboxWorker,
)
from graft.cudagraph.memory import PinnedArray
from graft.native import _native

if TYPE_CHECKING:
    from graft.cudagraph.device import Device
    from graft.cudagraph.streams import Stream

__all__ = ["spin_captured"]


def spin_captured(
    device: Device,
    stream: Stream | int,
    work: HostWork,
    *,
    worker: MailboxWorker | None = None,
    deadline_s: float = 10.0,
    device_deadline_s: float | None = None,
    output: PinnedArray | None = None,
    name: str | None = None,
) -> PinnedArray:
    """Add host work that a worker of ours answers to the graph that a stream captures.

    A one-thread kernel posts the request and spins until the answer; no driver thread takes part.
    Failures are raised as those of captured host functions are (:func:`hostfunc`).

    Parameters
    ----------
    device : Device
    stream : Stream or int
        A stream that captures, or the CUstream handle of somebody else's.
    work, worker, deadline_s, device_deadline_s, output, name
        As for :meth:`GraphLane.spin`. Nobody tells the worker when the graph is launched, so its
        threads look for requests as long as the graph lives: every 0.5 ms once 20 ms have passed
        without one, or without a pause where the worker is told to spin.

    Returns
    -------
    PinnedArray
        int32 [16], status words as of :class:`Graph`, for kernels behind this one that must do
        nothing in a failed replay. Word 0 may also be 5: a second executable of the graph asked
        while the first was waiting. It stays set until the failure was raised.

    Raises
    ------
    OptionError
        The stream captures no graph, or an option is out of range.
    DeviceError
        The driver refused, or the capture was invalidated.
    """
    handle = stream if isinstance(stream, int) else stream.handle
    title = name or as_work(work).title
    enter("cuLaunchKernel")
    check_captured()
    capture = capture_of(handle)
    if capture is None:
        raise OptionError(
            f"mailbox {title!r} needs a graph, and the stream captures none: use host()"
        )
    limits = Limits(deadline_s, None, device_deadline_s or 2.0 * deadline_s)
    answers = MailboxWorker(name="captured") if worker is None else worker
    with relaxed_capture():
        box = Mailbox(
            device, work, answers, limits, spinning=True, output=output, captured=True
        )
        kernel = box.kernels["mailbox_leased"]
    assert box.status is not None
    words = [box.device_address(n) for n in (COUNTER, LEASE, REQUEST, ACK, GAVE_UP, REFUSED)]
    packed = kernel.pack((*words, box.status, int(limits.device_s * 1e9)))
    _, graph = capture
    state = _native.captured_state(*capture)
    code, api, user_object = box.attach(graph, state, title, box.owners)
    check_code(api, code)
    try:
        call(
            cu.cuLaunchKernel, kernel.function, 1, 1, 1, 1, 1, 1, 0, handle, packed.address, 0
        )
    except BaseException:
        _native.detach(graph, user_object)
        raise
    del packed  # not before the call has returned
    return box.status


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread allocate and load modules without invalidating anybody's capture."""
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call(cu.cuThreadExchangeStreamCaptureMode, mode)
    try:
        yield
    finally:
        call(cu.cuThreadExchangeStreamCaptureMode, before)

