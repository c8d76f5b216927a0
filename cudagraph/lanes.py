"""Lanes: one interface for enqueueing work on a stream and for adding nodes to a graph.

A lane is an in-order sequence of device and host work. Model, sampling and grammar code is written
against the protocol :class:`Lane`. :class:`StreamLane` enqueues the work on a stream at once.
:class:`graft.cudagraph.graph.graph.GraphLane` adds the work to a graph as nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.handles import StreamLike, stream_handle
from graft.cudagraph.driver.memory import DeviceArray, PinnedArray, Span, check_byte
from graft.cudagraph.errors import KernelError, OptionError, ShapeError
from graft.cudagraph.host.hostwork import (
    HostWork,
    Spin,
    as_work,
    enqueue,
    keep_captured,
    resolve_spin,
)
from graft.cudagraph.kernels.kernels import Kernel
from graft.cudagraph.streams import Event

Dims = int | tuple[int, int, int]
Triple = tuple[int, int, int]
Array = DeviceArray | PinnedArray

MAX_THREADS = 1024
#: Largest grid and block that CUDA accepts, by dimension.
MAX_GRID = ((1 << 31) - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)


class Mark(Protocol):
    """A point in a lane, returned by :meth:`Lane.record`, that other lanes can wait for."""

    @property
    def name(self) -> str:
        """Name for error messages and drawings."""


class Lane(Protocol):
    """Interface of an in-order sequence of device and host work."""

    def kernel(
        self,
        kernel: Kernel,
        grid: Dims,
        block: Dims,
        args: Iterable[object],
        *,
        shared: int = 0,
        name: str | None = None,
    ) -> None:
        """Launch a kernel with `shared` bytes of dynamic shared memory."""

    def copy(self, dst: Array, src: Array, *, name: str | None = None) -> None:
        """Copy between device and pinned arrays of the same size in bytes."""

    def fill(self, dst: Array, byte: int = 0, *, name: str | None = None) -> None:
        """Set every byte of an array to `byte`."""

    def host(self, work: HostWork, *, name: str | None = None, spin: Spin = False) -> None:
        """Run host work; see :func:`~graft.cudagraph.host.hostwork.hostfunc` for `spin`."""

    def record(self, name: str | None = None) -> Mark:
        """Return a mark at the current end of the lane."""

    def wait(self, mark: Any) -> None:
        """Make later work on this lane wait for a mark of another lane."""


class StreamLane:
    """A lane that enqueues its work on a stream at once.

    `stream` is a stream of graft or of another library, see
    :func:`~graft.cudagraph.driver.handles.stream_handle`; the lane keeps it alive.

    Arrays may be dropped as soon as the work is enqueued. Their memory is freed only after the
    enqueued work has finished. If the stream is capturing a graph, the graph keeps the arrays
    alive.
    """

    def __init__(self, stream: StreamLike) -> None:
        self.stream = stream
        _ = self.handle  # raises OptionError if `stream` is not a stream

    @property
    def handle(self) -> int:
        """The CUstream as an integer."""
        return stream_handle(self.stream, "StreamLane()")

    def kernel(
        self,
        kernel: Kernel,
        grid: Dims,
        block: Dims,
        args: Iterable[object],
        *,
        shared: int = 0,
        name: str | None = None,
    ) -> None:
        """Launch a kernel."""
        grid, block = check_launch(kernel, grid, block, shared)
        packed = kernel.pack(args)
        kernel.allow_shared(shared)
        keep_captured(self.handle, packed.owners)
        # `packed` must live until the driver has copied the values.
        call(
            cu.cuLaunchKernel,
            kernel.function,
            *grid,
            *block,
            shared,
            self.handle,
            packed.address,
            0,
        )

    def copy(self, dst: Array, src: Array, *, name: str | None = None) -> None:
        """Copy between device and pinned arrays."""
        to, source = check_copy(dst, src)
        stream = self.handle
        keep_captured(stream, (to.owner, source.owner))
        if to.pinned:
            call(cu.cuMemcpyDtoHAsync, to.address, source.address, to.nbytes, stream)
        elif source.pinned:
            call(cu.cuMemcpyHtoDAsync, to.address, source.address, to.nbytes, stream)
        else:
            call(cu.cuMemcpyDtoDAsync, to.address, source.address, to.nbytes, stream)

    def fill(self, dst: Array, byte: int = 0, *, name: str | None = None) -> None:
        """Set every byte of an array to `byte`."""
        address = dst.ptr
        nbytes = dst.nbytes
        keep_captured(self.handle, (dst.owner,))
        call(cu.cuMemsetD8Async, address, check_byte(byte), nbytes, self.handle)

    def host(self, work: HostWork, *, name: str | None = None, spin: Spin = False) -> None:
        """Enqueue host work. If it fails, the stream's ``synchronize()`` raises HostWorkError."""
        enqueue(self.handle, as_work(work), name, resolve_spin(spin))

    def record_event(self, event: Event) -> None:
        """Record an event. In a capture, add a node that records the event in every replay."""
        event.record(self.stream)

    def wait_event(self, event: Event) -> None:
        """Make later work wait for an event. In a capture, add a node that waits for it."""
        event.wait(self.stream)

    def record(self, name: str | None = None) -> Event:
        """Record a new event on the stream and return it as the mark.

        In a capture, another stream that waits for the mark joins the capture.
        """
        event = Event(name or f"mark on {getattr(self.stream, 'name', self.stream)}")
        call(cu.cuEventRecord, event.handle, self.handle)
        return event

    def wait(self, mark: Any) -> None:
        """Make later work on the stream wait for a mark of another stream lane."""
        if not isinstance(mark, Event):
            raise OptionError(f"a stream lane can only wait for an Event, not {mark!r}")
        call(cu.cuStreamWaitEvent, self.handle, mark.handle, 0)


