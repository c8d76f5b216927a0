"""Mailboxes: the device posts a request, a persistent thread of ours answers, the device goes on.

No thread of the driver's takes part, so host work is neither serialised with other host functions
nor woken through the driver; and a wait that nobody answers is released at a deadline. The rules
stand in ``native/hostwork/INVARIANTS.md`` (M1 to M10).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from graft.cudagraph import nodes
from graft.cudagraph.context import Context
from graft.cudagraph.errors import OptionError
from graft.cudagraph.hostwork import SPIN_CORES, HostWork, as_work
from graft.cudagraph.kernels import load
from graft.cudagraph.memory import PinnedArray, zeros
from graft.native import _native

KERNELS = Path(__file__).parent / "kernels" / "mailbox.cu"
LINE_WORDS = 16
REQUEST, ACK, GAVE_UP = range(3)
ONE = (1, 1, 1)
LONGEST_LIMIT_S = 86400.0
#: A parking worker spins so long after a request, then sleeps so long between looks.
SPIN_S = 50e-6
SLEEP_S = 50e-6


class MailboxWorker:
    """A thread that answers mailboxes, and how it waits.

    Parameters
    ----------
    cpus : iterable of int, optional
        Cores the thread may run on; default any.
    wait : {"auto", "spin", "park"}
        While a replay is in flight: "spin" burns a core; "park" spins for 50 us and then sleeps
        50 us between looks. "auto" spins where 4 cores or more are usable. With no replay in flight
        the thread sleeps either way.
    name : str
        The thread's name.
    """

    def __init__(
        self,
        *,
        cpus: Iterable[int] | None = None,
        wait: Literal["auto", "spin", "park"] = "auto",
        name: str = "mailbox",
    ) -> None:
        allowed = os.sched_getaffinity(0)
        places = sorted(allowed if cpus is None else set(cpus))
        if not places or not set(places) <= allowed:
            raise OptionError(f"cpus {places} are not all usable: this process has {allowed}")
        if wait not in ("auto", "spin", "park"):
            raise OptionError(f"wait must be 'auto', 'spin' or 'park', not {wait!r}")
        self.cpus = tuple(places) if cpus is not None else ()
        self.wait = wait if wait != "auto" else "spin" if len(places) >= SPIN_CORES else "park"
        #: Tells also whether the thread is ``parked``, or ``stuck`` in work that was given up.
        self.native = _native.MailboxThread(
            list(self.cpus), self.wait == "spin", SPIN_S, SLEEP_S, name
        )

    @property
    def served(self) -> int:
        """Requests that were answered or attempted."""
        return int(self.native.served)

    def __repr__(self) -> str:
        return f"<MailboxWorker {self.wait}, {self.served} served>"


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
    """One mailbox of a graph: its words, its work, its two nodes. Made by lanes.

    The wait descends from its request, and the request from everything that is on the lane before:
    a worker can then never be asked for something that stands behind its own answer. In executables
    made with ``priorities`` their kernels do not queue behind the blocks of a large one.
    """

    def __init__(
        self,
        context: Context,
        work: HostWork,
        worker: MailboxWorker,
        limits: Limits,
        output: PinnedArray | None,
        *,
        spinning: bool,
    ) -> None:
        if not isinstance(worker, MailboxWorker):
            raise OptionError(f"worker must be a MailboxWorker, not {type(worker).__name__}")
        if output is not None and not isinstance(output, PinnedArray):
            raise OptionError(f"output must be a PinnedArray, not {type(output).__name__}")
        self.item = as_work(work)
        self._worker = worker
        self._limits = limits
        self._output = output
        self._spinning = spinning
        self._words = PinnedArray(context, (3, LINE_WORDS), "int32")  # a cache line each
        self._counter = zeros(context, (1,), "uint32")
        self._kernels = load(context, KERNELS)
        self._scratch = None if output is None else np.zeros(output.shape, output.array.dtype)

    @property
    def owners(self) -> tuple[object, ...]:
        """What must live as long as the graph can run."""
        output = None if self._output is None else self._output.owner
        arrays = (self._words.owner, self._counter.owner)
        return (*arrays, self._kernels, self._scratch, output, self.item.keep)

    def request(self, graph: int, after: list[Any], _: tuple) -> Any:
        """Add the node that posts a request."""
        asks = self._kernels["mailbox_request"]
        packed = asks.pack((self._counter, self._device_address(REQUEST)))
        return nodes.add_kernel(
            graph, after, asks.function, ONE, ONE, 0, packed, nodes.highest_priority()
        )

    def wait(self, graph: int, after: list[Any], _: tuple) -> Any:
        """Add the node that waits for its answer."""
        if not self._spinning:
            return nodes.add_answer_wait(graph, after, self._device_address(ACK))
        waits = self._kernels["mailbox_wait"]
        words = (self._device_address(ACK), self._device_address(GAVE_UP))
        packed = waits.pack((self._counter, *words, int(self._limits.device_s * 1e9)))
        return nodes.add_kernel(
            graph, after, waits.function, ONE, ONE, 0, packed, nodes.highest_priority()
        )

    def port(self, state: Any, title: str, keep: object) -> Callable[[int], tuple]:
        """Return what hands the host's side to a graph: (code, api, user object)."""
        work = self.item.native
        if self._scratch is not None:
            work = (work[0], (*work[1], self._scratch), *work[2:])
        results = (0, 0, 0)
        if self._scratch is not None and self._output is not None:
            results = (self._scratch.ctypes.data, self._output.host_ptr, self._output.nbytes)
        gave_up = self._host_address(GAVE_UP) if self._spinning else 0
        words = (self._host_address(REQUEST), self._host_address(ACK), gave_up)
        limits = (self._limits.answer_s, self._limits.replay_s or 0.0)

        return lambda graph: _native.attach_mailbox(
            graph, state, self._worker.native, title, work, words, results, limits, keep
        )

    def _device_address(self, word: int) -> int:
        return self._words.ptr + 4 * LINE_WORDS * word

    def _host_address(self, word: int) -> int:
        return self._words.host_ptr + 4 * LINE_WORDS * word
