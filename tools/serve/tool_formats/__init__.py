"""Notations in which models write calls, each with a grammar and a parser."""

from __future__ import annotations

import logging
import re

from graft.tools.serve.tool_formats.base import ToolFormat
from graft.tools.serve.tool_formats.hermes import Hermes
from graft.tools.serve.tool_formats.llama3_json import Llama3Json
from graft.tools.serve.tool_formats.mistral import Mistral
from graft.tools.serve.tool_formats.pythonic import Pythonic
from graft.tools.serve.tool_formats.qwen3_coder import Qwen3Coder

__all__ = ["TOOL_FORMATS", "ToolFormat", "find_tool_format"]

#: Tool formats by name. The names are those of vLLM's option ``--tool-call-parser``.
TOOL_FORMATS: dict[str, ToolFormat] = {
    one.name: one for one in (Hermes(), Llama3Json(), Mistral(), Qwen3Coder(), Pythonic())
}
_LLAMA_OBJECT = re.compile(r'\{"name":[^{}]*"parameters":')
#: The key "arguments" in quotes. A backslash can precede each quote.
_HERMES_KEY = re.compile(r"""["']arguments\\?["']""")
_CALLS = re.compile(r"\btool_calls\b")
_PYTHON_CALL = re.compile(r"\[\w+\(\w+=")


def find_tool_format(template: str | None) -> ToolFormat:
    """Return the tool format that a chat template describes.

    If the template describes no known format, return `Hermes`. If such a template renders tool
    calls, log a warning, because the model probably writes calls in another notation.
    """
    template = template or ""
    if "<tool_call>" in template and "<function=" in template:
        return TOOL_FORMATS["qwen3_coder"]
    if "<tool_call>" in template and _HERMES_KEY.search(template):
        return TOOL_FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return TOOL_FORMATS["mistral"]
    if "<|python_tag|>" in template or _LLAMA_OBJECT.search(template):
        return TOOL_FORMATS["llama3_json"]
    if _PYTHON_CALL.search(template):
        return TOOL_FORMATS["pythonic"]
    if _CALLS.search(template):
        logging.getLogger("graft").warning(
            "the chat template describes no known notation of tool calls, so that of hermes is "
            "used; --tool-call-parser selects another notation"
        )
    return TOOL_FORMATS["hermes"]
