"""Notations in which models write calls, each with a grammar and a parser."""

from __future__ import annotations

import re

from graft.tools.serve.tool_formats.base import ToolFormat
from graft.tools.serve.tool_formats.hermes import Hermes
from graft.tools.serve.tool_formats.llama3_json import Llama3Json
from graft.tools.serve.tool_formats.mistral import Mistral
from graft.tools.serve.tool_formats.pythonic import Pythonic
from graft.tools.serve.tool_formats.qwen3_coder import Qwen3Coder

__all__ = ["TOOL_FORMATS", "ToolFormat", "find_tool_format"]

#: Tool formats by the name of vLLM's ``--tool-call-parser``.
TOOL_FORMATS: dict[str, ToolFormat] = {
    one.name: one for one in (Hermes(), Llama3Json(), Mistral(), Qwen3Coder(), Pythonic())
}
_LLAMA_OBJECT = re.compile(r'\{"name":[^{}]*"parameters":')
_PYTHON_CALL = re.compile(r"\[\w+\(\w+=")


def find_tool_format(template: str | None) -> ToolFormat:
    """Return the tool format that a chat template describes, and hermes if it describes none."""
    template = template or ""
    name = "hermes"
    if "<tool_call>" in template:
        if "<function=" in template:
            name = "qwen3_coder"
    elif "[TOOL_CALLS]" in template:
        name = "mistral"
    elif "<|python_tag|>" in template or _LLAMA_OBJECT.search(template):
        name = "llama3_json"
    elif _PYTHON_CALL.search(template):
        name = "pythonic"
    return TOOL_FORMATS[name]
