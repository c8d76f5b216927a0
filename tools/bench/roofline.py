"""What matrices of a model should take on a GPU, on paper: the roof that each is held against.

A product takes as long as the longest of: its weights from memory; what passes the second-level
cache (weights and rows once per block that reads them, two neighbouring blocks of `linear_few`
sharing theirs in the first-level one, and sums that are parted out and in again); its steps on
tensor cores. Starting and draining are not in it. Usage::

    python -m graft.tools.bench.roofline
"""

from __future__ import annotations

from dataclasses import dataclass

from graft.models.llm.layers import mma_shape
from graft.tools.report import table

#: Of an H200: bytes a second that kernels read of memory and of the second-level cache, and
#: operations a second of mma.sync in bfloat16, the last two taken from published measurements.
MEMORY = 4.3e12
CACHE = 5.5e12
TENSOR = 6.0e14
#: Outer and inner sizes of the matrices of a Llama of 8 billion weights.
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
    """Bytes, steps and the roof of one product of weights with rows of 16 bits.

    Attributes
    ----------
    weights, cached : bytes from memory, and through the second-level cache.
    steps : of m16n8k16, over all warps.
    seconds : by what bounds it: "memory", "cache" or "tensor".
    """

    weights: int
    cached: int
    steps: int

    @staticmethod
    def of(rows: int, columns: int, inner: int, nbytes: int = 2) -> Product:
        """The product in the shape that `Layers.linear` chooses; E4M3 has one byte, and scales."""
        shape = mma_shape(rows, columns, nbytes)
        weights = nbytes * columns * inner
        weights += 4 * columns * (nbytes == 1)
        if shape.kernel == "linear_few":
            padded = 8 * shape.defines["TILES"]
            cached = weights + shape.grid[0] // 2 * rows * inner * 2
        else:
            across, down, splits = shape.grid
            padded = down * shape.defines["ROW_BLOCK"]
            parted = 2 * 8 * 4 * rows * columns if splits > 1 else 0
            cached = down * weights + across * rows * inner * 2 + parted
        return Product(weights, cached + 4 * rows * columns, columns * inner * padded // 2048)

    @property
    def seconds(self) -> dict[str, float]:
        return {
            "memory": self.weights / MEMORY,
            "cache": self.cached / CACHE,
            "tensor": 2 * 2048 * self.steps / TENSOR,
        }

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def roofline() -> str:
    """The table; what is measured is for hardware to fill in."""
    rows: list[tuple[object, ...]] = [
        (
            "matrix",
            "rows",
            "MB of weights",
            "MB through L2",
            "1,000 steps",
            "us, predicted",
            "bound",
            "us, measured",
        )
    ]
    eights = [(f"{name}, E4M3", size, 1) for name, size in MATRICES.items() if name != "head"]
    halves = [(name, size, 2) for name, size in MATRICES.items()]
    for name, (columns, inner), nbytes in halves + eights:
        for count in ROWS:
            p = Product.of(count, columns, inner, nbytes)
            rows.append(
                (
                    name,
                    count,
                    f"{p.weights / 1e6:.0f}",
                    f"{p.cached / 1e6:.0f}",
                    f"{p.steps / 1e3:,.0f}",
                    f"{p.seconds[p.bound] * 1e6:.1f}",
                    p.bound,
                    "",
                )
            )
    return table(rows)


if __name__ == "__main__":
    print(roofline())
