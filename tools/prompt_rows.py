"""Requests of ``graft generate``, from the command line or from the rows of a JSON Lines file."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import OptionError
from graft.grammar.errors import GrammarError
from graft.models.engine.engine import Engine
from graft.models.request import Request
from graft.models.tokenizer import RESERVED_VARIABLES
from graft.sampling.params import SamplingParams
from graft.tools import grammar_options as grammars
from graft.tools.validity import is_valid

#: Sampling parameters that a row can set.
SAMPLING_FIELDS = tuple(
    param.name
    for param in dataclasses.fields(SamplingParams)
    if param.name not in ("sample", "relaxed")
)
#: Fields of a row that are passed to the request unchanged.
REQUEST_FIELDS = ("prompt", "messages", "tokens", "max_tokens", "n", "stop", *SAMPLING_FIELDS)
#: Fields of a row that control how the chat template is applied.
TEMPLATE_FIELDS = ("raw", "tools", "variables")
ROW_FIELDS = {"id", *REQUEST_FIELDS, *TEMPLATE_FIELDS, *grammars.GRAMMAR_KEYS}

#: Request fields that have a command line option with a single value.
_SCALAR_OPTIONS = tuple(
    name
    for name in ("max_tokens", "n", *SAMPLING_FIELDS)
    if name not in ("seed", "logit_bias", "stop_ids", "allowed_ids", "banned_ids")
)


@dataclass(frozen=True)
class PromptRow:
    """A request, or the error of a row, and how the prompt is processed.

    Attributes
    ----------
    request
        The request. Of a refused row, it has only an id.
    refusal
        Error of the row; None if the row is valid.
    raw
        Whether the prompt is used without the chat template.
    variables
        Additional variables of the chat template, including ``tools``.
    """

    request: Request
    refusal: str | None = None
    raw: bool = False
    variables: dict[str, Any] = field(default_factory=dict)

    def is_valid(self, text: str) -> bool | None:
        """Return whether an output satisfies the grammar; None if there is no independent check."""
        grammar = self.request.grammar
        if grammar is not None and grammar.marker is not None:
            _, marker, text = text.partition(grammar.marker.text or "\0")
            if not marker:  # the marker is a token without text, or was not generated
                return None
        return is_valid(grammar, text)

    def for_engine(self, engine: Engine) -> Request:
        """Return the request, with the prompt as tokens if the row controls the chat template.

        Raises
        ------
        TokenizerError
            If the model has no chat template, or the template rejects the variables.
        """
        request = self.request
        tokenizer = engine.tokenizer
        if self.raw and isinstance(request.prompt, str):
            tokens = tokenizer.encode(request.prompt)
            return dataclasses.replace(request, prompt=None, tokens=tokens)
        if not self.variables or request.tokens is not None:
            return request
        messages = request.messages
        if messages is None:
            messages = [{"role": "user", "content": request.prompt or ""}]
        schema = request.grammar.schema if request.grammar is not None else None
        variables: dict[str, Any] = {"schema": schema} | self.variables
        tokens = tokenizer.chat(messages, **variables)
        return dataclasses.replace(request, prompt=None, messages=None, tokens=tokens)


def read_requests(options: argparse.Namespace) -> list[PromptRow]:
    """Return the requests of the command line. Fields of a row take precedence over options.

    A row that is invalid on its own is returned with a refusal and does not affect other rows.

    Raises
    ------
    OptionError
        If an option is invalid, or a line of the file is not a row.
    """
    defaults: dict[str, Any] = {name: getattr(options, name) for name in _SCALAR_OPTIONS}
    defaults["stop"] = tuple(options.stop)
    defaults["logit_bias"] = dict(options.logit_bias)
    grammar = grammars.read_grammar(options)
    if options.prompts is None:
        rows = {0: {"prompt": options.prompt}}
    else:
        rows = _read_rows(options.prompts)
    used_ids = [row["id"] for row in rows.values() if isinstance(row.get("id"), str)]
    free_ids = (name for name in map(str, itertools.count()) if name not in used_ids)
    lines: dict[str, int] = {}
    result = []
    for index, (number, row) in enumerate(rows.items()):
        fields = _request_fields(row, defaults)
        if options.seed is not None:
            fields.setdefault("seed", options.seed + index)
        row_id = row.get("id")
        try:
            if row_id is not None and not isinstance(row_id, str):
                raise OptionError(f"id must be text, got {row_id!r}")
            if row_id in lines:
                raise OptionError(f"id {row_id!r} is that of line {lines[row_id]}")
            template = _template_fields({"raw": options.raw} | row)
            spec = grammars.make_grammar(_grammar_fields(row, grammar), options.partial)
        except (GrammarError, OptionError) as error:
            has_unique_id = isinstance(row_id, str) and row_id not in lines
            request = Request(id=row_id if has_unique_id else next(free_ids))
            result.append(PromptRow(request, refusal=f"line {number}: {error}"))
        else:
            request_id = next(free_ids) if row_id is None else row_id
            request = Request(**fields, id=request_id, grammar=spec)
            result.append(PromptRow(request, **template))
        lines[str(result[-1].request.id)] = number
    return result


def _read_rows(path: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a JSON Lines file by line number; blank lines are skipped."""
    text = sys.stdin.read() if str(path) == "-" else grammars.read_text(path, "--prompts")
    rows = {}
    # Only a line feed ends a row. str.splitlines would split at separators inside JSON strings.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        location = f"--prompts {path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{location}: {error}") from error
        if not isinstance(row, dict):
            raise OptionError(f"{location}: a row must be an object")
        unknown = sorted(set(row) - ROW_FIELDS)
        if unknown:
            raise OptionError(f"{location}: unknown {', '.join(unknown)}")
        rows[number] = row
    if not rows:
        raise OptionError(f"--prompts {path} contains no prompt")
    return rows


def _request_fields(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request fields of a row, with the defaults of the command line."""
    fields = dict(defaults)
    fields |= {name: row[name] for name in REQUEST_FIELDS if name in row}
    bias = fields["logit_bias"]
    if isinstance(bias, dict):  # keys of JSON objects are text
        fields["logit_bias"] = {
            int(key) if str(key).isdecimal() else key: value for key, value in bias.items()
        }
    return fields


def _grammar_fields(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the grammar fields of a row.

    The grammar of a row replaces that of the command line. Grammar options of the command line are
    kept if they apply to it.
    """
    own = {key: row[key] for key in grammars.GRAMMAR_KEYS if row.get(key) is not None}
    if any(key in own for key in grammars.GRAMMARS):
        applicable = {
            option: defaults[option]
            for option, kinds in grammars.GRAMMAR_OPTIONS.items()
            if any(kind in own for kind in kinds)
        }
        return {"after": defaults["after"]} | applicable | own
    has_default = any(defaults[key] is not None for key in grammars.GRAMMARS)
    return (dict(defaults) if has_default else {}) | own


def _template_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return `raw` and `variables` of a `PromptRow`."""
    variables = row.get("variables") or {}
    raw = row.get("raw", False)
    if not isinstance(variables, dict) or not isinstance(raw, bool):
        raise OptionError("variables must be an object, and raw true or false")
    reserved = RESERVED_VARIABLES & variables.keys()
    if reserved:
        raise OptionError(f"variables must not contain {', '.join(sorted(reserved))}")
    variables = dict(variables)
    if "tools" in row:
        variables["tools"] = row["tools"]
    if raw and variables:
        raise OptionError("raw cannot be combined with tools or variables of the chat template")
    return {"raw": raw, "variables": variables}
