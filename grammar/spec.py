"""What a request asks its output to be: a JSON schema, a regex, an EBNF or a choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .errors import GrammarError
from .router import route_named
from .schema_audit import unenforced_keywords

__all__ = ["GrammarSpec"]

Kind = Literal["json_schema", "regex", "ebnf"]


@dataclass(frozen=True)
class GrammarSpec:
    """A validated, hashable grammar text. Build one with the class methods.

    Attributes
    ----------
    kind
        ``"json_schema"``, ``"regex"`` or ``"ebnf"``; a choice is stored as the EBNF it stands for.
    text
        The schema as JSON text, the regex, or the EBNF.
    root
        Start rule of an EBNF.
    any_whitespace
        JSON only. ``False``: one line with the separators ``", "`` and ``": "``, which small models
        follow best; ``True``: any whitespace between JSON's tokens.
    strict
        JSON only. ``True``: an object schema with properties allows no others unless it says so.
        Such output satisfies the schema whatever it says about further properties.
    partial
        ``False``: a grammar of which XGrammar cannot enforce a part is refused. ``True``: it is
        taken, and the output may violate that part.
    backend
        The backend that compiles it.
    source
        The user's schema where the router has rewritten it; ``text`` is what is compiled. With
        ``partial``, finished outputs are to be checked against it (`graft.grammar.check_output`).
    """

    kind: Kind
    text: str
    root: str = "root"
    any_whitespace: bool = False
    strict: bool = True
    partial: bool = False
    backend: str = "xgrammar"
    source: str = ""

    @property
    def schema(self) -> Any:
        """The user's JSON schema, parsed, or None where the grammar is not one."""
        return json.loads(self.source or self.text) if self.kind == "json_schema" else None

    @classmethod
    def json_schema(
        cls,
        schema: dict[str, Any] | bool | str,
        *,
        any_whitespace: bool = False,
        strict: bool = True,
        partial: bool = False,
        backend: str = "xgrammar",
    ) -> GrammarSpec:
        """A JSON schema, as JSON text or as the object it parses to; property order is kept.

        ``backend="auto"`` lets the router choose among the installed backends, rewriting the schema
        where an equivalent one can be enforced; ``"llguidance"`` does the same for that one.
        ``"xgrammar"`` takes the schema as it stands. With a router, `partial` of the result says
        whether something was left out, not whether that was allowed.

        Raises
        ------
        GrammarError
            If the text is not JSON, the schema is neither an object nor a boolean, or, unless
            ``partial``, it contains what XGrammar cannot enforce (named with its JSON pointer).
        """
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"JSON schema: the text is not JSON: {error}") from error
        if not isinstance(value, (dict, bool)):
            raise GrammarError(
                f"JSON schema: must be an object or a boolean, not {type(value).__name__}"
            )
        if value is False:
            raise GrammarError("JSON schema: the schema false allows no output")
        if backend != "xgrammar":
            return cls._routed(value, backend, any_whitespace, strict, partial)
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            unenforced = [] if partial else unenforced_keywords(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"JSON schema: cannot be read: {error}") from error
        _check_text("JSON schema", text)
        if unenforced:
            raise GrammarError(
                "JSON schema: cannot be enforced: "
                + "; ".join(unenforced[:5])
                + " (partial=True takes the schema all the same)"
            )
        return cls(
            "json_schema", text, any_whitespace=any_whitespace, strict=strict, partial=partial
        )

    @classmethod
    def _routed(
        cls, value: Any, backend: str, any_whitespace: bool, strict: bool, partial: bool
    ) -> GrammarSpec:
        try:
            source = json.dumps(value, ensure_ascii=False, allow_nan=False)
            _check_text("JSON schema", source)
            found = route_named(value, backend)
            text = json.dumps(found.schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"JSON schema: cannot be read: {error}") from error
        if found.backend is None or not (found.exact or partial):
            hint = "" if found.backend is None else " (partial=True takes the schema all the same)"
            raise GrammarError(f"JSON schema: {found.refusal()}{hint}")
        return cls(
            "json_schema", text, any_whitespace=any_whitespace, strict=strict,
            partial=not found.exact, backend=found.backend, source=source,
        )  # fmt: skip

    @classmethod
    def json_object(cls, *, any_whitespace: bool = False) -> GrammarSpec:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, any_whitespace=any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Text that matches the whole pattern. An empty pattern is refused."""
        _check_text("regex", pattern)
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, text: str, root: str = "root") -> GrammarSpec:
        """A grammar in XGrammar's EBNF (GBNF), started from the rule ``root``."""
        _check_text("EBNF", text)
        _check_text("EBNF root rule", root)
        return cls("ebnf", text, root=root)

    @classmethod
    def choice(cls, options: Sequence[str]) -> GrammarSpec:
        """Exactly one of the given strings.

        Raises
        ------
        GrammarError
            If there is no option, or an option is empty or no string.
        """
        if isinstance(options, str) or not options:
            raise GrammarError("choice: needs a list of at least one string")
        for option in options:
            _check_text("choice option", option)
        alternatives = dict.fromkeys(_quote(option) for option in options)
        return cls("ebnf", "root ::= " + " | ".join(alternatives))


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise GrammarError(f"{what}: must be a string, not {type(text).__name__}")
    if not text:
        raise GrammarError(f"{what}: is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GrammarError(f"{what}: is not Unicode text: {error}") from error


def _quote(text: str) -> str:
    """An EBNF string literal: everything but ASCII letters and digits by code point."""
    return '"' + "".join(_escape(c) for c in text) + '"'


def _escape(char: str) -> str:
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
