"""The arms of the latency laboratory: one graph each, kernel, host steps, kernel.

graft's own are here, the peers in ``latency_peers``.

Every arm has the same shape: a kernel stamps the device's time, ``callbacks`` host steps follow one
another, a second kernel stamps the time. A Python body appends CLOCK_MONOTONIC to a list and the
native one writes it to memory. With the soft device's record of when it entered a host function and
when that returned, these tell the hop from the rest of the join.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graft.cudagraph.chooser import SONAME
from graft.cudagraph.driver import call, cu
from graft.cudagraph.graph import Graph, GraphLane
from graft.cudagraph.hostwork import NativeWork, PythonWork, hostfunc
from graft.native import _native

if TYPE_CHECKING:
    from graft.cudagraph.device import Device

__all__ = ["BASELINE", "KERNELS", "Arm", "GraftArm", "Hops", "empty_work", "giving_back",
           "keeping"]

KERNELS = Path(__file__).parent / "kernels" / "clock.cu"
BASELINE = "empty"
#: Arms whose body runs in a function that the driver's thread calls: they have a hop.
HOPPING = ("native", "native spin", "python", "cuda.core", "cuda.core builder", "cuda.core kept",
           "cupy")
LIMIT_S = 120.0


def empty_work(transport: str) -> NativeWork | PythonWork:
    """Host work that does nothing, by either transport."""
    if transport == "python":
        return PythonWork(lambda: None)
    # free(NULL) is a C function of the right type that does nothing.
    address = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value or 0
    return NativeWork(address, 0, name="free(NULL)")


def keeping() -> PythonWork:
    """Have the driver's thread keep a Python thread state, as after any Python step of graft's."""
    return PythonWork(lambda: None)


def giving_back() -> NativeWork:
    """Have the driver's thread drop the Python thread state that graft's steps left it."""
    release = _native.native_api()["release_thread_state"]
    return NativeWork(release, 0, name="release thread state")


class Hops:
    """The soft device's record of host functions: when each was entered and when it returned.

    NVIDIA's driver keeps no such record; there ``supported`` is False.
    """

    MOST = 64

    def __init__(self, device: Device) -> None:
        self.supported = device.kind == "soft"
        self._buffer = np.zeros((self.MOST, 2), np.uint64)
        if self.supported:
            library = ctypes.CDLL(SONAME)
            self._read = library.softcuda_hops
            self._read.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
            self._read.restype = ctypes.c_size_t
            self.stamp = ctypes.cast(library.softcuda_stamp, ctypes.c_void_p).value or 0

    def last(self, count: int) -> np.ndarray:
        """Return int64 [count, 2], nanoseconds (entered, returned) of the last host functions."""
        got = int(self._read(self._buffer.ctypes.data, count))
        if got != count:
            raise RuntimeError(f"the soft device recorded {got} of {count} host functions")
        return self._buffer[:count].astype(np.int64)


class Arm(ABC):
    """A graph with two stamping kernels around ``callbacks`` host steps, replayed one at a time."""

    def __init__(self, device: Device, name: str, callbacks: int, hops: Hops) -> None:
        self.name, self.callbacks, self.hops = name, callbacks, hops
        self.side = device.stream(f"beside {name}")
        self.before = self.first_work()
        self.stamps = device.pinned((2,), "uint64")
        self.called: list[int] = []
        self.written = np.zeros(callbacks, np.uint64)

    def prepare(self) -> None:
        """Run one host function, not timed, that brings the driver's thread into this arm's state.

        Python on that thread is cheap for whoever comes after graft, because graft's steps leave it
        a Python thread state. Each arm finds what it would find if it were alone in the process.
        """
        hostfunc(self.side, self.before)
        self.side.synchronize()

    def first_work(self) -> NativeWork | PythonWork:
        """Return what `prepare` runs."""
        return empty_work("native")

    @abstractmethod
    def run(self) -> None:
        """Launch the graph and wait until it is done."""

    @abstractmethod
    def drop(self) -> None:
        """Give the graph up."""

    def body(self) -> Any:
        """Return the Python body: it says when it ran, and nothing else."""
        append, clock = self.called.append, time.monotonic_ns

        def said() -> None:
            append(clock())

        return said

    def replay(self) -> tuple[int, int, np.ndarray | None]:
        """Replay once; `prepare` comes first.

        Returns
        -------
        join : int
            Nanoseconds of the device's clock from the first kernel to the second.
        cpu : int
            Nanoseconds of processor time that the whole process used for the replay.
        hops : ndarray of int64 [callbacks, 2], or None
            Nanoseconds from the entry of the driver's function to the body, and back.
        """
        self.called.clear()
        cpu = time.process_time_ns()
        self.run()
        cpu = time.process_time_ns() - cpu
        join = int(self.stamps.array[1]) - int(self.stamps.array[0])
        if self.name not in HOPPING or not self.hops.supported:
            return join, cpu, None
        marks = np.array(self.called) if self.called else self.written.astype(np.int64)
        record = self.hops.last(self.callbacks)
        return join, cpu, np.stack([marks - record[:, 0], record[:, 1] - marks], axis=1)

    def close(self) -> None:
        """Drop the graph and its memory."""
        self.drop()
        self.side.close()
        self.stamps.close()


class GraftArm(Arm):
    """One of graft's transports, or empty nodes."""

    def __init__(self, device: Device, name: str, callbacks: int, hops: Hops,
                 work: NativeWork | PythonWork | None = None) -> None:
        super().__init__(device, name, callbacks, hops)
        self.stream = device.stream(f"latency {name}")
        self.graph = Graph(device, f"latency {name}")
        stamp, lane = device.load(KERNELS)["stamp_ns"], self.graph.lane("main")
        lane.kernel(stamp, 1, 1, (self.stamps, 0), name="before")
        for i in range(callbacks):
            if name == BASELINE:
                self.graph.add("empty", f"empty {i}", "main",
                               lambda handle: _native.attach_keep(handle, ()),
                               lambda handle, after, _: call(cu.cuGraphAddEmptyNode, handle, after,
                                                             len(after)))
                continue
            self._add(lane, work or self._work(i), f"host step {i}")
        lane.kernel(stamp, 1, 1, (self.stamps, 1), name="after")
        self.executable = self.graph.instantiate()
        self.executable.upload(self.stream)

    def _add(self, lane: GraphLane, work: NativeWork | PythonWork, title: str) -> None:
        if self.name == "mailbox":
            lane.mailbox(work, name=title)
        elif self.name == "spinkernel":
            lane.spin(work, name=title)
        else:
            lane.host(work, spin="force" if self.name == "native spin" else False, name=title)

    def first_work(self) -> NativeWork | PythonWork:
        """A Python step finds the thread state that its predecessors left."""
        return keeping() if self.name == "python" else super().first_work()

    def _work(self, index: int) -> NativeWork | PythonWork:
        if self.name == "python":
            return PythonWork(self.body())
        if not self.hops.supported:
            return empty_work(self.name)
        slot = self.written.ctypes.data + 8 * index
        return NativeWork(self.hops.stamp, slot, keep=self.written, name="stamp")

    def run(self) -> None:
        """Launch and wait."""
        self.executable.launch(self.stream)
        self.executable.synchronize(timeout_s=LIMIT_S)

    def drop(self) -> None:
        """Close executable, graph and stream."""
        self.executable.close()
        self.graph.close()
        self.stream.close()
