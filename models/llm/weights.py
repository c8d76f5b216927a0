"""Upload of checkpoint tensors to the device, with a check that every tensor is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.driver.dtypes import E4M3, from_float32, to_float32
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.ranks.ranks import AllGather
from graft.models.errors import CheckpointError
from graft.models.llm.checkpoint import FLOATS, Checkpoint

#: Storage of decoder layer matrices on the device: as in the checkpoint, or quantized to E4M3.
WEIGHTS = ("checkpoint", "fp8")
_E4M3_MAX = np.float32(448)
_SMALLEST_NORMAL = np.float32(2.0**-126)

#: Function that takes the dtype, rows and columns of a stacked matrix and returns a number of rows:
#: the size of the groups whose two halves `Weights.stacked` interleaves. 0 means that no rows are
#: interleaved.
Interleave = Callable[[str, int, int], int]


@dataclass(frozen=True)
class ScaledMatrix:
    """A weight matrix [rows, columns] with row scales or a bias, or a row-parallel shard of one.

    A row-parallel shard has only some of the columns, and no bias. `all_gather` is the collective
    with which each rank gets the partial products of all ranks, which it then adds.
    """

    values: DeviceArray  # [rows, columns] in the dtype of the checkpoint, or E4M3
    scale: DeviceArray | None = None  # float32[rows]; None if all scales are 1
    bias: DeviceArray | None = None  # float32[rows]
    all_gather: AllGather | None = None

    @property
    def dtype(self) -> str:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, rows: slice) -> ScaledMatrix:
        scale = None if self.scale is None else self.scale[rows]
        bias = None if self.bias is None else self.bias[rows]
        return ScaledMatrix(self.values[rows], scale, bias, self.all_gather)


Matrix = DeviceArray | ScaledMatrix


class Weights:
    """Uploads the tensors of one checkpoint and records which ones were used.

    `weights`, one of `WEIGHTS`, determines how stacked matrices are stored. "fp8" quantizes them to
    E4M3; each row gets a scale that maps its largest magnitude to the largest E4M3 value.
    """

    def __init__(self, device: Device, checkpoint: Checkpoint, weights: str = "checkpoint") -> None:
        self.device = device
        self.checkpoint = checkpoint
        self._fp8 = weights == "fp8"
        self._used: set[str] = set()

    def read(
        self, name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...] = FLOATS
    ) -> tuple[np.ndarray, str]:
        """Return a floating-point tensor on the host with its dtype, and mark it as used."""
        array = self.checkpoint.get(name, shape, dtypes)
        self._used.add(name)
        return array

    def matrix(self, name: str, rows: int, columns: int) -> DeviceArray:
        """Upload a matrix [rows, columns] in its stored dtype."""
        array, dtype = self.read(name, (rows, columns))
        return self.device.from_host(np.ascontiguousarray(array), dtype)

    def matrix_or(self, default: DeviceArray, name: str, rows: int, columns: int) -> DeviceArray:
        """Upload a matrix if the checkpoint contains it; otherwise return `default`."""
        if name in self.checkpoint:
            return self.matrix(name, rows, columns)
        return default

    def stacked(
        self,
        parts: dict[str, int],
        columns: int,
        interleave: Interleave | None = None,
        *,
        bias: bool = False,
    ) -> Matrix:
        """Upload matrices [rows, columns] of one dtype, concatenated along the rows.

        `parts` gives the number of rows of each tensor by name. With `bias`, each matrix
        ``*.weight`` has a bias ``*.bias``. The result is a `ScaledMatrix` if there are biases or
        row scales (dtype E4M3); otherwise it is a plain array.

        If `interleave` returns a group size for the dtype and shape of the result, the rows are
        divided into groups of this size, and the two halves of every group are interleaved in
        blocks of 8 rows, as the fused kernels read them. If `interleave` is None or returns 0, the
        rows keep their order.
        """
        arrays = []
        scales = []
        dtypes = {}
        for name, rows in parts.items():
            array, dtypes[name], row_scale = self._rows(name, rows, columns)
            arrays.append(array)
            scales.append(row_scale)
        first_name = next(iter(parts))
        first_dtype = dtypes[first_name]
        for name, dtype in dtypes.items():
            if dtype != first_dtype:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {name} is {dtype} but {first_name} is "
                    f"{first_dtype}; matrices that are stacked must have the same dtype"
                )
        stack = np.concatenate(arrays)
        scale = np.concatenate(scales)
        biases = np.zeros(0, np.float32)
        if bias:
            biases = np.concatenate([self._bias(name, rows) for name, rows in parts.items()])
        group = interleave(first_dtype, *stack.shape) if interleave is not None else 0
        if group:
            # The axes are group, half of the group, block of 8 rows, and row in the block.
            blocks = np.arange(len(stack)).reshape(-1, 2, group // 16, 8)
            order = blocks.swapaxes(1, 2).ravel()
            stack = stack[order]
            scale = scale[order]
            biases = biases[order] if bias else biases
        values = self.device.from_host(stack, first_dtype)
        is_scaled = first_dtype == E4M3
        if not is_scaled and not bias:
            return values
        return ScaledMatrix(
            values,
            self.device.from_host(scale) if is_scaled else None,
            self.device.from_host(biases) if bias else None,
        )

    def _bias(self, name: str, rows: int) -> np.ndarray:
        """Return the bias of the matrix `name`, float32[rows]."""
        array, dtype = self.read(name.removesuffix("weight") + "bias", (rows,))
        return to_float32(np.ascontiguousarray(array), dtype)

    def _rows(self, name: str, rows: int, columns: int) -> tuple[np.ndarray, str, np.ndarray]:
        """Return a matrix, its dtype, and the scale of each of its rows, float32[rows].

        The scales are 1 if the matrix is not quantized.
        """
        array, dtype = self.read(name, (rows, columns), (*FLOATS, E4M3))
        if dtype == E4M3:
            if (array & 0x7F == 0x7F).any():
                raise CheckpointError(f"{self.checkpoint.path}: {name} contains NaN")
            return array, dtype, self._scale(f"{name}_scale", rows)
        if not self._fp8:
            return array, dtype, np.ones(rows, np.float32)
        values = to_float32(array, dtype)
        largest = np.abs(values).max(1)
        if not np.isfinite(largest).all():
            raise CheckpointError(f"{self.checkpoint.path}: {name} contains infinity or NaN")
        scale = np.maximum(largest / _E4M3_MAX, _SMALLEST_NORMAL)
        scale = np.where(largest > 0, scale, np.float32(1))
        return from_float32(values / scale[:, None], E4M3), E4M3, scale

    def _scale(self, name: str, rows: int) -> np.ndarray:
        """Read a tensor with one scale or one per row; return the row scales, float32[rows]."""
        array, dtype = self.read(name, None)
        if array.shape not in ((), (1,), (rows,), (rows, 1)):
            raise CheckpointError(
                f"{self.checkpoint.path}: {name} has shape {list(array.shape)}, expected one scale "
                f"or [{rows}]"
            )
        scale = to_float32(array, dtype).reshape(-1)
        if not (np.isfinite(scale) & (scale >= 0)).all():
            raise CheckpointError(
                f"{self.checkpoint.path}: {name} contains negative or non-finite scales"
            )
        return np.broadcast_to(scale, rows)

    def vector(self, name: str, *shape: int) -> DeviceArray:
        """Upload a tensor of this shape as float32."""
        array, dtype = self.read(name, shape)
        return self.device.from_host(to_float32(np.ascontiguousarray(array), dtype))

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Raise CheckpointError unless all tensors of the checkpoint were used.

        An unused tensor, such as a bias or another layer, shows that the checkpoint does not match
        its config; the model's output would be wrong. Two kinds of tensors may be unused: scales of
        statically quantized inputs, because graft does not quantize inputs, and tensors whose names
        begin or end with a string in `ignored`.
        """
        ignored += (".input_scale",)
        unused = []
        for name in self.checkpoint.names:
            if name in self._used or name.startswith(ignored) or name.endswith(ignored):
                continue
            unused.append(name)
        if unused:
            raise CheckpointError(
                f"{self.checkpoint.path}: {len(unused)} tensors are not part of the model that "
                f"config.json describes (first {unused[0]})"
            )
