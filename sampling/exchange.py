"""The pinned memory in which the device, the grammar worker and the host meet, slot by slot.

What lies in it is stated in ``kernels/exchange.h``; here are its size and its addresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.compiler import INCLUDE_ROOT
from graft.cudagraph.context import Context
from graft.cudagraph.cstruct import read_numbers, read_struct
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import PinnedArray, zeros

HEADER = INCLUDE_ROOT / "native" / "records" / "exchange.h"
#: ROW_* and REASON_*, by name.
NUMBERS = read_numbers(HEADER)
_LINE_WORDS = 16  # a cache line


class Exchange:
    """Records of every slot, at fixed addresses.

    Parameters
    ----------
    context : the device.
    slots : how many slots.
    drafts : most drafts of a slot; it has one mask row more.
    vocab_size : ids that a mask row covers.
    candidates : ids that the grammar is asked about per draft, or per node of a tree that grows.
    branch, fed : of such a tree: nodes of a level, and of all levels; 1 and 0 for chains.
    levels : whose candidates come at once, for a chain or with `branch` drafts under one at most.

    Attributes
    ----------
    layout : np.void
        ``ExchangeLayout``, as kernels take it by value.
    memory : PinnedArray
        int32, [slots, layout.stride] and then masks.
    stamps : RowStamp [slots, rows]; masks : int32 [slots, rows, words]
        What the worker writes and the kernels read, the masks as `bring` copied them.
    near : DeviceArray; far : PinnedArray
        int32 [rows, slots, words]; the copies, and the masks as they are written.
    committed, drafted, candidates : int32 [slots, ...]; answer : Answer [slots]
        Header words, then ids.
    legal : uint32 [slots, ...]
        What follows the answer.

    Raises
    ------
    OptionError
        Naming the size that is out of range.
    """

    def __init__(
        self,
        context: Context,
        slots: int,
        drafts: int,
        vocab_size: int,
        candidates: int = 0,
        branch: int = 1,
        fed: int = 0,
        levels: int = 0,
    ) -> None:
        if max(drafts, fed) > 64:
            raise OptionError(f"exchange: drafts is {max(drafts, fed)}, at most 64 have a bit each")
        sizes = (
            ("slots", slots, 1),
            ("drafts", drafts, 0),
            ("vocab_size", vocab_size, 1),
            ("candidates", candidates, 0),
            ("branch", branch, 1),
            ("levels", levels, 0),
        )
        for name, value, low in sizes:
            if value < low:
                raise OptionError(f"exchange: {name} is {value}, must be at least {low}")
        rows = drafts + 1
        words = -(-vocab_size // 32)
        stamp = read_struct(HEADER, "RowStamp")
        head = {
            n: read_struct(HEADER, n).itemsize // 4
            for n in ("Committed", "Drafted", "Candidates", "Answer")
        }
        parts = {
            "stamps": rows * stamp.itemsize // 4,
            "committed": head["Committed"] + rows,
            "drafted": head["Drafted"] + 2 * max(drafts, fed),
            "candidate_ids": head["Candidates"] + (2 * levels or branch) * candidates,
            "answer": head["Answer"] + (2 * drafts if levels else branch if branch > 1 else 0),
        }
        at = {}
        end = 0
        for name, count in parts.items():
            at[name] = end
            end += -(-count // _LINE_WORDS) * _LINE_WORDS
        layout = np.zeros((), read_struct(HEADER, "ExchangeLayout"))
        for name, value in {
            "slots": slots,
            "stride": end,
            "rows": rows,
            "words": words,
            "candidates": candidates,
            "drafts": max(drafts, fed),
            "branch": branch,
            "levels": levels,
            "masks": slots * end,
        }.items() | at.items():
            layout[name] = value
        self.layout: Any = layout[()]
        self.slots = slots
        self.drafts = drafts
        self.vocab_size = vocab_size
        self.memory = PinnedArray(context, slots * (end + rows * words), "int32")
        whole, masks = np.split(self.memory.array, [slots * end])
        whole = whole.reshape(slots, end)

        def part(name: str) -> NDArray:
            return whole[:, at[name] : at[name] + parts[name]]

        self.stamps = part("stamps").view(stamp)
        self.masks = masks.reshape(rows, slots, words).swapaxes(0, 1)
        self.device_masks = zeros(context, (rows, slots, words), "int32")
        self.host_masks = self.memory.view(slots * end, (rows, slots, words))
        self.committed = part("committed")
        self.drafted = part("drafted")
        self.candidates = part("candidate_ids")
        answer = part("answer")
        size = head["Answer"]
        self.answer = answer[:, :size].view(read_struct(HEADER, "Answer"))[:, 0]
        self.legal = answer[:, size:].view(np.uint32)

    @property
    def host_ptr(self) -> int:
        """Host address of slot 0's first word."""
        return self.memory.host_ptr

    def copy_masks_to_device(self, lane: Lane, first: int, end: int) -> None:
        """Copy mask rows `first` to `end` of all slots to the device, behind who writes them."""
        _, slots, words = self.host_masks.shape
        host_masks = self.host_masks.view(first * slots * words, (end - first, slots, words))
        lane.copy(self.device_masks[first:end], host_masks, name=f"mask rows {first} to {end - 1}")

    def close(self) -> None:
        """Drop the memory; nobody may use the views any more."""
        self.memory.close()
