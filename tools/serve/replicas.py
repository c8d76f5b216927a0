"""Data parallel serving: several engines behind one endpoint, and recovery when one dies.

The output of a request depends on the request alone: it is greedy, or it is verified in mode
``coupled`` with a seed that is fixed when the request arrives. When a replica dies, its requests
are therefore restarted on another replica, and their clients continue to receive tokens where the
stream was interrupted.

A request that kills engines is isolated: after `SUSPECT_DEATHS` deaths it is a suspect, and a
replica runs at most one suspect. A suspect that was running at the next death is not restarted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from graft.models.engine.engine import Engine
from graft.models.errors import EngineError
from graft.models.request import Event, Output, Request
from graft.tools.serve.engine_driver import (
    COUNTERS_TIMEOUT_S,
    EngineInfo,
    error_event,
    get_all,
)
from graft.tools.serve.router import Router

LOG = logging.getLogger("graft")
#: Number of replica deaths after which a request is suspected of causing them.
SUSPECT_DEATHS = 2
#: First and maximum number of seconds between two attempts to restart a replica.
RESTART_DELAY_S = 1.0
MAX_RESTART_DELAY_S = 60.0
#: Number of seconds without an answer after which a replica counts as dead.
SILENCE_TIMEOUT_S = 120.0


class Actor(Protocol):
    """Handle of a `ReplicaActor` in another process."""

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method and return its result.

        Raises the error of the method, or an error that describes the death of the process.
        """

    def kill(self) -> None:
        """End the process if it still runs."""


@dataclass(eq=False)
class _RoutedRequest:
    """A request and the part of its output that its client has received.

    Attributes
    ----------
    request
        The request; its seed is set.
    sink
        Queue of its events.
    keys
        Prefix keys of its prompt.
    submitted_at
        Time of submission (``time.monotonic``).
    deaths
        Number of replicas that died while they ran it.
    tokens
        Tokens that were delivered.
    characters
        Number of characters that were delivered.
    received
        Number of tokens and of characters received from the present replica.
    """

    request: Request
    sink: asyncio.Queue[Event]
    keys: list[bytes]
    submitted_at: float = field(default_factory=time.monotonic)
    deaths: int = 0
    tokens: list[int] = field(default_factory=list)
    characters: int = 0
    received: tuple[int, int] = 0, 0

    def start(self) -> Request:
        """Return the request for the next replica, with the remaining timeout."""
        self.received = (0, 0)
        timeout_s = self.request.timeout_s
        if timeout_s is not None:
            elapsed = time.monotonic() - self.submitted_at
            timeout_s = max(1e-3, timeout_s - elapsed)
        return replace(self.request, timeout_s=timeout_s)

    def undelivered(self, event: Event) -> Event | None:
        """Return the part of an event that has not been delivered; None if there is none.

        Raises
        ------
        EngineError
            If the tokens differ from those that an earlier replica generated.
        """
        token_start, character_start = self.received
        overlap = max(0, len(self.tokens) - token_start)
        delivered = self.tokens[token_start : token_start + len(event.tokens)]
        if overlap and tuple(delivered) != event.tokens[:overlap]:
            raise EngineError("the restarted request generated different tokens")
        tokens = event.tokens[overlap:]
        text = event.text[max(0, self.characters - character_start) :]
        self.received = (token_start + len(event.tokens), character_start + len(event.text))
        self.tokens += tokens
        self.characters += len(text)
        if not event.finished and not tokens and not text:
            return None
        logprobs = None if event.logprobs is None else event.logprobs[overlap:]
        return replace(event, tokens=tokens, text=text, logprobs=logprobs)


class _Replica:
    """State of one replica.

    Attributes
    ----------
    number
        Index of the replica.
    actor
        Handle of its process.
    alive
        Whether it accepts requests.
    start_error
        Message of the error of the last restart; None if it did not fail.
    requests
        Its requests by id.
    jobs
        Requests to submit and ids of requests to cancel that were not sent yet.
    """

    def __init__(self, number: int, actor: Actor):
        self.number = number
        self.actor = actor
        self.alive = True
        self.start_error: str | None = None
        self.requests: dict[str, _RoutedRequest] = {}
        self.jobs: asyncio.Queue[Request | str] = asyncio.Queue()

    @property
    def has_suspect(self) -> bool:
        """Whether one of its requests is suspected of killing engines."""
        return any(request.deaths >= SUSPECT_DEATHS for request in self.requests.values())


