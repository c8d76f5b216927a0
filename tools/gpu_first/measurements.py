"""Sections of the GPU run that measure the device, single kernels and an engine.

A product is the multiplication of activation rows by a weight matrix. The bandwidth of a product is
given as a percentage of the read bandwidth, which is measured with a kernel that only reads memory.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.dtypes import E4M3, itemsize
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.graph.nodes import highest_priority
from graft.cudagraph.host.hostwork import NativeWork
from graft.cudagraph.lanes import StreamLane
from graft.models.cache.kv import PagedKV
from graft.models.engine.engine import Engine
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.kernels.loader import SHARED_PERCENT
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.models.request import Request
from graft.tools.gpu_first.arrays import attention_rows, matrices, random_input, random_kv
from graft.tools.gpu_first.model import (
    PREFILL_LENGTH,
    has_grammar_backend,
    random_engine,
    random_model,
    round_parts,
)
from graft.tools.gpu_first.sampling import BATCH, DRAFTS, SamplingSetup
from graft.tools.gpu_first.session import LAUNCHES, LIMIT_S, Session

CLOCK_KERNELS = Path(__file__).parents[1] / "kernels" / "clock.cu"
#: Numbers of rows of products and forward passes, the most important ones first.
ROWS = (1, 4, 8, 32, 16, 64, 128, 256)
#: Predicted percentage of the read bandwidth that a product without tensor cores reaches, by number
#: of rows.
PREDICTED_WARP_LINEAR = {1: (80.0, 88.0), 8: (55.0, 65.0)}
#: Predicted percentage of the read bandwidth that a product of at most 8 rows on tensor cores
#: reaches, by matrix.
PREDICTED_LINEAR = {
    "gate, up": (92.0, 100.0),
    "head": (92.0, 100.0),
    "qkv": (75.0, 85.0),
    "out": (75.0, 85.0),
}
#: Predicted milliseconds of a forward pass of the 8B model on an H200, by number of rows.
PREDICTED_FORWARD = {
    1: (4.0, 4.6),
    4: (4.0, 4.6),
    8: (4.0, 4.6),
    32: (4.2, 6.0),
    64: (4.8, 6.7),
    256: (10.0, 15.5),
}
#: Number of layers of the model with which kernels are compiled.
COMPILED_LAYERS = 3
#: Values of cuBLAS enumerators.
CUDA_R_32F = 0
CUDA_R_16BF = 14
CUBLAS_COMPUTE_32F = 68
CUBLAS_GEMM_DEFAULT = -1
CUBLAS_OP_N = 0
CUBLAS_OP_T = 1


# Compilation --------------------------------------------------------------------------------------


def compile_kernels(session: Session) -> None:
    """Compile the kernels of all sections in parallel, so that later processes find them cached."""
    session.case("open the device", lambda: session.add(session.device.describe(), None, ""))
    session.case("kernels", _compile_kernels, session)


def _compile_kernels(session: Session) -> None:
    start = time.monotonic()
    shape = session.shape | {"num_hidden_layers": COMPILED_LAYERS}
    model = random_model(session.device, shape)

    def build_forward(count: int) -> None:
        lane = Graph(session.device, f"{count} rows").lane("main")
        logits = session.device.empty((count, model.vocab_size), "float32")
        rows = attention_rows(session.device, 256, count, per_slot=max(4, count // BATCH))
        model.forward(lane, rows, None, logits)
        hidden = session.shape["hidden_size"]
        y = session.device.empty((count, hidden), "float32")
        for dtype in ("bfloat16", E4M3):
            weight = session.random_weight((hidden, hidden), dtype)
            x = random_input(session, model.kernels, weight, count)
            model.kernels.products.linear(lane, x, weight, y)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        forwards = [pool.submit(build_forward, count) for count in ROWS]
        with random_engine(shape, DRAFTS, programmatic=False) as engine:
            engine.generate([Request(tokens=[5] * 8, max_tokens=2)])
        SamplingSetup(session)
        for forward in forwards:
            forward.result()
    session.add("compilation", time.monotonic() - start, "s")


# Device -------------------------------------------------------------------------------------------


def measure_ceilings(session: Session) -> None:
    """Measure the bandwidths of device memory and of the bus to pinned host memory."""
    session.case("read", _measure_read, session)
    session.case("copy", _measure_copy, session)
    session.case("pinned memory", _measure_pinned, session)


def _measure_read(session: Session) -> None:
    session.add("read", session.read_bandwidth() / 1e9, "GB/s", (4300, 4500))


def _measure_copy(session: Session) -> None:
    elements = 1 << (18 if session.small else 30)
    halves = session.random((2, elements))
    with session.timed_graph() as lane:
        lane.copy(halves[0], halves[1])
    bandwidth = halves.nbytes / lane.seconds
    session.add("copy, bytes read and written", bandwidth / 1e9, "GB/s", (4200, 4400))


def _measure_pinned(session: Session) -> None:
    nbytes = 1 << (15 if session.small else 27)
    pinned = session.device.pinned((nbytes,), "uint8")
    with session.timed_graph() as lane:
        session.read(lane, pinned, session.device.multiprocessor_count * 8)
    session.add("pinned memory read by a kernel", pinned.nbytes / lane.seconds / 1e9, "GB/s")
    masks = session.device.pinned((128, 4096), "int32")
    with session.timed_graph() as lane:
        for _ in range(20):
            session.read(lane, masks, 128)
    name = "128 mask rows of 16 KB in pinned memory"
    session.add(name, lane.seconds / 20 * 1e6, "us", (40, 100))


def measure_gaps(session: Session) -> None:
    """Measure the time between two kernel nodes, with full and with programmatic edges."""
    for programmatic in (False, True):
        edges = "programmatic" if programmatic else "full"
        session.case(f"empty nodes, {edges} edges", _measure_empty, session, programmatic)
        session.case(f"8-MB nodes, {edges} edges", _measure_reads, session, programmatic)
    for carveout in (None, SHARED_PERCENT):
        session.case(f"carve-out {carveout}", _measure_carveout, session, carveout)


def predicted_gap(programmatic: bool) -> tuple[float, float]:
    """Return the range of the predicted time between two nodes in microseconds."""
    return (0.3, 0.7) if programmatic else (1.0, 1.4)


def _measure_empty(session: Session, programmatic: bool) -> None:
    count = 50 if session.small else 1000
    with session.timed_graph(programmatic) as lane:
        for _ in range(count):
            lane.kernel(session.kernels["nothing"], 1, 32, [])
    edges = "programmatic" if programmatic else "full"
    gap_us = lane.seconds / count * 1e6
    session.add(f"empty nodes, {edges} edges", gap_us, "us", predicted_gap(programmatic))


def _measure_reads(session: Session, programmatic: bool) -> None:
    """Measure the time between kernels that read 8 MB each, without the time of the reads."""
    count = 50 if session.small else 1000
    elements = 1 << (12 if session.small else 22)  # 8 MB of bfloat16 unless the sizes are small
    data = session.random((count // 2, elements))
    bandwidth = session.read_bandwidth()
    blocks = session.device.multiprocessor_count * 8
    with session.timed_graph(programmatic) as lane:
        for i in range(count):
            session.read(lane, data[i % len(data)], blocks)
    gap_us = (lane.seconds / count - 2 * elements / bandwidth) * 1e6
    edges = "programmatic" if programmatic else "full"
    name = f"8-MB nodes beyond the read, {edges} edges"
    session.add(name, gap_us, "us", predicted_gap(programmatic))


def _measure_carveout(session: Session, carveout: int | None) -> None:
    """Alternate a kernel without shared memory and a product, with programmatic edges.

    Different divisions of the L1 cache into cache and shared memory may keep two kernels from
    running at the same time. The product requests SHARED_PERCENT of shared memory. `carveout` is
    the percentage that the first kernel requests; None for the driver's choice.
    """
    kernels = ModelKernels(session.device)
    hidden = session.shape["hidden_size"]
    weight = session.random_weight((hidden, hidden), "bfloat16")
    x = random_input(session, kernels, weight, 32)
    y = session.device.zeros((32, hidden), "float32")
    data = session.random((1 << 12,))
    if carveout is not None:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        call(cu.cuFuncSetAttribute, session.kernels["read_words"].function, attribute, carveout)
    count = 5 if session.small else 200
    with session.timed_graph(programmatic=True) as lane:
        for _ in range(count):
            session.read(lane, data, 8)
            kernels.products.linear(lane, x, weight, y)
    choice = "the driver's carve-out" if carveout is None else f"{carveout} % carve-out"
    session.add(f"read and product, {choice}", lane.seconds / count * 1e6, "us")


def measure_hops(session: Session) -> None:
    """Measure the latency of a host step between two kernels, by transport.

    The transport is the kind of graph node that runs the host step. The latency is measured alone,
    and while large products run on another lane of the graph, without and with node priorities.
    """
    for transport in ("host", "mailbox", "spinkernel"):
        for products, priorities in ((0, True), (2, False), (2, True)):
            name = f"{transport}, {'during products' if products else 'alone'}"
            if products and priorities:
                name += ", priorities"
            session.case(name, _measure_hop, session, name, transport, products, priorities)


def _measure_hop(
    session: Session, name: str, transport: str, products: int, priorities: bool
) -> None:
    """Measure one transport while `products` products run on another lane.

    With `priorities`, the kernels around the host step have a higher priority than the products.
    """
    kernels = ModelKernels(session.device)
    stamp = session.device.load(CLOCK_KERNELS)["stamp_ns"]
    width, replays = (128, 3) if session.small else (8192, 200)
    weight = session.random_weight((4 * width, width), "bfloat16")
    x = random_input(session, kernels, weight, 32)
    y = session.device.zeros((32, 4 * width), "float32")
    stamps = session.device.pinned((2,), "uint64")
    free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value or 0
    graph = Graph(session.device, name)
    for _ in range(products):
        kernels.products.linear(graph.lane("model"), x, weight, y)
    lane = graph.lane("grammar")
    priority = highest_priority()
    lane.kernel(stamp, 1, 1, (stamps, 0), priority=priority)
    getattr(lane, transport)(NativeWork(free, 0, name="free(NULL)"))
    lane.kernel(stamp, 1, 1, (stamps, 1), priority=priority)
    executable = graph.instantiate(priorities=priorities)
    times_ns = []
    for _ in range(replays):
        executable.launch(session.stream)
        executable.synchronize(LIMIT_S)
        times_ns.append(int(stamps.array[1]) - int(stamps.array[0]))
    executable.close()
    p99_ns = np.quantile(times_ns, 0.99)
    session.add(name, statistics.median(times_ns) / 1e3, "us", note=f"p99 {p99_ns / 1e3:.1f}")


# Forward passes -----------------------------------------------------------------------------------


def measure_forward(session: Session) -> None:
    """Measure forward passes of decoding rounds and of a prefill chunk.

    Unlike in `measure_linears`, products have the epilogues of a model: residuals, norms, RoPE and
    gates.
    """
    bandwidth = session.read_bandwidth()
    model = random_model(session.device, session.shape)
    context = 64 if session.small else 256
    for slot in range(BATCH):
        model.kv.allocate(slot, PREFILL_LENGTH)
        model.kv.set_table(StreamLane(session.stream), slot)
    for count in ROWS[:4] if session.small else ROWS:
        for programmatic in (False, True):
            edges = ", programmatic edges" if programmatic else ""
            rows = attention_rows(session.device, context, count, max(4, count // BATCH))
            name = f"{count} rows, {context} positions{edges}"
            session.case(
                name, _measure_forward, session, model, rows, name, programmatic, bandwidth
            )
    session.case("prefill chunk", _measure_prefill_chunk, session, model)


def _measure_forward(
    session: Session, model: LlamaModel, rows: Rows, name: str, programmatic: bool, bandwidth: float
) -> None:
    """Measure a forward pass of the given rows. Its graph has full or programmatic edges.

    `bandwidth` is the read bandwidth, with which the time is compared.
    """
    logits = session.device.empty((rows.count, model.vocab_size), "float32")
    with session.timed_graph(programmatic) as lane:
        model.forward(lane, rows, None, logits)
    nbytes = matrix_bytes(session.shape, with_head=True)
    share = nbytes / lane.seconds / bandwidth
    session.add(
        name,
        lane.seconds * 1e3,
        "ms",
        PREDICTED_FORWARD.get(rows.count),
        f"{100 * share:.0f} % of read, {nbytes * rows.count / lane.seconds / 1e12:.0f} TFLOP/s",
    )


def _measure_prefill_chunk(session: Session, model: LlamaModel) -> None:
    """Measure the prefill of the last 256 tokens of a prompt, without logits."""
    count = 32 if session.small else 256
    length = 64 if session.small else PREFILL_LENGTH
    rows = attention_rows(session.device, length, count, per_slot=count)
    with session.timed_graph() as lane:
        model.forward(lane, rows)
    flops = matrix_bytes(session.shape, with_head=False) * count  # 2 per bfloat16 weight and row
    rate = flops / lane.seconds / 1e12
    name = f"prefill of {count} rows, {length} positions"
    session.add(name, rate, "TFLOP/s", (380, 550), f"{lane.seconds * 1e3:.2f} ms")


def matrix_bytes(shape: dict[str, int], with_head: bool) -> int:
    """Return the total size in bytes of the bfloat16 weight matrices that a forward pass reads.

    With `with_head`, this includes the LM head.
    """
    sizes = {name: rows * columns for name, (rows, columns) in matrices(shape).items()}
    head = sizes.pop("head")
    elements = shape["num_hidden_layers"] * sum(sizes.values()) + (head if with_head else 0)
    return itemsize("bfloat16") * elements


# Products -----------------------------------------------------------------------------------------


def weight_copies(
    session: Session, size: tuple[int, int], dtype: str = "bfloat16"
) -> tuple[list[DeviceArray], int]:
    """Return several copies of a matrix, and the number of products to measure with these copies.

    Together, the copies are larger than the L2 cache. A measurement that uses them in rotation
    therefore reads each of them from memory.
    """
    nbytes = itemsize(dtype) * size[0] * size[1]
    num_copies = max(2, session.cache_bytes // nbytes + 1)
    weights = [session.random_weight(size, dtype) for _ in range(num_copies)]
    count = num_copies
    if not session.small:
        count = max(num_copies, int(2e9) // nbytes)
    return weights, count


def measure_linears(session: Session) -> None:
    """Measure products with 16-bit and with 8-bit weights, and products without tensor cores."""
    bandwidth = session.read_bandwidth()
    kernels = ModelKernels(session.device)
    for name, size in matrices(session.shape).items():
        for dtype in ("bfloat16", E4M3):
            weights, count = weight_copies(session, size, dtype)
            for rows in ROWS[:2] if session.small else ROWS:
                measure = partial(
                    _measure_product, session, kernels, name, weights, count, bandwidth, rows
                )
                session.case(f"{name} of {dtype}, {rows} rows", measure)
                if dtype != E4M3 and rows in PREDICTED_WARP_LINEAR:
                    session.case(f"{name} without tensor cores, {rows} rows", measure, 8)


def _measure_product(
    session: Session,
    kernels: ModelKernels,
    name: str,
    weights: list[DeviceArray],
    count: int,
    bandwidth: float,
    rows: int,
    cut: int = 0,
) -> None:
    """Measure `count` products of `rows` rows with copies of one matrix.

    The last `cut` output features are left out. The number of output features is then no multiple
    that the tensor-core kernels support, so that the kernel without tensor cores is measured.
    """
    columns = weights[0].shape[0] - cut
    dtype = str(weights[0].dtype)
    y = session.device.zeros((rows, columns), "float32")
    x = random_input(session, kernels, weights[0][:columns], rows)
    with session.timed_graph() as lane:
        for i in range(count):
            kernels.products.linear(lane, x, weights[i % len(weights)][:columns], y)
    seconds = lane.seconds / count
    predicted = None
    if lane.kernels == "linear_warp":
        predicted = PREDICTED_WARP_LINEAR.get(rows)
    elif rows <= 8 and dtype != E4M3:
        predicted = PREDICTED_LINEAR.get(name)
    suffix = f" less {cut}" if cut else ""
    session.add(
        f"{name}{suffix} of {dtype}, {rows} rows, {lane.kernels}",
        100 * weights[0].nbytes / seconds / bandwidth,
        "% of read",
        predicted,
        f"{seconds * 1e6:.1f} us",
    )


def measure_cublas(session: Session) -> None:
    """Measure the products of `measure_linears` with cuBLAS, called through CuPy.

    Inputs are bfloat16 and outputs float32. CuPy cannot capture cuBLAS in a graph. To exclude the
    launch times, a kernel blocks the stream until all products are enqueued.
    """
    if session.is_soft:
        note = "no CuPy on the soft device"
        session.case("cublas.gemmEx", lambda: session.add("cublas.gemmEx", None, "", note=note))
        return
    bandwidth = session.read_bandwidth()
    for name, size in matrices(session.shape).items():
        weights, count = weight_copies(session, size)
        for rows in ROWS:
            label = f"{name}, {rows} rows, gemmEx"
            session.case(label, _measure_gemm, session, label, weights, count, rows, bandwidth)


def _measure_gemm(
    session: Session, name: str, weights: list[DeviceArray], count: int, rows: int, bandwidth: float
) -> None:
    """Measure `count` products of `rows` rows, computed by cuBLAS.

    `weights` are copies of one matrix, and `bandwidth` is the read bandwidth.
    """
    columns, inner = weights[0].shape
    x = session.random((rows, inner))
    y = session.device.zeros((rows, columns), "float32")
    seconds = _time_gemm(session, weights, x, y, count) / count
    share = 100 * weights[0].nbytes / seconds / bandwidth
    session.add(name, share, "% of read", note=f"{seconds * 1e6:.1f} us")


def _time_gemm(
    session: Session, weights: list[DeviceArray], x: DeviceArray, y: DeviceArray, count: int
) -> float:
    """Return the median seconds of `count` products ``y = x @ weight.T`` with cuBLAS."""
    import cupy

    stream = cupy.cuda.ExternalStream(session.stream.handle)
    hold = session.device.load(CLOCK_KERNELS)["hold"]
    gate = session.device.pinned((1,), "int32")
    begin = session.device.event("begin", timing=True)
    end = session.device.event("end", timing=True)
    times: list[float] = []
    for launch in range(1 + LAUNCHES):
        # Do not block the stream for the first call, which loads modules and waits for the device.
        gate.array[0] = launch == 0
        StreamLane(session.stream).kernel(hold, 1, 1, [gate, 2_000_000_000])
        begin.record(session.stream)
        with stream:
            for i in range(count):
                _enqueue_gemm(weights[i % len(weights)], x, y)
        end.record(session.stream)
        gate.array[0] = 1
        end.synchronize(LIMIT_S)
        times.append(end.elapsed_s(begin))
    return statistics.median(times[1:])


def _enqueue_gemm(weight: DeviceArray, x: DeviceArray, y: DeviceArray) -> None:
    """Enqueue ``y = x @ weight.T`` on CuPy's current stream."""
    import cupy

    alpha = np.ones(1, np.float32)
    beta = np.zeros(1, np.float32)
    rows, inner = x.shape
    columns = y.shape[1]
    cupy.cuda.cublas.gemmEx(
        cupy.cuda.get_cublas_handle(),
        CUBLAS_OP_T,
        CUBLAS_OP_N,
        columns,
        rows,
        inner,
        alpha.ctypes.data,
        weight.ptr,
        CUDA_R_16BF,
        inner,
        x.ptr,
        CUDA_R_16BF,
        inner,
        beta.ctypes.data,
        y.ptr,
        CUDA_R_32F,
        columns,
        CUBLAS_COMPUTE_32F,
        CUBLAS_GEMM_DEFAULT,
    )


