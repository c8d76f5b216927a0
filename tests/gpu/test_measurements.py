"""Measurements of a GPU: bandwidths, graph nodes, products, attention, sampling, rounds.

Values that were measured with small sizes say nothing about a GPU. The predictions follow from the
machine code of the kernels and the data sheet of an H200. Shares refer to the read bandwidth, which
is measured with a kernel that only reads memory.
"""

import functools
import time

import numpy as np
import pytest
from gpu_util import LIMIT_S, PROBE, random_array, timed_graph
from random_model import (
    BATCH,
    FULL,
    ROWS,
    SMALL,
    context_rows,
    random_engine,
    random_kv,
    random_llama,
)
from sampling_round import TableRound, even_rows

from graft.cudagraph import Graph, StreamLane
from graft.cudagraph.driver.dtypes import E4M3
from graft.cudagraph.graph.graph import supports_programmatic_edges
from graft.grammar import GrammarSpec
from graft.models.llm.kernels.library import ModelKernels
from graft.models.request import Request
from graft.sampling.params import SamplingParams
from graft.sampling.state import SlotRequest

EDGES = ("full", "programmatic")
#: Predicted milliseconds of a forward pass of the 8B model on an H200, by number of rows.
FORWARD_MS = {
    1: (4.0, 4.6),
    4: (4.0, 4.6),
    8: (4.0, 4.6),
    32: (4.2, 6.0),
    64: (4.8, 6.7),
    256: (10.0, 15.5),
}
#: Predicted share of the read bandwidth of a product of at most 8 rows with 16-bit weights.
PRODUCT_SHARE = {"gate, up": (92, 100), "head": (92, 100), "qkv": (75, 85), "out": (75, 85)}


@pytest.fixture(scope="module")
def size(small):
    return SMALL if small else FULL


