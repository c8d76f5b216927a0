"""Helpers for the soft-device tests.

``Soft`` is the device, accessed through cuda.bindings. ``run_child`` and ``check`` run code with a
new device in a child process, for example to test faults.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from fork_server import run_forked

from graft.cudagraph.driver import chooser, softstats
from graft.cudagraph.errors import DeviceError
from graft.native.softcuda.compile import compile_cpu, compiler

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "native" / "softcuda"
CACHE = Path(tempfile.gettempdir()) / f"softcuda-test-kernels-{os.getuid()}"


def compile_kernel(source: str, name: str = "test.cu", **options: Any) -> bytes:
    """Compile a kernel source for the soft device."""
    return compile_cpu(source, name, cache_dir=CACHE, **options)


def build_ptx_stub(path: Path, *options: str) -> Path:
    """Compile the stand-in for the PTX library with additional compiler options."""
    folders = [f"-I{SOURCE}", f"-I{SOURCE / 'include'}"]
    flags = ["-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    files = [str(HERE / "ptx_stub.cpp"), "-o", str(path)]
    subprocess.run([*compiler(), *flags, *folders, *options, *files], check=True)
    return path


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
USLEEP = ctypes.CDLL(None).usleep


def address(function: Any) -> int:
    """Return the address of a C function or ctypes callback as an integer."""
    value = ctypes.cast(function, ctypes.c_void_p).value
    assert value is not None
    return value


#: For functions that create an object: the function that destroys it.
DESTROY = {
    "cuStreamCreate": "cuStreamDestroy",
    "cuStreamCreateWithPriority": "cuStreamDestroy",
    "cuEventCreate": "cuEventDestroy",
    "cuGraphCreate": "cuGraphDestroy",
    "cuStreamEndCapture": "cuGraphDestroy",
    "cuGraphInstantiate": "cuGraphExecDestroy",
    "cuMemAlloc": "cuMemFree",
    "cuMemHostAlloc": "cuMemFreeHost",
    "cuModuleLoadData": "cuModuleUnload",
}


#: Kernels that most tests use.
KERNELS = r"""
extern "C" __global__ void append(int* log, int value) { log[1 + log[0]++] = value; }
extern "C" __global__ void add(int* p, int value) { *p += value; }
extern "C" __global__ void scale(int* p, int value) { *p *= value; }
extern "C" __global__ void copy(const int* in, int* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i];
}
extern "C" __global__ void wait_for(const volatile int* flag, int* seen) {
  while (*flag == 0) {}
  *seen = *flag;
}
extern "C" __global__ void decide(unsigned long long handle, const int* p, int below) {
  cudaGraphSetConditional(handle, *p < below ? 1u : 0u);
}
extern "C" __global__ void set(cudaGraphConditionalHandle handle, unsigned value) {
  cudaGraphSetConditional(handle, value);
}
extern "C" __global__ void __launch_bounds__(64) bounded(int* p) { p[threadIdx.x] = 1; }
extern "C" __global__ void shared_user(int* p) { extern __shared__ int s[]; p[0] = s[0] * 0 + 3; }
extern "C" __global__ void say(int n) { printf("thread %d of %s\n", n + threadIdx.x, "block"); }
extern "C" __global__ void stray(int* p) { for (int i = 0; i < 1024; ++i) p[i] = 1; }
"""


class Soft:
    """The soft device, called through the unmodified cuda.bindings. A process has one such device.

    ``soft.cuMemAlloc(4)`` asserts that the call succeeds and returns its results without the error
    code. ``close()`` destroys the objects that such calls have created. ``soft.d`` is the module
    ``cuda.bindings.driver``: ``soft.d.cuMemAlloc(4)`` asserts nothing and returns the error code
    and the results.
    """

    fault = staticmethod(functools.partial(softstats.error_detail, True))
    refusal = staticmethod(functools.partial(softstats.error_detail, False))
    describe = staticmethod(softstats.describe)
    count = staticmethod(lambda what: softstats.counters()["count"][what])

    def __init__(self) -> None:
        self.created: list[tuple[str, Any]] = []
        self.lib = ctypes.CDLL(str(chooser.preload_soft()))
        from cuda.bindings import driver

        self.d = driver
        self.mode = driver.CUstreamCaptureMode
        self.cuInit(0)
        self.context = self.cuDevicePrimaryCtxRetain(0)
        self.cuCtxSetCurrent(self.context)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.d, name)

        def checked(*args: Any) -> Any:
            result = self.ok(function(*args))
            if name in DESTROY:
                self.created.append((DESTROY[name], result))
            return result

        return checked

    def ok(self, result: tuple[Any, ...]) -> Any:
        """Return the results of a call; fail with the device's error text if it has failed."""
        error, *values = result
        assert int(error) == 0, f"{error!r}: {self.fault() or self.refusal()}"
        return values[0] if len(values) == 1 else tuple(values)

    def close(self) -> None:
        """Destroy the objects that checked calls have created.

        Destroying an object twice does no harm, because handles are never reused.
        """
        while self.created:
            destroy, handle = self.created.pop()
            getattr(self.d, destroy)(handle)

    def live(self) -> dict[str, int]:
        return softstats.snapshot()["live"]

    def leaked(self) -> dict[str, int]:
        return softstats.snapshot()["leaked"]

    # ---- conveniences -------------------------------------------------------------------------
    def begin(self, stream: Any, mode: int = 0) -> None:
        """Begin a stream capture. The default `mode` 0 is the global mode."""
        self.cuStreamBeginCapture(stream, self.mode(mode))

    def stream(self) -> Any:
        """Create a non-blocking stream."""
        return self.cuStreamCreate(self.d.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def alloc(self, nbytes: int) -> int:
        return int(self.cuMemAlloc(nbytes))

    def put(self, array: Any, dtype: Any = None) -> int:
        """Copy an array to new device memory and return its address."""
        array = np.ascontiguousarray(array, dtype)
        pointer = self.alloc(array.nbytes)
        self.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes)
        return pointer

    def get(self, pointer: int, shape: Any, dtype: Any) -> np.ndarray:
        """Copy an array from the device."""
        out = np.empty(shape, dtype)
        self.cuMemcpyDtoH(out.ctypes.data, pointer, out.nbytes)
        return out

    def ints(self, *values: int) -> int:
        """Copy int32 words to new device memory and return its address."""
        return self.put(values, np.int32)

    def value(self, pointer: int) -> int:
        """Return the int32 at a device address."""
        return int(self.get(pointer, 1, np.int32)[0])

    def kernels(self, source: str, **options: Any) -> Kernels:
        """Compile and load a kernel source."""
        return Kernels(self, self.cuModuleLoadData(compile_kernel(source, **options)))

    def results(
        self,
        shape: Any,
        dtype: Any,
        function: Any,
        grid: Any,
        block: Any,
        *args: Any,
        **options: Any,
    ) -> np.ndarray:
        """Run a kernel and return the contents of its output array.

        The argument ``None`` is replaced by the output array. Before the launch, each byte of the
        array is set to 0xAB.
        """
        out = self.put(np.full(np.empty(shape, dtype).nbytes, 0xAB, np.uint8))
        arguments = [out if argument is None else argument for argument in args]
        self.run(function, grid, block, *arguments, **options)
        return self.get(out, shape, dtype)

    def pack(self, *args: Any) -> Any:
        """Return the array kernelParams for a kernel's arguments and the values to which it points.


        An argument of type int is a pointer. All other arguments are NumPy scalars, whose dtypes
        determine the sizes of the parameters.
        """
        values = []
        for argument in args:
            dtype = np.uint64 if isinstance(argument, int) else None
            values.append(np.array(argument, dtype))
        return np.array([value.ctypes.data for value in values], np.uint64), values

    def try_launch(
        self, function: Any, grid: Any, block: Any, *args: Any, stream: Any = 0, shared: int = 0
    ) -> Any:
        """Launch a kernel and return the result tuple of cuda.bindings without checking it.

        `shared` is the size of the dynamic shared memory in bytes.
        """
        table, _values = self.pack(*args)
        size = (*dimensions(grid), *dimensions(block), shared)
        return self.d.cuLaunchKernel(function, *size, stream, table.ctypes.data, 0)

    def launch(self, *args: Any, **options: Any) -> None:
        """Launch a kernel; the parameters are those of ``try_launch``."""
        self.ok(self.try_launch(*args, **options))

    def launch_int(self, function: Any, pointer: int, value: int, stream: Any) -> None:
        """Launch one thread of a kernel whose parameters are (int*, int)."""
        self.launch(function, 1, 1, pointer, np.int32(value), stream=stream)

    def run(self, *args: Any, **options: Any) -> None:
        """Launch a kernel on the legacy stream and synchronize."""
        self.launch(*args, **options)
        self.cuCtxSynchronize()

    def host(self, stream: Any, function: Any, data: int = 0) -> None:
        """Enqueue a C function or ctypes callback as a host function."""
        self.cuLaunchHostFunc_v2(stream, self.d.CUhostFn(address(function)), data, 0)

    def kernel_params(self, function: Any, grid: Any, block: Any, *args: Any) -> tuple[Any, Any]:
        """Return CUDA_KERNEL_NODE_PARAMS and the values to which they point.

        The caller must keep the values alive until the driver call has returned.
        """
        table, values = self.pack(*args)
        p = self.d.CUDA_KERNEL_NODE_PARAMS()
        p.func = function
        p.gridDimX, p.gridDimY, p.gridDimZ = dimensions(grid)
        p.blockDimX, p.blockDimY, p.blockDimZ = dimensions(block)
        p.kernelParams = table.ctypes.data
        return p, (table, values)

    def add_kernel(self, graph: Any, deps: Sequence[Any], *launch: Any) -> Any:
        """Add a kernel node. `launch` contains the arguments of ``kernel_params``."""
        params, _keep = self.kernel_params(*launch)
        return self.cuGraphAddKernelNode(graph, list(deps), len(deps), params)

    def add_int_kernel(
        self, graph: Any, deps: Sequence[Any], function: Any, pointer: int, value: int
    ) -> Any:
        """Add a kernel node with one thread of a kernel whose parameters are (int*, int)."""
        return self.add_kernel(graph, deps, function, 1, 1, pointer, np.int32(value))

    def add_host(self, graph: Any, deps: Sequence[Any], function: Any, data: int = 0) -> Any:
        """Add a host node."""
        p = self.host_params(function, data)
        return self.cuGraphAddHostNode(graph, list(deps), len(deps), p)

    def host_params(self, function: Any, data: int = 0) -> Any:
        """Return the parameters of a host node."""
        p = self.d.CUDA_HOST_NODE_PARAMS()
        p.fn = self.d.CUhostFn(address(function))
        p.userData = data
        return p

    def add_fill(self, graph: Any, deps: Sequence[Any], pointer: int, value: int) -> Any:
        """Add a memset node that writes one int32."""
        p = self.fill_params(pointer, value)
        return self.cuGraphAddMemsetNode(graph, list(deps), len(deps), p, self.context)

    def replay(self, graph: Any, stream: Any, launches: int = 1) -> None:
        """Instantiate a graph, launch it, synchronize, and destroy the executable graph."""
        executable = self.cuGraphInstantiate(graph, 0)
        self.play(executable, stream, launches)
        self.cuGraphExecDestroy(executable)

    def play(self, executable: Any, stream: Any, launches: int = 1) -> None:
        """Launch an executable graph and synchronize."""
        for _ in range(launches):
            self.cuGraphLaunch(executable, stream)
        self.cuStreamSynchronize(stream)

    def copy_params(self, dst: int, src: int, nbytes: int) -> Any:
        """Return the parameters of a memcpy node. The addresses may be host or device addresses."""
        p = self.d.CUDA_MEMCPY3D()
        p.srcMemoryType = p.dstMemoryType = self.d.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        p.srcDevice = self.d.CUdeviceptr(src)
        p.dstDevice = self.d.CUdeviceptr(dst)
        p.WidthInBytes = nbytes
        p.Height = 1
        p.Depth = 1
        return p

    def fill_params(self, dst: int, value: int, kind: Any = None) -> Any:
        """Return the parameters of a memset node that writes one 32-bit word.

        `kind` is the structure type; the default is CUDA_MEMSET_NODE_PARAMS.
        """
        p = (kind or self.d.CUDA_MEMSET_NODE_PARAMS)()
        p.dst = self.d.CUdeviceptr(dst)
        p.value = value
        p.elementSize = 4
        p.width = p.height = 1
        return p

    def alloc_params(self, nbytes: int, managed: bool = False) -> Any:
        """Return the parameters of a node that allocates device memory or managed memory."""
        p = self.d.CUDA_MEM_ALLOC_NODE_PARAMS()
        p.poolProps.allocType = self.d.CUmemAllocationType(2 if managed else 1)
        p.poolProps.location.type = self.d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        p.bytesize = nbytes
        return p

    def memory_properties(self) -> Any:
        """Return the properties of physical memory that can be exported as a file descriptor."""
        p = self.d.CUmemAllocationProp()
        p.type = self.d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        p.location.type = self.d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        p.requestedHandleTypes = self.d.CUmemAllocationHandleType(1)
        return p

    def node_params(self, kind: str) -> Any:
        """Return CUgraphNodeParams for a node type, such as "MEMSET"."""
        p = self.d.CUgraphNodeParams()
        p.type = getattr(self.d.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{kind}")
        return p

    def conditional(self, graph: Any, deps: Sequence[Any], handle: Any, kind: int, size: int = 1):
        """Add a conditional node with `size` bodies. Return (error code, node, bodies)."""
        p = self.node_params("CONDITIONAL")
        p.conditional.handle = handle
        p.conditional.size = size
        p.conditional.type = self.d.CUgraphConditionalNodeType(kind)
        p.conditional.ctx = self.context
        result = self.d.cuGraphAddNode(graph, list(deps), None, len(deps), p)
        return code(result), result[-1], p.conditional.phGraph_out


class Kernels:
    """A loaded module whose attributes are its kernels."""

    def __init__(self, soft: Soft, module: Any) -> None:
        self.soft = soft
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return self.soft.cuModuleGetFunction(self.module, name.encode())


class Words:
    """64-bit words in pinned memory for host code and kernels, one word per cache line."""

    def __init__(self, soft: Soft, count: int) -> None:
        self.soft = soft
        self.host = int(soft.cuMemHostAlloc(64 * count, 3))
        self.device = int(soft.cuMemHostGetDevicePointer(self.host, 0))
        buffer = (ctypes.c_uint64 * (8 * count)).from_address(self.host)
        self.view = np.frombuffer(buffer, np.uint64).reshape(count, 8)
        self.view[:] = 0

    def __getitem__(self, i: int) -> int:
        return int(self.view[i, 0])

    def __setitem__(self, i: int, value: int) -> None:
        self.view[i, 0] = value

    def address(self, i: int) -> int:
        """Return the device address of a word."""
        return self.device + 64 * i

    def block(self, stream: Any) -> None:
        """Block a stream until the first word is 1."""
        self.soft.cuStreamWaitValue32(stream, self.address(0), 1, 1)


def dimensions(size: Any) -> tuple[int, int, int]:
    """Return a grid or block size as three dimensions."""
    return (size, 1, 1) if isinstance(size, int) else size


def code(result: tuple[Any, ...]) -> str:
    """Return the name of a call's error code without the prefix CUDA_ERROR_ or CUDA_."""
    name: str = result[0].name
    return name.removeprefix("CUDA_ERROR_").removeprefix("CUDA_")


def codes(*results: tuple[Any, ...]) -> set[str]:
    """Return the names of the error codes of several calls."""
    return set(map(code, results))


def in_threads(body: Callable[[Any], Any], *arguments: Any) -> list[Any]:
    """Call `body` with each argument, in one thread per argument. Return the results in order."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(body, arguments))


@functools.cache
def device() -> Soft:
    """Return the soft device of this process. Skip the calling test if another driver is loaded."""
    import pytest  # child processes import this file and do not need pytest

    try:
        return Soft()
    except DeviceError as error:
        pytest.skip(str(error))


PRELUDE = """
import ctypes, sys, threading, time
import numpy as np
from softcuda_util import CALLBACK, USLEEP, Soft, Words, address, code, in_threads
s = Soft()
d = s.d
"""


def run_child(code: str, limit: int = 30, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a child process with a new soft device.

    The code can use the device as ``s`` and ``cuda.bindings.driver`` as ``d``.
    `limit` is the time limit in seconds. `env` contains additional environment variables.
    """
    return run_forked(PRELUDE + textwrap.dedent(code), env={**os.environ, **env}, limit_s=limit)


def check(code: str, source: str = KERNELS, **env: str) -> str:
    """Run code in a child process, assert that it succeeds and return its output.

    The code can use ``s`` and ``d``, and the kernels of `source` as ``kernels``.
    """
    load = f"\nkernels = s.kernels({source!r})\n" if "kernels." in code else "\n"
    done = run_child(load + textwrap.dedent(code), **env)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout
