"""The ASGI application in front of one engine or several replicas."""

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
from graft.models.request import Event, Output, Request
from graft.models.tokenizer import Tokenizer
from graft.tools.serve.engine_driver import EngineDriver
from graft.tools.serve.errors import ApiError, check_output, to_api_error
from graft.tools.serve.metrics import Metrics
from graft.tools.serve.protocol import (
    ApiRequest,
    RequestParser,
    check_fields,
    find_grammar,
    make_grammar_spec,
)
from graft.tools.serve.replicas import Replicas
from graft.tools.serve.responses import ResponseChoice, response_body, token_usage

T = TypeVar("T")
_STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")],
}


@dataclass(frozen=True)
class Settings:
    """Settings of the HTTP endpoint.

    Parameters
    ----------
    name
        Model name that clients use.
    api_key
        Key that clients must send. None disables authentication.
    max_waiting
        Maximum number of API requests in the queue. If the number of API requests in progress
        reaches this value plus the number of request slots, further requests get status 429.
    max_body_bytes
        Maximum size of a request body in bytes.
    io_timeout_s
        Time limit in seconds for a client to send its request body, and for a client to accept
        each chunk of a streamed response.
    """

    name: str
    api_key: str | None = None
    max_waiting: int = 256
    max_body_bytes: int = 4 << 20
    io_timeout_s: float = 30.0


