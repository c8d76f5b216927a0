"""Owners of memory of other libraries that enqueued work uses."""

from __future__ import annotations

import threading

from graft.cudagraph.driver.driver import NOT_READY, call, cu, prepare_driver_call
from graft.native import _native

_lock = threading.Lock()
# Pairs of an event after the last use of foreign memory on a stream, and the owners of the memory.
_held: list[tuple[_native.Resource, tuple[object, ...]]] = []


class ForeignMemory:
    """Memory that another library allocated. `source` is the object that keeps it alive."""

    __slots__ = ("handle", "source")

    def __init__(self, handle: int, source: object) -> None:
        self.handle = handle
        self.source = source


def new_event() -> _native.Resource:
    """Create an event without timing."""
    flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
    return _native.Resource(_native.ResourceKind.EVENT, int(call(cu.cuEventCreate, flags)))


def hold_foreign(stream: int, owners: tuple[object, ...]) -> None:
    """Keep the foreign memory among `owners` alive until the stream has reached this point.

    Another library may reuse memory as soon as its owner is gone, whereas the driver frees memory
    of graft only after the work that uses it. :func:`drop_finished` drops the owners.
    """
    foreign = tuple(owner for owner in owners if isinstance(owner, ForeignMemory))
    if not foreign:
        return
    drop_finished()
    event = new_event()
    call(cu.cuEventRecord, event.handle, stream)
    with _lock:
        _held.append((event, foreign))


def drop_finished() -> None:
    """Drop the owners of foreign memory whose work has finished."""
    if not _held:
        return
    prepare_driver_call("cuEventQuery")
    # The owners are dropped after `_lock` is released, because their finalizers run code of other
    # libraries.
    with _lock:
        # Ctrl-C may interrupt these lines. They therefore never remove an entry whose work still
        # runs, not even temporarily.
        finished = [entry for entry in _held if _native.query_event(entry[0].handle) != NOT_READY]
        for entry in finished:
            _held.remove(entry)
