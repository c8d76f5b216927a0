"""A server of one engine: how it comes up, and how it leaves."""

from __future__ import annotations

import socket
import time
from types import FrameType

import uvicorn

from graft.tools.serve.app import Service

#: Seconds that callers get to read what they are told when the server leaves.
LAST_S = 5


class Server(uvicorn.Server):
    """Answers calls until a signal comes and what runs is done, or its time is up.

    Parameters
    ----------
    listener : a socket that is bound; closed in the end.
    drain_s : seconds to finish what runs; a second signal ends it at once.
    """

    def __init__(self, service: Service, listener: socket.socket, drain_s: float):
        super().__init__(
            uvicorn.Config(
                service.app,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=LAST_S,
            )
        )
        self.service = service
        self._listener = listener
        self._drain_s = drain_s
        self._until = 0.0
        host, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def drain(self) -> None:
        """Take no more calls, and leave when the last one is answered. Any thread may call it."""
        self._until = time.monotonic() + self._drain_s
        self.service.draining = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM and Ctrl-C."""
        if self.service.draining:
            self.should_exit = True
        else:
            self.drain()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self.service.draining and (not self.service.calls or time.monotonic() > self._until):
            self.should_exit = True
        if self.should_exit:
            self.service.driver.cancel_all()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        print(f"graft: serving {self.service.settings.name} at {self.url}", flush=True)

    def start(self) -> None:
        """Run until the end."""
        self.run(sockets=[self._listener])
