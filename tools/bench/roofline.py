"""Estimates of the time of a forward pass of an 8B Llama in bfloat16 on an H200.

    python -m graft.tools.bench.roofline

A launch uses several resources, which `RATES` lists. The time for which the launch keeps a resource
busy is its work divided by the rate of the resource. The estimated time of the launch is a norm of
these times: it is close to the longest one if the others are much shorter, and greater if several
resources are nearly saturated. To this the estimate adds latencies that no other work hides. While
a product waits for the previous kernel, it already loads its first weights.

The launch configurations come from the functions that the kernels are launched with, and the
numbers of instructions from machine code for sm_90 (``tests/tools/test_roofline.py``) or, without
copies of registers, from executed PTX (``tests/models/test_attention_counts.py``). The bytes that
products load and store are counted on PTX too (``tests/models/test_product_counts.py``). The
estimates have not been compared with a GPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from graft.models.llm.kernels.loader import ceil_div
from graft.models.llm.kernels.tensor_cores import MULTIPROCESSORS, MmaShape, mma_shape
from graft.tools.console import table

#: Memory bandwidths of an H200 in bytes per second: of the specification, and of a plain copy.
NOMINAL_BANDWIDTH = 4.8e12
READ_BANDWIDTH = 4.3e12
#: Clock in Hz. An H200 may run up to 13 % faster.
CLOCK = 1.755e9
_CYCLES = MULTIPROCESSORS * CLOCK  # cycles of all multiprocessors per second
#: Work per second of each resource of the GPU: bytes read from memory, bytes through the L2 cache,
#: bytes through L1 caches and shared memory, instructions of warps, and m16n8k16 instructions. The
#: rates of the L2 cache and of ``mma.sync`` are published measurements.
RATES = {
    "memory": READ_BANDWIDTH,
    "L2": 5.5e12,
    "L1": 128 * _CYCLES,
    "issue": 4 * _CYCLES,
    "mma": 6.0e14 / 4096,
}
#: Exponent of the norm of the resources' times. Two equal times make an estimate of 1.12 times one.
NORM = 6
#: Seconds between two kernels with a programmatic edge, and of a round trip to the L2 cache.
HOP_S = 0.7e-6
ROUND_TRIP_S = 0.3e-6
#: Seconds of an attention launch besides its main loop, and of the other nodes of a round.
ATTENTION_S = 5e-6
OTHER_NODES_S = 12 * 2.5e-6

#: Outputs and inputs of the matrices.
LAYER_MATRICES = {
    "qkv": (6144, 4096),
    "attention out": (4096, 4096),
    "gate, up": (28672, 4096),
    "down": (4096, 14336),
}
HEAD = {"lm head": (128256, 4096)}
LAYERS = 32
HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
#: Pairs of outputs of a thread whose inputs the epilogue of linear_many loads together.
EPILOGUE_BATCH = 16
_PARTS = 4  # partial sums of an output of a product
# Bytes of sums of squares that a folded norm reads per element of an input row.
_SQUARES_BYTES = {"linear_few": 4 / 16, "linear_many": 4 / 64}


@dataclass(frozen=True)
class _Tile:
    """Properties of the tiles of a product that have a certain number of rows.

    Attributes
    ----------
    instructions_per_mma
        Instructions of a warp in the main loop per mma instruction.
    warp_rows, warp_columns
        Groups of eight rows and groups of 16 columns of a warp.
    early_bytes
        Bytes of weights that a block loads before it waits for the previous kernel.
    """

    instructions_per_mma: float
    warp_rows: int
    warp_columns: int
    early_bytes: int


#: Tiles by numbers of rows and columns. Tiles of up to 16 rows belong to linear_few, the others to
#: linear_many.
TILES = {
    (8, 16): _Tile(255 / 24, 1, 1, 32 << 10),
    (16, 32): _Tile(257 / 32, 2, 1, 32 << 10),
    (32, 128): _Tile(230 / 16, 2, 2, 32 << 10),
    (64, 128): _Tile(260 / 32, 4, 2, 48 << 10),
    (64, 256): _Tile(380 / 64, 4, 4, 96 << 10),
    (128, 128): _Tile(364 / 64, 4, 4, 32 << 10),
    (256, 128): _Tile(247 / 64, 8, 4, 24 << 10),
}


@dataclass(frozen=True)
class _Epilogue:
    """Loads and stores of the epilogue of a product, which is the code that stores its results.

    Attributes
    ----------
    output_bytes
        Bytes per output that are stored and loaded, without partial sums.
    loads
        Loads of a batch of outputs, each of which waits for the one before.
    has_norm
        Whether the sums of the squares of the input rows are loaded, for a folded norm.
    """

    output_bytes: float
    loads: int = 0
    has_norm: bool = False


#: Of six outputs of qkv, four are queries, which are stored as 32-bit floats, and two are keys and
#: values, which are stored as 16-bit floats. A pair of queries or keys is rotated by a sine and a
#: cosine. Attention out and down add a residual of 32-bit floats, and store the result also as
#: 16-bit inputs of the next product.
EPILOGUES = {
    "qkv": _Epilogue((4 * 4 + 2 * 2 + 5 * 4) / 6, loads=1, has_norm=True),
    "attention out": _Epilogue(4 + 4 + 2, loads=1),
    "gate, up": _Epilogue(2 / 2, has_norm=True),
    "down": _Epilogue(4 + 4 + 2, loads=1),
    "lm head": _Epilogue(4, has_norm=True),
}


@dataclass(frozen=True)
class _AttentionTile:
    """Work of an attention kernel on one query tile, which has 16 queries.

    Attributes
    ----------
    step, step_l1
        Instructions per step of 16 positions, and bytes that they transfer through the L1 cache
        and shared memory.
    part, part_l1
        The same for the work per part of the positions (attention_step.cuh) besides its steps,
        mainly for adding the results of the part's four quarters.
    """

    step: float
    step_l1: int
    part: float
    part_l1: int


#: Work of attention by the number of query tiles that share keys and values: the kernels
#: attention_split and attention_prompt. The values are fitted: with them, the work of several
#: launches equals the executed work within 5 %. Instructions of PTX that copy registers are not
#: counted, because most of them are not in the machine code.
ATTENTION_TILES = {
    1: _AttentionTile(531, 17_400, 460, 50_200),
    4: _AttentionTile(454, 10_240, 1236, 59_000),
}
ATTENTION_STEP_MMA = 64


@dataclass(frozen=True)
class Launch:
    """A kernel that is launched `count` times per forward pass, with its work by resource.

    The work does not contain the `early_bytes`, which the launch loads while it waits for the
    previous kernel.
    """

    name: str
    count: int
    work: dict[str, float]
    latency_s: float
    early_bytes: float = 0

    @property
    def seconds(self) -> float:
        """Seconds of all launches."""
        busy = [work / RATES[name] for name, work in self.work.items()]
        return self.count * (sum(s**NORM for s in busy) ** (1 / NORM) + self.latency_s)

    @property
    def bound(self) -> str:
        """Name of the resource that is busy for the longest time."""
        return max(self.work, key=lambda name: self.work[name] / RATES[name])


def product_shape(rows: int, columns: int, inner: int) -> MmaShape:
    """Return the launch configuration of a product with 16-bit inputs."""
    return mma_shape(rows, columns, inner=inner, allow_tall=True)


def tile_size(shape: MmaShape) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tile."""
    if shape.kernel == "linear_few":
        return 8 * shape.defines["TILES"], 16 * shape.defines["TILES"]
    return shape.defines["ROW_BLOCK"], shape.defines["OUTPUTS"]


