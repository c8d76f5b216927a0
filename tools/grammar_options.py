"""Conversion of command line options, or rows of a prompt file, to grammars.

A prompt file is the file that ``--prompts`` names. Each of its rows is a JSON object that describes
one request.
"""

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
from graft.grammar.spec import KEY_ORDERS, parse_json
from graft.native.errors import short_repr

#: Keys of a row that define a grammar. A row has at most one of them.
GRAMMARS = ("schema", "json_object", "regex", "ebnf", "lark", "choice", "structural_tag")
#: Options of grammars, with the grammars to which each option applies.
GRAMMAR_OPTIONS = {
    "key_order": ("schema",),
    "assert_formats": ("schema",),
    "whitespace": ("schema", "json_object", "structural_tag"),
}
#: All keys of a row that concern its grammar. "after" and "backend" apply to every grammar.
GRAMMAR_KEYS = (*GRAMMARS, *GRAMMAR_OPTIONS, "after", "backend")
BACKEND_CHOICES = ("auto", "xgrammar", "llguidance")
BACKEND_METAVAR = "{auto,xgrammar,llguidance,MODULE:NAME}"
BACKEND_HELP = (
    "grammar backend (default auto: selected for each grammar), or the import name of a function "
    "that takes a vocabulary and returns a user-defined backend"
)
_FILE_KEYS = ("schema", "ebnf", "lark", "structural_tag")
_TAG_KEYS = {"tags", "triggers", "at_least_one", "at_once"}


def parse_backend(text: str) -> str:
    """Parse ``--backend``: a backend's name, or the import name of a function that creates one."""
    if text not in BACKEND_CHOICES and ":" not in text:
        choices = ", ".join(BACKEND_CHOICES)
        raise argparse.ArgumentTypeError(f"must be one of {choices} or MODULE:NAME, got {text!r}")
    return text


def add_grammar_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that define a grammar."""
    group = parser.add_argument_group("grammar")
    _add_kind_arguments(group.add_mutually_exclusive_group())
    group.add_argument(
        "--after",
        metavar="MARKER",
        help="text, such as </think>, after which the grammar applies; the output before the "
        "marker is free text, and cannot end before the marker; up to 16 white-space characters "
        "may follow the marker",
    )
    group.add_argument(
        "--backend", type=parse_backend, metavar=BACKEND_METAVAR, default="auto", help=BACKEND_HELP
    )
    group.add_argument(
        "--key-order",
        choices=KEY_ORDERS,
        default=None,
        help="order of object keys under --schema (default schema: order of its properties)",
    )
    group.add_argument(
        "--whitespace",
        type=lambda text: int(text) if text.isdecimal() else text,
        metavar="{line,compact,any,N}",
        help="whitespace in JSON: on one line (default), none, any, or at most N consecutive "
        "characters",
    )
    group.add_argument(
        "--assert-formats",
        action=argparse.BooleanOptionalAction,
        default=None,
        help='enforce the schema keyword "format", or treat it as an annotation '
        "(default: according to the draft of the schema)",
    )
    group.add_argument(
        "--partial",
        action="store_true",
        help="accept a schema with keywords that cannot be enforced; complete outputs are checked "
        "against the whole schema",
    )


def _add_kind_arguments(grammar: argparse._MutuallyExclusiveGroup) -> None:
    """Declare one command line option for each key of `GRAMMARS`."""
    grammar.add_argument("--schema", type=Path, metavar="FILE", help="JSON schema")
    grammar.add_argument("--json-object", action="store_const", const=True, help="any JSON object")
    grammar.add_argument("--regex", metavar="R", help="regular expression for the whole output")
    grammar.add_argument("--ebnf", type=Path, metavar="FILE", help="EBNF grammar with rule root")
    grammar.add_argument("--lark", type=Path, metavar="FILE", help="Lark grammar with rule start")
    grammar.add_argument("--choice", metavar="A,B", help="one of these texts, separated by commas")
    grammar.add_argument(
        "--structural-tag",
        type=Path,
        metavar="FILE",
        help='free text with tagged sections, such as tool calls: {"tags": [{"begin", '
        '"schema", "end"}], "triggers": [...], "at_least_one": false, '
        '"at_once": false}, or {"format": ...} as in XGrammar',
    )


def read_text(path: Path, option: str) -> str:
    """Return the text of the file whose path is the value of a command line option.

    Raise OptionError if the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = str(error)
        if isinstance(error, OSError):
            what = f"{error.strerror or error}; the option takes the name of a file"
        raise OptionError(f"{option} {path}: {what}") from error


def read_grammar(options: argparse.Namespace) -> dict[str, Any]:
    """Return the grammar options of the command line as the fields that `make_grammar` reads.

    Raise OptionError if a file cannot be read, or the grammar is invalid. The message contains the
    options with their values.
    """
    fields = {key: getattr(options, key) for key in (*GRAMMARS, "after", *GRAMMAR_OPTIONS)}
    for key in _FILE_KEYS:
        if fields[key] is not None:
            fields[key] = read_text(fields[key], _option_name(key))
    defined = [key for key in GRAMMARS if fields[key] is not None]
    if not defined and options.prompts is not None:
        return fields  # the options apply to grammars of the prompt file
    if options.partial and "schema" not in defined and options.prompts is None:
        raise OptionError("--partial requires --schema")
    try:
        # User-defined backends check a grammar when they compile it, not here.
        make_grammar(fields, options.partial, check=":" not in options.backend)
    except (GrammarError, OptionError) as error:
        arguments = []
        for key in (*defined, "after", *GRAMMAR_OPTIONS):
            value = getattr(options, key)
            if value is True:
                arguments.append(_option_name(key))
            elif value is not None:
                arguments.append(f"{_option_name(key)} {value!s}")
        raise OptionError(f"{' '.join(arguments)}: {error}") from error
    return fields


