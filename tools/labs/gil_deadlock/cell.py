"""One cell of the deadlock laboratory, played in the process that calls :func:`play`.

The two sides are brought into position by events, not by waiting: a kernel holds the stream until
everything is enqueued; this thread takes the GIL and no longer gives it up (``ctypes.PyDLL`` calls
keep it, and the switch interval is longer than any cell); then the stream is let go, and only when
the callback stands at the GIL, or has begun without it, the driver call of the pattern is made.
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

from graft.cudagraph.chooser import SONAME
from graft.cudagraph.compiler import KernelSource, compile_source
from graft.cudagraph.device import Device, open_device
from graft.cudagraph.driver import call, cu
from graft.cudagraph.errors import HostWorkError
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import HostWork, NativeWork, PythonWork

KERNELS = Path(__file__).parents[2] / "kernels" / "clock.cu"
#: What the thread that holds the GIL calls.
PATTERNS = {
    "alloc": "cuMemAlloc",
    "hostfunc": "cuLaunchHostFunc",
    "first-launch": "first cuLaunchKernel of a kernel, loaded lazily",
    "copy": "cuMemcpyDtoH behind the callback",
}
#: Who calls the host function. The mailbox has a native body, or a Python one.
TRANSPORTS = (
    "python",
    "native",
    "mailbox",
    "mailbox-python",
    "cuda.bindings",
    "ctypes",
    "cuda.core",
)
#: Up to 13.4, cuda.bindings wrapped even a C function into one of its own that asks for the GIL.
BINDINGS = importlib.metadata.version("cuda-bindings").split(".")
BINDINGS_WRAP = (int(BINDINGS[0]), int(BINDINGS[1])) < (13, 5)
#: Transports whose callback asks for the GIL.
ASKING = (
    "python",
    "mailbox-python",
    "ctypes",
    "cuda.core",
    *(("cuda.bindings",) if BINDINGS_WRAP else ()),
)
#: SOFTCUDA_LOCK_MODEL.
MODELS = (0, 1, 2, 4)
#: Exit status of a cell whose wait was ended by the mailbox's own deadline.
RELEASED = 3

NATIVE_US = 150_000
MAILBOX_DEADLINE_S = 6.0
GATE_LIMIT_S = 60.0
POSITION_LIMIT_S = 60.0
#: Nothing tells on CUDA hardware whether the callback stands at the GIL yet.
POSITION_CUDA_S = 0.5
NEVER_S = 1e6
END_LIMIT_S = 100.0


@dataclass(frozen=True)
class Cell:
    """One arrangement: what is called, by whom the callback is, and the driver's modelled locks.

    ``held`` is False for the control: the same call with the GIL released. ``model`` is -1 on CUDA
    hardware, whose locks are what they are.
    """

    pattern: str
    transport: str
    model: int
    held: bool = True

    @property
    def name(self) -> str:
        """As ``--cell`` takes it."""
        return f"{self.pattern}:{self.transport}:{self.model}{'' if self.held else ':released'}"


def unavailable(transport: str) -> str:
    """Why a transport cannot be tried here; "" when it can."""
    if transport == "cuda.core" and importlib.util.find_spec("cuda.core") is None:
        return "cuda.core is not installed (pip install cuda-core)"
    return ""


def _function(name: str) -> int:
    """Address of a C function of the process."""
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0


@dataclass(frozen=True)
class _Queue:
    """A stream that waits for the legacy stream and the other way round, as CUDA's default is."""

    handle: int


def enqueue(device: Device, transport: str, queue: _Queue) -> tuple[Callable[[], None], object]:
    """Enqueue the callback; returns what raises its failure, and what must be kept."""
    if transport in ("python", "native", "mailbox", "mailbox-python"):
        graph = Graph(device, transport)
        python = transport in ("python", "mailbox-python")
        # A C function that takes its time and no GIL.
        usleep = NativeWork(_function("usleep"), NATIVE_US, name="usleep")
        work: HostWork = PythonWork(int) if python else usleep
        if transport.startswith("mailbox"):
            graph.lane("main").mailbox(work, name="callback", deadline_s=MAILBOX_DEADLINE_S)
        else:
            graph.lane("main").host(work, name="callback")
        run = graph.instantiate()
        run.launch(queue)  # type: ignore[arg-type]  # only its handle is asked for
        return run.check, (graph, run)
    if transport == "cuda.bindings":
        function = _function("usleep")
        call(cu.cuLaunchHostFunc, queue.handle, cu.CUhostFn(function), NATIVE_US)
        return lambda: None, None
    if transport == "ctypes":
        thunk = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: None)
        _check(
            "cuLaunchHostFunc",
            ctypes.CDLL(SONAME).cuLaunchHostFunc(ctypes.c_void_p(queue.handle), thunk, None),
        )
        return lambda: None, thunk
    from cuda.core import Device as CoreDevice
    from cuda.core import Stream as CoreStream
    from cuda.core.graph import GraphDefinition

    CoreDevice(device.ordinal).set_current()
    definition = GraphDefinition()
    definition.callback(lambda: None)
    executable = definition.instantiate()
    executable.launch(CoreStream.from_handle(queue.handle))
    return lambda: None, (definition, executable)


