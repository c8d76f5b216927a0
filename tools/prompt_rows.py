"""The requests of ``graft generate``: from its options, or a row each of a file of prompts."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import OptionError
from graft.grammar.errors import GrammarError
from graft.models.engine.engine import Engine
from graft.models.request import Request
from graft.models.tokenizer import TAKEN
from graft.tools import grammar_options as grammars
from graft.tools.validity import is_valid

#: Fields of a row that go into the request as they are, and those that say how to make its prompt.
SAMPLING = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logprobs",
    "logprobs_masked",
    "verify",
)
PASSED = (
    "prompt",
    "messages",
    "tokens",
    *SAMPLING,
    "seed",
    "stop",
    "stop_ids",
    "logit_bias",
    "allowed_ids",
    "banned_ids",
)
MAKING = ("raw", "tools", "variables")
KEYS = {"id", *PASSED, *MAKING, *grammars.GRAMMAR_KEYS}


@dataclass(frozen=True)
class Asked:
    """A request, or why it is refused, with what the request does not show.

    Attributes
    ----------
    raw : the prompt stands as it is, without the chat template.
    variables : further variables of the chat template, ``tools`` among them.
    """

    request: Request
    refusal: str | None = None
    raw: bool = False
    variables: dict[str, Any] = field(default_factory=dict)

    def is_valid(self, text: str) -> bool | None:
        """Whether an output obeys the grammar; None when nothing independent can tell."""
        grammar = self.request.grammar
        if grammar is not None and grammar.marker is not None:
            _, marker, text = text.partition(grammar.marker.text or "\0")
            if not marker:  # it is a token that is no text, or it never came
                return None
        return is_valid(grammar, text)

    def for_engine(self, engine: Engine) -> Request:
        """The request, its prompt made into tokens where the row says how.

        Raises
        ------
        TokenizerError
            If the model has no chat template, or it refuses the variables.
        """
        request = self.request
        tokenizer = engine.tokenizer
        if self.raw and isinstance(request.prompt, str):
            return replace(request, prompt=None, tokens=tokenizer.encode(request.prompt))
        if not self.variables or request.tokens is not None:
            return request
        messages = request.messages
        if messages is None:
            messages = [{"role": "user", "content": request.prompt or ""}]
        schema = request.grammar.schema if request.grammar is not None else None
        variables: dict[str, Any] = {"schema": schema} | self.variables
        tokens = tokenizer.chat(messages, **variables)
        return replace(request, prompt=None, messages=None, tokens=tokens)


def _read_rows(path: Path) -> dict[int, dict[str, Any]]:
    """Rows of a JSON-lines file by line, blank ones left out; names the line of what is no row."""
    text = sys.stdin.read() if str(path) == "-" else grammars.read_text(path, "--prompts")
    rows = {}
    # Only a line feed ends a row: JSON strings may hold what Python also calls a line's end.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"--prompts {path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{where}: {error}") from error
        if not isinstance(row, dict):
            raise OptionError(f"{where}: a row must be an object")
        unknown = sorted(set(row) - KEYS)
        if unknown:
            raise OptionError(f"{where}: unknown {', '.join(unknown)}")
        rows[number] = row
    if not rows:
        raise OptionError(f"--prompts {path} holds no prompt")
    return rows


def _with_defaults(own: dict[str, Any], grammar: dict[str, Any]) -> dict[str, Any]:
    """A row's grammar in place of the options'; what goes with a grammar each by itself."""
    if any(name in own for name in grammars.GRAMMARS):
        fitting = {
            option: grammar[option]
            for option, kinds in grammars.GOES_WITH.items()
            if any(kind in own for kind in kinds)
        }
        return {"after": grammar["after"]} | fitting | own
    stated = any(grammar[name] is not None for name in grammars.GRAMMARS)
    return (grammar if stated else {}) | own


def _making(row: dict[str, Any]) -> dict[str, Any]:
    """How a row's prompt is made: fields of `Asked`."""
    given = row.get("variables") or {}
    raw = row.get("raw", False)
    if not isinstance(given, dict) or not isinstance(raw, bool):
        raise OptionError("variables must be an object, and raw true or false")
    if taken := TAKEN & given.keys():
        raise OptionError(f"variables: {', '.join(sorted(taken))} has another meaning already")
    variables = dict(given)
    if "tools" in row:
        variables["tools"] = row["tools"]
    if raw and variables:
        raise OptionError("a raw prompt has no chat template, which tools and variables are for")
    return {"raw": raw, "variables": variables}


def read_requests(options: argparse.Namespace) -> list[Asked]:
    """Requests of the command line; what a row of --prompts says wins over the options.

    A row that cannot be served is refused alone, by its line.

    Raises
    ------
    OptionError
        If an option is wrong, or a line of the file is no row.
    """
    sampling: dict[str, Any] = {name: getattr(options, name) for name in SAMPLING}
    sampling |= {"stop": tuple(options.stop), "logit_bias": dict(options.logit_bias)}
    grammar = grammars.given_grammar(options)
    rows = (
        {0: {"prompt": options.prompt}} if options.prompts is None else _read_rows(options.prompts)
    )
    ids = [row["id"] for row in rows.values() if isinstance(row.get("id"), str)]
    free = (name for name in map(str, itertools.count()) if name not in ids)
    lines: dict[str, int] = {}
    asked = []
    for index, (number, row) in enumerate(rows.items()):
        fields = sampling | {name: row[name] for name in PASSED if name in row}
        if isinstance(bias := fields["logit_bias"], dict):  # JSON has text for keys
            fields["logit_bias"] = {
                int(key) if str(key).isdecimal() else key: value for key, value in bias.items()
            }
        if options.seed is not None:
            fields.setdefault("seed", options.seed + index)
        name = row.get("id")
        own = {key: row[key] for key in grammars.GRAMMAR_KEYS if row.get(key) is not None}
        try:
            if name is not None and not isinstance(name, str):
                raise OptionError(f"id must be text, got {name!r}")
            if name in lines:
                raise OptionError(f"id {name!r} is that of line {lines[name]}")
            made = _making({"raw": options.raw} | row)
            spec = grammars.make_grammar(_with_defaults(own, grammar), options.partial)
        except (GrammarError, OptionError) as error:
            known = isinstance(name, str) and name not in lines
            refused = Request(id=name if known else next(free))
            asked.append(Asked(refused, refusal=f"line {number}: {error}"))
        else:
            fields["id"] = next(free) if name is None else name
            asked.append(Asked(Request(**fields, grammar=spec), **made))
        lines[str(asked[-1].request.id)] = number
    return asked