def _option_name(key: str) -> str:
    return "--" + key.replace("_", "-")


def make_grammar(
    fields: Mapping[str, Any], partial: bool, *, check: bool = True
) -> GrammarSpec | None:
    """Create the grammar of a row of a prompt file; return None if the row has no grammar.

    Raise GrammarError or OptionError if the row has several grammars, or the grammar or an option
    is invalid.

    Parameters
    ----------
    fields
        Values of the row for keys in `GRAMMAR_KEYS`. A value of None counts as absent.
    partial
        Whether to accept a schema with keywords that cannot be enforced.
    check
        Whether to check that a backend can enforce the grammar, which can take long. Otherwise, the
        engine finds such errors when it compiles the grammar of a request.
    """
    key = _grammar_key(fields)
    backend = fields.get("backend") or ""
    if backend and backend not in BACKEND_CHOICES:
        raise OptionError(
            f"backend must be one of {', '.join(BACKEND_CHOICES)}, got {short_repr(backend)}"
        )
    options: dict[str, Any] = {}
    for option, kinds in GRAMMAR_OPTIONS.items():
        if fields.get(option) is None:
            continue
        if key not in kinds:
            suffix = f", not {key}" if key else ""
            raise OptionError(f"{option} requires {' or '.join(kinds)}{suffix}")
        options[option] = fields[option]
    marker = fields.get("after")
    if key is None:
        if marker is not None:
            raise OptionError("after requires a grammar, which applies after the marker")
        return None
    constructors: dict[str, Callable[[Any], GrammarSpec]] = {
        "schema": functools.partial(
            GrammarSpec.json_schema, partial=partial, backend=backend, **options
        ),
        "json_object": lambda _: GrammarSpec.json_object(**options),
        "regex": GrammarSpec.regex,
        "ebnf": GrammarSpec.ebnf,
        "lark": GrammarSpec.lark,
        "choice": lambda value: GrammarSpec.choice(_read_choices(value)),
        "structural_tag": functools.partial(_read_structural_tag, check=check, **options),
    }
    spec = constructors[key](fields[key])
    if backend in ("xgrammar", "llguidance"):
        spec = replace(spec, backend=backend)
    if check:
        spec.check()
    return spec if marker is None else spec.after(marker, required=True, skips_space=True)


def _grammar_key(fields: Mapping[str, Any]) -> str | None:
    """Return the key of `GRAMMARS` that defines the grammar; None if there is no grammar."""
    json_object = fields.get("json_object")
    if json_object is not None and not isinstance(json_object, bool):
        raise OptionError(f"json_object must be true or false, got {short_repr(json_object)}")
    keys = [key for key in GRAMMARS if fields.get(key) is not None]
    if json_object is not None and not json_object:
        keys.remove("json_object")
    if len(keys) > 1:
        raise OptionError(f"give at most one grammar, got {' and '.join(keys)}")
    return keys[0] if keys else None


def _read_choices(value: object) -> list[str | int | float]:
    """Return the alternatives of a choice, given as a list or as a string with commas."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list) or not all(map(_is_option, value)):
        raise OptionError(f"choice must be a list of strings or numbers, got {short_repr(value)}")
    return value


def _is_option(value: object) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _read_structural_tag(value: object, check: bool, **options: Any) -> GrammarSpec:
    """Return the grammar of a structural tag, given as an object or as the object's JSON text."""
    if isinstance(value, str):
        value = parse_json("structural tag", value)
    if not isinstance(value, dict):
        raise GrammarError(f"structural tag: must be an object, not {type(value).__name__}")
    if "format" in value:
        if len(value) > 1:
            raise GrammarError(f"structural tag: format excludes {sorted({*value} - {'format'})}")
        return GrammarSpec.structural_format(value["format"], **options)
    unknown = sorted(set(value) - _TAG_KEYS)
    if unknown:
        raise GrammarError(f"structural tag: unknown keys: {', '.join(unknown)}")
    tags = value.get("tags", [])
    triggers = value.get("triggers", [])
    if not isinstance(tags, list) or not isinstance(triggers, list):
        raise GrammarError("structural tag: tags and triggers must be lists")
    parsed_tags = []
    for tag in tags:
        if not isinstance(tag, dict) or set(tag) != {"begin", "schema", "end"}:
            raise GrammarError(
                "structural tag: a tag must have exactly begin, schema and end, got "
                f"{short_repr(tag)}"
            )
        parsed_tag = StructuralTag.of(tag["begin"], tag["schema"], tag["end"])
        if check:
            parsed_tag.check()
        parsed_tags.append(parsed_tag)
    return GrammarSpec.structural_tag(
        parsed_tags,
        triggers,
        at_least_one=value.get("at_least_one", False),
        at_once=value.get("at_once", False),
        **options,
    )
