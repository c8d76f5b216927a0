"""Data parallel serving: one endpoint for several engines, and recovery when an engine dies.

A replica is an engine in a separate process. A replica counts as dead when its process exits, when
its engine fails, or when it has not answered for a configurable time. Dead replicas are restarted.

The output of a request depends on nothing but the request: decoding is either greedy, or drafts
are verified in mode ``coupled`` with a seed that is fixed when the request arrives. Therefore, when
a replica dies, its requests can be restarted on another replica and generate the same tokens again.
Tokens that the client has received are not sent again, so the stream of the client continues where
it was interrupted.

A request that crashes its engine must not crash all replicas, one after the other. A request is a
suspect if `SUSPECT_DEATHS` replicas have died while they ran it. A replica runs at most one suspect
at a time. If another replica dies while it runs a suspect, the suspect ends with an error.
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
from graft.models.request import Event, Output, Request, check_timeout
from graft.tools.serve.engine_driver import COUNTERS_TIMEOUT_S, EngineInfo, error_event, get_all
from graft.tools.serve.router import Router

LOG = logging.getLogger("graft")
#: Number of replicas that must have died while they ran a request before it becomes a suspect: a
#: request that may crash its engine.
SUSPECT_DEATHS = 2

#: Delay in seconds between the first failed attempt to restart a replica and the next attempt, and
#: upper bound of the delay. The delay doubles after each failed attempt.
RESTART_DELAY_S = 1.0
MAX_RESTART_DELAY_S = 60.0
#: Maximum interval in seconds between two queries that test whether a replica still answers.
QUERY_INTERVAL_S = 1.0
#: Number of seconds without an answer after which `Replicas.alive` reports a replica as not alive.
SILENT_S = 10.0


class Actor(Protocol):
    """Handle of a `graft.tools.serve.actors.ReplicaActor` in another process."""

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of the actor and return an awaitable for its result.

        If the method raises an error, or the actor's process has died, the ``await`` raises an
        error.
        """

    def kill(self) -> None:
        """Terminate the process if it still runs."""


