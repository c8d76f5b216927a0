"""Elementwise kernels, and kernels that gather or convolve rows."""

from __future__ import annotations

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.models.llm.kernels.loader import KernelLoader, storage_type
from graft.models.llm.kernels.norms import Norms
from graft.models.llm.kernels.operands import Norm
from graft.sampling.checks import expect


class Elementwise:
    """Elementwise kernels.

    With kernels of the form ``warp`` (`KernelLoader`), each thread computes one element; with those
    of the form ``thread``, it computes several.
    """

    def __init__(self, loader: KernelLoader, norms: Norms) -> None:
        self._loader = loader
        self._norms = norms

    def _launch(
        self,
        lane: Lane,
        kernel: str,
        size: tuple[int, int],
        args: tuple[object, ...],
        name: str,
        **types: str,
    ) -> None:
        """Launch a kernel of ``elements.cu`` for `size` = (rows, width) elements.

        `types` overrides the element types with which the kernel is compiled, float by default.
        """
        chunk = self._loader.chunk
        types = {"WEIGHT": "float"} | types
        grid, block = self._loader.elementwise_launch(*size, chunk)
        loaded = self._loader.load("elements", kernel, **types, CHUNK=chunk)
        lane.kernel(loaded, grid, block, args, name=name)

    def silu_mul(self, lane: Lane, gate_up: DeviceArray, out: DeviceArray) -> None:
        """Compute out = silu(gate) * up.

        `gate_up` is float32[R, 2 width]; `out` [R, width] is float32 or has 16 bits.
        """
        rows, width = out.shape
        expect("silu: gate_up", gate_up, "float32", R=rows, width=2 * width)
        expect("silu: out", out, out.dtype, R=rows, width=width)
        args = (gate_up, out, rows, width)
        self._launch(lane, "silu_mul", (rows, width), args, "silu", OUT=storage_type(out))

    def gather(
        self,
        lane: Lane,
        x: DeviceArray,
        index: DeviceArray,
        out: DeviceArray,
        name: str = "gather",
        norm: Norm | None = None,
    ) -> None:
        """Compute out[b] = x[index[b]] and, if requested, the norm of `out` in the same kernel.

        A row whose index is out of range becomes zero. `name` is the name of the graph node and
        the prefix of error messages.

        Parameters
        ----------
        x
            [rows, width] of any float dtype.
        index
            int32[B].
        out
            float32[B, width].
        """
        count, width = out.shape
        expect(f"{name}: index", index, "int32", B=count)
        expect(f"{name}: out", out, "float32", B=count, width=x.shape[1])
        if norm is not None:
            self._norms.gather_norm(lane, x, index, out, norm, name)
            return
        args = (x, index, out, count, x.shape[0], width)
        self._launch(lane, "gather_rows", (count, width), args, name, WEIGHT=storage_type(x))

    def scale(self, lane: Lane, x: DeviceArray, factor: float, cap: float = 0.0) -> None:
        """Compute x = factor * x in place, and then x = cap * tanh(x / cap) if `cap` is not 0."""
        rows, width = x.shape
        expect("scale: x", x, "float32", R=rows, width=width)
        self._launch(lane, "scale_rows", (rows, width), (x, rows, width, factor, cap), "scale")

    def convolve(
        self,
        lane: Lane,
        x: DeviceArray,
        base: DeviceArray,
        dynamic: DeviceArray,
        kernel_index: int,
        row_stride: int,
        out: DeviceArray,
        residual: DeviceArray | None = None,
    ) -> None:
        """Convolve each row with the previous rows of its block (DFlash2) and add the residual.

        Parameters
        ----------
        x, out, residual
            float32[R, width].
        base
            float32[2, size, width], two static kernels per column. Element 0 of a kernel is the
            weight of the row itself, element o the weight of the o-th row before it.
        dynamic
            float32[R, 2 * size * groups], two dynamic kernels per row and group of adjacent
            columns, which are added to the static kernels.
        kernel_index
            Index of the kernel to use, 0 or 1.
        row_stride
            Distance, in rows of `x`, between consecutive rows of a drafter's block.
        """
        rows, width = x.shape
        size = base.shape[1]
        groups = dynamic.shape[1] // (2 * size)
        expect("convolve: base", base, "float32", two=2, size=size, width=width)
        expect("convolve: dynamic", dynamic, "float32", R=rows, columns=2 * size * groups)
        for array in (x, out, residual):
            if array is not None:
                expect("convolve: rows", array, "float32", R=rows, width=width)
        sizes = (rows, width, size, groups, kernel_index, row_stride)
        args = (x, base, dynamic, residual, out, *sizes)
        self._launch(lane, "convolve_rows", (rows, width), args, "convolution")

    def add_partials(
        self,
        lane: Lane,
        partials: DeviceArray,
        residual: DeviceArray | None,
        out: DeviceArray,
        copy_to: tuple[DeviceArray, int] | None,
    ) -> None:
        """Add the partial products of all ranks, in rank order, and then the residual.

        `partials` is float32[ranks, R, width]. If `copy_to`, an array and the first column to
        write, is given, the result is also copied there. `Products.linear` calls this method for a
        row-parallel shard.
        """
        ranks, rows, width = partials.shape
        copy, offset = copy_to if copy_to is not None else (None, 0)
        stride = copy.shape[1] if copy is not None else 0
        args = (partials, residual, out, copy, ranks, rows, width, offset, stride)
        self._launch(lane, "add_parts", (rows, width), args, "sum of ranks")
