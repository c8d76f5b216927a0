"""One process of the conformance table: calls every function in one state of the driver.

``python conformance_child.py STATE IMAGE`` (of TEXT) writes a JSON list of [function,
behaviour, expected, got]. Functions are called by address, as cuGetProcAddress gives it, with bare
words.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conformance_table import DEFAULT_CODES, KINDS, Call, calls

__all__ = ["STATES", "TEXT", "main"]

TEXT = """
extern "C" __global__ void step(int* p) { *p += 1; }
extern "C" __global__ void stray(int* p) { for (int i = 0; i < 4096; ++i) p[i] = 1; }
"""
BOGUS = 0x1234560
WORDS = 14
Row = tuple[str, str, str, str]


class Driver:
    """The soft device, called by address; codes by name."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ["SOFTCUDA_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
        from cuda.bindings import driver

        self.d = driver
        self.find = self.library.cuGetProcAddress_v2
        self.keep: list[Any] = []

    def address(self, call: Call) -> int:
        """Address of a function; 0 when the driver has none."""
        out, status = ctypes.c_void_p(), ctypes.c_int()
        self.find(call.function.encode(), ctypes.byref(out), call.version, ctypes.c_uint64(0),
                  ctypes.byref(status))  # fmt: skip
        return out.value or 0

    def call(self, call: Call, words: list[int]) -> str:
        """Call a function with up to 14 words, the rest 0, and return its code's name."""
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * WORDS)
        given = (words + [0] * WORDS)[:WORDS]
        return self.code(int(kind(self.address(call))(*given)))

    def code(self, value: int) -> str:
        """Name of a code, without its prefix."""
        return str(self.d.CUresult(value).name).removeprefix("CUDA_ERROR_").removeprefix("CUDA_")

    def ok(self, results: tuple) -> Any:
        """Values of a call that must not fail."""
        if int(results[0]) != 0:
            raise RuntimeError(f"{results[0]!r}")
        return results[1] if len(results) == 2 else results[1:]

    def open(self) -> None:
        """Initialise, and make the primary context current."""
        self.ok(self.d.cuInit(0))
        self.context = self.ok(self.d.cuDevicePrimaryCtxRetain(0))
        self.ok(self.d.cuCtxSetCurrent(self.context))


