"""Which token, slot and position each row of a forward stands for."""

from __future__ import annotations

from dataclasses import dataclass

from graft.cudagraph.errors import ShapeError
from graft.cudagraph.memory import DeviceArray


@dataclass(frozen=True)
class Rows:
    """Rows of a forward; three device arrays int32[R], views allowed.

    A row with slot -1 or position -1 is padding: it writes no keys or values and its attention
    output is zero. Its token must only be readable memory; any value is fine.
    """

    token: DeviceArray
    slot: DeviceArray
    pos: DeviceArray

    @property
    def count(self) -> int:
        """Number of rows R."""
        return self.token.shape[0]

    def first(self, count: int) -> Rows:
        """The first rows."""
        return Rows(self.token[:count], self.slot[:count], self.pos[:count])

    def check(self, limit: int) -> int:
        """R, after checking shapes and dtypes. Raises ShapeError."""
        for name in ("token", "slot", "pos"):
            array: DeviceArray = getattr(self, name)
            if array.dtype != "int32" or array.shape != (self.count,):
                raise ShapeError(
                    f"rows.{name} is {array.dtype}{list(array.shape)}, expected "
                    f"int32[R={self.count}]"
                )
        if not 1 <= self.count <= limit:
            raise ShapeError(f"rows: R={self.count}, expected 1..max_rows={limit}")
        return self.count
