"""Host work: Python callables and native functions that run in stream or graph order.

The driver calls both kinds through a native host function of graft, the trampoline
(``native/hostwork``). It receives a record, which holds the callable or function and keeps its
operands alive. The trampoline counts the runs and lets no exception propagate into the driver. Host
work must not call the driver and must not wait for other host work.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from graft.cudagraph.driver.driver import check_code, cu, prepare_driver_call
from graft.cudagraph.driver.handles import StreamLike, stream_handle
from graft.cudagraph.driver.stacks import describe_running
from graft.cudagraph.errors import HostWorkError, OptionError
from graft.native import _native

#: Values of CUstreamCaptureStatus, and CUDA_ERROR_STREAM_CAPTURE_INVALIDATED.
CAPTURING = 1
CAPTURE_INVALID = 2
INVALIDATED = 901
#: Minimum number of usable cores for threads that spin: one core each for Python, the device and
#: the spinning thread, and one spare.
MIN_SPIN_CORES = 4
MAX_ADDRESS = 1 << 64
#: Maximum deadline in seconds.
MAX_DEADLINE_S = 86400.0

#: How the driver's thread waits until a host step may run: False blocks, True spins, and "force"
#: spins even if the process has fewer than `MIN_SPIN_CORES` cores.
Spin = bool | Literal["force"]
#: Work as native code receives it: callable or None, arguments, function address, data address.
NativeTuple = tuple[object, tuple[object, ...], int, int]


class PythonWork:
    """A Python callable with its arguments. It runs on a driver thread, which acquires the GIL.

    The callable should use NumPy views and not device arrays, whose methods call the driver. If the
    callable raises an exception, later host steps of the graph are skipped, and the next call of
    ``launch()``, ``check()`` or ``synchronize()`` raises HostWorkError with the exception as its
    cause.

    Parameters
    ----------
    fn
        Callable.
    *args
        Arguments of the callable.

    Raises
    ------
    OptionError
        ``fn`` is not callable, or is a coroutine or generator function.
    """

    __slots__ = ("args", "fn", "title")
    keep: object = None

    def __init__(self, fn: Callable[..., object], *args: object) -> None:
        if not callable(fn):
            raise OptionError(f"host work must be callable, not {type(fn).__name__}")
        if _is_coroutine_or_generator(fn):
            raise OptionError(
                f"host work {fn!r} would never run: calling a coroutine or generator function only "
                "creates an object; pass a plain function"
            )
        self.fn = fn
        self.args = args
        self.title = getattr(fn, "__qualname__", None) or type(fn).__qualname__

    @property
    def native(self) -> NativeTuple:
        """The work as a `NativeTuple`."""
        return (self.fn, self.args, 0, 0)


def _is_coroutine_or_generator(fn: object) -> bool:
    """Return whether ``fn`` is a coroutine or generator function: a call would run no work."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    call_method = type(fn).__dict__.get("__call__")
    tests = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(test(candidate) for test in tests for candidate in (fn, call_method))


@dataclass(frozen=True)
class NativeWork:
    """A C function ``void fn(void* data)``. It never acquires the GIL.

    Parameters
    ----------
    address
        Address of the function.
    data
        Argument of the function.
    keep
        Owner of ``data``. It is kept alive as long as the work can run.
    name
        Name for error messages and drawings.
    """

    address: int
    data: int = 0
    keep: object = None
    name: str = ""

    def __post_init__(self) -> None:
        for label, value in (("address", self.address), ("data", self.data)):
            if not isinstance(value, int) or not 0 <= value < MAX_ADDRESS:
                raise OptionError(f"NativeWork {label} must be an address, not {value!r}")
        if self.address == 0:
            raise OptionError("NativeWork address is NULL")

    @property
    def title(self) -> str:
        """Name of the native function in error messages; its address if it was given no name."""
        return self.name or f"native {self.address:#x}"

    @property
    def native(self) -> NativeTuple:
        """The work as a `NativeTuple`."""
        return (None, (), self.address, self.data)


HostWork = PythonWork | NativeWork | Callable[..., object]


def as_work(work: HostWork, *args: object) -> PythonWork | NativeWork:
    """Convert ``work`` to PythonWork or NativeWork; ``args`` are the arguments of a callable."""
    if isinstance(work, PythonWork | NativeWork):
        if args:
            raise OptionError(f"{type(work).__name__} already has its arguments; got {args!r} too")
        return work
    return PythonWork(work, *args)


