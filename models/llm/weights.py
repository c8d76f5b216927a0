"""Moving checkpoint tensors to the device, and a strict account of what was used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.dtypes import E4M3, from_float32, to_float32
from graft.cudagraph.memory import DeviceArray
from graft.cudagraph.ranks import AllGather
from graft.models.errors import CheckpointError
from graft.models.llm.checkpoint import FLOATS, Checkpoint

#: How matrices of decoder layers lie on the device: as stored, or all as E4M3.
WEIGHTS = ("checkpoint", "fp8")
_LARGEST = np.float32(448)
_TINY = np.float32(2.0**-126)


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix [rows, columns], and what goes with it.

    Attributes
    ----------
    scale : float32[rows], by which the rows are multiplied.
    sums : by which products with all ranks' columns are added up, where others hold the others.
    """

    values: DeviceArray
    scale: DeviceArray | None = None
    sums: AllGather | None = None

    @property
    def dtype(self) -> str:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, rows: slice) -> ScaledMatrix:
        scale = None if self.scale is None else self.scale[rows]
        return ScaledMatrix(self.values[rows], scale, self.sums)


Matrix = DeviceArray | ScaledMatrix


class Weights:
    """Uploads tensors of one checkpoint and remembers their names.

    Parameters
    ----------
    weights : of `WEIGHTS`. "fp8" rounds the rows of stacked matrices to E4M3, each by a scale that
        takes its largest value to the largest of E4M3.
    """

    def __init__(self, device: Device, checkpoint: Checkpoint, weights: str = "checkpoint") -> None:
        self.device = device
        self.checkpoint = checkpoint
        self._fp8 = weights == "fp8"
        self._used: set[str] = set()

    def read(
        self, name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...] = FLOATS
    ) -> tuple[np.ndarray, str]:
        """One floating-point tensor on the host, as stored."""
        array = self.checkpoint.get(name, shape, dtypes)
        self._used.add(name)
        return array

    def matrix(self, name: str, rows: int, columns: int) -> DeviceArray:
        """[rows, columns] in its stored dtype."""
        array, dtype = self.read(name, (rows, columns))
        return self.device.from_host(np.ascontiguousarray(array), dtype)

    def stacked(
        self,
        parts: dict[str, int],
        columns: int,
        woven: Callable[[str, int, int], int] | None = None,
    ) -> Matrix:
        """Several [rows, columns] matrices of one dtype below each other; `parts` = name: rows.

        With `woven`, which says of how many rows groups of this dtype and shape are, the halves of
        each group lie by turns, eight rows of one and eight of the other; 0: they do not. Those of
        E4M3 have the scales of their rows.
        """
        arrays = [self._rows(name, rows, columns) for name, rows in parts.items()]
        first = arrays[0][1]
        for name, (_, dtype, _) in zip(parts, arrays, strict=True):
            if dtype != first:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {name} is {dtype} but {next(iter(parts))} is "
                    f"{first}; matrices that act together must share a dtype"
                )
        stack = np.concatenate([array for array, _, _ in arrays])
        scale = np.concatenate([scale for *_, scale in arrays])
        if woven is not None and (group := woven(first, *stack.shape)):
            order = np.arange(len(stack)).reshape(-1, 2, group // 16, 8).swapaxes(1, 2).ravel()
            stack = stack[order]
            scale = scale[order]
        values = self.device.from_host(stack, first)
        return ScaledMatrix(values, self.device.from_host(scale)) if first == E4M3 else values

    def _rows(self, name: str, rows: int, columns: int) -> tuple[np.ndarray, str, np.ndarray]:
        """A matrix, its dtype, and the float32 scales of its rows, of 1 where it has none."""
        array, dtype = self.read(name, (rows, columns), (*FLOATS, E4M3))
        if dtype == E4M3:
            if (array & 0x7F == 0x7F).any():
                raise CheckpointError(f"{self.checkpoint.path}: {name} holds NaN")
            return array, dtype, self._scale(f"{name}_scale", rows)
        if not self._fp8:
            return array, dtype, np.ones(rows, np.float32)
        values = to_float32(array, dtype)
        largest = np.abs(values).max(1)
        if not np.isfinite(largest).all():
            raise CheckpointError(f"{self.checkpoint.path}: {name} holds what is not finite")
        scale = np.where(largest > 0, np.maximum(largest / _LARGEST, _TINY), np.float32(1))
        return from_float32(values / scale[:, None], E4M3), E4M3, scale

    def _scale(self, name: str, rows: int) -> np.ndarray:
        """One for each of so many rows, or one for all."""
        array, dtype = self.read(name, None)
        if array.shape not in ((), (1,), (rows,), (rows, 1)):
            raise CheckpointError(
                f"{self.checkpoint.path}: {name} has shape {list(array.shape)}, expected one scale "
                f"or [{rows}]"
            )
        scale = to_float32(array, dtype).reshape(-1)
        if not (np.isfinite(scale) & (scale >= 0)).all():
            raise CheckpointError(f"{self.checkpoint.path}: {name} holds what is no scale")
        return np.broadcast_to(scale, rows)

    def vector(self, name: str, *shape: int) -> DeviceArray:
        """As float32."""
        array, dtype = self.read(name, shape)
        return self.device.from_host(to_float32(np.ascontiguousarray(array), dtype))

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Raise CheckpointError when tensors are left over that no part of the model took.

        A leftover (a bias, a second layer) means that the model is not the one its config
        describes, and its output would be silently wrong. Names that start or end with an
        entry of `ignored` are allowed, and scales of static inputs of 8 bits: inputs here have
        more.
        """
        ignored += (".input_scale",)
        left = [
            name
            for name in self.checkpoint.names
            if name not in self._used
            and not any(name.startswith(i) or name.endswith(i) for i in ignored)
        ]
        if left:
            raise CheckpointError(
                f"{self.checkpoint.path}: {len(left)} tensors belong to no part of this model, "
                f"first {left[0]}"
            )
