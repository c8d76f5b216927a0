"""Chat templates, rendered in a child process with limited time and memory.

A chat template is a program that is part of a checkpoint, so it is not trusted.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2

from graft.models.errors import TemplateUnavailableError, TokenizerError
from graft.native.children import chat_templates
from graft.native.children.errors import ChildLost, ChildUnavailable, Refusal
from graft.native.children.process import Call, ChildProcess, Setup

__all__ = ["ChatTemplate"]

#: Maximum duration of one rendering in seconds.
LIMIT_S = 5.0
#: Maximum address space that the child process may allocate for renderings.
MEMORY_BYTES = 1 << 30

_RENDER = f"{chat_templates.__name__}:render_json"
# The first call of the child renders an empty template without a time limit. Importing Jinja and
# creating its environment therefore do not count against the time limit of a real template.
_SETUP = Setup("chat", _RENDER, ("", "{}"))
# All engines of this process share one child process. The limits apply to the rendering of
# templates, not to the child's imports.
_CHILD = ChildProcess(MEMORY_BYTES, preload=(chat_templates.__name__,))


@functools.lru_cache(maxsize=8)
def _parse(source: str) -> None:
    chat_templates.make_environment().parse(source)


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
