"""Separation of generated text into content and tool calls."""

from __future__ import annotations

import secrets
from typing import Any

from graft.tools.serve.tool_calls import ToolChoice
from graft.tools.serve.tool_formats.base import ToolFormat
from graft.tools.serve.tool_formats.source import (
    Arguments,
    CallBegin,
    CallEnd,
    Content,
    Mismatch,
    Steps,
    TextSource,
)

__all__ = ["MAX_TOOL_CALLS", "ToolCallParser"]

#: Maximum number of tool calls in one response choice.
MAX_TOOL_CALLS = 128


class ToolCallParser:
    """Incremental parser that separates generated text into content and tool calls.

    `calls` are the calls that have been parsed so far, in OpenAI's format, at most
    `MAX_TOOL_CALLS`. The arguments of the last call can be incomplete. If the output has ended
    within these arguments, `cut_text` is the text of this call; otherwise it is empty.
    """

    def __init__(self, tools: ToolChoice, tool_format: ToolFormat):
        self._tools = tools
        self._format = tool_format
        self._source = TextSource()
        self._events = self._parse()
        self._num_calls = 0
        self._in_call = False
        self.calls: list[dict[str, Any]] = []
        self.cut_text = ""

    def feed(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Process the next piece of the output, and return new content and new parts of calls.

        The content is text that belongs to no call. Text that may be the beginning of a call is
        held back until more text shows whether it is. If calls are required, there is no content;
        text before the arguments of a call that has been cut off is omitted. The parts, at most one
        for each call, are deltas in the format of a streamed response. The first delta of a call
        has its id and name. Each delta of the call has a piece of the arguments. `last` says
        whether this is the last piece of the output.
        """
        self._source.feed(text, last)
        content = ""
        deltas: list[dict[str, Any]] = []
        for event in self._events:
            match event:
                case None:
                    break
                case Content(text=more) if not self._tools.required:
                    content += more
                case CallBegin(name=name):
                    self._begin_call(name, deltas)
                case Arguments(text=piece):
                    self._add_arguments(piece, deltas)
                case CallEnd():
                    self._in_call = False
                    self._source.call_text = None
        if last and self._in_call and self._num_calls <= MAX_TOOL_CALLS:
            self.cut_text = self._source.call_text or ""
        return content, deltas

    def _parse(self) -> Steps[None]:
        """Yield the content and the tool calls of the output as events.

        If the output ends before the arguments of a call begin, the text of the call is content. If
        the output ends after the arguments, incomplete text after them is omitted.
        """
        source = self._source
        is_omitted = False
        try:
            yield from self._format.parse(source, self._tools)
        except Mismatch:
            if source.call_text is None or self._in_call:
                is_omitted = True
            else:
                source.text = source.call_text + source.text
        while True:
            rest = source.take(len(source.text))
            if rest and not is_omitted:
                yield Content(rest)
            yield None

    def _begin_call(self, name: str, deltas: list[dict[str, Any]]) -> None:
        self._in_call = True
        self._num_calls += 1
        if self._num_calls > MAX_TOOL_CALLS:
            return
        call = {"id": self._format.call_id(secrets.token_hex(12)), "type": "function"}
        function = {"name": name, "arguments": ""}
        deltas.append({"index": len(self.calls), **call, "function": dict(function)})
        self.calls.append({**call, "function": function})

    def _add_arguments(self, piece: str, deltas: list[dict[str, Any]]) -> None:
        if self._num_calls > MAX_TOOL_CALLS:
            return
        index = len(self.calls) - 1
        self.calls[index]["function"]["arguments"] += piece
        if not deltas or deltas[-1]["index"] != index:
            deltas.append({"index": index, "function": {"arguments": ""}})
        deltas[-1]["function"]["arguments"] += piece
