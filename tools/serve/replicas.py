"""Several engines behind one endpoint: who gets a call, and what becomes of those of one that dies.

A call's outcome follows from the call alone: it is greedy, or verified as coupled with a seed that
it has from its arrival on. So the calls of an engine that died begin anew at another one, and their
callers hear on where they were.

A call at which engines die is found by elimination: after `SUSPECT` deaths it shares an engine with
no other suspect, and whoever is there at the next one is not tried again.
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
from graft.tools.serve.driver import ASK_S, Facts, all_of, failed
from graft.tools.serve.router import Router

LOG = logging.getLogger("graft")
SUSPECT = 2
#: Seconds between two attempts to bring up an engine that does not come: the first, and the most.
RETRY_S = 1.0, 60.0
#: Seconds without an answer after which an engine counts as dead.
SILENT_S = 120.0


class Actor(Protocol):
    """A `Worker`, in a process of its own."""

    def call(self, name: str, *given: Any) -> Awaitable[Any]:
        """What one of its methods returns. Raises what that raises, or what it died by."""

    def kill(self) -> None:
        """End the process, if it still runs."""


@dataclass(eq=False)
class _Call:
    """A request, and what of it its caller has heard: so many characters, and these tokens."""

    request: Request
    sink: asyncio.Queue[Event]
    keys: list[int]
    arrived: float = field(default_factory=time.monotonic)
    deaths: int = 0
    told: list[int] = field(default_factory=list)
    characters: int = 0
    at: tuple[int, int] = 0, 0  # tokens and characters that the present engine has brought

    def begun(self) -> Request:
        """What to ask of the next engine."""
        self.at = (0, 0)
        left = self.request.timeout_s
        if left is not None:
            left = max(1e-3, left - (time.monotonic() - self.arrived))
        return replace(self.request, timeout_s=left)

    def news(self, event: Event) -> Event | None:
        """What of an event has not been told; None: nothing. Raises EngineError."""
        at, characters = self.at
        known = len(self.told) - at
        if known > 0 and tuple(self.told[at : at + len(event.tokens)]) != event.tokens[:known]:
            raise EngineError("begun anew, the answer is another one")
        new = max(0, known)
        text = event.text[max(0, self.characters - characters) :]
        self.at = at + len(event.tokens), characters + len(event.text)
        self.told += event.tokens[new:]
        self.characters += len(text)
        if not event.finished and not event.tokens[new:] and not text:
            return None
        told = event.logprobs
        return replace(
            event,
            tokens=event.tokens[new:],
            text=text,
            logprobs=None if told is None else told[new:],
        )


class _Replica:
    """An engine as it is known here."""

    def __init__(self, number: int, actor: Actor):
        self.number = number
        self.actor = actor
        self.up = True
        self.why: str | None = None  # it did not come up
        self.calls: dict[str, _Call] = {}
        self.jobs: asyncio.Queue[Request | str] = asyncio.Queue()

    @property
    def suspect(self) -> bool:
        return any(call.deaths >= SUSPECT for call in self.calls.values())


class Replicas:
    """What `Driver` is, of several engines.

    Parameters
    ----------
    launch : makes an actor with a `Worker`.
    make : makes an engine there; it is to verify as coupled, and to let any number wait.
    count : of engines.
    waiting : requests that may wait for a row; one more is refused.

    Attributes
    ----------
    facts : of all engines together.
    failure : why there is no engine, nor hope for one; or None.
    """

    def __init__(
        self, launch: Callable[[], Actor], make: Callable[[], Engine], count: int, waiting: int
    ):
        self._launch = launch
        self._make = make
        self._replicas = [_Replica(number, launch()) for number in range(count)]
        self._calls: dict[str, _Call] = {}
        self._homeless: list[_Call] = []
        self._waiting = waiting
        self._lives: list[asyncio.Task[None]] = []
        self._ended: Callable[[Output], None]
        self._router: Router
        self.facts: Facts

    async def begin(self) -> None:
        """Wait until all engines are there. Raises what making one raises."""
        [facts, *_] = await asyncio.gather(
            *(replica.actor.call("begin", self._make) for replica in self._replicas)
        )
        self._router = Router(len(self._replicas), facts)
        self.facts = replace(facts, rows=len(self._replicas) * facts.rows)

    def start(self, ended: Callable[[Output], None]) -> None:
        """Listen; `ended` is told of every request's output."""
        self._ended = ended
        self._lives = [asyncio.create_task(self._live(one)) for one in self._replicas]

    async def stop(self) -> None:
        """Listen no more. What is unfinished is cancelled first."""
        self.cancel_all()
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)

    @property
    def open(self) -> int:
        """Requests that somebody waits for."""
        return len(self._calls)

    @property
    def live(self) -> list[bool]:
        """Whether each engine takes requests."""
        return [replica.up for replica in self._replicas]

    @property
    def failure(self) -> str | None:
        reasons = [replica.why for replica in self._replicas]
        return reasons[0] if all(reasons) else None

    def submit(self, request: Request, sink: asyncio.Queue[Event]) -> None:
        """Its events come into `sink`; the last one has its output, whatever happens."""
        name = str(request.id)
        if request.seed is None:
            request = replace(request, seed=secrets.randbits(64))
        call = self._calls[name] = _Call(request, sink, self._router.keys(request.tokens or ()))
        if self.open > self._waiting + self.facts.rows:
            self._end(
                name,
                failed(name, f"{self._waiting} requests are waiting already", "QueueFullError"),
            )
        elif self.failure is not None:
            self._end(name, failed(name, self.failure))
        else:
            self._homeless.append(call)
            self._house()

    def cancel(self, request_id: str) -> None:
        """End a request that nobody waits for any more."""
        for replica in self._replicas:
            if request_id in replica.calls:
                replica.jobs.put_nowait(request_id)
        self._end(request_id, Event(request_id, (), "", Output(request_id, reason="cancelled")))

    def cancel_all(self) -> None:
        """End all requests; those who wait are told."""
        for request_id in list(self._calls):
            self.cancel(request_id)

    async def counters(self) -> list[dict[str, Any] | None]:
        """`Engine.counters` of each, between two rounds; None: it does not answer."""

        async def ask(replica: _Replica) -> dict[str, Any] | None:
            with suppress(Exception):  # whoever listens to it is told
                async with asyncio.timeout(ASK_S):
                    return await replica.actor.call("counters") if replica.up else None
            return None

        return await asyncio.gather(*map(ask, self._replicas))

    # The life of a replica ----------------------------------------------------------------------

    async def _live(self, replica: _Replica) -> None:
        retry, most = RETRY_S
        while True:
            try:
                if not replica.up:
                    replica.actor = self._launch()
                    await replica.actor.call("begin", self._make)
                    replica.up = True
                    replica.why = None
                    retry = RETRY_S[0]
                    self._house()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._tell(replica))
                    group.create_task(self._hear(replica))
                    group.create_task(self._watch(replica))
            except Exception as error:  # it has died, whatever by
                was_up = replica.up
                self._lose(replica, _reason(error))
                if not was_up:
                    await asyncio.sleep(retry)
                    retry = min(2 * retry, most)

    async def _tell(self, replica: _Replica) -> None:
        while True:  # one by one, so that nothing overtakes
            await replica.actor.call("tell", await all_of(replica.jobs))

    async def _hear(self, replica: _Replica) -> None:
        while True:
            for event in await replica.actor.call("events"):
                call = replica.calls.get(event.id)
                if call is None:
                    continue  # nobody waits for it any more
                try:
                    news = call.news(event)
                except EngineError as error:
                    replica.jobs.put_nowait(event.id)
                    news = failed(event.id, str(error))
                if news is not None and news.finished:
                    self._end(event.id, news)
                elif news is not None:
                    call.sink.put_nowait(news)

    async def _watch(self, replica: _Replica) -> None:
        heard = time.monotonic()
        while time.monotonic() - heard < SILENT_S:
            with suppress(TimeoutError):  # which is silence
                async with asyncio.timeout(SILENT_S):
                    if await replica.actor.call("counters") is not None:
                        heard = time.monotonic()
            await asyncio.sleep(SILENT_S / 10)
        raise EngineError(f"no answer for {SILENT_S:g} s")

    def _lose(self, replica: _Replica, why: str) -> None:
        LOG.warning(
            "replica %d %s: %s",
            replica.number,
            "has died" if replica.up else "does not come up",
            why,
        )
        replica.actor.kill()
        replica.why = None if replica.up else why
        replica.up = False
        self._router.forget(replica.number)
        calls = replica.calls
        replica.calls = {}
        replica.jobs = asyncio.Queue()
        for name, call in calls.items():
            call.deaths += 1
            if call.deaths > SUSPECT:
                self._end(
                    name,
                    failed(
                        name,
                        f"{call.deaths} engines died while they had the "
                        f"request, the last by: {why}",
                    ),
                )
            else:
                self._homeless.append(call)
        if self.failure is not None:
            for call in list(self._homeless):
                name = str(call.request.id)
                self._end(name, failed(name, self.failure))
        self._house()

    # Calls --------------------------------------------------------------------------------------

    def _house(self) -> None:
        """Give calls that have no engine to one that may take them."""
        calls = self._homeless
        self._homeless = []
        for call in calls:
            loads = {
                replica.number: len(replica.calls)
                for replica in self._replicas
                if replica.up and not (call.deaths >= SUSPECT and replica.suspect)
            }
            if not loads:
                self._homeless.append(call)
                continue
            replica = self._replicas[self._router.choose(call.keys, loads)]
            replica.calls[str(call.request.id)] = call
            replica.jobs.put_nowait(call.begun())

    def _end(self, name: str, event: Event) -> None:
        """The last event of a call, if it has not ended before."""
        call = self._calls.pop(name, None)
        if call is None or event.output is None:
            return
        for replica in self._replicas:
            replica.calls.pop(name, None)
        self._homeless = [other for other in self._homeless if other is not call]
        self._ended(event.output)
        call.sink.put_nowait(event)
        self._house()


def _reason(error: BaseException) -> str:
    """The first line of what an error says."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return (str(error) or type(error).__name__).splitlines()[0]
