"""Sections of the measurement. A section writes each value as soon as it is measured.

A product is the multiplication of activation rows by a weight matrix. The bandwidth of a product is
given as a percentage of the read bandwidth, which is measured with a kernel that only reads memory.
"""

from __future__ import annotations

import ctypes
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graft.cudagraph.dtypes import E4M3, itemsize
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import NativeWork
from graft.cudagraph.lanes import StreamLane
from graft.cudagraph.memory import DeviceArray
from graft.cudagraph.nodes import highest_priority
from graft.models.cache.kv import PagedKV
from graft.models.llm.kernel_library import ModelKernels
from graft.models.llm.rows import Rows
from graft.sampling.exchange import NUMBERS, Exchange
from graft.sampling.mode import DraftMode
from graft.sampling.params import SamplingParams
from graft.sampling.sampler import RowMap, Sampler, output_ring
from graft.sampling.state import SlotRequest, SlotState
from graft.tools.gpu_first.bench import LAUNCHES, LIMIT_S, Bench
from graft.tools.gpu_first.model import random_engine, round_parts

CLOCK_KERNELS = Path(__file__).parents[1] / "kernels" / "clock.cu"
ROW_READY = NUMBERS["ROW_READY"]
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
BATCH = 8
DRAFTS = 3
PAGE_SIZE = 16
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
#: Predicted milliseconds of a forward pass of the target model, by number of rows.
PREDICTED_FORWARD = {1: (3.7, 3.9), 4: (3.7, 3.9), 8: (3.8, 4.0), 32: (3.9, 4.3)}
#: Values of cuBLAS enumerators.
CUDA_R_32F = 0
CUDA_R_16BF = 14
CUBLAS_COMPUTE_32F = 68
CUBLAS_GEMM_DEFAULT = -1
CUBLAS_OP_N = 0
CUBLAS_OP_T = 1


# Device -------------------------------------------------------------------------------------------


def measure_ceilings(bench: Bench) -> None:
    """Measure the bandwidths of device memory and of the bus to pinned host memory."""
    bench.add(
        "read",
        bench.read_bandwidth() / 1e9,
        "GB/s",
        (4300, 4500),
    )
    elements = 1 << (18 if bench.small else 30)
    halves = bench.random((2, elements))
    with bench.timed_graph() as lane:
        lane.copy(halves[0], halves[1])
    bandwidth = halves.nbytes / lane.seconds
    name = "copy, bytes read and written"
    bench.add(name, bandwidth / 1e9, "GB/s", (4200, 4400))
    nbytes = 1 << (15 if bench.small else 27)
    pinned = bench.device.pinned((nbytes,), "uint8")
    with bench.timed_graph() as lane:
        bench.read(lane, pinned, bench.device.multiprocessor_count * 8)
    bandwidth = pinned.nbytes / lane.seconds
    bench.add("pinned memory read by a kernel", bandwidth / 1e9, "GB/s")
    masks = bench.device.pinned((128, 4096), "int32")
    with bench.timed_graph() as lane:
        for _ in range(20):
            bench.read(lane, masks, 128)
    seconds = lane.seconds / 20
    name = "128 mask rows of 16 KB in pinned memory"
    bench.add(name, seconds * 1e6, "us", (40, 100))


