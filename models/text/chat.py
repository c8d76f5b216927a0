"""Chat templates, programs of whoever made the model, rendered where neither their time nor their
memory is the engine's."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from graft.models.errors import TokenizerError
from graft.native.children.errors import ChildLost, Refusal
from graft.native.children.process import Call, ChildProcess, Setup

#: What one rendering may take, and address space that its process may add.
LIMIT_S = 5.0
MEMORY_BYTES = 1 << 30
_RENDERED = f"{__name__}:rendered"
# Imports what rendering needs, outside the time limit.
_SETUP = Setup("chat", _RENDERED, ("", "{}"))
_CHILD = ChildProcess(MEMORY_BYTES, preload=(__name__,))  # for all engines of this process


@functools.lru_cache(maxsize=8)
def _parse(source: str) -> None:
    _environment().parse(source)


class ChatTemplate:
    """A model's chat template.

    Parameters
    ----------
    source : Jinja's text.
    where : what errors call it.

    Raises
    ------
    TokenizerError
        When it does not parse.
    """

    def __init__(self, source: str, where: str):
        self._source = source
        self._where = where
        try:
            _parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TokenizerError(f"{where}: chat template does not parse: {error}") from error
        _CHILD.start()

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a conversation.

        Raises
        ------
        TokenizerError
            When the template fails, refuses, or takes more than 5 s or 1 GiB, or a variable is
            nothing that JSON could hold.
        """
        try:
            text = json.dumps(variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise TokenizerError(f"{self._where}: the chat's messages: {error}") from error
        try:
            return str(_CHILD.call(Call(_RENDERED, (self._source, text), _SETUP), LIMIT_S))
        except (Refusal, ChildLost) as error:
            raise TokenizerError(f"{self._where}: the chat template failed: {error}") from error


def rendered(source: str, variables: str) -> str:
    """In the process that renders: a template's text, by variables as JSON."""
    try:
        return _compiled(source).render(**json.loads(variables))
    except MemoryError:
        raise
    except Exception as error:  # whatever a template does
        raise Refusal(str(error) or type(error).__name__) from error


@functools.lru_cache(16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates expect: block trimming, loop controls and three helpers."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
