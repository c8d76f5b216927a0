"""One rule per keyword that grammar backends cannot take as it stands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..terms import (
    Cannot,
    Kinds,
    Reason,
    References,
    any_of,
    kinds_of,
    meet,
    word_set,
)
from .disjoint import Disjointness
from .negate import Negation
from .objects import contains, dependencies, distinct, property_count, property_names
from .strings import FORMATS, HOSTNAME, ecma_pattern

__all__ = ["RULES", "Site", "Tools", "property_counts", "relevant"]

_KEPT_FORMATS = word_set("duration email ipv4 uuid uri")
_REFUSED_FORMATS = word_set("hostname idn-hostname idn-email regex")
_BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_NOT_ABOUT_VALUES = word_set("oneOf $schema $id id $defs definitions")
_PLAIN = word_set("type enum const title description default examples $comment")
_MOST_OVERLAPS = 40


@dataclass
class Site:
    """A schema being rewritten.

    Attributes
    ----------
    schema
        As it was.
    at
        Its JSON pointer.
    kinds
        Types that its values can have.
    out
        The new schema so far.
    extra
        Schemas that must hold as well.
    """

    schema: dict[str, Any]
    at: str
    kinds: Kinds
    out: dict[str, Any] = field(default_factory=dict)
    extra: list[Any] = field(default_factory=list)


class Tools(ABC):
    """What rules work with; the rewriter fills it in."""

    lost: list[Reason]
    changed: list[Reason]
    narrowed: list[Reason]
    draft: int
    assert_formats: bool
    references: References
    negation: Negation
    disjoint: Disjointness

    @abstractmethod
    def schema(self, schema: Any, at: str, kinds: Kinds) -> Any:
        """Rewrite a schema."""

    @abstractmethod
    def keyword_again(self, keyword: str, value: Any, site: Site) -> None:
        """Rewrite a keyword that a rule has replaced."""

    def lose(self, at: str, keyword: str, why: str) -> None:
        """Report what has no exact form."""
        self.lost.append(Reason(at, keyword, why))

    def note(self, at: str, keyword: str, why: str) -> None:
        """Report what was rewritten."""
        self.changed.append(Reason(at, keyword, why))

    def fresh(self, schema: Any, at: str, kinds: Kinds) -> Any:
        """Rewrite a schema that a rule has made; `Cannot` if part of it is lost."""
        before = len(self.lost)
        new = self.schema(schema, at, kinds)
        if len(self.lost) > before:
            reason = self.lost[before]
            del self.lost[before:]
            raise Cannot(reason.keyword, reason.why)
        return new


def _one_of(tools: Tools, value: Any, site: Site) -> None:
    if not isinstance(value, list) or not value:
        raise Cannot("oneOf", "must be a list of schemas")
    here = f"{site.at}/oneOf"
    before = len(tools.narrowed)
    made = [tools.schema(part, f"{here}/{i}", site.kinds) for i, part in enumerate(value)]
    # What a narrowed option leaves out still counts when another one is to exclude it.
    tested = made if len(tools.narrowed) == before else value
    base = {k: part for k, part in site.out.items() if k not in _NOT_ABOUT_VALUES}
    overlaps: dict[int, list[int]] = {}
    for i in range(len(value)):
        for j in range(i):
            if not tools.disjoint.proved(tested[i], tested[j], base):
                overlaps.setdefault(i, []).append(j)
                overlaps.setdefault(j, []).append(i)
    if not overlaps:
        tools.note(site.at, "oneOf", "its options exclude each other, so it is anyOf")
        site.extra.append({"anyOf": made})
        return
    try:
        if sum(map(len, overlaps.values())) > _MOST_OVERLAPS:
            raise Cannot("oneOf", f"with {len(value)} options too much is to be excluded")
        options, narrowed = [], []
        for i, part in enumerate(made):
            kinds = meet(site.kinds, kinds_of(value[i]))
            names = _closed_names(value[i], tools.references)
            if names is None:
                names = _closed_names(site.schema, tools.references)
            missing: list[Cannot] = []
            others = [
                _share_only_empty(tools, value[i], value[j])
                or _without(tools, (value[i], value[j]), base, kinds, names, missing)
                for j in overlaps.get(i, ())
            ]
            if False not in others:
                apart = [tools.fresh(o, f"{here}/{i}", kinds) for o in others if o is not True]
                if missing and tools.disjoint.proved(part, {"allOf": apart}, base):
                    raise missing[0]  # nothing of the option would be left
                options.append({"allOf": [part, *apart]} if apart else part)
            narrowed += [Reason(f"{here}/{i}", "oneOf", f"leaves values out: {m}") for m in missing]
    except Cannot as error:
        tools.lose(site.at, "oneOf", f"options may overlap, and {error}")
        site.extra.append({"anyOf": made})
        return
    tools.narrowed += narrowed
    tools.note(site.at, "oneOf", "its overlapping options exclude each other explicitly")
    site.extra.append({"anyOf": options} if options else False)


def _without(
    tools: Tools, pair: tuple[Any, Any], base: Any, kinds: Kinds, names: frozenset[str] | None,
    missing: list[Cannot],
) -> Any:  # fmt: skip
    """What else to ask of the first of a pair so that the second refuses it.

    Values of types of which they share none need nothing more. What has no words is left out and
    added to ``missing``.
    """

    def complement(kinds: Kinds) -> Any:
        found, left_out = tools.negation.most_of(pair[1], kinds, names)
        missing.extend([] if left_out is None else [left_out])
        return found

    shared = frozenset(
        kind for kind in kinds
        if not tools.disjoint.proved(*pair, base, frozenset((kind,)))
    )  # fmt: skip
    if shared == kinds:
        return complement(kinds)
    options: list[Any] = [{"type": sorted(kinds - shared)}]
    rest = complement(shared) if shared else False
    if rest is not False:
        options.append({"allOf": [{"type": sorted(shared)}, rest]})
    return any_of(options)


def _share_only_empty(tools: Tools, one: Any, other: Any) -> dict[str, Any] | None:
    """What else to ask of the first, if nothing but ``[]`` or ``{}`` fits both."""
    one, other = tools.references.behind(one), tools.references.behind(other)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None
    kind = one.get("type")
    part, least = {"array": ("items", "minItems"), "object": ("additionalProperties",
                   "minProperties")}.get(str(kind), ("", ""))  # fmt: skip
    for schema in (one, other):
        if schema.get("type") != kind or not isinstance(schema.get(part), dict):
            return None
        if schema.keys() & {"properties", "patternProperties", "prefixItems", "$ref"}:
            return None
    return {least: 1} if tools.disjoint.proved(one[part], other[part]) else None


def _listed(site: Site) -> frozenset[str]:
    properties = site.schema.get("properties")
    return frozenset(properties) if isinstance(properties, dict) else frozenset()


def _not(tools: Tools, value: Any, site: Site) -> None:
    names = _closed_names(site.schema, tools.references)
    complement = tools.negation.of(value, site.kinds, names, _listed(site))
    site.extra.append(tools.fresh(complement, f"{site.at}/not", site.kinds))
    tools.note(site.at, "not", "is spelled out as what remains")


def _if(tools: Tools, value: Any, site: Site) -> None:
    then, other = site.schema.get("then", True), site.schema.get("else", True)
    if then is True and other is True:
        return
    if then is True:
        options = [value, other]  # "not C implies E"
    else:
        options = [{"allOf": [value, then]}]
        names = _closed_names(site.schema, tools.references)
        rest = tools.negation.of(value, site.kinds, names, _listed(site))
        options.append(rest if other is True else {"allOf": [rest, other]})
    site.extra.append(tools.fresh({"anyOf": options}, f"{site.at}/if", site.kinds))
    tools.note(site.at, "if", "is spelled out as both of its cases")


def _said_elsewhere(tools: Tools, value: Any, site: Site) -> None:
    """The keyword is looked at together with another."""


def _dependencies(tools: Tools, value: Any, site: Site) -> None:
    parts = dependencies(value, site.schema.get("required"))
    site.extra += [tools.fresh(part, f"{site.at}/dependencies", site.kinds) for part in parts]
    tools.note(site.at, "dependencies", "are spelled out by which properties are there")


def _property_names(tools: Tools, value: Any, site: Site) -> None:
    for keyword, part in property_names(value, site.schema).items():
        if keyword == "maxProperties":
            site.extra.append({keyword: part})
        else:
            tools.keyword_again(keyword, part, site)
    tools.note(site.at, "propertyNames", "has become patternProperties")


def property_counts(tools: Tools, site: Site) -> None:
    """``minProperties`` and ``maxProperties``, after all other keywords."""
    bounds = {k: site.schema[k] for k in ("minProperties", "maxProperties") if k in site.schema}
    if not bounds or "object" not in site.kinds:
        return
    for keyword, bound in bounds.items():
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or bound != int(bound):
            raise Cannot(keyword, f"{bound!r} is no whole number")
    needed = len(set(site.schema.get("required") or ()))
    options = property_count({**site.schema, **{k: site.out[k] for k in _OBJECT if k in site.out}})
    if options is None:
        site.out.update({keyword: int(bound) for keyword, bound in bounds.items()})
    elif options:
        site.extra.append({"anyOf": options})
        tools.note(site.at, "minProperties", "is spelled out by which properties are there")
    elif not bounds.get("minProperties", 0) <= needed <= bounds.get("maxProperties", needed):
        site.extra.append({"type": sorted(site.kinds - {"object"})})


_OBJECT = ("properties", "patternProperties", "additionalProperties")


def _unique_items(tools: Tools, value: Any, site: Site) -> None:
    if value is not True:
        return
    items = site.schema.get("items", True)
    options = distinct(site.schema, _few(items, tools.references))
    if options is not None:
        others = sorted(site.kinds - {"array"})
        if others:
            options = [*options, {"type": others}]
        site.extra.append({"anyOf": options} if options else False)
        tools.note(site.at, "uniqueItems", "every order of different items is spelled out")


def _contains(tools: Tools, value: Any, site: Site) -> None:
    options = contains(value, site.schema, "prefixItems" if tools.draft >= 2020 else "items")
    others = sorted(site.kinds - {"array"})
    if others:
        options = [*options, {"type": others}]
    site.extra.append(tools.fresh({"anyOf": options}, f"{site.at}/contains", site.kinds))
    tools.note(site.at, "contains", "is spelled out as the places where it may stand")


def _format(tools: Tools, value: Any, site: Site) -> None:
    if not tools.assert_formats:
        tools.note(site.at, "format", "an annotation to this draft; assert_formats enforces it")
    elif value in _KEPT_FORMATS:
        site.out["format"] = value
        if value == "email":
            why = "quoted local parts and numeric domains are not produced"
            tools.narrowed.append(Reason(site.at, "format", why))
    elif value in FORMATS:
        site.extra += [{"pattern": pattern} for pattern in FORMATS[value]]
    elif value == "hostname" and tools.draft <= 6:  # later ones judge punycode as well
        site.extra.append({"pattern": HOSTNAME, "maxLength": 253})
    elif value in _REFUSED_FORMATS:
        raise Cannot("format", f"{value!r} cannot be enforced exactly")
    else:
        tools.note(site.at, "format", f"{value!r} is not of the standard: an annotation")


def _pattern(tools: Tools, value: Any, site: Site) -> None:
    site.out["pattern"] = ecma_pattern(value)


def _content(tools: Tools, value: Any, site: Site) -> None:
    """Assertions that draft 7 leaves to the implementation; annotations in other drafts."""
    if tools.draft != 7:
        return
    if "contentMediaType" in site.schema:
        raise Cannot("contentMediaType", "what a string contains cannot be enforced")
    if value == "base64":
        site.extra.append({"pattern": _BASE64})
    elif value not in ("7bit", "8bit", "binary"):
        raise Cannot("contentEncoding", f"{value!r} cannot be enforced")


def _few(items: Any, references: References) -> list[Any] | None:
    """All values of a schema, if its own keywords list them."""
    if isinstance(items, dict) and "$ref" in items:
        items = references.resolve(items["$ref"])
    if not isinstance(items, dict) or items.keys() - _PLAIN:
        return None
    kinds = kinds_of(items)
    if "const" in items:
        values = [items["const"]]
    elif "enum" in items:
        values = items["enum"]
    elif kinds <= {"boolean", "null"}:
        values = [True, False, None]
    else:
        return None
    return [v for i, v in enumerate(values) if _is_of(v, kinds) and v not in values[:i]]


def _is_of(value: Any, kinds: Kinds) -> bool:
    if kinds & kinds_of({"const": value}):
        return True
    return "integer" in kinds and isinstance(value, (int, float)) and float(value).is_integer()


def _closed_names(schema: Any, references: References) -> frozenset[str] | None:
    """The only names that properties can have, if a schema says so itself."""
    schema = references.behind(schema)
    if not isinstance(schema, dict) or schema.get("additionalProperties") is not False:
        return None
    if schema.get("patternProperties"):
        return None
    return frozenset(schema.get("properties") or ())


Rule = Callable[[Tools, Any, Site], None]

#: What happens to each keyword: a rule adds to the site or raises `Cannot`.
RULES: dict[str, Rule] = {
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "then": _said_elsewhere,
    "else": _said_elsewhere,
    "dependencies": _dependencies,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependencies,
    "propertyNames": _property_names,
    "minProperties": _said_elsewhere,
    "maxProperties": _said_elsewhere,
    "uniqueItems": _unique_items,
    "contains": _contains,
    "minContains": _said_elsewhere,
    "maxContains": _said_elsewhere,
    "format": _format,
    "pattern": _pattern,
    "contentEncoding": _content,
    "contentMediaType": _content,
}
_ABOUT = {
    **dict.fromkeys(("format", "pattern", "contentEncoding", "contentMediaType"), "string"),
    **dict.fromkeys(("uniqueItems", "contains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas", "propertyNames",
                     "unevaluatedProperties"), "object"),
}  # fmt: skip


def relevant(keyword: str, kinds: Kinds) -> bool:
    """Whether values of these types can meet the keyword at all."""
    return keyword not in _ABOUT or _ABOUT[keyword] in kinds
