"""Traverse a schema, apply the rewriting rules, and report the parts without an exact form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.grammar.schema.documents import (
    JSON_TYPES,
    JsonTypes,
    SchemaObject,
    can_combine,
    common_types,
    escape,
    required_of,
    subschemas,
    types_of,
    word_set,
)
from graft.grammar.schema.reasons import NoExactForm, Reason
from graft.grammar.schema.references import References
from graft.grammar.schema.rewrite.disjoint import Disjointness
from graft.grammar.schema.rewrite.listed import ListedValues
from graft.grammar.schema.rewrite.negate import Negation
from graft.grammar.schema.rewrite.numbers import BOUNDS, Numbers
from graft.grammar.schema.rewrite.patterns import DisjointPatterns, plain_pattern
from graft.grammar.schema.rewrite.strings import literals

__all__ = ["Rewriter", "Rule", "Site"]

_MAPS = word_set("properties patternProperties $defs definitions")
_LISTS = word_set("allOf anyOf prefixItems")
_SINGLE = word_set("additionalProperties additionalItems items")
_COUNTS = word_set("minLength maxLength minItems maxItems")
_UNSUPPORTED = word_set(
    """unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef extends disallow
    divisibleBy"""
)
_APPLICATORS = word_set("allOf anyOf oneOf $ref const enum")
#: Pairs of keywords. The meaning of the second keyword depends on the first.
_ADJACENT = (("patternProperties", "additionalProperties"), ("items", "additionalItems"))
_NUMERIC = word_set("number integer")
_DRAFT_3 = frozenset(("extends", "disallow", "divisibleBy"))
#: Keywords that are removed, because they are annotations. ``x-guidance`` would change LLGuidance's
#: options.
_REMOVED = ("x-guidance", "contentEncoding", "contentMediaType")

#: JSON type of the values that each keyword constrains. All values of other types are valid.
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
#: Keywords are rewritten in the order of their rank. The rules of the keywords with a rank above 0
#: read the rewritten form of other keywords. Keywords that are not listed here have rank 0.
_LAST = {"oneOf": 1, "minProperties": 2, "maxProperties": 2}


@dataclass
class Site:
    """A subschema that is being rewritten.

    Attributes
    ----------
    schema
        The original subschema.
    at
        JSON pointer of the subschema.
    types
        JSON types that values of the subschema can have. Keywords for other types have no effect.
    out
        The new subschema: the keywords that have been rewritten so far.
    extra
        Schemas that values must satisfy in addition to the keywords in `out`.
    """

    schema: SchemaObject
    at: str
    types: JsonTypes
    out: SchemaObject = field(default_factory=dict)
    extra: list[Any] = field(default_factory=list)


class Rewriter:
    """Rewrites one document.

    Parameters
    ----------
    root
        The normalized document.
    draft
        JSON schema draft of the document: 3, 4, 6, 7, 2019 or 2020.
    assert_formats
        Whether ``format`` is enforced.
    rules
        Rewriting rules by keyword. A keyword without a rule is copied, and its subschemas are
        rewritten.
    for_automaton, for_lark
        As in `rewrite`.
    keep_unique_items
        Whether keywords ``uniqueItems`` without an equivalent form are kept.

    Attributes
    ----------
    lost, narrowed
        Parts without an exact form, and parts whose new form excludes valid values; see
        `Rewritten`. Both lists may have duplicates.
    has_unique_items
        Whether a keyword ``uniqueItems`` was kept.
    references, negation, disjoint
        References, complements and disjointness proofs of the document. The rules use them.
    """

    def __init__(
        self,
        root: SchemaObject,
        draft: int,
        assert_formats: bool,
        rules: Mapping[str, Rule],
        for_automaton: bool = False,
        for_lark: bool = False,
        keep_unique_items: bool = False,
    ):
        self.lost: list[Reason] = []
        self.narrowed: list[Reason] = []
        self.draft = draft
        self.assert_formats = assert_formats
        self.keeps_contains = for_automaton or for_lark
        self.keep_unique_items = keep_unique_items
        self.has_unique_items = False
        self._rules = rules
        self.references = References(root)
        self.negation = Negation(self.references, draft, for_automaton, for_lark)
        self.disjoint = Disjointness(root, self.references)
        self._listed = ListedValues(self.references, draft, assert_formats)
        parts = subschemas(root)
        self._numbers = Numbers(parts)
        self._disjoint_patterns = DisjointPatterns()
        self._combines = can_combine(parts)
        self._names: set[str] = set()  # names of properties in all subschemas
        for _, part in parts:
            self._names.update(part.get("properties", ()), required_of(part))
        self._definitions_keyword = "definitions" if draft <= 7 else "$defs"
        # Rewriting may move or remove the target of a reference if the target is not a definition.
        # Such a target is copied to the definitions. This dict maps the pointer of the target to
        # the name of the copy.
        self._aliases: dict[str, str] = {}
        self._aliased_pointers: list[str] = []

    def rewrite_document(self, root: SchemaObject) -> SchemaObject:
        """Rewrite the document, and add copies of reference targets to its definitions."""
        new: SchemaObject = self.rewrite(root, "#", JSON_TYPES)
        # `_aliased_pointers` grows during the loop: the copy of a target may contain references to
        # further targets.
        for pointer in self._aliased_pointers:
            target = self.references.resolve(f"#{pointer}")
            copy = self.rewrite(target, f"#{pointer}", JSON_TYPES)
            definitions = new.setdefault(self._definitions_keyword, {})
            definitions[self._aliases[pointer]] = copy
        return new

    def origins(self) -> dict[str, str]:
        """Map the pointer of each added definition to that of the subschema that it copies."""
        keyword = self._definitions_keyword
        return {f"/{keyword}/{name}": pointer for pointer, name in self._aliases.items()}

    def rewrite(self, schema: Any, at: str, types: JsonTypes) -> Any:
        """Return the rewritten form of a schema, and report the parts without an exact form.

        `at` is the JSON pointer of the schema. For values of other JSON types than `types`, the
        result need not be equivalent to the schema.
        """
        if isinstance(schema, bool):
            return schema
        lost_before, narrowed_before = len(self.lost), len(self.narrowed)
        site = Site(schema, at, common_types(types, types_of(schema)))
        keywords = list(schema)
        if not _LAST.keys().isdisjoint(keywords):
            keywords.sort(key=lambda keyword: _LAST.get(keyword, 0))
        for keyword in keywords:
            try:
                self._rewrite_keyword(keyword, schema[keyword], site)
            except NoExactForm as error:
                self.report_lost(at, keyword, error.why)
        if len(self.lost) > lost_before and schema.keys() != {"enum"}:
            with contextlib.suppress(NoExactForm):
                values = self._listed.satisfying(schema)
                if values is not None:
                    del self.lost[lost_before:], self.narrowed[narrowed_before:]
                    return self.rewrite({"enum": values}, at, types) if values else False
        if site.types & _NUMERIC:
            self._restrict_numbers(site)
        self._fold_pattern_properties(site.out)
        for first, second in _ADJACENT:
            _make_adjacent(site.out, first, second)
        return _add_conjuncts(site.out, [part for part in site.extra if part is not True])

    def rewrite_exactly(self, schema: Any, at: str, types: JsonTypes) -> Any:
        """Return the rewritten form of a schema that a rule has created; see `rewrite`.

        Raise `NoExactForm` if a part of the schema has no exact form.
        """
        lost_before = len(self.lost)
        new = self.rewrite(schema, at, types)
        if len(self.lost) > lost_before:
            reason = self.lost[lost_before]
            del self.lost[lost_before:]
            raise NoExactForm(reason.keyword, reason.why)
        return new

    def replace_keyword(self, keyword: str, value: Any, site: Site) -> None:
        """Rewrite `value` and set it as the keyword's value in `site.out`."""
        site.out.pop(keyword, None)
        self._rewrite_keyword(keyword, value, site)

    def report_lost(self, at: str, keyword: str, why: str) -> None:
        """Report that a keyword of the subschema at the JSON pointer `at` has no exact form."""
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
                why = "only OpenAPI defines it; null is not produced unless type lists it"
                self.narrowed.append(Reason(site.at, keyword, why))
        elif keyword in _REMOVED:
            return
        elif keyword not in site.out:  # otherwise, another keyword's rule has already set it
            site.out[keyword] = self._rewritten_value(keyword, value, site)

    def _rewritten_value(self, keyword: str, value: Any, site: Site) -> Any:
        """Return the rewritten value of a keyword that has no rewriting rule."""
        pointer = f"{site.at}/{escape(keyword)}"
        if keyword in _MAPS:
            new: dict[str, Any] = {}
            for name, part in value.items():
                new[name] = self.rewrite(part, f"{pointer}/{escape(name)}", JSON_TYPES)
            return self._plain_patterns(new) if keyword == "patternProperties" else new
        if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            types = site.types if keyword in ("allOf", "anyOf") else JSON_TYPES
            parts = []
            for index, part in enumerate(value):
                parts.append(self.rewrite(part, f"{pointer}/{index}", types))
            return parts
        if keyword in _SINGLE:
            return self.rewrite(value, pointer, JSON_TYPES)
        if keyword == "$ref":
            return self._rewritten_reference(value)
        if keyword in _COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    def _restrict_numbers(self, site: Site) -> None:
        """Replace bounds, ``multipleOf`` and ``enum`` that LLGuidance would enforce inexactly."""
        out = site.out
        for keyword in ("const", "enum"):
            if keyword not in out:
                continue
            values = [out[keyword]] if keyword == "const" else out[keyword]
            written = self._numbers.values(values)
            if not written and values:
                self.report_lost(site.at, keyword, "LLGuidance cannot write the number exactly")
                del out[keyword]
            elif len(written) < len(values):
                out[keyword] = written
                why = "numbers that are not doubles are not produced"
                self.narrowed.append(Reason(site.at, keyword, why))
        old = {key: out[key] for key in (*BOUNDS, "multipleOf") if key in out}
        try:
            numbers = self._numbers.restrict(out, site.types)
        except NoExactForm as error:
            self.report_lost(site.at, error.keyword, error.why)
            for keyword in old:
                del out[keyword]
            return
        for keyword, why in numbers.narrowed.items():
            self.narrowed.append(Reason(site.at, keyword, why))
        # The texts are compared because a dict with 1.0 equals a dict with 1.
        if repr(numbers.keywords) == repr(old) and not numbers.empty:
            return
        for keyword in old:
            del out[keyword]
        others = sorted(site.types - _NUMERIC)
        if not numbers.empty and "enum" not in numbers.keywords:
            out.update(numbers.keywords)
        elif numbers.empty:
            site.extra.append({"type": others} if others else False)
        elif others:
            site.extra.append({"anyOf": [numbers.keywords, {"type": others}]})
        else:
            site.extra.append(numbers.keywords)

    def _fold_pattern_properties(self, out: SchemaObject) -> None:
        """Move patterns that match only names in ``properties`` or ``required`` to ``properties``.

        An example is the pattern ``^(a|b)$`` next to the properties ``a`` and ``b``. Otherwise,
        LLGuidance would allow a comma for a further property even if all names that match the
        pattern are already in the object, and no name could follow.
        """
        patterns = out.get("patternProperties", {})
        for pattern in list(patterns):
            words = literals(pattern)
            names = {*out.get("properties", ()), *required_of(out)}
            if self._combines:  # LLGuidance may combine the subschema with other subschemas
                names |= self._names
            if not words or not names.issuperset(words):
                continue
            part = patterns.pop(pattern)
            listed = out.setdefault("properties", {})
            for word in words:
                if word not in listed:
                    listed[word] = part
                elif part is not True and part != {}:
                    listed[word] = {"allOf": [listed[word], part]}

    def _rewritten_reference(self, reference: Any) -> Any:
        """Return a reference that stays valid if rewriting moves the target.

        If the target is not a definition, the new reference refers to a copy of the target.
        """
        pointer = self.references.pointer(reference)
        if pointer is None or pointer == "":
            return reference
        steps = pointer.split("/")[1:]
        if len(steps) == 2 and steps[0] in ("$defs", "definitions"):
            return reference
        try:
            self.references.resolve(reference)
        except NoExactForm:
            return reference  # the backend reports the missing target
        if pointer not in self._aliases:
            self._aliases[pointer] = f"graft-{len(self._aliases)}"
            self._aliased_pointers.append(pointer)
        return f"#/{self._definitions_keyword}/{self._aliases[pointer]}"

    def _plain_patterns(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return ``patternProperties`` with patterns that LLGuidance enforces.

        LLGuidance requires that no name matches two of the patterns. Patterns with common names are
        therefore replaced.
        """
        matching = self._disjoint_patterns.divide(parts) if len(parts) > 1 else None
        if matching is None:
            matching = {pattern: [pattern] for pattern in parts}
        new: dict[str, Any] = {}
        for pattern, sources in matching.items():
            plain = plain_pattern(pattern)
            if plain is not None:
                schemas = [parts[source] for source in sources]
                new[plain] = schemas[0] if len(schemas) == 1 else {"allOf": schemas}
        return new


Rule = Callable[[Rewriter, Any, Site], None]


def _make_adjacent(out: SchemaObject, first: str, second: str) -> None:
    """Move the keyword `second` directly after `first` if `out` has a keyword of `_APPLICATORS`.

    The keywords of `_APPLICATORS` divide a schema: LLGuidance reads the keywords between two of
    them as a separate schema. One of them between `first` and `second` would therefore separate the
    two.
    """
    if first not in out or second not in out or not _APPLICATORS & out.keys():
        return
    items = list(out.items())
    out.clear()
    for keyword, value in items:
        if keyword == first:
            out[first] = value
            out[second] = dict(items)[second]
        elif keyword != second:
            out[keyword] = value


def _add_conjuncts(out: SchemaObject, extra: list[Any]) -> SchemaObject:
    """Return `out`, extended so that values must also satisfy all schemas in `extra`."""
    if len(extra) == 1:
        [schema] = extra
        if isinstance(schema, dict) and not schema.keys() & out.keys():
            out.update(schema)
            return out
    if extra:
        out["allOf"] = [*out.get("allOf", ()), *extra]
    return out
