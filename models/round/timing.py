"""What the device writes down of a round's time: collected while the round's graph is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.cudagraph.pinned import PinnedSlots

__all__ = ["Part", "Stamps", "make_timeline"]

_KERNELS = Path(__file__).parent / "kernels" / "timing.cu"


@dataclass(frozen=True)
class Part:
    """A part of a round, from the stamp before it to its own; a name may come again.

    Attributes
    ----------
    name : what the model's lane does, or waits for.
    waits_for : the host step that it waits for; empty where it works.
    """

    name: str
    waits_for: str = ""


def make_timeline(device: Device, entries: int, draft_length: int) -> PinnedSlots:
    """Room for the stamps of so many replays: int64 nanoseconds ``ns`` [entries, stamps]."""
    return PinnedSlots(device, entries, {"ns": ("int64", (8 + 2 * draft_length,))})


def timeline_args(timeline: PinnedSlots) -> tuple[object, ...]:
    """What kernels take that write a stamp."""
    field = timeline.field("ns")
    return field, field.stride, timeline.slots


class Stamps:
    """Stamps the ends of a round's parts on one lane; the first begins with the first stamp, which
    the kernel writes that begins the round.

    Parameters
    ----------
    timeline : made by `make_timeline`; entry ``replay % entries`` is written.
    replay : int32 [1], the number of the replay.
    lane : the model's lane.
    every : whether there are stamps between the first and the last.

    Attributes
    ----------
    parts : in order; part i lies between the stamps in columns i and i + 1.
    """

    def __init__(
        self,
        device: Device,
        timeline: PinnedSlots,
        replay: DeviceArray,
        lane: Lane,
        every: bool,
    ) -> None:
        self._kernel = device.load(_KERNELS)["stamp_time"]
        self._timeline = timeline_args(timeline)
        self._replay = replay
        self._lane = lane
        self._every = every
        self.parts: list[Part] = []

    def end(self, name: str, waits_for: str = "", last: bool = False) -> None:
        """A part ends that began at the last stamp."""
        if not (self._every or last):
            return
        self.parts.append(Part(name if self._every else "round", waits_for))
        args = [self._replay, *self._timeline, len(self.parts)]
        self._lane.kernel(self._kernel, 1, 1, args, name=f"stamp {name}")
