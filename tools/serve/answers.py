"""Outputs of the engine as OpenAI's clients read them, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graft.models.request import Event, Logprob, Output
from graft.tools.serve.calls import CallReader
from graft.tools.serve.wire import Call, Front

#: How an answer ended; the others have errors.
_FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "timeout": "length"}
#: JSON has no number for the logarithm of 0.
_LEAST = -9999.0


class Choice:
    """One answer of a call, as it grows."""

    def __init__(self, call: Call, index: int, front: Front):
        self._call = call
        self._index = index
        self._front = front
        self._reader = CallReader(call.choice, call.most_calls) if call.choice else None
        self._begun = False
        self._offset = 0

    def whole(self, output: Output) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        told = None if output.logprobs is None else tuple(output.logprobs)
        event = Event(output.id, tuple(output.tokens), output.text, output, told)
        made = self._made(event, False)
        if not self._call.chat:
            return made
        delta = made.pop("delta")
        said = {"role": "assistant", "content": delta.get("content", ""), "refusal": None}
        if "tool_calls" in delta:
            said["tool_calls"] = [
                {k: v for k, v in one.items() if k != "index"} for one in delta["tool_calls"]
            ]
            said["content"] = said["content"] if said["content"].strip() else None
        return {**made, "message": said}

    def piece(self, event: Event) -> dict[str, Any] | None:
        """The choice of the next piece of a stream; None where there is nothing to say."""
        made = self._made(event, True)
        empty = not (made["delta"] if self._call.chat else made["text"])
        return None if empty and not event.finished and made["logprobs"] is None else made

    def _made(self, event: Event, streamed: bool) -> dict[str, Any]:
        output = event.output
        text = event.text
        found: list[dict[str, Any]] = []
        if self._reader is not None:
            text, found = self._reader.feed(text, event.finished)
        finish = None if output is None else _FINISH[output.reason]
        if finish == "stop" and self._reader is not None and self._reader.calls:
            finish = "tool_calls"
        made = {"index": self._index, "finish_reason": finish, "logprobs": self._logprobs(event)}
        if not self._call.chat:
            return made | {"text": text}
        delta: dict[str, Any] = {} if self._begun or not streamed else {"role": "assistant"}
        self._begun = True
        if text:
            delta["content"] = text
        if found and self._reader is not None:
            first = len(self._reader.calls) - len(found)
            delta["tool_calls"] = [{"index": first + i, **one} for i, one in enumerate(found)]
        return made | {"delta": delta}

    def _logprobs(self, event: Event) -> dict[str, Any] | None:
        if event.logprobs is None:
            return None
        pairs = list(zip(event.tokens, event.logprobs, strict=True))
        if event.output is not None and event.output.finished:
            pairs = pairs[:-1]  # what ends a text is none of it
        if self._call.chat:
            return {
                "refusal": None,
                "content": [
                    self._token(token, known.value)
                    | {"top_logprobs": [self._token(*one) for one in known.top]}
                    for token, known in pairs
                ],
            }
        return self._columns(pairs)

    def _columns(self, pairs: Sequence[tuple[int, Logprob]]) -> dict[str, Any]:
        names = [self._name(token) for token, _ in pairs]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "text_offset": offsets,
            "token_logprobs": [max(known.value, _LEAST) for _, known in pairs],
            "top_logprobs": [
                {self._name(i): max(value, _LEAST) for i, value in known.top} for _, known in pairs
            ],
        }

    def _name(self, token: int) -> str:
        return self._front.bytes_of(token).decode("utf-8", "replace")

    def _token(self, token: int, value: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": max(value, _LEAST),
            "bytes": list(self._front.bytes_of(token)),
        }


def usage(call: Call, outputs: Sequence[Output]) -> dict[str, Any]:
    """Tokens that an answer took; a prompt counts once, however many samples it has."""
    prompts = {o.id.split("/")[1]: o.prompt_tokens for o in outputs}
    asked = sum(prompts.values())
    made = sum(len(o.tokens) for o in outputs)
    return {
        "prompt_tokens": asked,
        "completion_tokens": made,
        "total_tokens": asked + made,
        "prompt_tokens_details": {
            "cached_tokens": min(asked, sum(o.cached_tokens for o in outputs))
        },
    }


def envelope(call: Call, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What stands around the choices of an answer, or of a piece of one."""
    kind = "text_completion"
    if call.chat:
        kind = "chat.completion.chunk" if call.stream else "chat.completion"
    return {
        "id": call.id,
        "object": kind,
        "created": call.created,
        "model": name,
        "choices": choices,
    }
