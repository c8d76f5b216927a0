"""Timeline of a round: time stamps that the device writes between the parts of its graph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.driver.pinned import PinnedSlots
from graft.cudagraph.lanes import Lane

__all__ = ["Part", "Stamps", "make_timeline", "timeline_args"]

_KERNELS = Path(__file__).parent / "kernels" / "timing.cu"


@dataclass(frozen=True)
class Part:
    """A timed part of a round, from the previous time stamp to the stamp at the end of the part.

    Several parts of a round may have the same name.

    Attributes
    ----------
    name
        What the model lane computes, or waits for.
    waits_for
        Node name of the grammar step that the lane waits for; empty if it computes.
    """

    name: str
    waits_for: str = ""


def make_timeline(device: Device, entries: int, draft_length: int) -> PinnedSlots:
    """Allocate the time stamps of `entries` replays.

    Returns
    -------
    PinnedSlots
        Field ``ns``, int64 [entries, stamps]: device time in nanoseconds. A replay has enough
        stamps for the beginning of its round and the end of each part (`Stamps`).
    """
    return PinnedSlots(device, entries, {"ns": ("int64", (10 + 2 * draft_length,))})


def timeline_args(timeline: PinnedSlots) -> tuple[object, ...]:
    """Return the arguments from which a kernel computes the address of a time stamp."""
    field = timeline["ns"]
    return field, field.stride, timeline.slots


class Stamps:
    """Adds nodes to the model lane that write a time stamp after each part of a round.

    The kernel that begins the round writes the first stamp.

    Parameters
    ----------
    device
        Device of the round.
    timeline
        Created by `make_timeline`; entry ``replay % entries`` is written.
    replay
        int32 [1], number of the replay.
    lane
        Model lane.
    every
        Whether to write a stamp after every part. If not, only the end of the round gets a stamp.

    Attributes
    ----------
    parts : list of Part
        Parts in order; part ``i`` is between time stamps ``i`` and ``i + 1``.
    """

    def __init__(
        self, device: Device, timeline: PinnedSlots, replay: DeviceArray, lane: Lane, every: bool
    ) -> None:
        self._kernel = device.load(_KERNELS)["stamp_time"]
        self._timeline = timeline_args(timeline)
        self._replay = replay
        self._lane = lane
        self._every = every
        self.parts: list[Part] = []

    def end(self, name: str, waits_for: str = "", last: bool = False) -> None:
        """End a timed part of the round, which began at the previous time stamp.

        Parameters
        ----------
        name, waits_for
            As in `Part`.
        last
            Whether the round ends here.
        """
        if not (self._every or last):
            return
        self.parts.append(Part(name if self._every else "round", waits_for))
        args = [self._replay, *self._timeline, len(self.parts)]
        self._lane.kernel(self._kernel, 1, 1, args, name=f"stamp {name}")
