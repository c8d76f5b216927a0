"""Pinned memory through which kernels, grammar worker and host exchange records.

A slot is the state of one running request. It has one record of each kind: stamps, which say
whether the slot's mask rows are valid, and for which position; committed tokens; drafts; the
candidates for drafts, which the grammar tests; and the grammar's answer. ``exchange.h`` in the
folder ``native/records`` declares the records. This module allocates the memory and computes the
offsets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.cstruct import read_numbers, read_struct
from graft.cudagraph.driver.memory import PinnedArray, zeros
from graft.cudagraph.driver.pinned import replay_word
from graft.cudagraph.errors import OptionError
from graft.sampling.mode import RECORDS_HEADER, DraftMode

__all__ = ["NUMBERS", "Exchange"]

#: Values of the constants ROW_*, REASON_* and DRAFT_MODE_* of exchange.h, by name.
NUMBERS = read_numbers(RECORDS_HEADER)
_LINE_WORDS = 16  # 32-bit words of a cache line


class Exchange:
    """Records of all slots at fixed addresses, and the mask rows.

    A mask row has one bit for each of the `vocab_size` token ids, in `words` 32-bit words. The
    draft mode determines which records exist and their sizes. S is the number of slots, and `rows`
    the number of mask rows per slot.

    Attributes
    ----------
    layout
        ``ExchangeLayout``, passed to kernels by value.
    memory
        int32: the records, [S, layout.stride] with all records of a slot in one row, followed by
        the mask rows.
    stamps
        RowStamp [S, rows]: stamp of each mask row.
    masks
        int32 [S, rows, words]: view of `host_masks`, indexed by slot first.
    host_masks
        int32 [rows, S, words]: mask rows as the grammar worker writes them.
    device_masks
        int32 [rows, S, words]: copy in device memory that kernels read; `MaskRows` updates it.
    committed, drafted, candidates
        int32 [S, ...]: the fields of ``Committed``, ``Drafted`` and ``Candidates``, followed by
        the ids.
    answer
        ``Answer`` record of each slot, [S].
    legal
        uint32 [S, ...]: the words that follow each ``Answer`` record.
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
        words = -(-vocab_size // 32)  # per mask row
        sizes = _record_words(mode)
        offsets, stride = _offsets(sizes)
        self.layout = _layout(slots, rows, words, mode, offsets, stride)
        num_record_words = slots * stride
        num_mask_words = slots * rows * words
        self.memory = PinnedArray(context, num_record_words + num_mask_words, "int32")
        records = self.memory.array[:num_record_words].reshape(slots, stride)
        masks = self.memory.array[num_record_words:].reshape(rows, slots, words)

        def view(name: str) -> NDArray:
            first = offsets[name]
            return records[:, first : first + sizes[name]]

        self.stamps = view("stamps").view(read_struct(RECORDS_HEADER, "RowStamp"))
        self.masks = masks.swapaxes(0, 1)
        self.device_masks = zeros(context, (rows, slots, words), "int32")
        self.host_masks = self.memory.view(num_record_words, (rows, slots, words))
        self.committed = view("committed")
        self.drafted = view("drafted")
        self.candidates = view("candidate_ids")
        answer_dtype = read_struct(RECORDS_HEADER, "Answer")
        answer_words = answer_dtype.itemsize // 4
        answers = view("answer")
        self.answer = answers[:, :answer_words].view(answer_dtype)[:, 0]
        self.legal = answers[:, answer_words:].view(np.uint32)

    def renew_records(self, slot: int, replay: int) -> None:
        """Empty the records of a slot before a new request uses them.

        `replay` is the number of the last replay that is launched without the request. Its lower 32
        bits are stored in the records as their replay number. Without this, a record that was last
        written 2**31 replays ago would seem to be later than the current replay. The caller must
        ensure that no launched replay refers to the slot.
        """
        word = replay_word(replay)
        for records in (self.committed, self.drafted, self.candidates):
            records[slot, :2] = word, 0
        self.answer[slot] = (word, -1, -1)

    def free_rows(self, slot: int, epoch: int) -> None:
        """Mark all mask rows of a slot as allowing every id, for a request without a grammar.

        No launched replay may refer to the slot. `epoch` is the number of the assignment of the
        slot to the request.
        """
        stamps = self.stamps[slot]
        stamps["epoch"] = epoch
        stamps["position"] = 0
        stamps["detail"] = 1
        stamps["state"] = NUMBERS["ROW_FREE"]

    @property
    def host_ptr(self) -> int:
        """Host address of the first word of slot 0."""
        return self.memory.host_ptr

    def close(self) -> None:
        """Free the memory. The arrays of this object must not be used afterwards."""
        self.memory.close()


def _record_words(mode: DraftMode) -> dict[str, int]:
    """Return the size of each record of a slot in 32-bit words.

    The size of a record includes the ids that follow its struct.
    """
    rows = mode.drafts + 1
    return {
        "stamps": rows * _struct_words("RowStamp"),
        "committed": _struct_words("Committed") + rows,
        "drafted": _struct_words("Drafted") + 2 * mode.recorded_drafts,
        "candidate_ids": _struct_words("Candidates") + mode.candidate_words,
        "answer": _struct_words("Answer") + mode.answer_words,
    }


def _struct_words(name: str) -> int:
    """Return the size of a struct of exchange.h in 32-bit words."""
    return read_struct(RECORDS_HEADER, name).itemsize // 4


def _offsets(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return the offset of each record within a slot, and the size of a slot, in 32-bit words.

    Every record starts on its own cache line.
    """
    offsets = {}
    end = 0
    for name, count in sizes.items():
        offsets[name] = end
        num_lines = -(-count // _LINE_WORDS)
        end += num_lines * _LINE_WORDS
    return offsets, end


def _layout(
    slots: int, rows: int, words: int, mode: DraftMode, offsets: dict[str, int], stride: int
) -> Any:
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