def _check(api: str, status: int) -> None:
    if status:
        raise SystemExit(f"{api} answered {status}")


def pattern_call(device: Device, cell: Cell, queue: _Queue) -> tuple[Callable[[], None], object]:
    """Prepare the driver call of the pattern; returns it, and what must be kept."""
    # PyDLL calls without releasing the GIL, CDLL releases it: nothing else differs.
    driver: Any = (ctypes.PyDLL if cell.held else ctypes.CDLL)(SONAME)
    stream = ctypes.c_void_p(queue.handle)
    address = ctypes.c_uint64()
    if cell.pattern == "alloc":
        return (
            lambda: _check(
                "cuMemAlloc", driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4096))
            )
        ), address
    if cell.pattern == "hostfunc":
        nothing = ctypes.c_void_p(_function("free"))
        return (
            lambda: _check("cuLaunchHostFunc", driver.cuLaunchHostFunc(stream, nothing, None))
        ), nothing
    if cell.pattern == "copy":
        data = device.zeros((16,), "int32")
        host = ctypes.create_string_buffer(64)
        source = ctypes.c_uint64(data.ptr)
        return (
            lambda: _check(
                "cuMemcpyDtoH", driver.cuMemcpyDtoH_v2(host, source, ctypes.c_size_t(64))
            )
        ), (data, host)
    kernel_source = KernelSource(KERNELS.read_text(), KERNELS.name, {}, KERNELS.parent)
    module, keep = compile_source(device, kernel_source)
    function = ctypes.c_void_p(int(call(cu.cuModuleGetFunction, module, b"stamp_ns")))
    stamps = device.zeros((2,), "uint64")
    other = device.stream("other")
    values = (ctypes.c_uint64(stamps.ptr), ctypes.c_int(0))
    table = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
    on = ctypes.c_void_p(other.handle)
    return (
        lambda: _check(
            "cuLaunchKernel", driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, on, table, None)
        )
    ), (keep, stamps, other, values, table)


def position(device: Device, cell: Cell) -> Callable[[], None]:
    """Make what waits, keeping the GIL, until the callback asks for it or runs without it."""
    # Made beforehand: opening a library may let go of the GIL.
    sleep = ctypes.PyDLL(None).usleep
    if device.kind != "soft":
        return lambda: sleep(int(POSITION_CUDA_S * 1e6))
    soft = ctypes.PyDLL(SONAME)
    count = soft.softcuda_count
    asks = soft.softcuda_watch_asks
    count.restype = asks.restype = ctypes.c_int64

    def wait() -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < POSITION_LIMIT_S:
            # A mailbox's worker is no thread of the driver's: without the GIL it just answers.
            if (
                asks()
                if cell.transport in ASKING
                else cell.transport == "mailbox" or count(b"host_func")
            ):
                return
            sleep(1000)
        raise SystemExit(f"the callback did not begin within {POSITION_LIMIT_S:g} s")

    return wait


def _watch_ready(device: Device) -> None:
    """Wait until the soft device sees who asks for the GIL."""
    if device.kind != "soft":
        return
    soft = ctypes.CDLL(SONAME)
    begun = time.monotonic()
    while not soft.softcuda_watch_ready():
        if time.monotonic() - begun > POSITION_LIMIT_S:
            raise SystemExit("the soft device does not see requests for the GIL")
        time.sleep(0.001)


def play(cell: Cell) -> int:
    """Play one cell; returns 0 when it completed, and never when it hangs."""
    device = open_device()
    _watch_ready(device)
    queue = _Queue(int(call(cu.cuStreamCreate, 0)))
    gate = device.pinned((16,), "int32")
    hold = device.load(KERNELS)["hold"]
    pattern, kept = pattern_call(device, cell, queue)
    until_in_position = position(device, cell)
    device.synchronize(END_LIMIT_S)
    values = (gate.ptr, int(GATE_LIMIT_S * 1e9))
    call(
        cu.cuLaunchKernel,
        hold.function,
        1,
        1,
        1,
        1,
        1,
        1,
        0,
        queue.handle,
        (values, (ctypes.c_void_p, ctypes.c_ulonglong)),
        0,
    )
    sys.setswitchinterval(NEVER_S)
    failed, callback = enqueue(device, cell.transport, queue)
    gate.array[0] = 1
    until_in_position()
    pattern()
    sys.setswitchinterval(0.005)
    begun = time.monotonic()
    while cu.cuStreamQuery(queue.handle)[0] == cu.CUresult.CUDA_ERROR_NOT_READY:
        if time.monotonic() - begun > END_LIMIT_S:
            raise SystemExit(f"the stream was busy for {END_LIMIT_S:g} s after the call")
        time.sleep(0.001)
    try:
        failed()
    except HostWorkError as error:
        print(error, file=sys.stderr)
        return RELEASED
    del kept, callback
    return 0


if __name__ == "__main__":
    pattern, transport, model, *rest = sys.argv[1].split(":")
    sys.exit(play(Cell(pattern, transport, int(model), not rest)))
