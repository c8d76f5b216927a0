"""The thread that owns an engine, and what asyncio asks of it."""

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
#: Seconds that an engine may take to say how it is.
ASK_S = 5.0


@dataclass(frozen=True)
class Facts:
    """What must be known of an engine: its tokenizer's folder, what it takes, how many requests
    run at once, and how large its cache is."""

    tokenizer: Path
    limits: Limits
    rows: int
    page_size: int
    pages: int


class Driver:
    """Submits, cancels and steps in one thread; it sleeps while there is nothing to do.

    All methods are the event loop's. Requests have ids of their own.

    Attributes
    ----------
    facts : of the engine.
    failure : why the engine has failed for good, or None.
    """

    def __init__(self, engine: Engine):
        options = engine.options
        self.facts = Facts(
            engine.tokenizer.path,
            options.limits,
            options.max_batch_size,
            options.page_size,
            options.sizes[1],
        )
        self._engine = engine
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._sinks: dict[str, asyncio.Queue[Event]] = {}
        self._thread = threading.Thread(target=self._run, name="graft engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._ended: Callable[[Output], None]
        self.failure: str | None = None

    def start(self, ended: Callable[[Output], None]) -> None:
        """Begin; `ended` is told of every request's output."""
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Let the thread end. What is unfinished is cancelled first."""
        self.cancel_all()
        self._put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def open(self) -> int:
        """Requests that somebody waits for."""
        return len(self._sinks)

    def submit(self, request: Request, sink: asyncio.Queue[Event]) -> None:
        """Its events come into `sink`; the last one has its output, whatever happens."""
        self._sinks[str(request.id)] = sink
        self._put(partial(self._submit, request))

    def cancel(self, request_id: str) -> None:
        """End a request that nobody waits for any more."""
        if self._sinks.pop(request_id, None) is not None:
            self._put(partial(self._engine.cancel, request_id))

    def cancel_all(self) -> None:
        """End all requests; those who wait are told."""
        for request_id in self._sinks:
            self._put(partial(self._engine.cancel, request_id))

    @property
    def live(self) -> list[bool]:
        """Whether the engine works; of several, each."""
        return [self.failure is None]

    async def counters(self) -> list[dict[str, Any] | None]:
        """`Engine.counters` between two rounds; of several, each. None: it does not answer."""
        answer: Future[dict[str, Any] | None] = Future()

        def job() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._engine.counters())
                except Exception as error:  # whoever asked is told
                    answer.set_exception(error)

        if self.failure is None:
            self._put(job)
            with suppress(TimeoutError):
                return [await asyncio.wait_for(asyncio.wrap_future(answer), ASK_S)]
        return [None]

    def _put(self, job: Callable[[], object] | None) -> None:
        self._jobs.put(job)
        self._engine.wake()

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                with suppress(queue.Empty):
                    while (job := self._jobs.get(block=not self._at_work)) is not None:
                        job()
                    return
                self._tell(self._engine.step())
            except Exception as error:  # the engine has failed, whatever by
                self.failure = str(error) or type(error).__name__
                self._loop.call_soon_threadsafe(self._fail, self.failure)

    @property
    def _at_work(self) -> bool:
        return self.failure is None and self._engine.busy

    def _submit(self, request: Request) -> None:
        try:
            if self.failure is not None:
                raise EngineError(self.failure)
            self._engine.submit(request)
        except Exception as error:  # of a failed engine; the request ends all the same
            self._tell([failed(str(request.id), str(error), type(error).__name__)])

    def _tell(self, events: Sequence[Event]) -> None:
        if events:
            self._loop.call_soon_threadsafe(self._deliver, events)

    # The loop again ---------------------------------------------------------------------------

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            sink = self._sinks.get(event.id)
            if event.output is not None:
                self._sinks.pop(event.id, None)
                self._ended(event.output)
            if sink is not None:
                sink.put_nowait(event)

    def _fail(self, why: str) -> None:
        self._deliver([failed(name, why) for name in self._sinks])


def failed(request_id: str, why: str, kind: str = "EngineError") -> Event:
    """The last event of a request that an error ended."""
    return Event(request_id, (), "", Output(request_id, reason="error", error=why, error_type=kind))


async def all_of(queue: asyncio.Queue[T]) -> list[T]:
    """What a queue has, as soon as it has any."""
    found = [await queue.get()]
    while not queue.empty():
        found.append(queue.get_nowait())
    return found
