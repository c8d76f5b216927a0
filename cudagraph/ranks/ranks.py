"""Communication between the ranks of a tensor-parallel model: point-to-point and all-gather.

A rank is one process. An all-reduce of partial sums is an all-gather followed by a kernel that adds
the ranks' parts in rank order, so that the result is bit-identical on all ranks and in every run.

On the soft device, host steps send and receive through MPI (``native/hostwork/ranks.cpp``). On CUDA
devices, :mod:`graft.cudagraph.ranks.nccl` performs the all-gathers. Comments refer to the rules T1
to T5 of ``native/hostwork/INVARIANTS.md``.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.memory import DeviceArray, PinnedArray
from graft.cudagraph.errors import DeadlineError, OptionError
from graft.cudagraph.host.hostwork import NativeWork, check_seconds
from graft.cudagraph.lanes import Lane
from graft.native import _native

#: Default seconds to wait for another rank.
DEADLINE_S = 60.0
#: Interval at which waits in Python check for Ctrl-C.
_INTERRUPT_CHECK_S = 0.2
_INT_MAX = 2**31 - 1
#: Length in 64-bit words of the header that rank 0 sends to the other ranks before each request. An
#: all-zero header tells them to stop receiving requests.
HEADER_WORDS = 8
#: Number of heartbeats that rank 0 sends within the deadline of the group.
HEARTBEATS_PER_DEADLINE = 4
#: Values of heartbeat messages. Rank 0 sends _LAST once, before the header that stops the others.
_ALIVE = 1
_LAST = 2
#: Maximum seconds that one poll adds to the measured silence of rank 0. The limit matters if this
#: process was suspended during the poll: rank 0 may have sent messages in this time.
_MAX_SILENT_STEP_S = 1.0

Buffer = PinnedArray | NDArray[Any]
#: Messages of one exchange, as pairs of the other rank and the buffer.
RankBuffers = Sequence[tuple[int, Buffer]]


class RankGroup:
    """The processes that run a tensor-parallel model together, with this process as one rank.

    All ranks must make matching calls in the same order. :meth:`exchange` adds a host step to a
    lane. These host steps must also run in the order of the calls: on one stream, or ordered by
    marks (`record` and `wait` of lanes).

    A thread of rank 0 sends heartbeats. If rank 0 ends while the other ranks wait for a request
    (:meth:`receive_header`), the heartbeats stop and the other ranks raise DeadlineError.

    Parameters
    ----------
    comm
        Communicator. The group uses a duplicate of it, so that messages of other users of the
        communicator cannot be mixed up with messages of the group.
    deadline_s
        Maximum seconds to wait for another rank within a forward pass. Between forward passes, the
        maximum seconds to wait for a heartbeat of rank 0.

    Raises
    ------
    OptionError
        The deadline is not a positive number, or MPI was initialized without support for multiple
        threads.
    """

    def __init__(self, comm: Any, deadline_s: float = DEADLINE_S) -> None:
        from mpi4py import MPI

        check_seconds("deadline_s", deadline_s)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:  # INVARIANTS.md T1
            raise OptionError(
                "MPI was initialized without MPI_THREAD_MULTIPLE, which tensor parallelism needs: "
                "host steps and Python threads call MPI concurrently"
            )
        self.deadline_s = float(deadline_s)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._comm = comm.Dup()
        self._mpi = _native_communicator(MPI, self._comm)
        self._heartbeat_comm = comm.Dup()
        self._heartbeat_mpi = _native_communicator(MPI, self._heartbeat_comm)
        self._heartbeat = np.zeros(1, np.int64)
        self._heartbeats = self._heartbeat_messages()
        self._closing = threading.Event()
        self._sender = threading.Thread(
            target=self._send_heartbeats, name="graft heartbeats", daemon=True
        )
        # Buffers that MPI may still access after messages were abandoned (INVARIANTS.md T4).
        self._kept_buffers: list[object] = []
        self._abort = False
        atexit.register(self._end)
        if self.rank == 0 and self.peers:
            self._sender.start()

    @staticmethod
    def from_mpi(deadline_s: float = DEADLINE_S) -> RankGroup:
        """Return the group of all processes that ``mpiexec`` started. mpi4py must be installed."""
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise OptionError(
                "tensor parallelism needs mpi4py and an MPI library: pip install mpi4py mpich "
                f"({error})"
            ) from error
        return RankGroup(MPI.COMM_WORLD, deadline_s)

    @property
    def peers(self) -> tuple[int, ...]:
        """All ranks except this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    @property
    def failure(self) -> str | None:
        """Reason why the communication was abandoned; None if it was not."""
        return self._mpi.failure

    def exchange(
        self, lane: Lane, sent: RankBuffers, received: RankBuffers = (), name: str = "ranks"
    ) -> None:
        """Add a host step that sends messages to other ranks and receives messages from them.

        `sent` and `received` contain a pair of a rank and a buffer for each message. All messages
        of the step are in flight concurrently. If a rank does not answer within `deadline_s`, this
        step and all later steps fail.
        """
        messages = self._messages(sent, received, self.deadline_s)
        address, data = messages.work
        keep = (messages, sent, received)
        lane.host(NativeWork(address, data, keep, name), name=name)

    def keep_alive(self, buffer: object) -> None:
        """Keep a buffer alive that host steps send from or receive into.

        MPI may access the buffer even after its message was abandoned (rule T4 of
        ``native/hostwork/INVARIANTS.md``).
        """
        self._kept_buffers.append(buffer)

    def release_buffers(self) -> None:
        """Release all buffers that were kept alive. No message may be in flight."""
        self._kept_buffers.clear()

    def abort_on_close(self) -> None:
        """Make :meth:`close` terminate the processes of all ranks."""
        self._abort = True

    def send(self, peers: Sequence[int], *buffers: Buffer) -> None:
        """Send buffers to each of the ranks `peers` and wait until they are sent.

        DeadlineError is raised if a rank does not receive them within `deadline_s`.
        """
        sent = [(peer, buffer) for peer in peers for buffer in buffers]
        self._wait(self._messages(sent, (), self.deadline_s), sent, self.deadline_s)

    def receive(self, peer: int, *buffers: Buffer, timeout_s: float = math.inf) -> None:
        """Receive buffers from rank `peer` and wait until they are filled.

        DeadlineError is raised if the rank does not send them within ``timeout_s`` seconds.
        """
        received = [(peer, buffer) for buffer in buffers]
        self._wait(self._messages((), received, timeout_s), received, timeout_s)

    def receive_header(self, header: NDArray[np.int64]) -> None:
        """Receive the next header of `HEADER_WORDS` words from rank 0, however long rank 0 is idle.

        DeadlineError is raised if rank 0 has sent neither a header nor a heartbeat for `deadline_s`
        seconds.
        """
        messages = self._messages((), [(0, header)], self.deadline_s)
        silent_s = 0.0
        done = False
        while not done:
            start = time.monotonic()
            done = messages.wait(_INTERRUPT_CHECK_S)
            if self._take_heartbeats():
                silent_s = 0.0
            else:
                silent_s += min(time.monotonic() - start, _MAX_SILENT_STEP_S)
            if done is None or (not done and silent_s > self.deadline_s):
                self._abandon(messages, header)
        if not header.any():
            self._take_last_heartbeat()

    def _heartbeat_messages(self) -> Any:
        """Return the MPI messages of one heartbeat: sends on rank 0, a receive on other ranks."""
        is_sent = self.rank == 0
        peers = self.peers if is_sent else (0,)
        address = self._heartbeat.ctypes.data
        messages = [(peer, is_sent, address, self._heartbeat.nbytes) for peer in peers]
        return _native.Messages(self._heartbeat_mpi, messages, self.deadline_s)

    def _send_heartbeats(self) -> None:
        """Send heartbeats until the group is closed. Runs on a thread of rank 0."""
        self._heartbeat[0] = _ALIVE
        while not self._closing.wait(self.deadline_s / HEARTBEATS_PER_DEADLINE):
            done = False
            while not done:
                done = self._heartbeats.wait(_INTERRUPT_CHECK_S)
                if done is None or self._closing.is_set():
                    return

    def _send_last_heartbeat(self) -> None:
        self._closing.set()
        self._sender.join()
        # If the sender thread has left a heartbeat in flight, wait until it is sent.
        self._wait(self._heartbeats, self._heartbeat, self.deadline_s)
        self._heartbeat[0] = _LAST
        self._wait(self._heartbeats, self._heartbeat, self.deadline_s)

    def _take_heartbeats(self) -> bool:
        """Receive the heartbeats that have arrived; return whether there was one."""
        arrived = False
        while self._heartbeat[0] != _LAST and self._heartbeats.wait(0.0):
            arrived = True
        return arrived

    def _take_last_heartbeat(self) -> None:
        while self._heartbeat[0] != _LAST:
            self._wait(self._heartbeats, self._heartbeat, self.deadline_s)

    def _messages(self, sent: RankBuffers, received: RankBuffers, deadline_s: float) -> Any:
        messages = []
        for is_sent, pairs in ((False, received), (True, sent)):
            for peer, buffer in pairs:
                if buffer.nbytes > _INT_MAX:
                    raise OptionError(
                        f"a message has {buffer.nbytes} bytes; MPI allows at most {_INT_MAX}"
                    )
                array = buffer.array if isinstance(buffer, PinnedArray) else buffer
                messages.append((peer, is_sent, array.ctypes.data, buffer.nbytes))
        return _native.Messages(self._mpi, messages, deadline_s)

    def _wait(self, messages: Any, keep: object, timeout_s: float) -> None:
        start = time.monotonic()
        done = False
        while not done:
            done = messages.wait(_INTERRUPT_CHECK_S)
            expired = not done and time.monotonic() - start > timeout_s
            if done is None or expired:
                self._abandon(messages, keep)

    def _abandon(self, messages: Any, keep: object) -> NoReturn:
        messages.abandon()
        self.keep_alive(keep)
        reason = self.failure or self._heartbeat_mpi.failure
        raise DeadlineError(f"rank {self.rank}: {reason}")

    def close(self) -> None:
        """Shut down the communication.

        Rank 0 sends an all-zero header to the other ranks, which then stop receiving requests. On
        the other ranks this method does nothing. After a failure or :meth:`abort_on_close`, every
        rank instead calls ``MPI_Abort``, which terminates the processes of all ranks.
        """
        atexit.unregister(self._end)
        self._end()

    def _end(self) -> None:
        if self.failure is not None or self._abort:
            sys.stdout.flush()
            sys.stderr.flush()
            # The error was already printed. Discard the message that MPI_Abort prints.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            self._comm.Abort(1)
        elif self.rank == 0 and self.peers:
            self._send_last_heartbeat()
            self.send(self.peers, np.zeros(HEADER_WORDS, np.int64))


