"""Which token, slot and position each row of a forward stands for."""

from __future__ import annotations

from dataclasses import dataclass

from graft.cudagraph.errors import ShapeError
from graft.cudagraph.memory import DeviceArray
from graft.sampling.checks import expect


@dataclass(frozen=True)
class Rows:
    """Rows of a forward; device arrays, views allowed.

    A row with slot -1 or position -1 is padding: it writes no keys or values and its attention
    output is zero. Its token must only be readable memory; any value is fine.

    Attributes
    ----------
    token, slot, pos : int32[R].
    tree : uint64[R], of rows that are drafts of a tree: those on the way to each and itself, bit
        j - 1 for draft j. Draft j is cached j positions behind the tree's root, at whatever
        position it stands. 0, and None for all rows: cached at its position.
    run : every so many rows, from the first on, are mostly of one slot. Attention then reads a key
        once for several rows; no bit depends on it.
    """

    token: DeviceArray
    slot: DeviceArray
    pos: DeviceArray
    tree: DeviceArray | None = None
    run: int = 1

    @property
    def count(self) -> int:
        """Number of rows R."""
        return self.token.shape[0]

    def first(self, count: int, run: int = 1) -> Rows:
        """The first rows, in runs of so many."""
        tree = None if self.tree is None else self.tree[:count]
        return Rows(self.token[:count], self.slot[:count], self.pos[:count], tree, run)

    def check(self, limit: int) -> int:
        """R, after checking shapes and dtypes. Raises ShapeError."""
        for name in ("token", "slot", "pos"):
            expect(f"rows.{name}", getattr(self, name), "int32", R=self.count)
        if self.tree is not None:
            expect("rows.tree", self.tree, "uint64", R=self.count)
        if self.run < 1:
            raise ShapeError(f"rows.run is {self.run}, expected at least 1")
        if not 1 <= self.count <= limit:
            raise ShapeError(f"rows: R={self.count}, expected 1..max_rows={limit}")
        return self.count
