"""Host work: Python callables and native functions that run in stream or graph order.

Both kinds are called through graft's own trampolines (``native/hostwork``), which own their
records, count runs, and let no exception escape into the driver. A host function must not call
the driver, and must not wait for another host function.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graft.cudagraph.driver import check_code, enter
from graft.cudagraph.errors import HostWorkError, OptionError
from graft.native import _native

if TYPE_CHECKING:
    from graft.cudagraph.streams import Stream

__all__ = ["HostWork", "NativeWork", "PythonWork", "as_work", "hostfunc"]


class PythonWork:
    """A Python callable with its arguments; it runs on a driver thread and takes the GIL there.

    It should close over NumPy views, not over device objects. Whatever it raises stops the later
    host steps of its replay and is raised by the next launch, check or synchronize.
    """

    __slots__ = ("args", "fn", "title")

    def __init__(self, fn: Callable[..., object], *args: object) -> None:
        if not callable(fn):
            raise OptionError(f"host work must be callable, not {type(fn).__name__}")
        self.fn = fn
        self.args = args
        self.title = getattr(fn, "__qualname__", None) or type(fn).__qualname__


@dataclass(frozen=True)
class NativeWork:
    """A C function ``void fn(void* data)`` that never takes the GIL.

    Parameters
    ----------
    address : int
        Address of the function.
    data : int
        The pointer it is given, or 0.
    keep : object
        Anything that must live as long as the work can run (owner of ``data``).
    name : str
        Name for errors and drawings.
    """

    address: int
    data: int = 0
    keep: object = None
    name: str = ""

    def __post_init__(self) -> None:
        for label, value in (("address", self.address), ("data", self.data)):
            if not isinstance(value, int) or not 0 <= value < 1 << 64:
                raise OptionError(f"NativeWork {label} must be an address, not {value!r}")
        if self.address == 0:
            raise OptionError("NativeWork address is NULL")

    @property
    def title(self) -> str:
        """The name, or the address."""
        return self.name or f"native {self.address:#x}"


HostWork = PythonWork | NativeWork | Callable[..., object]


def as_work(work: HostWork, *args: object) -> PythonWork | NativeWork:
    """Return ``work`` as one of the two kinds; a callable takes ``args``."""
    if isinstance(work, PythonWork | NativeWork):
        if args:
            raise OptionError(f"{type(work).__name__} carries its own arguments; got {args!r} too")
        return work
    return PythonWork(work, *args)


def hostfunc(stream: Stream | int, work: HostWork, *args: object) -> None:
    """Enqueue host work on a stream, to run once after what is enqueued there already.

    Parameters
    ----------
    stream : Stream or int
        The stream, or a CUstream handle of somebody else's.
    work : callable, PythonWork or NativeWork
        What runs.
    *args
        Arguments of a callable.

    Raises
    ------
    HostWorkError
        Earlier host work on this stream failed and nobody was told yet.
    OptionError
        The stream is capturing a graph; host work goes into graphs through GraphLane.host.
    DeviceError
        The driver refused; the work will not run.
    """
    enqueue(stream if isinstance(stream, int) else stream.handle, as_work(work, *args), None)


def enqueue(handle: int, item: PythonWork | NativeWork, name: str | None) -> None:
    """Do what :func:`hostfunc` says; ``name`` is for errors."""
    enter("cuLaunchHostFunc")
    raise_eager_failure(handle)
    code, capturing = _native.is_capturing(handle)
    check_code("cuStreamIsCapturing", code)
    if capturing:
        raise OptionError(
            "hostfunc on a capturing stream is not supported: build the graph with Graph.lane()"
        )
    title = name or item.title
    if isinstance(item, NativeWork):
        code = _native.eager_native(handle, title, item.address, item.data, item.keep)
    else:
        code = _native.eager_python(handle, title, item.fn, item.args, None)
    check_code("cuLaunchHostFunc", code)


def raise_eager_failure(handle: int) -> None:
    """Raise the oldest failure of eager host work on a stream that nobody was told of yet."""
    failure = _native.take_eager_failure(handle)
    if failure is not None:
        raise_failure(failure, "of the stream")


def raise_failure(failure: tuple[str, int, BaseException | None, str], where: str) -> None:
    """Raise HostWorkError from (node, replay, exception, message)."""
    node, replay, exception, message = failure
    said = f"{type(exception).__name__}: {exception}" if exception is not None else message
    number = f" in replay {replay}" if replay else ""
    error = HostWorkError(
        f"host step {node!r} {where} failed{number}: {said}", node=node, replay=replay
    )
    raise error from exception


def describe_running() -> str:
    """Tell which host functions run now and where the Python ones stand; "" when none does."""
    lines: list[str] = []
    frames: dict[int, Any] = sys._current_frames()
    for node, replay, seconds, thread in _native.running_host_work():
        lines.append(f"\nhost step {node!r} (replay {replay}) has been running for {seconds:.3f} s")
        if thread in frames:
            lines.append("".join(traceback.format_stack(frames[thread])).rstrip())
    return "\n".join(lines)
