"""The sections: each measures one thing and writes its figures down as they come."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
from graft.sampling.params import SamplingParams
from graft.sampling.sampler import RowMap, Sampler, output_ring
from graft.sampling.state import SlotState
from graft.tools.gpu_first.bench import LAUNCHES, LIMIT_S, Bench
from graft.tools.gpu_first.model import random_engine, round_parts

CLOCK = Path(__file__).parents[1] / "kernels" / "clock.cu"
ROW_READY = NUMBERS["ROW_READY"]
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
#: Of the read ceiling: the first kernel by rows, those planned by matrix at 8 rows or fewer.
FIRST_LINEAR = {1: (80.0, 88.0), 8: (55.0, 65.0)}
PLANNED_LINEAR = {
    "gate, up": (92.0, 100.0),
    "head": (92.0, 100.0),
    "qkv": (75.0, 85.0),
    "out": (75.0, 85.0),
}
#: Milliseconds of a target forward by rows: with the first kernels, and as planned.
PLANNED_FORWARD = {1: (3.7, 3.9), 4: (3.7, 3.9), 8: (3.8, 4.0), 32: (3.9, 4.3)}


def ceilings(b: Bench) -> None:
    """What memory and bus give."""
    b.add("read", b.read_ceiling() / 1e9, "GB/s", (4300, 4500))
    halves = b.random((2, 1 << (30 - 12 * b.small)))
    with b.timed() as lane:
        lane.copy(halves[0], halves[1])
    b.add("copy, bytes read and written", halves.nbytes / lane.seconds / 1e9, "GB/s", (4200, 4400))
    far = b.device.pinned((1 << (27 - 12 * b.small),), "uint8")
    with b.timed() as lane:
        b.read(lane, far, b.device.multiprocessor_count * 8)
    b.add("pinned memory read by a kernel", far.nbytes / lane.seconds / 1e9, "GB/s")
    masks = b.device.pinned((128, 4096), "int32")
    with b.timed() as lane:
        for _ in range(20):
            b.read(lane, masks, 128)
    b.add("128 mask rows of 16 KB read there", lane.seconds / 20 * 1e6, "us", (40, 100))


def gaps(b: Bench) -> None:
    """Between two nodes of a lane, with full and with programmatic edges."""
    count = 50 if b.small else 1000
    part = 1 << (22 - 10 * b.small)  # of 8 MB
    data = b.random((count // 2, part))
    ceiling = b.read_ceiling()
    for programmatic, predicted in ((False, (1.0, 1.4)), (True, (0.3, 0.7))):
        edges = "programmatic" if programmatic else "full"
        with b.attempt(f"{edges} edges"):
            with b.timed(programmatic) as lane:
                for _ in range(count):
                    lane.kernel(b.kernels["nothing"], 1, 32, [])
            b.add(f"empty nodes, {edges} edges", lane.seconds / count * 1e6, "us", predicted)
            with b.timed(programmatic) as lane:
                for i in range(count):
                    b.read(lane, data[i % (count // 2)], b.device.multiprocessor_count * 8)
            b.add(
                f"8-MB nodes beyond the read, {edges} edges",
                (lane.seconds / count - 2 * part / ceiling) * 1e6,
                "us",
                predicted,
            )


def hops(b: Bench) -> None:
    """Host work from the kernel before to the kernel behind, beside large products or alone."""
    kernels = ModelKernels(b.device)
    stamp = b.device.load(CLOCK)["stamp_ns"]
    width, replays = (128, 3) if b.small else (8192, 200)
    weight = b.random((4 * width, width))
    stamps = b.device.pinned((2,), "uint64")
    x, y = (b.device.zeros((32, n), "float32") for n in (width, 4 * width))
    free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value or 0
    for transport in ("host", "mailbox", "spinkernel"):
        for beside, priorities in ((False, True), (True, False), (True, True)):
            what = transport + (", beside products" if beside else ", alone")
            what += ", priorities" if beside and priorities else ""
            with b.attempt(what):
                graph = Graph(b.device, what)
                for _ in range(2 * beside):
                    kernels.linear(graph.lane("model"), x, weight, y)
                lane = graph.lane("grammar")
                first = highest_priority()
                lane.kernel(stamp, 1, 1, (stamps, 0), priority=first)
                getattr(lane, transport)(NativeWork(free, 0, name="free(NULL)"))
                lane.kernel(stamp, 1, 1, (stamps, 1), priority=first)
                run = graph.instantiate(priorities=priorities)
                times = list[int]()
                for _ in range(replays):
                    run.launch(b.stream)
                    run.synchronize(LIMIT_S)
                    times.append(int(stamps.array[1]) - int(stamps.array[0]))
                run.close()
                b.add(
                    what,
                    statistics.median(times) / 1e3,
                    "us",
                    note=f"99 %: {np.quantile(times, 0.99) / 1e3:.1f}",
                )


def matrices(b: Bench) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of an 8B Llama's products."""
    hidden = b.shape["hidden_size"]
    inner = b.shape["intermediate_size"]
    keys = 2 * b.shape["num_key_value_heads"] * b.shape["head_dim"]
    return {
        "qkv": (hidden + keys, hidden),
        "out": (hidden, hidden),
        "gate, up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (b.shape["vocab_size"], hidden),
    }


