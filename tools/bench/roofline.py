"""Roofline estimates of the linear layers of an 8B Llama on an H200.

    python -m graft.tools.bench.roofline

The estimated time of a product is the maximum of three times: reading the weights from memory;
traffic through the L2 cache; and the MMA operations of the tensor cores. L2 traffic is weights and
rows once per block that reads them (two neighbouring blocks of `linear_few` share the rows in L1),
and the partial sums of split products, written and read. Prologue and epilogue of a kernel are not
included.
"""

from __future__ import annotations

from dataclasses import dataclass

from graft.models.llm.kernel_library import mma_shape
from graft.tools.report import table

#: Bandwidths of an H200 in bytes per second and its rate of bfloat16 ``mma.sync`` in operations per
#: second. The last two are published measurements.
MEMORY_BANDWIDTH = 4.3e12
L2_BANDWIDTH = 5.5e12
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
    """Cost of one product of a weight matrix with rows of 16 bits.

    Attributes
    ----------
    weight_bytes
        Bytes read from memory.
    l2_bytes
        Bytes read and written through the L2 cache.
    mma_steps
        Number of m16n8k16 instructions of all warps.
    """

    weight_bytes: int
    l2_bytes: int
    mma_steps: int

    @staticmethod
    def of(rows: int, columns: int, inner: int, nbytes: int = 2) -> Product:
        """Return the cost of a product as `ModelKernels.linear` launches it.

        Parameters
        ----------
        rows
            Rows of the input.
        columns, inner
            Output and input features.
        nbytes
            Bytes per weight: 2, or 1 for E4M3, which has a float32 scale per output feature.
        """
        shape = mma_shape(rows, columns, nbytes)
        weight_bytes = nbytes * columns * inner
        if nbytes == 1:
            weight_bytes += 4 * columns
        if shape.kernel == "linear_few":
            padded_rows = 8 * shape.defines["TILES"]
            l2_bytes = weight_bytes + shape.grid[0] // 2 * rows * inner * 2
        else:
            column_blocks, row_blocks, splits = shape.grid
            padded_rows = row_blocks * shape.defines["ROW_BLOCK"]
            l2_bytes = row_blocks * weight_bytes + column_blocks * rows * inner * 2
            if splits > 1:
                l2_bytes += 2 * 8 * 4 * rows * columns
        return Product(
            weight_bytes,
            l2_bytes + 4 * rows * columns,
            columns * inner * padded_rows // MMA_MACS,
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Time of each resource: "memory", "cache" and "tensor"."""
        return {
            "memory": self.weight_bytes / MEMORY_BANDWIDTH,
            "cache": self.l2_bytes / L2_BANDWIDTH,
            "tensor": 2 * MMA_MACS * self.mma_steps / MMA_RATE,
        }

    @property
    def bound(self) -> str:
        """Resource that takes the longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def roofline() -> str:
    """Return the table. The column of measured times is empty."""
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
    e4m3 = [(f"{name}, E4M3", size, 1) for name, size in MATRICES.items() if name != "head"]
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


if __name__ == "__main__":
    print(roofline())
