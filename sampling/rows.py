"""Maps rows of the target forward pass to drafts, and columns of a drafter's logits to ids."""

from __future__ import annotations

from dataclasses import dataclass

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.sampling.checks import check_range, expect

__all__ = ["DraftVocab", "RowMap"]


@dataclass(frozen=True)
class RowMap:
    """Maps each row of the target forward pass to its batch row and draft index.

    The device writes it in every round. Row j of batch row b has the index ``first[b] + j``. Its
    input is draft j or, if j = 0, the last token. Rows that no request uses are padding.
    """

    slot: DeviceArray  # int32 [B], slot of each batch row; -1: padding
    first: DeviceArray  # int32 [B], index of the first forward row of each batch row
    map: DeviceArray  # int32 [R], ``b << 16 | j`` of each forward row, R >= B

    @property
    def count(self) -> int:
        """Number of forward rows R."""
        return self.map.shape[0]


@dataclass(frozen=True)
class DraftVocab:
    """Mapping between the columns of a drafter's logits and the token ids of the target.

    `d2t` and `t2d` are both None if column i belongs to token id i.
    """

    size: int  # number of columns Vd of the logits; 0 if the drafter computes no logits
    d2t: DeviceArray | None = None  # int32 [Vd], target id of each column
    t2d: DeviceArray | None = None  # int32 [V], column of each id, or -1

    def check(self, vocab_size: int) -> None:
        """Raise an error unless `size`, `d2t` and `t2d` fit a target with `vocab_size` ids."""
        if (self.d2t is None) != (self.t2d is None):
            raise OptionError("d2t and t2d must be given together")
        if self.d2t is not None and self.t2d is not None:
            expect("d2t", self.d2t, "int32", Vd=self.size)
            expect("t2d", self.t2d, "int32", V=vocab_size)
        else:
            check_range("size of the draft vocabulary", self.size, 0, vocab_size)
