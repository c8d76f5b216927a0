"""Program of the conformance test: call every driver function in one state of the driver.

``main`` writes a JSON list with one entry [function, case, expected code, returned code] per call.

Functions are called at the addresses that cuGetProcAddress returns. All arguments are passed as
64-bit words, so that every function can be called in the same way, also with invalid arguments.
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

from graft.cudagraph.driver.chooser import preload_soft

TEXT = """
extern "C" __global__ void step(int* p) { *p += 1; }
extern "C" __global__ void stray(int* p) { for (int i = 0; i < 4096; ++i) p[i] = 1; }
"""
#: A handle or address that the driver has never returned.
UNKNOWN_HANDLE = 0x1234560
MAX_ARGUMENTS = 14
#: (function, case, expected code, returned code)
Row = tuple[str, str, str, str]
#: Objects whose memory the driver may access until the process exits.
KEEP: list[Any] = []
#: A PTX module without kernels.
PTX = b".version 8.0\n.target sm_80\n.address_size 64\n"


class Driver:
    """The driver functions of the soft device, called through ctypes at their addresses."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(preload_soft()))
        from cuda.bindings import driver

        self.d = driver

    def address(self, call: Call) -> int:
        """Return the address of a function; 0 if the driver does not implement it."""
        out = ctypes.c_void_p()
        name, _, version = call.name.partition("@")
        self.library.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(out), int(version or 13020), ctypes.c_uint64(0), None
        )
        return out.value or 0

    def call(self, call: Call, words: list[int]) -> str:
        """Call a function with up to 14 words and return the name of its error code."""
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * MAX_ARGUMENTS)
        arguments = words + [0] * (MAX_ARGUMENTS - len(words))
        result = prototype(self.address(call))(*arguments)
        return code((self.d.CUresult(int(result)),))


class Arguments:
    """Valid arguments for one call of a driver function.

    An object or structure is created when its name is used for the first time. The functions of
    ``CREATE`` and the methods ``create_NAME`` create them.
    """

    def __init__(self, soft: Soft, image: bytes) -> None:
        self.soft = soft
        self.d = soft.d
        self.image = image
        self.created: dict[str, int] = {}

    def word(self, name: str) -> int:
        """Return the handle, pointer or structure address for a name of the table.

        An object is created once per call, so that all parameters with its name get the same
        object. Device pointers, events with timing and output buffers are exceptions: each
        parameter gets a new one.
        """
        if name in self.created and name not in ("dptr", "timed", "out"):
            return self.created[name]
        if name in NODES:
            self.word("graph")  # creates the nodes
            return self.created[name]
        create = CREATE.get(name)
        value = create(self) if create else getattr(self, f"create_{name}")()
        self.created[name] = int(value)
        return self.created[name]

    def buffer(self, data: bytes = bytes(4096)) -> int:
        """Return the address of host memory with the content `data`. The memory is never freed."""
        memory = ctypes.create_string_buffer(data, len(data) + 1)
        KEEP.append(memory)
        return ctypes.addressof(memory)

    def struct(self, value: Any) -> int:
        """Return the address of a structure of cuda.bindings and keep the structure alive."""
        KEEP.append(value)
        return int(value.getPtr())

    def array(self, *values: int) -> int:
        """Return the address of an array of 64-bit words."""
        return self.buffer(bytes((ctypes.c_uint64 * len(values))(*values)))

    def end(self) -> None:
        """End the capture if this call has begun one. Otherwise it would affect later calls."""
        if "capturing" in self.created:
            self.d.cuStreamEndCapture(self.created["capturing"])

    create_out = create_bytes = buffer

    def create_capturing(self) -> int:
        """Begin a relaxed capture and return its stream."""
        self.soft.begin(self.word("stream"), 2)
        return self.word("stream")

    def create_timed(self) -> Any:
        """Return an event with timing that was recorded. The recorded work is complete."""
        event = self.soft.cuEventCreate(0)
        self.soft.cuEventRecord(event, self.word("stream"))
        self.soft.cuEventSynchronize(event)
        return event

    def create_registered(self) -> int:
        """Register host memory and return its address."""
        self.soft.cuMemHostRegister(self.word("pageable"), 4096, 2)
        return self.word("pageable")

    def create_retained(self) -> int:
        """Return a user object to which the graph holds a reference."""
        self.soft.cuGraphRetainUserObject(self.word("graph"), self.word("object"), 1, 1)
        return self.word("object")

    def create_graph(self) -> Any:
        """Return a graph with one node of each kind in ``NODES``."""
        graph = self.soft.cuGraphCreate(0)
        nodes = {name: add(self, graph) for name, add in NODES.items()}
        self.created.update({name: int(node) for name, node in nodes.items()})
        self.soft.cuGraphAddDependencies(graph, [nodes["mnode"]], [nodes["cnode"]], None, 1)
        return graph

    def create_graph2(self) -> Any:
        """Return a second graph, for child graph nodes."""
        graph = self.soft.cuGraphCreate(0)
        self.soft.cuGraphAddEmptyNode(graph, [], 0)
        return graph

    def create_anode(self) -> int:
        """Return an allocation node of a new graph, with a free node for its memory."""
        graph = self.soft.cuGraphCreate(0)
        params = self.soft.alloc_params(64)
        node = self.soft.cuGraphAddMemAllocNode(graph, [], 0, params)
        free = self.soft.cuGraphAddMemFreeNode(graph, [node], 1, params.dptr)
        self.created["fnode"] = int(free)
        return int(node)

    def create_fnode(self) -> int:
        """Return a free node."""
        self.word("anode")
        return self.created["fnode"]

    def create_galloc(self) -> int:
        """Return the address of the memory of a new allocation node."""
        params = self.soft.alloc_params(64)
        self.soft.cuGraphAddMemAllocNode(self.word("graph2"), [], 0, params)
        return int(params.dptr)

    def create_pool_props(self) -> int:
        """Return the properties of a pool of device memory."""
        return self.struct(self.soft.alloc_params(64).poolProps)

    def create_prop(self) -> int:
        """Return the properties of physical memory that can be exported."""
        return self.struct(self.soft.memory_properties())

    def create_mapped(self) -> int:
        """Return a reserved address to which physical memory is mapped."""
        address = self.word("reserved")
        self.soft.cuMemMap(address, 65536, 0, self.word("memory"), 0)
        return address

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
        p.ctx = self.soft.context
        p.count = 1
        p.paramArray = [self.operation()]
        return p

    def create_path(self) -> int:
        file = tempfile.NamedTemporaryFile(suffix=".image")  # noqa: SIM115  (kept open)
        file.write(self.image)
        file.flush()
        KEEP.append(file)
        return self.buffer(file.name.encode())

    def create_ptx_path(self) -> int:
        file = tempfile.NamedTemporaryFile(suffix=".ptx")  # noqa: SIM115  (kept open)
        file.write(PTX)
        file.flush()
        KEEP.append(file)
        return self.buffer(file.name.encode())

    def create_linked(self) -> int:
        state = self.soft.cuLinkCreate(0, [], [])
        kind = self.d.CUjitInputType.CU_JIT_INPUT_PTX
        self.soft.cuLinkAddData(state, kind, PTX, len(PTX), b"text", 0, [], [])
        return int(state)

    def array_descriptor(self) -> Any:
        """Return the descriptor of an array of 64 bytes."""
        p = self.d.CUDA_ARRAY_DESCRIPTOR()
        p.Width, p.Height, p.NumChannels = 16, 4, 1
        p.Format = self.d.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
        return p

    def create_array3d(self) -> int:
        """Return the descriptor of an array of 64 bytes."""
        p = self.d.CUDA_ARRAY3D_DESCRIPTOR()
        p.Width, p.Height, p.Depth, p.NumChannels = 8, 4, 2, 1
        p.Format = self.d.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
        return self.struct(p)

    def create_copy2d(self) -> int:
        """Return a copy of two rows between device pointers."""
        p = self.d.CUDA_MEMCPY2D()
        p.srcMemoryType = p.dstMemoryType = self.d.CUmemorytype.CU_MEMORYTYPE_DEVICE
        p.srcDevice = self.d.CUdeviceptr(self.word("dptr"))
        p.dstDevice = self.d.CUdeviceptr(self.word("dptr"))
        p.srcPitch = p.dstPitch = 32
        p.WidthInBytes, p.Height = 16, 2
        return self.struct(p)

    def create_config(self) -> int:
        p = self.d.CUlaunchConfig()
        p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimX = p.blockDimY = p.blockDimZ = 1
        p.hStream = self.d.CUstream(self.word("stream"))
        return self.struct(p)

    def create_node_params(self) -> int:
        p = self.soft.node_params("MEMSET")
        p.memset = self.soft.fill_params(self.word("dptr"), 0, self.d.CUDA_MEMSET_NODE_PARAMS_v2)
        return self.struct(p)


#: Functions that add the nodes of the graph, by the node's name in the table.
NODES: dict[str, Callable[[Arguments, Any], Any]] = {
    "node": lambda a, graph: a.soft.cuGraphAddEmptyNode(graph, [], 0),
    "knode": lambda a, graph: a.soft.cuGraphAddKernelNode(graph, [], 0, a.kernel()),
    "cnode": lambda a, graph: a.soft.cuGraphAddMemcpyNode(graph, [], 0, a.copy(), 0),
    "mnode": lambda a, graph: a.soft.add_fill(graph, [], a.word("dptr"), 0),
    "hnode": lambda a, graph: a.soft.cuGraphAddHostNode(graph, [], 0, a.host()),
    "bnode": lambda a, graph: a.soft.cuGraphAddBatchMemOpNode(graph, [], 0, a.batch()),
    "gnode": lambda a, graph: a.soft.cuGraphAddChildGraphNode(graph, [], 0, a.word("graph2")),
    "rnode": lambda a, graph: a.soft.cuGraphAddEventRecordNode(graph, [], 0, a.word("event")),
    "wnode": lambda a, graph: a.soft.cuGraphAddEventWaitNode(graph, [], 0, a.word("event")),
}

#: Functions that create arguments, by the argument's name in the table. Arguments that need more
#: than one expression are created by methods of ``Arguments``.
CREATE: dict[str, Callable[[Arguments], Any]] = {
    "dev": lambda a: 0,
    "ctx": lambda a: a.soft.context,
    "newctx": lambda a: a.soft.cuCtxCreate(None, 0, 0),
    "dptr": lambda a: a.soft.alloc(64),
    "pinned": lambda a: a.soft.cuMemHostAlloc(64, 3),
    "managed": lambda a: a.soft.cuMemAllocManaged(64, 1),
    "pool": lambda a: a.soft.cuMemPoolCreate(a.soft.alloc_params(64).poolProps),
    "memory": lambda a: a.soft.cuMemCreate(65536, a.soft.memory_properties(), 0),
    "reserved": lambda a: a.soft.cuMemAddressReserve(65536, 0, 0, 0),
    "file": lambda a: a.soft.cuMemExportToShareableHandle(
        a.word("memory"), a.d.CUmemAllocationHandleType(1), 0
    ),
    "pageable": lambda a: (a.buffer(bytes(3 * 4096)) + 4095) // 4096 * 4096,
    "array2d": lambda a: a.struct(a.array_descriptor()),
    "array": lambda a: a.soft.cuArrayCreate(a.array_descriptor()),
    # A resource of 8 multiprocessors, in partitions of 2.
    "sm": lambda a: a.array(1, *[0] * 11, 8 | 2 << 32, 2, *[0] * 4),
    "desc": lambda a: a.soft.cuDevResourceGenerateDesc([a.d.CUdevResource(a.word("sm"))], 1),
    "green": lambda a: a.soft.cuGreenCtxCreate(a.d.CUdevResourceDesc(a.word("desc")), 0, 1),
    "stream": lambda a: a.soft.stream(),
    "event": lambda a: a.soft.cuEventCreate(2),
    "module": lambda a: a.soft.cuModuleLoadData(a.image),
    "function": lambda a: a.soft.cuModuleGetFunction(a.word("module"), b"step"),
    "library": lambda a: a.soft.cuLibraryLoadData(a.image, [], [], 0, [], [], 0),
    "kernel": lambda a: a.soft.cuLibraryGetKernel(a.word("library"), b"step"),
    "linking": lambda a: a.soft.cuLinkCreate(0, [], []),
    "ptx": lambda a: a.buffer(PTX),
    "object": lambda a: a.soft.cuUserObjectCreate(0, a.d.CUhostFn(a.word("fn")), 1, 1),
    "clone": lambda a: a.soft.cuGraphClone(a.word("graph")),
    "exec": lambda a: a.soft.cuGraphInstantiate(a.word("graph"), 0),
    "fn": lambda a: address(ctypes.CDLL(None).abs),
    "alloc": lambda a: a.struct(a.soft.alloc_params(64)),
    "location": lambda a: a.buffer(bytes([1, *[0] * 7])),
    "access_desc": lambda a: a.buffer(bytes([1, *[0] * 7, 3, *[0] * 3])),
    "ranges": lambda a: a.array(a.word("managed")),
    "bus": lambda a: a.buffer(b"0000:00:00.0"),
    "ones": lambda a: a.array(1),
    "fours": lambda a: a.array(4),
    "access": lambda a: a.buffer(bytes([1, *[0] * 23])),
    "pointers": lambda a: a.array(a.word("dptr")),
    "pointers2": lambda a: a.array(a.word("dptr")),
    "sizes": lambda a: a.array(64),
    "zeros": lambda a: a.array(0, 0),
    "arguments": lambda a: a.array(a.array(a.word("dptr"))),
    "symbol": lambda a: a.buffer(b"cuInit"),
    "name": lambda a: a.buffer(b"step"),
    "image": lambda a: a.buffer(a.image),
    "dot": lambda a: a.buffer(b"/dev/null"),
    "first": lambda a: a.array(a.word("node")),
    "second": lambda a: a.array(a.word("knode")),
    "joined_from": lambda a: a.array(a.word("mnode")),
    "joined_to": lambda a: a.array(a.word("cnode")),
    "attributes": lambda a: a.array(2),
    "results": lambda a: a.array(a.buffer()),
    "host": lambda a: a.struct(a.host()),
    "copy": lambda a: a.struct(a.copy()),
    "fill": lambda a: a.struct(a.soft.fill_params(a.word("dptr"), 0)),
    "batch": lambda a: a.struct(a.batch()),
    "operations": lambda a: a.struct(a.operation()),
    "kernel_params": lambda a: a.struct(a.kernel()),
    "instantiate": lambda a: a.struct(a.d.CUDA_GRAPH_INSTANTIATE_PARAMS()),
}


def valid_value(arguments: Arguments, parameter: str) -> int:
    """Return a valid value for a parameter of the table."""
    kind = parameter.partition("~")[0].removesuffix("?")
    if kind[0].isdigit():
        return int(kind.split("|")[0])
    if kind == "in.kernel":
        return arguments.word("kernel_params")
    return arguments.word(kind.removeprefix("in."))


def invalid_values(parameter: str) -> Iterator[tuple[str, int, str]]:
    """Yield the invalid values of a parameter of the table as (case, value, expected code)."""
    kind, _, code = parameter.partition("~")
    if kind[0].isdigit():
        valid, *invalid = kind.split("|")
        for item in invalid:
            value, _, expected = item.partition(":")
            yield f"{value} instead of {valid}", int(value), expected or "INVALID_VALUE"
    elif code == "-" or kind.endswith("?"):
        return
    elif kind == "out":
        yield "NULL for a result", 0, "INVALID_VALUE"
    elif kind.startswith("in."):
        yield f"NULL for {kind.removeprefix('in.')}", 0, "INVALID_VALUE"
    else:
        assert kind in KINDS, kind
        expected = code or DEFAULT_CODES.get(kind, "INVALID_HANDLE")
        yield f"unknown {kind}", UNKNOWN_HANDLE, expected


def call_with(soft: Soft, driver: Driver, image: bytes, call: Call, changed: dict[int, int]) -> str:
    """Call a function and return its error code.

    The arguments are valid, except that those in ``changed`` replace the arguments at their
    indices.
    """
    soft.cuCtxSetCurrent(soft.context)
    arguments = Arguments(soft, image)
    words = [valid_value(arguments, parameter) for parameter in call.parameters]
    for index, value in changed.items():
        words[index] = value
    result = driver.call(call, words)
    soft.d.cuCtxSynchronize()
    arguments.end()
    return result


