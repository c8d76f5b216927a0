"""Lowering of grammars to automata with a stack, which run instead of LLGuidance's matchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graft.grammar.automaton.ebnf import lower_ebnf, lower_lark
from graft.grammar.automaton.schema import Rule, Rules, SchemaLowering
from graft.grammar.regular.expression import (
    Expression,
    characters,
    concat,
    members,
    minus,
    optional,
    repeat,
    text,
    union,
)
from graft.grammar.regular.regex import ANY, MAX_COUNT, NoAutomaton, lower_regex
from graft.grammar.resolve import ResolvedGrammar
from graft.grammar.structural.formats import Format
from graft.grammar.structural.lark import NO_TOKENS, split_names
from graft.grammar.vocabulary import FIRST_SPECIAL_TOKEN, LAST_CODE
from graft.native import _native

__all__ = ["MAX_STATES", "compile_automaton", "lower"]

#: Maximum number of states of an automaton.
MAX_STATES = 32767

#: Minimum and maximum numbers of repetitions by type of structural format.
_REPETITIONS: dict[str, tuple[int, int | None]] = {
    "optional": (0, 1),
    "star": (0, None),
    "plus": (1, None),
}
_ANY_CHARACTER = characters(ANY)
_ANY_TEXT = repeat(_ANY_CHARACTER, 0, None)


def compile_automaton(
    grammar: ResolvedGrammar, special: Mapping[str, int] = NO_TOKENS
) -> bytes | None:
    """Compile a grammar in LLGuidance's form to an automaton, and return it serialized.

    `special` contains ids of special tokens by name; see `lower`. Return None if no automaton is
    known for the grammar, or if the automaton would be too large. The size of the rules and the
    work are limited, so the function may run on untrusted grammars.
    """
    try:
        return bytes(_native.guide.compile_automaton(lower(grammar, special), MAX_STATES))
    except RecursionError:  # the schema is nested more deeply than this function can read
        return None
    except ValueError:  # NoAutomaton, or the automaton exceeds a limit or allows no text
        return None


def lower(grammar: ResolvedGrammar, special: Mapping[str, int] = NO_TOKENS) -> list[Rule]:
    """Return rules that match exactly the texts that LLGuidance allows for a grammar.

    The strings of JSON schemas can also contain escapes that LLGuidance does not allow; see
    `graft.grammar.automaton.strings`.

    `special` contains ids of special tokens by name. Where the begin, end or trigger text of a tag
    contains such a name, the name and the token are both legal. Raise `NoAutomaton` if graft cannot
    lower the grammar.
    """
    kind = grammar.spec.kind
    rules = Rules()
    if kind == "regex":
        return rules.finish(lower_regex(grammar.content))
    if kind == "choice":
        return rules.finish(union([text(option) for option in grammar.content]))
    if kind == "ebnf":
        return rules.finish(lower_ebnf(grammar.content, grammar.spec.root, rules))
    if kind == "lark":
        return rules.finish(lower_lark(grammar.content, rules))
    schemas = SchemaLowering(rules, grammar.spec.whitespace)
    if kind == "json_schema" and not grammar.rules:
        return rules.finish(schemas.lower(grammar.content))
    if kind == "structural_format":
        return rules.finish(_FormatLowering(schemas, special).lower(grammar.content))
    if kind == "structural_tag":
        lowering = _FormatLowering(schemas, special)
        return rules.finish(lowering.structural_tag(grammar.content))
    raise NoAutomaton(f"grammars of kind {kind!r} have no lowering")


class _FormatLowering:
    """Lowers structural formats and structural tags; `schemas` lowers their schemas.

    `special` contains ids of special tokens by name.

    The parameter `ends` of the methods contains the texts that end the tag around a format. Free
    text ends at the first of them.
    """

    def __init__(self, schemas: SchemaLowering, special: Mapping[str, int]):
        self._schemas = schemas
        self._special = special

    def lower(self, form: Format, ends: Sequence[str] = ()) -> Expression:
        """Return the expression of a format.

        Raise `NoAutomaton` if a part of the format cannot be lowered.
        """
        kind = form["type"]
        if kind == "const_string":
            return text(form["value"])
        if kind == "regex":
            return lower_regex(form["pattern"])
        if kind == "json_schema":  # graft.grammar.resolve has applied or refused all other fields
            return self._schemas.lower(form["json_schema"])
        if kind == "sequence":
            return concat(self.lower(part, ends) for part in form["elements"])
        if kind == "or":
            return union(self.lower(part, ends) for part in form["elements"])
        if kind in _REPETITIONS:
            return repeat(self.lower(form["content"], ends), *_REPETITIONS[kind])
        if kind == "repeat":
            high = None if form["max"] == -1 else form["max"]
            return repeat(self.lower(form["content"], ends), form["min"], high)
        if kind == "tag":
            return self._tag(form)
        if kind == "token":
            return self._token(form)
        if kind == "tags_with_separator":
            tag = union(map(self._tag, form["tags"]))
            if form["stop_after_first"]:
                return tag if form["at_least_one"] else optional(tag)
            low = 1 if form["at_least_one"] else 0
            return members(text(form["separator"]), [(tag, low, None)])
        if kind == "any_text" and form["max_tokens"] is None:
            high = form["max_chars"]
            if high is not None and high > MAX_COUNT:
                raise NoAutomaton("max_chars is too large")
            return _free_text([*form["excludes"], *ends], high, form["excluded_starts"])
        if kind == "triggered_tags":
            tags = list(map(self._tag, form["tags"]))
            free = _free_text([*form["triggers"], *form["excludes"], *ends])
            return _with_parts(free, tags, form["at_least_one"], form["stop_after_first"])
        if kind == "dispatch":
            parts = []
            for trigger, part in form["rules"]:
                parts.append(concat([self._spelled(trigger), self.lower(part)]))
            triggers = [trigger for trigger, _ in form["rules"]]
            free = _free_text([*triggers, *form["excludes"], *ends])
            return _with_parts(free, parts, False, not form["loop"])
        raise NoAutomaton(f"structural formats of type {kind!r} have no lowering")

    def _tag(self, form: Format) -> Expression:
        begin, end = form["begin"], form["end"]
        first = self._spelled(begin) if isinstance(begin, str) else self._token(begin)
        if isinstance(end, dict):
            return concat([first, self.lower(form["content"]), self._token(end)])
        return concat([first, self.lower(form["content"], end), union(map(self._spelled, end))])

    def structural_tag(self, document: dict[str, Any]) -> Expression:
        """Return the expression of a structural tag: free text in which triggers start tags."""
        triggers = document["triggers"]
        tags = []
        for tag in document["tags"]:
            content = self._schemas.lower(tag["schema"])
            tags.append(concat([self._spelled(tag["begin"]), content, self._spelled(tag["end"])]))
        free = _free_text(triggers)
        first = document["at_once"]
        parts = _with_parts(free, tags, first, False)
        if document["at_least_one"] and not first:
            return concat([free, union(tags), parts])
        return parts

    def _token(self, form: Format) -> Expression:
        """Return the expression of the type ``token``: a token by name or id."""
        token = form["token"]
        for name, special in self._special.items():
            if token in (name, special):
                return _special_token(special)
        # A token with text would also be legal where the grammar allows its text.
        raise NoAutomaton(f"the token {token!r} has text")

    def _spelled(self, value: str) -> Expression:
        """Return the expression of a text in which special tokens may replace their names."""
        parts = []
        for part, is_name in split_names(value, self._special):
            options = [text(part)]
            if is_name:
                options.append(_special_token(self._special[part]))
            parts.append(union(options))
        return concat(parts)


def _special_token(token: int) -> Expression:
    code = FIRST_SPECIAL_TOKEN + token
    if code > LAST_CODE:
        raise NoAutomaton(f"the id {token} of a special token is too large")
    return characters([(code, code)])


def _free_text(
    excluded: Sequence[str], high: int | None = None, excluded_starts: Sequence[str] = ()
) -> Expression:
    """Return the expression of free text.

    It matches the texts of up to `high` characters (None: any number) that contain none of the
    texts `excluded`, and start with none of the texts `excluded_starts`.
    """
    free = repeat(_ANY_CHARACTER, 0, high)
    if excluded:
        found = union(map(text, dict.fromkeys(excluded)))
        free = minus(free, concat([_ANY_TEXT, found, _ANY_TEXT]))
    if excluded_starts:
        free = minus(free, concat([union(map(text, excluded_starts)), _ANY_TEXT]))
    return free


def _with_parts(
    free: Expression, parts: Sequence[Expression], starts_with_part: bool, once: bool
) -> Expression:
    """Return the expression of free text that is interrupted by texts of `parts`.

    If `once` is True, it contains the text of at most one part, at its end. If `starts_with_part`
    is True, it begins with the text of a part.
    """
    part = union(parts)
    if once:
        return part if starts_with_part else concat([free, optional(part)])
    rest = concat([repeat(concat([free, part]), 0, None), free])
    return concat([part, rest]) if starts_with_part else rest
