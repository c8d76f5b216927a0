"""Host work: Python callables and native functions that run in stream or graph order.

Both kinds are called through graft's own trampolines (``native/hostwork``), which own their
records, count runs, and let no exception escape into the driver. A host function must not call
the driver, and must not wait for another host function.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from graft.cudagraph.driver import check_code, enter
from graft.cudagraph.errors import HostWorkError, OptionError
from graft.cudagraph.stacks import describe_running
from graft.native import _native

CAPTURING = 1
CAPTURE_INVALID = 2
INVALIDATED = 901
#: Who spins needs a core beside Python's, the device's and one to spare.
SPIN_CORES = 4

#: How the driver's thread waits for a host step: blocked (False), or spinning.
Spin = bool | Literal["force"]


class PythonWork:
    """A Python callable with its arguments; it runs on a driver thread and takes the GIL there.

    It should close over NumPy views, not over device objects. Whatever it raises stops the later
    host steps of its replay and is raised by the next launch, check or synchronize.
    """

    __slots__ = ("args", "fn", "title")
    keep: object = None

    def __init__(self, fn: Callable[..., object], *args: object) -> None:
        if not callable(fn):
            raise OptionError(f"host work must be callable, not {type(fn).__name__}")
        if _only_begins(fn):
            raise OptionError(
                f"host work {fn!r} would never run: calling a coroutine or generator function only "
                "makes an object that somebody must drive"
            )
        self.fn = fn
        self.args = args
        self.title = getattr(fn, "__qualname__", None) or type(fn).__qualname__

    @property
    def native(self) -> tuple[object, tuple[object, ...], int, int]:
        """The work as the native side takes it."""
        return (self.fn, self.args, 0, 0)


def _only_begins(fn: object) -> bool:
    """Does calling it run none of its body?"""
    while isinstance(fn, functools.partial):
        fn = fn.func
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    called = type(fn).__dict__.get("__call__")
    return any(kind(one) for kind in kinds for one in (fn, called))


class StreamLike(Protocol):
    """A stream: graft's own, or anything that has a CUstream as ``handle``."""

    @property
    def handle(self) -> int:
        """The CUstream as an integer."""


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

    @property
    def native(self) -> tuple[object, tuple[object, ...], int, int]:
        """The work as the native side takes it."""
        return (None, (), self.address, self.data)


HostWork = PythonWork | NativeWork | Callable[..., object]


def as_work(work: HostWork, *args: object) -> PythonWork | NativeWork:
    """Return ``work`` as one of the two kinds; a callable takes ``args``."""
    if isinstance(work, PythonWork | NativeWork):
        if args:
            raise OptionError(f"{type(work).__name__} carries its own arguments; got {args!r} too")
        return work
    return PythonWork(work, *args)


def hostfunc(stream: StreamLike | int, work: HostWork, *args: object, spin: Spin = False) -> None:
    """Enqueue host work on a stream, to run once after what is enqueued there already.

    On a stream that captures a graph, whoever began the capture, the work becomes a host node of
    that graph: it lives as long as the graph, its executables and their launches, and runs in each
    replay. After it failed, the graph's host steps stand down until the failure was raised by
    :func:`check_captured`, by ``Stream.synchronize()`` or by the next ``hostfunc()``.

    Parameters
    ----------
    stream : Stream or int
        The stream, or a CUstream handle of somebody else's.
    work : callable, PythonWork or NativeWork
        What runs.
    *args
        Arguments of a callable.
    spin : bool or "force"
        Let the driver's thread spin while it waits for host work: less latency, one core burnt for
        as long as the driver likes. Needs CUDA 13.2 (else it blocks, said once) and 4 usable cores
        unless forced.

    Raises
    ------
    HostWorkError
        Earlier host work on this stream, or in a captured graph, failed and nobody was told yet.
    OptionError
        ``spin`` with too few cores, or no stream was given.
    DeviceError
        The driver refused, or the capture was invalidated; the work will not run.
    """
    handle = getattr(stream, "handle", stream)
    if not isinstance(handle, int) or not 0 <= handle < 1 << 64:
        raise OptionError(f"hostfunc() needs a Stream or a CUstream handle, not {stream!r}")
    enqueue(handle, as_work(work, *args), None, use_spin(spin))


def enqueue(
    handle: int, item: PythonWork | NativeWork, name: str | None, spin: bool = False
) -> None:
    """Do what :func:`hostfunc` says; ``name`` is for errors."""
    enter("cuLaunchHostFunc")
    raise_eager_failure(handle)
    check_captured()
    title = name or item.title
    api = "cuLaunchHostFunc"
    capture = capture_of(handle)
    work = (title, item.native, item.keep, spin)
    if capture is not None:
        code, api = _native.captured_host(handle, *capture, *work)
    else:
        code = _native.eager_host(handle, *work)
    check_code(api, code)


def capture_of(handle: int) -> tuple[int, int] | None:
    """Return (capture id, CUgraph) of the capture a stream is in, or None."""
    code, status, capture, graph = _native.capture_info(handle)
    check_code("cuStreamGetCaptureInfo", code)
    if status == CAPTURE_INVALID:
        check_code("cuStreamGetCaptureInfo", INVALIDATED)
    return (capture, graph) if status == CAPTURING else None


def keep_captured(handle: int, owners: tuple[object, ...]) -> bool:
    """Keep objects alive as long as the graph that a stream captures; False when it does not.

    Called before the work that uses them is enqueued.
    """
    capture = capture_of(handle)
    if capture is not None:
        code, api, _ = _native.attach_keep(capture[1], owners)
        check_code(api, code)
    return capture is not None


def check_captured() -> None:
    """Raise the oldest failure of host work in a captured graph that nobody was told of yet.

    The graph's host steps, which stood down since the failure, run again afterwards.
    """
    failure = _native.take_captured_failure()
    if failure is not None:
        raise_failure(failure, "of a captured graph")


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def use_spin(spin: Spin) -> bool:
    """Decide whether a host step spins; see :func:`hostfunc`."""
    if spin is False:
        return False
    if spin not in (True, "force"):
        raise OptionError(f"spin must be False, True or 'force', not {spin!r}")
    cores = usable_cores()
    if spin != "force" and cores < SPIN_CORES:
        raise OptionError(
            f"spin burns one core while the driver's thread waits, and this process has {cores} of "
            f"the {SPIN_CORES} it should have; spin='force' insists"
        )
    if _native.spin_supported():
        return True
    warnings.warn(
        "the driver has no spinning host steps (CUDA 13.2); they block instead", stacklevel=4
    )
    return False


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
    if exception is None and any(step[0] == node for step in _native.running_host_work()):
        error.add_note(describe_running().lstrip())  # it passed its deadline and is still there
    raise error from exception