def measure_gaps(bench: Bench) -> None:
    """Measure the time between two kernel nodes, with full and with programmatic edges.

    The first measurement uses empty kernels. The second measurement uses kernels that read 8 MB
    each, and subtracts the time in which 8 MB are read at the measured read bandwidth.
    """
    count = 50 if bench.small else 1000
    elements = 1 << (12 if bench.small else 22)  # 8 MB of bfloat16 unless the sizes are small
    num_arrays = count // 2
    data = bench.random((num_arrays, elements))
    bandwidth = bench.read_bandwidth()
    blocks = bench.device.multiprocessor_count * 8
    for programmatic, predicted in ((False, (1.0, 1.4)), (True, (0.3, 0.7))):
        edges = "programmatic" if programmatic else "full"
        with bench.report_refusal(f"{edges} edges"):
            with bench.timed_graph(programmatic) as lane:
                for _ in range(count):
                    lane.kernel(bench.kernels["nothing"], 1, 32, [])
            gap_s = lane.seconds / count
            bench.add(
                f"empty nodes, {edges} edges",
                gap_s * 1e6,
                "us",
                predicted,
            )
            with bench.timed_graph(programmatic) as lane:
                for i in range(count):
                    bench.read(lane, data[i % num_arrays], blocks)
            read_s = 2 * elements / bandwidth
            gap_s = lane.seconds / count - read_s
            bench.add(
                f"8-MB nodes beyond the read, {edges} edges",
                gap_s * 1e6,
                "us",
                predicted,
            )


def measure_hops(bench: Bench) -> None:
    """Measure the latency of a host step between two kernels, by transport.

    The transport is the kind of graph node that runs the host step. The latency is measured alone,
    and while large products run on another lane of the graph, without and with node priorities.
    """
    kernels = ModelKernels(bench.device)
    stamp = bench.device.load(CLOCK_KERNELS)["stamp_ns"]
    width, replays = (128, 3) if bench.small else (8192, 200)
    weight = bench.random((4 * width, width))
    x = bench.device.zeros((32, width), "float32")
    y = bench.device.zeros((32, 4 * width), "float32")
    stamps = bench.device.pinned((2,), "uint64")
    free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value or 0
    for transport in ("host", "mailbox", "spinkernel"):
        for products, priorities in ((0, True), (2, False), (2, True)):
            name = f"{transport}, {'during products' if products else 'alone'}"
            if products and priorities:
                name += ", priorities"
            with bench.report_refusal(name):
                graph = Graph(bench.device, name)
                for _ in range(products):
                    kernels.linear(graph.lane("model"), x, weight, y)
                lane = graph.lane("grammar")
                priority = highest_priority()
                lane.kernel(stamp, 1, 1, (stamps, 0), priority=priority)
                getattr(lane, transport)(NativeWork(free, 0, name="free(NULL)"))
                lane.kernel(stamp, 1, 1, (stamps, 1), priority=priority)
                executable = graph.instantiate(priorities=priorities)
                times_ns = []
                for _ in range(replays):
                    executable.launch(bench.stream)
                    executable.synchronize(LIMIT_S)
                    begin_ns = int(stamps.array[0])
                    end_ns = int(stamps.array[1])
                    times_ns.append(end_ns - begin_ns)
                executable.close()
                p99_ns = np.quantile(times_ns, 0.99)
                median_ns = statistics.median(times_ns)
                bench.add(
                    name,
                    median_ns / 1e3,
                    "us",
                    note=f"p99 {p99_ns / 1e3:.1f}",
                )


# Products -----------------------------------------------------------------------------------------


def matrices(bench: Bench) -> dict[str, tuple[int, int]]:
    """Return the output and input features of the model's weight matrices by name."""
    shape = bench.shape
    hidden = shape["hidden_size"]
    inner = shape["intermediate_size"]
    kv = 2 * shape["num_key_value_heads"] * shape["head_dim"]
    return {
        "qkv": (hidden + kv, hidden),
        "out": (hidden, hidden),
        "gate, up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (shape["vocab_size"], hidden),
    }