class Replicas:
    """Several engines with the interface of one `EngineDriver`.

    Parameters
    ----------
    launch
        Starts a process with a `ReplicaActor` and returns its handle.
    make_engine
        Creates the engine in that process. The engine must verify in mode ``coupled`` and must not
        limit the number of waiting requests.
    count
        Number of replicas.
    max_waiting
        Maximum number of requests without a slot. Further ones are refused.

    Attributes
    ----------
    info
        Static properties of all engines together.
    """

    def __init__(
        self,
        launch: Callable[[], Actor],
        make_engine: Callable[[], Engine],
        count: int,
        max_waiting: int,
    ):
        self._launch = launch
        self._make_engine = make_engine
        self._replicas = [_Replica(number, launch()) for number in range(count)]
        self._requests: dict[str, _RoutedRequest] = {}
        self._unassigned: list[_RoutedRequest] = []
        self._max_waiting = max_waiting
        self._supervisors: list[asyncio.Task[None]] = []
        self._on_output: Callable[[Output], None]
        self._router: Router
        self.info: EngineInfo

    async def begin(self) -> None:
        """Wait until all engines have been created. Errors of `make_engine` propagate."""
        [info, *_] = await asyncio.gather(
            *(replica.actor.call("start", self._make_engine) for replica in self._replicas)
        )
        count = len(self._replicas)
        self._router = Router(count, info)
        self.info = replace(info, max_batch_size=count * info.max_batch_size)

    def start(self, on_output: Callable[[Output], None]) -> None:
        """Start to supervise the replicas.

        Parameters
        ----------
        on_output
            Called with the output of every request.
        """
        self._on_output = on_output
        self._supervisors = [
            asyncio.create_task(self._supervise(replica)) for replica in self._replicas
        ]

    async def stop(self) -> None:
        """Cancel all requests and end the supervision."""
        self.cancel_all()
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)

    @property
    def open_requests(self) -> int:
        """Number of requests that have neither ended nor been cancelled."""
        return len(self._requests)

    @property
    def alive(self) -> list[bool]:
        """Whether each replica accepts requests."""
        return [replica.alive for replica in self._replicas]

    @property
    def failure(self) -> str | None:
        """Message of an error if no replica could be restarted; else None."""
        errors = [replica.start_error for replica in self._replicas]
        return errors[0] if all(errors) else None

    def submit(self, request: Request, sink: asyncio.Queue[Event]) -> None:
        """Submit a request.

        Its events are put into `sink`. The last event always has an output, also if the request
        fails.
        """
        request_id = str(request.id)
        if request.seed is None:
            request = replace(request, seed=secrets.randbits(64))
        keys = self._router.keys(request.tokens or ())
        routed = _RoutedRequest(request, sink, keys)
        self._requests[request_id] = routed
        if self.open_requests > self._max_waiting + self.info.max_batch_size:
            message = f"{self._max_waiting} requests are waiting already"
            self._finish(request_id, error_event(request_id, message, "QueueFullError"))
        elif self.failure is not None:
            self._finish(request_id, error_event(request_id, self.failure))
        else:
            self._unassigned.append(routed)
            self._assign()

    def cancel(self, request_id: str) -> None:
        """Cancel a request."""
        for replica in self._replicas:
            if request_id in replica.requests:
                replica.jobs.put_nowait(request_id)
        output = Output(request_id, reason="cancelled")
        self._finish(request_id, Event(request_id, (), "", output))

    def cancel_all(self) -> None:
        """Cancel all requests. Their last events are still delivered."""
        for request_id in list(self._requests):
            self.cancel(request_id)

    async def counters(self) -> list[dict[str, Any] | None]:
        """Return `Engine.counters` of each replica; None for one that does not answer."""

        async def read_counters(replica: _Replica) -> dict[str, Any] | None:
            with suppress(Exception):  # `_monitor` handles errors
                async with asyncio.timeout(COUNTERS_TIMEOUT_S):
                    return await replica.actor.call("counters") if replica.alive else None
            return None

        return await asyncio.gather(*map(read_counters, self._replicas))

    # Supervision of a replica -------------------------------------------------------------------

    async def _supervise(self, replica: _Replica) -> None:
        """Exchange messages with a replica and restart it whenever it dies."""
        delay = RESTART_DELAY_S
        while True:
            try:
                if not replica.alive:
                    replica.actor = self._launch()
                    await replica.actor.call("start", self._make_engine)
                    replica.alive = True
                    replica.start_error = None
                    delay = RESTART_DELAY_S
                    self._assign()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._send_jobs(replica))
                    group.create_task(self._receive_events(replica))
                    group.create_task(self._monitor(replica))
            except Exception as error:  # any error means that the replica is dead
                was_alive = replica.alive
                self._handle_death(replica, _first_line(error))
                if not was_alive:
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, MAX_RESTART_DELAY_S)

    async def _send_jobs(self, replica: _Replica) -> None:
        while True:  # one call at a time, which keeps the order
            await replica.actor.call("send", await get_all(replica.jobs))

    async def _receive_events(self, replica: _Replica) -> None:
        while True:
            for event in await replica.actor.call("receive"):
                request = replica.requests.get(event.id)
                if request is not None:  # it may have been cancelled
                    self._deliver(replica, request, event)

    def _deliver(self, replica: _Replica, request: _RoutedRequest, event: Event) -> None:
        """Deliver the part of an event that the client has not received."""
        try:
            rest = request.undelivered(event)
        except EngineError as error:
            replica.jobs.put_nowait(event.id)
            rest = error_event(event.id, str(error))
        if rest is None:
            return
        if rest.finished:
            self._finish(event.id, rest)
        else:
            request.sink.put_nowait(rest)

    async def _monitor(self, replica: _Replica) -> None:
        """Raise EngineError when a replica has not answered for `SILENCE_TIMEOUT_S`."""
        answered_at = time.monotonic()
        while time.monotonic() - answered_at < SILENCE_TIMEOUT_S:
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_TIMEOUT_S):
                    if await replica.actor.call("counters") is not None:
                        answered_at = time.monotonic()
            await asyncio.sleep(SILENCE_TIMEOUT_S / 10)
        raise EngineError(f"no answer for {SILENCE_TIMEOUT_S:g} s")

    def _handle_death(self, replica: _Replica, message: str) -> None:
        """Make the requests of a dead replica available to the others, or end them."""
        state = "died" if replica.alive else "did not start"
        LOG.warning("replica %d %s: %s", replica.number, state, message)
        replica.actor.kill()
        replica.start_error = None if replica.alive else message
        replica.alive = False
        self._router.forget(replica.number)
        requests = replica.requests
        replica.requests = {}
        replica.jobs = asyncio.Queue()
        for request_id, request in requests.items():
            request.deaths += 1
            if request.deaths > SUSPECT_DEATHS:
                text = (
                    f"{request.deaths} engines died while they ran the request; "
                    f"error of the last one: {message}"
                )
                self._finish(request_id, error_event(request_id, text))
            else:
                self._unassigned.append(request)
        if self.failure is not None:
            for request in list(self._unassigned):
                request_id = str(request.request.id)
                self._finish(request_id, error_event(request_id, self.failure))
        self._assign()

    # Requests -----------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Assign unassigned requests to replicas, as far as there are replicas for them."""
        requests = self._unassigned
        self._unassigned = []
        for request in requests:
            is_suspect = request.deaths >= SUSPECT_DEATHS
            loads = {
                replica.number: len(replica.requests)
                for replica in self._replicas
                if replica.alive and not (is_suspect and replica.has_suspect)
            }
            if not loads:
                self._unassigned.append(request)
                continue
            replica = self._replicas[self._router.choose(request.keys, loads)]
            replica.requests[str(request.request.id)] = request
            replica.jobs.put_nowait(request.start())

    def _finish(self, request_id: str, event: Event) -> None:
        """Deliver the last event of a request, unless the request has already ended."""
        request = self._requests.pop(request_id, None)
        if request is None or event.output is None:
            return
        for replica in self._replicas:
            replica.requests.pop(request_id, None)
        self._unassigned = [other for other in self._unassigned if other is not request]
        self._on_output(event.output)
        request.sink.put_nowait(event)
        self._assign()


def _first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, or of the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return (str(error) or type(error).__name__).splitlines()[0]
