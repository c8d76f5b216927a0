"""What a request asks its output to be, as data. `GrammarSpec` states one; backends read it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from graft.grammar.errors import GrammarError
from graft.grammar.schema.options import KeyOrder, Whitespace, check_options
from graft.grammar.vocabulary import Vocabulary

__all__ = ["Marker", "Spec", "check_text", "parsed"]

Kind = Literal["json_schema", "regex", "ebnf", "choice", "lark", "structural_tag"]


@dataclass(frozen=True)
class Marker:
    """Where free text ends and the grammar begins, for models that reason before they answer.

    Before the marker nothing is constrained. The grammar begins with the token after the one that
    completes it; a token that would carry the marker's end *and* more text is illegal, so that no
    byte of the answer escapes the grammar.

    Attributes
    ----------
    text
        The marker as text, or empty; it may be spread over tokens. Where an added token of the
        tokenizer has this very text, its id is the marker too.
    token
        The marker as a token id, or None.
    required
        ``False``: a stop id in the free text ends the output, without the grammar ever having
        begun. ``True``: stop ids are illegal until the marker has come.
    """

    text: str = ""
    token: int | None = None
    required: bool = False

    def ids(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        """Tokens that are the marker by themselves; refused if out of range or a stop id."""
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
    """A grammar's text and what goes with it; hashable.

    Attributes
    ----------
    kind
        See `Kind`.
    text
        The schema as JSON text, the regex, the EBNF, the Lark grammar, the choices as a JSON list,
        or ``{"triggers", "tags": [{"begin", "schema", "end"}, ...], "at_least_one", "at_once"}``.
    root
        Start rule of an EBNF.
    whitespace
        Between JSON's tokens. ``"line"``: one line with the separators ``", "`` and ``": "``, which
        small models follow best; ``"compact"``: none; ``"any"``; or a number: any, but at most so
        many characters in a row.
    strict
        JSON schema only. ``True``: an object schema with properties allows no others unless it says
        so. Such output satisfies the schema whatever it says about further properties. ``None``:
        what the standard says, but ``True`` with XGrammar unrouted, which is loose otherwise.
    partial
        ``False``: a grammar of which a part cannot be enforced is refused. ``True``: it is taken,
        and the output may violate that part.
    backend
        The backend that compiles it; empty: the engine's own (see `resolved`).
    key_order
        JSON schema only. ``"schema"``: the keys of an object come as the schema lists them, so that
        reasoning precedes answers and more text is forced. ``"any"``: in any order.
    assert_formats
        JSON schema only. Whether ``format`` is enforced; None: as the draft says, so not in schemas
        that declare 2019-09 or 2020-12, to which it is an annotation.
    source
        The user's schema where the router has rewritten it; ``text`` is what is compiled. With
        ``partial``, finished outputs are to be checked against it (`graft.grammar.check_output`).
    rules
        The schema as a Lark grammar, where ``%json`` does not do: keys in any order.
    marker
        Free text until this marker, then the grammar; None: the grammar from the start.
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
        for name, text in (("text", self.text), ("root", self.root)):
            check_text(f"{self.kind} {name}", text)
        if not isinstance(self.backend, str) or not isinstance(self.source, str):
            raise GrammarError(f"{self.kind}: backend is {self.backend!r}, must be a string")
        check_options(self.key_order, self.whitespace, self.assert_formats)

    @property
    def schema(self) -> Any:
        """The user's JSON schema, parsed, or None where the grammar is not one."""
        if self.kind != "json_schema":
            return None
        return parsed("JSON schema", self.source or self.text)


def parsed(what: str, text: object) -> Any:
    """The value of a JSON text."""
    if not isinstance(text, str):
        raise GrammarError(f"{what}: must be JSON text, not {type(text).__name__}")
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarError(f"{what}: is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"{what}: the text is not JSON: {error}") from error


def check_text(what: str, text: object) -> None:
    """Refuses what is no text, empty, or cannot be written as UTF-8."""
    if not isinstance(text, str):
        raise GrammarError(f"{what}: must be a string, not {type(text).__name__}")
    if not text:
        raise GrammarError(f"{what}: is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GrammarError(f"{what}: is not Unicode text: {error}") from error