class Service:
    """The ASGI application and the state that its endpoints share.

    Parameters
    ----------
    driver
        One engine or several replicas, which run the requests.
    settings
        Settings of the endpoint.

    Attributes
    ----------
    app
        The ASGI application.
    parser
        Parser of API requests. It is not thread-safe, so a single worker thread calls it.
    api_requests
        Number of API requests in progress.
    draining
        Whether the server is shutting down and therefore refuses new requests.
    """

    def __init__(self, driver: EngineDriver | Replicas, settings: Settings):
        self.settings = settings
        self.driver = driver
        info = driver.info
        self.metrics = Metrics()
        self.parser = RequestParser(Tokenizer(info.tokenizer), info.limits, settings.name)
        self.api_requests = 0
        self.draining = False
        self._max_api_requests = settings.max_waiting + info.max_batch_size
        # The parser has a single thread, because the tokenizer is not thread-safe. Grammars are
        # checked in other threads, because a check can be slow and would delay other requests.
        self._parser_thread = ThreadPoolExecutor(1, "graft parser")
        self._grammar_threads = ThreadPoolExecutor(2, "graft grammars")
        handlers: Any = {
            kind: _handle_error for kind in (GraftError, HTTPException, RecursionError, Exception)
        }
        self.app = Starlette(
            lifespan=self._lifespan,
            exception_handlers=handlers,
            routes=[
                Route("/v1/chat/completions", _GenerateEndpoint(self, chat=True), methods=["POST"]),
                Route("/v1/completions", _GenerateEndpoint(self, chat=False), methods=["POST"]),
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
            for pool in (self._parser_thread, self._grammar_threads):
                pool.shutdown(wait=False, cancel_futures=True)

    # Steps of every generation request ----------------------------------------------------------

    def check_key(self, request: HttpRequest) -> None:
        """Check the API key.

        Raises
        ------
        ApiError
            If the key is missing or wrong.
        """
        key = self.settings.api_key
        header = request.headers.get("authorization", "").encode()
        if key is not None and not hmac.compare_digest(header, f"Bearer {key}".encode()):
            raise ApiError("the API key is missing or wrong", 401, code="invalid_api_key")

    def check_capacity(self) -> None:
        """Check that the server can accept another request.

        Raises
        ------
        ApiError
            If the server is draining, the engine has failed, or too many requests are in progress.
        """
        if self.draining:
            raise ApiError("the server is shutting down", 503)
        if self.driver.failure is not None:
            raise ApiError(f"the engine has failed: {self.driver.failure}", 503)
        if self.api_requests >= self._max_api_requests:
            raise ApiError(
                f"the server has {self.api_requests} requests in progress, which is its limit; "
                "retry later",
                429,
            )

    async def read_body(self, request: HttpRequest) -> dict[str, Any]:
        """Read the JSON body of a request and return its fields.

        Raises
        ------
        ApiError
            If the body is too large, arrives too slowly, or is not a JSON object.
        """
        max_bytes = self.settings.max_body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.io_timeout_s):
                async for part in request.stream():
                    body += part
                    if len(body) > max_bytes:
                        raise ApiError(f"the body is longer than {max_bytes} bytes", 413)
        except TimeoutError as error:
            seconds = self.settings.io_timeout_s
            raise ApiError(f"the body was not received within {seconds:g} s", 408) from error
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ApiError("the body must be a JSON object")
        return fields

    async def parse(self, fields: dict[str, Any], chat: bool) -> ApiRequest:
        """Convert the fields of a request to requests of the engine.

        Raises
        ------
        ApiError, GraftError
            If a field is invalid.
        """
        fields = check_fields(fields, chat, self.settings.name)
        grammar = None
        found = find_grammar(fields, self.parser.limits)
        if found is not None:
            grammar = await _run_in(self._grammar_threads, make_grammar_spec, *found)
        return await _run_in(
            self._parser_thread,
            self.parser.parse,
            fields,
            chat,
            grammar,
        )

    # Other endpoints ----------------------------------------------------------------------------

    async def _models(self, request: HttpRequest) -> Response:
        self.check_key(request)
        model = {
            "id": self.settings.name,
            "object": "model",
            "created": 0,
            "owned_by": "graft",
        }
        name = request.path_params.get("name")
        if name is None:
            return _json_response({"object": "list", "data": [model]})
        if name != self.settings.name:
            raise ApiError(
                f"there is no model {name!r}",
                404,
                param="model",
                code="model_not_found",
            )
        return _json_response(model)

    async def _health(self, _request: HttpRequest) -> Response:
        status = "draining" if self.draining else self.driver.failure or "ok"
        alive = self.driver.alive
        body = {"status": status, "live": sum(alive), "replicas": len(alive)}
        return _json_response(body, 200 if status == "ok" else 503)

    async def _metrics(self, _request: HttpRequest) -> Response:
        counters = await self.driver.counters()
        slots = sum(engine["held"]["slots"] for engine in counters if engine is not None)
        waiting = max(0, self.driver.open_requests - slots)
        page = self.metrics.page(counters, calls=self.api_requests, requests_waiting=waiting)
        return Response(page, media_type="text/plain; version=0.0.4")


class RequestStream:
    """The events of the engine requests that belong to one API request.

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


class _GenerateEndpoint:
    """The endpoint that generates text: chat completions if `chat`, otherwise completions.

    When the client of a request disconnects, the request is cancelled.
    """

    def __init__(self, service: Service, chat: bool):
        self._service = service
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        request = HttpRequest(scope, receive)
        service.check_key(request)
        service.check_capacity()
        service.api_requests += 1
        try:
            api_request = await service.parse(await service.read_body(request), self._chat)
            stream = RequestStream(service.driver, api_request.requests)
            respond = self._stream if api_request.stream else self._respond
            response = asyncio.ensure_future(respond(api_request, stream, send))
            disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
            try:
                await asyncio.wait((response, disconnect), return_when=asyncio.FIRST_COMPLETED)
                complete = response.result() if response.done() else None
                if complete is not None:
                    await complete(scope, receive, send)
            finally:
                stream.close()
                response.cancel()
                disconnect.cancel()
                await asyncio.gather(response, disconnect, return_exceptions=True)
        except (ClientDisconnect, TimeoutError):
            pass  # no response: the client disconnected, or did not read the stream in time
        finally:
            service.api_requests -= 1

    async def _respond(
        self, api_request: ApiRequest, stream: RequestStream, _send: Send
    ) -> Response:
        """Wait for all outputs and return the response."""
        parser = self._service.parser
        outputs: dict[int, Output] = {}
        async for index, event in stream:
            if event.output is not None:
                check_output(event.output)
                outputs[index] = event.output
        ordered = [outputs[i] for i in range(len(outputs))]
        choices = [
            ResponseChoice(api_request, i, parser).complete(output)
            for i, output in enumerate(ordered)
        ]
        body = response_body(api_request, parser.name, choices)
        return _json_response(body | {"usage": token_usage(ordered)})

    async def _stream(self, api_request: ApiRequest, stream: RequestStream, send: Send) -> None:
        """Send the response as server-sent events.

        An error before the first event is raised, so that the client gets its HTTP status. A later
        error is sent as an event, because the status has already been sent.
        """
        parser = self._service.parser
        started = False
        outputs = []
        choices = [ResponseChoice(api_request, i, parser) for i in range(len(api_request.requests))]

        async def send_event(data: str) -> None:
            async with asyncio.timeout(self._service.settings.io_timeout_s):
                body = f"data: {data}\n\n".encode()
                await send({"type": "http.response.body", "more_body": True, "body": body})

        async def send_json(value: dict[str, Any]) -> None:
            await send_event(json.dumps(value))

        try:
            async for index, event in stream:
                if event.output is not None:
                    check_output(event.output)
                    outputs.append(event.output)
                if not started:
                    started = True
                    await send(_STREAM_START)
                chunk = choices[index].chunk(event)
                if chunk is not None:
                    await send_json(response_body(api_request, parser.name, [chunk]))
            if api_request.include_usage:
                body = response_body(api_request, parser.name, [])
                await send_json(body | {"usage": token_usage(outputs)})
        except GraftError as error:
            if not started:
                raise
            await send_json(to_api_error(error).body)
        await send_event("[DONE]")
        await send({"type": "http.response.body", "body": b""})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _run_in(
    pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any
) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


async def _handle_error(_request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.detail, error.status_code)
    api_error = to_api_error(error)
    return _json_response(api_error.body, api_error.status, api_error.headers)


def _json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a JSON response.

    Non-ASCII characters are escaped, because an error message may quote a lone surrogate from the
    request, which cannot be encoded in UTF-8.
    """
    return Response(json.dumps(body), status, headers, "application/json")
