"""Responses of ``/v1/responses``: complete responses, and the events of streamed ones.

The output is first converted to chunks of a streamed chat completion. The chunks are converted to
the output items of the response and to the events of its stream.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graft.models.request import Event, Output
from graft.tools.serve.completion_writer import ResponseChoice, output_event, token_usage
from graft.tools.serve.errors import ApiError
from graft.tools.serve.request_parser import ApiRequest


class ResponsesWriter:
    """Writes a response, or the events of its stream, from the chunks of a chat completion."""

    def __init__(self, api_request: ApiRequest, model: str, choice: ResponseChoice):
        self._api_request = api_request
        self._choice = choice
        self._items: list[dict[str, Any]] = []
        self._spaces = ""  # white space that becomes text only if other text follows it
        self._call_index = -1
        self._sequence_number = 0
        self._has_begun = False
        self._output: Output | None = None
        given = {name: value for name, value in api_request.fields.items() if value is not None}
        self._response: dict[str, Any] = {
            "id": "resp_" + api_request.id.removeprefix("chatcmpl-"),
            "object": "response",
            "created_at": api_request.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "max_tool_calls": given.get("max_tool_calls"),
            "metadata": given.get("metadata", {}),
            "model": model,
            "output": [],
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
            "service_tier": "default",
            "store": False,
            "temperature": given.get("temperature", 1.0),
            "text": {"format": {"type": "text"}} | given.get("text", {}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_logprobs": given.get("top_logprobs", 0),
            "top_p": given.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None,
            "user": given.get("user"),
        }

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the complete response."""
        [output] = outputs
        for _ in self._convert(output_event(output)):
            pass
        self._finish()
        return self._response

    def messages(self, _index: int, event: Event) -> Iterator[str]:
        """Yield the server-sent events for an event of the engine."""
        if not self._has_begun:
            self._has_begun = True
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)
        yield from self._convert(event)

    def last_messages(self) -> Iterator[str]:
        """Yield the last server-sent event."""
        self._finish()
        yield self._event(f"response.{self._response['status']}", response=self._response)

    def error_messages(self, error: ApiError) -> Iterator[str]:
        """Yield the server-sent event of an error that ended the stream."""
        self._response["status"] = "failed"
        self._response["error"] = {"code": "server_error", "message": str(error)}
        self._response["output"] = self._items
        yield self._event("response.failed", response=self._response)

    def _finish(self) -> None:
        """Set the output items, the status and the usage of the complete response."""
        output = self._output
        assert output is not None
        response = self._response
        response["status"] = "completed"
        if output.reason in ("length", "timeout"):
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["output"] = self._items
        usage = token_usage([output])
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._choice.reasoning_tokens(output)},
            "total_tokens": usage["total_tokens"],
        }

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"

    def _convert(self, event: Event) -> Iterator[str]:
        """Convert an event of the engine to output items, and yield the events of the stream."""
        for kind, part, tokens in self._parts(event):
            if kind == "reasoning":
                yield from self._add_text("reasoning", part, [])
            elif kind == "call":
                yield from self._add_call(part)
            else:
                yield from self._add_content(part, tokens)
        if event.output is not None:
            self._output = event.output
            yield from self._end(event.output)

    def _parts(self, event: Event) -> list[tuple[str, Any, list[dict[str, Any]]]]:
        """Return the new parts of the output in order, as tuples (kind, part, log probabilities).

        The output is first parsed into chunks of a chat completion. The order of content and call
        within one chunk would be unknown. If the model may call tools, the text is therefore parsed
        character by character, so that no chunk has both. Consecutive parts of the same output item
        are joined afterwards.
        """
        pieces = [event]
        if self._api_request.body.chosen_tools.functions and event.text:
            pieces = [Event(event.id, (), char) for char in event.text[:-1]]
            pieces.append(replace(event, text=event.text[-1]))
        parts: list[tuple[str, Any, list[dict[str, Any]]]] = []
        for piece in pieces:
            for chunk in self._choice.chunks(piece):
                delta = chunk["delta"]
                tokens = [] if chunk["logprobs"] is None else chunk["logprobs"]["content"]
                if delta.get("reasoning"):
                    _join(parts, "reasoning", delta["reasoning"], [])
                if delta.get("content") or tokens:
                    _join(parts, "content", delta.get("content") or "", tokens)
                for call in delta.get("tool_calls", ()):
                    _join(parts, "call", call, [])
        return parts

    def _end(self, output: Output) -> Iterator[str]:
        """Close the last output item of the response. If there is none, add an empty message."""
        if not self._items:
            yield from self._add_text("message", self._spaces, [])
        is_cut = output.reason in ("length", "timeout") or self._choice.has_cut_call
        yield from self._close("incomplete" if is_cut else "completed")

    def _add_content(self, text: str, tokens: list[dict[str, Any]]) -> Iterator[str]:
        if not tokens and not self._is_open("message"):
            text = self._spaces + text
            if not text.strip():
                self._spaces = text
                return
        self._spaces = ""
        yield from self._add_text("message", text, tokens)

    def _is_open(self, kind: str) -> bool:
        """Return whether the last item has the type `kind` and is not closed."""
        last = self._items[-1] if self._items else {}
        return last.get("type") == kind and last["status"] == "in_progress"

    def _place(self) -> dict[str, Any]:
        """Return the fields with which an event refers to the last item."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _open(self, item: dict[str, Any]) -> Iterator[str]:
        """Close the last item and begin `item`."""
        yield from self._close("completed")
        self._items.append(item)
        index = len(self._items) - 1
        yield self._event("response.output_item.added", output_index=index, item=item)

    def _add_text(self, kind: str, text: str, tokens: list[dict[str, Any]]) -> Iterator[str]:
        """Add text to the current output item, "message" or "reasoning", and yield its events.

        If the current item is not of the kind `kind`, begin a new item. `tokens` are the log
        probabilities of a message's tokens.
        """
        is_message = kind == "message"
        if not self._is_open(kind):
            item: dict[str, Any] = {
                "id": _make_id("msg" if is_message else "rs"),
                "type": kind,
                "status": "in_progress",
                "content": [],
            }
            if is_message:
                item["role"] = "assistant"
            else:
                item["summary"] = []
            yield from self._open(item)
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if is_message:
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._event(
                "response.content_part.added", **self._place(), content_index=0, part=part
            )
            item["content"].append(part)
        part = self._items[-1]["content"][0]
        part["text"] += text
        if is_message:
            part["logprobs"] += tokens
        logprobs = {"logprobs": tokens} if is_message else {}
        if text or tokens:
            yield self._event(
                f"response.{part['type']}.delta",
                **self._place(),
                content_index=0,
                delta=text,
                **logprobs,
            )

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[str]:
        """Add a part of a tool call."""
        function = call["function"]
        if call["index"] != self._call_index:
            self._call_index = call["index"]
            self._spaces = ""
            item = {
                "id": _make_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": "",
            }
            yield from self._open(item)
        arguments = function["arguments"]
        self._items[-1]["arguments"] += arguments
        if arguments:
            yield self._event(
                "response.function_call_arguments.delta", **self._place(), delta=arguments
            )

    def _close(self, status: str) -> Iterator[str]:
        """Close the last item if it is open."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        place = self._place()
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            [part] = item["content"]
            is_message = item["type"] == "message"
            logprobs: dict[str, Any] = {"logprobs": part["logprobs"]} if is_message else {}
            yield self._event(
                f"response.{part['type']}.done",
                **place,
                content_index=0,
                text=part["text"],
                **logprobs,
            )
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        index = place["output_index"]
        yield self._event("response.output_item.done", output_index=index, item=item)


def _join(
    parts: list[tuple[str, Any, list[dict[str, Any]]]],
    kind: str,
    part: Any,
    tokens: list[dict[str, Any]],
) -> None:
    """Append `part` to `parts`, or join it with the last part if they belong together.

    An entry of `parts` is (kind, part, log probabilities of its tokens). With the kinds "content"
    and "reasoning", a part is a text; texts of the same kind are joined. With the kind "call", a
    part is a tool call or a continuation of its arguments; parts with the same call index are
    joined.
    """
    last: tuple[str, Any, list[dict[str, Any]]] = parts[-1] if parts else ("", "", [])
    last_kind, last_part, last_tokens = last
    if last_kind != kind or (kind == "call" and last_part["index"] != part["index"]):
        parts.append((kind, part, tokens))
    elif kind == "call":
        last_part["function"]["arguments"] += part["function"]["arguments"]
    else:
        parts[-1] = (kind, last_part + part, last_tokens + tokens)


def _make_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
