"""Run one case of the deadlock test in the current process.

    python -m graft.tools.labs.gil_deadlock.case PATTERN:TRANSPORT:MODEL[:released]

The four parts are the fields of `Case`; with ``:released``, the thread releases the GIL for the
driver call.

The order of events is the same in every run and does not depend on delays:

1. A kernel blocks the stream while the callback is enqueued.
2. This thread keeps the GIL from now on. The switch interval is longer than any case, and driver
   calls through ``ctypes.PyDLL`` do not release the GIL.
3. The host unblocks the stream, so that the callback begins.
4. As soon as the callback waits for the GIL, or runs without needing it, this thread makes the
   driver call that `PATTERN` names.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.cudagraph.device import Device, open_device
from graft.cudagraph.driver.chooser import SONAME
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.errors import HostWorkError
from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.host.hostwork import HostWork, NativeWork, PythonWork
from graft.cudagraph.kernels.compiler import KernelSource, compile_source

CLOCK_KERNELS = Path(__file__).parents[2] / "kernels" / "clock.cu"
#: Driver calls that a case makes while its thread holds the GIL, by pattern name.
PATTERNS = {
    "alloc": "cuMemAlloc",
    "hostfunc": "cuLaunchHostFunc",
    "first-launch": "first cuLaunchKernel of a lazily loaded kernel",
    "copy": "cuMemcpyDtoH, which waits for the callback",
}
#: Mechanisms that call the callback. graft's host nodes call a Python function ("python") or a C
#: function ("native"). So do the worker threads of graft's mailboxes ("mailbox-python" and
#: "mailbox"). The other transports use the packages of these names.
TRANSPORTS = (
    "python",
    "native",
    "mailbox",
    "mailbox-python",
    "cuda.bindings",
    "ctypes",
    "cuda.core",
)
#: Before version 13.5, cuda.bindings wraps every callback in a function that takes the GIL, even if
#: the callback is a C function.
_BINDINGS_VERSION = importlib.metadata.version("cuda-bindings").split(".")
BINDINGS_TAKE_GIL = (int(_BINDINGS_VERSION[0]), int(_BINDINGS_VERSION[1])) < (13, 5)
#: Transports whose callback takes the GIL.
GIL_TRANSPORTS = (
    "python",
    "mailbox-python",
    "ctypes",
    "cuda.core",
    *(("cuda.bindings",) if BINDINGS_TAKE_GIL else ()),
)
#: Values of SOFTCUDA_LOCK_MODEL.
LOCK_MODELS = (0, 1, 2, 4)
#: Exit status of a case whose deadlock ended because the device waited for the mailbox worker only
#: until the mailbox's deadline (outcome "released").
RELEASED_STATUS = 3

#: Duration of a native callback in microseconds.
NATIVE_CALLBACK_US = 150_000
MAILBOX_DEADLINE_S = 6.0
#: Maximum time in seconds for which the kernel ``hold`` blocks the stream.
BLOCK_LIMIT_S = 60.0
#: Time limit in seconds for the callback to request the GIL, or to run without it.
POSITION_LIMIT_S = 60.0
#: Time in seconds after which the callback is assumed to have begun on CUDA hardware, where
#: requests for the GIL are not reported.
CUDA_POSITION_S = 0.5
#: Switch interval of the interpreter in seconds, so long that no other thread can force the thread
#: of the driver call to release the GIL.
NEVER_SWITCH_S = 1e6
DEFAULT_SWITCH_S = 0.005
STREAM_LIMIT_S = 100.0


@dataclass(frozen=True)
class Case:
    """A combination of driver call, callback and lock model.

    A lock model says which locks of the driver the soft device emulates.
    """

    pattern: str  #: driver call; a key of `PATTERNS`
    transport: str  #: mechanism that calls the callback; one of `TRANSPORTS`
    model: int  #: lock model of the soft device; -1 on CUDA hardware
    #: Whether the thread holds the GIL during the driver call. It releases the GIL only in the
    #: control cases, which must complete.
    gil_held: bool = True

    @property
    def name(self) -> str:
        """Name of the case, which is an argument of ``--case``."""
        suffix = "" if self.gil_held else ":released"
        return f"{self.pattern}:{self.transport}:{self.model}{suffix}"

    @staticmethod
    def parse(name: str) -> Case:
        """Return the case with the given name.

        Raise ValueError if the name is malformed, or its pattern or transport is unknown.
        """
        pattern, transport, model, *control = name.split(":")
        if (
            pattern not in PATTERNS
            or transport not in TRANSPORTS
            or control not in ([], ["released"])
        ):
            raise ValueError(name)
        return Case(pattern, transport, int(model), not control)


def unavailable(transport: str) -> str:
    """Return why one of `TRANSPORTS` cannot be tested here, or "" if it can be tested."""
    if transport == "cuda.core" and importlib.util.find_spec("cuda.core") is None:
        return "cuda.core is not installed (pip install cuda-core)"
    return ""


def _c_function(name: str) -> int:
    """Return the address of a C function of the process."""
    function = getattr(ctypes.CDLL(None), name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _check(api: str, status: int) -> None:
    if status:
        raise SystemExit(f"{api} returned status {status}")


@dataclass(frozen=True)
class _Stream:
    """Handle of a blocking stream, which synchronizes with the legacy default stream.

    CUDA creates blocking streams by default, but graft creates non-blocking ones.
    """

    handle: int


# The callback -------------------------------------------------------------------------------------


def enqueue_callback(
    device: Device, transport: str, stream: _Stream
) -> tuple[Callable[[], None], object]:
    """Enqueue a callback on a stream, with one of `TRANSPORTS` as the mechanism that calls it.

    Return a function that raises the callback's error, if there is one, and the objects that must
    live until the callback has run.
    """
    if transport in ("python", "native", "mailbox", "mailbox-python"):
        return _enqueue_graft(device, transport, stream)
    if transport == "cuda.bindings":
        function = cu.CUhostFn(_c_function("usleep"))
        call(cu.cuLaunchHostFunc, stream.handle, function, NATIVE_CALLBACK_US)
        return lambda: None, None
    if transport == "ctypes":
        thunk = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: None)
        handle = ctypes.c_void_p(stream.handle)
        status = ctypes.CDLL(SONAME).cuLaunchHostFunc(handle, thunk, None)
        _check("cuLaunchHostFunc", status)
        return lambda: None, thunk
    return _enqueue_cuda_core(device, stream)


def _enqueue_graft(
    device: Device, transport: str, stream: _Stream
) -> tuple[Callable[[], None], object]:
    """Launch a graph of graft with one host step; return what `enqueue_callback` returns."""
    work: HostWork
    if transport in ("python", "mailbox-python"):
        work = PythonWork(int)
    else:
        # Make the callback a C function that runs for some time without the GIL.
        work = NativeWork(_c_function("usleep"), NATIVE_CALLBACK_US, name="usleep")
    graph = Graph(device, transport)
    lane = graph.lane("main")
    if transport.startswith("mailbox"):
        lane.mailbox(work, name="callback", deadline_s=MAILBOX_DEADLINE_S)
    else:
        lane.host(work, name="callback")
    executable = graph.instantiate()
    executable.launch(stream)  # type: ignore[arg-type]  # only the handle is used
    return executable.check, (graph, executable)


def _enqueue_cuda_core(device: Device, stream: _Stream) -> tuple[Callable[[], None], object]:
    """Launch a graph of cuda.core with one callback; return what `enqueue_callback` returns."""
    from cuda.core import Device as CoreDevice
    from cuda.core import Stream as CoreStream
    from cuda.core.graph import GraphDefinition

    CoreDevice(device.ordinal).set_current()
    definition = GraphDefinition()
    definition.callback(lambda: None)
    executable = definition.instantiate()
    executable.launch(CoreStream.from_handle(stream.handle))
    return lambda: None, (definition, executable)


# The driver call ----------------------------------------------------------------------------------


def prepare_call(device: Device, case: Case, stream: _Stream) -> tuple[Callable[[], None], object]:
    """Prepare the driver call of the case's pattern.

    Return a function that makes the driver call, and the objects that must live until the call has
    returned.
    """
    # ctypes.PyDLL keeps the GIL during a call, and ctypes.CDLL releases it. There is no other
    # difference.
    library = ctypes.PyDLL if case.gil_held else ctypes.CDLL
    driver: Any = library(SONAME)
    if case.pattern == "alloc":
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(4096)
        return (
            lambda: _check("cuMemAlloc", driver.cuMemAlloc_v2(ctypes.byref(address), size))
        ), address
    if case.pattern == "hostfunc":
        handle = ctypes.c_void_p(stream.handle)
        function = ctypes.c_void_p(_c_function("free"))
        return (
            lambda: _check("cuLaunchHostFunc", driver.cuLaunchHostFunc(handle, function, None))
        ), function
    if case.pattern == "copy":
        array = device.zeros((16,), "int32")
        host = ctypes.create_string_buffer(64)
        source = ctypes.c_uint64(array.ptr)
        nbytes = ctypes.c_size_t(64)
        return (lambda: _check("cuMemcpyDtoH", driver.cuMemcpyDtoH_v2(host, source, nbytes))), (
            array,
            host,
        )
    return _prepare_first_launch(device, driver)


def _prepare_first_launch(device: Device, driver: Any) -> tuple[Callable[[], None], object]:
    """Prepare the first launch of a kernel, on a stream other than that of the callback.

    The result is as in `prepare_call`.
    """
    text = CLOCK_KERNELS.read_text()
    kernel_source = KernelSource(text, CLOCK_KERNELS.name, {}, CLOCK_KERNELS.parent)
    module, keep = compile_source(device, kernel_source)
    function = ctypes.c_void_p(int(call(cu.cuModuleGetFunction, module, b"stamp_ns")))
    stamps = device.zeros((2,), "uint64")
    other = device.stream("other")
    handle = ctypes.c_void_p(other.handle)
    arguments = (ctypes.c_uint64(stamps.ptr), ctypes.c_int(0))
    pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(argument) for argument in arguments))

    def launch() -> None:
        status = driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, handle, pointers, None)
        _check("cuLaunchKernel", status)

    return launch, (keep, stamps, other, arguments, pointers)


# The run ------------------------------------------------------------------------------------------


def make_position_wait(device: Device, case: Case) -> Callable[[], None]:
    """Return a function that waits, holding the GIL, until the callback is in position.

    The callback is in position when it has requested the GIL, or when it runs and does not need the
    GIL.
    """
    # Open the C library and the soft device's library here, because opening a library may release
    # the GIL. The returned function must hold the GIL all the time.
    sleep_us = ctypes.PyDLL(None).usleep
    if device.kind != "soft":
        return lambda: sleep_us(int(CUDA_POSITION_S * 1e6))
    soft = ctypes.PyDLL(SONAME)
    count = soft.softcuda_count
    gil_requests = soft.softcuda_gil_requests
    count.restype = ctypes.c_int64
    gil_requests.restype = ctypes.c_int64

    def in_position() -> bool:
        if case.transport in GIL_TRANSPORTS:
            return bool(gil_requests())
        # A mailbox worker that calls a C function needs no GIL, so there is nothing to wait for.
        # The soft device does not count its calls, because they are not host functions.
        return case.transport == "mailbox" or bool(count(b"host_func"))

    def wait() -> None:
        start = time.monotonic()
        while time.monotonic() - start < POSITION_LIMIT_S:
            if in_position():
                return
            sleep_us(1000)
        raise SystemExit(f"the callback did not begin within {POSITION_LIMIT_S:g} s")

    return wait


def _wait_for_watch(device: Device) -> None:
    """Wait until the soft device is ready to record requests for the GIL."""
    if device.kind != "soft":
        return
    soft = ctypes.CDLL(SONAME)
    start = time.monotonic()
    while not soft.softcuda_watch_ready():
        if time.monotonic() - start > POSITION_LIMIT_S:
            raise SystemExit("the soft device does not record requests for the GIL")
        time.sleep(0.001)


def _block_stream(device: Device, stream: _Stream) -> Any:
    """Launch a kernel that runs until the first word of the returned array is set."""
    gate = device.pinned((16,), "int32")
    kernel = device.load(CLOCK_KERNELS)["hold"]
    device.synchronize(STREAM_LIMIT_S)
    values = (gate.ptr, int(BLOCK_LIMIT_S * 1e9))
    arguments = (values, (ctypes.c_void_p, ctypes.c_ulonglong))
    call(cu.cuLaunchKernel, kernel.function, 1, 1, 1, 1, 1, 1, 0, stream.handle, arguments, 0)
    return gate


def run(case: Case) -> int:
    """Run a case. If the case deadlocks, this function does not return.

    Return 0, or `RELEASED_STATUS` if the mailbox's deadline ended the deadlock.
    """
    device = open_device()
    _wait_for_watch(device)
    stream = _Stream(int(call(cu.cuStreamCreate, 0)))
    make_call, keep_call = prepare_call(device, case, stream)
    wait_for_position = make_position_wait(device, case)
    gate = _block_stream(device, stream)
    sys.setswitchinterval(NEVER_SWITCH_S)
    check, keep_callback = enqueue_callback(device, case.transport, stream)
    gate.array[0] = 1
    wait_for_position()
    make_call()
    sys.setswitchinterval(DEFAULT_SWITCH_S)
    start = time.monotonic()
    while cu.cuStreamQuery(stream.handle)[0] == cu.CUresult.CUDA_ERROR_NOT_READY:
        if time.monotonic() - start > STREAM_LIMIT_S:
            raise SystemExit(f"the stream was busy for {STREAM_LIMIT_S:g} s after the call")
        time.sleep(0.001)
    try:
        check()
    except HostWorkError as error:
        print(error, file=sys.stderr)
        return RELEASED_STATUS
    del keep_call, keep_callback
    return 0


if __name__ == "__main__":
    sys.exit(run(Case.parse(sys.argv[1])))
