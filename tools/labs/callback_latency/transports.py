"""Build and replay the graphs of the latency measurement: a kernel, host steps, a kernel.

The first kernel writes the device's time. The host steps run one after another, and then the second
kernel writes the device's time again. The body of a Python step appends CLOCK_MONOTONIC to a list,
and a native body writes it to memory. The soft device records when it entered each host function
and when the function returned. From these times, the tool computes the hop: the overhead of the
call path from the driver to the body and back.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.driver.chooser import SONAME
from graft.cudagraph.driver.driver import call, check_code, cu
from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.host.hostwork import NativeWork, PythonWork, hostfunc
from graft.cudagraph.kernels.compiler import cache_folder, include_folders
from graft.native import _native

CLOCK_KERNELS = Path(__file__).parents[2] / "kernels" / "clock.cu"
#: Transport name of a graph with empty nodes in place of host steps.
BASELINE = "empty"

#: Names of the two transports that use callbacks of cuda.core, for comparison: a Python callable,
#: and a C function that the driver calls directly.
CUDA_CORE = "cuda.core"
CUDA_CORE_NATIVE = "cuda.core native"
#: Signature of the C functions that cuda.core accepts as callbacks.
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
TRANSPORTS = (
    BASELINE,
    "native",
    "native spin",
    "mailbox",
    "spinkernel",
    "python",
    CUDA_CORE,
    CUDA_CORE_NATIVE,
)
#: Transports whose body is called by a thread of the driver. Only these transports have a hop, the
#: overhead of the call path.
DRIVER_CALLED = ("native", "native spin", "python", CUDA_CORE, CUDA_CORE_NATIVE)
#: Transports with a Python body.
PYTHON_BODIES = ("python", CUDA_CORE)
#: Maximum number of host steps per graph. The soft device records at most this number of host
#: functions per replay.
MAX_CALLBACKS = 64


class Samples(NamedTuple):
    """Times of several replays."""

    #: Device time from the kernel before the host steps to the kernel after them, in nanoseconds;
    #: int64 [replays].
    join: np.ndarray

    #: The two parts of each hop, in nanoseconds: from the entry of the host function to its body,
    #: and from the end of the body to the return of the host function; int64 [replays, callbacks,
    #: 2]. None if hops are not recorded.
    hop: np.ndarray | None

    #: CLOCK_MONOTONIC in nanoseconds at which a callback began, and at which the previous callback
    #: ended; int64 [n, 2]. If the body is a Python function and hops are recorded, there is one
    #: entry per callback. Otherwise, there is one entry per replay, and its first time is that of
    #: the launch.
    begun: np.ndarray


def unavailable(transport: str) -> str:
    """Return the reason why a transport cannot be measured here, or "" if it can be measured."""
    is_cuda_core = transport in (CUDA_CORE, CUDA_CORE_NATIVE)
    if is_cuda_core and importlib.util.find_spec("cuda.core") is None:
        return "cuda.core is not installed (pip install cuda-core)"
    if transport == "native spin" and not _native.spin_supported():
        return "the driver has no spinning host steps (CUDA 13.2)"
    return ""


class TransportGraph:
    """A graph with host steps between two kernels that write time stamps.

    Parameters
    ----------
    device
        Device of the graph.
    transport
        One of `TRANSPORTS`.
    callbacks
        Number of host steps.
    work
        Host work of each step; by default a body that records when it runs.

    Attributes
    ----------
    called
        CLOCK_MONOTONIC at each call of a Python body since the last call of `replay`.
    """

    def __init__(self, device: Device, transport: str, callbacks: int, work: Any = None) -> None:
        self.transport = transport
        self.callbacks = callbacks
        self.called: list[int] = []
        self._is_soft = device.kind == "soft"
        self._stream = device.stream(f"latency {transport}")
        self._stamps = device.pinned((2,), "uint64")
        self._body_times = np.zeros(callbacks, np.uint64)
        self._library = ctypes.CDLL(SONAME)
        self._graph: Any = None
        self._native: Any = None
        self._handle = 0
        self._keep: object = None
        if transport in (CUDA_CORE, CUDA_CORE_NATIVE):
            self._executable = self._build_cuda_core(device)
            self._handle = int(self._executable.handle)
        else:
            self._executable = self._build_graft(device, work)
            self._native = self._executable._native

    # Construction ---------------------------------------------------------------------------------

    def _build_graft(self, device: Device, work: Any) -> Any:
        graph = self._graph = Graph(device, f"latency {self.transport}")
        stamp = device.load(CLOCK_KERNELS)["stamp_ns"]
        lane = graph.lane("main")
        lane.kernel(stamp, 1, 1, (self._stamps, 0), name="before")
        for i in range(self.callbacks):
            self._add_host_step(graph, f"host step {i}", work or self._default_work(i))
        lane.kernel(stamp, 1, 1, (self._stamps, 1), name="after")
        executable = graph.instantiate()
        executable.upload(self._stream)
        return executable

    def _add_host_step(self, graph: Graph, name: str, work: Any) -> None:
        lane = graph.lane("main")
        if self.transport == BASELINE:
            graph.add(
                "empty",
                name,
                "main",
                lambda handle: _native.attach_keep(handle, ()),
                lambda handle, after, _: call(cu.cuGraphAddEmptyNode, handle, after, len(after)),
            )
        elif self.transport == "mailbox":
            lane.mailbox(work, name=name)
        elif self.transport == "spinkernel":
            lane.spinkernel(work, name=name)
        else:
            lane.host(work, spin="force" if self.transport == "native spin" else False, name=name)

    def _default_work(self, index: int) -> NativeWork | PythonWork:
        if self.transport == "python":
            return PythonWork(self.body())
        address, data = self._native_body(index)
        return NativeWork(address, data, keep=self._body_times, name="body")

    def _native_body(self, index: int) -> tuple[int, int]:
        """Return the C function that host step `index` runs by default, and its argument.

        Both are addresses.
        """
        if self._is_soft:
            return _address(self._library.softcuda_stamp), self._body_times.ctypes.data + 8 * index
        # On CUDA hardware, the body does nothing. free has the signature void (*)(void *) of a host
        # function, and free(NULL) does nothing.
        return _address(ctypes.CDLL(None).free), 0

    def _build_cuda_core(self, device: Device) -> Any:
        """Build the graph with callbacks of cuda.core, as cuda.core's documentation describes."""
        from cuda.core import Device as CoreDevice
        from cuda.core import LaunchConfig
        from cuda.core.graph import GraphDefinition, GraphNode

        CoreDevice(device.ordinal).set_current()
        code = _object_code(device)
        definition = GraphDefinition()
        config = LaunchConfig(1, block=1)
        stamp = code.get_kernel("stamp_ns")
        stamps = np.uint64(self._stamps.ptr)
        node = definition.launch(config, stamp, stamps, np.int32(0))
        functions = []
        for i in range(self.callbacks):
            # Call the method through the class, because the attribute "callback" of a callback node
            # is the node's function.
            if self.transport == CUDA_CORE:
                node = GraphNode.callback(node, self.body())
            else:
                address, data = self._native_body(i)
                functions.append(HOST_FUNCTION(address))
                node = GraphNode.callback(node, functions[-1], user_data=data)
        GraphNode.launch(node, config, stamp, stamps, np.int32(1))
        self._keep = code, definition, functions
        return definition.instantiate()

    def body(self) -> Any:
        """Return the default Python callback; it appends the time (CLOCK_MONOTONIC) to `called`."""
        append = self.called.append
        clock = time.monotonic_ns
        return lambda: append(clock())

    # Replay ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create or release the Python thread state of the driver's callback thread.

        graft's Python steps leave a Python thread state on the driver's callback thread, and later
        Python callbacks on this thread reuse it. Without graft, each of cuda.core's callbacks
        creates and destroys a thread state. To measure this cost, this method releases the thread
        state unless the transport is "python". For the transport "python", it runs a Python step,
        which creates the thread state.

        Call this method before each measurement, because the graphs of all transports share the
        callback thread.
        """
        work: NativeWork | PythonWork = PythonWork(int)
        if self.transport != "python":
            release = _native.native_api()["release_thread_state"]
            work = NativeWork(release, 0, name="release thread state")
        hostfunc(self._stream, work)
        self._stream.synchronize()

    def replay(self, count: int, busy: bool = False) -> Samples:
        """Replay the graph `count` times, one replay after another, without holding the GIL.

        With `busy`, wait before each replay until the busy Python thread runs. Raise DeviceError
        if the driver rejects a launch or a host step fails.
        """
        self.prepare()
        self.called.clear()
        has_hops = self._is_soft and self.transport in DRIVER_CALLED
        is_native = has_hops and self.transport not in PYTHON_BODIES
        code, launched, join, hops, body_times = _native.labs.replay(
            self._native,
            self._handle,
            self._stream.handle,
            self.callbacks,
            self._stamps.host_ptr,
            _address(self._library.softcuda_hops) if has_hops else 0,
            self._body_times.ctypes.data if is_native else 0,
            busy,
            count,
        )
        check_code("cuGraphLaunch", code)
        if self._native is not None:
            self._executable.check()
        if not has_hops:
            return Samples(_int64(join), None, _with_previous_end(launched))
        spans = _int64(hops).reshape(count, self.callbacks, 2)
        marks = _int64(body_times if is_native else self.called).reshape(count, self.callbacks)
        before_body = marks - spans[..., 0]
        after_body = spans[..., 1] - marks
        hop = np.stack([before_body, after_body], axis=-1)
        return Samples(_int64(join), hop, _with_previous_end(launched if is_native else hops))

    def close(self) -> None:
        """Free the graph and its memory."""
        self._executable.close()
        if self._graph is not None:
            self._graph.close()
        self._stream.close()
        self._stamps.close()


def _int64(times: list[int]) -> np.ndarray:
    return np.array(times, np.uint64).astype(np.int64)


def _with_previous_end(spans: list[int]) -> np.ndarray:
    """Pair the start of each span with the end of the previous span (int64 [spans, 2]).

    `spans` has alternating start and end times. The first span has a previous end of 0.
    """
    begin, end = _int64(spans).reshape(-1, 2).T
    previous_end = np.concatenate([[0], end[:-1]])
    return np.stack([begin, previous_end], axis=1)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _object_code(device: Device) -> Any:
    """Compile the kernels that write time stamps; return them as cuda.core's ObjectCode."""
    from cuda.core import ObjectCode, Program, ProgramOptions

    text = CLOCK_KERNELS.read_text()
    folders = include_folders(CLOCK_KERNELS.parent)
    if device.kind == "soft":
        from graft.native.softcuda.compile import compile_cpu

        image = compile_cpu(
            text, CLOCK_KERNELS.name, include_dirs=folders, cache_dir=cache_folder() / "soft"
        )
        return ObjectCode.from_cubin(image)
    major, minor = device.compute_capability
    options = ProgramOptions(
        std="c++17", arch=f"sm_{major}{minor}", include_path=[str(folder) for folder in folders]
    )
    return Program(text, "c++", options).compile("cubin")
