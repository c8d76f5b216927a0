"""The HTTP server process: startup, draining and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from types import FrameType

import uvicorn

from graft.tools.serve.app import Service
from graft.tools.serve.connections import (
    ACCEPT_BATCH,
    KEEP_ALIVE_S,
    Connection,
    Connections,
    RepeatFilter,
    handle_loop_error,
    is_useful_record,
    max_connections,
)

#: Time limit in seconds for clients to read the rest of their responses at shutdown.
SHUTDOWN_TIMEOUT_S = 5
#: Maximum number of connections that the operating system queues until the server accepts them.
BACKLOG = 1024
_repeat_filter = RepeatFilter()


class Server(uvicorn.Server):
    """An HTTP server that drains on the first SIGTERM or SIGINT.

    While it drains, it refuses new requests. It exits when the running requests have ended, or when
    `drain_s` seconds are over. A second signal cancels the running requests immediately. The server
    closes `listener`, the bound socket to listen on. With `access_log`, it writes one line per
    request to standard output.
    """

    def __init__(
        self, service: Service, listener: socket.socket, drain_s: float, access_log: bool = False
    ):
        super().__init__(
            uvicorn.Config(
                service.app,
                http=Connection,
                ws="none",
                log_level="warning",
                access_log=access_log,
                server_header=False,
                backlog=ACCEPT_BATCH,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
            )
        )
        self.server_state: Connections = Connections(
            max_connections(service.max_api_requests), service.settings.io_timeout_s
        )
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(_repeat_filter)
        logging.getLogger("asyncio").addFilter(is_useful_record)
        if access_log:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        self.service = service
        self._listener = listener
        self._drain_s = drain_s
        self._drain_end = 0.0
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        self.url = f"http://{host}:{port}/v1"

    def drain(self) -> None:
        """Refuse new requests, and exit when the running requests have ended. Thread-safe."""
        self._drain_end = time.monotonic() + self._drain_s
        self.service.draining = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining on the first signal, and exit on the second signal."""
        if self.service.draining:
            self.should_exit = True
        else:
            self.drain()

    async def on_tick(self, counter: int) -> bool:
        """Close unused connections once per second, and exit if draining is complete.

        uvicorn calls this method ten times per second.
        """
        if counter % 10 == 0:
            self.server_state.close_unused()
        if self.service.draining:
            timed_out = time.monotonic() > self._drain_end
            if not self.service.api_requests or timed_out:
                self.should_exit = True
        if self.should_exit:
            self.service.driver.cancel_all()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening and print the URL."""
        asyncio.get_running_loop().set_exception_handler(handle_loop_error)
        await super().startup(sockets)
        self._listener.listen(BACKLOG)  # the configuration of uvicorn has the same backlog
        with contextlib.suppress(OSError):  # standard output may be closed or full
            print(f"graft: serving {self.service.settings.name} at {self.url}", flush=True)

    def start(self) -> None:
        """Run the server until it shuts down."""
        self.run(sockets=[self._listener])
