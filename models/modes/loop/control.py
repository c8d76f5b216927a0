"""Words through which host and device control a generation loop."""

from __future__ import annotations

from collections.abc import Sequence

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.driver.pinned import PinnedSlots, replay_word
from graft.models.engine.request_state import RequestState
from graft.native import _native

__all__ = ["LOOP_ENTRIES", "LoopControl"]

#: Number of entries of the input and output rings of an engine with generation loops. A loop ends
#: when all entries but one are unread.
LOOP_ENTRIES = 64


class LoopControl:
    """State that all generation loops of an engine share.

    At most one loop is launched at a time. A loop is identified by the number of its first replay.

    Parameters
    ----------
    device
        Device of the engine.
    max_batch
        Maximum number of batch rows.
    slack
        Number of positions after a request's last token that draft trees use.
    entries
        Number of entries of the output ring.

    Attributes
    ----------
    words
        Fields ``end_loop`` and ``released``, see kernels/loop.cu.
    rows
        Field ``last``, int32 [entries, 1]: whether a replay is the last one of its loop.
    inputs
        Fields ``reserved`` and ``unguided``, int32 [1, B]: the number of positions with pages, and
        whether the request has no grammar, by batch row of the loop that is launched next.
    loop
        int32 [2] on the device: first replay of the loop, and number of the next replay.
    row_slot
        int32 [B] on the device: slots of the batch rows.
    """

    def __init__(self, device: Device, max_batch: int, slack: int, entries: int):
        self.slack = slack
        self.words = PinnedSlots(
            device, 1, {"end_loop": ("int32", (1,)), "released": ("int32", (1,))}
        )
        self.rows = PinnedSlots(device, entries, {"last": ("int32", (1,))})
        self.inputs = PinnedSlots(
            device, 1, {"reserved": ("int32", (max_batch,)), "unguided": ("int32", (max_batch,))}
        )
        self.loop: DeviceArray = device.zeros((2,), "int32")
        self.row_slot: DeviceArray = device.zeros((max_batch,), "int32")

    def prepare(self, states: Sequence[RequestState]) -> None:
        """Write the inputs of the loop that is launched next, for the requests of its batch rows.

        The previous loop must have decided to end.
        """
        reserved = self.inputs["reserved"].array[0]
        unguided = self.inputs["unguided"].array[0]
        for row, state in enumerate(states):
            reserved[row] = state.reserved_positions
            unguided[row] = state.matcher is None

    def end(self, first: int) -> None:
        """Ask the loop that began with replay `first` to end."""
        _native.store_release_i32(self.words["end_loop"].host_ptr, replay_word(first))

    def release(self, replay: int) -> None:
        """Tell the device that the host has read the results of all replays up to `replay`."""
        _native.store_release_i32(self.words["released"].host_ptr, replay_word(replay))

    def is_last(self, replay: int) -> bool:
        """Return whether a replay of a loop is its last one. Its results must be published."""
        field = self.rows["last"]
        return bool(field.array[replay % field.slots, 0])

    def close(self) -> None:
        """Release the pinned memory."""
        for part in (self.words, self.rows, self.inputs):
            part.close()
