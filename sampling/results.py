"""Results of a round: the record of each batch row, and the ring that returns them to the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.driver.cstruct import read_struct
from graft.cudagraph.driver.pinned import PinnedField, Ring
from graft.sampling.mode import RECORDS_HEADER
from graft.sampling.state import LOGPROBS

__all__ = ["ROUND_ROW", "output_layout", "output_ring", "row_words"]

#: dtype of ``struct RoundRow`` in native/records/exchange.h, which documents its fields.
ROUND_ROW = read_struct(RECORDS_HEADER, "RoundRow")
_HEADER_WORDS = ROUND_ROW.itemsize // 4


def row_words(draft_length: int) -> int:
    """Return the size of a batch row's result in 32-bit words.

    The result consists of a ``RoundRow`` and the two arrays that follow it, with K + 1 words each,
    where K is `draft_length`.
    """
    return _HEADER_WORDS + 2 * (draft_length + 1)


def output_ring(device: Device, entries: int, max_batch: int, draft_length: int) -> Ring:
    """Create the ring through which rounds of at most `max_batch` batch rows return their results.

    Replay ``r`` uses entry ``r % entries``. The field ``rows`` is int32 [max_batch, row_words(K)].
    The field ``logprobs`` has K + 1 records of dtype `LOGPROBS` per row, stored as int32. It is
    written only for requests that ask for log probabilities. K is `draft_length`, the maximum
    number of drafts.
    """
    logprobs_words = (draft_length + 1) * (LOGPROBS.itemsize // 4)
    return Ring(
        device,
        entries,
        {
            "rows": ("int32", (max_batch, row_words(draft_length))),
            "logprobs": ("int32", (max_batch, logprobs_words)),
        },
    )


def output_layout(ring: Ring, field: PinnedField) -> Any:
    """Return the ``OutputLayout`` with which kernels find the entries and rows of `field`."""
    layout = np.zeros((), read_struct(RECORDS_HEADER, "OutputLayout"))
    layout["entries"] = ring.entries
    layout["stride"] = field.stride
    layout["rows"], layout["row"] = field.shape
    return layout[()]