class World:
    """Right arguments for one call, made when they are asked for."""

    def __init__(self, driver: Driver, image: bytes) -> None:
        self.driver, self.d, self.ok = driver, driver.d, driver.ok
        self.image = image
        self.keep = driver.keep  # freed with the process: the driver may still know the address
        self.made: dict[str, int] = {}
        self.open_captures: list[Any] = []

    def word(self, name: str) -> int:
        """Return a handle, pointer or structure; the same one for the same name."""
        fresh = name in ("dptr", "timed", "out")
        if fresh or name not in self.made:
            if name.endswith("node"):
                return self.of_graph(name)
            maker = MAKERS.get(name)
            self.made[name] = int(maker(self) if maker else getattr(self, f"make_{name}")())
        return self.made[name]

    def buffer(self, data: bytes = bytes(4096)) -> int:
        """Address of host memory that lives as long as this."""
        memory = ctypes.create_string_buffer(data, len(data) + 1)
        self.keep.append(memory)
        return ctypes.addressof(memory)

    def struct(self, value: Any) -> int:
        """Address of a structure of the bindings."""
        self.keep.append(value)
        return int(value.getPtr())

    def array(self, *values: int) -> int:
        """Address of an array of words."""
        memory = (ctypes.c_uint64 * len(values))(*values)
        self.keep.append(memory)
        return ctypes.addressof(memory)

    def end(self) -> None:
        """End what would disturb later calls."""
        for stream in self.open_captures:
            self.d.cuStreamEndCapture(stream)

    make_out = make_bytes = buffer

    def make_registered(self) -> int:
        address = self.word("pageable")
        self.ok(self.d.cuMemHostRegister(address, 4096, 2))
        return address

    def make_capturing(self) -> Any:
        stream = self.word("stream")
        self.ok(self.d.cuStreamBeginCapture(stream, self.d.CUstreamCaptureMode(2)))
        self.open_captures.append(stream)
        return stream

    def make_timed(self) -> Any:
        event = self.ok(self.d.cuEventCreate(0))
        self.ok(self.d.cuEventRecord(event, self.word("stream")))
        self.ok(self.d.cuEventSynchronize(event))
        return event

    def make_held(self) -> Any:
        made = self.word("object")
        self.ok(self.d.cuGraphRetainUserObject(self.d.CUgraph(self.word("graph")), made, 1, 1))
        return made

    def make_graph(self) -> Any:
        graph = self.ok(self.d.cuGraphCreate(0))
        add = {
            "node": lambda: self.d.cuGraphAddEmptyNode(graph, [], 0),
            "knode": lambda: self.d.cuGraphAddKernelNode(graph, [], 0, self.kernel()),
            "cnode": lambda: self.d.cuGraphAddMemcpyNode(graph, [], 0, self.copy(), 0),
            "mnode": lambda: self.d.cuGraphAddMemsetNode(graph, [], 0, self.fill(), 0),
            "hnode": lambda: self.d.cuGraphAddHostNode(graph, [], 0, self.host()),
            "bnode": lambda: self.d.cuGraphAddBatchMemOpNode(graph, [], 0, self.batch()),
            "gnode": lambda: self.d.cuGraphAddChildGraphNode(
                graph, [], 0, self.ok(self.d.cuGraphCreate(0))),
            "rnode": lambda: self.d.cuGraphAddEventRecordNode(graph, [], 0, self.word("event")),
            "wnode": lambda: self.d.cuGraphAddEventWaitNode(graph, [], 0, self.word("event")),
        }  # fmt: skip
        for name, make in add.items():
            self.made[name] = int(self.ok(make()))
        pair = [self.d.CUgraphNode(self.made[name]) for name in ("mnode", "cnode")]
        self.ok(self.d.cuGraphAddDependencies(graph, pair[:1], pair[1:], None, 1))
        return graph

    def make_graph2(self) -> Any:
        graph = self.ok(self.d.cuGraphCreate(0))
        self.ok(self.d.cuGraphAddEmptyNode(graph, [], 0))
        return graph

    def of_graph(self, name: str) -> int:
        self.word("graph")
        return self.made[name]

    # ---- structures ---------------------------------------------------------------------------
    def kernel(self) -> Any:
        p = self.d.CUDA_KERNEL_NODE_PARAMS()
        p.func = self.d.CUfunction(self.word("function"))
        p.gridDimX = p.gridDimY = p.gridDimZ = 1
        p.blockDimX = p.blockDimY = p.blockDimZ = 1
        p.kernelParams = self.word("arguments")
        return p

    def copy(self) -> Any:
        p, device = self.d.CUDA_MEMCPY3D(), self.d.CUmemorytype.CU_MEMORYTYPE_DEVICE
        p.srcMemoryType = p.dstMemoryType = device
        p.srcDevice, p.dstDevice = (self.d.CUdeviceptr(self.word("dptr")) for _ in range(2))
        p.WidthInBytes, p.Height, p.Depth = 64, 1, 1
        return p

    def fill(self, kind: Any = None) -> Any:
        p = (kind or self.d.CUDA_MEMSET_NODE_PARAMS)()
        p.dst, p.elementSize, p.width, p.height = self.d.CUdeviceptr(self.word("dptr")), 4, 16, 1
        return p

    def host(self) -> Any:
        p = self.d.CUDA_HOST_NODE_PARAMS()
        p.fn = self.d.CUhostFn(self.word("fn"))
        return p

    def operation(self) -> Any:
        p, kinds = self.d.CUstreamBatchMemOpParams(), self.d.CUstreamBatchMemOpType
        p.operation = p.writeValue.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        p.writeValue.address = self.d.CUdeviceptr(self.word("dptr"))
        return p

    def batch(self) -> Any:
        p = self.d.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        p.ctx, p.count, p.paramArray = self.driver.context, 1, [self.operation()]
        return p

    def make_path(self) -> int:
        file = tempfile.NamedTemporaryFile(suffix=".image")  # noqa: SIM115  (lives with this)
        file.write(self.image)
        file.flush()
        self.keep.append(file)
        return self.buffer(file.name.encode())

    def make_dot(self) -> int:
        folder = tempfile.TemporaryDirectory()
        self.keep.append(folder)
        return self.buffer(f"{folder.name}/graph.dot".encode())

    def make_config(self) -> int:
        p = self.d.CUlaunchConfig()
        p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimX = p.blockDimY = p.blockDimZ = 1
        p.hStream = self.d.CUstream(self.word("stream"))
        return self.struct(p)

    def make_node_params(self) -> int:
        p = self.d.CUgraphNodeParams()
        p.type = self.d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
        p.memset = self.fill(self.d.CUDA_MEMSET_NODE_PARAMS_v2)
        return self.struct(p)