def valid_and_invalid_arguments(driver: Driver, image: bytes) -> Iterator[Row]:
    """Call every function with each invalid argument in turn, then with valid arguments."""
    soft = Soft()
    for call in calls():
        for index, parameter in enumerate(call.parameters):
            for case, value, expected in invalid_values(parameter):
                result = call_with(soft, driver, image, call, {index: value})
                yield call.name, f"{case} (argument {index + 1})", expected, result
        result = call_with(soft, driver, image, call, {})
        yield call.name, "valid arguments", call.expected, result


def without_arguments(
    driver: Driver, case: str, expected: str, selected: Callable[[frozenset[str]], Any]
) -> Iterator[Row]:
    """Call every function whose flags `selected` accepts, with zeros as arguments.

    Zeros are sufficient, because a function checks the driver's state before its arguments.
    """
    for call in calls():
        if selected(call.flags):
            yield call.name, case, expected, driver.call(call, [])


def before_init(driver: Driver, _: bytes) -> Iterator[Row]:
    """Call the functions that require cuInit before cuInit was called."""
    return without_arguments(
        driver, "before cuInit", "NOT_INITIALIZED", lambda flags: not flags & {"a", "i"}
    )


def without_context(driver: Driver, _: bytes) -> Iterator[Row]:
    """Call the functions that require a current context on a thread without one."""
    Soft().cuCtxSetCurrent(0)
    return without_arguments(
        driver, "no current context", "INVALID_CONTEXT", lambda flags: "c" in flags
    )


def in_host_function(driver: Driver, _: bytes) -> Iterator[Row]:
    """Call all functions that are not always allowed inside a host function."""
    soft = Soft()
    rows: list[Row] = []

    def call_all(_data: Any) -> None:
        rows.extend(
            without_arguments(
                driver, "in a host function", "NOT_PERMITTED", lambda flags: "a" not in flags
            )
        )

    callback = CALLBACK(call_all)
    soft.host(0, callback)
    soft.cuCtxSynchronize()
    return iter(rows)


def after_fault(driver: Driver, image: bytes) -> Iterator[Row]:
    """Call the functions that are not allowed after a fault when a kernel has caused one."""
    soft = Soft()
    soft.launch(soft.kernels(TEXT).stray, 1, 1, soft.alloc(64))
    soft.d.cuCtxSynchronize()
    return without_arguments(
        driver, "after a fault", "ILLEGAL_ADDRESS", lambda flags: not flags & {"a", "f"}
    )


def during_capture(driver: Driver, image: bytes) -> Iterator[Row]:
    """Call the functions that are not allowed while a stream captures in global mode.

    Each call must return the documented code and invalidate the capture. The call that ends the
    capture reports the invalidation.
    """
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
        is_event_call = call.name.startswith("cuEvent")
        soft.begin(stream)
        soft.cuEventRecord(event, stream)
        result = driver.call(call, words.get(call.name, []))
        expected = "CAPTURED_EVENT" if is_event_call else "STREAM_CAPTURE_UNSUPPORTED"
        yield call.name, "during a capture", expected, result
        ended = code(soft.d.cuStreamEndCapture(stream))
        yield call.name, "end of the capture after the call", "STREAM_CAPTURE_INVALIDATED", ended


def absent(driver: Driver, _: bytes) -> Iterator[Row]:
    """Look up each function of cuda.bindings that the soft device does not implement."""
    known = {call.name.split("@")[0] for call in calls()}
    for name in sorted(set(dir(driver.d)) - known):
        is_function = name.startswith("cu") and name[2:3].isupper()
        if not is_function or not callable(getattr(driver.d, name)):
            continue
        if "_v" in name:
            continue  # cuGetProcAddress takes names without a version suffix
        found = driver.address(Call(name))
        yield name, "absent", "NOT_FOUND", "found" if found else "NOT_FOUND"


#: States of the driver and the functions that make the calls in them.
STATES: dict[str, Callable[[Driver, bytes], Iterator[Row]]] = {
    "before-init": before_init,
    "no-context": without_context,
    "host-function": in_host_function,
    "arguments": valid_and_invalid_arguments,
    "capture": during_capture,
    "fault": after_fault,
    "absent": absent,
}


def main(state: str, image: Path) -> None:
    """Write the error codes that the functions return in one state as JSON.

    `state` is a key of `STATES`. `image` is a file with the compiled kernels of `TEXT`.
    """
    rows = STATES[state](Driver(), image.read_bytes())
    json.dump(list(rows), sys.stdout)
