"""Ties the device's clock to the host's CLOCK_MONOTONIC, with the error stated."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graft.cudagraph.lanes import StreamLane

if TYPE_CHECKING:
    from graft.cudagraph.device import Device

__all__ = ["ClockTie", "tie_clocks"]

KERNEL = Path(__file__).parent / "kernels" / "clock.cu"


@dataclass(frozen=True)
class ClockTie:
    """Device time plus ``offset_ns`` is ``time.monotonic_ns``, within ``error_ns`` either way."""

    offset_ns: int
    error_ns: int

    def host_ns(self, device_ns: int) -> int:
        """Return a device time as host time."""
        return device_ns + self.offset_ns


def tie_clocks(device: Device, tries: int = 16) -> ClockTie:
    """Read the device's clock between two readings of the host's.

    The reading lies somewhere between the two, so half their distance bounds the error (Cristian's
    method); of several tries the closest pair counts. Clocks drift: tie them near what is timed.

    Raises
    ------
    DeviceError
        The device failed.
    """
    kernel = device.load(KERNEL)["read_clock"]
    out = device.zeros((1,), "int64")
    stream = device.stream("clock")
    best: tuple[int, int] | None = None
    try:
        lane = StreamLane(stream)
        for _ in range(max(tries, 1)):
            before = time.monotonic_ns()
            lane.kernel(kernel, 1, 1, [out])
            stream.synchronize()
            after = time.monotonic_ns()
            read = int(out.to_host()[0])
            found = ((after - before + 1) // 2, (before + after) // 2 - read)
            best = found if best is None else min(best, found)
    finally:
        stream.close()
        out.close()
    assert best is not None
    return ClockTie(offset_ns=best[1], error_ns=best[0])
