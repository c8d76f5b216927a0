"""Roofline estimates of the linear layers of an 8B Llama on an H200.

    python -m graft.tools.bench.roofline

A product multiplies the rows of an activation matrix by a weight matrix. Its estimated time is the
maximum of three times, plus a latency. The three times are the time to read the weights from
memory, the time of the traffic through the L2 cache, and the time of the MMA instructions on the
tensor cores. MMA instructions take longer if the thread blocks fill only a part of the last wave; a
wave is the set of blocks that run at the same time.

The latency is the time of the round trips to the L2 cache that depend on each other and that no
other work of the block overlaps. The machine code determines their number, and
``tests/models/test_machine_code.py`` checks it:

* Prologue: one round trip for the first rows. The first weights are loaded before the previous
  kernel has ended.
* Epilogue of ``linear_few``: none, because its inputs are loaded before the end of the main loop.
* Epilogue of ``linear_many``: one round trip for each batch of pairs of outputs whose inputs are
  loaded together. With K splits, two more: the partial sums must be visible before the counter of
  arrived blocks is read.

The L2 traffic contains the weights and the activation rows, once per thread block that reads them.
Two neighbouring thread blocks of the kernel `linear_few` read the same activation rows through one
L1 cache, so these rows count once for both blocks. If a product is split along its inner dimension,
the partial sums are written and read as well.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from graft.models.llm.kernel_library import MULTIPROCESSORS, mma_shape
from graft.tools.report import table

#: Memory bandwidth of an H200 in bytes per second.
MEMORY_BANDWIDTH = 4.3e12
#: L2 bandwidth of an H200 in bytes per second, from published measurements.
L2_BANDWIDTH = 5.5e12
#: bfloat16 operations per second of ``mma.sync`` on an H200, from published measurements.
MMA_RATE = 6.0e14
#: Seconds of a round trip to the L2 cache while the cache is busy; an assumption, about twice the
#: published latency of an idle cache.
ROUND_TRIP_SECONDS = 0.3e-6
#: Multiply-accumulate operations of one m16n8k16 instruction.
MMA_MACS = 16 * 8 * 16
#: Pairs of outputs that a thread of linear_many stores, and pairs whose inputs it loads together,
#: by rows per tile.
EPILOGUE_PAIRS = {32: (8, 4), 64: (16, 4), 128: (32, 2)}
#: Output and input features of the matrices of an 8B Llama.
MATRICES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate, up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
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
    mma_steps
        Number of m16n8k16 instructions that all warps execute together.
    waves
        Number of waves of thread blocks.
    filled
        Fraction of the waves that the thread blocks fill.
    round_trips
        Number of dependent round trips of a block.
    overlaps
        Whether two blocks share a multiprocessor, so that one works during a round trip of the
        other.
    """

    weight_bytes: int
    l2_bytes: int
    mma_steps: int
    waves: int
    filled: float
    round_trips: int
    overlaps: bool

    @staticmethod
    def of(
        rows: int,
        columns: int,
        inner: int,
        nbytes: int = 2,
    ) -> Product:
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
        """
        shape = mma_shape(rows, columns, nbytes)
        weight_bytes = nbytes * columns * inner
        if nbytes == 1:
            weight_bytes += 4 * columns
        if shape.kernel == "linear_few":
            padded_rows = 8 * shape.defines["TILES"]
            row_readers = shape.grid[0] // 2
            round_trips = 1
            l2_bytes = weight_bytes + row_readers * rows * inner * 2
        else:
            column_blocks, row_blocks, splits = shape.grid
            row_block = shape.defines["ROW_BLOCK"]
            padded_rows = row_blocks * row_block
            pairs, pairs_at_once = EPILOGUE_PAIRS[row_block]
            round_trips = 1 + pairs // pairs_at_once
            l2_bytes = row_blocks * weight_bytes + column_blocks * rows * inner * 2
            if splits > 1:
                l2_bytes += 2 * 8 * 4 * rows * columns
                round_trips += 2
        l2_bytes += 4 * rows * columns
        mma_steps = columns * inner * padded_rows // MMA_MACS
        concurrent_blocks = MULTIPROCESSORS * shape.blocks_per_multiprocessor
        filled = math.prod(shape.grid) / (shape.waves * concurrent_blocks)
        return Product(
            weight_bytes,
            l2_bytes,
            mma_steps,
            shape.waves,
            filled,
            round_trips,
            overlaps=shape.blocks_per_multiprocessor > 1,
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each resource needs: "memory", "cache" (L2) and "tensor" (tensor cores)."""
        return {
            "memory": self.weight_bytes / MEMORY_BANDWIDTH,
            "cache": self.l2_bytes / L2_BANDWIDTH,
            "tensor": 2 * MMA_MACS * self.mma_steps / (MMA_RATE * self.filled),
        }

    @property
    def latency(self) -> float:
        """Seconds of the dependent round trips that no other block overlaps.

        Without overlap these are the round trips of all waves, else those of one wave.
        """
        waves = 1 if self.overlaps else self.waves
        return waves * self.round_trips * ROUND_TRIP_SECONDS

    @property
    def total(self) -> float:
        """Estimated seconds of the product."""
        return self.seconds[self.bound] + self.latency

    @property
    def bound(self) -> str:
        """Name of the resource that needs the longest time."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def roofline() -> str:
    """Return the table of all products. The column for measured times is empty."""
    rows: list[tuple[object, ...]] = [
        (
            "matrix",
            "rows",
            "MB of weights",
            "MB through L2",
            "1,000 MMA",
            "waves",
            "round trips",
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
    for name, (columns, inner), nbytes in bfloat16 + e4m3:
        for count in ROWS:
            product = Product.of(count, columns, inner, nbytes)
            rows.append(
                (
                    name,
                    count,
                    f"{product.weight_bytes / 1e6:.0f}",
                    f"{product.l2_bytes / 1e6:.0f}",
                    f"{product.mma_steps / 1e3:,.0f}",
                    product.waves,
                    product.round_trips,
                    f"{product.total * 1e6:.1f}",
                    product.bound,
                    "",
                )
            )
    return table(rows)


def forward_pass() -> str:
    """Return a table of the products of a whole forward pass in bfloat16.

    The share compares the predicted time with the time to read the weights once.
    """
    table_rows: list[tuple[object, ...]] = [
        ("rows", "ms, predicted", "share of ceiling", "TFLOP/s")
    ]
    for count in ROWS:
        seconds = 0.0
        weight_bytes = 0
        for name, (columns, inner) in MATRICES.items():
            product = Product.of(count, columns, inner)
            times = 1 if name == "head" else LAYERS
            seconds += times * product.total
            weight_bytes += times * product.weight_bytes
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
