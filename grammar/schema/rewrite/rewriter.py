"""Rewrites a JSON schema into an equivalent one that grammar backends can enforce.

Grammar backends have no complement and no counting across an object, so ``not``, ``oneOf``,
``if``, ``dependencies``, ``propertyNames``, ``uniqueItems`` and the property counts are spelled out
as unions and intersections where that is exact: formats outside the standard are annotations and
go, options of a ``oneOf`` that exclude each other are an ``anyOf``, and so on. What has no exact
form is left out of the result and reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..terms import (
    KINDS,
    Cannot,
    Kinds,
    Reason,
    References,
    dialect,
    escape,
    kinds_of,
    meet,
    word_set,
)
from .disjoint import Disjointness, Oracle
from .negate import Negation
from .normal import normal
from .rules import RULES, Site, Tools, property_counts, relevant
from .strings import ecma_pattern

__all__ = ["Rewritten", "rewrite"]

_MAPS = word_set("properties patternProperties $defs definitions")
_LISTS = word_set("allOf anyOf prefixItems")
_SINGLE = word_set("additionalProperties additionalItems items")
_COUNTS = word_set("minLength maxLength minItems maxItems")
_NEVER = word_set(
    """unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef extends disallow
    divisibleBy"""
)
_DRAFT_3 = frozenset(("extends", "disallow", "divisibleBy"))


@dataclass(frozen=True)
class Rewritten:
    """The outcome.

    Attributes
    ----------
    schema
        The new schema; the parts named in ``lost`` are missing from it, so it allows more.
    lost
        What could not be said exactly.
    changed
        What was rewritten, for the curious.
    narrowed
        Where the new schema allows less: values that have no exact form beside others that do.
    home
        Where the document's draft puts definitions: ``"$defs"`` or ``"definitions"``.
    """

    schema: Any
    lost: tuple[Reason, ...]
    changed: tuple[Reason, ...]
    narrowed: tuple[Reason, ...]
    home: str


def rewrite(
    schema: Any, *, draft: int = 2020, oracle: Oracle | None = None,
    assert_formats: bool | None = None,
) -> Rewritten:  # fmt: skip
    """Rewrite a schema.

    Parameters
    ----------
    schema
        Parsed JSON. It is not changed.
    draft
        Draft of schemas that do not name theirs in ``$schema``: 3, 4, 6, 7, 2019 or 2020.
    oracle
        See `Disjointness`.
    assert_formats
        Whether formats are enforced; None: unless ``$schema`` names a draft to which they are
        annotations.
    """
    if assert_formats is None:
        assert_formats = dialect(schema, 7) <= 7
    draft = dialect(schema, draft)
    schema, ignored = normal(schema, draft)
    worker = _Rewriter(schema, draft, oracle)
    worker.assert_formats = assert_formats
    worker.changed += ignored
    new = worker.whole(schema)
    lost, changed, narrowed = (
        tuple(dict.fromkeys(found)) for found in (worker.lost, worker.changed, worker.narrowed)
    )
    return Rewritten(new, lost, changed, narrowed, worker.home)


class _Rewriter(Tools):
    def __init__(self, root: Any, draft: int, oracle: Oracle | None):
        references = References(root)
        definitions = (
            {k: root[k] for k in ("$schema", "$defs", "definitions") if k in root}
            if isinstance(root, dict)
            else {}
        )
        self.lost: list[Reason] = []
        self.changed: list[Reason] = []
        self.narrowed: list[Reason] = []
        self.draft = draft
        self.references = references
        self.negation = Negation(references, draft)
        self.disjoint = Disjointness(references, oracle, definitions)
        self.home = "definitions" if draft <= 7 else "$defs"
        self._aliases: dict[str, str] = {}  # pointer -> name of the copy among the definitions
        self._pointers: list[str] = []

    def whole(self, root: Any) -> Any:
        """Rewrite the document, and what its pointers point to when that place moves."""
        new = self.schema(root, "#", KINDS)
        if isinstance(new, dict):
            for pointer in self._pointers:  # grows while copies are made
                target = self.references.resolve(f"#{pointer}")
                copy = self.schema(target, f"#{pointer}", KINDS)
                new.setdefault(self.home, {})[self._aliases[pointer]] = copy
        return new

    def schema(self, schema: Any, at: str, kinds: Kinds) -> Any:
        """One schema and all below it; only values of the given types will be tried on it."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.lose(at, "schema", f"{str(schema)[:40]!r} is neither an object nor a boolean")
            return True
        site = Site(schema, at, meet(kinds, kinds_of(schema)))
        for keyword, value in sorted(schema.items(), key=lambda item: item[0] == "oneOf"):
            try:
                self._keyword(keyword, value, site)
            except Cannot as error:
                self.lose(at, keyword, error.why)
            except (TypeError, ValueError, AttributeError, KeyError):  # where a $ref alone leads
                self.lose(at, keyword, f"cannot be read: {str(value)[:40]}")
        try:
            property_counts(self, site)
        except Cannot as error:
            self.lose(at, "minProperties" if "minProperties" in schema else "maxProperties",
                      error.why)  # fmt: skip
        return _with(site.out, [part for part in site.extra if part is not True])

    def keyword_again(self, keyword: str, value: Any, site: Site) -> None:
        """Rewrite a keyword that a rule has replaced."""
        site.out.pop(keyword, None)
        self._keyword(keyword, value, site)

    def _keyword(self, keyword: str, value: Any, site: Site) -> None:
        here, out = f"{site.at}/{escape(keyword)}", site.out
        if keyword in RULES:
            if relevant(keyword, site.kinds):
                RULES[keyword](self, value, site)
        elif keyword in _NEVER and (self.draft == 3 or keyword not in _DRAFT_3):
            if relevant(keyword, site.kinds):
                raise Cannot(keyword, "cannot be enforced")
        elif keyword == "nullable":
            if value is True and "null" not in site.kinds:
                why = "OpenAPI's, an annotation here: null is not produced unless type lists it"
                self.narrowed.append(Reason(site.at, keyword, why))
        elif keyword == "x-guidance":
            return  # would switch LLGuidance's own strictness off
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
        elif keyword in _LISTS and not (isinstance(value, list) and value):
            raise Cannot(keyword, "must be a list of schemas")
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
        return f"#/{self.home}/{self._aliases[pointer]}"


def _with(out: dict[str, Any], extra: list[Any]) -> dict[str, Any]:
    """Add conjuncts to what is already there."""
    if len(extra) == 1 and isinstance(extra[0], dict) and not (extra[0].keys() & out.keys()):
        out.update(extra[0])
    elif extra:
        out["allOf"] = [*out.get("allOf", ()), *extra]
    return out
