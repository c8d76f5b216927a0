"""Responses in OpenAI's format: complete responses, and the chunks of streamed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graft.models.request import Event, Logprob, Output
from graft.tools.serve.protocol import ApiRequest, RequestParser
from graft.tools.serve.tool_calls import ToolCallParser

#: OpenAI's finish reasons by the engine's finish reasons. An output with any other reason is an
#: error.
_FINISH_REASONS = {
    "stop": "stop",
    "stop_string": "stop",
    "length": "length",
    "timeout": "length",
}
#: Lower bound of reported log probabilities. JSON cannot represent minus infinity, the value of
#: masked tokens.
_MIN_LOGPROB = -9999.0


class ResponseChoice:
    """A builder of one choice of a response, from the events or the output of an engine request.

    Parameters
    ----------
    api_request
        The API request.
    index
        Index of the choice in the response.
    parser
        Request parser, which provides the bytes of each token.
    """

    def __init__(self, api_request: ApiRequest, index: int, parser: RequestParser):
        self._api_request = api_request
        self._index = index
        self._parser = parser
        self._tool_calls: ToolCallParser | None = None
        if api_request.tool_choice:
            self._tool_calls = ToolCallParser(api_request.tool_choice, api_request.max_tool_calls)
        self._has_role = False
        self._text_offset = 0

    def complete(self, output: Output) -> dict[str, Any]:
        """Return the choice for a response that is not streamed."""
        logprobs = None if output.logprobs is None else tuple(output.logprobs)
        event = Event(
            output.id,
            tuple(output.tokens),
            output.text,
            output,
            logprobs,
        )
        choice = self._choice(event, streamed=False)
        if not self._api_request.chat:
            return choice
        delta = choice.pop("delta")
        content = delta.get("content", "")
        message = {"role": "assistant", "content": content, "refusal": None}
        if "tool_calls" in delta:
            calls = delta["tool_calls"]
            for call in calls:
                del call["index"]
            message["tool_calls"] = calls
            if not content.strip():
                message["content"] = None
        return {**choice, "message": message}

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Return the choice for the next chunk of a stream; None if there is nothing to send."""
        choice = self._choice(event, streamed=True)
        content = choice["delta"] if self._api_request.chat else choice["text"]
        if not content and not event.finished and choice["logprobs"] is None:
            return None
        return choice

    def _choice(self, event: Event, streamed: bool) -> dict[str, Any]:
        text = event.text
        calls: list[dict[str, Any]] = []
        first_call = 0
        has_calls = False
        if self._tool_calls is not None:
            first_call = len(self._tool_calls.calls)
            text, calls = self._tool_calls.feed(text, event.finished)
            has_calls = bool(self._tool_calls.calls)
        finish_reason = None if event.output is None else _FINISH_REASONS[event.output.reason]
        if finish_reason == "stop" and has_calls:
            finish_reason = "tool_calls"
        choice: dict[str, Any] = {
            "index": self._index,
            "finish_reason": finish_reason,
            "logprobs": self._logprobs(event),
        }
        if not self._api_request.chat:
            return choice | {"text": text}
        delta: dict[str, Any] = {}
        if streamed and not self._has_role:
            delta["role"] = "assistant"
        self._has_role = True
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [
                {"index": index, **call} for index, call in enumerate(calls, first_call)
            ]
        return choice | {"delta": delta}

    def _logprobs(self, event: Event) -> dict[str, Any] | None:
        if event.logprobs is None:
            return None
        pairs = list(zip(event.tokens, event.logprobs, strict=True))
        if event.output is not None and event.output.finished:
            pairs = pairs[:-1]  # remove the stop token, which is not part of the text
        if not self._api_request.chat:
            return self._completion_logprobs(pairs)
        content = []
        for token, logprob in pairs:
            entry = self._token_logprob(token, logprob.value)
            entry["top_logprobs"] = [self._token_logprob(*candidate) for candidate in logprob.top]
            content.append(entry)
        return {"refusal": None, "content": content}

    def _completion_logprobs(self, pairs: Sequence[tuple[int, Logprob]]) -> dict[str, Any]:
        """Return log probabilities in the format of the completions API."""
        texts = [self._token_text(token) for token, _ in pairs]
        offsets = []
        for text in texts:
            offsets.append(self._text_offset)
            self._text_offset += len(text)
        values = []
        top_logprobs = []
        for _, logprob in pairs:
            values.append(max(logprob.value, _MIN_LOGPROB))
            top = {}
            for candidate, value in logprob.top:
                top[self._token_text(candidate)] = max(value, _MIN_LOGPROB)
            top_logprobs.append(top)
        return {
            "tokens": texts,
            "text_offset": offsets,
            "token_logprobs": values,
            "top_logprobs": top_logprobs,
        }

    def _token_text(self, token: int) -> str:
        return self._parser.token_bytes(token).decode("utf-8", "replace")

    def _token_logprob(self, token: int, value: float) -> dict[str, Any]:
        """Return the log probability of a token in the format of the chat API."""
        return {
            "token": self._token_text(token),
            "logprob": max(value, _MIN_LOGPROB),
            "bytes": list(self._parser.token_bytes(token)),
        }


def token_usage(outputs: Sequence[Output]) -> dict[str, Any]:
    """Return the token usage of a response.

    If a prompt has several samples, its tokens are counted once.
    """
    # Request ids have the form "<api request>/<prompt>/<sample>".
    prompt_lengths = {output.id.split("/")[1]: output.prompt_tokens for output in outputs}
    prompt_tokens = sum(prompt_lengths.values())
    completion_tokens = sum(len(output.tokens) for output in outputs)
    cached_tokens = sum(output.cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(prompt_tokens, cached_tokens)},
    }


def response_body(
    api_request: ApiRequest, model: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the JSON body of a response, or of one chunk of a streamed response."""
    kind = "text_completion"
    if api_request.chat:
        kind = "chat.completion.chunk" if api_request.stream else "chat.completion"
    return {
        "id": api_request.id,
        "object": kind,
        "created": api_request.created,
        "model": model,
        "choices": choices,
    }