def hostfunc(stream: StreamLike, work: HostWork, *args: object, spin: Spin = False) -> None:
    """Enqueue host work on a stream, to run once after the work enqueued before it.

    If the stream is capturing a graph, for example through CuPy or torch, the work becomes a host
    node of that graph and runs in every replay. The work is kept alive as long as the graph, one of
    its executables or one of their launches exists. After a failure, the host steps of the graph
    are skipped until :func:`check_captured`, ``Stream.synchronize()`` or the next ``hostfunc()``
    has raised the failure.

    Parameters
    ----------
    stream
        Stream of graft or of another library, see
        :func:`~graft.cudagraph.driver.handles.stream_handle`.
    work
        Callable, PythonWork or NativeWork.
    *args
        Arguments of ``work`` if it is a callable.
    spin : bool or "force"
        Whether the driver's thread spins until the work may run. Spinning lowers the latency and
        occupies a core for as long as the driver decides. It requires 4 usable cores, unless
        "force" is given. Before CUDA 13.2 the thread blocks nevertheless, with a warning.

    Raises
    ------
    HostWorkError
        Earlier host work on this stream or in a captured graph failed, and the failure was not
        raised yet.
    OptionError
        There are too few cores for ``spin``, or ``stream`` is not a stream.
    DeviceError
        The driver call failed, or the capture was invalidated. The work will not run.
    """
    handle = stream_handle(stream, "hostfunc()")
    enqueue(handle, as_work(work, *args), None, resolve_spin(spin))


def enqueue(
    handle: int, item: PythonWork | NativeWork, name: str | None, spin: bool = False
) -> None:
    """Enqueue host work on a CUstream; see :func:`hostfunc`."""
    api = "cuLaunchHostFunc"
    prepare_driver_call(api)
    raise_eager_failure(handle)
    check_captured()
    capture = capture_of(handle)
    work = (name or item.title, item.native, item.keep, spin)
    if capture is not None:
        capture_id, captured = capture
        code, api = _native.captured_host(handle, capture_id, captured, *work)
    else:
        code = _native.eager_host(handle, *work)
    check_code(api, code)


def capture_of(handle: int) -> tuple[int, int] | None:
    """Return (capture id, CUgraph) of the capture in which a stream takes part, or None."""
    code, status, capture, graph = _native.capture_info(handle)
    check_code("cuStreamGetCaptureInfo", code)
    if status == CAPTURE_INVALID:
        check_code("cuStreamGetCaptureInfo", INVALIDATED)
    return (capture, graph) if status == CAPTURING else None


def keep_captured(handle: int, owners: tuple[object, ...]) -> bool:
    """Keep `owners` alive as long as the graph that the stream `handle` is capturing.

    Call this function before enqueueing the operation that uses the owned memory. Return False,
    without keeping anything alive, if the stream is not capturing.
    """
    capture = capture_of(handle)
    if capture is None:
        return False
    _, graph = capture
    code, api, _ = _native.attach_keep(graph, owners)
    check_code(api, code)
    return True


def check_captured() -> None:
    """Raise the oldest recorded failure of host work in a captured graph, if there is one.

    Since the failure, the host steps of the graph were skipped. After this call, later replays run
    them again.
    """
    failure = _native.take_captured_failure()
    if failure is not None:
        raise_failure(failure, "of a captured graph")


def check_seconds(name: str, value: Any) -> None:
    """Raise OptionError unless `value` is a number of seconds in (0, MAX_DEADLINE_S]."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_DEADLINE_S:
        raise OptionError(
            f"{name} must be a positive number of seconds up to {MAX_DEADLINE_S:g}, not {value!r}"
        )


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def resolve_spin(spin: Spin) -> bool:
    """Return whether the driver's thread spins, given the option ``spin`` of :func:`hostfunc`."""
    if spin is False:
        return False
    if spin not in (True, "force"):
        raise OptionError(f"spin must be False, True or 'force', not {spin!r}")
    cores = usable_cores()
    if spin != "force" and cores < MIN_SPIN_CORES:
        raise OptionError(
            f"spin=True occupies a core while the driver's thread waits and needs {MIN_SPIN_CORES} "
            f"usable cores; this process has {cores}. Use spin='force' to spin anyway"
        )
    # cuda.bindings of CUDA 13.0 and 13.1 cannot express the mode, even if the driver supports it.
    if _native.spin_supported() and hasattr(cu, "CUhostTaskSyncMode"):
        return True
    warnings.warn(
        "the driver or cuda.bindings does not support spinning host functions (CUDA 13.2); "
        "they block instead",
        stacklevel=4,
    )
    return False


def raise_eager_failure(handle: int) -> None:
    """Raise the oldest recorded failure of host work on a stream, if there is one."""
    failure = _native.take_eager_failure(handle)
    if failure is not None:
        raise_failure(failure, "of the stream")


def raise_failure(failure: tuple[str, int, BaseException | None, str], where: str) -> None:
    """Raise HostWorkError for a failed host step.

    `failure` contains the name of the host step, the replay number (0 for work on a stream), the
    exception or None, and the message. `where` names the graph or stream, as in "of the stream".
    """
    node, replay, exception, message = failure
    if exception is not None:
        message = f"{type(exception).__name__}: {exception}"
    when = f" in replay {replay}" if replay else ""
    error = HostWorkError(
        f"host step {node!r} {where} failed{when}: {message}", node=node, replay=replay
    )
    if exception is None and any(step[0] == node for step in _native.running_host_work()):
        # The step missed its deadline and is still running.
        error.add_note(describe_running().lstrip())
    raise error from exception
