"""Graphs of the latency measurement: kernel, host steps, kernel.

The first kernel writes the device's time, the host steps follow one another, and the second kernel
writes the time again. The body of a Python step appends CLOCK_MONOTONIC to a list; a native body
writes it to memory. Together with the soft device's record of when it entered each host function
and when the function returned, these times separate the hop from the rest of the join.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graft.cudagraph.chooser import SONAME
from graft.cudagraph.compiler import cache_folder, include_folders
from graft.cudagraph.device import Device
from graft.cudagraph.driver import call, check_code, cu
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import NativeWork, PythonWork, hostfunc
from graft.native import _native

CLOCK_KERNELS = Path(__file__).parents[2] / "kernels" / "clock.cu"
#: Graph with empty nodes in place of host steps.
BASELINE = "empty"
#: Callbacks of the library cuda.core, for comparison.
CUDA_CORE = "cuda.core"
TRANSPORTS = (BASELINE, "native", "native spin", "mailbox", "spinkernel", "python", CUDA_CORE)
#: Transports whose body is called by a thread of the driver: these have a hop.
DRIVER_CALLED = ("native", "native spin", "python", CUDA_CORE)
#: Transports with a Python body.
PYTHON_BODIES = ("python", CUDA_CORE)
#: Maximum number of host steps per graph: the soft device records that many host functions.
MAX_CALLBACKS = 64


class Samples(NamedTuple):
    """Times of several replays.

    Attributes
    ----------
    join
        Device time from the first kernel to the second, in nanoseconds; int64 [replays].
    hop
        Nanoseconds from the entry of the driver's function to the body, and from the body to the
        return of the function; int64 [replays, callbacks, 2]. None if they are not recorded.
    begun
        CLOCK_MONOTONIC when a callback began, and when the previous callback that took the GIL
        ended; int64 [n, 2]. If hops are recorded, these are all Python callbacks; otherwise the
        launch stands for the first callback of each replay.
    """

    join: np.ndarray
    hop: np.ndarray | None
    begun: np.ndarray


def unavailable(transport: str) -> str:
    """Return why a transport cannot be measured here; empty if it can."""
    if transport == CUDA_CORE and importlib.util.find_spec("cuda.core") is None:
        return "cuda.core is not installed (pip install cuda-core)"
    if transport == "native spin" and not _native.spin_supported():
        return "the driver has no spinning host steps (CUDA 13.2)"
    return ""


class TransportGraph:
    """A graph with time-stamping kernels around host steps. It is replayed one at a time.

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
        CLOCK_MONOTONIC at which Python bodies ran since the last `replay` began.
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
        if transport == CUDA_CORE:
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
        if not self._is_soft:
            # free(NULL) is a C function with the right signature that does nothing.
            return NativeWork(_address(ctypes.CDLL(None).free), 0, name="free(NULL)")
        word = self._body_times.ctypes.data + 8 * index
        return NativeWork(
            _address(self._library.softcuda_stamp), word, keep=self._body_times, name="stamp"
        )

    def _build_cuda_core(self, device: Device) -> Any:
        """Build the graph with cuda.core's callbacks, as its documentation describes."""
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
        for _ in range(self.callbacks):
            # The method is called on the class: a callback node's attribute "callback" is its
            # function.
            node = GraphNode.callback(node, self.body())
        GraphNode.launch(node, config, stamp, stamps, np.int32(1))
        self._keep = code, definition
        return definition.instantiate()

    def body(self) -> Any:
        """Return the default Python body, which appends the time to `called`."""
        append = self.called.append
        clock = time.monotonic_ns
        return lambda: append(clock())

    # Replay ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Put the driver's thread into the state it would have if no other graph ran.

        graft's Python steps leave their Python thread state on that thread, and later Python
        callbacks reuse it, including those of cuda.core. Without graft, cuda.core creates and
        destroys a thread state in every callback.
        """
        work: NativeWork | PythonWork = PythonWork(int)
        if self.transport != "python":
            release = _native.native_api()["release_thread_state"]
            work = NativeWork(release, 0, name="release thread state")
        hostfunc(self._stream, work)
        self._stream.synchronize()

    def replay(self, count: int, busy: bool = False) -> Samples:
        """Replay `count` times, one at a time and without holding the GIL.

        Parameters
        ----------
        count
            Number of replays.
        busy
            Wait for the busy Python thread before each replay.

        Raises
        ------
        DeviceError
            If the driver rejects a launch or a host step fails.
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
        hop = np.stack([marks - spans[..., 0], spans[..., 1] - marks], axis=-1)
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
    """Convert consecutive (begin, end) pairs to (begin, end of the previous one); int64 [n, 2]."""
    begin, end = _int64(spans).reshape(-1, 2).T
    return np.stack([begin, np.concatenate([[0], end[:-1]])], axis=1)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _object_code(device: Device) -> Any:
    """Return the time-stamping kernels as cuda.core's ObjectCode."""
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