#: How a right argument is made, where one line says it; the others are methods of World.
MAKERS: dict[str, Callable[[World], Any]] = {
    "dev": lambda w: 0,
    "ctx": lambda w: w.driver.context,
    "made": lambda w: w.ok(w.d.cuCtxCreate(None, 0, 0)),
    "dptr": lambda w: w.ok(w.d.cuMemAlloc(64)),
    "pinned": lambda w: w.ok(w.d.cuMemHostAlloc(64, 3)),
    "pageable": lambda w: (w.buffer(bytes(3 * 4096)) + 4095) // 4096 * 4096,
    "stream": lambda w: w.ok(w.d.cuStreamCreate(1)),
    "event": lambda w: w.ok(w.d.cuEventCreate(2)),
    "module": lambda w: w.ok(w.d.cuModuleLoadData(w.image)),
    "function": lambda w: w.ok(w.d.cuModuleGetFunction(w.d.CUmodule(w.word("module")), b"step")),
    "library": lambda w: w.ok(w.d.cuLibraryLoadData(w.image, [], [], 0, [], [], 0)),
    "kernel": lambda w: w.ok(w.d.cuLibraryGetKernel(w.d.CUlibrary(w.word("library")), b"step")),
    "object": lambda w: w.ok(w.d.cuUserObjectCreate(0, w.d.CUhostFn(w.word("fn")), 1, 1)),
    "clone": lambda w: w.ok(w.d.cuGraphClone(w.d.CUgraph(w.word("graph")))),
    "exec": lambda w: w.ok(w.d.cuGraphInstantiate(w.d.CUgraph(w.word("graph")), 0)),
    "fn": lambda w: int(ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value or 0),
    "arguments": lambda w: w.array(w.array(int(w.word("dptr")))),
    "symbol": lambda w: w.buffer(b"cuInit"),
    "name": lambda w: w.buffer(b"step"),
    "image": lambda w: w.buffer(w.image),
    "attributes": lambda w: w.array(2),
    "results": lambda w: w.array(w.buffer()),
    "host": lambda w: w.struct(w.host()),
    "copy": lambda w: w.struct(w.copy()),
    "fill": lambda w: w.struct(w.fill()),
    "batch": lambda w: w.struct(w.batch()),
    "operations": lambda w: w.struct(w.operation()),
    "kernel_params": lambda w: w.struct(w.kernel()),
    "instantiate": lambda w: w.struct(w.d.CUDA_GRAPH_INSTANTIATE_PARAMS()),
    "first": lambda w: w.array(w.of_graph("node")),
    "second": lambda w: w.array(w.of_graph("knode")),
    "joined_from": lambda w: w.array(w.of_graph("mnode")),
    "joined_to": lambda w: w.array(w.of_graph("cnode")),
}


def split(parameter: str) -> tuple[str, str, bool]:
    """Return (what, code of a wrong one or "", may it be NULL)."""
    what, _, code = parameter.partition("~")
    return what.removesuffix("?"), code, what.endswith("?")


def right(world: World, parameter: str) -> int:
    """Return a right value of a parameter."""
    what, _, _ = split(parameter)
    if what[0].isdigit():
        return int(what.split("|")[0])
    names = {"in.kernel": "kernel_params"}
    return world.word(names.get(what, what.removeprefix("in.")))


def wrong(parameter: str) -> Iterator[tuple[str, int, str]]:
    """Yield (behaviour, wrong value, code it must be answered with)."""
    what, code, optional = split(parameter)
    if what[0].isdigit():
        for bad in what.split("|")[1:]:
            value, _, named = bad.partition(":")
            yield f"{value} for {what.split('|')[0]}", int(value), named or "INVALID_VALUE"
    elif code == "-" or optional:
        return
    elif what == "out" or what.startswith("in."):
        yield "NULL for " + ("a result" if what == "out" else what[3:]), 0, "INVALID_VALUE"
    else:
        assert what in KINDS, what
        yield f"unknown {what}", BOGUS, code or DEFAULT_CODES.get(what, "INVALID_HANDLE")


def right_and_wrong(driver: Driver, image: bytes) -> Iterator[Row]:
    """Call every function with right arguments, then with one wrong argument at a time."""
    for call in calls():
        cases: list[tuple[str, int, int, str]] = [("right arguments", -1, 0, call.expected)]
        for i, parameter in enumerate(call.parameters):
            for behaviour, value, code in wrong(parameter):
                cases.append((f"{behaviour} (argument {i + 1})", i, value, code))
        for behaviour, i, value, code in [*cases[1:], cases[0]]:
            driver.ok(driver.d.cuCtxSetCurrent(driver.context))
            world = World(driver, image)
            words = [right(world, parameter) for parameter in call.parameters]
            if i >= 0:
                words[i] = value
            got = driver.call(call, words)
            driver.d.cuCtxSynchronize()
            world.end()
            yield call.name, behaviour, code, got


