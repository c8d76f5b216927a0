"""Every way to state a constraint on the command line and in a row of ``--prompts``."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import OptionError
from graft.grammar.errors import GrammarError
from graft.grammar.grammar_spec import GrammarSpec, StructuralTag
from graft.grammar.schema.options import KEY_ORDERS
from graft.grammar.spec import parse_json

#: Keys that state a grammar, of which a request has at most one; those that go with some of them,
#: and those that go with all.
GRAMMARS = ("schema", "json_object", "regex", "ebnf", "lark", "choice", "structural_tag")
GOES_WITH = {
    "key_order": ("schema",),
    "assert_formats": ("schema",),
    "whitespace": ("schema", "json_object", "structural_tag"),
}
GRAMMAR_KEYS = (*GRAMMARS, *GOES_WITH, "after", "backend")
BACKEND_CHOICES = ("auto", "xgrammar", "llguidance")
_FILES = ("schema", "ebnf", "lark", "structural_tag")


def add_grammar_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that state a constraint."""
    group = parser.add_argument_group("grammar")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--schema", type=Path, metavar="FILE", help="JSON schema")
    one.add_argument("--json-object", action="store_const", const=True, help="any JSON object")
    one.add_argument("--regex", metavar="R", help="regular expression of the whole output")
    one.add_argument("--ebnf", type=Path, metavar="FILE", help="EBNF file; starts at root")
    one.add_argument("--lark", type=Path, metavar="FILE", help="Lark file; starts at start")
    one.add_argument("--choice", metavar="A,B", help="one of these, separated by commas")
    one.add_argument(
        "--structural-tag",
        type=Path,
        metavar="FILE",
        help='free text with tagged parts, such as tool calls: {"tags": [{"begin", '
        '"schema", "end"}], "triggers": [...], "at_least_one": false, '
        '"at_once": false}',
    )
    group.add_argument(
        "--after", metavar="MARKER", help="free text until this marker, then the grammar"
    )
    group.add_argument(
        "--backend",
        choices=BACKEND_CHOICES,
        default="auto",
        help="who compiles grammars (default auto: chosen for each)",
    )
    group.add_argument(
        "--key-order",
        choices=KEY_ORDERS,
        default=None,
        help="order of an object's keys under --schema (default schema: as it "
        "lists them, reasoning before answers)",
    )
    group.add_argument(
        "--whitespace",
        type=lambda text: int(text) if text.isdecimal() else text,
        metavar="{line,compact,any,N}",
        help="of JSON: on one line (default), none, any, or at most N characters in a row",
    )
    group.add_argument(
        "--assert-formats",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="enforce the formats of a schema, or take them for annotations "
        "(default: as its draft says)",
    )
    group.add_argument(
        "--partial",
        action="store_true",
        help="take a schema of which a part cannot be enforced; the output is "
        "checked against it then, and marked validated or not",
    )


def read_text(path: Path, what: str) -> str:
    """Text of a file that the user named."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{what} {path}: {error}") from error


def given_grammar(options: argparse.Namespace) -> dict[str, Any]:
    """The constraint of the command line, as fields of a row of ``--prompts``; files are read.

    Raises
    ------
    OptionError
        Naming the flag and its value: a file that cannot be read, or what makes no grammar.
    """
    given = {key: getattr(options, key) for key in (*GRAMMARS, "after", *GOES_WITH)}
    for key in _FILES:
        if given[key] is not None:
            given[key] = read_text(given[key], _flag(key))
    stated = [key for key in GRAMMARS if given[key] is not None]
    if not stated and options.prompts is not None:
        return given  # --after is for rows that state a grammar
    if options.partial and "schema" not in stated and options.prompts is None:
        raise OptionError("--partial goes with --schema")
    try:
        make_grammar(given, options.partial)
    except (GrammarError, OptionError) as error:
        values = {key: getattr(options, key) for key in (*stated, "after", *GOES_WITH)}
        said = [
            _flag(key) if value is True else f"{_flag(key)} {value!s}"
            for key, value in values.items()
            if value is not None
        ]
        raise OptionError(f"{' '.join(said)}: {error}") from error
    return given


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def make_grammar(given: Mapping[str, Any], partial: bool) -> GrammarSpec | None:
    """The grammar that a row states, if any.

    Raises
    ------
    GrammarError, OptionError
        If the row states several grammars, or one that is none.
    """
    if given.get("json_object") not in (None, True, False):
        raise OptionError(f"json_object must be true or false, got {given['json_object']!r}")
    named = [
        key
        for key in GRAMMARS
        if given.get(key) is not None and (key, given[key]) != ("json_object", False)
    ]
    if len(named) > 1:
        raise OptionError(f"give at most one grammar, got {' and '.join(named)}")
    backend = given.get("backend") or ""
    if backend and backend not in BACKEND_CHOICES:
        raise OptionError(f"backend must be one of {', '.join(BACKEND_CHOICES)}, got {backend!r}")
    marker = given.get("after")
    chosen: dict[str, Any] = {o: given[o] for o in GOES_WITH if given.get(o) is not None}
    for option in chosen:
        if not set(named) & set(GOES_WITH[option]):
            beside = ", not with " + " and ".join(named) if named else ""
            raise OptionError(f"{option} goes with a {' or '.join(GOES_WITH[option])}{beside}")
    if not named:
        if marker is not None:
            raise OptionError("after names the end of free text: give the grammar that follows")
        return None
    key = named[0]
    makers: dict[str, Callable[[Any], GrammarSpec]] = {
        "schema": functools.partial(
            GrammarSpec.json_schema, partial=partial, backend=backend, **chosen
        ),
        "json_object": lambda _: GrammarSpec.json_object(**chosen),
        "regex": GrammarSpec.regex,
        "ebnf": GrammarSpec.ebnf,
        "lark": GrammarSpec.lark,
        "choice": lambda value: GrammarSpec.choice(_choices(value)),
        "structural_tag": functools.partial(_structural_tag, **chosen),
    }
    spec = makers[key](given[key])
    spec.check()
    if backend in ("xgrammar", "llguidance"):
        spec = replace(spec, backend=backend)
    return spec if marker is None else spec.after(marker)


def _choices(value: object) -> list[str]:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise OptionError(f"choice must be a list of strings, got {value!r}")
    return value


def _structural_tag(value: object, **chosen: Any) -> GrammarSpec:
    """From JSON text or the object it parses to."""
    if isinstance(value, str):
        value = parse_json("structural tag", value)
    if not isinstance(value, dict):
        raise GrammarError(f"structural tag: must be an object, not {type(value).__name__}")
    unknown = sorted(set(value) - {"tags", "triggers", "at_least_one", "at_once"})
    if unknown:
        raise GrammarError(f"structural tag: unknown {', '.join(unknown)}")
    tags = value.get("tags", [])
    triggers = value.get("triggers", [])
    if not isinstance(tags, list) or not isinstance(triggers, list):
        raise GrammarError("structural tag: tags and triggers must be lists")
    made = []
    for tag in tags:
        if not isinstance(tag, dict) or set(tag) != {"begin", "schema", "end"}:
            raise GrammarError(f"structural tag: a tag is {tag!r}, needs begin, schema and end")
        structural_tag = StructuralTag.of(tag["begin"], tag["schema"], tag["end"])
        structural_tag.check()
        made.append(structural_tag)
    return GrammarSpec.structural_tag(
        made,
        triggers,
        at_least_one=value.get("at_least_one", False),
        at_once=value.get("at_once", False),
        **chosen,
    )