def check_launch(kernel: Kernel, grid: Dims, block: Dims, shared: int) -> tuple[Triple, Triple]:
    """Check the dimensions of a launch and return grid and block as triples.

    A dimension that is not a positive int or exceeds CUDA's limit, too many threads, or negative
    ``shared`` raises KernelError.
    """
    grid = _triple(kernel, "grid", grid, MAX_GRID)
    block = _triple(kernel, "block", block, MAX_BLOCK)
    threads = block[0] * block[1] * block[2]
    if threads > MAX_THREADS:
        raise KernelError(
            f"kernel {kernel.name!r}: block {block} has {threads} threads; at most {MAX_THREADS} "
            "are allowed"
        )
    if shared < 0:
        raise KernelError(f"kernel {kernel.name!r}: shared memory of {shared} bytes is negative")
    return grid, block


def _triple(kernel: Kernel, label: str, dims: Dims, largest: Triple) -> Triple:
    triple = dims if isinstance(dims, tuple) else (dims, 1, 1)
    valid = len(triple) == 3
    for size in triple:
        valid = valid and isinstance(size, int | np.integer) and size >= 1
    if not valid:
        raise KernelError(
            f"kernel {kernel.name!r}: {label} must be a positive int or a triple of them, not "
            f"{dims!r}"
        )
    if any(size > limit for size, limit in zip(triple, largest, strict=True)):
        raise KernelError(
            f"kernel {kernel.name!r}: {label} {dims!r} is too large; at most {largest} is allowed"
        )
    return int(triple[0]), int(triple[1]), int(triple[2])


def check_copy(dst: Array, src: Array) -> tuple[Span, Span]:
    """Check the arguments of a copy and return the memory of the destination and of the source.

    Arguments that are not arrays of graft, different sizes in bytes, and copies between two arrays
    in host memory raise ShapeError.
    """
    for label, array in (("destination", dst), ("source", src)):
        if not isinstance(array, DeviceArray | PinnedArray):
            raise ShapeError(
                f"copy {label} must be a DeviceArray or PinnedArray, not {type(array).__name__}"
            )
    if dst.nbytes != src.nbytes:
        raise ShapeError(
            f"copy source and destination differ in size: {src.nbytes} bytes ({src!r}) and "
            f"{dst.nbytes} bytes ({dst!r})"
        )
    to = dst.span()
    source = src.span()
    if to.pinned and source.pinned:
        raise ShapeError(
            f"{src!r} and {dst!r} are both in host memory: copy them in a host step instead"
        )
    return to, source
