"""The walk over a schema: what each keyword becomes, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.grammar.schema.rewrite.disjoint import Disjointness
from graft.grammar.schema.rewrite.negate import Negation
from graft.grammar.schema.rewrite.strings import ecma_pattern, literals
from graft.grammar.schema.terms import (
    KINDS,
    Cannot,
    Kinds,
    Reason,
    References,
    escape,
    kinds_of,
    meet,
    word_set,
)

__all__ = ["Rewriter", "Rule", "Site"]

_MAPS = word_set("properties patternProperties $defs definitions")
_LISTS = word_set("allOf anyOf prefixItems")
_SINGLE = word_set("additionalProperties additionalItems items")
_COUNTS = word_set("minLength maxLength minItems maxItems")
_NEVER = word_set(
    """unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef extends disallow
    divisibleBy"""
)
_DRAFT_3 = frozenset(("extends", "disallow", "divisibleBy"))
_ABOUT = {
    **dict.fromkeys(("format", "pattern"), "string"),
    **dict.fromkeys(("uniqueItems", "contains", "unevaluatedItems"), "array"),
    **dict.fromkeys(
        (
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "propertyNames",
            "unevaluatedProperties",
            "minProperties",
            "maxProperties",
        ),
        "object",
    ),
}
_LAST = {"oneOf": 1, "minProperties": 2, "maxProperties": 2}  # they look at what others become


@dataclass
class Site:
    """A schema being rewritten."""

    schema: dict[str, Any]  # as it was
    at: str  # its JSON pointer
    kinds: Kinds  # that its values can have
    out: dict[str, Any] = field(default_factory=dict)  # the new schema so far
    extra: list[Any] = field(default_factory=list)  # schemas that must hold as well


class Rewriter:
    """Rewrites one document; rules call back into it, and tell what they do in its lists."""

    def __init__(
        self, root: dict[str, Any], draft: int, assert_formats: bool, rules: Mapping[str, Rule]
    ):
        self.lost: list[Reason] = []  # has no exact form
        self.narrowed: list[Reason] = []
        self.draft = draft
        self.assert_formats = assert_formats
        self._rules = rules
        self.references = References(root)
        self.negation = Negation(self.references, draft)
        self.disjoint = Disjointness(root, self.references)
        self._home = "definitions" if draft <= 7 else "$defs"
        self._aliases: dict[str, str] = {}  # pointer -> name of the copy among the definitions
        self._pointers: list[str] = []

    def whole(self, root: dict[str, Any]) -> dict[str, Any]:
        """Rewrite the document, and what its pointers point to when that place moves."""
        new: dict[str, Any] = self.schema(root, "#", KINDS)
        for pointer in self._pointers:  # grows while copies are made
            copy = self.schema(self.references.resolve(f"#{pointer}"), f"#{pointer}", KINDS)
            new.setdefault(self._home, {})[self._aliases[pointer]] = copy
        return new

    def schema(self, schema: Any, at: str, kinds: Kinds) -> Any:
        """One schema and all below it; only values of the given types will be tried on it."""
        if isinstance(schema, bool):
            return schema
        site = Site(schema, at, meet(kinds, kinds_of(schema)))
        for keyword, value in sorted(schema.items(), key=lambda item: _LAST.get(item[0], 0)):
            try:
                self._keyword(keyword, value, site)
            except Cannot as error:
                self.lose(at, keyword, error.why)
        _fold(site.out)
        return _with(site.out, [part for part in site.extra if part is not True])

    def keyword_again(self, keyword: str, value: Any, site: Site) -> None:
        """Rewrite a keyword that a rule has replaced."""
        site.out.pop(keyword, None)
        self._keyword(keyword, value, site)

    def _keyword(self, keyword: str, value: Any, site: Site) -> None:
        here = f"{site.at}/{escape(keyword)}"
        out = site.out
        relevant = _ABOUT.get(keyword) in (None, *site.kinds)
        if keyword in self._rules:
            if relevant:
                self._rules[keyword](self, value, site)
        elif keyword in _NEVER and (self.draft == 3 or keyword not in _DRAFT_3):
            if relevant:
                raise Cannot(keyword, "cannot be enforced")
        elif keyword == "nullable":
            if value is True and "null" not in site.kinds:
                why = "OpenAPI's, an annotation here: null is not produced unless type lists it"
                self.narrowed.append(Reason(site.at, keyword, why))
        elif keyword in ("x-guidance", "contentEncoding", "contentMediaType"):
            return  # annotations; the first would switch LLGuidance's own strictness off
        elif keyword in out:
            return  # a rule was first and has replaced it
        elif keyword in _MAPS:
            made = {
                name: self.schema(part, f"{here}/{escape(name)}", KINDS)
                for name, part in value.items()
            }
            if keyword == "patternProperties":
                made = {ecma_pattern(pattern): part for pattern, part in made.items()}
            out[keyword] = made
        elif keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            inner = site.kinds if keyword in ("allOf", "anyOf") else KINDS
            out[keyword] = [self.schema(p, f"{here}/{i}", inner) for i, p in enumerate(value)]
        elif keyword in _SINGLE:
            out[keyword] = self.schema(value, here, KINDS)
        elif keyword == "$ref":
            out[keyword] = self._reference(value)
        elif keyword in _COUNTS and isinstance(value, float) and value.is_integer():
            out[keyword] = int(value)
        else:
            out[keyword] = value

    def _reference(self, reference: Any) -> Any:
        """The reference, or that of a copy if it points where rewriting moves things."""
        pointer = self.references.pointer(reference)
        if pointer is None or pointer == "":
            return reference
        steps = pointer.split("/")[1:]
        if len(steps) == 2 and steps[0] in ("$defs", "definitions"):
            return reference
        try:
            self.references.resolve(reference)
        except Cannot:
            return reference  # the backend's own lookup has the last word
        if pointer not in self._aliases:
            self._aliases[pointer] = f"graft-{len(self._aliases)}"
            self._pointers.append(pointer)
        return f"#/{self._home}/{self._aliases[pointer]}"

    def lose(self, at: str, keyword: str, why: str) -> None:
        """Report what has no exact form."""
        self.lost.append(Reason(at, keyword, why))

    def fresh(self, schema: Any, at: str, kinds: Kinds) -> Any:
        """Rewrite a schema that a rule has made; `Cannot` if part of it is lost."""
        before = len(self.lost)
        new = self.schema(schema, at, kinds)
        if len(self.lost) > before:
            reason = self.lost[before]
            del self.lost[before:]
            raise Cannot(reason.keyword, reason.why)
        return new


Rule = Callable[[Rewriter, Any, Site], None]


def _fold(out: dict[str, Any]) -> None:
    """Patterns of listed names only go into ``properties``: LLGuidance would begin another key."""
    listed = out.get("properties", {})
    patterns = out.get("patternProperties", {})
    for pattern in list(patterns):
        words = literals(pattern)
        if words and listed.keys() >= set(words):
            part = patterns.pop(pattern)
            for word in words if part is not True and part != {} else ():
                listed[word] = {"allOf": [listed[word], part]}


def _with(out: dict[str, Any], extra: list[Any]) -> dict[str, Any]:
    """Add conjuncts to what is already there."""
    if len(extra) == 1 and isinstance(extra[0], dict) and not (extra[0].keys() & out.keys()):
        out.update(extra[0])
    elif extra:
        out["allOf"] = [*out.get("allOf", ()), *extra]
    return out
