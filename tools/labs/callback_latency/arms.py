"""The arms of the latency laboratory: one graph each, kernel, host steps, kernel.

A kernel stamps the device's time, ``callbacks`` host steps follow one another, a second kernel
stamps the time. A Python body appends CLOCK_MONOTONIC to a list and the native one writes it to
memory. With the soft device's record of when it entered a host function and when that returned,
these tell the hop from the rest of the join.
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

KERNELS = Path(__file__).parents[2] / "kernels" / "clock.cu"
#: The floor, graft's transports, and the peer.
ARMS = ("empty", "native", "native spin", "mailbox", "spinkernel", "python", "cuda.core")
BASELINE = "empty"
PEER = "cuda.core"
#: Arms whose body runs in a function that the driver's thread calls: they have a hop.
HOPPING = ("native", "native spin", "python", PEER)
PYTHON = ("python", PEER)
#: Host functions that the soft device keeps a record of.
MOST = 64


class Samples(NamedTuple):
    """What some replays of an arm took.

    Attributes
    ----------
    join : int64 [replays], nanoseconds of the device's clock from one kernel to the other.
    hop : int64 [replays, callbacks, 2], nanoseconds from the entry of the driver's function to the
        body and back, or None where nobody records them.
    begun : int64 [n, 2], CLOCK_MONOTONIC when callbacks began, each with the end of the one before
        it that took the GIL: all Python ones where hops are recorded, else the first of each
        replay, by its launch.
    """

    join: np.ndarray
    hop: np.ndarray | None
    begun: np.ndarray


def unavailable(name: str) -> str:
    """Why an arm cannot be measured here; "" when it can."""
    if name == PEER and importlib.util.find_spec("cuda.core") is None:
        return "cuda.core is not installed (pip install cuda-core)"
    if name == "native spin" and not _native.spin_supported():
        return "the driver has no spinning host steps (CUDA 13.2)"
    return ""


class Arm:
    """A graph with two stamping kernels around ``callbacks`` host steps, replayed one at a time."""

    def __init__(self, device: Device, name: str, callbacks: int, work: Any = None) -> None:
        self.name = name
        self.callbacks = callbacks
        self.soft = device.kind == "soft"
        self.stream = device.stream(f"latency {name}")
        self.stamps = device.pinned((2,), "uint64")
        self.called: list[int] = []
        self.written = np.zeros(callbacks, np.uint64)
        self._library = ctypes.CDLL(SONAME)
        self._graph: Any = None
        self._native: Any = None
        self._keep: object = None
        if name == PEER:
            self._executable = self._cuda_core(device)
            self._handle = int(self._executable.handle)
        else:
            self._executable = self._graft(device, work)
            self._native = self._executable._native
            self._handle = 0

    def _graft(self, device: Device, work: Any) -> Any:
        graph = self._graph = Graph(device, f"latency {self.name}")
        stamp = device.load(KERNELS)["stamp_ns"]
        lane = graph.lane("main")
        lane.kernel(stamp, 1, 1, (self.stamps, 0), name="before")
        for i in range(self.callbacks):
            title = f"host step {i}"
            body = work or self._work(i)
            if self.name == BASELINE:
                graph.add(
                    "empty",
                    title,
                    "main",
                    lambda handle: _native.attach_keep(handle, ()),
                    lambda handle, after, _: call(
                        cu.cuGraphAddEmptyNode, handle, after, len(after)
                    ),
                )
            elif self.name == "mailbox":
                lane.mailbox(body, name=title)
            elif self.name == "spinkernel":
                lane.spinkernel(body, name=title)
            else:
                lane.host(body, spin="force" if self.name == "native spin" else False, name=title)
        lane.kernel(stamp, 1, 1, (self.stamps, 1), name="after")
        executable = graph.instantiate()
        executable.upload(self.stream)
        return executable

    def _work(self, index: int) -> NativeWork | PythonWork:
        if self.name == "python":
            return PythonWork(self.body())
        if not self.soft:
            # free(NULL) is a C function of the right type that does nothing.
            return NativeWork(_address(ctypes.CDLL(None).free), 0, name="free(NULL)")
        slot = self.written.ctypes.data + 8 * index
        return NativeWork(
            _address(self._library.softcuda_stamp), slot, keep=self.written, name="stamp"
        )

    def _cuda_core(self, device: Device) -> Any:
        """cuda.core's callbacks of Python functions in an explicit graph, as documented."""
        from cuda.core import Device as CoreDevice
        from cuda.core import LaunchConfig
        from cuda.core.graph import GraphDefinition, GraphNode

        CoreDevice(device.ordinal).set_current()
        code = _object_code(device)
        definition = GraphDefinition()
        one = LaunchConfig(1, block=1)
        stamp = code.get_kernel("stamp_ns")
        where = np.uint64(self.stamps.ptr)
        node = definition.launch(one, stamp, where, np.int32(0))
        for _ in range(self.callbacks):
            # A callback node's own attribute "callback" is its function.
            node = GraphNode.callback(node, self.body())
        GraphNode.launch(node, one, stamp, where, np.int32(1))
        self._keep = code, definition
        return definition.instantiate()

    def body(self) -> Any:
        """Return the Python body: it says when it ran, and nothing else."""
        append = self.called.append
        clock = time.monotonic_ns
        return lambda: append(clock())

    def prepare(self) -> None:
        """Bring the driver's thread into the state that this arm would find if it were alone.

        graft's Python steps leave that thread its Python thread state, and whoever calls Python
        there later finds it: cuda.core too, which alone makes and drops one in every callback.
        """
        work: NativeWork | PythonWork = PythonWork(int)
        if self.name != "python":
            release = _native.native_api()["release_thread_state"]
            work = NativeWork(release, 0, name="release thread state")
        hostfunc(self.stream, work)
        self.stream.synchronize()

    def replay(self, count: int, busy: bool = False) -> Samples:
        """Replay without the GIL, one at a time; ``busy`` waits for the busy thread before each.

        Raises
        ------
        DeviceError
            The driver refused, or a host step failed.
        """
        self.prepare()
        self.called.clear()
        hopping = self.soft and self.name in HOPPING
        native = hopping and self.name not in PYTHON
        code, launched, join, hops, said = _native.labs.replay(
            self._native,
            self._handle,
            self.stream.handle,
            self.callbacks,
            self.stamps.host_ptr,
            _address(self._library.softcuda_hops) if hopping else 0,
            self.written.ctypes.data if native else 0,
            busy,
            count,
        )
        check_code("cuGraphLaunch", code)
        if self._native is not None:
            self._executable.check()
        found = np.array(join, np.uint64).astype(np.int64)
        if not hopping:
            return Samples(found, None, _after_each_other(launched))
        record = np.array(hops, np.uint64).astype(np.int64).reshape(count, self.callbacks, 2)
        marks = np.array(said if native else self.called, np.uint64).astype(np.int64)
        marks = marks.reshape(count, self.callbacks)
        hop = np.stack([marks - record[..., 0], record[..., 1] - marks], axis=-1)
        return Samples(found, hop, _after_each_other(launched if native else hops))

    def close(self) -> None:
        """Drop the graph and its memory."""
        self._executable.close()
        if self._graph is not None:
            self._graph.close()
        self.stream.close()
        self.stamps.close()


def _after_each_other(spans: list[int]) -> np.ndarray:
    """(begin, end) of one after the other as int64 [n, 2]: begin, and the end of the one before."""
    begin, end = np.array(spans, np.uint64).astype(np.int64).reshape(-1, 2).T
    return np.stack([begin, np.concatenate([[0], end[:-1]])], axis=1)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _object_code(device: Device) -> Any:
    """Return the stamping kernels as cuda.core's ObjectCode."""
    from cuda.core import ObjectCode, Program, ProgramOptions

    text = KERNELS.read_text()
    folders = include_folders(KERNELS.parent)
    if device.kind == "soft":
        from graft.native.softcuda.compile import compile_cpu

        image = compile_cpu(
            text, KERNELS.name, include_dirs=folders, cache_dir=cache_folder() / "soft"
        )
        return ObjectCode.from_cubin(image)
    major, minor = device.compute_capability
    options = ProgramOptions(
        std="c++17", arch=f"sm_{major}{minor}", include_path=[str(folder) for folder in folders]
    )
    return Program(text, "c++", options).compile("cubin")
