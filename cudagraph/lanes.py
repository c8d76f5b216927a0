"""Lanes: one way to write device work, for running it at once and for building graphs.

Model, sampling and grammar code is written once against :class:`Lane`. :class:`StreamLane` runs on
a stream; :class:`graft.cudagraph.graph.GraphLane` adds nodes to a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from graft.cudagraph.driver import call, cu
from graft.cudagraph.errors import KernelError, OptionError, ShapeError
from graft.cudagraph.hostwork import HostWork, Spin, as_work, enqueue, keep_captured, use_spin
from graft.cudagraph.kernels import Kernel
from graft.cudagraph.memory import DeviceArray, PinnedArray, Span, check_byte
from graft.cudagraph.streams import Event, Stream

Dims = int | tuple[int, int, int]
Array = DeviceArray | PinnedArray

MAX_THREADS = 1024


class Mark(Protocol):
    """A point in a lane that other lanes can wait for."""

    @property
    def name(self) -> str:
        """Name for errors and drawings."""


class Lane(Protocol):
    """An in-order sequence of device and host work."""

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
        """Run a kernel; `shared` is dynamic shared memory in bytes."""

    def copy(self, dst: Array, src: Array, *, name: str | None = None) -> None:
        """Copy between device and pinned arrays of the same size in bytes."""

    def fill(self, dst: Array, byte: int = 0, *, name: str | None = None) -> None:
        """Set every byte of an array."""

    def host(self, work: HostWork, *, name: str | None = None, spin: Spin = False) -> None:
        """Run host work: a callable, PythonWork or NativeWork; `spin` as for hostfunc()."""

    def record(self, name: str | None = None) -> Mark:
        """Mark this point of the lane."""

    def wait(self, mark: Any) -> None:
        """Let what follows on this lane run after a mark of another lane."""


class StreamLane:
    """A lane that enqueues on a stream at once.

    Arrays may be dropped as soon as they are enqueued: freeing them waits for work in flight. On a
    stream that captures a graph, the graph keeps them.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

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
        keep_captured(self.stream.handle, packed.owners)
        # `packed` holds the values until the driver has copied them.
        call(
            cu.cuLaunchKernel,
            kernel.function,
            *grid,
            *block,
            shared,
            self.stream.handle,
            packed.address,
            0,
        )

    def copy(self, dst: Array, src: Array, *, name: str | None = None) -> None:
        """Copy between device and pinned arrays."""
        to, source = check_copy(dst, src)
        stream = self.stream.handle
        keep_captured(stream, (to.owner, source.owner))
        if to.pinned:
            call(cu.cuMemcpyDtoHAsync, to.address, source.address, to.nbytes, stream)
        elif source.pinned:
            call(cu.cuMemcpyHtoDAsync, to.address, source.address, to.nbytes, stream)
        else:
            call(cu.cuMemcpyDtoDAsync, to.address, source.address, to.nbytes, stream)

    def fill(self, dst: Array, byte: int = 0, *, name: str | None = None) -> None:
        """Set every byte of an array."""
        address = dst.ptr
        nbytes = dst.nbytes
        keep_captured(self.stream.handle, (dst.owner,))
        call(cu.cuMemsetD8Async, address, check_byte(byte), nbytes, self.stream.handle)

    def host(self, work: HostWork, *, name: str | None = None, spin: Spin = False) -> None:
        """Enqueue host work; what it raises is raised by the stream's synchronize()."""
        enqueue(self.stream.handle, as_work(work), name, use_spin(spin))

    def record_event(self, event: Event) -> None:
        """Record an event; in a capture as a node that records it in every replay."""
        event.record(self.stream)

    def wait_event(self, event: Event) -> None:
        """Let what follows wait for an event; in a capture as a node that does in every replay."""
        event.wait(self.stream)

    def record(self, name: str | None = None) -> Event:
        """Record an event; in a capture a fork that other captured streams join."""
        event = Event(name or f"mark on {self.stream.name}")
        call(cu.cuEventRecord, event.handle, self.stream.handle)
        return event

    def wait(self, mark: Any) -> None:
        """Let the stream wait for an event of another stream lane."""
        if not isinstance(mark, Event):
            raise OptionError(f"a stream lane cannot wait for {mark!r}")
        call(cu.cuStreamWaitEvent, self.stream.handle, mark.handle, 0)


def check_launch(
    kernel: Kernel, grid: Dims, block: Dims, shared: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return grid and block as triples, or raise KernelError."""
    dims = []
    for label, value in (("grid", grid), ("block", block)):
        triple = value if isinstance(value, tuple) else (value, 1, 1)
        if len(triple) != 3 or not all(
            isinstance(n, int | np.integer) and 1 <= n < 1 << 31 for n in triple
        ):
            raise KernelError(
                f"kernel {kernel.name!r}: {label} must be a positive int or three, not {value!r}"
            )
        dims.append((int(triple[0]), int(triple[1]), int(triple[2])))
    threads = dims[1][0] * dims[1][1] * dims[1][2]
    if threads > MAX_THREADS:
        raise KernelError(
            f"kernel {kernel.name!r}: block {block} has {threads} threads of {MAX_THREADS}"
        )
    if shared < 0:
        raise KernelError(f"kernel {kernel.name!r}: shared memory of {shared} bytes")
    return dims[0], dims[1]


def check_copy(dst: Array, src: Array) -> tuple[Span, Span]:
    """Return both spans, or raise ShapeError unless they have the same size."""
    for label, array in (("destination", dst), ("source", src)):
        if not isinstance(array, DeviceArray | PinnedArray):
            raise ShapeError(
                f"copy {label} must be a DeviceArray or PinnedArray, not {type(array).__name__}"
            )
    if dst.nbytes != src.nbytes:
        raise ShapeError(f"copy of {src.nbytes} bytes ({src!r}) to {dst.nbytes} bytes ({dst!r})")
    spans = dst.span(), src.span()
    if spans[0].pinned and spans[1].pinned:
        raise ShapeError(f"{src!r} and {dst!r} are both on the host: copying them is host work")
    return spans
