"""Roofline estimates of the linear layers of an 8B Llama on an H200.

    python -m graft.tools.bench.roofline

A product multiplies the rows of an activation matrix by a weight matrix. Its estimated time is the
maximum of three times: the time to read the weights from memory, the time of the traffic through
the L2 cache, and the time of the MMA instructions on the tensor cores.

The L2 traffic contains the weights and the activation rows, once per thread block that reads them.
Two neighbouring thread blocks of the kernel `linear_few` read the same activation rows through one
L1 cache, so these rows count once for both blocks. If a product is split along its inner dimension,
the partial sums are written and read as well. The prologue and the epilogue of a kernel are not
included.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from graft.models.llm.kernel_library import mma_shape
from graft.tools.report import table

#: Memory bandwidth of an H200 in bytes per second.
MEMORY_BANDWIDTH = 4.3e12
#: L2 bandwidth of an H200 in bytes per second, from published measurements.
L2_BANDWIDTH = 5.5e12
#: bfloat16 operations per second of ``mma.sync`` on an H200, from published measurements.
MMA_RATE = 6.0e14
#: Multiply-accumulate operations of one m16n8k16 instruction.
MMA_MACS = 16 * 8 * 16
#: Output and input features of the matrices of an 8B Llama.
MATRICES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate, up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ROWS = (1, 8, 16, 64, 256)


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
    """

    weight_bytes: int
    l2_bytes: int
    mma_steps: int

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
            l2_bytes = weight_bytes + row_readers * rows * inner * 2
        else:
            column_blocks, row_blocks, splits = shape.grid
            padded_rows = row_blocks * shape.defines["ROW_BLOCK"]
            l2_bytes = row_blocks * weight_bytes + column_blocks * rows * inner * 2
            if splits > 1:
                l2_bytes += 2 * 8 * 4 * rows * columns
        l2_bytes += 4 * rows * columns
        mma_steps = columns * inner * padded_rows // MMA_MACS
        return Product(weight_bytes, l2_bytes, mma_steps)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each resource needs: "memory", "cache" (L2) and "tensor" (tensor cores)."""
        return {
            "memory": self.weight_bytes / MEMORY_BANDWIDTH,
            "cache": self.l2_bytes / L2_BANDWIDTH,
            "tensor": 2 * MMA_MACS * self.mma_steps / MMA_RATE,
        }

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
                    f"{product.seconds[product.bound] * 1e6:.1f}",
                    product.bound,
                    "",
                )
            )
    return table(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.bench.roofline", description=(__doc__ or "").splitlines()[0]
    )
    parser.parse_args(arguments)
    print(roofline())


if __name__ == "__main__":
    main()
