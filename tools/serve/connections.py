"""Limits on connections: their number, and the time for which a client may leave one unused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import logging
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from graft.cudagraph.errors import OptionError

#: Time limit in seconds for a client to send the header of a request, after it has connected or
#: has received its last response.
HEADER_TIMEOUT_S = 15.0
#: Time in seconds for which a connection stays open after a response if the client sends nothing.
KEEP_ALIVE_S = 5
#: Maximum number of connections that the event loop accepts before it handles other events. The
#: number of connections can exceed its limit by a few times this value, until the excess is closed.
ACCEPT_BATCH = 16
#: Number of file descriptors reserved for the rest of the process: files, pipes, child processes.
RESERVED_DESCRIPTORS = 128
#: Maximum number of connections without a request in progress. Each connection takes memory.
MAX_UNUSED_CONNECTIONS = 4096
_MIN_CONNECTIONS = 16
_LOG_INTERVAL_S = 60.0
_RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_logger = logging.getLogger("uvicorn.error")


def max_connections(max_requests: int) -> int:
    """Return the maximum number of connections for a maximum number of requests in progress.

    Raise OptionError if the limit of open files of this process is too low for a server.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) + RESERVED_DESCRIPTORS
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    if limit < used + _MIN_CONNECTIONS:
        raise OptionError(
            f"at most {limit} files can be open (ulimit -n), but the server needs at least "
            f"{used + _MIN_CONNECTIONS}"
        )
    return min(limit - used, MAX_UNUSED_CONNECTIONS + max_requests)


class Connection(H11Protocol):
    """A connection that records how long it has been waiting for its client."""

    server_state: Connections
    #: Time at which the client connected or received its last response.
    waiting_since: float

    #: Time at which the server stopped sending because the client had not read what was sent; None
    #: if the server can send.
    blocked_since: float | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_waiting(self) -> bool:
        """Whether the connection waits for a request or for the body of a request."""
        return self.is_idle or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, and close others if there are too many."""
        super().connection_made(transport)
        self.waiting_since = time.monotonic()
        self.server_state.make_room()

    def on_response_complete(self) -> None:
        """Record that the connection waits for the next request."""
        self.waiting_since = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Record that the server cannot send more until the client reads what was sent."""
        self.blocked_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Record that the client has read enough for the server to send more."""
        self.blocked_since = None
        super().resume_writing()


class Connections(ServerState):
    """The open connections of a server, at most `limit`.

    `send_timeout_s` is a time limit in seconds. If the server cannot send more because the client
    has not read what was sent, the client must read within this time. It must also read the rest of
    a response within this time after the server has closed the connection.
    """

    connections: set[Connection]  # type: ignore[assignment]

    def __init__(self, limit: int, send_timeout_s: float):
        super().__init__()
        self.limit = limit
        self._send_timeout_s = send_timeout_s

    def make_room(self) -> None:
        """If there are too many connections, close those that have waited for a request longest.

        A connection whose request has arrived completely stays open until the response is complete.
        If there are only such connections besides the new one, the new connection is closed.
        """
        excess = len(self.connections) - self.limit
        if excess <= 0:
            return
        _logger.warning(
            "%d connections are open, which is the limit: those that send no request are closed",
            self.limit,
        )
        unused = [
            connection
            for connection in self.connections
            if connection.is_waiting or connection.transport.is_closing()
        ]
        # Searching all connections takes time, so each search closes up to a sixteenth of the limit
        # instead of one connection.
        count = min(len(unused) - 1, max(excess, self.limit // 16))
        for connection in heapq.nsmallest(max(count, 1), unused, _waiting_since):
            self._abort(connection)

    def close_unused(self) -> None:
        """Close the connections whose clients have exceeded a time limit.

        The limits are `HEADER_TIMEOUT_S` for sending the header of the next request, and
        `send_timeout_s` for reading a part of a response.
        """
        now = time.monotonic()
        for connection in list(self.connections):
            if connection.transport.is_closing() and connection.blocked_since is None:
                connection.blocked_since = now
            blocked_since = connection.blocked_since
            if blocked_since is not None and now - blocked_since > self._send_timeout_s:
                self._abort(connection)
            elif connection.is_idle and now - connection.waiting_since > HEADER_TIMEOUT_S:
                connection.transport.close()

    def _abort(self, connection: Connection) -> None:
        # The event loop removes the connection only later, in connection_lost. New connections that
        # are made before that must not count this one.
        self.connections.discard(connection)
        connection.transport.abort()


def _waiting_since(connection: Connection) -> float:
    return connection.waiting_since


class RepeatFilter(logging.Filter):
    """Passes one record per minute for each logging call and type of error.

    Without this filter, clients could fill the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[object, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record, and add the number of omitted records to its message."""
        error = record.exc_info[0] if record.exc_info else None
        key = (record.pathname, record.lineno, error)
        logged_at, omitted = self._seen.get(key, (-_LOG_INTERVAL_S, 0))
        now = time.monotonic()
        if now - logged_at < _LOG_INTERVAL_S:
            self._seen[key] = (logged_at, omitted + 1)
            return False
        self._seen[key] = (now, 0)
        if omitted:
            record.msg = f"{record.getMessage()} ({omitted} more such messages were omitted)"
            record.args = ()
        return True


@contextlib.contextmanager
def log_to_stderr() -> Iterator[None]:
    """Write graft's warnings, such as the death of a replica, to standard error."""
    raises = logging.raiseExceptions
    logging.raiseExceptions = False  # if a record cannot be written, print no traceback
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("graft: %(message)s"))
    handler.addFilter(RepeatFilter())
    logger = logging.getLogger("graft")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logging.raiseExceptions = raises


def is_useful_record(record: logging.LogRecord) -> bool:
    """Return False for asyncio's warning about writing to a lost connection, else True.

    The server may write a response before it detects that the connection is lost. It then cancels
    the request, so the warning is not useful.
    """
    return record.msg != "socket.send() raised exception."


def handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop, in one line if the process or system is out of resources."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _RESOURCE_ERRORS:
        _logger.error("%s: %s", context.get("message"), error)
    else:
        loop.default_exception_handler(context)
