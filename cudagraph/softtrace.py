"""What the soft device itself records of its work: begin and end of each operation."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from graft.cudagraph.chooser import soft_library
from graft.cudagraph.errors import OptionError

__all__ = ["KINDS", "SoftSpan", "recording"]

#: Kinds of work by the driver's number.
KINDS = {1: "kernel", 2: "copy", 3: "fill", 4: "host"}
#: Worker number of the thread that runs host functions.
HOST_WORKER = 0xFFFFFFFF


class _Span(ctypes.Structure):
    _fields_ = [
        ("exec", ctypes.c_uint64),
        ("node", ctypes.c_uint64),
        ("worker", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("begin_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class SoftSpan:
    """One worker's share of one operation, in nanoseconds of ``time.monotonic_ns``.

    ``exec`` and ``node`` are the handles of the executable and of the definition's node, or 0;
    ``worker`` is -1 for the thread of host functions.
    """

    exec: int
    node: int
    worker: int
    kind: str
    begin_ns: int
    end_ns: int


class Recording:
    """What was recorded so far; ``lost`` spans found no room."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def read(self) -> list[SoftSpan]:
        """Return the spans by begin. Synchronise first, and before executables are closed."""
        count = int(self._library.softcuda_trace_read(None, 0))
        raw = (_Span * count)()
        self._library.softcuda_trace_read(raw, count)
        spans = [
            SoftSpan(
                s.exec,
                s.node,
                -1 if s.worker == HOST_WORKER else s.worker,
                KINDS.get(s.kind, "other"),
                s.begin_ns,
                s.end_ns,
            )
            for s in raw
        ]
        return sorted(spans, key=lambda span: (span.begin_ns, span.end_ns))

    @property
    def lost(self) -> int:
        """Spans that found the buffer full."""
        return int(self._library.softcuda_trace_lost())


@contextmanager
def recording(capacity: int = 1 << 20) -> Iterator[Recording]:
    """Record inside the block; one recording at a time, the soft device must be open.

    Parameters
    ----------
    capacity : int
        Spans that are kept; 40 bytes each.

    Raises
    ------
    OptionError
        The soft device's library is older than this module.
    """
    library = ctypes.CDLL(str(soft_library()))
    if not hasattr(library, "softcuda_trace"):
        raise OptionError("the soft device records no traces; rebuild it with `make native`")
    library.softcuda_trace.argtypes = (ctypes.c_size_t,)
    library.softcuda_trace.restype = None
    library.softcuda_trace_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.softcuda_trace_read.restype = ctypes.c_size_t
    library.softcuda_trace_lost.restype = ctypes.c_int64
    library.softcuda_trace(capacity)
    try:
        yield Recording(library)
    finally:
        library.softcuda_trace(0)
