"""Convert structural formats for XGrammar, and refuse the formats that XGrammar cannot enforce."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graft.grammar.structural.formats import (
    Format,
    LoweringError,
    convert_format,
    has_free_text,
    plain_format,
)

__all__ = ["check_xgrammar_format", "plain_ebnf", "xgrammar_format"]

# In GBNF, "." matches any character, and an alternative may be empty. XGrammar supports neither, so
# `plain_ebnf` replaces both. In strings and character classes, the characters are literal.
_PIECE = re.compile(
    r'(?P<literal>"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*(?:\]|\\?$))'
    r"|(?P<space>\s+|#[^\n]*)|(?P<rule>[A-Za-z_][\w-]*\s*::=)|[\w-]+|.",
    re.MULTILINE | re.DOTALL,
)
_ANY_CHARACTER = "([^a] | [a])"


def plain_ebnf(text: str) -> str:
    """Return an EBNF grammar without dots, and with ``""`` in place of empty alternatives."""
    pieces: list[str] = []
    last, end = "", 0  # the last piece that is not a space, and the number of pieces up to it
    for match in _PIECE.finditer(text):
        piece = match[0]
        if not match["space"]:
            is_bar = piece == "|" and (last in ("|", "(") or last.endswith("::="))
            if is_bar or (last == "|" and (piece == ")" or match["rule"])):
                pieces.insert(end, ' ""')
            last, end = piece, len(pieces) + 1
        pieces.append(_ANY_CHARACTER if piece == "." else piece)
    if last == "|":
        pieces.insert(end, ' ""')
    return "".join(pieces)


def check_xgrammar_format(form: Format) -> None:
    """Raise `GrammarError` if the XGrammar backend does not support a part of a format."""
    convert_format(form, _check)


def xgrammar_format(
    form: Format, schema_rules: Callable[[Format], str], regex_rules: Callable[[str], str]
) -> dict[str, Any]:
    """Return a parsed format in the JSON form that XGrammar reads.

    Schemas and patterns are replaced with EBNF rules, because XGrammar's own conversion would allow
    any white space in JSON and read some patterns differently. `schema_rules` returns the rules of
    a ``json_schema`` format, and `regex_rules` those of a pattern.
    """

    def convert(part: Format) -> Format:
        if part["type"] == "grammar":
            return {**part, "grammar": plain_ebnf(part["grammar"])}
        if part["type"] == "any_text" and part["excluded_starts"]:
            return _rules(part, regex_rules(_other_starts(part["excluded_starts"])))
        if part["type"] == "any_text":
            return {**part, "excluded_starts": None}
        if part["type"] == "regex":
            return _rules(part, regex_rules(part["pattern"]))
        if part["type"] == "json_schema" and part["style"] == "json" and not part["excludes"]:
            return _rules(part, schema_rules(part))
        if part["type"] == "json_schema":
            # Without a maximum, a model could generate unlimited white space.
            most = part["max_whitespace_cnt"]
            most = 1 if most is None else most
            unknown = dict.fromkeys(("strict", "place", "text"))  # fields unknown to XGrammar
            return {**part, **unknown, "max_whitespace_cnt": most}
        return part

    return plain_format(convert_format(form, convert))


def _ends_early(ends: Sequence[str]) -> str:
    """Return one of `ends` that XGrammar may find after it has missed an earlier end; "" if none.

    `ends` are the texts that can end a tag's free text. XGrammar allows free text that contains
    none of them, followed by one of them. With the ends "ab" and "bc", it therefore allows "abc" as
    the free text "a" and the end "bc", although "ab" has ended the tag. With "b" and "abc", it
    allows the end "abc", although "b" has ended the tag.
    """
    for end in ends:
        for length in range(1, len(end)):
            if any(other.endswith(end[:length]) or other in end[:length] for other in ends):
                return end
    return ""


def _rules(form: Format, rules: str) -> Format:
    return {"type": "grammar", "path": form["path"], "grammar": rules}


def _other_starts(texts: Iterable[str]) -> str:
    """Return a regular expression of all texts that begin with none of `texts`."""
    if "" in texts:
        return "[^\\s\\S]"
    following: dict[str, list[str]] = {}
    for text in texts:
        following.setdefault(text[0], []).append(text[1:])
    if not following:
        return "[\\s\\S]*"
    # `following` maps each first character of `texts` to what may follow it there. A text begins
    # with none of `texts` if it is empty, if its first character is not in `following`, or if what
    # follows this character begins with none of the texts that `following` has for the character.
    options = [f"[^{''.join(map(_escape, following))}][\\s\\S]*"]
    options += [f"{_escape(char)}{_other_starts(rest)}" for char, rest in following.items()]
    return f"({'|'.join(options)})?"


def _escape(char: str) -> str:
    """Return a character as a regular expression that is also valid in a character class."""
    return char if char.isalnum() or ord(char) >= 0x80 else f"\\x{ord(char):02x}"


def _check(form: Format) -> Format:
    if form["type"] == "tag" and isinstance(form["end"], list) and has_free_text(form["content"]):
        early = _ends_early(form["end"])
        if early:
            raise LoweringError(f"XGrammar cannot see where the end {early!r} occurs first")
    if form["type"] == "token":
        raise LoweringError("XGrammar's matcher does not allow special tokens here")
    if form.get("max_tokens") is not None:
        raise LoweringError("any_text.max_tokens is not supported")
    if form.get("excluded_starts") and form["excludes"]:
        raise LoweringError("XGrammar supports any_text.excluded_starts without excludes only")
    if form.get("max_chars") is not None:
        raise LoweringError("XGrammar does not count all characters of any_text.max_chars alike")
    return form
