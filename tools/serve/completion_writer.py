"""Responses in OpenAI's format: complete responses, and the chunks of streamed ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graft.models.request import Event, Logprob, Output
from graft.tools.serve.errors import ApiError
from graft.tools.serve.reasoning import END, ReasoningParser
from graft.tools.serve.request_parser import ApiRequest, RequestParser
from graft.tools.serve.tool_formats.parser import ToolCallParser

#: Maps the engine's finish reasons to OpenAI's. An output with another reason becomes an error.
_FINISH_REASONS = {"stop": "stop", "stop_string": "stop", "length": "length", "timeout": "length"}

#: Lower bound of reported log probabilities. The log probability of masked tokens is minus
#: infinity, which JSON cannot represent.
_MIN_LOGPROB = -9999.0

# If an event has several chunks in a stream, the first chunk has the fields that describe the
# tokens of the event, and the last chunk has the fields that describe the end of the output.
_TOKEN_FIELDS = ("logprobs", "token_ids")
_END_FIELDS = ("finish_reason", "stop_reason", "matched_stop")


class ResponseChoice:
    """Builds one choice of a response from the events or from the output of an engine request.

    `index` is the index of the choice and of its request in `api_request`. `parser` provides the
    text of each token. `prompt_logprobs` are the log probabilities of the prompt's tokens except
    for the first one; None unless requested.
    """

    def __init__(
        self,
        api_request: ApiRequest,
        index: int,
        parser: RequestParser,
        prompt_logprobs: Sequence[Logprob] | None = None,
    ):
        self._api_request = api_request
        self._index = index
        self._parser = parser
        self._prompt_logprobs = prompt_logprobs
        prompt_index = api_request.prompt_index(index)
        self._prompt = api_request.prompts[prompt_index]
        self._echo = "" if api_request.echo is None else api_request.echo[prompt_index]
        self._reasoning: ReasoningParser | None = None
        start = api_request.reasoning[prompt_index]
        if start is not None:
            # Without separate_reasoning, the reasoning section and its tags are part of the
            # content. In either case, tool calls are parsed in the text after the section.
            self._reasoning = ReasoningParser(
                start, keep_tags=not api_request.body.separate_reasoning
            )
        self._has_reasoning = False
        self._tool_calls: ToolCallParser | None = None
        self._tools = api_request.body.chosen_tools
        if self._tools.functions:
            self._tool_calls = ToolCallParser(self._tools, parser.tool_format)
        self._has_begun = False
        self._num_tokens = 0
        self._text_offset = 0

    def complete(self, output: Output) -> dict[str, Any]:
        """Return the choice for a response that is not streamed."""
        event = output_event(output)
        reasoning, content, _ = self._split(event)
        choice = {"token_ids": None, **self._choice(event)}
        if not self._api_request.chat:
            return {
                "prompt_token_ids": None,
                **choice,
                "text": content,
                "prompt_logprobs": self.prompt_logprobs(),
            }
        message: dict[str, Any] = {
            "role": self._api_request.role,
            "content": content,
            "refusal": None,
            **_reasoning_fields(reasoning or None),
        }
        if self._tool_calls is not None:
            calls = self._tool_calls.calls
            if self._tool_calls.cut_text:
                calls = calls[:-1]
                if not self._tools.required:
                    message["content"] = content + self._tool_calls.cut_text
            if calls:
                message["tool_calls"] = calls
                if not content.strip():
                    message["content"] = None
        return choice | {"message": message}

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        """Convert an event to stream chunks, and yield the choice that each chunk contains.

        A chunk has a part of at most one tool call. In a chat, the last chunk has the finish reason
        and no text.
        """
        reasoning, content, calls = self._split(event)
        self._num_tokens += len(event.tokens)
        choice = self._choice(event)
        is_needed = event.finished or choice["logprobs"] is not None or choice.get("token_ids")
        if not self._api_request.chat:
            if content or is_needed:
                self._has_begun = True
                yield choice | {"text": content}
            return
        deltas: list[dict[str, Any]] = []
        if reasoning:
            deltas.append(_reasoning_fields(reasoning))
        if content:
            deltas.append({"content": content})
        deltas += [{"tool_calls": [call]} for call in calls]
        if is_needed and not deltas and not (event.finished and self._has_begun):
            deltas.append({"content": ""})
        if event.finished:
            deltas.append({})
        for position, delta in enumerate(deltas):
            yield self._chat_chunk(
                choice, delta, is_first=position == 0, is_last=position == len(deltas) - 1
            )

    def _chat_chunk(
        self, choice: dict[str, Any], delta: dict[str, Any], is_first: bool, is_last: bool
    ) -> dict[str, Any]:
        """Return the entry of ``choices`` for one chunk of a chat completion.

        `choice` has the fields of the engine's event, and `delta` the new text or tool call. An
        event may become several chunks: `is_first` and `is_last` say whether this is the first or
        last of them.
        """
        chunk = dict(choice)
        if not is_first:
            chunk |= {name: None for name in _TOKEN_FIELDS if name in choice}
        if not is_last:
            chunk |= dict.fromkeys(_END_FIELDS)
        if not self._has_begun:
            delta = {"role": self._api_request.role} | delta
        self._has_begun = True
        return chunk | {"delta": delta}

    @property
    def has_cut_call(self) -> bool:
        """Whether the output has ended within the arguments of a tool call."""
        return self._tool_calls is not None and bool(self._tool_calls.cut_text)

    def reasoning_tokens(self, output: Output) -> int:
        """Return the number of tokens of the reasoning section, including its end tag `END`."""
        if not self._has_reasoning:
            return 0
        end = END.encode()
        text = b""
        for count, token in enumerate(output.tokens, 1):
            text = text[1 - len(end) :] + self._parser.token_bytes(token)
            if end in text:
                return count
        return len(output.tokens)

    def usage(self) -> dict[str, int]:
        """Return the token usage of the chunks so far."""
        prompt_tokens = len(self._prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt_tokens + self._num_tokens,
        }

    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """Return the log probabilities of the prompt in vLLM's format; None unless requested."""
        if self._prompt_logprobs is None or self._api_request.prompt_logprobs is None:
            return None
        entries: list[dict[str, Any] | None] = [None]
        for token, logprob in zip(self._prompt[1:], self._prompt_logprobs, strict=True):
            entry = {}
            candidates = [*enumerate(logprob.top, 1), (logprob.rank, (token, logprob.value))]
            for rank, (candidate, value) in candidates:
                entry[str(candidate)] = {
                    "logprob": max(value, _MIN_LOGPROB),
                    "rank": rank or None,
                    "decoded_token": self._parser.token_text(candidate),
                }
            entries.append(entry)
        return entries

    def _split(self, event: Event) -> tuple[str, str, list[dict[str, Any]]]:
        """Split the text of an event into reasoning, content and deltas of tool calls."""
        text = event.text
        if self._api_request.body.include_stop_str_in_output and event.output is not None:
            stop = self._matched_stop(event.output)
            if isinstance(stop, str):
                text += stop
        reasoning = ""
        calls: list[dict[str, Any]] = []
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text, event.finished)
            self._has_reasoning |= bool(reasoning)
            if not self._api_request.body.include_reasoning:
                reasoning = ""
        if self._tool_calls is not None:
            text, calls = self._tool_calls.feed(text, event.finished)
        if not self._api_request.body.separate_reasoning:
            text = reasoning + text
            reasoning = ""
        if not self._has_begun:
            text = self._echo + text
        return reasoning, text, calls

    def _choice(self, event: Event) -> dict[str, Any]:
        """Return the fields of a choice except for its text, message or delta."""
        finish_reason = None
        stop = None
        if event.output is not None:
            finish_reason = _FINISH_REASONS[event.output.reason]
            parser = self._tool_calls
            has_complete_calls = parser is not None and parser.calls and not parser.cut_text
            if finish_reason == "stop" and has_complete_calls:
                finish_reason = "tool_calls"
            stop = self._matched_stop(event.output)
        fields: dict[str, Any] = {}
        if self._api_request.body.return_token_ids:
            fields["token_ids"] = list(event.tokens)
            if not self._api_request.chat and not self._has_begun:
                fields["prompt_token_ids"] = self._prompt
        is_requested = stop in (self._api_request.requests[self._index].stop_ids or ())
        return {
            "index": self._index,
            "finish_reason": finish_reason,
            "stop_reason": stop if isinstance(stop, str) or is_requested else None,
            "matched_stop": stop,
            "logprobs": self._logprobs(event),
            **fields,
        }

    def _matched_stop(self, output: Output) -> str | int | None:
        """Return the stop string or stop id that ended an output; None if neither ended it."""
        if output.reason == "stop":
            return output.tokens[-1]
        if output.reason != "stop_string":
            return None
        text = b"".join(map(self._parser.token_bytes, output.tokens)).decode("utf-8", "replace")
        last_begin = len(text) - len(self._parser.token_text(output.tokens[-1]))
        found = []
        for string in self._api_request.requests[self._index].stop or ():
            # A stop string that ended the output ends within the last token.
            begin = text.rfind(string)
            if begin >= 0 and begin + len(string) > last_begin:
                found.append((begin, string))
        return min(found)[1] if found else None

    def _logprobs(self, event: Event) -> dict[str, Any] | None:
        if event.logprobs is None:
            return None
        pairs = list(zip(event.tokens, event.logprobs, strict=True))
        if event.output is not None and event.output.reason == "stop":
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
        """Return log probabilities in the format of the completions API.

        ``top_logprobs`` contains the most likely tokens and the generated token itself.
        """
        entries: list[tuple[int, Logprob | None]] = list(pairs)
        has_echo = self._api_request.echo is not None and not self._has_begun
        if has_echo and self._prompt_logprobs is not None:
            prompt = zip(self._prompt, [None, *self._prompt_logprobs], strict=True)
            entries = [*prompt, *entries]
        offsets = []
        for token, _ in entries:
            offsets.append(self._text_offset)
            self._text_offset += len(self._parser.token_text(token))
        values: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for token, logprob in entries:
            if logprob is None:  # the first token of the prompt has no log probability
                values.append(None)
                top_logprobs.append(None)
                continue
            values.append(max(logprob.value, _MIN_LOGPROB))
            top: dict[str, float] = {}
            for candidate, value in (*logprob.top, (token, logprob.value)):
                top.setdefault(self._token_name(candidate), max(value, _MIN_LOGPROB))
            top_logprobs.append(top)
        return {
            "tokens": [self._token_name(token) for token, _ in entries],
            "text_offset": offsets,
            "token_logprobs": values,
            "top_logprobs": top_logprobs,
        }

    def _token_name(self, token: int) -> str:
        """Return the text of a token, or "token_id:ID" with ``return_tokens_as_token_ids``."""
        if self._api_request.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._parser.token_text(token)

    def _token_logprob(self, token: int, value: float) -> dict[str, Any]:
        """Return `value`, the log probability of a token, in the format of the chat API."""
        return {
            "token": self._token_name(token),
            "logprob": max(value, _MIN_LOGPROB),
            "bytes": list(self._parser.token_bytes(token)),
        }


