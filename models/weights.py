"""Moving checkpoint tensors to the device, and a strict account of what was used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.dtypes import to_float32
from graft.cudagraph.memory import DeviceArray
from graft.models.checkpoint import Checkpoint
from graft.models.errors import CheckpointError


class Weights:
    """Uploads tensors of one checkpoint and remembers their names."""

    def __init__(self, device: Device, checkpoint: Checkpoint) -> None:
        self.device = device
        self.checkpoint = checkpoint
        self._used: set[str] = set()

    def read(self, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, str]:
        """One floating-point tensor on the host, as stored."""
        array = self.checkpoint.get(name, shape)
        self._used.add(name)
        return array

    def matrix(self, name: str, rows: int, columns: int) -> DeviceArray:
        """[rows, columns] in its stored dtype."""
        array, dtype = self.read(name, (rows, columns))
        return self.device.from_host(np.ascontiguousarray(array), dtype)

    def stacked(
        self, parts: dict[str, int], columns: int,
        woven: Callable[[str, int, int], int] | None = None,
    ) -> DeviceArray:  # fmt: skip
        """Several [rows, columns] matrices of one dtype below each other; `parts` = name: rows.

        With `woven`, which says of how many rows groups of this dtype and shape are, the halves of
        each group lie by turns, eight rows of one and eight of the other; 0: they do not.
        """
        arrays = [self.read(name, (rows, columns)) for name, rows in parts.items()]
        first = arrays[0][1]
        for name, (_, dtype) in zip(parts, arrays, strict=True):
            if dtype != first:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {name} is {dtype} but {next(iter(parts))} is "
                    f"{first}; matrices that act together must share a dtype"
                )
        stack = np.concatenate([array for array, _ in arrays])
        if woven is not None and (group := woven(first, *stack.shape)):
            eights = stack.reshape(-1, 2, group // 16, 8, columns).swapaxes(1, 2)
            stack = np.ascontiguousarray(eights).reshape(-1, columns)
        return self.device.from_host(stack, first)

    def vector(self, name: str, *shape: int) -> DeviceArray:
        """As float32."""
        array, dtype = self.read(name, shape)
        return self.device.from_host(to_float32(np.ascontiguousarray(array), dtype))

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Raise CheckpointError when tensors are left over that no part of the model took.

        A leftover (a bias, a second layer) means that the model is not the one its config
        describes, and its output would be silently wrong. Names that start or end with an
        entry of `ignored` are allowed.
        """
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
