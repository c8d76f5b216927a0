"""Processes that hold one model together: how bytes go between them, on lanes and beside them.

On the soft device, and wherever one asks for it, host steps send and receive through MPI
(``native/hostwork/ranks.cpp``, rules T1 to T4); `graft.cudagraph.nccl` gathers on CUDA devices.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.context import Context
from graft.cudagraph.errors import DeadlineError, OptionError
from graft.cudagraph.hostwork import NativeWork
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray, PinnedArray
from graft.native import _native

#: Seconds that a rank may be late by unless one says otherwise.
DEADLINE_S = 60.0
#: How long a wait on Python's side stays out of Ctrl-C's reach.
_LOOK_S = 0.2
_INT_MAX = 2**31 - 1
#: 64-bit words of what rank 0 says first; all zero: nothing will be said any more.
HEAD = 8

Buffer = PinnedArray | NDArray[Any]


class Ranks:
    """This process among those that one launcher started.

    Calls that belong together are made by all ranks in the same order, and the device work that
    they add is ordered: on one stream, or by marks.

    Parameters
    ----------
    comm : a communicator of mpi4py's; a duplicate of it is used, so nobody else's messages count.
    deadline_s : seconds that another rank may be late by, once a forward has begun.

    Raises
    ------
    OptionError
        The deadline is no positive number, MPI was not initialised for several threads, or mpi4py
        is missing (`mpi`).

    Attributes
    ----------
    rank, size : int
    messages : how many this process has sent from Python, and told lanes to send in each replay.
    """

    def __init__(self, comm: Any, deadline_s: float = DEADLINE_S) -> None:
        from mpi4py import MPI

        if type(deadline_s) not in (int, float) or not 0 < deadline_s < math.inf:
            raise OptionError(f"deadline_s must be a positive number, got {deadline_s!r}")
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:  # T1
            raise OptionError(
                "MPI was initialised without MPI_THREAD_MULTIPLE, which ranks need: "
                "a host step and Python's threads call it"
            )
        self.deadline_s = float(deadline_s)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._comm = comm.Dup()
        library = ctypes.CDLL(MPI.__file__)
        calls = (
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            for name in ("MPI_Isend", "MPI_Irecv", "MPI_Test")
        )
        wide = MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_void_p)
        self._mpi = _native.Mpi(*calls, wide, MPI._handleof(self._comm), MPI._handleof(MPI.BYTE))
        self._kept: list[object] = []  # what MPI may write to once messages were given up
        self._given_up = False
        atexit.register(self._end)

    @staticmethod
    def mpi(deadline_s: float = DEADLINE_S) -> Ranks:
        """All processes that ``mpiexec`` started."""
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise OptionError(
                "several ranks need mpi4py and an MPI: pip install "
                f"'graft-cuda[parallel]' ({error})"
            ) from error
        return Ranks(MPI.COMM_WORLD, deadline_s)

    @property
    def others(self) -> tuple[int, ...]:
        """Every rank but this one."""
        return tuple(r for r in range(self.size) if r != self.rank)

    @property
    def failure(self) -> str | None:
        """Why messages were given up, after which none goes any more; None while they go."""
        return self._mpi.failure

    def exchange(
        self,
        lane: Lane,
        sent: Sequence[tuple[int, Buffer]],
        received: Sequence[tuple[int, Buffer]] = (),
        name: str = "ranks",
    ) -> None:
        """Add a host step that sends to and receives from ranks, all at once.

        A rank that does not answer within `deadline_s` fails the step, and every later one.
        """
        made = self._messages(sent, received, self.deadline_s)
        address, data = made.work
        lane.host(NativeWork(address, data, (made, sent, received), name), name=name)

    def keep(self, buffer: object) -> None:
        """Keep what messages on lanes are sent from or received in: MPI may still use it after they
        were given up (T4)."""
        self._kept.append(buffer)

    def release(self) -> None:
        """Keep nothing: no message is on its way."""
        self._kept.clear()

    def give_up(self) -> None:
        """End the processes of all ranks with this one."""
        self._given_up = True

    def send(self, peers: Sequence[int], *buffers: Buffer) -> None:
        """Send to ranks now. Raises DeadlineError."""
        sent = [(peer, buffer) for peer in peers for buffer in buffers]
        self._wait(self._messages(sent, (), self.deadline_s), sent, self.deadline_s)

    def receive(self, peer: int, *buffers: Buffer, timeout_s: float = math.inf) -> None:
        """Receive from a rank now. Raises DeadlineError when it says nothing for so long."""
        received = [(peer, buffer) for buffer in buffers]
        self._wait(self._messages((), received, timeout_s), received, timeout_s)

    def _messages(
        self,
        sent: Sequence[tuple[int, Buffer]],
        received: Sequence[tuple[int, Buffer]],
        deadline_s: float,
    ) -> Any:
        given = []
        for is_sent, pairs in ((False, received), (True, sent)):
            for peer, buffer in pairs:
                if buffer.nbytes > _INT_MAX:
                    raise OptionError(f"a message of {buffer.nbytes} bytes is more than MPI takes")
                array = buffer.array if isinstance(buffer, PinnedArray) else buffer
                address = array.ctypes.data
                given.append((peer, is_sent, address, buffer.nbytes))
        return _native.Messages(self._mpi, given, deadline_s)

    def _wait(self, messages: Any, keep: object, timeout_s: float) -> None:
        begun = time.monotonic()
        done = False
        while not done:
            done = messages.wait(_LOOK_S)
            if done is None or (not done and time.monotonic() - begun > timeout_s):
                messages.give_up()
                self.keep(keep)
                raise DeadlineError(f"rank {self.rank}: {self.failure}")

    def close(self) -> None:
        """Rank 0 tells the others that it is over; after a failure all processes are ended."""
        atexit.unregister(self._end)
        self._end()

    def _end(self) -> None:
        if self.failure is not None or self._given_up:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI's own words would come behind
            self._comm.Abort(1)
        elif self.rank == 0:
            self.send(self.others, np.zeros(HEAD, np.int64))


class Gather(ABC):
    """Brings what every rank has to all of them.

    Parameters
    ----------
    most : elements of the largest array that one rank has.
    """

    def __init__(self, context: Context, ranks: Ranks, most: int) -> None:
        self._ranks = ranks
        self._own = DeviceArray(context, (most,), "float32")
        self._all = DeviceArray(context, (ranks.size * most,), "float32")

    def connect(self) -> None:  # noqa: B027
        """Meet the other ranks, who all call this, before the first gather."""

    def own(self, rows: int, columns: int) -> DeviceArray:
        """Where this rank leaves its float32[rows, columns]; the next one takes its place."""
        return self._own[: rows * columns].reshape(rows, columns)

    @abstractmethod
    def gather(self, lane: Lane, own: DeviceArray) -> DeviceArray:
        """float32[ranks, rows, columns] of all ranks' `own`, until the next call."""

    def _everyones(self, own: DeviceArray) -> DeviceArray:
        ranks = self._ranks.size
        return self._all[: ranks * own.size].reshape(ranks, *own.shape)


class MpiGather(Gather):
    """By host steps."""

    def __init__(self, context: Context, ranks: Ranks, most: int) -> None:
        super().__init__(context, ranks, most)
        self._staged = PinnedArray(context, (ranks.size * most,), "float32")
        ranks.keep(self._staged)

    def gather(self, lane: Lane, own: DeviceArray) -> DeviceArray:
        """See `Gather`."""
        ranks = self._ranks
        everyones = self._everyones(own)
        parts = [self._staged.part(rank * own.size, own.shape) for rank in range(ranks.size)]
        lane.copy(parts[ranks.rank], own, name="own sums")
        sent = [(other, parts[ranks.rank]) for other in ranks.others]
        received = [(other, parts[other]) for other in ranks.others]
        ranks.exchange(lane, sent, received, "sums of ranks")
        lane.copy(everyones, self._staged.part(0, everyones.shape), name="all sums")
        return everyones
