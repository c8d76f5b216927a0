"""What one caller waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from graft.models.request import Event, Request
from graft.tools.serve.driver import Driver
from graft.tools.serve.replicas import Replicas


class Exchange:
    """Requests that are run for one caller, who may leave at any time by `close`."""

    def __init__(self, driver: Driver | Replicas, requests: Sequence[Request]):
        self._driver = driver
        self._sink: asyncio.Queue[Event] = asyncio.Queue()
        self._left = {str(request.id): i for i, request in enumerate(requests)}
        for request in requests:
            driver.submit(request, self._sink)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Events as they come, each with its request's place among all."""
        while self._left:
            event = await self._sink.get()
            index = self._left[event.id]
            if event.finished:
                del self._left[event.id]
            yield index, event

    def close(self) -> None:
        for request_id in self._left:
            self._driver.cancel(request_id)