# Attention ----------------------------------------------------------------------------------------


def measure_attention(session: Session) -> None:
    """Measure the attention of a layer for several context lengths and numbers of rows."""
    kernels = ModelKernels(session.device)
    bandwidth = session.read_bandwidth()
    layers = session.shape["num_hidden_layers"]
    for length in (32, 64) if session.small else (256, 2048, 8192):
        kv = random_kv(session, length, layers, BATCH)
        for rows in (1, 4, 32):
            session.case(
                f"{length} positions, {rows} rows",
                _measure_attention,
                session,
                kernels,
                kv,
                length,
                rows,
                bandwidth,
            )


def _measure_attention(
    session: Session, kernels: ModelKernels, kv: PagedKV, length: int, count: int, bandwidth: float
) -> None:
    """Measure the attention of `count` rows, with up to four rows per request.

    The rows of a request have the last positions of its context.
    """
    heads = session.shape["num_attention_heads"]
    rows = attention_rows(session.device, length, count)
    qkv = session.random_float32((count, (heads + 2 * kv.kv_heads) * kv.head_dim))
    out = session.device.zeros((count, heads * kv.head_dim), "float32")
    with session.timed_graph() as lane:
        for layer in range(kv.layers):
            kernels.attention.attend(lane, qkv, rows, kv, layer, heads, out)
    seconds = lane.seconds / kv.layers
    kv_bytes = -(-count // 4) * length * kv.kv_heads * kv.head_dim * 4
    share = 100 * kv_bytes / seconds / bandwidth
    # Short contexts are bound by latency.
    predicted = (75.0, 95.0) if kv_bytes >= 64 << 20 else None
    name = f"{length} positions, {count} rows, {lane.kernels}"
    session.add(name, share, "% of read", predicted, f"{seconds * 1e6:.1f} us")


# Rounds -------------------------------------------------------------------------------------------


def measure_rounds(session: Session) -> None:
    """Measure prefill and decoding rounds of an engine with random weights.

    The rounds are measured by number of drafts, kind of graph edges and batch size, without and
    with a grammar.
    """
    for drafts, programmatic in ((0, False), (DRAFTS, False), (DRAFTS, True)):
        name = f"{drafts} drafts"
        if programmatic:
            name += ", programmatic"
        session.case(name, _measure_engine, session, name, drafts, programmatic)


def _measure_engine(session: Session, name: str, drafts: int, programmatic: bool) -> None:
    """Measure the rounds of an engine. If `drafts` is 0, measure prefill too."""
    with random_engine(session.shape, drafts, programmatic) as engine:
        if not drafts:
            _measure_prefill(session, engine)
        for batch in (1, BATCH):
            _measure_rounds(session, engine, f"batch {batch}, {name}", batch)


def _measure_prefill(session: Session, engine: Engine) -> None:
    """Measure the time to the first token of a long prompt."""
    length = 64 if session.small else PREFILL_LENGTH
    times = []
    for i in range(3):
        start = time.perf_counter()
        engine.generate([Request(tokens=[5 + i] * length, max_tokens=1)])
        times.append(time.perf_counter() - start)
    seconds = min(times[1:])
    flops = matrix_bytes(session.shape, with_head=False) * length
    note = f"{flops / seconds / 1e12:.0f} TFLOP/s"
    session.add(f"prefill of {length} tokens", seconds * 1e3, "ms", note=note)


def _measure_rounds(session: Session, engine: Engine, name: str, batch: int) -> None:
    """Measure the rounds of a batch and their parts, without and with a grammar."""
    tokens = 8 if session.small else 40
    resources = engine._resources
    drafts = resources.draft_length if resources.drafter else 0
    plain = round_parts(engine, batch, tokens, with_grammar=False)
    predicted = {"target forward": PREDICTED_FORWARD.get(batch * (drafts + 1))}
    for part, ms in plain.items():
        session.add(f"{name}: {part}", ms, "ms", predicted.get(part))
    if batch == 1 and not drafts:
        session.add(f"{name}: tokens", 1e3 / plain["round"], "tokens/s", (240, 318))
    if not has_grammar_backend():
        session.add(f"{name}, grammar", None, "", note="no grammar backend is installed")
        return
    guided = round_parts(engine, batch, tokens, with_grammar=True)
    for part, ms in guided.items():
        session.add(f"{name}, grammar: {part}", ms, "ms", predicted.get(part))
    ratio = guided["round"] / plain["round"]
    session.add(f"{name}: round with grammar over round without", ratio, "times", (0.99, 1.01))
