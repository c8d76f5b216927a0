"""Mailboxes: the device posts a request, a persistent worker of ours answers, the device goes on.

No thread of the driver's takes part, so host work is neither serialised with other host functions
nor woken through the driver; and a wait that nobody answers is released at a deadline. The rules
stand in ``native/hostwork/INVARIANTS.md`` (M1 to M12).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from graft.cudagraph.errors import OptionError
from graft.cudagraph.hostwork import HostWork, NativeWork, as_work
from graft.cudagraph.memory import PinnedArray
from graft.native import _native

if TYPE_CHECKING:
    from graft.cudagraph.device import Device
    from graft.cudagraph.memory import DeviceArray

__all__ = ["Mailbox", "MailboxWorker", "current_part", "usable_cores"]

KERNELS = Path(__file__).parent / "kernels" / "mailbox.cu"
LINE_WORDS = 16
REQUEST, ACK, GAVE_UP, COUNTER, LEASE, REFUSED = range(6)
MOST_THREADS = 64
LONGEST_LIMIT_S = 86400.0
#: Fewer cores than this: a spinning worker would take one away from the work it waits for.
SPIN_CORES = 4


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def current_part() -> tuple[int, int]:
    """Which part of how many the calling worker thread does; (0, 1) outside of a worker."""
    part: tuple[int, int] = _native.current_part()
    return part


class MailboxWorker:
    """Threads that answer mailboxes, and how they wait.

    Parameters
    ----------
    threads : int
        Threads that share each request: every one runs the work, which asks
        :func:`current_part` for its part; the last to finish answers.
    cpus : iterable of int, optional
        Cores the threads may run on; default any.
    wait : {"auto", "spin", "park"}
        While a replay is in flight: "spin" burns a core per thread; "park" spins for ``spin_us``
        microseconds and then sleeps ``sleep_us`` between looks. "auto" spins where 4 cores or more
        are usable. With no replay in flight the threads sleep either way.
    name : str
        Prefix of the threads' names.

    Raises
    ------
    OptionError
        An option is out of range, or a core cannot be used.
    """

    def __init__(
        self,
        *,
        threads: int = 1,
        cpus: Iterable[int] | None = None,
        wait: Literal["auto", "spin", "park"] = "auto",
        spin_us: float = 50.0,
        sleep_us: float = 50.0,
        name: str = "mailbox",
    ) -> None:
        if not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
            raise OptionError(f"threads must be 1 to {MOST_THREADS}, not {threads!r}")
        allowed = os.sched_getaffinity(0)
        places = sorted(allowed if cpus is None else set(cpus))
        if not places or not set(places) <= allowed:
            raise OptionError(f"cpus {places} are not all usable: this process has {allowed}")
        if wait not in ("auto", "spin", "park"):
            raise OptionError(f"wait must be 'auto', 'spin' or 'park', not {wait!r}")
        for label, value in (("spin_us", spin_us), ("sleep_us", sleep_us)):
            if not 0.0 <= value <= 1e6:
                raise OptionError(f"{label} must be 0 to 1e6 microseconds, not {value!r}")
        self.threads = threads
        self.cpus = tuple(places) if cpus is not None else ()
        self.wait = wait if wait != "auto" else "spin" if len(places) >= SPIN_CORES else "park"
        self._native = _native.MailboxThreads(
            threads, list(self.cpus), self.wait == "spin", spin_us * 1e-6, sleep_us * 1e-6, name
        )

    @property
    def native(self) -> Any:
        """The native side."""
        return self._native

    @property
    def served(self) -> int:
        """Requests that were answered or attempted."""
        return int(self._native.served)

    @property
    def parked(self) -> int:
        """Threads that sleep until the next launch."""
        return int(self._native.parked)

    @property
    def stuck(self) -> bool:
        """Is a thread still inside work whose wait was released?"""
        return bool(self._native.stuck)

    def __repr__(self) -> str:
        return f"<MailboxWorker {self.threads} threads, {self.wait}, {self.served} served>"


@dataclass(frozen=True)
class Limits:
    """Deadlines of a mailbox, in seconds."""

    answer_s: float
    replay_s: float | None
    device_s: float

    def __post_init__(self) -> None:
        for label, value in (
            ("deadline_s", self.answer_s),
            ("replay_deadline_s", self.replay_s),
            ("device_deadline_s", self.device_s),
        ):
            if value is not None and not (math.isfinite(value) and 0.0 < value <= LONGEST_LIMIT_S):
                raise OptionError(f"{label} must be 0 to {LONGEST_LIMIT_S:g} s, not {value!r}")


class Mailbox:
    """One mailbox of a graph: its words, its work and who answers. Made by lanes.

    Attributes
    ----------
    words : PinnedArray
        int32 [6, 16]: request, ack and gave_up, a cache line each; then counter, lease and refused
        of a captured mailbox.
    counter : DeviceArray or None
        uint32 [1], the number of the last request; of a captured mailbox a line of ``words``.
    status : PinnedArray or None
        int32 [16], status words of a captured mailbox; as those of a graph.
    """

    def __init__(
        self,
        device: Device,
        work: HostWork,
        worker: MailboxWorker,
        limits: Limits,
        *,
        spinning: bool,
        output: PinnedArray | None,
        captured: bool = False,
    ) -> None:
        if not isinstance(worker, MailboxWorker):
            raise OptionError(f"worker must be a MailboxWorker, not {type(worker).__name__}")
        if output is not None and not isinstance(output, PinnedArray):
            raise OptionError(f"output must be a PinnedArray, not {type(output).__name__}")
        self.item = as_work(work)
        self.worker, self.limits, self.spinning, self.output = worker, limits, spinning, output
        self.words: PinnedArray = device.pinned((6, LINE_WORDS), "int32")
        self.status = device.pinned((LINE_WORDS,), "int32") if captured else None
        # No device memory while a stream captures: zeroing it would be device work.
        self.counter: DeviceArray | None = None if captured else device.zeros((1,), "uint32")
        self.kernels = device.load(KERNELS)
        self.scratch = None if output is None else np.zeros(output.shape, output.array.dtype)

    @property
    def owners(self) -> tuple[object, ...]:
        """What must live as long as the graph can run."""
        keep = self.item.keep if isinstance(self.item, NativeWork) else None
        output = None if self.output is None else self.output.owner
        arrays = (self.words, self.counter, self.status)
        owners = (array.owner for array in arrays if array is not None)
        return (*owners, self.kernels, self.scratch, output, keep)

    def device_address(self, word: int) -> int:
        """Device address of a word."""
        return self.words.ptr + 4 * LINE_WORDS * word

    def host_address(self, word: int) -> int:
        """Host address of a word."""
        return self.words.host_ptr + 4 * LINE_WORDS * word

    def attach(self, graph: int, state: Any, title: str, keep: object) -> tuple:
        """Hand the host's side to the graph: (code, api, user object)."""
        fn: object = None
        args: tuple[object, ...] = ()
        native = (0, 0)
        if isinstance(self.item, NativeWork):
            native = (self.item.address, self.item.data)
        else:
            fn, args = self.item.fn, self.item.args
            if self.scratch is not None:
                args = (*args, self.scratch)
        results = (0, 0, 0)
        if self.scratch is not None and self.output is not None:
            results = (self.scratch.ctypes.data, self.output.host_ptr, self.output.nbytes)
        gave_up = self.host_address(GAVE_UP) if self.spinning else 0
        leased = (0, 0)
        if self.status is not None:
            leased = (self.status.host_ptr, self.host_address(REFUSED))
        words = (self.host_address(REQUEST), self.host_address(ACK), gave_up, *leased)
        limits = (self.limits.answer_s, self.limits.replay_s or 0.0)
        attached: tuple = _native.attach_mailbox(
            graph, state, self.worker.native, title, fn, args, native, words, results, limits, keep
        )
        return attached
