"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

from graft.cudagraph.errors import GraftError
from graft.grammar.resolve import without_hint
from graft.models.request import Output

#: By the class of a request's error, and by the reason for which it ended.
_STATUS_OF = {
    "QueueFullError": 429,
    "EngineError": 503,
    "refused": 400,
    "dead_end": 400,
    "cancelled": 503,
}
_SAID_OF = {
    "dead_end": "no token is left that grammar, bias and bounds allow",
    "cancelled": "the server is leaving",
}


class WireError(GraftError):
    """A call cannot be answered; `status` is HTTP's, `param` the field that is to blame."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = (
            "server_error"
            if self.status >= 500
            else {401: "authentication_error", 429: "rate_limit_error"}.get(
                self.status, "invalid_request_error"
            )
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


def as_wire(error: Exception) -> WireError:
    """Any error as one that can be sent."""
    if isinstance(error, WireError):
        return error
    if isinstance(error, RecursionError):
        return WireError("the body is nested too deeply")
    if isinstance(error, GraftError):
        return WireError(without_hint(str(error)), _STATUS_OF.get(type(error).__name__, 400))
    return WireError(f"{type(error).__name__}: {error}", 500)


def check_output(output: Output) -> None:
    """Raises WireError for an output that is no answer."""
    if output.reason not in ("stop", "stop_string", "length", "timeout"):
        status = _STATUS_OF.get(output.error_type or "") or _STATUS_OF.get(output.reason, 500)
        said = output.error or _SAID_OF.get(output.reason, output.reason)
        raise WireError(without_hint(said), status)
