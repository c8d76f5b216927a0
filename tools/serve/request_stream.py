"""The events of the engine requests that belong to one API request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from graft.models.request import Event, Request
from graft.tools.serve.engine_driver import EngineDriver
from graft.tools.serve.replicas import Replicas


class RequestStream:
    """The events of several engine requests.

    The constructor submits the requests. Iteration yields pairs ``(index, event)`` until all
    requests have ended; ``index`` is the position of the event's request in `requests`.
    """

    def __init__(self, driver: EngineDriver | Replicas, requests: Sequence[Request]):
        self._driver = driver
        self._sink: asyncio.Queue[Event] = asyncio.Queue()
        self._unfinished = {str(request.id): i for i, request in enumerate(requests)}
        for request in requests:
            driver.submit(request, self._sink)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self._unfinished:
            event = await self._sink.get()
            index = self._unfinished[event.id]
            if event.finished:
                del self._unfinished[event.id]
            yield index, event

    def close(self) -> None:
        """Cancel the requests that have not ended."""
        for request_id in self._unfinished:
            self._driver.cancel(request_id)