def copies(
    b: Bench, size: tuple[int, int], dtype: str = "bfloat16"
) -> tuple[list[DeviceArray], int]:
    """A matrix as often as caches ask for, and how many products make a good measurement."""
    nbytes = itemsize(dtype) * size[0] * size[1]
    weights = [b.random(size, 0.02, dtype) for _ in range(max(2, b.cached // nbytes + 1))]
    return weights, len(weights) if b.small else max(len(weights), int(8e9) // nbytes)


def linears(b: Bench) -> None:
    """graft's products, of weights of 16 bits and of 8; and with 8 outputs less, which tensor cores
    do not take."""
    read = b.read_ceiling()
    kernels = ModelKernels(b.device)
    for (name, (columns, inner)), kind in itertools.product(
        matrices(b).items(), ("bfloat16", E4M3)
    ):
        weights, count = copies(b, (columns, inner), kind)
        dtype = kernels.input_dtype(weights[0])
        for rows, less in itertools.product(
            ROWS[: 2 if b.small else None], (0, 8) if kind != E4M3 else (0,)
        ):
            y = b.device.zeros((rows, columns - less), "float32")
            x = b.device.zeros((rows, inner), "float32" if less else dtype)
            with b.attempt(f"{name} of {kind}, {rows} rows"):
                with b.timed() as lane:
                    for i in range(count):
                        kernels.linear(lane, x, weights[i % len(weights)][: columns - less], y)
                planned = PLANNED_LINEAR.get(name) if rows <= 8 and kind != E4M3 else None
                b.add(
                    f"{name}{' less 8' * (less > 0)} of {kind}, {rows} rows, {lane.kernels}",
                    100 * weights[0].nbytes * count / lane.seconds / read,
                    "% of read",
                    FIRST_LINEAR.get(rows) if lane.kernels == "linear_warp" else planned,
                    f"{lane.seconds / count * 1e6:.1f} us",
                )


def cublas(b: Bench) -> None:
    """The same products by cuBLAS, bfloat16 in and float32 out, through CuPy.

    CuPy captures no cuBLAS: the stream is held while the products are enqueued.
    """
    if b.device.kind == "soft":
        b.add("cublas.gemmEx", None, "", note="no CuPy on the soft device")
        return
    import cupy

    stream = cupy.cuda.ExternalStream(b.stream.handle)
    handle = cupy.cuda.get_cublas_handle()
    hold = b.device.load(CLOCK)["hold"]
    go = b.device.pinned((1,), "int32")
    begin, end = (b.device.event(name, timing=True) for name in ("begin", "end"))
    one = np.ones(1, np.float32)
    zero = np.zeros(1, np.float32)
    read = b.read_ceiling()
    for name, (columns, inner) in matrices(b).items():
        weights, count = copies(b, (columns, inner))
        for rows in ROWS:
            x = b.random((rows, inner))
            y = b.device.zeros((rows, columns), "float32")
            times = list[float]()
            for turn in range(1 + LAUNCHES):
                go.array[0] = turn == 0  # what is loaded at the first call waits for the device
                StreamLane(b.stream).kernel(hold, 1, 1, [go, 2_000_000_000])
                begin.record(b.stream)
                with stream:
                    for i in range(count):  # 14 is bfloat16, 0 float32, 68 its arithmetic
                        cupy.cuda.cublas.gemmEx(
                            handle,
                            1,
                            0,
                            columns,
                            rows,
                            inner,
                            one.ctypes.data,
                            weights[i % len(weights)].ptr,
                            14,
                            inner,
                            x.ptr,
                            14,
                            inner,
                            zero.ctypes.data,
                            y.ptr,
                            0,
                            columns,
                            68,
                            -1,
                        )
                end.record(b.stream)
                go.array[0] = 1
                end.synchronize(LIMIT_S)
                times.append(end.elapsed_s(begin))
            took = statistics.median(times[1:]) / count
            b.add(
                f"{name}, {rows} rows, gemmEx",
                100 * weights[0].nbytes / took / read,
                "% of read",
                note=f"{took * 1e6:.1f} us",
            )


def attention(b: Bench) -> None:
    """One layer's attention, four rows a request where there are as many."""
    heads = b.shape["num_attention_heads"]
    dim = b.shape["head_dim"]
    kv_heads = b.shape["num_key_value_heads"]
    kernels = ModelKernels(b.device)
    count_of_layers = b.shape["num_hidden_layers"]
    for length in (32, 64) if b.small else (256, 2048, 8192):
        kv = PagedKV(
            b.device,
            layers=count_of_layers,
            pages=8 * length // 16,
            page_size=16,
            kv_heads=kv_heads,
            head_dim=dim,
            dtype="bfloat16",
            slots=8,
            max_pages_per_slot=length // 16,
        )
        kv.k = b.random(kv.k.shape)
        kv.v = b.random(kv.v.shape)
        for slot in range(8):
            kv.allocate(slot, length)
            kv.set_table(StreamLane(b.stream), slot)
        for count in (1, 4, 32):
            slots = np.arange(count) // 4
            steps = np.arange(count) % 4
            ids = [
                b.device.from_host(a.astype(np.int32))
                for a in (slots, slots, length - min(count, 4) + steps)
            ]
            qkv = b.device.from_host(
                np.random.default_rng(0)
                .standard_normal((count, (heads + 2 * kv_heads) * dim))
                .astype(np.float32)
            )
            out = b.device.zeros((count, heads * dim), "float32")
            rows = Rows(ids[0], ids[1], ids[2], rows_per_slot=min(count, 4))
            with b.timed() as lane:
                for i in range(count_of_layers):
                    kernels.attention(lane, qkv, rows, kv, i, heads, out)
            took = lane.seconds / count_of_layers
            used = -(-count // 4) * length * kv_heads * dim * 4
            b.add(
                f"{length} positions, {count} rows, {lane.kernels}",
                took * 1e6,
                "us",
                None,
                f"{used / took / 1e9:.0f} GB/s of KV",
            )


def sampling(b: Bench) -> None:
    """A target's rows to tokens: a greedy batch, and one under top-k and top-p."""
    vocab = b.shape["vocab_size"]
    batch = 8
    drafts = 3
    state = SlotState(b.device, batch, vocab)
    replay = b.device.zeros((1,), "int32")
    exchange = Exchange(b.device, batch, drafts, vocab)
    exchange.masks[:] = -1
    exchange.stamps["state"] = ROW_READY
    exchange.stamps["epoch"] = 1
    exchange.stamps["position"] = 8 + np.arange(1 + drafts)
    exchange.copy_masks_to_device(StreamLane(b.stream), 0, 1 + drafts)
    sampler = Sampler(b.device, state, exchange, replay, token_limit=vocab, max_batch=batch)
    ring = output_ring(b.device, 2, batch, drafts)
    spread = np.random.default_rng(0)
    for name, params, planned in (
        ("greedy", SamplingParams(), (5, 7)),
        (
            "top-k 50, top-p 0.9",
            SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
            (20, 25),
        ),
    ):
        for slot in range(batch):
            state.join(
                StreamLane(b.stream), slot, params, position=8, last=1, epoch=1, limit=1 << 20
            )
        b.stream.synchronize(LIMIT_S)
        chain = state.to_host()  # of drafts, which are tested against masks of ones
        chain["drafts"][:, :drafts] = 1
        chain["q_kind"][:, :drafts] = 1
        chain["parent"][:, :drafts] = (0, 1, 2)
        chain["path"][:, :drafts] = (1, 3, 7)
        for size, width in ((1, 1), (8, 1), (8, 4)):
            chain["draft_len"] = width - 1
            state.copy_from(chain)
            saved = b.device.from_host(state.array.to_host())
            slots = np.arange(size, dtype=np.int32)
            at = np.arange(size * width, dtype=np.int32)
            rows = RowMap(
                *map(b.device.from_host, (slots, slots * width, at // width << 16 | at % width))
            )
            logits = b.device.from_host(
                2 * spread.standard_normal((size * width, vocab)).astype(np.float32)
            )
            count = 2 if b.small else 20
            with b.timed() as lane:
                for _ in range(count):
                    sampler.target(lane, logits, rows)
            usable = int((sampler.row_ok.to_host()[: size * width] == 1).sum())
            b.add(
                f"{name}, {size * width} rows, {lane.kernels}",
                lane.seconds / count * 1e6,
                "us",
                planned,
                f"{usable} rows usable",
            )
            with b.timed() as lane:
                for _ in range(count):
                    lane.copy(state.array, saved)
                    sampler.target(lane, logits, rows)
                    sampler.verify(lane, rows, ring)
            b.add(f"{name}, {size * width} rows, verified", lane.seconds / count * 1e6, "us")


def suite(b: Bench) -> None:
    """The tests on this device, a process per file: how many fail."""
    if not Path("tests/cudagraph").is_dir():
        b.add("suite", None, "", note="there is no folder tests here")
        return
    files: Iterable[Path] = [
        path
        for room in ("cudagraph", "sampling", "models", "grammar")
        for path in sorted(Path("tests", room).glob("test_*.py"))
    ]
    if b.small:
        files = [Path("tests/cudagraph/test_lanes.py")]

    def play(path: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(path),
            "-q",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "-o",
            "faulthandler_timeout=90",
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "GRAFT_DEVICE": b.device.kind},
        )
        said = done.stdout.strip().splitlines() or [""]
        failed = sum(int(n) for n in re.findall(r"(\d+) (?:failed|error)", said[-1]))
        wrong = [line for line in said if line.startswith(("FAILED", "ERROR"))]
        b.add(
            str(path),
            failed or float(done.returncode not in (0, 5)),
            "failed",
            (0, 0),
            "; ".join([said[-1], *wrong])[:2000],
        )

    with ThreadPoolExecutor(1 if b.small else 6) as pool:
        list(pool.map(play, files))


def rounds(b: Bench) -> None:
    """Whole rounds of an engine whose weights are random, by batch and drafts."""
    forward = {} if b.small else PLANNED_FORWARD
    for drafts in (0, 3):
        for programmatic in (False, True):
            what = f"{drafts} drafts" + programmatic * ", programmatic"
            with b.attempt(what), random_engine(b, drafts, programmatic) as engine:
                for batch in (1, 8):
                    for part, ms in round_parts(engine, batch, 8 if b.small else 48).items():
                        predicted = forward.get(batch * (drafts + 1))
                        b.add(
                            f"batch {batch}, {what}: {part}",
                            ms,
                            "ms",
                            predicted if part == "target forward" else None,
                        )


#: By name, in order: what to run, and seconds that it may take.
SECTIONS = {
    "ceilings": (ceilings, 40),
    "gaps": (gaps, 60),
    "hops": (hops, 60),
    "linears": (linears, 90),
    "cublas": (cublas, 60),
    "attention": (attention, 60),
    "sampling": (sampling, 60),
    "rounds": (rounds, 200),
    "suite": (suite, 600),
}
