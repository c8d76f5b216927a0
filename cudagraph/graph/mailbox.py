"""Mailboxes: the device posts a request, and a persistent host thread runs the work and answers.

Request and answer are words in pinned memory that kernels and the worker thread poll. No driver
thread is involved, so the work is not serialized with other host functions. If no answer arrives by
the deadline, a watchdog thread lets the device continue and fails the replay.
``native/hostwork/INVARIANTS.md`` states the rules (M1 to M10).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.memory import PinnedArray, from_host
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import nodes
from graft.cudagraph.host.hostwork import MIN_SPIN_CORES, HostWork, as_work, check_seconds
from graft.cudagraph.kernels.kernels import Kernel, load
from graft.native import _native

KERNELS = Path(__file__).parents[1] / "kernels" / "mailbox.cu"
#: 32-bit words per cache line.
LINE_WORDS = 16
#: Indices of the cache lines that contain the words of a mailbox. The word REQUEST is the number of
#: the posted request. The word ACK is the answer, which the host stores. The word TIMED_OUT is the
#: number of the request whose waiting kernel reached its deadline.
REQUEST, ACK, TIMED_OUT = range(3)
ONE_THREAD = (1, 1, 1)
#: Longest wait of a spinning kernel on devices that limit the run time of kernels. Drivers end a
#: kernel after two seconds or more, which makes the context unusable.
TIMED_DEVICE_S = 1.0
#: Initial value of the counter that numbers the requests of a mailbox: the first request has the
#: next number. The number after 2**32 - 1 is 1, because 0 means "no request".
FIRST_REQUEST = 0
#: A worker in mode "park" polls continuously for SPIN_S after a request and then every SLEEP_S.
SPIN_S = 50e-6
SLEEP_S = 50e-6


def limits_kernel_time(context: Context) -> bool:
    """Return whether the driver ends kernels that run too long, as it does for display GPUs."""
    return context.attribute("KERNEL_EXEC_TIMEOUT") != 0


class MailboxWorker:
    """A thread that runs the work of mailboxes.

    Parameters
    ----------
    cpus
        Cores the thread may run on. Default: all cores of the process.
    wait : {"auto", "spin", "park"}
        How the thread waits while a replay is in flight. "spin" polls continuously and occupies a
        core. "park" polls continuously for 50 us and then every 50 us. "auto" selects "spin" if at
        least 4 cores are usable. While no replay is in flight, the thread sleeps in every mode.
    name
        Name of the thread.

    Attributes
    ----------
    native
        Native thread. ``native.parked`` is set while it sleeps until the next launch,
        ``native.stuck`` while it still runs work that missed its deadline.
    """

    def __init__(
        self,
        *,
        cpus: Iterable[int] | None = None,
        wait: Literal["auto", "spin", "park"] = "auto",
        name: str = "mailbox",
    ) -> None:
        usable = os.sched_getaffinity(0)
        selected = sorted(usable if cpus is None else set(cpus))
        if not selected or not set(selected) <= usable:
            raise OptionError(f"cpus {selected} are not all usable: this process has {usable}")
        if wait not in ("auto", "spin", "park"):
            raise OptionError(f"wait must be 'auto', 'spin' or 'park', not {wait!r}")
        if wait == "auto":
            wait = "spin" if len(selected) >= MIN_SPIN_CORES else "park"
        self.cpus = () if cpus is None else tuple(selected)
        self.wait = wait
        self.native = _native.MailboxThread(
            list(self.cpus), self.wait == "spin", SPIN_S, SLEEP_S, name
        )

    @property
    def served(self) -> int:
        """Number of requests whose work was run, including work that missed its deadline."""
        return int(self.native.served)

    def __repr__(self) -> str:
        return f"<MailboxWorker {self.wait}, {self.served} served>"


@dataclass(frozen=True)
class Limits:
    """Deadlines of a mailbox in seconds."""

    answer_s: float  # maximum time from the request to the end of the work
    replay_s: float | None = None  # maximum time from the launch to the request; None: no limit
    # Maximum time that a spinning kernel waits, by the device's clock; None: twice `answer_s`.
    device_s: float | None = None

    def __post_init__(self) -> None:
        check_seconds("deadline_s", self.answer_s)
        if self.replay_s is not None:
            check_seconds("replay_deadline_s", self.replay_s)
        if self.device_s is not None:
            check_seconds("device_deadline_s", self.device_s)

    def device_ns(self, context: Context) -> int:
        """Return how long a spinning kernel waits, in nanoseconds of the device's clock."""
        seconds = 2.0 * self.answer_s if self.device_s is None else self.device_s
        if limits_kernel_time(context):
            seconds = min(seconds, TIMED_DEVICE_S)
        return int(seconds * 1e9)


