"""Grammar specifications for structured output, as plain data.

`GrammarSpec` creates specifications, and grammar backends compile them."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, Literal, get_args

from graft.grammar.errors import GrammarError
from graft.grammar.vocabulary import Vocabulary

__all__ = [
    "KEY_ORDERS",
    "JsonValue",
    "MAX_SPACE",
    "WHITE_SPACE",
    "KeyOrder",
    "Marker",
    "Spec",
    "Whitespace",
    "check_options",
    "check_spec",
    "check_text",
    "json_text",
    "parse_json",
]

#: White-space characters that may precede `Marker.opening` or, with `Marker.skips_space`, follow
#: the marker, and the maximum number of these characters in each of the two places.
WHITE_SPACE = " \t\r\n"
MAX_SPACE = 16

KeyOrder = Literal["schema", "any"]
KEY_ORDERS = get_args(KeyOrder)
Whitespace = Literal["line", "compact", "any"] | int
_MAX_WHITESPACE = 1000

Kind = Literal[
    "json_schema", "regex", "ebnf", "choice", "lark", "structural_tag", "structural_format"
]


@dataclass(frozen=True)
class Marker:
    """Text or token that ends free text, such as ``</think>`` after the reasoning of a model.

    Text before the marker is unconstrained. The grammar applies after the token that completes the
    marker. Unless `skips_space` is true, a token that contains both the end of the marker and
    further text is illegal.

    Attributes
    ----------
    text
        Text of the marker, which may span several tokens; empty if the marker is a token id. If an
        added token of the tokenizer has exactly this text, this token also ends the free text.
    token
        Token id of the marker, or None.
    required
        Whether stop ids are illegal before the marker. If False, the model may end its output in
        the free text, so that the output contains no text of the grammar.
    opening
        Text that begins the free text, such as ``<think>``. An output has free text only if it
        begins with the opening, after at most `MAX_SPACE` characters of `WHITE_SPACE`.
        The grammar applies to any other output from the first token. As long as an output can still
        begin with the opening, both the tokens that continue the opening and the tokens that the
        grammar allows are legal. If empty, every output begins with free text.
    skips_space
        Whether up to `MAX_SPACE` characters of `WHITE_SPACE` may follow the marker before the text
        of the grammar. A token may then also contain the end of the marker, white space and the
        beginning of this text. A token that the grammar accepts as a whole begins the text of the
        grammar; leading white space of other tokens is skipped.
    """

    text: str = ""
    token: int | None = None
    required: bool = False
    opening: str = ""
    skips_space: bool = False

    def ids(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        """Return the ids of the tokens that are a complete marker, which ends the free text.

        These are the attribute `token`, and the id of the added token whose text is the attribute
        `text`, if there are any.

        Raises
        ------
        GrammarError
            An id is outside the vocabulary or is a stop id.
        """
        ids = [] if self.token is None else [self.token]
        return self._checked_ids(ids, self.text, vocabulary)

    def opening_ids(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        """Return the id of the added token whose text is `opening`; empty if there is none.

        Raises
        ------
        GrammarError
            The id is a stop id.
        """
        return self._checked_ids([], self.opening, vocabulary)

    @staticmethod
    def _checked_ids(ids: list[int], text: str, vocabulary: Vocabulary) -> tuple[int, ...]:
        """Return `ids`, plus the id of the added token whose text is `text`, if there is one.

        Raise `GrammarError` if one of the ids is a stop id or is outside the vocabulary.
        """
        if text and text in vocabulary.names:
            ids.append(vocabulary.names[text])
        for token in ids:
            if not 0 <= token < vocabulary.size:
                raise GrammarError(f"marker: token {token} is outside [0, {vocabulary.size})")
            if token in vocabulary.stop_ids:
                raise GrammarError(f"marker: token {token} is a stop id")
        return tuple(dict.fromkeys(ids))


@dataclass(frozen=True)
class Spec:
    """Text and options of a grammar. Immutable and hashable.

    Attributes
    ----------
    kind
        Notation of `text`; see `Kind`.
    text
        The grammar in the notation of its kind: the JSON schema as JSON text, the regular
        expression, the EBNF or Lark grammar, the choices as a JSON list, the structural tag as JSON
        (``{"triggers", "tags": [{"begin", "schema", "end"}, ...], "at_least_one", "at_once"}``), or
        the structural format as JSON, as in `graft.grammar.structural.formats`.
    root
        Start rule of an EBNF grammar.
    whitespace
        White space between JSON tokens:

        * ``"line"``: all tokens on one line, separated by ``", "`` and ``": "``. Small models
          follow this layout best.
        * ``"compact"``: no white space.
        * ``"any"``: any white space.
        * A number: at most this many white-space characters in a row.
    strict
        Whether object schemas with ``properties`` forbid properties that they do not mention. Only
        for JSON schemas. False: additional properties are allowed, as in the JSON Schema standard.
        None: like False for LLGuidance and like True for XGrammar, because XGrammar would enforce
        fewer keywords without its strict mode.
    partial
        Whether a grammar may be enforced only in part. If False, a grammar with a part that cannot
        be enforced is refused. If True, the grammar is accepted, and outputs may violate that part.
    backend
        Name of the backend that compiles the grammar; empty for the engine's backend. ``"auto"``
        is allowed for a JSON schema (see `resolve_spec`).
    key_order
        Order of object keys. Only for JSON schemas. ``"schema"``: the order in which the schema
        lists the keys. A reasoning field can thus precede the answer, and the grammar determines
        more of the text. ``"any"``: any order.
    assert_formats
        Whether ``format`` is enforced. Only for JSON schemas. None: as the schema's draft
        specifies. In schemas that declare draft 2019-09 or 2020-12, ``format`` is an annotation and
        is not enforced.
    marker
        Marker at the end of the free text before the grammar; None if there is no free text.
    """

    kind: Kind
    text: str
    root: str = "root"
    whitespace: Whitespace = "line"
    strict: bool | None = None
    partial: bool = False
    backend: str = ""
    key_order: KeyOrder = "schema"
    assert_formats: bool | None = None
    marker: Marker | None = None

    def __post_init__(self) -> None:
        check_type("kind", self.kind, str)
        if self.kind not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise GrammarError(f"grammar: kind is {self.kind!r}, must be one of {kinds}")
        check_text(f"{self.kind} text", self.text)
        check_text(f"{self.kind} root", self.root)
        check_type(f"{self.kind}: backend", self.backend, str)
        check_type(f"{self.kind}: strict", self.strict, bool, NoneType)
        check_type(f"{self.kind}: partial", self.partial, bool)
        check_type(f"{self.kind}: marker", self.marker, Marker, NoneType)
        if self.marker is not None:
            _check_marker(self.marker)
        check_options(self.key_order, self.whitespace, self.assert_formats)

    @property
    def schema(self) -> Any:
        """The JSON schema, parsed; None if the grammar is of another kind."""
        return parse_json("JSON schema", self.text) if self.kind == "json_schema" else None


def _check_marker(marker: Marker) -> None:
    for field in fields(marker):
        types = (int, NoneType) if field.name == "token" else (type(field.default),)
        check_type(f"marker: {field.name}", getattr(marker, field.name), *types)


def check_options(key_order: Any, whitespace: Any, assert_formats: Any) -> None:
    """Raise `GrammarError` if one of these three options of `Spec` has an unknown value."""
    check_type("key_order", key_order, str)
    check_type("whitespace", whitespace, str, int)
    check_type("assert_formats", assert_formats, bool, NoneType)
    if key_order not in KEY_ORDERS:
        raise GrammarError(f"key_order {key_order!r} is unknown; use {' or '.join(KEY_ORDERS)}")
    is_number = isinstance(whitespace, int) and not isinstance(whitespace, bool)
    if is_number:
        known = 0 < whitespace <= _MAX_WHITESPACE
    else:
        known = whitespace in ("line", "compact", "any")
    if not known:
        raise GrammarError(
            f"whitespace {whitespace!r} is unknown; use line, compact, any or a number of "
            f"characters from 1 to {_MAX_WHITESPACE}"
        )
    if is_number and key_order == "any":
        raise GrammarError("key_order 'any' requires whitespace line, compact or any, not a number")


def check_type(name: str, value: object, *types: type) -> None:
    """Raise `GrammarError` unless a value has one of the types."""
    if not isinstance(value, types):
        names = " or ".join("None" if t is NoneType else t.__name__ for t in types)
        # Unlike repr, reprlib never raises an exception, whatever the object is.
        raise GrammarError(f"{name} is {reprlib.repr(value)}, must be {names}")


class JsonValue:
    """A parsed JSON value and its text; values with equal texts are equal.

    The value must not be modified.
    """

    def __init__(self, value: Any, subject: str = "JSON schema"):
        self.value = value
        self.text = json_text(value, subject)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsonValue) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def json_text(value: Any, subject: str = "JSON schema") -> str:
    """Return a JSON value as text.

    Raise `GrammarError`, whose message begins with `subject`, if the value contains an object that
    JSON cannot express, or if it is nested too deeply.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise GrammarError(f"{subject}: is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{subject}: cannot be read: {error}") from error
    check_text(subject, text)
    return text


def parse_json(subject: str, text: object) -> Any:
    """Return the value of a JSON text.

    Raise `GrammarError`, whose message begins with `subject`, if `text` is not a string, is not
    JSON, or is nested too deeply.
    """
    if not isinstance(text, str):
        raise GrammarError(f"{subject}: must be JSON text, not {type(text).__name__}")
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarError(f"{subject}: is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"{subject}: the text is not JSON: {error}") from error


def check_spec(spec: object) -> None:
    """Raise `GrammarError` unless `spec` is a grammar specification."""
    if not isinstance(spec, Spec):
        raise GrammarError(f"a grammar must be a GrammarSpec, got {spec!r:.80}")


def check_text(subject: str, text: object) -> None:
    """Raise `GrammarError` unless `text` is a non-empty string that UTF-8 can encode."""
    if not isinstance(text, str):
        raise GrammarError(f"{subject}: must be a string, not {type(text).__name__}")
    if not text:
        raise GrammarError(f"{subject}: is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GrammarError(f"{subject}: is not Unicode text: {error}") from error
