"""Lower structural formats to LLGuidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from graft.grammar.errors import GrammarError
from graft.grammar.schema.llguidance_options import with_options
from graft.grammar.spec import Whitespace
from graft.grammar.structural.formats import Format, LoweringError
from graft.grammar.structural.lark_pieces import Joiner, Piece, check_boundary, constant, overlap

__all__ = ["NO_TOKENS", "lark_pattern", "lark_text", "split_names"]

NO_TOKENS: Mapping[str, int] = MappingProxyType({})

#: First characters of JSON texts, by JSON type.
_JSON_STARTS = {
    "object": "{",
    "array": "[",
    "string": '"',
    "boolean": "tf",
    "null": "n",
    "number": "-0123456789",
    "integer": "-0123456789",
}
_SPECIAL_TOKEN = re.compile(r"<[^<>\s\[\]]+>")
_ANY = "/(?s:.*)/"


def lark_text(form: Format, whitespace: Whitespace, special: Mapping[str, int] = NO_TOKENS) -> str:
    """Return a Lark grammar that allows exactly the texts of a structural format.

    `form` is a parsed format whose schemas have been rewritten for LLGuidance. `special` contains
    ids of special tokens by name. Where the begin, end or trigger text of a tag contains such a
    name, both the name and the token are legal. If no exact grammar with these tokens is known,
    only the names are legal. Raise `GrammarError` if no exact grammar is known for a part of the
    format.
    """
    if special:
        try:
            return _lark_text(form, _Lowering(whitespace, special))
        except GrammarError:
            pass
    return _lark_text(form, _Lowering(whitespace, NO_TOKENS))


def split_names(text: str, names: Mapping[str, int]) -> list[tuple[str, bool]]:
    """Split a text at the names of tokens in it. Longer names take precedence.

    Return the non-empty parts of the text. Each part is paired with a flag that says whether it is
    a name in `names`.
    """
    if not names:
        return [(text, False)] if text else []
    longest_first = sorted(names, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return [(part, index % 2 == 1) for index, part in enumerate(parts) if part]


def _lark_text(form: Format, lowering: _Lowering) -> str:
    try:
        start = lowering.joiner.sequence(lowering.lower(form, ()))
    except LoweringError as error:
        raise _place(form, error) from error
    rules = lowering.joiner.lines
    return "\n".join([f"start: {lowering.joiner.reference(start)}", *rules])


def lark_pattern(pattern: str) -> str:
    """Return a regular expression in the notation of Lark, with escaped slashes and line feeds."""
    escaped = re.sub(
        r"(\\[^\n])|\\?\n|/", lambda m: m[1] or (r"\/" if m[0] == "/" else r"\n"), pattern
    )
    return f"/{escaped}/"


class _Lowering:
    """Lowers formats to pieces (`Piece`).

    There is a method for each type of format. Its parameter `form` is the format. Its parameter
    `ends` contains the texts that end the tag around the format; free text in the format ends at
    the first of them. If `ends` is None, the format must not contain free text, for example
    because it is repeated.
    """

    def __init__(self, whitespace: Whitespace, special: Mapping[str, int]):
        self.joiner = Joiner()
        self._whitespace = whitespace
        self._special = special

    def lower(self, form: Format, ends: Sequence[str] | None) -> list[Piece]:
        """Return the pieces that a format consists of, in order; `_Lowering` describes `ends`."""
        alternatives = self._spread(form, ends)
        if len(alternatives) == 1:
            return alternatives[0]
        try:
            return [self._choose(alternatives, form["type"])]
        except LoweringError as error:
            raise _place(form, error) from error

    def _choose(self, alternatives: Sequence[Sequence[Piece]], name: str) -> Piece:
        """Return the piece that matches one of several sequences of pieces.

        `name` is the type of the format, for error messages.
        """
        first = alternatives[0][0]
        # If all sequences begin with the same free text (a piece with `absent`), it is not checked
        # that they begin differently: the text that ends the free text shows which of them matches.
        is_free = bool(first.absent) and all(pieces[0] is first for pieces in alternatives)
        pieces = [self.joiner.sequence(pieces) for pieces in alternatives]
        return self.joiner.alternatives(pieces, name, check=not is_free)

    def _spread(self, form: Format, ends: Sequence[str] | None) -> list[list[Piece]]:
        """Return the alternatives of a format, each as a list of consecutive pieces.

        `ends` are the texts that end the tag around the format (`_Lowering`). The caller appends
        the pieces that follow the format to each alternative. If an alternative ends with free
        text, this free text and the end text after it can therefore form one terminal.
        """
        try:
            return self._spread_parts(form, ends)
        except LoweringError as error:
            raise _place(form, error) from error

    def _spread_parts(self, form: Format, ends: Sequence[str] | None) -> list[list[Piece]]:
        kind = form["type"]
        if kind == "or":
            return [found for part in form["elements"] for found in self._spread(part, ends)]
        if kind == "sequence":
            *front, last = _with_texts_in_tags(form["elements"])
            before = [piece for part in front for piece in self.lower(part, ends)]
            if not _has_free_text(last) and not any(piece.absent for piece in before):
                return [[*before, *self.lower(last, ends)]]
            alternatives = self._spread(last, ends)
            if len(alternatives) > 1:
                before = [self.joiner.named(piece) for piece in before]
            return [[*before, *pieces] for pieces in alternatives]
        if kind in ("triggered_tags", "dispatch"):
            return self._dispatch(form, ends)
        if kind == "tag":
            return self._tag(form)
        if kind == "optional" and ends is not None and _has_free_text(form["content"]):
            inner = self._spread(form["content"], ends)
            if any(piece.absent for pieces in inner for piece in pieces[-1:]):
                return [*inner, [constant("")]]
        method = getattr(self, f"_{kind}")
        pieces: list[Piece] = method(form, ends)
        return [pieces]

    def _const_string(self, form: Format, _ends: Any) -> list[Piece]:
        return [constant(form["value"])]

    def _regex(self, form: Format, _ends: Any) -> list[Piece]:
        return [Piece(lark_pattern(form["pattern"]), "regex")]

    def _grammar(self, _form: Format, _ends: Any) -> list[Piece]:
        raise LoweringError("LLGuidance cannot compile the type grammar within a format")

    def _token(self, form: Format, _ends: Any) -> list[Piece]:
        token = form["token"]
        if isinstance(token, int):
            text = f"<[{token}]>"
        elif _SPECIAL_TOKEN.fullmatch(token):
            text = token
        else:
            raise LoweringError(f"token {token!r}: LLGuidance names special tokens like <...>")
        return [_special_piece(text)]

    def _any_text(self, form: Format, ends: Sequence[str] | None) -> list[Piece]:
        if form["max_tokens"] is not None:
            raise LoweringError("any_text.max_tokens is not supported")
        return [
            self._free_text([*form["excludes"]], ends, form["max_chars"], form["excluded_starts"])
        ]

    def _free_text(
        self,
        excluded: Sequence[str],
        ends: Sequence[str] | None,
        max_chars: int | None = None,
        excluded_starts: Sequence[str] = (),
    ) -> Piece:
        """Return the piece that matches free text.

        The free text contains none of the strings in `excluded`, begins with none of the strings in
        `excluded_starts`, and has at most `max_chars` characters; None sets no limit. `ends` are
        the texts that may follow it; the free text contains none of them either. `LoweringError` is
        raised if `ends` is None, that is, if the free text would be repeated.
        """
        if ends is None:
            raise LoweringError("LLGuidance cannot repeat free text")
        text = _ANY if max_chars is None else f"/(?s:.){{0,{max_chars}}}/"
        if "" in ends:
            raise LoweringError("a tag with free text needs an end that is not empty")
        texts = list(dict.fromkeys([*excluded, *ends]))
        pair = overlap(ends)
        if pair is not None:
            raise LoweringError(
                f"LLGuidance cannot enforce the ends {pair[0]!r} and {pair[1]!r}, which overlap"
            )
        if texts:
            found = "|".join(map(_escape, texts))
            text = f"{text} & ~/(?s:.*)({found})(?s:.*)/"
        if excluded_starts:
            found = "|".join(map(_escape, excluded_starts))
            text = f"{text} & ~/({found})(?s:.*)/"
        name = self.joiner.define(text, terminal=True)
        return Piece(name, "any_text", absent=tuple(texts), not_first=tuple(excluded_starts))

    def _json_schema(self, form: Format, _ends: Any) -> list[Piece]:
        if form["style"] != "json" or form["any_order"] or form["excludes"]:
            raise LoweringError(
                "LLGuidance does not support any_order, excludes and styles other than json"
            )
        if form["max_whitespace_cnt"] is not None:
            raise LoweringError("LLGuidance does not support max_whitespace_cnt")
        schema = form["json_schema"]
        keywords = schema if isinstance(schema, dict) else {}
        types = keywords.get("type", [])
        types = (types if isinstance(types, list) else [types]) or list(_JSON_STARTS)
        numeric = "number" in types or "integer" in types
        # The field `text`, if there is one, contains the schema as JSON text in the form that
        # LLGuidance has accepted.
        document = form.get("text") or json.dumps(with_options(schema, self._whitespace))
        text = self.joiner.define(f"%json {document}", terminal=False)
        starts = frozenset("".join(_JSON_STARTS[name] for name in types))
        return [
            Piece(text, "json_schema", terminal=False, closed=True, starts=starts, numeric=numeric)
        ]

    def _optional(self, form: Format, _ends: Any) -> list[Piece]:
        return self._repeat({**form, "min": 0, "max": 1}, None)

    def _star(self, form: Format, _ends: Any) -> list[Piece]:
        return self._repeat({**form, "min": 0, "max": -1}, None)

    def _plus(self, form: Format, _ends: Any) -> list[Piece]:
        return self._repeat({**form, "min": 1, "max": -1}, None)

    def _repeat(self, form: Format, _ends: Any) -> list[Piece]:
        content = self.joiner.sequence(self.lower(form["content"], None))
        high = None if form["max"] == -1 else form["max"]
        if high == 0:
            return [constant("")]
        return [self.joiner.repeat(content, form["min"], high, form["type"])]

    def _tag(self, form: Format) -> list[list[Piece]]:
        """Return the alternatives of a tag, each as a list of consecutive pieces.

        There is one alternative for each way to write the begin text (`_spellings`). The caller can
        join the free text before the tag and the begin text of an alternative to one terminal,
        which LLGuidance's lexer needs to find the end of the free text.
        """
        begin = form["begin"]
        end = form["end"]
        begins = self._spellings(begin) if isinstance(begin, str) else [self._token(begin, None)]
        texts: Sequence[str] = ()
        if isinstance(end, dict):
            ends = [self._token(end, None)]
        else:
            texts = end
            ends = [pieces for text in end for pieces in self._spellings(text)]
        if all(len(pieces) == 1 and pieces[0].terminal for pieces in ends):
            ends = [[self.joiner.alternatives([piece for [piece] in ends], "tag.end")]]
        alternatives = []
        for pieces in self._spread(form["content"], texts):
            *front, last = pieces
            if len(ends) == 1:
                alternatives.append([*pieces, *ends[0]])
            elif last.absent:
                alternatives.append([*front, self._choose([[last, *e] for e in ends], "tag.end")])
            else:
                alternatives.append([*pieces, self._choose(ends, "tag.end")])
        rest = alternatives[0]
        if len(alternatives) > 1:
            # All alternatives follow the same begin text, so it is written once, before them.
            rest = [self._choose(alternatives, "tag.content")]
        if len(begins) > 1:
            rest = [self.joiner.named(self.joiner.sequence(rest))]
        return [[*pieces, *rest] for pieces in begins]

    def _spellings(self, text: str) -> list[list[Piece]]:
        """Return the ways to write a text of a tag, each as a list of consecutive pieces.

        If the text begins with the name of a special token, there are two ways: one begins with the
        name as text, the other with the token. They are separate because the name as text must be
        joined with the text after it. Each later name in the text becomes one piece, which matches
        the name as text or as the token.
        """
        parts = split_names(text, self._special)
        if not any(is_name for _, is_name in parts):
            return [[constant(text)]]
        pieces = [self._name(part) if is_name else constant(part) for part, is_name in parts]
        if not parts[0][1]:
            return [pieces]
        name = parts[0][0]
        token = _special_piece(f"<[{self._special[name]}]>")
        if len(parts) > 1 and not parts[1][1]:
            # Join the name of the special token and the text after it to one piece. A trigger of
            # the tag may consist of both, and must lie in one piece.
            return [[constant(name + parts[1][0]), *pieces[2:]], [token, *pieces[1:]]]
        return [[constant(name), *pieces[1:]], [token, *pieces[1:]]]

    def _name(self, name: str) -> Piece:
        """Return the piece that matches the name of a special token, as text or as the token."""
        token = _special_piece(f"<[{self._special[name]}]>")
        return self.joiner.alternatives([constant(name), token], "token")

    def _tags_with_separator(self, form: Format, _ends: Any) -> list[Piece]:
        tags = [pieces for tag in form["tags"] for pieces in self._tag(tag)]
        before = form.get("before", "")
        if before:
            tags = [[self.joiner.named(piece) for piece in pieces] for pieces in tags]
        tag = self.joiner.named(self._choose(tags, "tags_with_separator"))
        pieces = [tag]
        if before:
            # Begin each tag that can come first with the text `before`. If free text is an
            # alternative to these tags, `before` and the text with which the tag begins may both be
            # needed to distinguish the tag from free text.
            first = [[constant(before), *pieces] for pieces in tags]
            pieces = [self._choose(first, "tags_with_separator")]
        if not form["stop_after_first"]:
            more = self.joiner.sequence([constant(form["separator"]), tag])
            pieces.append(self.joiner.repeat(more, 0, None, "tags_with_separator"))
        if form["at_least_one"]:
            return pieces
        return [self.joiner.repeat(self.joiner.sequence(pieces), 0, 1, "tags_with_separator")]

    def _dispatch(self, form: Format, ends: Sequence[str] | None) -> list[list[Piece]]:
        """Lower ``triggered_tags`` and ``dispatch``: free text in which a trigger starts a part.

        In ``triggered_tags``, a part is a tag. In ``dispatch``, it is a trigger followed by the
        format of this trigger. `ends` and the result are as in `_spread`.
        """
        if form["type"] == "dispatch":
            triggers = [pattern for pattern, _ in form["rules"]]
            parts = []
            for text, part in form["rules"]:
                begins = self._spellings(text)
                lowered = self.lower(part, None)
                if len(begins) > 1:
                    lowered = [self.joiner.named(piece) for piece in lowered]
                parts += [[*pieces, *lowered] for pieces in begins]
            once = not form["loop"]
            at_least_one = False
            if not set(ends or ()) <= set(form["excludes"]):
                raise LoweringError(
                    f"for LLGuidance, excludes must contain the tag's ends {list(ends or ())}"
                )
        else:
            triggers = form["triggers"]
            parts = [pieces for tag in form["tags"] for pieces in self._tag(tag)]
            once = form["stop_after_first"]
            at_least_one = form["at_least_one"]
        pair = overlap([*triggers, *(ends or ())])
        if pair is not None:
            raise LoweringError(
                f"LLGuidance cannot enforce the triggers or ends {pair[0]!r} and {pair[1]!r}, "
                "which overlap"
            )
        free = self._free_text([*triggers, *form["excludes"]], ends)
        first = []
        if at_least_one:
            parts = [[self.joiner.named(piece) for piece in part] for part in parts]
            first = [self._choose(parts, form["type"])]
        if once:
            return [first] if first else [*([free, *part] for part in parts), [free]]
        return [[*first, self._loop(parts, free, form["type"]), free]]

    def _loop(self, parts: Sequence[Sequence[Piece]], free: Piece, name: str) -> Piece:
        """Return the piece that matches free text and then one of `parts`, any number of times.

        `free` is the piece of the free text, and `name` is the type of the format.
        """
        following = [self.joiner.sequence([free, *part]) for part in parts]
        # All alternatives begin with the same free text, so it is not checked that they begin
        # differently. Free text also follows the last of `parts`: by the trigger after a free text,
        # the lexer sees whether another part follows.
        either = self.joiner.alternatives(following, name, check=False)
        if either.terminal:
            return Piece(f"({either.text})*", name)
        check_boundary(either, free)
        text = self.joiner.define(f"({either.text})*", terminal=False)
        return Piece(text, name, terminal=False, closed=either.closed)


def _with_texts_in_tags(elements: Sequence[Format]) -> list[Format]:
    """Return the elements of a sequence, with each text moved into the tags that follow it.

    A ``const_string`` directly before a ``tags_with_separator`` with ``at_least_one`` becomes the
    field ``before`` of the ``tags_with_separator``.
    """
    merged: list[Format] = []
    for element in elements:
        has_tags = element["type"] == "tags_with_separator" and element["at_least_one"]
        if has_tags and merged and merged[-1]["type"] == "const_string":
            element = {**element, "before": merged.pop()["value"]}
        merged.append(element)
    return merged


def _special_piece(text: str) -> Piece:
    """Return the piece that matches a special token.

    `text` is the token in Lark's notation: ``<name>`` or ``<[id]>``.
    """
    starts = frozenset([f"\0{text}"])
    return Piece(text, "token", terminal=False, closed=True, starts=starts, special=True)


def _has_free_text(form: Format) -> bool:
    """Return whether a format has free text that ends where a tag around the format ends."""
    kind = form["type"]
    if kind in ("or", "sequence"):
        return any(map(_has_free_text, form["elements"]))
    if kind == "optional":
        return _has_free_text(form["content"])
    return kind in ("any_text", "triggered_tags", "dispatch")


def _place(form: Format, error: LoweringError) -> GrammarError:
    return GrammarError(f"structural format: {form['path']}: {error}")


def _escape(text: str) -> str:
    """Return a text, escaped for a regular expression in Lark."""
    escaped = (f"\\x{{{ord(c):x}}}" if not (c.isascii() and c.isalnum()) else c for c in text)
    return "".join(escaped)