def _native_communicator(mpi: Any, comm: Any) -> Any:
    """Return the object through which native code calls MPI's C functions on `comm`."""
    library = ctypes.CDLL(mpi.__file__)

    def address(name: str) -> int:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0

    return _native.Mpi(
        address("MPI_Isend"),
        address("MPI_Irecv"),
        address("MPI_Test"),
        mpi._sizeof(mpi.Comm) == ctypes.sizeof(ctypes.c_void_p),  # handles are pointers
        mpi._handleof(comm),
        mpi._handleof(mpi.BYTE),
    )


class AllGather(ABC):
    """Interface of an all-gather with at most `max_elements` float32 elements per rank.

    All ranks of the group take part in every all-gather. A caller must wait at most
    `forward_limit_s` seconds for a forward pass that contains all-gathers. If it is None, no limit
    is needed, because each all-gather ends at the deadline of the group.
    """

    forward_limit_s: float | None = None

    def __init__(self, context: Context, ranks: RankGroup, max_elements: int) -> None:
        self._ranks = ranks
        self._local = DeviceArray(context, (max_elements,), "float32")
        self._gathered = DeviceArray(context, (ranks.size * max_elements,), "float32")

    def connect(self) -> None:  # noqa: B027
        """Connect the ranks. All ranks must call this method before the first all-gather."""

    def local_buffer(self, rows: int, columns: int) -> DeviceArray:
        """Return the float32 [rows, columns] buffer for this rank's input of an all-gather.

        All calls return the same memory.
        """
        return self._local[: rows * columns].reshape(rows, columns)

    @abstractmethod
    def all_gather(self, lane: Lane, local: DeviceArray) -> DeviceArray:
        """Add an all-gather of `local`, from :meth:`local_buffer`, to a lane.

        Return the parts of all ranks, float32 [ranks, rows, columns]. The next all-gather
        overwrites them.
        """

    def _gathered_like(self, local: DeviceArray) -> DeviceArray:
        size = self._ranks.size
        return self._gathered[: size * local.size].reshape(size, *local.shape)


class MpiAllGather(AllGather):
    """All-gather in a host step that calls MPI. The parts are copied through pinned memory."""

    def __init__(self, context: Context, ranks: RankGroup, max_elements: int) -> None:
        super().__init__(context, ranks, max_elements)
        self._staging = PinnedArray(context, (ranks.size * max_elements,), "float32")
        ranks.keep_alive(self._staging)

    def all_gather(self, lane: Lane, local: DeviceArray) -> DeviceArray:
        ranks = self._ranks
        gathered = self._gathered_like(local)
        parts = [self._staging.view(rank * local.size, local.shape) for rank in range(ranks.size)]
        lane.copy(parts[ranks.rank], local, name="copy local part to host")
        sent = [(peer, parts[ranks.rank]) for peer in ranks.peers]
        received = [(peer, parts[peer]) for peer in ranks.peers]
        ranks.exchange(lane, sent, received, "all-gather")
        lane.copy(gathered, self._staging.view(0, gathered.shape), name="copy all parts to device")
        return gathered