class CompletionWriter:
    """Writes the response of a chat completion or completion, or the events of its stream."""

    def __init__(self, api_request: ApiRequest, model: str, choices: Sequence[ResponseChoice]):
        self._api_request = api_request
        self._model = model
        self._choices = choices
        self._outputs: dict[int, Output] = {}

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the complete response."""
        choices = [
            choice.complete(output) for choice, output in zip(self._choices, outputs, strict=True)
        ]
        body = response_body(self._api_request, self._model, choices)
        if self._api_request.chat:
            body["prompt_logprobs"] = self._choices[0].prompt_logprobs()
        return body | {"usage": self._usage(dict(enumerate(outputs)))}

    def messages(self, index: int, event: Event) -> Iterator[str]:
        """Yield the server-sent events for an engine event of the choice `index`."""
        if event.output is not None:
            self._outputs[index] = event.output
        for chunk in self._choices[index].chunks(event):
            body = response_body(self._api_request, self._model, [chunk])
            options = self._api_request.body.stream_options
            if options.include_usage:
                continuous = options.continuous_usage_stats
                body["usage"] = self._choices[index].usage() if continuous else None
            yield _data_message(json.dumps(body))

    def last_messages(self) -> Iterator[str]:
        """Yield the last server-sent events."""
        if self._api_request.body.stream_options.include_usage:
            body = response_body(self._api_request, self._model, [])
            yield _data_message(json.dumps(body | {"usage": self._usage(self._outputs)}))
        yield _data_message("[DONE]")

    def _usage(self, outputs: Mapping[int, Output]) -> dict[str, Any]:
        """Return the token usage of the outputs, by index of their choices."""
        usage = token_usage([*outputs.values()])
        if self._api_request.chat:
            reasoning = [self._choices[i].reasoning_tokens(outputs[i]) for i in outputs]
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
        return usage

    def error_messages(self, error: ApiError) -> Iterator[str]:
        """Yield the server-sent events of an error that ended the stream."""
        yield _data_message(json.dumps(error.body))
        yield _data_message("[DONE]")


def _data_message(data: str) -> str:
    return f"data: {data}\n\n"


def output_event(output: Output) -> Event:
    """Return an event that has all tokens and the text of an output."""
    logprobs = None if output.logprobs is None else tuple(output.logprobs)
    return Event(output.id, tuple(output.tokens), output.text, output, logprobs)


def _reasoning_fields(text: str | None) -> dict[str, str | None]:
    """Return the reasoning text in vLLM's field, and in the field of SGLang and DeepSeek."""
    return {"reasoning": text, "reasoning_content": text}


def without_output(event: Event) -> Event:
    """Return an event without the generated tokens and their text."""
    logprobs = None if event.logprobs is None else ()
    output = event.output
    if output is not None:
        output = replace(
            output,
            tokens=[],
            text="",
            logprobs=None if output.logprobs is None else [],
            reason="length",
        )
    return Event(event.id, (), "", output, logprobs)


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
    """Return the JSON body of a response, or of one chunk of a streamed response.

    `model` is the name of the model in the API.
    """
    kind = "text_completion"
    if api_request.chat:
        kind = "chat.completion.chunk" if api_request.body.stream else "chat.completion"
    body = {
        "id": api_request.id,
        "object": kind,
        "created": api_request.created,
        "model": model,
        "choices": choices,
        "system_fingerprint": None,
    }
    if api_request.chat and not api_request.body.stream:
        body |= {"prompt_token_ids": None, "service_tier": None}
    is_first = not api_request.body.stream or any("role" in one.get("delta", {}) for one in choices)
    if api_request.chat and api_request.body.return_token_ids and is_first:
        body["prompt_token_ids"] = api_request.prompts[0]
    return body
