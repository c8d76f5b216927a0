"""KV transfer for disaggregated prefill: shared memory on one machine, Mooncake between machines.

`Transfer.send` keeps the data of a migrated request in the sender's memory and returns a ticket.
The ticket is plain data. The application passes it to the other process, for example through a
queue, and the receiver fetches the data with it. The application calls `Transfer.free` at the
sender after the receiver has fetched the data or has exited.
"""

from __future__ import annotations

import mmap
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from graft.cudagraph.errors import OptionError
from graft.models.engine.migrate import MigratedRequest
from graft.models.errors import MigrationError

__all__ = ["Mooncake", "SharedMemory", "Ticket", "Transfer"]


class Ticket(NamedTuple):
    """Location and checksum of sent data.

    Attributes
    ----------
    sender
        Process id or network address of the sender.
    address
        File descriptor or memory address of the data at the sender.
    nbytes
        Size of the data in bytes.
    checksum
        CRC-32 of the data, to detect memory that was freed or reused.
    """

    sender: str
    address: int
    nbytes: int
    checksum: int


class SendBuffer(NamedTuple):
    """Memory for data to be sent.

    Attributes
    ----------
    sender, address
        Values for the fields of the same names of `Ticket`, by which the receiver finds the data.
    data
        View of the memory as uint8.
    resource
        Object that `Transfer.release_buffer` needs to free the memory.
    """

    sender: str
    address: int
    data: np.ndarray
    resource: Any


class Transfer(ABC):
    """A transport to other processes. A subclass defines `allocate`, `fetch` and `release_buffer`.

    Attributes
    ----------
    sent
        Maps each ticket that `send` has returned, until `free` is called for it, to the
        `SendBuffer.resource` of the ticket's data.
    """

    def __init__(self) -> None:
        self.sent: dict[Ticket, Any] = {}

    def send(self, migrated: MigratedRequest) -> Ticket:
        """Keep the data of a migrated request for receivers, and return its ticket.

        Raises
        ------
        MigrationError
            If there is not enough memory.
        """
        content = migrated.to_bytes()
        sender, address, data, resource = self.allocate(len(content))
        data[:] = np.frombuffer(content, np.uint8)
        ticket = Ticket(sender, address, len(content), zlib.crc32(content))
        self.sent[ticket] = resource
        return ticket

    def receive(self, ticket: Sequence[Any]) -> MigratedRequest:
        """Fetch the migrated request of a ticket.

        Raises
        ------
        MigrationError
            If the data has been freed, its sender has exited, or the data is damaged or has another
            format.
        """
        ticket = Ticket(*ticket)
        data = self.fetch(ticket).tobytes()
        if len(data) != ticket.nbytes or zlib.crc32(data) != ticket.checksum:
            raise MigrationError(
                f"{ticket}: the {len(data)} bytes received differ from the data that was sent; "
                "the sender may have freed the data"
            )
        return MigratedRequest.from_bytes(data)

    def free(self, ticket: Sequence[Any]) -> None:
        """Free the data that was sent with a ticket (`Ticket`), whether or not it was received.

        Repeated calls do nothing.
        """
        ticket = Ticket(*ticket)
        if ticket in self.sent:
            self.release_buffer(ticket.address, self.sent.pop(ticket))

    def close(self) -> None:
        """Free the data of all tickets."""
        for ticket in list(self.sent):
            self.free(ticket)

    @abstractmethod
    def allocate(self, nbytes: int) -> SendBuffer:
        """Allocate memory that receivers can read.

        Raises
        ------
        MigrationError
            If there is not enough memory.
        """

    @abstractmethod
    def fetch(self, ticket: Ticket) -> np.ndarray:
        """Return the data of a ticket, uint8 of shape [nbytes].

        Raises
        ------
        MigrationError
            If the data does not exist.
        """

    @abstractmethod
    def release_buffer(self, address: int, resource: Any) -> None:
        """Free memory that `allocate` returned.

        `address` and `resource` are the fields of the `SendBuffer`.
        """


class SharedMemory(Transfer):
    """Transport between processes of one user on one machine that see each other in /proc.

    The data is an anonymous file in memory (memfd). The receiver opens the file through
    ``/proc/<pid>/fd`` of the sender. The operating system frees the file when every process that
    has opened the file has closed it or exited. Such files do not count against the size limit of
    /dev/shm.
    """

    def allocate(self, nbytes: int) -> SendBuffer:
        file = os.memfd_create("graft KV transfer")
        try:
            os.posix_fallocate(file, 0, nbytes)
            data = np.frombuffer(mmap.mmap(file, nbytes), np.uint8)
        except OSError as error:
            os.close(file)
            raise MigrationError(
                f"{nbytes} bytes of shared memory cannot be allocated: {error}"
            ) from error
        return SendBuffer(str(os.getpid()), file, data, None)

    def fetch(self, ticket: Ticket) -> np.ndarray:
        path = f"/proc/{int(ticket.sender)}/fd/{ticket.address}"
        try:
            with open(path, "rb", opener=_open_nonblocking) as file:
                data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise MigrationError(f"{ticket}: the data does not exist ({error})") from error
        return np.frombuffer(data, np.uint8)

    def release_buffer(self, address: int, resource: Any) -> None:
        os.close(address)


def _open_nonblocking(path: str, _flags: int) -> int:
    # `path` names a file descriptor of the sender. If the sender has freed the data, the descriptor
    # may now belong to a pipe. Without O_NONBLOCK, opening a pipe could block.
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


class Mooncake(Transfer):
    """Transport between machines that uses the package mooncake-transfer-engine.

    Parameters
    ----------
    host
        Host name or address at which other machines can reach this machine.
    protocol
        Mooncake protocol, such as "tcp" or "rdma".
    device
        Name of the network device for Mooncake, such as an RDMA network card.

    Raises
    ------
    OptionError
        If the package or a library that it needs is not installed.
    MigrationError
        If Mooncake fails to start.
    """

    def __init__(self, host: str, protocol: str = "tcp", device: str = "") -> None:
        super().__init__()
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise OptionError(
                f"KV transfer between machines requires Mooncake ({error}): pip install "
                "mooncake-transfer-engine-non-cuda, and install libibverbs1"
            ) from error
        self._engine = TransferEngine()
        self._check(
            self._engine.initialize(host, "P2PHANDSHAKE", protocol, device),
            f"Mooncake failed to start at {host!r} with protocol {protocol!r}",
        )
        self._sender = f"{host}:{self._engine.get_rpc_port()}"

    def allocate(self, nbytes: int) -> SendBuffer:
        data = np.empty(nbytes, np.uint8)
        self._check(
            self._engine.register_memory(data.ctypes.data, nbytes),
            f"Mooncake cannot register {nbytes} bytes",
        )
        return SendBuffer(self._sender, data.ctypes.data, data, data)

    def fetch(self, ticket: Ticket) -> np.ndarray:
        buffer = self.allocate(ticket.nbytes)
        code = self._engine.transfer_sync_read(
            ticket.sender, buffer.address, ticket.address, ticket.nbytes
        )
        self._engine.unregister_memory(buffer.address)
        self._check(code, f"{ticket}: the data cannot be read")
        return buffer.data

    def release_buffer(self, address: int, resource: Any) -> None:
        # This changes the data, because the first eight bytes of safetensors are never all zero. A
        # receiver that reads the freed memory therefore finds a wrong checksum.
        resource[:8] = 0
        self._engine.unregister_memory(address)

    def _check(self, code: int, message: str) -> None:
        if code:
            raise MigrationError(f"{message} (code {code})")