def weight_copies(
    bench: Bench, size: tuple[int, int], dtype: str = "bfloat16"
) -> tuple[list[DeviceArray], int]:
    """Return several copies of a matrix, and the number of products to measure with these copies.

    The copies are larger than the L2 cache in total. A measurement that uses them in rotation
    therefore reads each of them from memory.
    """
    nbytes = itemsize(dtype) * size[0] * size[1]
    num_copies = max(2, bench.cache_bytes // nbytes + 1)
    weights = [bench.random(size, 0.02, dtype) for _ in range(num_copies)]
    count = num_copies
    if not bench.small:
        count = max(num_copies, int(8e9) // nbytes)
    return weights, count


def measure_linears(bench: Bench) -> None:
    """Measure graft's products with weights of 16 and of 8 bits."""
    bandwidth = bench.read_bandwidth()
    kernels = ModelKernels(bench.device)
    for name, size in matrices(bench).items():
        for dtype in ("bfloat16", E4M3):
            weights, count = weight_copies(bench, size, dtype)
            for rows in ROWS[:2] if bench.small else ROWS:
                _measure_linear(
                    bench,
                    kernels,
                    name,
                    weights,
                    count,
                    rows,
                    bandwidth,
                )
                if dtype != E4M3:
                    _measure_linear(
                        bench,
                        kernels,
                        name,
                        weights,
                        count,
                        rows,
                        bandwidth,
                        cut=8,
                    )


def _measure_linear(
    bench: Bench,
    kernels: ModelKernels,
    name: str,
    weights: list[DeviceArray],
    count: int,
    rows: int,
    bandwidth: float,
    cut: int = 0,
) -> None:
    """Measure one product.

    Parameters
    ----------
    bench, kernels
        Section, and the model's kernels.
    name
        Name of the matrix.
    weights
        Copies of the matrix.
    count
        Number of products.
    rows
        Rows of the input.
    bandwidth
        Read bandwidth in bytes per second.
    cut
        Number of output features to leave out. With 8, the number of output features is not a
        multiple that the tensor-core kernels support, so that the kernel without tensor cores is
        measured.
    """
    columns, inner = weights[0].shape
    dtype = str(weights[0].dtype)
    output_columns = columns - cut
    y = bench.device.zeros((rows, output_columns), "float32")
    x_dtype = "float32" if cut else kernels.input_dtype(weights[0])
    x = bench.device.zeros((rows, inner), x_dtype)
    with bench.report_refusal(f"{name} of {dtype}, {rows} rows"):
        with bench.timed_graph() as lane:
            for i in range(count):
                weight = weights[i % len(weights)]
                kernels.linear(lane, x, weight[:output_columns], y)
        seconds = lane.seconds / count
        predicted = None
        if lane.kernels == "linear_warp":
            predicted = PREDICTED_WARP_LINEAR.get(rows)
        elif rows <= 8 and dtype != E4M3:
            predicted = PREDICTED_LINEAR.get(name)
        suffix = f" less {cut}" if cut else ""
        bench.add(
            f"{name}{suffix} of {dtype}, {rows} rows, {lane.kernels}",
            100 * weights[0].nbytes / seconds / bandwidth,
            "% of read",
            predicted,
            f"{seconds * 1e6:.1f} us",
        )


def measure_cublas(bench: Bench) -> None:
    """Measure the products of `measure_linears` with cuBLAS, called through CuPy.

    Inputs are bfloat16 and outputs float32. CuPy cannot capture cuBLAS in a graph. To exclude the
    launch times, a kernel blocks the stream until all products are enqueued.
    """
    if bench.device.kind == "soft":
        bench.add(
            "cublas.gemmEx",
            None,
            "",
            note="no CuPy on the soft device",
        )
        return
    bandwidth = bench.read_bandwidth()
    for name, (columns, inner) in matrices(bench).items():
        weights, count = weight_copies(bench, (columns, inner))
        for rows in ROWS:
            x = bench.random((rows, inner))
            y = bench.device.zeros((rows, columns), "float32")
            seconds = _time_gemm(bench, weights, x, y, count) / count
            bench.add(
                f"{name}, {rows} rows, gemmEx",
                100 * weights[0].nbytes / seconds / bandwidth,
                "% of read",
                note=f"{seconds * 1e6:.1f} us",
            )


def _time_gemm(
    bench: Bench,
    weights: list[DeviceArray],
    x: DeviceArray,
    y: DeviceArray,
    count: int,
) -> float:
    """Return the median seconds of `count` products ``y = x @ weight.T`` with cuBLAS."""
    import cupy

    stream = cupy.cuda.ExternalStream(bench.stream.handle)
    handle = cupy.cuda.get_cublas_handle()
    hold = bench.device.load(CLOCK_KERNELS)["hold"]
    gate = bench.device.pinned((1,), "int32")
    begin = bench.device.event("begin", timing=True)
    end = bench.device.event("end", timing=True)
    alpha = np.ones(1, np.float32)
    beta = np.zeros(1, np.float32)
    rows, inner = x.shape
    columns = y.shape[1]
    times: list[float] = []
    for launch in range(1 + LAUNCHES):
        # Do not block the stream for the first call, which loads modules and waits for the device.
        gate.array[0] = launch == 0
        StreamLane(bench.stream).kernel(
            hold,
            1,
            1,
            [gate, 2_000_000_000],
        )
        begin.record(bench.stream)
        with stream:
            for i in range(count):
                cupy.cuda.cublas.gemmEx(
                    handle,
                    CUBLAS_OP_T,
                    CUBLAS_OP_N,
                    columns,
                    rows,
                    inner,
                    alpha.ctypes.data,
                    weights[i % len(weights)].ptr,
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
        end.record(bench.stream)
        gate.array[0] = 1
        end.synchronize(LIMIT_S)
        times.append(end.elapsed_s(begin))
    return statistics.median(times[1:])


# Attention ----------------------------------------------------------------------------------------


def measure_attention(bench: Bench) -> None:
    """Measure the attention of a layer for several context lengths and numbers of rows."""
    kernels = ModelKernels(bench.device)
    for length in (32, 64) if bench.small else (256, 2048, 8192):
        kv = _random_kv(bench, length)
        for rows in (1, 4, 32):
            _measure_attention(bench, kernels, kv, length, rows)


def _random_kv(bench: Bench, length: int) -> PagedKV:
    """Return a KV cache of eight requests with `length` random entries each."""
    kv = PagedKV(
        bench.device,
        layers=bench.shape["num_hidden_layers"],
        pages=BATCH * length // PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=bench.shape["num_key_value_heads"],
        head_dim=bench.shape["head_dim"],
        dtype="bfloat16",
        slots=BATCH,
        max_pages_per_slot=length // PAGE_SIZE,
    )
    kv.k = bench.random(kv.k.shape)
    kv.v = bench.random(kv.v.shape)
    for slot in range(BATCH):
        kv.allocate(slot, length)
        kv.set_table(StreamLane(bench.stream), slot)
    return kv


def _measure_attention(
    bench: Bench,
    kernels: ModelKernels,
    kv: PagedKV,
    length: int,
    count: int,
) -> None:
    """Measure the attention of `count` rows, with up to four rows per request.

    The rows of a request have the last positions of its context.
    """
    heads = bench.shape["num_attention_heads"]
    dim = bench.shape["head_dim"]
    kv_heads = bench.shape["num_key_value_heads"]
    num_layers = bench.shape["num_hidden_layers"]
    row_numbers = np.arange(count)
    first_position = length - min(count, 4)
    slots = (row_numbers // 4).astype(np.int32)
    positions = (first_position + row_numbers % 4).astype(np.int32)
    rows = Rows(
        bench.device.from_host(slots),
        bench.device.from_host(slots),
        bench.device.from_host(positions),
        rows_per_slot=min(count, 4),
    )
    rng = np.random.default_rng(0)
    width = (heads + 2 * kv_heads) * dim
    qkv = rng.standard_normal((count, width)).astype(np.float32)
    device_qkv = bench.device.from_host(qkv)
    out = bench.device.zeros((count, heads * dim), "float32")
    with bench.timed_graph() as lane:
        for layer in range(num_layers):
            kernels.attention(lane, device_qkv, rows, kv, layer, heads, out)
    seconds = lane.seconds / num_layers
    requests = -(-count // 4)
    kv_bytes = requests * length * kv_heads * dim * 4
    bench.add(
        f"{length} positions, {count} rows, {lane.kernels}",
        seconds * 1e6,
        "us",
        None,
        f"{kv_bytes / seconds / 1e9:.0f} GB/s of KV",
    )


# Sampling -----------------------------------------------------------------------------------------


class _SamplingSetup:
    """Sampling state of eight requests with three drafts each, as in a decoding round.

    All tokens are legal in the mask rows.
    """

    def __init__(self, bench: Bench):
        vocab = bench.shape["vocab_size"]
        self.state = SlotState(bench.device, BATCH, vocab)
        self._replay = bench.device.zeros((1,), "int32")
        exchange = Exchange(bench.device, BATCH, vocab, DraftMode.chain(DRAFTS))
        self._exchange = exchange
        exchange.masks[:] = -1
        exchange.stamps["state"] = ROW_READY
        exchange.stamps["epoch"] = 1
        exchange.stamps["position"] = 8 + np.arange(1 + DRAFTS)
        exchange.copy_masks_to_device(StreamLane(bench.stream), 0, 1 + DRAFTS)
        self.sampler = Sampler(
            self.state,
            exchange,
            self._replay,
            token_limit=vocab,
            max_batch=BATCH,
        )
        self.ring = output_ring(bench.device, 2, BATCH, DRAFTS)

    def join(self, bench: Bench, params: SamplingParams) -> Any:
        """Assign a request to each slot, and return a host copy of the slots with added drafts.

        The drafts of a request form a chain.
        """
        request = SlotRequest(params=params, position=8, last=1, epoch=1, limit=1 << 20)
        for slot in range(BATCH):
            self.state.join(StreamLane(bench.stream), slot, request)
        bench.stream.synchronize(LIMIT_S)
        slots = self.state.to_host()
        slots["drafts"][:, :DRAFTS] = 1
        slots["q_kind"][:, :DRAFTS] = 1
        slots["parent"][:, :DRAFTS] = (0, 1, 2)
        slots["path"][:, :DRAFTS] = (1, 3, 7)
        return slots


def measure_sampling(bench: Bench) -> None:
    """Measure sampling from the target's logits, greedily and with top-k and top-p."""
    setup = _SamplingSetup(bench)
    rng = np.random.default_rng(0)
    filtered = SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
    for name, params, predicted in (
        ("greedy", SamplingParams(), (5, 7)),
        ("top-k 50, top-p 0.9", filtered, (20, 25)),
    ):
        slots = setup.join(bench, params)
        for requests, width in ((1, 1), (8, 1), (8, 4)):
            slots["draft_len"] = width - 1
            setup.state.copy_from(slots)
            _measure_sampling(
                bench,
                setup,
                name,
                requests,
                width,
                predicted,
                rng,
            )


def _measure_sampling(
    bench: Bench,
    setup: _SamplingSetup,
    name: str,
    requests: int,
    width: int,
    predicted: tuple[float, float],
    rng: np.random.Generator,
) -> None:
    """Measure the sampling kernels alone, and then with the verification of the drafts.

    Parameters
    ----------
    bench, setup
        Section, slots and sampler.
    name
        Name of the sampling parameters.
    requests, width
        Number of requests, and number of rows per request.
    predicted
        Predicted range of the sampling time in microseconds.
    rng
        Random generator of the logits.
    """
    vocab = bench.shape["vocab_size"]
    count = 2 if bench.small else 20
    num_rows = requests * width
    saved = bench.device.from_host(setup.state.array.to_host())
    batch_rows = np.arange(requests, dtype=np.int32)
    row_numbers = np.arange(num_rows, dtype=np.int32)
    batch_row_of_row = row_numbers // width
    draft_of_row = row_numbers % width
    rows = RowMap(
        bench.device.from_host(batch_rows),
        bench.device.from_host(batch_rows * width),
        bench.device.from_host(batch_row_of_row << 16 | draft_of_row),
    )
    values = rng.standard_normal((num_rows, vocab)).astype(np.float32)
    logits = bench.device.from_host(2 * values)
    with bench.timed_graph() as lane:
        for _ in range(count):
            setup.sampler.target(lane, logits, rows)
    row_ok = setup.sampler.row_ok.to_host()[:num_rows]
    usable = int((row_ok == 1).sum())
    bench.add(
        f"{name}, {num_rows} rows, {lane.kernels}",
        lane.seconds / count * 1e6,
        "us",
        predicted,
        f"{usable} rows usable",
    )
    with bench.timed_graph() as lane:
        for _ in range(count):
            lane.copy(setup.state.array, saved)
            setup.sampler.target(lane, logits, rows)
            setup.sampler.verify(lane, rows, setup.ring)
    bench.add(f"{name}, {num_rows} rows, verified", lane.seconds / count * 1e6, "us")


# Rounds and tests ---------------------------------------------------------------------------------


def measure_rounds(bench: Bench) -> None:
    """Measure decoding rounds of an engine with random weights.

    The rounds are measured by number of drafts, kind of graph edges and batch size.
    """
    forward = {} if bench.small else PREDICTED_FORWARD
    for drafts in (0, DRAFTS):
        for programmatic in (False, True):
            name = f"{drafts} drafts"
            if programmatic:
                name += ", programmatic"
            with bench.report_refusal(name), random_engine(bench, drafts, programmatic) as engine:
                for batch in (1, BATCH):
                    predicted = forward.get(batch * (drafts + 1))
                    parts = round_parts(engine, batch, 8 if bench.small else 48)
                    for part, ms in parts.items():
                        bench.add(
                            f"batch {batch}, {name}: {part}",
                            ms,
                            "ms",
                            predicted if part == "target forward" else None,
                        )


def run_tests(bench: Bench) -> None:
    """Run graft's tests on this device and add the number of failures of each test file.

    Each file runs in its own process.
    """
    if not Path("tests/cudagraph").is_dir():
        bench.add(
            "suite",
            None,
            "",
            note="the working directory has no folder tests",
        )
        return
    files: list[Path] = []
    for package in ("cudagraph", "sampling", "models", "grammar"):
        files += sorted(Path("tests", package).glob("test_*.py"))
    if bench.small:
        files = [Path("tests/cudagraph/test_lanes.py")]
    with ThreadPoolExecutor(1 if bench.small else 6) as pool:
        list(pool.map(lambda path: _run_test_file(bench, path), files))


def _run_test_file(bench: Bench, path: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(path), "-q", "--tb=line"]
    command += ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=90"]
    environment = {**os.environ, "GRAFT_DEVICE": bench.device.kind}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
    )
    lines = done.stdout.strip().splitlines() or [""]
    failures = sum(int(count) for count in re.findall(r"(\d+) (?:failed|error)", lines[-1]))
    if not failures and done.returncode not in (0, 5):  # 5: no tests were collected
        failures = 1
    failed_tests = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    note = "; ".join([lines[-1], *failed_tests])
    note = note[:2000]
    bench.add(str(path), failures, "failed", (0, 0), note)


class Section(NamedTuple):
    """A section of the measurement.

    Attributes
    ----------
    measure
        Function that measures values and adds them to its `Bench`.
    limit_s
        Time limit in seconds.
    """

    measure: Callable[[Bench], None]
    limit_s: float


#: Sections by name in the order in which they run.
SECTIONS = {
    "ceilings": Section(measure_ceilings, 40),
    "gaps": Section(measure_gaps, 60),
    "hops": Section(measure_hops, 60),
    "linears": Section(measure_linears, 90),
    "cublas": Section(measure_cublas, 60),
    "attention": Section(measure_attention, 60),
    "sampling": Section(measure_sampling, 60),
    "rounds": Section(measure_rounds, 200),
    "suite": Section(run_tests, 600),
}
