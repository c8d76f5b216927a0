"""Generated text that arrives in pieces, for parsers that are generators.

A parser yields events. It yields None if it needs text that has not arrived yet.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "Arguments",
    "CallBegin",
    "CallEnd",
    "Content",
    "Event",
    "Mismatch",
    "Steps",
    "TextSource",
    "partial_length",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The beginning of a call to a function."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the JSON text of a call's arguments."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a call's arguments."""


Event = Content | CallBegin | Arguments | CallEnd
#: A generator of events that returns a value.
Steps = Generator[Event | None, None, T]


class Mismatch(Exception):
    """The text is not what the parser expects next, or it has ended."""


class TextSource:
    """The text of one output, which arrives in pieces and is consumed from its beginning.

    `text` is the part that has arrived but has not been consumed. `call_text` is the text of the
    current call, from its first character on; None between calls.
    """

    def __init__(self) -> None:
        self.call_text: str | None = None
        self.text = ""
        self._has_ended = False

    def feed(self, text: str, last: bool) -> None:
        """Append a piece of the output; `last` says whether the output ends with it."""
        self.text += text
        self._has_ended = last

    def mark(self) -> None:
        """Mark the current position as the beginning of a call."""
        self.call_text = ""

    def take(self, length: int) -> str:
        """Consume and return the first characters of the text."""
        taken = self.text[:length]
        self.text = self.text[length:]
        if self.call_text is not None:
            self.call_text += taken
        return taken

    def wait(self) -> Steps[None]:
        """Wait for more text by yielding None. Raise Mismatch if the output has ended."""
        if self._has_ended:
            raise Mismatch
        yield None

    def content_until(self, texts: Sequence[str], separator: str = "") -> Steps[str]:
        """Yield content up to the first of `texts` that occurs, and consume and return that text.

        Content that equals `separator` is omitted. The returned text is the beginning of a call. If
        the output ends before any of the texts occurs, the rest of its text is content, and
        Mismatch is raised.
        """
        self.call_text = None
        is_separator = bool(separator)
        while True:
            found = [(self.text.find(text), text) for text in texts if text in self.text]
            if found:
                begin, text = min(found)
                if begin and not (is_separator and self.text[:begin] == separator):
                    yield Content(self.text[:begin])
                self.take(begin)
                self.mark()
                return self.take(len(text))
            end = len(self.text)
            if not self._has_ended:
                end -= partial_length(self.text, texts)
                if is_separator and separator.startswith(self.text[:end]):
                    end = 0
            if end:
                is_separator = False
                yield Content(self.take(end))
            yield from self.wait()

    def match(self, *texts: str) -> Steps[str]:
        """Consume and return the longest of `texts` that comes next; return "" if none does."""
        while True:
            found = max((text for text in texts if self.text.startswith(text)), key=len, default="")
            can_grow = any(text.startswith(self.text) and text != found for text in texts)
            if not can_grow or (found and self._has_ended):
                return self.take(len(found))
            yield from self.wait()

    def expect(self, *texts: str) -> Steps[str]:
        """Consume and return the one of `texts` that comes next; raise Mismatch if none does."""
        found = yield from self.match(*texts)
        if not found:
            raise Mismatch
        return found

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it."""
        while not self.text:
            yield from self.wait()
        return self.text[0]

    def json_value(self) -> Steps[None]:
        """Consume a JSON value, and yield its text as `Arguments` events."""
        scanner = _ValueScanner()
        end = None
        while end is None:
            end = scanner.feed(self.text)
            if self.text[:end]:
                yield Arguments(self.take(len(self.text) if end is None else end))
            if end is None:
                yield from self.wait()

    def json_string(self) -> Steps[str]:
        """Consume a JSON string and return its value."""
        text = ""
        for event in self.json_value():
            if event is None:
                yield None
            elif isinstance(event, Arguments):
                text += event.text
        if not text.startswith('"'):
            raise Mismatch
        return str(json.loads(text))

    def quoted_text(self, end: str) -> Steps[None]:
        """Consume plain text and the text `end` after it; yield the plain text as a JSON string."""
        yield Arguments('"')
        while end not in self.text:
            length = len(self.text) - partial_length(self.text, [end])
            if length:
                yield Arguments(_escape(self.take(length)))
            yield from self.wait()
        rest = self.take(self.text.index(end))
        self.take(len(end))
        yield Arguments(f'{_escape(rest)}"')


def partial_length(text: str, tags: Sequence[str]) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of a tag."""
    first_chars = {tag[0] for tag in tags}
    for begin in range(max(0, len(text) - max(map(len, tags)) + 1), len(text)):
        if text[begin] in first_chars and any(tag.startswith(text[begin:]) for tag in tags):
            return len(text) - begin
    return 0


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _ValueScanner:
    """Finds the end of a JSON value in a text that arrives in pieces."""

    def __init__(self) -> None:
        self._has_begun = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Scan the next piece. Return the index at which the value ends; None if it continues."""
        for position, char in enumerate(text):
            if self._in_string:
                self._scan_string(char)
                if not self._in_string and self._depth == 0:
                    return position + 1
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif self._depth == 0 and self._has_begun and char in ",}]) \t\r\n":
                return position  # the end of a number, true, false or null
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
            self._has_begun = True
        return None

    def _scan_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
