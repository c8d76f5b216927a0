"""The ASGI application in front of one engine or several replicas."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graft.cudagraph.errors import GraftError, OptionError
from graft.grammar.errors import GrammarError
from graft.models.request import Event, Output
from graft.models.tokenizer import Tokenizer
from graft.native.errors import short_repr
from graft.tools.serve.completion_writer import CompletionWriter, ResponseChoice, without_output
from graft.tools.serve.engine_driver import EngineDriver
from graft.tools.serve.errors import ApiError, check_output, to_api_error
from graft.tools.serve.fields import read_fields
from graft.tools.serve.grammars import field_of, find_grammars, make_grammar_spec, shown_schema
from graft.tools.serve.metrics import Metrics
from graft.tools.serve.prompt_logprobs import score_prompts
from graft.tools.serve.replicas import Replicas
from graft.tools.serve.request_parser import ApiRequest, RequestParser
from graft.tools.serve.request_stream import RequestStream
from graft.tools.serve.requests import ChatRequest, CompletionRequest, use_api_fields
from graft.tools.serve.responses_request import rename_error, to_chat
from graft.tools.serve.responses_writer import ResponsesWriter
from graft.tools.serve.tokenization import detokenize, tokenize
from graft.tools.version import version

T = TypeVar("T")
#: Maximum number of bytes that are read and discarded after a body has exceeded its maximum size.
_MAX_DISCARDED_BYTES = 1 << 26
#: Maximum total size in bytes of the bodies that are being received.
MAX_RECEIVED_BYTES = 1 << 28
_STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")],
}


@dataclass(frozen=True)
class Settings:
    """Settings of the HTTP endpoint."""

    #: Model name that clients use.
    name: str
    #: API keys. A client must send one of them. An empty tuple disables authentication.
    api_keys: tuple[str, ...] = ()
    #: Names that the header ``Host`` of a request may have; None for any name. Without this check,
    #: a web page could use a server without authentication through a browser on this machine, if
    #: the DNS name of the page resolves to the address of the server (DNS rebinding).
    hosts: frozenset[str] | None = None
    #: Jinja template that replaces the model's chat template; None to use the model's.
    chat_template: str | None = None
    #: One of `graft.tools.serve.reasoning.REASONING_PARSERS`; None if the model does not reason.
    reasoning_parser: str | None = None

    #: Name in `graft.tools.serve.tool_formats.TOOL_FORMATS` of the notation in which the model
    #: writes calls; None for the notation that the chat template describes.
    tool_call_parser: str | None = None

    #: If the number of API requests in progress reaches this value plus the number of request
    #: slots, further requests get status 429.
    max_waiting: int = 256
    max_body_bytes: int = 4 << 20
    #: Time limit in seconds for a client to send its request body, and for a client to accept each
    #: chunk of a streamed response.
    io_timeout_s: float = 30.0


class Service:
    """The ASGI application `app`, and the state that its endpoints share.

    `draining` is true during shutdown; requests are then refused. `parser` is not thread-safe, so a
    single worker thread calls it.
    """

    def __init__(self, driver: EngineDriver | Replicas, settings: Settings):
        self.settings = settings
        self.driver = driver
        info = driver.info
        self.metrics = Metrics()
        self.parser = RequestParser(
            Tokenizer(info.tokenizer, chat_template=settings.chat_template),
            info.limits,
            settings.name,
            info.max_length,
            settings.reasoning_parser,
            settings.tool_call_parser,
        )
        self.api_requests = 0
        self.draining = False
        self._received_bytes = 0  # total size of the bodies that are being received
        self._created = int(time.time())
        self.max_api_requests = settings.max_waiting + info.max_batch_size
        # The parser has a single thread, because the tokenizer is not thread-safe. Grammars are
        # read in other threads, because a large grammar would delay other requests.
        self._parser_thread = ThreadPoolExecutor(1, "graft parser")
        self._grammar_threads = ThreadPoolExecutor(2, "graft grammars")
        handlers: Any = {
            kind: _handle_error for kind in (GraftError, HTTPException, RecursionError, Exception)
        }
        handlers[ClientDisconnect] = _handle_disconnect
        middleware = []
        if settings.hosts is not None:
            middleware.append(Middleware(_HostCheck, hosts=settings.hosts))
        self.app = Starlette(
            lifespan=self._lifespan,
            exception_handlers=handlers,
            middleware=middleware,
            routes=self._routes(),
        )

    def _routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", _GenerateEndpoint(self, chat=True), methods=["POST"]),
            Route("/v1/completions", _GenerateEndpoint(self, chat=False), methods=["POST"]),
            Route("/v1/responses", _ResponsesEndpoint(self), methods=["POST"]),
            Route("/v1/responses/input_tokens", self._count_input_tokens, methods=["POST"]),
            Route(
                "/v1/responses/{path:path}",
                self._stored_response,
                methods=["GET", "POST", "DELETE"],
            ),
            Route("/invocations", _GenerateEndpoint(self, chat=None), methods=["POST"]),
            *(
                Route(f"{prefix}/{name}", endpoint, methods=["POST"])
                for prefix in ("", "/v1")
                for name, endpoint in (
                    ("tokenize", self._tokenize),
                    ("detokenize", self._detokenize),
                )
            ),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/version", self._version),
            Route("/health", self._health),
            Route("/health_generate", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/get_model_info", self._model_info),
            Route("/model_info", self._model_info),
            Route("/load", self._load),
            Route("/metrics", self._metrics),
        ]

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.driver.start(self.metrics.count)
        try:
            yield
        finally:
            await self.driver.stop()
            for pool in (self._parser_thread, self._grammar_threads):
                pool.shutdown(wait=False, cancel_futures=True)

    # Steps of requests --------------------------------------------------------------------------

    def check_key(self, request: HttpRequest) -> None:
        """Raise ApiError if the API key is missing or wrong."""
        keys = self.settings.api_keys
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"  # names of schemes are case-insensitive (RFC 9110)
        matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
        if keys and not (is_bearer and any(matches)):
            raise ApiError("the API key is missing or wrong", 401, code="invalid_api_key")

    def check_capacity(self) -> None:
        """Check that the server can accept another request.

        Raise ApiError if the server is draining, the engine has failed, or too many requests
        are in progress.
        """
        if self.draining:
            raise ApiError("the server is shutting down", 503)
        if self.driver.failure is not None:
            raise ApiError(f"the engine has failed: {self.driver.failure}", 503)
        if self.api_requests >= self.max_api_requests:
            raise ApiError(
                f"the server has {self.api_requests} requests in progress, which is its limit; "
                "retry later",
                429,
            )

    async def read_body(self, request: HttpRequest) -> dict[str, Any]:
        """Read the JSON body of a request and return its fields.

        Raise ApiError if the body is too large, arrives too slowly or is not a JSON object, if
        its media type is not ``application/json``, or if too many bodies arrive at the same time.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise ApiError(
                f"the header Content-Type must be application/json, got {short_repr(media_type)}",
                415,
            )
        body = await self._receive(request)
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ApiError("the body must be a JSON object")
        return fields

    async def _receive(self, request: HttpRequest) -> bytes:
        """Receive the body of a request and return its bytes; called by `read_body`."""
        max_bytes = self.settings.max_body_bytes
        max_received = max(MAX_RECEIVED_BYTES, max_bytes)
        body = bytearray()
        length = 0
        try:
            async with asyncio.timeout(self.settings.io_timeout_s):
                async for part in request.stream():
                    length += len(part)
                    # The rest of a body that is too long is read and discarded, because many
                    # clients read the response only after they have sent the whole body.
                    if length <= max_bytes:
                        body += part
                        self._received_bytes += len(part)
                    elif length > max_bytes + _MAX_DISCARDED_BYTES:
                        break
                    if self._received_bytes > max_received:
                        raise ApiError("too many request bodies arrive at once; retry later", 429)
        except TimeoutError as error:
            seconds = self.settings.io_timeout_s
            raise ApiError(f"the body was not received within {seconds:g} s", 408) from error
        finally:
            self._received_bytes -= len(body)
        if length > max_bytes:
            raise ApiError(f"the body is longer than {max_bytes} bytes", 413)
        return bytes(body)

    async def parse(self, body: ChatRequest | CompletionRequest) -> ApiRequest:
        """Convert an API request to requests of the engine.

        Raises
        ------
        ApiError, GraftError
            If a field is invalid.
        """
        found = find_grammars(body, self.parser.limits, self.parser.tool_format)
        grammar = None
        for one in reversed(found):
            try:
                grammar = await _run_in(self._grammar_threads, make_grammar_spec, one)
            except (GrammarError, OptionError) as error:
                error.param = "grammar"
                raise use_api_fields(to_api_error(error), (field_of(one, body),)) from error
        schema = shown_schema(found[0]) if found else None
        return await _run_in(self._parser_thread, self.parser.parse, body, grammar, schema)

    # Other endpoints ----------------------------------------------------------------------------

    async def _models(self, request: HttpRequest) -> Response:
        self.check_key(request)
        model = {
            "id": self.settings.name,
            "object": "model",
            "created": self._created,
            "owned_by": "graft",
            "root": self.settings.name,
            "parent": None,
            "max_model_len": self.driver.info.max_length,
        }
        name = request.path_params.get("name")
        if not name:
            return _json_response({"object": "list", "data": [model]})
        if name != self.settings.name:
            raise ApiError(
                f"there is no model {name!r}", 404, param="model", code="model_not_found"
            )
        return _json_response(model)

    async def _count_input_tokens(self, request: HttpRequest) -> Response:
        self.check_key(request)
        fields = await self.read_body(request)
        try:
            api_request = await self.parse(to_chat(fields, self.settings.name))
        except GraftError as error:
            api_error = use_api_fields(to_api_error(error), ("messages",))
            raise rename_error(api_error) from error
        [prompt] = api_request.prompts
        return _json_response({"object": "response.input_tokens", "input_tokens": len(prompt)})

    async def _stored_response(self, request: HttpRequest) -> Response:
        self.check_key(request)
        raise ApiError("the server stores no responses", 404)

    async def _tokenize(self, request: HttpRequest) -> Response:
        self.check_key(request)
        return await self._call_parser(request, tokenize)

    async def _detokenize(self, request: HttpRequest) -> Response:
        self.check_key(request)
        return await self._call_parser(request, detokenize)

    async def _call_parser(
        self,
        request: HttpRequest,
        function: Callable[[RequestParser, dict[str, Any]], dict[str, Any]],
    ) -> Response:
        """Call `function` in the parser's thread, with the parser and the request's JSON fields.

        Return the function's result as a JSON response.
        """
        fields = await self.read_body(request)
        try:
            body = await _run_in(self._parser_thread, function, self.parser, fields)
        except GraftError as error:
            raise use_api_fields(to_api_error(error), fields) from error
        return _json_response(body)

    async def _version(self, _request: HttpRequest) -> Response:
        return _json_response({"version": version()})

    async def _health(self, _request: HttpRequest) -> Response:
        status = "draining" if self.draining else self.driver.failure or "ok"
        alive = self.driver.alive
        body = {"status": status, "live": sum(alive), "replicas": len(alive)}
        return _json_response(body, 200 if status == "ok" else 503)

    async def _model_info(self, request: HttpRequest) -> Response:
        self.check_key(request)
        name = self.settings.name
        info = {"model_path": name, "tokenizer_path": name, "is_generation": True}
        return _json_response(info)

    async def _load(self, _request: HttpRequest) -> Response:
        return _json_response({"server_load": self.api_requests})

    async def _metrics(self, _request: HttpRequest) -> Response:
        counters = await self.driver.counters()
        slots = sum(engine["held"]["slots"] for engine in counters if engine is not None)
        waiting = max(0, self.driver.open_requests - slots)
        page = self.metrics.page(counters, calls=self.api_requests, requests_waiting=waiting)
        return Response(page, media_type="text/plain; version=0.0.4")


class _HostCheck:
    """Middleware that refuses requests whose header ``Host`` is not in `hosts`."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]):
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            header = HttpRequest(scope).headers.get("host", "")
            name = re.sub(r":\d*$", "", header).lower()
            if name not in self._hosts:
                error = ApiError(
                    f"the host {short_repr(name)} is not allowed; see graft serve --allowed-host",
                    403,
                )
                await _json_response(error.body, error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Writer(Protocol):
    """Writes the response of a request, or the server-sent events of its stream."""

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]: ...

    def messages(self, index: int, event: Event) -> Iterator[str]: ...

    def last_messages(self) -> Iterator[str]: ...

    def error_messages(self, error: ApiError) -> Iterator[str]: ...


class _GenerateEndpoint:
    """An endpoint that generates text: chat completions if `chat` is true, completions if false.

    If `chat` is None, requests with the field ``messages`` are chat completions, and all others are
    completions. When a client disconnects, its request is cancelled.
    """

    def __init__(self, service: Service, chat: bool | None):
        self._service = service
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        request = HttpRequest(scope, receive)
        service.check_key(request)
        service.check_capacity()
        is_counted = False
        fields: AbstractSet[str] = frozenset()
        try:
            given = await service.read_body(request)
            # The request is counted only after its body has arrived, so that clients that do not
            # send their bodies cannot use up the capacity.
            service.check_capacity()
            service.api_requests += 1
            is_counted = True
            header = request.headers.get("x-request-id")
            if header and given.get("request_id") is None:
                given["request_id"] = header
            body = self._read(given)
            fields = body.model_fields_set
            api_request = await self._parse(body, given)
            if body.chosen_tools.required:  # then response_format has no effect
                fields = fields - {"response_format"}
            stream = RequestStream(service.driver, api_request.requests)
            respond = self._stream if api_request.body.stream else self._respond
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
        except GraftError as error:
            raise self._locate(to_api_error(error), fields) from error
        except (ClientDisconnect, TimeoutError):
            pass  # no response: the client disconnected, or did not read the stream in time
        finally:
            service.api_requests -= is_counted

    def _read(self, given: dict[str, Any]) -> ChatRequest | CompletionRequest:
        """Validate the fields `given` and return them as a chat completion or a completion."""
        is_chat = "messages" in given if self._chat is None else self._chat
        name = self._service.settings.name
        if is_chat:
            return read_fields(ChatRequest, given, name)
        return read_fields(CompletionRequest, given, name)

    async def _parse(
        self, body: ChatRequest | CompletionRequest, _given: dict[str, Any]
    ) -> ApiRequest:
        return await self._service.parse(body)

    def _make_writer(self, api_request: ApiRequest, choices: list[ResponseChoice]) -> _Writer:
        return CompletionWriter(api_request, self._service.parser.name, choices)

    def _locate(self, error: ApiError, fields: Collection[str]) -> ApiError:
        """Return `error` with ``param`` set to the API field that caused it.

        `fields` are the names of the fields that the request has.
        """
        return use_api_fields(error, fields)

    async def _respond(
        self, api_request: ApiRequest, stream: RequestStream, _send: Send
    ) -> Response:
        """Wait for all outputs and return the response."""
        outputs: dict[int, Output] = {}
        async for index, event in _events(api_request, stream):
            if event.output is not None:
                outputs[index] = event.output
        writer = await self._writer(api_request)
        return _json_response(writer.body([outputs[i] for i in range(len(outputs))]))

    async def _writer(self, api_request: ApiRequest) -> _Writer:
        """Return a writer for the response, after computing the prompts' log probabilities."""
        service = self._service
        logprobs = None
        if api_request.prompt_logprobs is not None:
            logprobs = await score_prompts(
                service.driver, api_request.prompts, api_request.prompt_logprobs
            )
        choices = []
        for i in range(len(api_request.requests)):
            scores = None if logprobs is None else logprobs[api_request.prompt_index(i)]
            choices.append(ResponseChoice(api_request, i, service.parser, scores))
        return self._make_writer(api_request, choices)

    async def _stream(self, api_request: ApiRequest, stream: RequestStream, send: Send) -> None:
        """Send the response as server-sent events.

        An error before the first event is raised, so that the client gets its HTTP status. A later
        error is sent as an event, because the status has already been sent.
        """
        started = False

        async def send_all(messages: Iterator[str]) -> None:
            for message in messages:
                async with asyncio.timeout(self._service.settings.io_timeout_s):
                    body = message.encode()
                    await send({"type": "http.response.body", "more_body": True, "body": body})

        writer = await self._writer(api_request)
        try:
            async for index, event in _events(api_request, stream):
                if not started:
                    started = True
                    await send(_STREAM_START)
                await send_all(writer.messages(index, event))
            await send_all(writer.last_messages())
        except GraftError as error:
            if not started:
                raise
            await send_all(writer.error_messages(to_api_error(error)))
        await send({"type": "http.response.body", "body": b""})


class _ResponsesEndpoint(_GenerateEndpoint):
    """The endpoint ``/v1/responses``, which converts its requests to chat completions."""

    def __init__(self, service: Service):
        super().__init__(service, chat=True)

    def _read(self, given: dict[str, Any]) -> ChatRequest | CompletionRequest:
        return to_chat(given, self._service.settings.name)

    async def _parse(
        self, body: ChatRequest | CompletionRequest, given: dict[str, Any]
    ) -> ApiRequest:
        api_request = await super()._parse(body, given)
        has_logprobs = api_request.requests[0].logprobs is not None
        has_tools = bool(api_request.body.chosen_tools.functions)
        if has_logprobs and (has_tools or api_request.reasoning[0] is not None):
            raise ApiError(
                "log probabilities cannot be combined with tools or reasoning",
                param="top_logprobs" if "top_logprobs" in given else "include",
            )
        return replace(api_request, fields=given)

    def _make_writer(self, api_request: ApiRequest, choices: list[ResponseChoice]) -> _Writer:
        [choice] = choices
        return ResponsesWriter(api_request, self._service.parser.name, choice)

    def _locate(self, error: ApiError, fields: Collection[str]) -> ApiError:
        return rename_error(super()._locate(error, fields))


async def _events(
    api_request: ApiRequest, stream: RequestStream
) -> AsyncIterator[tuple[int, Event]]:
    """Yield the events of an API request, each with the index of its engine request.

    The generated text is left out if the response has only the prompt. Raise ApiError if the
    engine refused one of the API request's engine requests, or if one of them failed or was
    cancelled.
    """
    async for index, event in stream:
        if event.output is not None:
            check_output(event.output)
        yield index, without_output(event) if api_request.body.prompt_only else event


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _run_in(
    pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any
) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


