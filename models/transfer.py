"""Ways for what is handed over: shared memory of one machine, and mooncake's between machines.

Who sends keeps the bytes and gets a ticket, plain data that goes to the other process by whatever
the user has, such as a queue; who receives fetches the bytes by it. The sender frees them, when it
has heard that they were fetched, or the other is gone.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from graft.cudagraph.errors import OptionError
from graft.models.engine.migrate import MigratedRequest
from graft.models.errors import MigrationError


class Ticket(NamedTuple):
    """Where bytes that were sent can be fetched: at whose, where there, how many, and their sum as
    numbers of 64 bits."""

    where: str
    address: int
    nbytes: int
    total: int


def _total(data: np.ndarray) -> int:
    return int(np.add.reduce(data.view(np.uint64)))


class Transfer(ABC):
    """A way to another process; a subclass has `room`, `fetch` and `drop`.

    Attributes
    ----------
    sent : by ticket, what is kept for it.
    """

    def __init__(self) -> None:
        self.sent: dict[Ticket, Any] = {}

    def send(self, over: MigratedRequest) -> Ticket:
        """Offer it until it is freed. Raises HandOverError where it has no room."""
        parts = over.parts()
        at = 0
        where, address, data, kept = self.room(-(-sum(map(len, parts)) // 8) * 8)
        data[-8:] = 0
        for part in parts:
            data[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        ticket = Ticket(where, address, len(data), _total(data))
        self.sent[ticket] = kept
        return ticket

    def receive(self, ticket: Sequence[Any]) -> MigratedRequest:
        """Fetch what was sent.

        Raises
        ------
        HandOverError
            It is there no more, its sender is gone, it is damaged, or of another format.
        """
        ticket = Ticket(*ticket)
        data = self.fetch(ticket)
        if len(data) != ticket.nbytes or _total(data) != ticket.total:
            raise MigrationError(f"{ticket}: {len(data)} bytes are there, not those that were sent")
        return MigratedRequest.read(data)

    def free(self, ticket: Sequence[Any]) -> None:
        """Let go of what was sent, fetched or not; nothing where that was done."""
        ticket = Ticket(*ticket)
        if ticket in self.sent:
            self.drop(ticket.address, self.sent.pop(ticket))

    def close(self) -> None:
        """Free everything that was sent."""
        for ticket in list(self.sent):
            self.free(ticket)

    @abstractmethod
    def room(self, nbytes: int) -> tuple[str, int, np.ndarray, Any]:
        """Make room: a ticket's `where` and `address`, the bytes, and what to keep meanwhile."""

    @abstractmethod
    def fetch(self, ticket: Ticket) -> np.ndarray:
        """The bytes, uint8 [nbytes]. Raises HandOverError where there are none."""

    @abstractmethod
    def drop(self, address: int, kept: Any) -> None:
        """Give back what `room` made."""


class SharedMemory(Transfer):
    """Between processes of one user on one machine, which see each other in /proc.

    A file in memory without a name, which the other opens through its sender's descriptors: it is
    gone with its last user, however that ends, and no limit of /dev/shm holds for it.
    """

    def room(self, nbytes: int) -> tuple[str, int, np.ndarray, Any]:
        """See `Transfer`."""
        file = os.memfd_create("graft hand-over")
        try:
            os.posix_fallocate(file, 0, nbytes)
            data = np.frombuffer(mmap.mmap(file, nbytes), np.uint8)
        except OSError as error:
            os.close(file)
            raise MigrationError(f"no room for {nbytes} bytes of shared memory: {error}") from error
        return str(os.getpid()), file, data, None

    def fetch(self, ticket: Ticket) -> np.ndarray:
        """See `Transfer`."""
        path = f"/proc/{int(ticket.where)}/fd/{ticket.address}"
        try:
            with open(path, "rb", opener=lambda p, _: os.open(p, os.O_RDONLY | os.O_NONBLOCK)) as f:
                seen = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise MigrationError(f"{ticket}: nothing is there ({error})") from error
        return np.frombuffer(seen, np.uint8)

    def drop(self, address: int, kept: Any) -> None:
        """See `Transfer`."""
        os.close(address)


class Mooncake(Transfer):
    """Between machines, by the package mooncake-transfer-engine.

    Parameters
    ----------
    host : by which others reach this machine.
    protocol, device : mooncake's own, such as "rdma" and the name of a network card.

    Raises
    ------
    OptionError
        The package, or a library that it needs, is not there.
    HandOverError
        It does not start.
    """

    def __init__(self, host: str, protocol: str = "tcp", device: str = "") -> None:
        super().__init__()
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise OptionError(
                "handing over between machines needs the package mooncake-transfer-"
                f"engine ({error}): pip install 'graft-cuda[transfer]', "
                "and the system's libibverbs1"
            ) from error
        self._engine = TransferEngine()
        self._done(
            self._engine.initialize(host, "P2PHANDSHAKE", protocol, device),
            f"mooncake does not start at {host!r} with {protocol!r}",
        )
        self._where = f"{host}:{self._engine.get_rpc_port()}"

    def room(self, nbytes: int) -> tuple[str, int, np.ndarray, Any]:
        """See `Transfer`."""
        data = np.empty(nbytes, np.uint8)
        self._done(
            self._engine.register_memory(data.ctypes.data, nbytes),
            f"mooncake takes no {nbytes} bytes",
        )
        return self._where, data.ctypes.data, data, data

    def fetch(self, ticket: Ticket) -> np.ndarray:
        """See `Transfer`."""
        _, address, data, _ = self.room(ticket.nbytes)
        read = self._engine.transfer_sync_read(ticket.where, address, ticket.address, len(data))
        self._engine.unregister_memory(address)
        self._done(read, f"{ticket}: nothing came")
        return data

    def drop(self, address: int, kept: Any) -> None:
        """See `Transfer`; a late reader is to see that it is gone."""
        kept[:8] = 0
        self._engine.unregister_memory(address)

    def _done(self, code: int, otherwise: str) -> None:
        if code:
            raise MigrationError(f"{otherwise} (code {code})")
