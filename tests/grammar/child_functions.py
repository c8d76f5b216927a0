"""Functions that tests run in child processes. The module imports little, to start quickly."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from graft.native.children.errors import Refusal

kept = []


class Refused(Refusal):
    """A refusal whose type both processes import from this module."""


def imported_packages() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


def threads_of_numpy() -> int:
    """Import NumPy, and return the number of threads of the process."""
    import numpy as np

    assert np.ones(2) @ np.ones(2) == 2
    return len(os.listdir("/proc/self/task"))


def refuse(message: str) -> None:
    raise Refused(message)


def keep_memory(size: int, refuse: bool = False) -> int:
    """Keep `size` bytes like a library that has run out of memory, and return the process id."""
    kept.append(bytearray(b"a" * 4096) * (size // 4096))
    if refuse:
        raise Refused("the grammar needs too much memory")
    return os.getpid()


def run_out_of_memory() -> None:
    """Fill the memory limit, then fail."""
    while True:
        keep_memory(1 << 24)


def crash_out_of_memory() -> None:
    """Fill the memory limit, then crash as a library does that cannot allocate memory."""
    with contextlib.suppress(MemoryError):
        run_out_of_memory()
    time.sleep(0.2)  # the parent samples the memory every 50 ms
    crash()


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def spin() -> None:
    while True:
        pass
