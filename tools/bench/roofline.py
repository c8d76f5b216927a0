"""Roofline estimates of the linear layers of an 8B Llama on an H200.

    python -m graft.tools.bench.roofline

A product multiplies the rows of an activation matrix by a weight matrix. Its estimated time is the
maximum of four times, plus a latency. The four times are the time to read the weights from memory,
the time of the traffic through the L2 cache, the time of the accesses to the L1 caches, which also
hold the shared memory, and the time of the MMA instructions on the tensor cores. The last two are
longer if the thread blocks fill only a part of the last wave; a wave is the set of blocks that run
at the same time.

The latency is the time during which no MMA instruction of the block can run. It consists of round
trips to the L2 cache that depend on each other, and of transfers of sums. The machine code
determines the number of round trips, and ``tests/models/test_machine_code.py`` checks it:

* Prologue: one round trip for the first rows. Except with tiles of 256 rows, the first weights are
  loaded before the previous kernel has ended.
* Epilogue of ``linear_few``: none, because its inputs are loaded before the end of the main loop.
* Epilogue of ``linear_many``: one round trip for each batch of pairs of outputs whose inputs are
  loaded together. Rotations depend on positions, which tiles of 256 rows load in another round
  trip. Without K splits the sums are in shared memory; then only residuals and rotations take
  round trips. With K splits two more: the partial sums must be visible before the counter of
  arrived blocks is read.
* Transfers: with K splits the last block of a tile loads all its partial sums. Blocks with 256 rows
  add the parts of a sum in shared memory.

The L2 traffic contains the weights and the activation rows, once per thread block that reads them.
Two neighbouring thread blocks of the kernel `linear_few` read the same activation rows through one
L1 cache, so these rows count once for both blocks. If a product is split along its inner dimension,
the partial sums are written as well.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from graft.models.llm.kernel_library import MULTIPROCESSORS, MmaShape, mma_shape
from graft.tools.report import table

#: Memory bandwidth of an H200 in bytes per second.
MEMORY_BANDWIDTH = 4.3e12
#: L2 bandwidth of an H200 in bytes per second, from published measurements.
L2_BANDWIDTH = 5.5e12
#: bfloat16 operations per second of ``mma.sync`` on an H200, from published measurements.
MMA_RATE = 6.0e14
#: Clock in Hz during these measurements. An H200 may run up to 13 % faster.
CLOCK = 1.755e9
#: Bytes per cycle that a multiprocessor reads from its L1 cache or shared memory, or writes to it.
L1_BYTES_PER_CYCLE = 128
#: Bytes per cycle that a multiprocessor reads from the L2 cache.
L2_BYTES_PER_CYCLE = 64
#: Seconds of a round trip to the L2 cache while the cache is busy; an assumption, about twice the
#: published latency of an idle cache.
ROUND_TRIP_SECONDS = 0.3e-6
#: Multiply-accumulate operations of one m16n8k16 instruction.
MMA_MACS = 16 * 8 * 16
#: Partial sums of an output.
PARTS = 8
#: Pairs of outputs that a thread of linear_many stores, and pairs whose inputs it loads together,
#: with and without K splits, by rows per tile.
EPILOGUE_PAIRS = {32: (8, 4, 8), 64: (16, 4, 16), 128: (32, 4, 16), 256: (64, 8, 16)}
#: Numbers of m16n8k16 instructions of a warp that use the same rows of x (16 columns each) and the
#: same weights (8 rows each), by rows per tile.
WARP_TILES = {32: (2, 2), 64: (2, 4), 128: (4, 4), 256: (4, 8)}
TILE_COLUMNS = 128
TALL_TILE = 256
#: Output features, input features and epilogue of the matrices of an 8B Llama.
MATRICES = {
    "qkv": (6144, 4096, "rotation"),
    "out": (4096, 4096, "residual"),
    "gate, up": (28672, 4096, ""),
    "down": (4096, 14336, "residual"),
    "head": (128256, 4096, ""),
}
ROWS = (1, 8, 16, 32, 64, 256)
LAYERS = 32


@dataclass(frozen=True)
class Product:
    """Cost of one product of a weight matrix with activation rows of 16 bits per element.

    Attributes
    ----------
    weight_bytes
        Bytes of weights read from memory.
    l2_bytes
        Bytes read and written through the L2 cache.
    l1_bytes
        Bytes read from and written to the L1 caches and shared memory.
    mma_steps
        Number of m16n8k16 instructions that all warps execute together.
    waves
        Number of waves of thread blocks.
    filled
        Fraction of the waves that the thread blocks fill.
    round_trips
        Number of dependent round trips of a block.
    transfer
        Seconds of the transfers of sums in all waves.
    overlaps
        Whether two blocks share a multiprocessor, so that one works during a round trip of the
        other.
    """

    weight_bytes: int
    l2_bytes: int
    l1_bytes: int
    mma_steps: int
    waves: int
    filled: float
    round_trips: int
    transfer: float
    overlaps: bool

    @staticmethod
    def of(rows: int, columns: int, inner: int, nbytes: int = 2, epilogue: str = "") -> Product:
        """Return the cost of a product with the kernel that `ModelKernels.linear` chooses.

        Parameters
        ----------
        rows
            Rows of the input.
        columns, inner
            Numbers of output features and of input features.
        nbytes
            Bytes per weight: 2 for bfloat16, or 1 for E4M3. E4M3 weights have a float32 scale per
            output feature in addition.
        epilogue
            What the epilogue loads besides the sums: "residual", "rotation" or "" for nothing.
        """
        shape = mma_shape(rows, columns, nbytes, inner=inner, allow_tall=True)
        weight_bytes = nbytes * columns * inner
        if nbytes == 1:
            weight_bytes += 4 * columns
        if shape.kernel == "linear_few":
            padded_rows = 8 * shape.defines["TILES"]
            row_readers = shape.grid[0] // 2
            l2_bytes = weight_bytes + row_readers * rows * inner * 2
            round_trips, transfer = 1, 0.0
        else:
            row_blocks, column_blocks, splits = shape.grid
            padded_rows = row_blocks * shape.defines["ROW_BLOCK"]
            l2_bytes = row_blocks * weight_bytes
            l2_bytes += column_blocks * rows * inner * 2
            if splits > 1:
                l2_bytes += stored_sums(splits) * 4 * rows * columns
            round_trips = 1 + epilogue_round_trips(shape, epilogue)
            transfer = transfer_seconds(shape)
        mma_steps = columns * inner * padded_rows // MMA_MACS
        concurrent_blocks = MULTIPROCESSORS * shape.blocks_per_multiprocessor
        return Product(
            weight_bytes,
            l2_bytes + 4 * rows * columns,
            mma_steps * l1_bytes_per_mma(shape, nbytes),
            mma_steps,
            shape.waves,
            math.prod(shape.grid) / (shape.waves * concurrent_blocks),
            round_trips,
            transfer,
            overlaps=shape.blocks_per_multiprocessor > 1,
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each resource needs: "memory", "cache" (L2), "L1" and "tensor" (MMA)."""
        l1_rate = MULTIPROCESSORS * CLOCK * L1_BYTES_PER_CYCLE
        return {
            "memory": self.weight_bytes / MEMORY_BANDWIDTH,
            "cache": self.l2_bytes / L2_BANDWIDTH,
            "L1": self.l1_bytes / (l1_rate * self.filled),
            "tensor": 2 * MMA_MACS * self.mma_steps / (MMA_RATE * self.filled),
        }

    @property
    def latency(self) -> float:
        """Seconds of the transfers, and of the dependent round trips that no other block overlaps.

        Without overlap these are the round trips of all waves, else those of one wave.
        """
        waves = 1 if self.overlaps else self.waves
        return waves * self.round_trips * ROUND_TRIP_SECONDS + self.transfer

    @property
    def total(self) -> float:
        """Estimated seconds of the product."""
        return self.seconds[self.bound] + self.latency

    @property
    def bound(self) -> str:
        """Name of the resource that needs the longest time."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def epilogue_round_trips(shape: MmaShape, epilogue: str) -> int:
    """Return the number of dependent round trips of the epilogue of linear_many."""
    pairs, at_once_with_splits, at_once = EPILOGUE_PAIRS[shape.defines["ROW_BLOCK"]]
    is_tall = shape.defines["ROW_BLOCK"] == TALL_TILE
    trips = {"": 0, "residual": 1, "rotation": 2 if is_tall else 1}[epilogue]
    if shape.grid[2] == 1:
        return trips * pairs // at_once
    return 2 + max(trips, 1) * pairs // at_once_with_splits


def stored_sums(splits: int) -> int:
    """Return the number of sums that the blocks of a tile store per output.

    The first block stores one total of its parts, and the others store each part.
    """
    return PARTS - PARTS // splits + 1


def transfer_seconds(shape: MmaShape) -> float:
    """Return the seconds of the transfers of sums of linear_many, in all waves together."""
    row_blocks, column_blocks, splits = shape.grid
    block = shape.defines["ROW_BLOCK"]
    tile_bytes = 4 * block * TILE_COLUMNS
    seconds = 0.0
    if block == TALL_TILE:
        # The first part is stored. The totals of the others are loaded, added to and stored.
        accesses = shape.waves * (2 * PARTS // splits - 1)
        seconds += accesses * tile_bytes / (L1_BYTES_PER_CYCLE * CLOCK)
    if splits > 1:
        tiles = row_blocks * column_blocks
        loaded_bytes = stored_sums(splits) * tile_bytes
        tiles_per_multiprocessor = -(-tiles // MULTIPROCESSORS)
        seconds += max(
            tiles_per_multiprocessor * loaded_bytes / (L2_BYTES_PER_CYCLE * CLOCK),
            tiles * loaded_bytes / L2_BANDWIDTH,
        )
    return seconds


def l1_bytes_per_mma(shape: MmaShape, nbytes: int) -> int:
    """Return the bytes that the L1 cache transfers per m16n8k16 instruction of the main loop.

    The instruction reads 16 x 16 weights and 8 rows of 16 inputs. In linear_many both have also
    been copied to shared memory.
    """
    if shape.kernel == "linear_few":
        weights = 256 * nbytes // shape.defines["TILES"]
        return weights + 256
    block = shape.defines["ROW_BLOCK"]
    column_tiles, row_tiles = WARP_TILES[block]
    copied = 16 * (TILE_COLUMNS * nbytes + 2 * block) // block
    weights = 256 * nbytes // row_tiles
    inputs = 256 // column_tiles
    return weights + inputs + copied


def roofline() -> str:
    """Return the table of all products. The column for measured times is empty."""
    rows: list[tuple[object, ...]] = [
        (
            "matrix",
            "rows",
            "MB of weights",
            "MB through L2",
            "GB through L1",
            "1,000 MMA",
            "waves",
            "round trips",
            "transfer, us",
            "us, predicted",
            "bound",
            "us, measured",
        )
    ]
    bfloat16 = [(name, size, 2) for name, size in MATRICES.items()]
    e4m3 = []
    for name, size in MATRICES.items():
        if name != "head":
            e4m3.append((f"{name}, E4M3", size, 1))
    for name, (columns, inner, epilogue), nbytes in bfloat16 + e4m3:
        for count in ROWS:
            product = Product.of(count, columns, inner, nbytes, epilogue)
            rows.append(
                (
                    name,
                    count,
                    f"{product.weight_bytes / 1e6:.0f}",
                    f"{product.l2_bytes / 1e6:.0f}",
                    f"{product.l1_bytes / 1e9:.2f}",
                    f"{product.mma_steps / 1e3:,.0f}",
                    product.waves,
                    product.round_trips,
                    f"{product.transfer * 1e6:.1f}",
                    f"{product.total * 1e6:.1f}",
                    product.bound,
                    "",
                )
            )
    return table(rows)


def forward_seconds(rows: int) -> float:
    """Return the estimated seconds of the products of a forward pass in bfloat16."""
    seconds = 0.0
    for name, (columns, inner, epilogue) in MATRICES.items():
        times = 1 if name == "head" else LAYERS
        seconds += times * Product.of(rows, columns, inner, epilogue=epilogue).total
    return seconds


def forward_pass() -> str:
    """Return a table of the products of a whole forward pass in bfloat16.

    The share compares the predicted time with the time to read the weights once.
    """
    table_rows: list[tuple[object, ...]] = [
        ("rows", "ms, predicted", "share of ceiling", "TFLOP/s")
    ]
    weight_bytes = 0
    for name, (columns, inner, _) in MATRICES.items():
        weight_bytes += 2 * columns * inner * (1 if name == "head" else LAYERS)
    for count in ROWS:
        seconds = forward_seconds(count)
        share = weight_bytes / MEMORY_BANDWIDTH / seconds
        rate = weight_bytes * count / seconds
        table_rows.append((count, f"{seconds * 1e3:.2f}", f"{share:.0%}", f"{rate / 1e12:.0f}"))
    return table(table_rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.bench.roofline", description=(__doc__ or "").splitlines()[0]
    )
    parser.parse_args(arguments)
    print(roofline())
    print()
    print(forward_pass())


if __name__ == "__main__":
    main()
