"""Parser of the requests of ``graft generate``, from the command line or from a prompt file.

A prompt file has the format JSON Lines. Each line is a row: a JSON object that describes one
request.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import OptionError
from graft.grammar.errors import GrammarError
from graft.grammar.spec import MAX_SPACE, WHITE_SPACE
from graft.models.engine.engine import Engine
from graft.models.request import Request
from graft.models.tokenizer import RESERVED_VARIABLES
from graft.native.errors import short_repr
from graft.sampling.params import SamplingParams
from graft.tools import grammar_options as grammars
from graft.tools.output_check import is_valid

#: Sampling parameters that a row can set.
SAMPLING_FIELDS = tuple(
    param.name
    for param in dataclasses.fields(SamplingParams)
    if param.name not in ("sample", "relaxed")
)
#: Fields of a row that are passed to the request unchanged.
REQUEST_FIELDS = (
    *("prompt", "messages", "tokens", "max_tokens", "closing", "max_reasoning_tokens", "n", "stop"),
    *SAMPLING_FIELDS,
)
#: Fields of a row that control how the chat template is applied.
TEMPLATE_FIELDS = ("raw", "tools", "variables")
ROW_FIELDS = {"id", *REQUEST_FIELDS, *TEMPLATE_FIELDS, *grammars.GRAMMAR_KEYS}

#: Request fields whose command line option has a single value.
_SCALAR_OPTIONS = tuple(
    name
    for name in ("max_tokens", "closing", "max_reasoning_tokens", "n", *SAMPLING_FIELDS)
    if name not in ("seed", "logit_bias", "stop_ids", "allowed_ids", "banned_ids")
)


@dataclass(frozen=True)
class PromptRow:
    """A request from the command line or from a row of the prompt file, which may be invalid."""

    #: The request. If the row was refused, only the id of the request is set.
    request: Request
    refusal: str | None = None  #: error message; None if the row is valid
    refusal_type: str | None = None  #: name of the error's class
    raw: bool = False  #: whether the prompt is used without the chat template
    #: Additional variables for the chat template, including ``tools``.
    variables: dict[str, Any] = field(default_factory=dict)

    def is_valid(self, text: str) -> bool | None:
        """Return whether the output `text` satisfies the grammar of the row.

        The check does not use the grammar backend. Return None if the output cannot be checked:
        either `output_check.is_valid` has no check for this kind of grammar, or the grammar applies
        to a part of the output whose start is unknown.
        """
        grammar = self.request.grammar
        if grammar is not None and grammar.marker is not None:
            _, marker, text = text.partition(grammar.marker.text or "\0")
            # The grammar applies to the text after the marker that --after (or the key "after")
            # specifies. The output does not contain the marker if the model did not generate it, or
            # if it is a token id, which has no text.
            if not marker:
                return None
            # Some of the white space after the marker can belong to the text of the grammar.
            space = min(len(text) - len(text.lstrip(WHITE_SPACE)), MAX_SPACE)
            found = None
            for skipped in range(space + 1):
                found = found or is_valid(grammar, text[skipped:])
            return found
        return is_valid(grammar, text)

    def for_engine(self, engine: Engine) -> Request:
        """Return the request to submit.

        If the row has ``raw`` or variables of the chat template, the returned request contains the
        token ids of the prompt in place of the text.

        Raise TokenizerError if the model has no chat template, or the template rejects the
        variables.
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
    """Return the requests of the command line: one from ``--prompt``, or those of a prompt file.

    Each row of a prompt file (``--prompts``) defines one request. The fields of a row take
    precedence over command line options. If the id, the grammar or a field for the chat template
    is invalid, the `PromptRow` of this row contains a refusal, and the other rows are not affected.

    Raise OptionError if an option is invalid or applies to no row, or if a line of the prompt file
    is not a JSON object or has unknown keys.
    """
    defaults: dict[str, Any] = {name: getattr(options, name) for name in _SCALAR_OPTIONS}
    defaults["stop"] = tuple(options.stop)
    defaults["logit_bias"] = dict(options.logit_bias)
    grammar = grammars.read_grammar(options)
    if options.prompts is None:
        rows = {0: {"prompt": options.prompt}}
    else:
        rows = _read_rows(options.prompts)
        _check_grammar_options(options, grammar, rows.values())
    free_ids = _free_ids(rows.values())
    lines: dict[str, int] = {}  # line numbers by id
    result = []
    for index, (number, row) in enumerate(rows.items()):
        fields = _request_fields(row, defaults)
        if options.seed is not None:
            fields.setdefault("seed", options.seed + index)
        row_id: Any = row.get("id")
        try:
            _check_id(row_id, lines)
            template = _template_fields({"raw": options.raw} | row)
            grammar_fields = _grammar_fields(row, grammar)
            spec = grammars.make_grammar(
                grammar_fields, options.partial, check=":" not in options.backend
            )
        except (GrammarError, OptionError) as error:
            has_unique_id = isinstance(row_id, str) and row_id not in lines
            request_id = row_id if has_unique_id else next(free_ids)
            refusal = f"line {number}: {error}"
            prompt_row = PromptRow(
                Request(id=request_id), refusal=refusal, refusal_type=type(error).__name__
            )
        else:
            request_id = next(free_ids) if row_id is None else row_id
            request = Request(**fields, id=request_id, grammar=spec)
            prompt_row = PromptRow(request, **template)
        result.append(prompt_row)
        lines[request_id] = number
    return result


