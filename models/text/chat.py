"""Chat templates, rendered in a child process with limited time and memory.

A chat template is a program that is part of a checkpoint, so it is not trusted.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from graft.models.errors import TemplateUnavailableError, TokenizerError
from graft.native.children.errors import ChildLost, ChildUnavailable, Refusal
from graft.native.children.process import Call, ChildProcess, Setup

__all__ = ["ChatTemplate"]

#: Maximum duration of one rendering in seconds.
LIMIT_S = 5.0
#: Maximum address space that the child process may allocate for renderings.
MEMORY_BYTES = 1 << 30

_RENDER = f"{__name__}:render_json"
# The first call of the child renders an empty template without a time limit. Importing Jinja and
# creating its environment therefore do not count against the time limit of a real template.
_SETUP = Setup("chat", _RENDER, ("", "{}"))
# All engines of this process share one child process. The limits apply to the rendering of
# templates, not to the child's imports.
_CHILD = ChildProcess(MEMORY_BYTES, preload=(__name__,))


@functools.lru_cache(maxsize=8)
def _parse(source: str) -> None:
    _make_environment().parse(source)


class ChatTemplate:
    """The chat template of a model, in Jinja.

    `where` is the path of the template or its checkpoint, for error messages. A template that is
    not valid Jinja raises TokenizerError.
    """

    def __init__(self, source: str, where: str):
        self._source = source
        self._where = where
        try:
            _parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TokenizerError(f"{where}: the chat template is invalid: {error}") from error
        _CHILD.start()

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation, given the variables of the template.

        Raises
        ------
        TokenizerError
            If the template fails, calls ``raise_exception``, or exceeds `LIMIT_S` or
            `MEMORY_BYTES`, or if a variable cannot be converted to JSON.
        TemplateUnavailableError
            If no child process could render the template.
        """
        try:
            text = json.dumps(variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise TokenizerError(f"{self._where}: invalid chat messages: {error}") from error
        call = Call(_RENDER, (self._source, text), _SETUP)
        try:
            return str(_CHILD.call(call, LIMIT_S))
        except ChildUnavailable as error:
            raise TemplateUnavailableError(
                f"the chat template was not rendered: {error}"
            ) from error
        except (Refusal, ChildLost) as error:
            raise TokenizerError(f"{self._where}: the chat template failed: {error}") from error


def render_json(source: str, variables: str) -> str:
    """Render a template in the child process. `variables` is the text of a JSON object."""
    try:
        template = _compile(source)
        return template.render(**json.loads(variables))
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        raise Refusal(str(error) or type(error).__name__) from error


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    return _make_environment().from_string(source)


def _make_environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment with the settings and helper functions that templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """The template block ``{% generation %}``, which marks the assistant's text for training.

    The block renders its content. Variables that are set in the block are local to it.
    """

    tags = {"generation"}  # noqa: RUF012 - the base class declares the type

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a ``generation`` block whose first tag is the current token."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _strftime_now(form: str) -> str:
    now = datetime.datetime.now()
    return now.strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON. Unlike Jinja's own filter ``tojson``, do not escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