@dataclass(eq=False)
class _RoutedRequest:
    """A request and the part of its output that its client has received.

    Attributes
    ----------
    request
        The request. It has a seed, so that a second replica generates the same tokens.
    sink
        Queue that receives the events of the request.
    keys
        Prefix-cache keys of the prompt.
    submitted_at
        Time of submission (``time.monotonic``).
    deaths
        Number of replicas that died while they ran the request.
    tokens
        Tokens that were delivered to the client.
    characters
        Number of characters that were delivered to the client.
    received
        Number of tokens, and number of characters, that the current replica has sent so far. After
        the death of a replica, another one generates the output from its beginning, so the client
        may already have some of them.
    """

    request: Request
    sink: asyncio.Queue[Event]
    keys: list[bytes]
    submitted_at: float = field(default_factory=time.monotonic)
    deaths: int = 0
    tokens: list[int] = field(default_factory=list)
    characters: int = 0
    received: tuple[int, int] = 0, 0

    def begin_run(self) -> Request:
        """Begin to run the request on a replica, and return the request to send there.

        Its timeout is the part of the client's timeout that remains. The tokens that are received
        from the replica are counted from 0 again.
        """
        self.received = (0, 0)
        timeout_s = self.request.timeout_s
        if timeout_s is not None:
            elapsed = time.monotonic() - self.submitted_at
            timeout_s = max(1e-3, timeout_s - elapsed)
        return replace(self.request, timeout_s=timeout_s)

    def undelivered(self, event: Event) -> Event | None:
        """Return an event without the tokens and text that the client has already received.

        After the death of a replica, another one generates the output from its beginning, and the
        client has some of these tokens already. If the event contains nothing new, return None. If
        the tokens differ from those of the earlier replica, raise EngineError.
        """
        token_start, character_start = self.received
        overlap = max(0, len(self.tokens) - token_start)
        delivered = self.tokens[token_start : token_start + len(event.tokens)]
        if overlap and tuple(delivered) != event.tokens[:overlap]:
            raise EngineError(
                "the request was restarted on another replica and generated different tokens"
            )
        tokens = event.tokens[overlap:]
        num_delivered = max(0, self.characters - character_start)
        text = event.text[num_delivered:]
        token_end = token_start + len(event.tokens)
        character_end = character_start + len(event.text)
        self.received = (token_end, character_end)
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
        Handle of the replica's process.
    alive
        Whether the replica accepts requests.
    answered_at
        Time of the replica's last answer (``time.monotonic``).
    start_error
        Error message of the last restart; None if the last restart succeeded.
    requests
        Requests that are assigned to the replica, by id.
    jobs
        Jobs that have not been sent to the actor: requests to submit, and ids of requests to
        cancel.
    """

    def __init__(self, number: int, actor: Actor):
        self.number = number
        self.actor = actor
        self.alive = True
        self.answered_at = time.monotonic()
        self.start_error: str | None = None
        self.requests: dict[str, _RoutedRequest] = {}
        self.jobs: asyncio.Queue[Request | str] = asyncio.Queue()

    @property
    def has_suspect(self) -> bool:
        """Whether the replica runs a suspect: a request that may crash its engine."""
        return any(request.deaths >= SUSPECT_DEATHS for request in self.requests.values())


class Replicas:
    """Several engines in separate processes, with the same interface as `EngineDriver`.

    `launch` starts a process with a `ReplicaActor` and returns its handle. `make_engine` creates
    the engine in that process. The engine must verify drafts in mode ``coupled``. It must not limit
    the number of waiting requests, because this object does: if `max_waiting` requests of all
    replicas together wait for a slot, a further request is refused. A replica that does not answer
    for `timeout_s` seconds counts as dead. ``info.max_batch_size`` is the sum over all engines.
    """

    def __init__(
        self,
        launch: Callable[[], Actor],
        make_engine: Callable[[], Engine],
        count: int,
        max_waiting: int,
        timeout_s: float,
    ):
        self._launch = launch
        self._make_engine = make_engine
        self._replicas = [_Replica(number, launch()) for number in range(count)]
        self._requests: dict[str, _RoutedRequest] = {}
        self._unassigned: list[_RoutedRequest] = []
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._supervisors: list[asyncio.Task[None]] = []
        self._on_output: Callable[[Output], None]
        self._router: Router
        self.info: EngineInfo

    async def begin(self) -> None:
        """Create all engines and wait until they are ready.

        If `make_engine` raises an error in any process, this method raises it too.
        """
        [info, *_] = await asyncio.gather(
            *(replica.actor.call("start", self._make_engine) for replica in self._replicas)
        )
        count = len(self._replicas)
        self._router = Router(count, info)
        self.info = replace(info, max_batch_size=count * info.max_batch_size)

    def start(self, on_output: Callable[[Output], None]) -> None:
        """Start the tasks that exchange messages with the replicas and restart them.

        `on_output` is called with the output of every request.
        """
        self._on_output = on_output
        self._supervisors = [
            asyncio.create_task(self._supervise(replica)) for replica in self._replicas
        ]

    async def stop(self) -> None:
        """Cancel all requests and stop the tasks that `start` has started."""
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
        """Whether each replica accepts requests and has answered recently."""
        silent_s = min(SILENT_S, self._timeout_s / 2)
        first = time.monotonic() - silent_s
        return [replica.alive and replica.answered_at > first for replica in self._replicas]

    @property
    def failure(self) -> str | None:
        """Error message if the last restart of every replica failed; else None."""
        errors = [replica.start_error for replica in self._replicas]
        return errors[0] if all(errors) else None

    def submit(self, request: Request, sink: asyncio.Queue[Event]) -> None:
        """Submit a request.

        The events of the request are put into `sink`. The last event always has an output, even if
        the request fails. Raise OptionError if `timeout_s` is invalid. The engines check all
        other fields.
        """
        check_timeout(request.timeout_s)  # `_RoutedRequest.begin_run` would raise it too late
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
        """Cancel a request and deliver its last event immediately."""
        for replica in self._replicas:
            if request_id in replica.requests:
                replica.jobs.put_nowait(request_id)
        output = Output(request_id, reason="cancelled")
        self._finish(request_id, Event(request_id, (), "", output))

    def cancel_all(self) -> None:
        """Cancel all requests and deliver their last events immediately."""
        for request_id in list(self._requests):
            self.cancel(request_id)

    async def counters(self) -> list[dict[str, Any] | None]:
        """Return `Engine.counters` of each replica; None for a replica that does not answer."""

        async def read_counters(replica: _Replica) -> dict[str, Any] | None:
            with suppress(Exception):  # if the replica has died, `_monitor` detects it
                async with asyncio.timeout(COUNTERS_TIMEOUT_S):
                    return await replica.actor.call("counters") if replica.alive else None
            return None

        return await asyncio.gather(*map(read_counters, self._replicas))

    # Supervision of a replica -------------------------------------------------------------------

    async def _supervise(self, replica: _Replica) -> None:
        """Exchange messages with a replica, and restart the replica whenever it dies."""
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
            except Exception as error:  # after any error, the replica is restarted
                was_alive = replica.alive
                self._handle_death(replica, _first_line(error))
                if not was_alive:
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, MAX_RESTART_DELAY_S)

    async def _send_jobs(self, replica: _Replica) -> None:
        while True:  # one call at a time, so that jobs arrive in order
            await replica.actor.call("send", await get_all(replica.jobs))

    async def _receive_events(self, replica: _Replica) -> None:
        while True:
            for event in await replica.actor.call("receive"):
                request = replica.requests.get(event.id)
                if request is not None:  # None: the request has been cancelled
                    self._deliver(replica, request, event)

    def _deliver(self, replica: _Replica, request: _RoutedRequest, event: Event) -> None:
        """Deliver the part of an event that the client has not received yet."""
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
        """Query a replica regularly; raise EngineError if it does not answer in time."""
        interval_s = min(QUERY_INTERVAL_S, self._timeout_s / 10)
        replica.answered_at = time.monotonic()
        silence_s = 0.0
        while silence_s < self._timeout_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s - silence_s):
                    if await replica.actor.call("counters") is not None:
                        replica.answered_at = time.monotonic()
            await asyncio.sleep(interval_s)
            silence_s = time.monotonic() - replica.answered_at
        raise EngineError(f"the replica has not answered for {self._timeout_s:g} s")

    def _handle_death(self, replica: _Replica, message: str) -> None:
        """Terminate the process of a dead replica, and assign its requests to other replicas.

        If more than `SUSPECT_DEATHS` replicas have died while they ran a request, this request
        fails. If every replica has failed to restart, all waiting requests fail.
        """
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
        """Assign waiting requests to replicas.

        A request stays unassigned while no replica is alive. A suspect (a request during which
        `SUSPECT_DEATHS` replicas have died) also stays unassigned while every living replica runs
        another suspect.
        """
        for request in list(self._unassigned):
            is_suspect = request.deaths >= SUSPECT_DEATHS
            loads = {}
            for replica in self._replicas:
                if replica.alive and not (is_suspect and replica.has_suspect):
                    loads[replica.number] = len(replica.requests)
            if not loads:
                continue
            replica = self._replicas[self._router.choose(request.keys, loads)]
            replica.jobs.put_nowait(request.begin_run())
            replica.requests[str(request.request.id)] = request
            self._unassigned.remove(request)

    def _finish(self, request_id: str, event: Event) -> None:
        """End a request with an event, unless the request has already ended."""
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
    """Return the first line of an error's message. For an error group, use its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return (str(error) or type(error).__name__).splitlines()[0]
