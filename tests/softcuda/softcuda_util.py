"""Shared by the soft-device tests: load the library first, talk to it, here or in a child."""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graft.cudagraph import chooser, softstats
from graft.cudagraph.errors import DeviceError
from graft.native.softcuda.compile import compile_cpu

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "native" / "softcuda"
CACHE = Path(tempfile.gettempdir()) / f"softcuda-test-kernels-{os.getuid()}"


def compile_kernel(source: str, name: str = "test.cu", **options: Any) -> bytes:
    """Compile kernel text for the soft device."""
    return compile_cpu(source, name, cache_dir=CACHE, **options)


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
USLEEP = ctypes.CDLL(None).usleep


def address(function: Any) -> int:
    """Address of a C function or ctypes callback, as the driver takes it."""
    value = ctypes.cast(function, ctypes.c_void_p).value
    assert value is not None
    return value


#: What ends what a call made.
ENDS = {
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


#: Kernels of most tests.
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
    """The soft device through the unmodified cuda.bindings, one per process.

    ``soft.cuMemAlloc(4)`` must succeed and returns the call's values, ``soft.d.cuMemAlloc(4)``
    returns what the bindings do. What was made by the former is freed by ``close()``.
    """

    fault = staticmethod(functools.partial(softstats.error_detail, True))
    refusal = staticmethod(functools.partial(softstats.error_detail, False))
    describe = staticmethod(softstats.describe)
    count = staticmethod(lambda what: softstats.counters()["count"][what])

    def __init__(self) -> None:
        self.made: list[tuple[str, Any]] = []
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
            made = self.ok(function(*args))
            if name in ENDS:
                self.made.append((ENDS[name], made))
            return made

        return checked

    def ok(self, result: tuple[Any, ...]) -> Any:
        """Return the values of a successful call; fail with the driver's reason otherwise."""
        assert int(result[0]) == 0, f"{result[0]!r}: {self.fault() or self.refusal()}"
        return result[1] if len(result) == 2 else result[1:]

    def close(self) -> None:
        """Free what checked calls made and nobody freed: handles are never reused."""
        while self.made:
            end, made = self.made.pop()
            getattr(self.d, end)(made)

    def live(self) -> dict[str, int]:
        return softstats.snapshot()["live"]

    def leaked(self) -> dict[str, int]:
        return softstats.snapshot()["leaked"]

    # ---- conveniences -------------------------------------------------------------------------
    def begin(self, stream: Any, mode: int = 0) -> None:
        """Begin to capture."""
        self.cuStreamBeginCapture(stream, self.mode(mode))

    def stream(self) -> Any:
        return self.cuStreamCreate(self.d.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def alloc(self, nbytes: int) -> int:
        return int(self.cuMemAlloc(nbytes))

    def put(self, array: Any, dtype: Any = None) -> int:
        """Address of a copy of an array on the device."""
        array = np.ascontiguousarray(array, dtype)
        pointer = self.alloc(array.nbytes)
        self.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes)
        return pointer

    def get(self, pointer: int, shape: Any, dtype: Any) -> np.ndarray:
        out = np.empty(shape, dtype)
        self.cuMemcpyDtoH(out.ctypes.data, pointer, out.nbytes)
        return out

    def ints(self, *values: int) -> int:
        """Address of int32 words on the device."""
        return self.put(values, np.int32)

    def value(self, pointer: int) -> int:
        """The int32 at an address of the device."""
        return int(self.get(pointer, 1, np.int32)[0])

    def kernels(self, source: str, **options: Any) -> Kernels:
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
        """What a kernel leaves at the address that ``None`` stands for, before it all 0xAB."""
        out = self.put(np.full(np.empty(shape, dtype).nbytes, 0xAB, np.uint8))
        self.run(function, grid, block, *(out if a is None else a for a in args), **options)
        return self.get(out, shape, dtype)

    def pack(self, *args: Any) -> Any:
        """Build kernelParams: ints are pointers, everything else carries its own NumPy dtype."""
        values = [np.array(a, np.uint64) if isinstance(a, int) else np.array(a) for a in args]
        return np.array([v.ctypes.data for v in values], np.uint64), values

    def try_launch(
        self, function: Any, grid: Any, block: Any, *args: Any, stream: Any = 0, shared: int = 0
    ) -> Any:
        table, _values = self.pack(*args)
        size = (*three(grid), *three(block), shared)
        return self.d.cuLaunchKernel(function, *size, stream, table.ctypes.data, 0)

    def launch(self, *args: Any, **options: Any) -> None:
        self.ok(self.try_launch(*args, **options))

    def run(self, *args: Any, **options: Any) -> None:
        """Launch on the legacy stream and wait."""
        self.launch(*args, **options)
        self.cuCtxSynchronize()

    def host(self, stream: Any, function: Any, data: int = 0) -> None:
        """Queue a C function or ctypes callback."""
        self.cuLaunchHostFunc_v2(stream, self.d.CUhostFn(address(function)), data, 0)

    def kernel_params(self, function: Any, grid: Any, block: Any, *args: Any) -> tuple[Any, Any]:
        """Return (CUDA_KERNEL_NODE_PARAMS, what must stay alive until the driver call is over)."""
        table, values = self.pack(*args)
        p = self.d.CUDA_KERNEL_NODE_PARAMS()
        p.func = function
        p.gridDimX, p.gridDimY, p.gridDimZ = three(grid)
        p.blockDimX, p.blockDimY, p.blockDimZ = three(block)
        p.kernelParams = table.ctypes.data
        return p, (table, values)

    def add_kernel(self, graph: Any, deps: Sequence[Any], *launch: Any) -> Any:
        params, _keep = self.kernel_params(*launch)
        return self.cuGraphAddKernelNode(graph, list(deps), len(deps), params)

    def add_host(self, graph: Any, deps: Sequence[Any], function: Any, data: int = 0) -> Any:
        p = self.host_params(function, data)
        return self.cuGraphAddHostNode(graph, list(deps), len(deps), p)

    def host_params(self, function: Any, data: int = 0) -> Any:
        """Structure of a host node."""
        p = self.d.CUDA_HOST_NODE_PARAMS()
        p.fn = self.d.CUhostFn(address(function))
        p.userData = data
        return p

    def add_fill(self, graph: Any, deps: Sequence[Any], pointer: int, value: int) -> Any:
        p = self.fill_params(pointer, value)
        return self.cuGraphAddMemsetNode(graph, list(deps), len(deps), p, self.context)

    def replay(self, graph: Any, stream: Any, launches: int = 1) -> None:
        """Instantiate a graph, launch it, wait, and drop the executable."""
        executable = self.cuGraphInstantiate(graph, 0)
        self.play(executable, stream, launches)
        self.cuGraphExecDestroy(executable)

    def play(self, executable: Any, stream: Any, launches: int = 1) -> None:
        """Launch an executable and wait."""
        for _ in range(launches):
            self.cuGraphLaunch(executable, stream)
        self.cuStreamSynchronize(stream)

    def copy_params(self, dst: int, src: int, nbytes: int) -> Any:
        """Structure of a copy node between addresses of any kind."""
        p = self.d.CUDA_MEMCPY3D()
        p.srcMemoryType = p.dstMemoryType = self.d.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        p.srcDevice = self.d.CUdeviceptr(src)
        p.dstDevice = self.d.CUdeviceptr(dst)
        p.WidthInBytes = nbytes
        p.Height = 1
        p.Depth = 1
        return p

    def fill_params(self, dst: int, value: int, kind: Any = None) -> Any:
        """Structure of a fill node of one word."""
        p = (kind or self.d.CUDA_MEMSET_NODE_PARAMS)()
        p.dst = self.d.CUdeviceptr(dst)
        p.value = value
        p.elementSize = 4
        p.width = p.height = 1
        return p

    def node_params(self, kind: str) -> Any:
        """CUgraphNodeParams of a type, by the end of its name."""
        p = self.d.CUgraphNodeParams()
        p.type = getattr(self.d.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{kind}")
        return p

    def conditional(self, graph: Any, deps: Sequence[Any], handle: Any, kind: int, size: int = 1):
        """Try to add a conditional node; returns (code, node, bodies)."""
        p = self.node_params("CONDITIONAL")
        p.conditional.handle = handle
        p.conditional.size = size
        p.conditional.type = self.d.CUgraphConditionalNodeType(kind)
        p.conditional.ctx = self.context
        result = self.d.cuGraphAddNode(graph, list(deps), None, len(deps), p)
        return code(result), result[-1], p.conditional.phGraph_out


class Kernels:
    """A loaded module, whose functions are attributes."""

    def __init__(self, soft: Soft, module: Any) -> None:
        self.soft = soft
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return self.soft.cuModuleGetFunction(self.module, name.encode())


class Words:
    """Pinned 64-bit words, one cache line each, with host view and device addresses."""

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
        return self.device + 64 * i

    def block(self, stream: Any) -> None:
        """Hold a stream until the first word is 1."""
        self.soft.cuStreamWaitValue32(stream, self.address(0), 1, 1)


def three(size: Any) -> tuple[int, int, int]:
    """A grid's or block's three dimensions."""
    return (size, 1, 1) if isinstance(size, int) else size


def code(result: tuple[Any, ...]) -> str:
    """Name of a call's result code, without its prefix."""
    name: str = result[0].name
    return name.removeprefix("CUDA_ERROR_").removeprefix("CUDA_")


def codes(*results: tuple[Any, ...]) -> set[str]:
    """Names of the codes of several calls."""
    return set(map(code, results))


def in_threads(body: Callable[[Any], Any], *arguments: Any) -> list[Any]:
    """What ``body`` returns for each argument, all at once on threads of their own."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(body, arguments))


@functools.cache
def device() -> Soft:
    """Return the process's soft device; skip when another libcuda.so.1 answers already."""
    try:
        return Soft()
    except DeviceError as error:
        pytest.skip(str(error))


def child(request: dict[str, Any]) -> None:
    """Run the request's code as a script would; never returns to the caller's loop."""
    for descriptor, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    signal.alarm(request["limit"])  # whatever it is stuck in, this ends it
    os.environ.clear()
    os.environ.update(request["env"])
    exec(compile(request["code"], "<child>", "exec"), {"__name__": "__main__"})
    sys.exit()  # a full exit, as after an error: finalisation and static destructors run


def serve() -> None:
    """Answer the JSON requests on standard input, one a line, with their children's exit statuses
    (negative: killed by that signal)."""
    import cuda.bindings.driver  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(request)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


class _Zygote:
    """The process that forks children with Python, NumPy and cuda.bindings imported and no device
    opened: a fresh interpreter costs a second, and every test of a fault needs its own process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import softcuda_util; softcuda_util.serve()"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        )
        atexit.register(self.process.kill)

    def run(self, code: str, env: dict[str, str], limit: int) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory(prefix="softcuda-child-") as folder:
            out = Path(folder) / "out"
            err = Path(folder) / "err"
            request = {"code": code, "env": env, "out": str(out), "err": str(err), "limit": limit}
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            status = int(self.process.stdout.readline())
            said = [path.read_text(errors="replace") for path in (out, err)]
            return subprocess.CompletedProcess(code, status, *said)


_zygote = functools.cache(_Zygote)

PRELUDE = """
import ctypes, sys, threading, time
import numpy as np
from softcuda_util import CALLBACK, USLEEP, Soft, Words, address, code, in_threads
s = Soft()
d = s.d
"""


def run_child(code: str, limit: int = 30, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python code with a fresh soft device ``s`` (and driver ``d``) in a child process."""
    return _zygote().run(PRELUDE + textwrap.dedent(code), {**os.environ, **env}, limit)


def check(code: str, text: str = KERNELS, **env: str) -> str:
    """What such a child prints, which must succeed; ``kernels``, if used, are the text's."""
    load = f"\nkernels = s.kernels({text!r})\n" if "kernels." in code else "\n"
    done = run_child(load + textwrap.dedent(code), **env)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout
