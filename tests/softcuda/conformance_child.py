"""One process of the conformance table: calls every function in one state of the driver.

``python conformance_child.py STATE IMAGE`` (of TEXT) writes a JSON list of [function,
behaviour, expected, got]. Functions are called by address, as cuGetProcAddress gives it, with bare
words.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conformance_table import DEFAULT_CODES, KINDS, Call, calls
from softcuda_util import CALLBACK, Soft, address, code

from graft.cudagraph.chooser import preload_soft

TEXT = """
extern "C" __global__ void step(int* p) { *p += 1; }
extern "C" __global__ void stray(int* p) { for (int i = 0; i < 4096; ++i) p[i] = 1; }
"""
BOGUS = 0x1234560
WORDS = 14
Row = tuple[str, str, str, str]
KEEP: list[Any] = []


class Driver:
    """The soft device, called by address; codes by name."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(preload_soft()))
        from cuda.bindings import driver

        self.d = driver

    def address(self, call: Call) -> int:
        """Address of a function; 0 when the driver has none."""
        out, (name, _, version) = ctypes.c_void_p(), call.name.partition("@")
        self.library.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(out), int(version or 13020), ctypes.c_uint64(0), None
        )
        return out.value or 0

    def call(self, call: Call, words: list[int]) -> str:
        """Call a function with up to 14 words, the rest 0, and return its code's name."""
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * WORDS)
        given = (words + [0] * WORDS)[:WORDS]
        return code((self.d.CUresult(int(kind(self.address(call))(*given))),))


class World:
    """Right arguments for one call, made when they are asked for."""

    def __init__(self, soft: Soft, image: bytes) -> None:
        self.soft = soft
        self.d = soft.d
        self.image = image
        self.made: dict[str, int] = {}

    def word(self, name: str) -> int:
        """Return a handle, pointer or structure; mostly the same one for the same name."""
        if name in ("dptr", "timed", "out") or name not in self.made:
            if name in NODES:
                self.word("graph")
                return self.made[name]
            maker = MAKERS.get(name)
            self.made[name] = int(maker(self) if maker else getattr(self, f"make_{name}")())
        return self.made[name]

    def buffer(self, data: bytes = bytes(4096)) -> int:
        """Address of host memory that lives as long as the process: the driver may know it."""
        memory = ctypes.create_string_buffer(data, len(data) + 1)
        KEEP.append(memory)
        return ctypes.addressof(memory)

    def struct(self, value: Any) -> int:
        """Address of a structure of the bindings."""
        KEEP.append(value)
        return int(value.getPtr())

    def array(self, *values: int) -> int:
        """Address of an array of words."""
        return self.buffer(bytes((ctypes.c_uint64 * len(values))(*values)))

    def end(self) -> None:
        """End what would disturb later calls."""
        if "capturing" in self.made:
            self.d.cuStreamEndCapture(self.made["capturing"])

    make_out = make_bytes = buffer

    def make_capturing(self) -> int:
        self.soft.begin(self.word("stream"), 2)
        return self.word("stream")

    def make_timed(self) -> Any:
        event = self.soft.cuEventCreate(0)
        self.soft.cuEventRecord(event, self.word("stream"))
        self.soft.cuEventSynchronize(event)
        return event

    def make_held(self) -> int:
        self.soft.cuGraphRetainUserObject(self.word("graph"), self.word("object"), 1, 1)
        return self.word("object")

    def make_graph(self) -> Any:
        graph = self.soft.cuGraphCreate(0)
        nodes = {name: add(self, graph) for name, add in NODES.items()}
        self.made |= {name: int(node) for name, node in nodes.items()}
        return graph

    def make_graph2(self) -> Any:
        graph = self.soft.cuGraphCreate(0)
        self.soft.cuGraphAddEmptyNode(graph, [], 0)
        return graph

    # ---- structures ---------------------------------------------------------------------------
    def kernel(self) -> Any:
        p, keep = self.soft.kernel_params(self.word("function"), 1, 1, self.word("dptr"))
        KEEP.append(keep)
        return p

    def copy(self) -> Any:
        return self.soft.copy_params(self.word("dptr"), self.word("dptr"), 64)

    def host(self) -> Any:
        return self.soft.host_params(ctypes.CDLL(None).abs)

    def operation(self) -> Any:
        p = self.d.CUstreamBatchMemOpParams()
        kinds = self.d.CUstreamBatchMemOpType
        p.operation = p.writeValue.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        p.writeValue.address = self.d.CUdeviceptr(self.word("dptr"))
        return p

    def batch(self) -> Any:
        p = self.d.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        p.ctx, p.count, p.paramArray = self.soft.context, 1, [self.operation()]
        return p

    def make_path(self) -> int:
        file = tempfile.NamedTemporaryFile(suffix=".image")  # noqa: SIM115  (lives with this)
        file.write(self.image)
        file.flush()
        KEEP.append(file)
        return self.buffer(file.name.encode())

    def make_config(self) -> int:
        p = self.d.CUlaunchConfig()
        p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimX = p.blockDimY = p.blockDimZ = 1
        p.hStream = self.d.CUstream(self.word("stream"))
        return self.struct(p)

    def make_node_params(self) -> int:
        p = self.soft.node_params("MEMSET")
        p.memset = self.soft.fill_params(self.word("dptr"), 0, self.d.CUDA_MEMSET_NODE_PARAMS_v2)
        return self.struct(p)


#: The nodes of the one graph.
NODES: dict[str, Callable[[World, Any], Any]] = {
    "node": lambda w, g: w.soft.cuGraphAddEmptyNode(g, [], 0),
    "knode": lambda w, g: w.soft.cuGraphAddKernelNode(g, [], 0, w.kernel()),
    "hnode": lambda w, g: w.soft.cuGraphAddHostNode(g, [], 0, w.host()),
}

#: How a right argument is made, where one line says it; the others are methods of World.
MAKERS: dict[str, Callable[[World], Any]] = {
    "dev": lambda w: 0,
    "ctx": lambda w: w.soft.context,
    "made": lambda w: w.soft.cuCtxCreate(None, 0, 0),
    "dptr": lambda w: w.soft.alloc(64),
    "pinned": lambda w: w.soft.cuMemHostAlloc(64, 3),
    "stream": lambda w: w.soft.stream(),
    "event": lambda w: w.soft.cuEventCreate(2),
    "module": lambda w: w.soft.cuModuleLoadData(w.image),
    "function": lambda w: w.soft.cuModuleGetFunction(w.word("module"), b"step"),
    "library": lambda w: w.soft.cuLibraryLoadData(w.image, [], [], 0, [], [], 0),
    "kernel": lambda w: w.soft.cuLibraryGetKernel(w.word("library"), b"step"),
    "object": lambda w: w.soft.cuUserObjectCreate(0, w.d.CUhostFn(w.word("fn")), 1, 1),
    "exec": lambda w: w.soft.cuGraphInstantiate(w.word("graph"), 0),
    "fn": lambda w: address(ctypes.CDLL(None).abs),
    "arguments": lambda w: w.array(w.array(w.word("dptr"))),
    "symbol": lambda w: w.buffer(b"cuInit"),
    "name": lambda w: w.buffer(b"step"),
    "image": lambda w: w.buffer(w.image),
    "attributes": lambda w: w.array(2),
    "results": lambda w: w.array(w.buffer()),
    "host": lambda w: w.struct(w.host()),
    "copy": lambda w: w.struct(w.copy()),
    "fill": lambda w: w.struct(w.soft.fill_params(w.word("dptr"), 0)),
    "batch": lambda w: w.struct(w.batch()),
    "operations": lambda w: w.struct(w.operation()),
    "kernel_params": lambda w: w.struct(w.kernel()),
    "instantiate": lambda w: w.struct(w.d.CUDA_GRAPH_INSTANTIATE_PARAMS()),
}


def right(world: World, parameter: str) -> int:
    """Return a right value of a parameter."""
    what = parameter.partition("~")[0].removesuffix("?")
    if what[0].isdigit():
        return int(what.split("|")[0])
    return world.word("kernel_params" if what == "in.kernel" else what.removeprefix("in."))


def wrong(parameter: str) -> Iterator[tuple[str, int, str]]:
    """Yield (behaviour, wrong value, code it must be answered with)."""
    what, _, code = parameter.partition("~")
    if what[0].isdigit():
        for bad in what.split("|")[1:]:
            value, _, named = bad.partition(":")
            yield f"{value} for {what.split('|')[0]}", int(value), named or "INVALID_VALUE"
    elif code == "-" or what.endswith("?"):
        return
    elif what == "out" or what.startswith("in."):
        yield "NULL for " + ("a result" if what == "out" else what[3:]), 0, "INVALID_VALUE"
    else:
        assert what in KINDS, what
        yield f"unknown {what}", BOGUS, code or DEFAULT_CODES.get(what, "INVALID_HANDLE")


def right_and_wrong(driver: Driver, image: bytes) -> Iterator[Row]:
    """Call every function with right arguments, then with one wrong argument at a time."""
    soft = Soft()
    for call in calls():
        cases: list[tuple[str, int, int, str]] = []
        for i, parameter in enumerate(call.parameters):
            for behaviour, value, wanted in wrong(parameter):
                cases.append((f"{behaviour} (argument {i + 1})", i, value, wanted))
        for behaviour, i, value, wanted in [*cases, ("right arguments", -1, 0, call.expected)]:
            soft.cuCtxSetCurrent(soft.context)
            world = World(soft, image)
            words = [right(world, parameter) for parameter in call.parameters]
            if i >= 0:
                words[i] = value
            got = driver.call(call, words)
            soft.d.cuCtxSynchronize()
            world.end()
            yield call.name, behaviour, wanted, got


def bare(
    driver: Driver, done: str, wanted: str, asked: Callable[[frozenset[str]], Any]
) -> Iterator[Row]:
    """Call every function whose flags are asked for, without arguments."""
    for call in calls():
        if asked(call.flags):
            yield call.name, done, wanted, driver.call(call, [])


def before_init(driver: Driver, _: bytes) -> Iterator[Row]:
    """Every function before cuInit."""
    return bare(driver, "before cuInit", "NOT_INITIALIZED", lambda flags: not flags & {"a", "i"})


def without_context(driver: Driver, _: bytes) -> Iterator[Row]:
    """Functions that need a context, on a thread that has none."""
    Soft().cuCtxSetCurrent(0)
    return bare(driver, "no current context", "INVALID_CONTEXT", lambda flags: "c" in flags)


def in_host_function(driver: Driver, _: bytes) -> Iterator[Row]:
    """Every function inside a host function."""
    soft = Soft()
    rows = []
    callback = CALLBACK(
        lambda _: rows.extend(
            bare(driver, "in a host function", "NOT_PERMITTED", lambda flags: "a" not in flags)
        )
    )
    soft.host(0, callback)
    soft.cuCtxSynchronize()
    return iter(rows)


def after_fault(driver: Driver, image: bytes) -> Iterator[Row]:
    """Every function after a kernel faulted."""
    soft = Soft()
    soft.launch(soft.kernels(TEXT).stray, 1, 1, soft.alloc(64))
    soft.d.cuCtxSynchronize()
    return bare(driver, "after a fault", "ILLEGAL_ADDRESS", lambda flags: not flags & {"a", "f"})


def during_capture(driver: Driver, image: bytes) -> Iterator[Row]:
    """Functions that may not be called while a stream captures, by the calling thread's mode."""
    soft = Soft()
    for call in calls():
        stream = soft.stream()
        event = soft.cuEventCreate(2)
        words = {
            "cuStreamSynchronize": [int(stream)],
            "cuStreamQuery": [int(stream)],
            "cuCtxSynchronize": [],
            "cuEventSynchronize": [int(event)],
            "cuEventQuery": [int(event)],
        }
        if "u" not in call.flags and call.name not in words:
            continue
        of_event = call.name.startswith("cuEvent")
        soft.begin(stream)
        soft.cuEventRecord(event, stream)
        got = driver.call(call, words.get(call.name, []))
        wanted = "CAPTURED_EVENT" if of_event else "STREAM_CAPTURE_UNSUPPORTED"
        yield call.name, "while a stream captures", wanted, got
        ended = code(soft.d.cuStreamEndCapture(stream))
        yield call.name, "and then the capture", "STREAM_CAPTURE_INVALIDATED", ended


def absent(driver: Driver, _: bytes) -> Iterator[Row]:
    """Functions that the bindings know and the soft device has not."""
    known = {call.name.split("@")[0] for call in calls()}
    for name in sorted(set(dir(driver.d)) - known):
        if name.startswith("cu") and name[2:3].isupper() and callable(getattr(driver.d, name)):
            if "_v" in name:
                continue  # another form of a function, which the driver finds by the plain name
            found = driver.address(Call(name))
            yield name, "absent", "NOT_FOUND", "found" if found else "NOT_FOUND"


STATES: dict[str, Callable[[Driver, bytes], Iterator[Row]]] = {
    "before-init": before_init,
    "no-context": without_context,
    "host-function": in_host_function,
    "arguments": right_and_wrong,
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