def _check_grammar_options(
    options: argparse.Namespace, defaults: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Check that each grammar option of the command line applies to at least one row.

    Raise OptionError if no row has a grammar to which an option applies.
    """
    present = set()
    for fields in (defaults, *rows):
        present |= {key for key in grammars.GRAMMARS if fields.get(key) is not None}
    kinds = {**grammars.GRAMMAR_OPTIONS, "after": grammars.GRAMMARS}
    values = dict(defaults)
    kinds["partial"] = ("schema",)
    values["partial"] = options.partial or None
    for option, applicable in kinds.items():
        if values[option] is not None and not present.intersection(applicable):
            name = "--" + option.replace("_", "-")
            raise OptionError(
                f"{name} requires a row with {' or '.join(applicable)} in --prompts "
                f"{options.prompts}"
            )


def _check_id(row_id: object, lines: Mapping[str, int]) -> None:
    """Raise an error unless a row's id is None or a string that no earlier row has as its id.

    `lines` maps the id of each earlier row to its line number.
    """
    if row_id is None:
        return
    if not isinstance(row_id, str):
        raise OptionError(f"id must be a string, got {short_repr(row_id)}")
    if row_id in lines:
        raise OptionError(f"id {row_id!r} is already used in line {lines[row_id]}")


def _free_ids(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield ids for rows without an id: "0", "1", ... except ids that are specified in a row."""
    used_ids = {row["id"] for row in rows if isinstance(row.get("id"), str)}
    for number in itertools.count():
        name = str(number)
        if name not in used_ids:
            yield name


def _read_rows(path: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a prompt file by line number. Blank lines are skipped."""
    text = sys.stdin.read() if str(path) == "-" else grammars.read_text(path, "--prompts")
    rows = {}
    # Split at line feeds only. str.splitlines would also split at other separators, such as
    # U+2028, which may occur inside JSON strings.
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
            raise OptionError(f"{location}: unknown keys: {', '.join(unknown)}")
        rows[number] = row
    if not rows:
        raise OptionError(f"--prompts {path} contains no prompt")
    return rows


def _request_fields(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request fields of a row of the prompt file.

    Fields that the row lacks get the values of the command line, `defaults`.
    """
    fields = dict(defaults)
    fields |= {name: row[name] for name in REQUEST_FIELDS if name in row}
    bias = fields["logit_bias"]
    if isinstance(bias, dict):  # convert the keys, which are strings in JSON, to token ids
        converted = {}
        for key, value in bias.items():
            token = int(key) if str(key).isdecimal() else key
            converted[token] = value
        fields["logit_bias"] = converted
    return fields


def _grammar_fields(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the grammar and grammar options of a row of the prompt file.

    A row without a grammar uses the grammar of the command line, `defaults`. A row with a grammar
    uses only those grammar options of the command line that apply to its kind of grammar.
    """
    row_fields = {key: row[key] for key in grammars.GRAMMAR_KEYS if row.get(key) is not None}
    if any(key in row_fields for key in grammars.GRAMMARS):
        inherited = {"after": defaults["after"]}
        for option, kinds in grammars.GRAMMAR_OPTIONS.items():
            if any(kind in row_fields for kind in kinds):
                inherited[option] = defaults[option]
        return inherited | row_fields
    if any(defaults[key] is not None for key in grammars.GRAMMARS):
        return dict(defaults) | row_fields
    return row_fields


def _template_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the attributes `raw` and `variables` of a `PromptRow`."""
    variables = row.get("variables") or {}
    raw = row.get("raw", False)
    if not isinstance(variables, dict) or not isinstance(raw, bool):
        raise OptionError("variables must be an object, and raw must be true or false")
    reserved = RESERVED_VARIABLES & variables.keys()
    if reserved:
        raise OptionError(f"variables must not contain {', '.join(sorted(reserved))}")
    variables = dict(variables)
    if "tools" in row:
        variables["tools"] = _without_strict(row["tools"])
    if raw and variables:
        raise OptionError("raw cannot be combined with tools or variables of the chat template")
    return {"raw": raw, "variables": variables}


def _without_strict(tools: Any) -> Any:
    """Remove ``strict`` from function definitions: it concerns the grammar, not the prompt."""
    if isinstance(tools, list):
        return [_without_strict(tool) for tool in tools]
    if not isinstance(tools, dict):
        return tools
    shown = {key: value for key, value in tools.items() if key != "strict"}
    if "function" in shown:
        shown["function"] = _without_strict(shown["function"])
    return shown