def product(name: str, rows: int, columns: int, inner: int, count: int = 1) -> Launch:
    """Return the work of the products of `rows` rows with a matrix."""
    shape = product_shape(rows, columns, inner)
    block, outputs = tile_size(shape)
    tile = TILES[block, outputs]
    epilogue = EPILOGUES[name]
    weights, x = 2 * columns * inner, 2 * rows * inner
    square_sums = epilogue.has_norm * rows * inner * _SQUARES_BYTES[shape.kernel]
    blocks = math.prod(shape.grid)
    concurrent = MULTIPROCESSORS * shape.blocks_per_multiprocessor
    filled = blocks / (ceil_div(blocks, MULTIPROCESSORS) * MULTIPROCESSORS)
    latency = HOP_S + ROUND_TRIP_S
    l1_per_mma = 512 / tile.warp_rows + 256 / tile.warp_columns
    if shape.kernel == "linear_few":
        row_blocks = 1
        # The blocks on a multiprocessor read the same rows of x through one L1 cache.
        readers = blocks // shape.blocks_per_multiprocessor
        l2 = weights + max(readers, min(blocks, MULTIPROCESSORS)) * (x + square_sums)
    else:
        splits, row_blocks, column_blocks = shape.grid
        l1_per_mma += 4096 * (block + outputs) / (block * outputs)  # copies to shared memory
        l2 = row_blocks * weights + column_blocks * (x + splits * square_sums)
        loads = epilogue.loads
        if splits > 1:
            # With split K, the first block of a tile has a total of its partial sums, and the other
            # blocks have several partial sums. One of these sums stays in the block that adds them.
            # The others are stored and loaded.
            moved = (_PARTS - _PARTS // splits) * block * outputs * 4
            l2 += 2 * moved * row_blocks * column_blocks
            blocks_each = ceil_div(blocks, MULTIPROCESSORS)
            # A block stores its sums, counts itself, and polls the counters of other blocks.
            latency += (blocks_each * moved / splits / 64) / CLOCK + 3 * ROUND_TRIP_S
            loads = max(loads, 1)
        # A tile of 256 rows must load the positions of its rows before the sines and cosines, which
        # is one more load that waits for another one. With split K, the positions leave fewer
        # registers for other inputs.
        has_positions = name == "qkv" and block == 256
        batch = EPILOGUE_BATCH // (2 if has_positions and splits > 1 else 1)
        batches = ceil_div(block * outputs, 2 * 256 * batch * splits)
        loads += has_positions
        waves = 1 if shape.blocks_per_multiprocessor > 1 else shape.waves
        latency += batches * loads * waves * ROUND_TRIP_S
    early = min(min(blocks, concurrent) * tile.early_bytes, HOP_S * READ_BANDWIDTH)
    mma = columns * inner * block * row_blocks / (16 * 8 * 16)
    issue = mma * tile.instructions_per_mma
    l1 = mma * l1_per_mma
    if block == 256:
        # A thread adds 128 sums per part to totals in shared memory, with about nine instructions.
        parts = blocks * _PARTS / splits
        issue += parts * 8 * 128 * 9
        l1 += parts * 2 * block * 128 * 4
    on_chip = {"L1": l1 / filled, "issue": issue / filled, "mma": mma / filled}
    l2 += epilogue.output_bytes * rows * columns
    work: dict[str, float] = {"memory": weights - early, "L2": l2 - early, **on_chip}
    return Launch(name, count, work, latency, early)


def sharing_query_tiles(rows_per_slot: int) -> int:
    """Return the number of query tiles that share keys and values.

    A query tile has 16 queries of one KV head.
    """
    return 4 if rows_per_slot >= 64 else 1


def attention_tile_rows(rows_per_slot: int) -> int:
    """Return the number of rows of a slot that read keys and values together."""
    return sharing_query_tiles(rows_per_slot) * 16 // (HEADS // KV_HEADS)


def attention(contexts: Sequence[int], rows: int) -> Launch:
    """Return the work of attention for one request per context length, with `rows` rows each.

    Each tile of rows reads keys and values of its request through the L2 cache. A plan divides the
    work evenly among the blocks.
    """
    tiles = ceil_div(rows, attention_tile_rows(rows))
    query_tiles = KV_HEADS * ceil_div(rows * HEADS // KV_HEADS, 16)
    position_bytes = 2 * 2 * KV_HEADS * HEAD_DIM
    steps = sum(query_tiles * ceil_div(context, 16) for context in contexts)
    parts = sum(query_tiles * min(ceil_div(context, 64), 32) for context in contexts)
    tile = ATTENTION_TILES[sharing_query_tiles(rows)]
    work: dict[str, float] = {
        "memory": sum(contexts) * position_bytes,
        "L2": tiles * sum(contexts) * position_bytes,
        "L1": steps * tile.step_l1 + parts * tile.part_l1,
        "issue": steps * tile.step + parts * tile.part,
        "mma": steps * ATTENTION_STEP_MMA,
    }
    return Launch("attention", LAYERS, work, HOP_S + ATTENTION_S)


def forward(contexts: Sequence[int], rows: int, *, with_head: bool = True) -> list[Launch]:
    """Return the launches of a pass over one request per context length, with `rows` rows each."""
    count = rows * len(contexts)
    launches = [product(name, count, *size, LAYERS) for name, size in LAYER_MATRICES.items()]
    launches.append(attention(contexts, rows))
    if with_head:
        launches += [product(name, count, *size) for name, size in HEAD.items()]
    return launches


def forward_seconds(launches: Sequence[Launch]) -> float:
    """Return the estimated seconds of a forward pass with the other nodes of a round."""
    return sum(launch.seconds for launch in launches) + OTHER_NODES_S


def read_bytes(launches: Sequence[Launch]) -> float:
    """Return the bytes of weights, keys and values, which are read from memory at least once."""
    return sum(launch.count * (launch.work["memory"] + launch.early_bytes) for launch in launches)


def operations(context: int, rows: int) -> float:
    """Return the operations on `rows` rows of a prompt after `context` tokens, without LM head."""
    weights = LAYERS * sum(columns * inner for columns, inner in LAYER_MATRICES.values())
    return rows * (2 * weights + 4 * LAYERS * HEADS * HEAD_DIM * context)


#: Cases of decoding by name: the context lengths of the requests, and the rows per request.
DECODE_CASES = {
    **{f"1 x {rows} rows, 1k": ([1024], rows) for rows in (1, 4, 8, 16, 32, 64)},
    "1 x 8 rows, 8k": ([8192], 8),
    "1 x 32 rows, 32k": ([32768], 32),
    "8 x 4 rows, 8k": ([8192] * 8, 4),
    "64 x 1 row, 1k": ([1024] * 64, 1),
    "32k among 63 x 1k": ([32768] + [1024] * 63, 1),
}
#: Contexts and rows of prefill chunks.
PREFILL_CASES = [(512, 256), (4096, 256), (32768, 256), (512, 1024), (4096, 1024), (32768, 1024)]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def decode_table() -> str:
    """Return the table of decoding: times, and shares of the time to read all data once."""
    rows: list[tuple[object, ...]] = [
        ("decoding", "products, ms", "attention, ms", "total, ms", "of 4.3 TB/s", "of 4.8 TB/s")
    ]
    for name, (contexts, rows_each) in DECODE_CASES.items():
        launches = forward(contexts, rows_each)
        total = forward_seconds(launches)
        of_attention = sum(launch.seconds for launch in launches if launch.name == "attention")
        products = total - of_attention - OTHER_NODES_S
        ideal = read_bytes(launches)
        shares = [f"{ideal / rate / total:.0%}" for rate in (READ_BANDWIDTH, NOMINAL_BANDWIDTH)]
        rows.append((name, *map(_milliseconds, (products, of_attention, total)), *shares))
    return table(rows)


def prefill_table() -> str:
    """Return the table of prefill chunks, which have no LM head."""
    rows: list[tuple[object, ...]] = [
        ("prefill", "products, ms", "attention, ms", "total, ms", "TFLOP/s")
    ]
    for context, count in PREFILL_CASES:
        launches = forward([context], count, with_head=False)
        total = forward_seconds(launches)
        of_attention = sum(launch.seconds for launch in launches if launch.name == "attention")
        times = (total - of_attention - OTHER_NODES_S, of_attention, total)
        rate = operations(context, count) / total / 1e12
        name = f"{count} rows after {context}"
        rows.append((name, *map(_milliseconds, times), f"{rate:.0f}"))
    return table(rows)


def launch_table() -> str:
    """Return the table of single launches and the resource that limits each."""
    rows: list[tuple[object, ...]] = [("launch", "rows", "tile", "grid", "us", "bound")]
    for count in (1, 8, 16, 32, 64, 256, 1024):
        for name, size in {**LAYER_MATRICES, **HEAD}.items():
            shape = product_shape(count, *size)
            launch = product(name, count, *size)
            microseconds = f"{launch.seconds * 1e6:.1f}"
            grid = " x ".join(map(str, shape.grid))
            tile = " x ".join(map(str, tile_size(shape)))
            rows.append((name, count, tile, grid, microseconds, launch.bound))
    return table(rows)


def targets_table() -> str:
    """Return the targets of the estimates, and which of them are reached."""
    rows: list[tuple[object, ...]] = [("target", "estimate", "limit", "reached")]
    for name in ("8 x 4 rows, 8k", "64 x 1 row, 1k"):
        launches = forward(*DECODE_CASES[name])
        share = read_bytes(launches) / READ_BANDWIDTH / forward_seconds(launches)
        is_reached = "yes" if share >= 0.8 else "no"
        rows.append((f"{name}: share of 4.3 TB/s", f"{share:.0%}", ">= 80%", is_reached))
    seconds = attention(*DECODE_CASES["32k among 63 x 1k"]).seconds
    is_reached = "yes" if seconds <= 3.5e-3 else "no"
    rows.append(("32k among 63 x 1k: attention, ms", _milliseconds(seconds), "<= 3.5", is_reached))
    for count in (256, 1024):
        launches = forward([4096], count, with_head=False)
        rate = operations(4096, count) / forward_seconds(launches) / 1e12
        is_reached = "yes" if rate >= 320 else "no"
        name = f"prefill of {count} rows after 4096: TFLOP/s"
        rows.append((name, f"{rate:.0f}", ">= 320", is_reached))
    return table(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.bench.roofline", description=(__doc__ or "").splitlines()[0]
    )
    parser.parse_args(arguments)
    print("\n\n".join([launch_table(), decode_table(), prefill_table(), targets_table()]))


if __name__ == "__main__":
    main()
