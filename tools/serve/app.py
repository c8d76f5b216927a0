"""The endpoint: an ASGI application before an engine, or several."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from graft.cudagraph.errors import GraftError
from graft.models.request import Event, Request
from graft.models.tokenizer import Tokenizer
from graft.tools.serve.answers import Choice, envelope, usage
from graft.tools.serve.driver import Driver
from graft.tools.serve.errors import WireError, as_wire, check_output
from graft.tools.serve.metrics import Metrics
from graft.tools.serve.replicas import Replicas
from graft.tools.serve.wire import Call, Front, check_fields, grammar_of, stated

T = TypeVar("T")
_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")],
}


@dataclass(frozen=True)
class Settings:
    """What an endpoint is told.

    Parameters
    ----------
    name : of the model.
    api_key : what callers must bring; None: nothing.
    waiting : calls that may wait beside those that the engine has rows for; one more gets a 429.
    body_bytes : most bytes of a call.
    patience_s : seconds that a caller may take to send a call, or to take a piece of an answer.
    """

    name: str
    api_key: str | None = None
    waiting: int = 256
    body_bytes: int = 4 << 20
    patience_s: float = 30.0


class Service:
    """What the endpoints have in common.

    Attributes
    ----------
    app : the ASGI application.
    calls : calls under way.
    draining : whether new calls are refused, since the server is about to leave.
    """

    def __init__(self, driver: Driver | Replicas, settings: Settings):
        self.settings = settings
        self.driver = driver
        facts = driver.facts
        self.metrics = Metrics()
        self.front = Front(Tokenizer(facts.tokenizer), facts.limits, settings.name)
        self.calls = 0
        self.draining = False
        self._most = settings.waiting + facts.rows
        # A tokenizer is one thread's; a grammar may take long, and delays none but other grammars.
        self._reading = ThreadPoolExecutor(1, "graft front")
        self._stating = ThreadPoolExecutor(2, "graft grammars")
        errors: Any = {
            kind: _refuse for kind in (GraftError, HTTPException, RecursionError, Exception)
        }
        self.app = Starlette(
            lifespan=self._lifespan,
            exception_handlers=errors,
            routes=[
                Route("/v1/chat/completions", _Generate(self, True), methods=["POST"]),
                Route("/v1/completions", _Generate(self, False), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
        )

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.driver.start(self.metrics.count)
        try:
            yield
        finally:
            await self.driver.stop()
            for pool in (self._reading, self._stating):
                pool.shutdown(wait=False, cancel_futures=True)

    # What every call passes ---------------------------------------------------------------------

    def check_key(self, request: HttpRequest) -> None:
        """Raises WireError for a caller without the key."""
        key = self.settings.api_key
        given = request.headers.get("authorization", "").encode()
        if key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            raise WireError("the API key is missing or wrong", 401, code="invalid_api_key")

    def check_room(self) -> None:
        """Raises WireError where no further call is taken."""
        if self.draining:
            raise WireError("the server is leaving", 503)
        if self.driver.failure is not None:
            raise WireError(f"the engine has failed: {self.driver.failure}", 503)
        if self.calls >= self._most:
            raise WireError(f"{self.calls} calls are running or waiting already", 429)

    async def body(self, request: HttpRequest) -> dict[str, Any]:
        """The fields of a call."""
        most = self.settings.body_bytes
        taken = bytearray()
        try:
            async with asyncio.timeout(self.settings.patience_s):
                async for part in request.stream():
                    taken += part
                    if len(taken) > most:
                        raise WireError(f"the body is longer than {most} bytes", 413)
        except TimeoutError as error:
            raise WireError("the body did not come", 408) from error
        try:
            fields = json.loads(taken)
        except (ValueError, RecursionError) as error:
            raise WireError(f"the body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise WireError("the body must be an object")
        return fields

    async def read(self, fields: dict[str, Any], chat: bool) -> Call:
        """What a call asks for."""

        def run(pool: ThreadPoolExecutor, work: Callable[..., T], *given: Any) -> asyncio.Future[T]:
            return asyncio.get_running_loop().run_in_executor(pool, work, *given)

        fields = check_fields(fields, chat, self.settings.name)
        grammar = None
        asked = stated(fields, self.front.limits)
        if asked is not None:
            grammar = await run(self._stating, grammar_of, *asked)
        return await run(self._reading, self.front.read, fields, chat, grammar)

    # The small pages ----------------------------------------------------------------------------

    async def _models(self, request: HttpRequest) -> Response:
        self.check_key(request)
        name = self.settings.name
        one = {"id": name, "object": "model", "created": 0, "owned_by": "graft"}
        asked = request.path_params.get("name")
        if asked not in (None, name):
            raise WireError(
                f"there is no model {asked!r}", 404, param="model", code="model_not_found"
            )
        return _json(one if asked else {"object": "list", "data": [one]})

    async def _health(self, _request: HttpRequest) -> Response:
        status = "draining" if self.draining else self.driver.failure or "ok"
        said = {"status": status, "live": sum(self.driver.live), "replicas": len(self.driver.live)}
        return _json(said, 200 if status == "ok" else 503)

    async def _metrics(self, _request: HttpRequest) -> Response:
        engines = await self.driver.counters()
        slots = sum(found["held"]["slots"] for found in engines if found is not None)
        page = self.metrics.page(
            engines, calls=self.calls, requests_waiting=max(0, self.driver.open - slots)
        )
        return Response(page, media_type="text/plain; version=0.0.4")


class Caller:
    """Who waits for requests, and may leave at any time by `close`."""

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


class _Generate:
    """Answers a call, for as long as somebody listens."""

    def __init__(self, service: Service, chat: bool):
        self._service = service
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        request = HttpRequest(scope, receive)
        service.check_key(request)
        service.check_room()
        service.calls += 1
        try:
            call = await service.read(await service.body(request), self._chat)
            caller = Caller(service.driver, call.requests)
            work = asyncio.ensure_future(
                (self._stream if call.stream else self._whole)(call, caller, send)
            )
            gone = asyncio.ensure_future(_gone(receive))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if work.done() and (answer := work.result()) is not None:
                    await answer(scope, receive, send)
            finally:
                caller.close()
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
        except (ClientDisconnect, TimeoutError):
            pass  # it left before all of the body came, or takes no more of the answer
        finally:
            service.calls -= 1

    async def _whole(self, call: Call, caller: Caller, _send: Send) -> Response:
        front = self._service.front
        outputs = {}
        async for index, event in caller:
            if event.output is not None:
                check_output(event.output)
                outputs[index] = event.output
        said = [outputs[i] for i in range(len(outputs))]
        choices = [Choice(call, i, front).whole(output) for i, output in enumerate(said)]
        return _json(envelope(call, front.name, choices) | {"usage": usage(call, said)})

    async def _stream(self, call: Call, caller: Caller, send: Send) -> None:
        """Server-sent events; before the first of them, what is refused is so by its status."""
        front = self._service.front
        begun = False
        outputs = []
        choices = [Choice(call, i, front) for i in range(len(call.requests))]

        async def tell(what: object) -> None:
            async with asyncio.timeout(self._service.settings.patience_s):
                await send(
                    {
                        "type": "http.response.body",
                        "more_body": True,
                        "body": f"data: {what}\n\n".encode(),
                    }
                )

        try:
            async for index, event in caller:
                if event.output is not None:
                    check_output(event.output)
                    outputs.append(event.output)
                if not begun:
                    begun = True
                    await send(_START)
                piece = choices[index].piece(event)
                if piece is not None:
                    await tell(json.dumps(envelope(call, front.name, [piece])))
            if call.usage:
                await tell(
                    json.dumps(envelope(call, front.name, []) | {"usage": usage(call, outputs)})
                )
        except GraftError as error:
            if not begun:
                raise
            await tell(json.dumps(as_wire(error).body))
        await tell("[DONE]")
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(_request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = WireError(error.detail, error.status_code)
    said = as_wire(error)
    return _json(said.body, said.status, said.headers)


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Half a surrogate, which an error may quote, is written as an escape."""
    return Response(json.dumps(body), status, headers, "application/json")
