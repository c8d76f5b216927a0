"""Traversal of a schema that rewrites each keyword and collects the reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.grammar.schema.rewrite.disjoint import Disjointness
from graft.grammar.schema.rewrite.negate import Negation
from graft.grammar.schema.rewrite.strings import ecma_pattern, literals
from graft.grammar.schema.terms import (
    JSON_TYPES,
    JsonTypes,
    NoExactForm,
    Reason,
    References,
    common_types,
    escape,
    types_of,
    word_set,
)

__all__ = ["Rewriter", "Rule", "Site"]

_MAPS = word_set("properties patternProperties $defs definitions")
_LISTS = word_set("allOf anyOf prefixItems")
_SINGLE = word_set("additionalProperties additionalItems items")
_COUNTS = word_set("minLength maxLength minItems maxItems")
_UNSUPPORTED = word_set(
    """unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef extends disallow
    divisibleBy"""
)
_DRAFT_3 = frozenset(("extends", "disallow", "divisibleBy"))
#: Annotations. ``x-guidance`` would also change LLGuidance's options.
_REMOVED = ("x-guidance", "contentEncoding", "contentMediaType")
#: The only type that each keyword constrains.
_TYPE_OF_KEYWORD = {
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
#: Keywords that are rewritten last, because their rules read the new form of others.
_LAST = {"oneOf": 1, "minProperties": 2, "maxProperties": 2}


@dataclass
class Site:
    """A subschema that is being rewritten.

    Attributes
    ----------
    schema
        The original subschema.
    at
        Its JSON pointer.
    types
        JSON types that its values can have.
    out
        Keywords of the new subschema so far.
    extra
        Schemas that the new subschema requires in addition.
    """

    schema: dict[str, Any]
    at: str
    types: JsonTypes
    out: dict[str, Any] = field(default_factory=dict)
    extra: list[Any] = field(default_factory=list)


class Rewriter:
    """Rewrites one document.

    Parameters
    ----------
    root
        The normalized document.
    draft
        Its draft: 3, 4, 6, 7, 2019 or 2020.
    assert_formats
        Whether formats are enforced.
    rules
        Rule of each keyword that is not copied. Rules call methods of the rewriter.

    Attributes
    ----------
    lost, narrowed
        As in `Rewritten`; duplicates are possible.
    references, negation, disjoint
        References, complements and disjointness proofs of the document, for the rules.
    """

    def __init__(
        self, root: dict[str, Any], draft: int, assert_formats: bool, rules: Mapping[str, Rule]
    ):
        self.lost: list[Reason] = []
        self.narrowed: list[Reason] = []
        self.draft = draft
        self.assert_formats = assert_formats
        self._rules = rules
        self.references = References(root)
        self.negation = Negation(self.references, draft)
        self.disjoint = Disjointness(root, self.references)
        self._definitions_keyword = "definitions" if draft <= 7 else "$defs"
        self._aliases: dict[str, str] = {}  # pointer -> name of the copy among the definitions
        self._aliased_pointers: list[str] = []

    def rewrite_document(self, root: dict[str, Any]) -> dict[str, Any]:
        """Rewrite the document, with copies of reference targets that rewriting would move."""
        new: dict[str, Any] = self.rewrite(root, "#", JSON_TYPES)
        for pointer in self._aliased_pointers:  # grows while copies are rewritten
            target = self.references.resolve(f"#{pointer}")
            copy = self.rewrite(target, f"#{pointer}", JSON_TYPES)
            new.setdefault(self._definitions_keyword, {})[self._aliases[pointer]] = copy
        return new

    def rewrite(self, schema: Any, at: str, types: JsonTypes) -> Any:
        """Rewrite a schema and its subschemas, and report parts without an exact form.

        Parameters
        ----------
        schema
            The schema.
        at
            Its JSON pointer.
        types
            Types of the values that it applies to; the result may be arbitrary for others.
        """
        if isinstance(schema, bool):
            return schema
        site = Site(schema, at, common_types(types, types_of(schema)))
        for keyword, value in sorted(schema.items(), key=lambda item: _LAST.get(item[0], 0)):
            try:
                self._rewrite_keyword(keyword, value, site)
            except NoExactForm as error:
                self.report_lost(at, keyword, error.why)
        _fold_pattern_properties(site.out)
        return _add_conjuncts(site.out, [part for part in site.extra if part is not True])

    def rewrite_exactly(self, schema: Any, at: str, types: JsonTypes) -> Any:
        """Rewrite a schema that a rule has created; raise `NoExactForm` if a part is lost."""
        lost_before = len(self.lost)
        new = self.rewrite(schema, at, types)
        if len(self.lost) > lost_before:
            reason = self.lost[lost_before]
            del self.lost[lost_before:]
            raise NoExactForm(reason.keyword, reason.why)
        return new

    def replace_keyword(self, keyword: str, value: Any, site: Site) -> None:
        """Set a keyword to a new value, which is rewritten."""
        site.out.pop(keyword, None)
        self._rewrite_keyword(keyword, value, site)

    def report_lost(self, at: str, keyword: str, why: str) -> None:
        """Report a keyword that has no exact form."""
        self.lost.append(Reason(at, keyword, why))

    def _rewrite_keyword(self, keyword: str, value: Any, site: Site) -> None:
        relevant = _TYPE_OF_KEYWORD.get(keyword) in (None, *site.types)
        if keyword in self._rules:
            if relevant:
                self._rules[keyword](self, value, site)
        elif keyword in _UNSUPPORTED and (self.draft == 3 or keyword not in _DRAFT_3):
            if relevant:
                raise NoExactForm(keyword, "cannot be enforced")
        elif keyword == "nullable":
            if value is True and "null" not in site.types:
                why = "OpenAPI's, an annotation here: null is not produced unless type lists it"
                self.narrowed.append(Reason(site.at, keyword, why))
        elif keyword in _REMOVED:
            return
        elif keyword not in site.out:  # otherwise, a rule has replaced it
            site.out[keyword] = self._rewritten_value(keyword, value, site)

    def _rewritten_value(self, keyword: str, value: Any, site: Site) -> Any:
        """Return the new value of a keyword that has no rule."""
        pointer = f"{site.at}/{escape(keyword)}"
        if keyword in _MAPS:
            new = {
                name: self.rewrite(part, f"{pointer}/{escape(name)}", JSON_TYPES)
                for name, part in value.items()
            }
            if keyword == "patternProperties":
                return {ecma_pattern(pattern): part for pattern, part in new.items()}
            return new
        if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            types = site.types if keyword in ("allOf", "anyOf") else JSON_TYPES
            return [self.rewrite(part, f"{pointer}/{i}", types) for i, part in enumerate(value)]
        if keyword in _SINGLE:
            return self.rewrite(value, pointer, JSON_TYPES)
        if keyword == "$ref":
            return self._rewritten_reference(value)
        if keyword in _COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    def _rewritten_reference(self, reference: Any) -> Any:
        """Return a reference, or that of a copy if rewriting may move its target."""
        pointer = self.references.pointer(reference)
        if pointer is None or pointer == "":
            return reference
        steps = pointer.split("/")[1:]
        if len(steps) == 2 and steps[0] in ("$defs", "definitions"):
            return reference
        try:
            self.references.resolve(reference)
        except NoExactForm:
            return reference  # the backend reports it
        if pointer not in self._aliases:
            self._aliases[pointer] = f"graft-{len(self._aliases)}"
            self._aliased_pointers.append(pointer)
        return f"#/{self._definitions_keyword}/{self._aliases[pointer]}"


Rule = Callable[[Rewriter, Any, Site], None]


def _fold_pattern_properties(out: dict[str, Any]) -> None:
    """Move patterns that match only listed names from ``patternProperties`` to ``properties``.

    LLGuidance would allow the names a second time otherwise.
    """
    listed = out.get("properties", {})
    patterns = out.get("patternProperties", {})
    for pattern in list(patterns):
        words = literals(pattern)
        if not words or not listed.keys() >= set(words):
            continue
        part = patterns.pop(pattern)
        if part is True or part == {}:
            continue
        for word in words:
            listed[word] = {"allOf": [listed[word], part]}


def _add_conjuncts(out: dict[str, Any], extra: list[Any]) -> dict[str, Any]:
    """Add schemas that must hold in addition to the keywords of `out`."""
    if len(extra) == 1:
        [schema] = extra
        if isinstance(schema, dict) and not schema.keys() & out.keys():
            out.update(schema)
            return out
    if extra:
        out["allOf"] = [*out.get("allOf", ()), *extra]
    return out