class Mailbox:
    """One mailbox of a graph: its words in pinned memory, its work and its two nodes.

    Created by :meth:`GraphLane.mailbox` and :meth:`GraphLane.spinkernel`. The wait node depends on
    the request node, and the request node depends on everything earlier on the lane. The work
    therefore never depends on its own answer. The kernels of both nodes are added with the highest
    priority, so that in executables instantiated with ``priorities=True`` they do not have to wait
    for the blocks of a large kernel.

    If a launch may post several requests, the graph counts its completed launches in the word
    `completed`. If each launch posts one request, `completed` is None.
    """

    def __init__(
        self,
        context: Context,
        work: HostWork,
        worker: MailboxWorker,
        limits: Limits,
        output: PinnedArray | None,
        *,
        spinkernel: bool,
        completed: PinnedArray | None = None,
    ) -> None:
        if not isinstance(worker, MailboxWorker):
            raise OptionError(f"worker must be a MailboxWorker, not {type(worker).__name__}")
        if output is not None and not isinstance(output, PinnedArray):
            raise OptionError(f"output must be a PinnedArray, not {type(output).__name__}")
        self.item = as_work(work)
        self._worker = worker
        self._limits = limits
        self._output = output
        self._context = context
        self._spinkernel = spinkernel
        self._completed = completed
        self._words = PinnedArray(context, (3, LINE_WORDS), "int32")
        self._counter = from_host(context, np.array([FIRST_REQUEST], np.uint32))
        # The native side of the mailbox reads the initial value of the request counter from ACK.
        self._words.array.view(np.uint32)[ACK, 0] = FIRST_REQUEST
        self._kernels = load(context, KERNELS)
        self._scratch = None if output is None else np.zeros(output.shape, output.array.dtype)

    @property
    def owners(self) -> tuple[object, ...]:
        """Objects that must live as long as the graph can run."""
        output = None if self._output is None else self._output.owner
        completed = None if self._completed is None else self._completed.owner
        arrays = (self._words.owner, self._counter.owner, completed)
        return (*arrays, self._kernels, self._scratch, output, self.item.keep)

    def add_request(self, graph: int, dependencies: list[Any], _: object) -> Any:
        """Add the node that posts a request to the worker, and return its CUgraphNode."""
        args = (self._counter, self._device_address(REQUEST), self._device_address(ACK))
        return self._add_kernel(graph, dependencies, self._kernels["mailbox_request"], args)

    def add_wait(self, graph: int, dependencies: list[Any], _: object) -> Any:
        """Add the node that waits until the worker has run the work; return its CUgraphNode."""
        if not self._spinkernel:
            return nodes.add_mailbox_wait(graph, dependencies, self._device_address(ACK))
        args = (
            self._counter,
            self._device_address(ACK),
            self._device_address(TIMED_OUT),
            self._limits.device_ns(self._context),
        )
        return self._add_kernel(graph, dependencies, self._kernels["mailbox_wait"], args)

    def _add_kernel(
        self, graph: int, dependencies: list[Any], kernel: Kernel, args: tuple[object, ...]
    ) -> Any:
        launch = nodes.KernelLaunch(kernel.function, ONE_THREAD, ONE_THREAD, 0, kernel.pack(args))
        return nodes.add_kernel(graph, dependencies, launch, nodes.highest_priority())

    def attach_port(self, state: Any, title: str, keep: object) -> Callable[[int], tuple]:
        """Return a function that attaches the host side of the mailbox (its port) to a CUgraph.

        `state` is the native state of the graph, `title` the name of the step in error messages.
        The objects in `keep` are kept alive as long as the graph can run.
        """
        work = self.item.native
        results = (0, 0, 0)
        if self._scratch is not None and self._output is not None:
            fn, args, address, data = work
            work = (fn, (*args, self._scratch), address, data)
            results = (self._scratch.ctypes.data, self._output.host_ptr, self._output.nbytes)
        timed_out = self._host_address(TIMED_OUT) if self._spinkernel else 0
        completed = 0 if self._completed is None else self._completed.host_ptr
        words = (self._host_address(REQUEST), self._host_address(ACK), timed_out, completed)
        limits = (self._limits.answer_s, self._limits.replay_s or 0.0)

        return lambda graph: _native.attach_mailbox(
            graph, state, self._worker.native, title, work, words, results, limits, keep
        )

    def _device_address(self, word: int) -> int:
        return self._words.ptr + 4 * LINE_WORDS * word

    def _host_address(self, word: int) -> int:
        return self._words.host_ptr + 4 * LINE_WORDS * word
