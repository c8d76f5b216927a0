"""Pinned memory that the kernels, the grammar worker and the host share, slot by slot.

The records are declared in ``native/records/exchange.h``. This module allocates them and computes
their offsets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.context import Context
from graft.cudagraph.cstruct import read_numbers, read_struct
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import PinnedArray, zeros
from graft.sampling.mode import RECORDS_HEADER, DraftMode

__all__ = ["NUMBERS", "Exchange"]

#: ROW_*, REASON_* and DRAFT_MODE_* by name.
NUMBERS = read_numbers(RECORDS_HEADER)
_LINE_WORDS = 16  # 32-bit words of a cache line


class Exchange:
    """Records of every slot at fixed addresses.

    Parameters
    ----------
    context
        Device that accesses the memory.
    slots
        Number of slots S.
    vocab_size
        Number of token ids V that a mask row covers.
    mode
        Draft mode. It determines which records exist and their sizes.

    Attributes
    ----------
    layout : numpy.void
        ``ExchangeLayout``, passed to kernels by value.
    memory : PinnedArray
        int32: the records, [S, layout.stride], followed by the mask rows.
    stamps : numpy.ndarray
        RowStamp [S, rows]: stamp of each mask row.
    masks : numpy.ndarray
        int32 [S, rows, words]: view of `host_masks`, indexed by slot first.
    host_masks : PinnedArray
        int32 [rows, S, words]: mask rows as the grammar worker writes them.
    device_masks : DeviceArray
        int32 [rows, S, words]: copy that kernels read, see `copy_masks_to_device`.
    committed, drafted, candidates : numpy.ndarray
        int32 [S, ...]: the words of the record of that name, followed by its ids.
    answer : numpy.ndarray
        Answer [S].
    legal : numpy.ndarray
        uint32 [S, ...]: the words that follow each answer.

    Raises
    ------
    OptionError
        If a size is out of range.
    """

    def __init__(self, context: Context, slots: int, vocab_size: int, mode: DraftMode) -> None:
        for name, value in (("slots", slots), ("vocab_size", vocab_size)):
            if value < 1:
                raise OptionError(f"exchange: {name} must be at least 1, got {value}")
        self.slots = slots
        self.drafts = mode.drafts
        self.vocab_size = vocab_size
        self.mode = mode
        rows = mode.drafts + 1
        words = -(-vocab_size // 32)
        stamp = read_struct(RECORDS_HEADER, "RowStamp")
        answer = read_struct(RECORDS_HEADER, "Answer")
        sizes = _record_words(mode)
        offsets, stride = _offsets(sizes)
        self.layout = _layout(slots, rows, words, mode, offsets, stride)
        self.memory = PinnedArray(context, slots * (stride + rows * words), "int32")
        records, masks = np.split(self.memory.array, [slots * stride])
        records = records.reshape(slots, stride)

        def view(name: str) -> NDArray:
            return records[:, offsets[name] : offsets[name] + sizes[name]]

        self.stamps = view("stamps").view(stamp)
        self.masks = masks.reshape(rows, slots, words).swapaxes(0, 1)
        self.device_masks = zeros(context, (rows, slots, words), "int32")
        self.host_masks = self.memory.view(slots * stride, (rows, slots, words))
        self.committed = view("committed")
        self.drafted = view("drafted")
        self.candidates = view("candidate_ids")
        answer_words = answer.itemsize // 4
        self.answer = view("answer")[:, :answer_words].view(answer)[:, 0]
        self.legal = view("answer")[:, answer_words:].view(np.uint32)

    @property
    def host_ptr(self) -> int:
        """Host address of the first word of slot 0."""
        return self.memory.host_ptr

    def copy_masks_to_device(self, lane: Lane, first: int, end: int) -> None:
        """Add a copy of the mask rows `first` to `end` (exclusive) of all slots to a lane.

        The lane must be ordered after the grammar step that writes the rows.
        """
        _, slots, words = self.host_masks.shape
        host_masks = self.host_masks.view(first * slots * words, (end - first, slots, words))
        lane.copy(self.device_masks[first:end], host_masks, name=f"mask rows {first} to {end - 1}")

    def close(self) -> None:
        """Free the memory. The views must not be used afterwards."""
        self.memory.close()


def _record_words(mode: DraftMode) -> dict[str, int]:
    """Return the size of each record of a slot, in 32-bit words, with the ids that follow it."""
    names = ("RowStamp", "Committed", "Drafted", "Candidates", "Answer")
    head = {name: read_struct(RECORDS_HEADER, name).itemsize // 4 for name in names}
    rows = mode.drafts + 1
    return {
        "stamps": rows * head["RowStamp"],
        "committed": head["Committed"] + rows,
        "drafted": head["Drafted"] + 2 * mode.recorded_drafts,
        "candidate_ids": head["Candidates"] + mode.candidate_words,
        "answer": head["Answer"] + mode.answer_words,
    }


def _offsets(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return the offset of each record, aligned to cache lines, and the words of a slot."""
    offsets = {}
    end = 0
    for name, count in sizes.items():
        offsets[name] = end
        end += -(-count // _LINE_WORDS) * _LINE_WORDS
    return offsets, end


def _layout(
    slots: int, rows: int, words: int, mode: DraftMode, offsets: dict[str, int], stride: int
) -> Any:
    """Return the ``ExchangeLayout``."""
    layout = np.zeros((), read_struct(RECORDS_HEADER, "ExchangeLayout"))
    values = {
        "slots": slots,
        "stride": stride,
        "rows": rows,
        "words": words,
        "mode": mode.value,
        "candidates": mode.candidates,
        "drafts": mode.recorded_drafts,
        "branch": mode.branch,
        "levels": mode.levels,
        "masks": slots * stride,
    }
    for name, value in (values | offsets).items():
        layout[name] = value
    return layout[()]
