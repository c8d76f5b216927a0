"""Token, slot and position of each row of a forward pass.

A row is one token of one request. A slot identifies a running request and its pages in the KV
cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import ShapeError
from graft.sampling.checks import expect


@dataclass(frozen=True)
class Rows:
    """Rows of a forward pass, as device arrays or views of them.

    A row with slot -1 or position -1 is padding. A padding row writes no keys or values, and its
    attention output is zero. Its token may have any value.

    Attributes
    ----------
    token, slot, pos
        int32[R], token id, slot and sequence position of each row.
    ancestors
        uint64[R], bit mask for rows that are drafts of a tree: bit j - 1 is set if draft j is on
        the path from the root to the row. The row's own bit is set. Attention uses the mask to
        find the keys on the path, because draft j is cached j positions after the root, which
        usually differs from its sequence position. A row with mask 0 is cached at its sequence
        position. None means that all masks are 0.
    rows_per_slot
        Number of consecutive rows that usually belong to one slot. If there are many, attention
        loads keys and values for more rows at once. The value affects the speed, not the results.
    """

    token: DeviceArray
    slot: DeviceArray
    pos: DeviceArray
    ancestors: DeviceArray | None = None
    rows_per_slot: int = 1

    @property
    def count(self) -> int:
        """Number of rows R."""
        return self.token.shape[0]

    def first(self, count: int, rows_per_slot: int = 1) -> Rows:
        """Return the first `count` rows as views."""
        ancestors = None if self.ancestors is None else self.ancestors[:count]
        return Rows(
            self.token[:count], self.slot[:count], self.pos[:count], ancestors, rows_per_slot
        )

    def check(self, limit: int) -> int:
        """Check shapes and dtypes, and return the number of rows R.

        A wrong shape or dtype, and R outside 1..limit, raise ShapeError.
        """
        for name in ("token", "slot", "pos"):
            expect(f"rows.{name}", getattr(self, name), "int32", R=self.count)
        if self.ancestors is not None:
            expect("rows.ancestors", self.ancestors, "uint64", R=self.count)
        if self.rows_per_slot < 1:
            raise ShapeError(f"rows.rows_per_slot is {self.rows_per_slot}, expected at least 1")
        if not 1 <= self.count <= limit:
            raise ShapeError(f"rows: R={self.count}, expected 1..max_rows={limit}")
        return self.count
