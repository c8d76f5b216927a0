"""The peers of the latency laboratory, each used as its own documentation says, unmodified."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from graft.cudagraph.compiler import cache_folder, include_folders
from graft.cudagraph.hostwork import NativeWork, PythonWork
from graft.native import _native
from graft.tools.latency_arms import (
    BASELINE,
    KERNELS,
    Arm,
    GraftArm,
    Hops,
    giving_back,
    keeping,
)

if TYPE_CHECKING:
    from graft.cudagraph.device import Device

__all__ = ["ARMS", "CudaCoreArm", "CupyArm", "make_arm", "unavailable"]

CORE = ("cuda.core", "cuda.core builder", "cuda.core kept")
#: The floor, graft's transports, and the peers.
ARMS = (BASELINE, "native", "native spin", "mailbox", "spinkernel", "python", *CORE, "cupy")


def unavailable(name: str, device: Device) -> str:
    """Why an arm cannot be measured here; "" when it can."""
    if name in CORE:
        found = importlib.util.find_spec("cuda.core")
        return "" if found else "cuda.core is not installed (pip install cuda-core==1.2.2)"
    if name == "native spin" and not _native.spin_supported():
        return "the driver has no spinning host steps (CUDA 13.2)"
    if name == "cupy":
        if device.kind == "soft":
            return "CuPy calls the CUDA runtime library, which does not run on the soft device"
        return "" if importlib.util.find_spec("cupy") else "CuPy is not installed"
    return ""


class CudaCoreArm(Arm):
    """cuda.core's callbacks of Python functions, in an explicit graph or by its graph builder.

    Alone in a process it makes and drops a Python thread state in every callback. "cuda.core kept"
    is the explicit graph on a thread that keeps one because graft ran there.
    """

    def __init__(self, device: Device, name: str, callbacks: int, hops: Hops) -> None:
        super().__init__(device, name, callbacks, hops)
        from cuda.core import Device as CoreDevice

        core = CoreDevice(device.ordinal)
        core.set_current()
        self.stream = core.create_stream()
        self.code = object_code(device)
        build = self._captured if name == "cuda.core builder" else self._explicit
        self.executable = build(self.code.get_kernel("stamp_ns"), np.uint64(self.stamps.ptr))
        self.executable.upload(self.stream)

    def _explicit(self, stamp: Any, where: np.uint64) -> Any:
        from cuda.core import LaunchConfig
        from cuda.core.graph import GraphDefinition, GraphNode

        one = LaunchConfig(grid=1, block=1)
        self.definition = GraphDefinition()
        node = self.definition.launch(one, stamp, where, np.int32(0))
        for _ in range(self.callbacks):
            # A callback node's own attribute "callback" is its function.
            node = GraphNode.callback(node, self.body())
        GraphNode.launch(node, one, stamp, where, np.int32(1))
        return self.definition.instantiate()

    def _captured(self, stamp: Any, where: np.uint64) -> Any:
        from cuda.core import LaunchConfig, launch

        one = LaunchConfig(grid=1, block=1)
        builder = self.stream.create_graph_builder()
        builder.begin_building()
        launch(builder, one, stamp, where, np.int32(0))
        for _ in range(self.callbacks):
            builder.callback(self.body())
        launch(builder, one, stamp, where, np.int32(1))
        return builder.end_building().complete()

    def first_work(self) -> NativeWork | PythonWork:
        """Drop the thread state that graft left, unless that is what is measured."""
        return keeping() if self.name == "cuda.core kept" else giving_back()

    def run(self) -> None:
        """Launch and wait."""
        self.executable.launch(self.stream)
        self.stream.sync()

    def drop(self) -> None:
        """Close executable and stream."""
        self.executable.close()
        self.stream.close()


class CupyArm(Arm):
    """CuPy's ``launch_host_func`` inside a captured graph. Runs on CUDA hardware only."""

    def __init__(self, device: Device, name: str, callbacks: int, hops: Hops) -> None:
        super().__init__(device, name, callbacks, hops)
        import cupy

        options = ("--std=c++17", *(f"-I{folder}" for folder in include_folders(KERNELS.parent)))
        self.code = cupy.RawModule(code=KERNELS.read_text(), options=options, backend="nvrtc")
        stamp, where = self.code.get_function("stamp_ns"), np.uint64(self.stamps.ptr)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.stream:
            self.stream.begin_capture()
            stamp((1,), (1,), (where, np.int32(0)))
            for _ in range(callbacks):
                body = self.body()
                self.stream.launch_host_func(lambda _, body=body: body(), None)
            stamp((1,), (1,), (where, np.int32(1)))
            self.graph = self.stream.end_capture()
        self.graph.upload(self.stream)

    def first_work(self) -> NativeWork | PythonWork:
        """Drop the thread state that graft left."""
        return giving_back()

    def run(self) -> None:
        """Launch and wait."""
        self.graph.launch(self.stream)
        self.stream.synchronize()

    def drop(self) -> None:
        """Let CuPy free graph and stream."""
        del self.graph, self.stream


def object_code(device: Device) -> Any:
    """Return the stamping kernels as cuda.core's ObjectCode."""
    from cuda.core import ObjectCode, Program, ProgramOptions

    text, folders = KERNELS.read_text(), include_folders(KERNELS.parent)
    if device.kind == "soft":
        from graft.native.softcuda.compile import compile_cpu

        image = compile_cpu(text, KERNELS.name, include_dirs=folders,
                            cache_dir=cache_folder() / "soft")
        return ObjectCode.from_cubin(image)
    major, minor = device.compute_capability
    options = ProgramOptions(std="c++17", arch=f"sm_{major}{minor}",
                             include_path=[str(folder) for folder in folders])
    return Program(text, "c++", options).compile("cubin")


def make_arm(device: Device, name: str, callbacks: int, hops: Hops) -> Arm:
    """Build an arm by name."""
    if name in CORE:
        return CudaCoreArm(device, name, callbacks, hops)
    if name == "cupy":
        return CupyArm(device, name, callbacks, hops)
    return GraftArm(device, name, callbacks, hops)
