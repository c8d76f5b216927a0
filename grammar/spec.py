"""Grammar specifications as plain data. `GrammarSpec` builds them; backends compile them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from graft.grammar.errors import GrammarError
from graft.grammar.schema.options import KeyOrder, Whitespace, check_options
from graft.grammar.vocabulary import Vocabulary

__all__ = ["Marker", "Spec", "check_text", "parse_json"]

Kind = Literal["json_schema", "regex", "ebnf", "choice", "lark", "structural_tag"]


@dataclass(frozen=True)
class Marker:
    """The end of free text, after which the grammar applies. For models that reason first.

    Text before the marker is unconstrained. The grammar starts with the token after the one that
    completes the marker. A token that contains the end of the marker and further text is illegal,
    so every byte of the answer is subject to the grammar.

    Attributes
    ----------
    text
        Text of the marker, which may span several tokens; empty if there is none. If an added
        token of the tokenizer has exactly this text, its id also counts as the marker.
    token
        Token id of the marker, or None.
    required
        Whether stop ids are illegal before the marker. If False, a stop id in the free text ends
        the output and the grammar never applies.
    """

    text: str = ""
    token: int | None = None
    required: bool = False

    def ids(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        """Return the token ids that are the marker by themselves.

        Raises
        ------
        GrammarError
            An id is outside the vocabulary or is a stop id.
        """
        ids = [] if self.token is None else [self.token]
        if self.text in vocabulary.names:
            ids.append(vocabulary.names[self.text])
        for token in ids:
            if not 0 <= token < vocabulary.size:
                raise GrammarError(f"marker: token {token} is outside [0, {vocabulary.size})")
            if token in vocabulary.stop_ids:
                raise GrammarError(f"marker: token {token} is a stop id")
        return tuple(dict.fromkeys(ids))


@dataclass(frozen=True)
class Spec:
    """Text and options of a grammar. Hashable.

    Attributes
    ----------
    kind
        Notation of `text`; see `Kind`.
    text
        The JSON schema as JSON text, the regular expression, the EBNF or Lark grammar, the choices
        as a JSON list, or the structural tag as JSON:
        ``{"triggers", "tags": [{"begin", "schema", "end"}, ...], "at_least_one", "at_once"}``.
    root
        Start rule of an EBNF grammar.
    whitespace
        White space between JSON tokens. ``"line"``: a single line with the separators ``", "`` and
        ``": "``, which small models follow best. ``"compact"``: none. ``"any"``: any. A number: at
        most this many characters in a row.
    strict
        JSON schema only. True: an object schema with properties allows no additional properties
        unless it says so; such output also satisfies the original schema. False: additional
        properties are allowed as in the JSON Schema standard. None: as False, but as True when
        XGrammar compiles a schema that was not rewritten, because it would otherwise enforce less.
    partial
        Whether a grammar may be enforced in part. False: refuse a grammar that contains a part
        which cannot be enforced. True: accept it; outputs may violate that part.
    backend
        Name of the backend that compiles the grammar; empty for the engine's backend. ``"auto"``
        is allowed for a JSON schema (see `resolve_spec`).
    key_order
        JSON schema only. ``"schema"``: object keys in the order of the schema, so that reasoning
        fields precede answers and more text is forced. ``"any"``: keys in any order.
    assert_formats
        JSON schema only. Whether ``format`` is enforced. None: as specified by the schema's draft,
        that is, not in schemas that declare 2019-09 or 2020-12, where it is an annotation.
    source
        Original schema if `text` is the form that the router made of it; empty if the schema has
        not been routed to LLGuidance. Outputs of a `partial` grammar are checked against it (see
        `graft.grammar.check_output`).
    rules
        Lark grammar that replaces `text` where LLGuidance's ``%json`` cannot express the schema
        (keys in any order).
    marker
        End of the free text before the grammar; None if the grammar applies from the start.
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
    source: str = ""
    rules: str = ""
    marker: Marker | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise GrammarError(f"grammar: kind is {self.kind!r}, must be one of {kinds}")
        check_text(f"{self.kind} text", self.text)
        check_text(f"{self.kind} root", self.root)
        if not isinstance(self.backend, str):
            raise GrammarError(f"{self.kind}: backend is {self.backend!r}, must be a string")
        if not isinstance(self.source, str):
            raise GrammarError(f"{self.kind}: source is {self.source!r}, must be a string")
        check_options(self.key_order, self.whitespace, self.assert_formats)

    @property
    def schema(self) -> Any:
        """The user's JSON schema, parsed; None if the grammar is of another kind."""
        if self.kind != "json_schema":
            return None
        return parse_json("JSON schema", self.source or self.text)


def parse_json(subject: str, text: object) -> Any:
    """Return the value of a JSON text; raise `GrammarError` naming `subject` if it is not JSON."""
    if not isinstance(text, str):
        raise GrammarError(f"{subject}: must be JSON text, not {type(text).__name__}")
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarError(f"{subject}: is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"{subject}: the text is not JSON: {error}") from error


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