def before_init(driver: Driver, _: bytes) -> Iterator[Row]:
    """Every function before cuInit."""
    for call in calls():
        if not call.flags & {"a", "i"}:
            yield call.name, "before cuInit", "NOT_INITIALIZED", driver.call(call, [])


def without_context(driver: Driver, _: bytes) -> Iterator[Row]:
    """Functions that need a context, on a thread that has none."""
    driver.open()
    driver.ok(driver.d.cuCtxSetCurrent(0))
    for call in calls():
        if "c" in call.flags:
            yield call.name, "no current context", "INVALID_CONTEXT", driver.call(call, [])


def in_host_function(driver: Driver, _: bytes) -> Iterator[Row]:
    """Every function inside a host function."""
    driver.open()
    rows: list[Row] = []

    def inside(_: int) -> None:
        for call in calls():
            if "a" not in call.flags:
                rows.append((call.name, "in a host function", "NOT_PERMITTED",
                             driver.call(call, [])))  # fmt: skip

    callback = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(inside)
    launch = next(c for c in calls() if c.name == "cuLaunchHostFunc@10000")
    assert driver.call(launch, [0, ctypes.cast(callback, ctypes.c_void_p).value or 0, 0]) == (
        "SUCCESS"
    )
    driver.ok(driver.d.cuCtxSynchronize())
    yield from rows


def after_fault(driver: Driver, image: bytes) -> Iterator[Row]:
    """Every function after a kernel faulted."""
    driver.open()
    world = World(driver, image)
    stray = driver.ok(
        driver.d.cuModuleGetFunction(driver.d.CUmodule(world.word("module")), b"stray")
    )
    driver.ok(driver.d.cuLaunchKernel(stray, 1, 1, 1, 1, 1, 1, 0, 0, world.word("arguments"), 0))
    driver.d.cuCtxSynchronize()
    for call in calls():
        if not call.flags & {"a", "f"}:
            yield call.name, "after a fault", "ILLEGAL_ADDRESS", driver.call(call, [])


def during_capture(driver: Driver, image: bytes) -> Iterator[Row]:
    """Functions that may not be called while a stream captures, by the calling thread's mode."""
    driver.open()
    for call in calls():
        world = World(driver, image)
        stream, event = driver.d.CUstream(world.word("stream")), world.word("event")
        wanted = "STREAM_CAPTURE_UNSUPPORTED"
        words = {"cuStreamSynchronize": [int(stream)], "cuStreamQuery": [int(stream)],
                 "cuCtxSynchronize": [], "cuEventSynchronize": [int(event)],
                 "cuEventQuery": [int(event)]}  # fmt: skip
        if "u" not in call.flags and call.name not in words:
            continue
        if call.name.startswith("cuEvent"):
            wanted = "CAPTURED_EVENT"
        driver.ok(driver.d.cuStreamBeginCapture(stream, driver.d.CUstreamCaptureMode(0)))
        driver.ok(driver.d.cuEventRecord(event, stream))
        got = driver.call(call, words.get(call.name, []))
        ended = driver.code(int(driver.d.cuStreamEndCapture(stream)[0]))
        yield call.name, "while a stream captures", wanted, got
        yield call.name, "and then the capture", "STREAM_CAPTURE_INVALIDATED", ended


def arguments(driver: Driver, image: bytes) -> Iterator[Row]:
    """Right and wrong arguments, in a context."""
    driver.open()
    yield from right_and_wrong(driver, image)


def absent(driver: Driver, _: bytes) -> Iterator[Row]:
    """Functions that the bindings know and the soft device has not."""
    known = {call.function for call in calls()}
    for name in sorted(set(dir(driver.d)) - known):
        if name.startswith("cu") and name[2:3].isupper() and callable(getattr(driver.d, name)):
            if "_v" in name:
                continue  # another form of a function, which the driver finds by the plain name
            asked = Call(name, frozenset(), (), "")
            yield name, "absent", "NOT_FOUND", "found" if driver.address(asked) else "NOT_FOUND"


STATES: dict[str, Callable[[Driver, bytes], Iterator[Row]]] = {
    "before-init": before_init,
    "no-context": without_context,
    "host-function": in_host_function,
    "arguments": arguments,
    "capture": during_capture,
    "fault": after_fault,
    "absent": absent,
}


def main(state: str, image: Path) -> int:
    """Write what the functions answered in one state."""
    json.dump(list(STATES[state](Driver(), image.read_bytes())), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
