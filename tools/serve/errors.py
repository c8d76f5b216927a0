"""Errors in OpenAI's format."""

from __future__ import annotations

from typing import Any

from graft.cudagraph.errors import GraftError
from graft.grammar.resolve import without_partial_hint
from graft.models.request import Output

#: HTTP status of an error, by the name of its class or by the finish reason of the request.
_STATUS = {
    "QueueFullError": 429,
    "EngineError": 503,
    "GrammarBackendError": 500,
    "GrammarUnavailableError": 503,
    "TemplateUnavailableError": 503,
    "MatcherError": 400,
    "refused": 400,
    "dead_end": 400,
    "cancelled": 503,
}
#: Messages for finish reasons that have no error message of their own.
_MESSAGES = {
    "dead_end": "no token is left that grammar, logit bias and token bounds allow",
    "cancelled": "the server is shutting down",
}
#: Finish reasons of complete responses.
_COMPLETE = ("stop", "stop_string", "length", "timeout")


class ApiError(GraftError):
    """An API request that cannot be answered.

    `param` is the API field at fault, and `code` is OpenAI's error code; each is None if there is
    none. An error of the engine names a field of `graft.models.request.Request` instead. This field
    is `engine_param`, and `requests.use_api_fields` finds the API field that set it.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        engine_param: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.engine_param = engine_param

    @property
    def type(self) -> str:
        """OpenAI's error type."""
        if self.status >= 500:
            return "server_error"
        types = {401: "authentication_error", 429: "rate_limit_error"}
        return types.get(self.status, "invalid_request_error")

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Additional HTTP headers of the response."""
        if self.status in (429, 503):
            return {"Retry-After": "1"}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def to_api_error(error: Exception) -> ApiError:
    """Convert an exception to the `ApiError` that is sent to the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):
        return ApiError("the body is nested too deeply")
    if isinstance(error, GraftError):
        status = _STATUS.get(type(error).__name__, 400)
        return ApiError(without_partial_hint(str(error)), status, engine_param=error.param)
    return ApiError(f"{type(error).__name__}: {error}", 500)


def check_output(output: Output) -> None:
    """Raise ApiError if a request was refused, failed or was cancelled."""
    if output.reason in _COMPLETE:
        return
    status = _STATUS.get(output.error_type or "")
    if status is None:
        status = _STATUS.get(output.reason, 500)
    message = output.error or _MESSAGES.get(output.reason, output.reason)
    raise ApiError(without_partial_hint(message), status, engine_param=output.error_param)
