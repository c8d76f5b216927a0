"""The thread that runs an engine on behalf of an asyncio event loop.

The event loop passes jobs (functions) to the thread through a queue. The thread passes the events
of the requests back with ``call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from graft.models.engine.engine import Engine
from graft.models.errors import EngineError
from graft.models.request import Event, Limits, Output, Request

T = TypeVar("T")
#: Time limit in seconds for the engine to answer `EngineDriver.counters`.
COUNTERS_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class EngineInfo:
    """Static properties of an engine."""

    #: Folder of the tokenizer.
    tokenizer: Path
    limits: Limits
    #: Maximum number of tokens of prompt and output together.
    max_length: int
    #: Number of request slots.
    max_batch_size: int
    #: Number of tokens per KV-cache page.
    page_size: int
    pages: int


class EngineDriver:
    """Runs an engine in a thread. The thread sleeps while the engine has no requests.

    The public methods must be called from one event loop, and other threads must call only the
    thread-safe methods of the engine. Request ids must be unique. `failure` is the message of the
    error that made the engine unusable, or None.
    """

    def __init__(self, engine: Engine):
        options = engine.options
        self.info = EngineInfo(
            tokenizer=engine.tokenizer.path,
            limits=options.limits,
            max_length=options.sizes[0],
            max_batch_size=options.max_batch_size,
            page_size=options.internal.page_size,
            pages=options.sizes[1],
        )
        self._engine = engine
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._sinks: dict[str, asyncio.Queue[Event]] = {}
        self._thread = threading.Thread(target=self._run, name="graft engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._on_output: Callable[[Output], None]
        self.failure: str | None = None

    def start(self, on_output: Callable[[Output], None]) -> None:
        """Start the thread.

        `on_output` is called in the event loop with the output of every request.
        """
        self._on_output = on_output
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Cancel all requests and wait until the thread has exited."""
        self.cancel_all()
        self._put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def open_requests(self) -> int:
        """Number of requests that have neither ended nor been cancelled."""
        return len(self._sinks)

    def submit(self, request: Request, sink: asyncio.Queue[Event]) -> None:
        """Submit a request.

        The events of the request are put into `sink`. The last event always has an output, even if
        the request fails.
        """
        self._sinks[str(request.id)] = sink
        self._put(partial(self._submit, request))

    def cancel(self, request_id: str) -> None:
        """Cancel a request and drop its further events."""
        if self._sinks.pop(request_id, None) is not None:
            self._put(partial(self._engine.cancel, request_id))

    def cancel_all(self) -> None:
        """Cancel all requests. The last event of each request is still delivered."""
        for request_id in self._sinks:
            self._put(partial(self._engine.cancel, request_id))

    @property
    def alive(self) -> list[bool]:
        """List with one element: whether the engine is usable.

        `Replicas.alive` has the same form, with one element per replica.
        """
        return [self.failure is None]

    async def counters(self) -> list[dict[str, Any] | None]:
        """Return a list with one element: the result of `Engine.counters`.

        The driver's thread reads the counters between two decoding rounds, so that the values are
        consistent. The element is None if the engine has failed or does not answer in time.
        """
        answer: Future[dict[str, Any] | None] = Future()

        def read_counters() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._engine.counters())
                except Exception:  # the thread handles it, as an error of a decoding round
                    answer.set_result(None)
                    raise

        if self.failure is None:
            self._put(read_counters)
            with suppress(TimeoutError):
                return [await asyncio.wait_for(asyncio.wrap_future(answer), COUNTERS_TIMEOUT_S)]
        return [None]

    def _put(self, job: Callable[[], object] | None) -> None:
        """Queue a function for the thread to call. None makes the thread exit."""
        self._jobs.put(job)
        self._engine.wake()

    # Methods of the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if not self._run_jobs():
                    return
                self._post(self._engine.step())
                if not self._engine.busy:
                    self._engine.synchronize()  # reclaim the pages of finished requests
            except Exception as error:  # any error of the engine is final
                self.failure = str(error) or type(error).__name__
                self._loop.call_soon_threadsafe(self._fail_all, self.failure)

    def _run_jobs(self) -> bool:
        """Run all queued jobs, or wait for a job if the engine is idle.

        Return False if the engine's thread must exit.
        """
        with suppress(queue.Empty):
            while True:
                job = self._jobs.get(block=not self._busy)
                if job is None:
                    return False
                job()
        return True

    @property
    def _busy(self) -> bool:
        return self.failure is None and self._engine.busy

    def _submit(self, request: Request) -> None:
        try:
            if self.failure is not None:
                raise EngineError(self.failure)
            self._engine.submit(request)
        except Exception as error:  # report the error as the output of the request
            event = error_event(str(request.id), str(error), type(error).__name__)
            self._post([event])

    def _post(self, events: Sequence[Event]) -> None:
        """Pass events from the engine's thread to the event loop."""
        if events:
            self._loop.call_soon_threadsafe(self._deliver, events)

    # Methods of the event loop ------------------------------------------------------------------

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            sink = self._sinks.get(event.id)
            if event.output is not None:
                self._sinks.pop(event.id, None)
                self._on_output(event.output)
            if sink is not None:
                sink.put_nowait(event)

    def _fail_all(self, message: str) -> None:
        self._deliver([error_event(request_id, message) for request_id in self._sinks])


def error_event(request_id: str, message: str, error_type: str = "EngineError") -> Event:
    """Return the last event of a request that has failed. Its output contains the error message."""
    output = Output(request_id, reason="error", error=message, error_type=error_type)
    return Event(request_id, (), "", output)


async def get_all(source: asyncio.Queue[T]) -> list[T]:
    """Wait until a queue has an item, and then remove and return all items."""
    items = [await source.get()]
    while not source.empty():
        items.append(source.get_nowait())
    return items