async def _handle_disconnect(_request: HttpRequest, _error: Exception) -> Response:
    """Return a response for a client that disconnected before it had sent its request."""
    return Response(status_code=400)  # cannot be delivered


def _route_error(request: HttpRequest, error: HTTPException) -> ApiError:
    """Return the error for a path or method that no route has."""
    routes = [route.path for route in request.app.routes]
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path} requires {allowed}, got {request.method}"
    elif error.status_code != 404:
        message = error.detail
    elif f"/v1{path}" in routes:
        message = f"there is no endpoint {path}, but /v1{path}; the base URL must end with /v1"
    else:
        names = ", ".join(route for route in routes if "{" not in route)
        message = f"there is no endpoint {short_repr(path)}; the endpoints are {names}"
    return ApiError(message, error.status_code)


async def _handle_error(request: HttpRequest, error: Exception) -> Response:
    headers: Mapping[str, str] = {}
    if isinstance(error, HTTPException):
        headers = error.headers or {}
        error = _route_error(request, error)
    api_error = to_api_error(error)
    return _json_response(api_error.body, api_error.status, {**api_error.headers, **headers})


def _json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a JSON response.

    Non-ASCII characters are escaped, because an error message may quote a lone surrogate from the
    request, which cannot be encoded in UTF-8.
    """
    return Response(json.dumps(body), status, headers, "application/json")