@pytest.fixture(scope="module")
def read(device):
    """Return a function that adds a kernel which reads an array."""
    sink = device.zeros((1,), "uint32")
    kernel = device.load(PROBE)["read_words"]

    def add(lane, data, blocks):
        lane.kernel(kernel, blocks, 256, [data, data.nbytes // 16, sink])

    return add


@pytest.fixture(scope="module")
def bandwidth(device, read, small):
    """Read bandwidth in bytes per second, with the best of several grid sizes."""
    data = random_array(device, (1 << (19 if small else 31),))
    stream = device.stream("bandwidth")
    best = 0.0
    for blocks_per_multiprocessor in (4, 8, 16):
        with timed_graph(device, stream) as timed:
            read(timed.lane, data, blocks_per_multiprocessor * device.multiprocessor_count)
        best = max(best, data.nbytes / timed.seconds)
    return best


def matrices(size):
    """Return output and input features of each weight matrix."""
    hidden, inner = size["hidden_size"], size["intermediate_size"]
    kv = 2 * size["num_key_value_heads"] * size["head_dim"]
    return {
        "qkv": (hidden + kv, hidden),
        "out": (hidden, hidden),
        "gate, up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (size["vocab_size"], hidden),
    }


# Memory and graph nodes ---------------------------------------------------------------------------


def test_memory(device, stream, read, bandwidth, small, figure):
    figure("read", bandwidth / 1e9, "GB/s", (4300, 4500))
    halves = random_array(device, (2, 1 << (18 if small else 30)))
    with timed_graph(device, stream) as timed:
        timed.lane.copy(halves[0], halves[1])
    figure("copy, read and written", halves.nbytes / timed.seconds / 1e9, "GB/s", (4200, 4400))
    pinned = device.pinned((1 << (15 if small else 27),), "uint8")
    with timed_graph(device, stream) as timed:
        read(timed.lane, pinned, 8 * device.multiprocessor_count)
    figure("pinned memory read by a kernel", pinned.nbytes / timed.seconds / 1e9, "GB/s")


@pytest.mark.parametrize("edges", EDGES)
def test_gaps_between_nodes(device, stream, read, bandwidth, small, figure, edges):
    if edges == "programmatic" and not supports_programmatic_edges(device):
        pytest.skip("the device has no programmatic edges")
    predicted = (0.3, 0.7) if edges == "programmatic" else (1.0, 1.4)
    count = 50 if small else 1000
    nothing = device.load(PROBE)["nothing"]
    with timed_graph(device, stream, edges == "programmatic") as timed:
        for _ in range(count):
            timed.lane.kernel(nothing, 1, 32, [])
    figure(f"empty nodes, {edges} edges", 1e6 * timed.seconds / count, "us", predicted)
    data = random_array(device, (count // 2, 1 << (12 if small else 22)))  # 8 MB per row
    with timed_graph(device, stream, edges == "programmatic") as timed:
        for i in range(count):
            read(timed.lane, data[i % len(data)], 8 * device.multiprocessor_count)
    gap = timed.seconds / count - 2 * data.shape[1] / bandwidth
    figure(f"8-MB nodes beyond the read, {edges} edges", 1e6 * gap, "us", predicted)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["host", "mailbox", "spinkernel"])
def test_host_step_beside_products(device, stream, small, figure, transport):
    """A host step between two kernels, while products run on another lane of the graph."""
    kernels = ModelKernels(device)
    width = 128 if small else 8192
    weight = random_array(device, (4 * width, width))
    x = random_array(device, (32, width), kernels.products.input_dtype(weight))
    y = device.zeros((32, 4 * width), "float32")
    graph = Graph(device, transport)
    for _ in range(2):
        kernels.products.linear(graph.lane("model"), x, weight, y)
    times = []
    getattr(graph.lane("grammar"), transport)(lambda: times.append(time.perf_counter()))
    executable = graph.instantiate()
    delays = []
    for _ in range(3 if small else 50):
        start = time.perf_counter()
        executable.launch(stream)
        executable.synchronize(LIMIT_S)
        delays.append(times[-1] - start)
    p50, p99 = 1e6 * np.quantile(delays, [0.5, 0.99])
    figure(f"{transport}: launch to host step beside products", p50, "us", note=f"p99 {p99:.0f}")


# Model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(device, small):
    """Return a function that returns copies of a matrix which do not fit into the L2 cache."""
    cache_bytes = 0 if small else 4 * device.attribute("L2_CACHE_SIZE")

    @functools.lru_cache(maxsize=1)
    def copies(shape, dtype):
        nbytes = shape[0] * shape[1] * (1 if dtype == E4M3 else 2)
        return [random_array(device, shape, dtype, 0.02) for _ in range(2 + cache_bytes // nbytes)]

    return copies


def repeated(copies, small):
    """Return the copies of a matrix in rotation, as many as take a millisecond to read."""
    count = 0 if small else int(4e9) // copies[0].nbytes
    return [copies[i % len(copies)] for i in range(max(len(copies), count))]


def time_products(device, stream, kernels, copies, rows):
    """Return the seconds of a product of `rows` rows, with each of the matrices `copies`."""
    x = random_array(device, (rows, copies[0].shape[1]), kernels.products.input_dtype(copies[0]))
    y = device.zeros((rows, copies[0].shape[0]), "float32")
    with timed_graph(device, stream) as timed:
        for weight in copies:
            kernels.products.linear(timed.lane, x, weight, y)
    return timed.seconds / len(copies)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param(E4M3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", matrices(FULL))
def test_products(device, stream, size, bandwidth, weights, small, figure, name, dtype):
    kernels = ModelKernels(device)
    copies = weights(matrices(size)[name], dtype)
    for rows in ROWS[:2] if small else ROWS:
        seconds = time_products(device, stream, kernels, repeated(copies, small), rows)
        predicted = PRODUCT_SHARE.get(name) if rows <= 8 and dtype != E4M3 else None
        share = 100 * copies[0].nbytes / seconds / bandwidth
        note = f"{1e6 * seconds:.1f} us"
        figure(f"{name} of {dtype}, {rows} rows", share, "% of read", predicted, note)


@pytest.mark.full
@pytest.mark.parametrize("length", [(256, 32), (2048, 64), (8192, 96)], ids=str)
def test_attention(device, stream, size, bandwidth, small, figure, length):
    kernels = ModelKernels(device)
    length = length[small]
    kv = random_kv(device, size, length)
    kv.k, kv.v = (random_array(device, kv.k.shape) for _ in range(2))
    for slot in range(BATCH):
        kv.allocate(slot, length)
        kv.set_table(StreamLane(stream), slot)
    heads = size["num_attention_heads"]
    for count in (1, 4, 32):
        rows = context_rows(device, length, count)
        qkv = random_array(device, (count, (heads + 2 * kv.kv_heads) * kv.head_dim), "float32")
        out = device.zeros((count, heads * kv.head_dim), "float32")
        with timed_graph(device, stream) as timed:
            plan = kernels.attention.plan(timed.lane, rows, kv, heads)
            for layer in range(kv.layers):
                kernels.attention.attend(timed.lane, qkv, plan, kv, layer, out)
        seconds = timed.seconds / kv.layers
        nbytes = -(-count // 4) * length * kv.kv_heads * kv.head_dim * 4
        share = 100 * nbytes / seconds / bandwidth
        predicted = (75, 95) if nbytes >= 64 << 20 else None  # less is bound by latency
        note = f"{1e6 * seconds:.1f} us"
        figure(f"attention, {length} positions, {count} rows", share, "% of read", predicted, note)


@pytest.mark.parametrize("name", ["greedy", "top-k 50, top-p 0.9"])
def test_sampling(device, stream, size, small, figure, name):
    """Sampling of the target's logits and verification, with all tokens legal."""
    params = SamplingParams()
    if name != "greedy":
        params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
    vocab = size["vocab_size"]
    for slots in (1, BATCH):
        table = TableRound(device, stream, slots=slots, vocab=vocab)
        request = SlotRequest(params=params, position=8, last=1, epoch=1, limit=1 << 20)
        for slot in range(slots):
            table.state.join(table.lane, slot, request)
        rows = even_rows(device, table.row_slot, 1)
        logits = random_array(device, (slots, vocab), "float32", 2.0)
        count = 2 if small else 20
        with timed_graph(device, stream) as timed:
            for _ in range(count):
                table.sampler.target.sample(timed.lane, logits, rows)
        predicted = (5, 20) if name == "greedy" else (20, 60)
        seconds = timed.seconds / count
        figure(f"sampling of {slots} rows, {name}", 1e6 * seconds, "us", predicted)


@pytest.fixture(scope="module")
def llama(device, size):
    """A Llama with random weights, and pages for all slots."""
    model = random_llama(device, size)
    stream = device.stream("pages")
    for slot in range(BATCH):
        model.kv.allocate(slot, 2048)
        model.kv.set_table(StreamLane(stream), slot)
    stream.synchronize(LIMIT_S)
    return model


@pytest.mark.full
@pytest.mark.parametrize("edges", EDGES)
def test_forward(device, stream, size, llama, bandwidth, small, figure, edges):
    """Forward passes, with the residuals, norms, RoPE and gates of the model."""
    if edges == "programmatic" and not supports_programmatic_edges(device):
        pytest.skip("the device has no programmatic edges")
    sizes = {name: rows * columns for name, (rows, columns) in matrices(size).items()}
    head = sizes.pop("head")
    nbytes = 2 * (size["num_hidden_layers"] * sum(sizes.values()) + head)
    for count in ROWS[:3] if small else ROWS:
        rows = context_rows(device, 64 if small else 256, count)
        logits = device.empty((count, size["vocab_size"]), "float32")
        with timed_graph(device, stream, edges == "programmatic") as timed:
            llama.forward(timed.lane, rows, None, logits)
        note = f"{100 * nbytes / timed.seconds / bandwidth:.0f} % of read, "
        note += f"{nbytes * count / timed.seconds / 1e12:.0f} TFLOP/s"
        milliseconds = 1e3 * timed.seconds
        figure(f"{count} rows, {edges} edges", milliseconds, "ms", FORWARD_MS.get(count), note)


# Engine -------------------------------------------------------------------------------------------


def round_parts(engine, batch, tokens, grammar):
    """Return the mean milliseconds of a round and of each of its parts."""
    requests = [
        Request(tokens=[5 + i] * 100, grammar=grammar, max_tokens=tokens) for i in range(batch)
    ]
    engine.generate(requests)  # warm-up
    engine.reset_stats()
    engine.generate(requests)
    stats = engine.stats
    parts = {"round": stats.round_ns, **stats.part_ns}
    return {part: ns / stats.rounds / 1e6 for part, ns in parts.items()}


@pytest.mark.full
@pytest.mark.parametrize(("drafts", "edges"), [(0, "full"), (3, "full"), (3, "programmatic")])
def test_rounds(device, size, small, figure, drafts, edges):
    """Prefill and decoding rounds, without and with a grammar."""
    if edges == "programmatic" and not supports_programmatic_edges(device):
        pytest.skip("the device has no programmatic edges")
    tokens = 8 if small else 40
    with random_engine(size, drafts, edges == "programmatic") as engine:
        length = 64 if small else 2048
        start = time.perf_counter()
        engine.generate([Request(tokens=[5] * length, max_tokens=1)])
        figure(f"prefill of {length} tokens", 1e3 * (time.perf_counter() - start), "ms")
        for batch in (1, BATCH):
            name = f"batch {batch}, {drafts} drafts, {edges} edges"
            plain = round_parts(engine, batch, tokens, None)
            for part, milliseconds in plain.items():
                predicted = FORWARD_MS.get(batch * (drafts + 1))
                predicted = predicted if part == "target forward" else None
                figure(f"{name}: {part}", milliseconds, "ms", predicted)
            if batch == 1 and not drafts:
                figure(f"{name}: tokens", 1e3 / plain["round"], "tokens/s", (240, 318))
        pytest.importorskip("llguidance")
        guided = round_parts(engine, BATCH, tokens, GrammarSpec.regex("[a-z ]{400,}"))
        ratio = guided["round"] / plain["round"]
        figure(f"{name}: guided over plain round", ratio, "times", (0.99, 1.01))


def test_cublas(device, stream, size, bandwidth, weights, small, figure):
    """The products of `test_products` with cuBLAS, called through CuPy."""
    if device.kind == "soft":
        pytest.skip("CuPy needs a GPU")
    cupy = pytest.importorskip("cupy")
    cublas = cupy.cuda.cublas
    float32, bfloat16, compute = 0, 14, 68  # CUDA_R_32F, CUDA_R_16BF, CUBLAS_COMPUTE_32F
    alpha, beta = np.ones(1, np.float32), np.zeros(1, np.float32)
    handle = cupy.cuda.get_cublas_handle()
    for name, (columns, inner) in matrices(size).items():
        copies = repeated(weights((columns, inner), "bfloat16"), small)
        for rows in ROWS:
            x = random_array(device, (rows, inner))
            y = device.zeros((rows, columns), "float32")
            times = []
            for _ in range(3):
                begin, end = (device.event("time", timing=True) for _ in range(2))
                begin.record(stream)
                with cupy.cuda.ExternalStream(stream.handle):
                    for weight in copies:
                        operands = (weight.ptr, bfloat16, inner, x.ptr, bfloat16, inner)
                        result = (beta.ctypes.data, y.ptr, float32, columns, compute, -1)
                        shape = (1, 0, columns, rows, inner, alpha.ctypes.data)
                        cublas.gemmEx(handle, *shape, *operands, *result)
                end.record(stream)
                end.synchronize(LIMIT_S)
                times.append(end.elapsed_s(begin) / len(copies))
            share = 100 * copies[0].nbytes / min(times) / bandwidth
            note = f"{1e6 * min(times):.1f} us"
            figure(f"{name}, {rows} rows, cuBLAS", share, "% of read", note=note)
