"""Lanes: one interface for enqueueing work on a stream and for adding nodes to a graph.

A lane is an in-order sequence of device and host work. Model, sampling and grammar code is written
against the protocol :class:`Lane`. :class:`StreamLane` enqueues the work on a stream at once.
:class:`graft.cudagraph.graph.graph.GraphLane` adds the work to a graph as nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.handles import StreamLike, stream_handle
from graft.cudagraph.driver.held import hold_foreign
from graft.cudagraph.driver.memory import (
    INTEGERS,
    DeviceArray,
    PinnedArray,
    Span,
    check_byte,
    copy_span,
)
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
    """Interface of an in-order sequence of device and host work.

    The methods of a lane of a graph return the node that they have added.
    """

    def kernel(
        self,
        kernel: Kernel,
        grid: Dims,
        block: Dims,
        args: Iterable[object],
        *,
        shared: int = 0,
        name: str | None = None,
    ) -> object:
        """Launch a kernel with `shared` bytes of dynamic shared memory."""

    def copy(self, dst: Any, src: Any, *, name: str | None = None) -> object:
        """Copy between arrays of the same size in bytes, of which one is in device memory.

        The arrays are a DeviceArray, a PinnedArray, or an array of another library that has
        `__dlpack__`, `__cuda_array_interface__`, `__array_interface__` or the buffer protocol. The
        latter must be contiguous, or a part of a matrix: rows of the same distance.
        """

    def fill(self, dst: Any, byte: int = 0, *, name: str | None = None) -> object:
        """Set every byte of an array to `byte`."""

    def host(self, work: HostWork, *, name: str | None = None, spin: Spin = False) -> object:
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
        packed = kernel.pack(args, self.handle)
        kernel.allow_shared(shared)
        # `packed` must live until the driver has copied the values.
        self._enqueue(
            packed.owners,
            cu.cuLaunchKernel,
            kernel.function,
            *grid,
            *block,
            shared,
            self.handle,
            packed.address,
            0,
        )

    def copy(self, dst: Any, src: Any, *, name: str | None = None) -> None:
        """Copy between arrays of the same size in bytes, of which one is in device memory."""
        to, source = check_copy(dst, src, self.handle)
        if to.rows > 1:
            params = copy_2d_params(to, source)
            owners = (to.owner, source.owner)
            self._enqueue(owners, cu.cuMemcpy2DAsync, params, self.handle)
            return
        function = cu.cuMemcpyDtoDAsync
        if to.on_host:
            function = cu.cuMemcpyDtoHAsync
        elif source.on_host:
            function = cu.cuMemcpyHtoDAsync
        owners = (to.owner, source.owner)
        self._enqueue(owners, function, to.address, source.address, to.nbytes, self.handle)

    def fill(self, dst: Any, byte: int = 0, *, name: str | None = None) -> None:
        """Set every byte of an array to `byte`."""
        value = check_byte(byte)
        span = fill_span(dst, self.handle)
        self._enqueue(
            (span.owner,), cu.cuMemsetD8Async, span.address, value, span.nbytes, self.handle
        )

    def _enqueue(
        self, owners: tuple[object, ...], function: Callable[..., tuple], *args: object
    ) -> None:
        """Call a function of the driver; keep `owners` alive until its operation has finished."""
        handle = self.handle
        is_captured = keep_captured(handle, owners)
        call(function, *args)
        if not is_captured:
            hold_foreign(handle, owners)

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
    if not isinstance(kernel, Kernel):
        raise KernelError(f"a launch needs a kernel of a KernelModule, not {kernel!r}")
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
        valid = valid and isinstance(size, INTEGERS) and size >= 1
    if not valid:
        raise KernelError(
            f"kernel {kernel.name!r}: {label} must be a positive int or a triple of them, not "
            f"{dims!r}"
        )
    if triple[0] > largest[0] or triple[1] > largest[1] or triple[2] > largest[2]:
        raise KernelError(
            f"kernel {kernel.name!r}: {label} {dims!r} is too large; at most {largest} is allowed"
        )
    return int(triple[0]), int(triple[1]), int(triple[2])


def check_copy(dst: Any, src: Any, stream: int | None = None) -> tuple[Span, Span]:
    """Check the arguments of a copy and return the memory of the destination and of the source.

    Both have the same number of rows. Arguments that are not arrays, different sizes in bytes, and
    copies between two arrays in host memory raise ShapeError. `stream` is the CUstream of the copy,
    or None.
    """
    to = copy_span(dst, "copy destination", True, stream)
    source = copy_span(src, "copy source", False, stream)
    if to.nbytes != source.nbytes:
        raise ShapeError(
            f"copy source and destination differ in size: {source.nbytes} bytes "
            f"({describe_array(src)}) and {to.nbytes} bytes ({describe_array(dst)})"
        )
    if to.on_host and source.on_host:
        raise ShapeError(
            f"{describe_array(src)} and {describe_array(dst)} are both in host memory: copy them "
            "in a host step instead"
        )
    rows = max(to.rows, source.rows)
    if 1 < min(to.rows, source.rows) < rows:
        raise ShapeError(
            f"copy source has {source.rows} rows and destination {to.rows}: make a contiguous copy "
            "of one of them first"
        )
    pitch = to.nbytes // rows
    if to.rows < rows:
        to = to._replace(rows=rows, pitch=pitch)
    if source.rows < rows:
        source = source._replace(rows=rows, pitch=pitch)
    return to, source


def copy_2d_params(dst: Span, src: Span) -> Any:
    """Return the parameters of a copy of rows as CUDA_MEMCPY2D."""
    params = cu.CUDA_MEMCPY2D()
    kinds = cu.CUmemorytype
    for side, span in (("src", src), ("dst", dst)):
        kind = kinds.CU_MEMORYTYPE_HOST if span.on_host else kinds.CU_MEMORYTYPE_DEVICE
        setattr(params, f"{side}MemoryType", kind)
        setattr(params, f"{side}Pitch", span.pitch)
        if span.on_host:
            setattr(params, f"{side}Host", span.address)
        else:
            setattr(params, f"{side}Device", cu.CUdeviceptr(span.address))
    params.WidthInBytes = dst.nbytes // dst.rows
    params.Height = dst.rows
    return params


def fill_span(dst: Any, stream: int | None = None) -> Span:
    """Return the memory of an array for a fill, with its address for the device.

    ShapeError is raised if the object is not an array, or the array is in pageable host memory.
    """
    if isinstance(dst, DeviceArray | PinnedArray):
        return Span(False, dst.ptr, dst.nbytes, dst.owner)
    span = copy_span(dst, "fill destination", True, stream)
    if span.rows > 1:
        raise ShapeError(f"fill destination {describe_array(dst)} is not contiguous")
    if span.on_host:
        raise ShapeError(f"fill destination {describe_array(dst)} is in host memory: fill it there")
    return span


def describe_array(array: Any) -> str:
    """Describe an array for an error message, without its elements."""
    if isinstance(array, DeviceArray | PinnedArray):
        return repr(array)
    return f"{type(array).__name__} {getattr(array, 'shape', '')}".rstrip()
