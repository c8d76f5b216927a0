"""Shared by the tests of lifetimes: a step to watch, and waiting for what is freed late."""

from __future__ import annotations

import gc
import os
import time

from graft import native

LIMIT_S = 10.0


class Step:
    """A callable that counts its calls and can be watched."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def settled() -> int:
    """Return the number of released records once nothing of earlier tests is being freed."""
    gc.collect()
    count, since = native.released_records(), time.monotonic()
    while time.monotonic() < since + 0.05:
        time.sleep(0.002)
        if native.released_records() != count:
            count, since = native.released_records(), time.monotonic()
    return count


def released(count: int) -> None:
    """Wait until `count` records were released; a driver may run destructors late."""
    end = time.monotonic() + LIMIT_S
    while native.released_records() < count:
        assert time.monotonic() < end, (native.released_records(), count)
        time.sleep(0.002)


def resident_kib() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
