"""One rule per keyword that grammar backends cannot take as it stands."""

from __future__ import annotations

from typing import Any

from graft.grammar.schema.rewrite.objects import (
    contains,
    dependencies,
    distinct,
    property_count,
    property_names,
)
from graft.grammar.schema.rewrite.rewriter import Rewriter, Rule, Site
from graft.grammar.schema.rewrite.strings import FORMATS, HOSTNAME, ecma_pattern
from graft.grammar.schema.terms import (
    KINDS,
    Cannot,
    Kinds,
    Reason,
    any_of,
    kinds_of,
    meet,
    required_of,
    word_set,
)

__all__ = ["RULES"]

_KEPT_FORMATS = word_set("duration email ipv4 uuid uri")
_REFUSED_FORMATS = word_set(
    "hostname idn-hostname idn-email regex iri iri-reference uri-template relative-json-pointer"
)
_NARROWED_FORMATS = {
    "email": "quoted local parts and numeric domains are not produced",
    "time": "leap seconds are not produced",
    "date-time": "leap seconds are not produced",
}
_NOT_ABOUT_VALUES = word_set("oneOf $schema $id id $defs definitions")
_PLAIN = word_set("type enum const title description default examples $comment")
_MOST_OVERLAPS = 40
_INNER = {"array": ("items", "minItems"), "object": ("additionalProperties", "minProperties")}


def _one_of(to: Rewriter, value: Any, site: Site) -> None:
    here = f"{site.at}/oneOf"
    before = len(to.narrowed)
    made = [to.schema(part, f"{here}/{i}", site.kinds) for i, part in enumerate(value)]
    # What a narrowed option leaves out still counts when another one is to exclude it.
    tested = made if len(to.narrowed) == before else value
    base = {k: part for k, part in site.out.items() if k not in _NOT_ABOUT_VALUES}
    overlaps: dict[int, list[int]] = {}
    for i in range(len(value)):
        for j in range(i):
            if not to.disjoint.proved(tested[i], tested[j], base):
                overlaps.setdefault(i, []).append(j)
                overlaps.setdefault(j, []).append(i)
    if not overlaps:
        site.extra.append({"anyOf": made})
        return
    try:
        if sum(map(len, overlaps.values())) > _MOST_OVERLAPS:
            raise Cannot("oneOf", f"with {len(value)} options too much is to be excluded")
        options = []
        narrowed = []
        for i, part in enumerate(made):
            kinds = meet(site.kinds, kinds_of(value[i]))
            names = _closed_names(to, value[i])
            if names is None:
                names = _closed_names(to, site.schema)
            missing: list[Cannot] = []
            others = [
                _share_only_empty(to, value[i], value[j])
                or _without(to, (value[i], value[j]), base, kinds, names, missing)
                for j in overlaps.get(i, ())
            ]
            if False not in others:
                apart = [to.fresh(o, f"{here}/{i}", kinds) for o in others if o is not True]
                if missing and to.disjoint.proved(part, {"allOf": apart}, base):
                    raise missing[0]  # nothing of the option would be left
                options.append({"allOf": [part, *apart]} if apart else part)
            narrowed += [Reason(f"{here}/{i}", "oneOf", f"leaves values out: {m}") for m in missing]
    except Cannot as error:
        to.lose(site.at, "oneOf", f"options may overlap, and {error}")
        site.extra.append({"anyOf": made})
        return
    to.narrowed += narrowed
    site.extra.append({"anyOf": options} if options else False)


def _without(
    to: Rewriter,
    pair: tuple[Any, Any],
    base: Any,
    kinds: Kinds,
    names: frozenset[str] | None,
    missing: list[Cannot],
) -> Any:
    """What else to ask of the first of a pair so that the second refuses it.

    Values of types of which they share none need nothing more. What has no words is left out and
    added to ``missing``.
    """

    def complement(kinds: Kinds) -> Any:
        found, left_out = to.negation.most_of(pair[1], kinds, names)
        missing.extend([] if left_out is None else [left_out])
        return found

    shared = frozenset(
        kind for kind in kinds if not to.disjoint.proved(*pair, base, frozenset((kind,)))
    )
    if shared == kinds:
        return complement(kinds)
    options: list[Any] = [{"type": sorted(kinds - shared)}]
    rest = complement(shared) if shared else False
    if rest is not False:
        options.append({"allOf": [{"type": sorted(shared)}, rest]})
    return any_of(options)


def _share_only_empty(to: Rewriter, one: Any, other: Any) -> dict[str, Any] | None:
    """What else to ask of the first, if nothing but ``[]`` or ``{}`` fits both."""
    one = to.references.behind(one)
    other = to.references.behind(other)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None
    kind = one.get("type")
    part, least = _INNER.get(str(kind), ("", ""))
    for schema in (one, other):
        if schema.get("type") != kind or not isinstance(schema.get(part), dict):
            return None
        if schema.keys() & {"properties", "patternProperties", "prefixItems", "$ref"}:
            return None
    return {least: 1} if to.disjoint.proved(one[part], other[part]) else None


def _not(to: Rewriter, value: Any, site: Site) -> None:
    names = _closed_names(to, site.schema)
    complement = to.negation.of(value, site.kinds, names)
    site.extra.append(to.fresh(complement, f"{site.at}/not", site.kinds))


def _if(to: Rewriter, value: Any, site: Site) -> None:
    then = site.schema.get("then", True)
    other = site.schema.get("else", True)
    if then is True and other is True:
        return
    if then is True:
        options = [value, other]  # "not C implies E"
    else:
        options = [{"allOf": [value, then]}]
        names = _closed_names(to, site.schema)
        rest = to.negation.of(value, site.kinds, names)
        options.append(rest if other is True else {"allOf": [rest, other]})
    site.extra.append(to.fresh({"anyOf": options}, f"{site.at}/if", site.kinds))


def _said_elsewhere(to: Rewriter, value: Any, site: Site) -> None:
    """The keyword is looked at together with another."""


def _dependencies(to: Rewriter, value: Any, site: Site) -> None:
    parts = dependencies(value, required_of(site.schema))
    site.extra += [to.fresh(part, f"{site.at}/dependencies", site.kinds) for part in parts]


def _property_names(to: Rewriter, value: Any, site: Site) -> None:
    for keyword, part in property_names(value, site.schema).items():
        if keyword == "maxProperties":
            site.extra.append({keyword: part})
        else:
            to.keyword_again(keyword, part, site)


def _property_counts(to: Rewriter, value: Any, site: Site) -> None:
    bounds = {k: int(site.schema[k]) for k in _COUNTS if k in site.schema}
    needed = len(set(required_of(site.schema)))
    options = property_count({**site.schema, **{k: site.out[k] for k in _OBJECT if k in site.out}})
    if options is None:
        site.out.update(bounds)
    elif options:
        site.extra.append({"anyOf": options})
    elif not bounds.get("minProperties", 0) <= needed <= bounds.get("maxProperties", needed):
        site.extra.append({"type": sorted(site.kinds - {"object"})})


def _max_properties(to: Rewriter, value: Any, site: Site) -> None:
    if "minProperties" not in site.schema:  # which looks at both
        _property_counts(to, value, site)


_COUNTS = ("minProperties", "maxProperties")
_OBJECT = ("properties", "patternProperties", "additionalProperties")


def _unique_items(to: Rewriter, value: Any, site: Site) -> None:
    if value is not True:
        return
    options = distinct(site.schema, _few(to, site.schema.get("items", True)))
    if options is not None:
        options += _other_kinds(site)
        site.extra.append({"anyOf": options} if options else False)


def _other_kinds(site: Site) -> list[Any]:
    """What is no array."""
    others = sorted(site.kinds - {"array"})
    return [{"type": others}] if others else []


def _contains(to: Rewriter, value: Any, site: Site) -> None:
    options = contains(value, site.schema, "prefixItems" if to.draft >= 2020 else "items")
    options += _other_kinds(site)
    site.extra.append(to.fresh({"anyOf": options}, f"{site.at}/contains", site.kinds))


def _format(to: Rewriter, value: Any, site: Site) -> None:
    """Others are not of the standard: annotations, as all are where none is asserted."""
    if not to.assert_formats:
        return
    if value in _KEPT_FORMATS:
        site.out["format"] = value
    elif value in FORMATS:
        site.extra.append({"pattern": FORMATS[value]})
    elif value == "hostname" and to.draft <= 6:  # later ones judge punycode as well
        site.extra.append({"pattern": HOSTNAME, "maxLength": 253})
    elif value in _REFUSED_FORMATS:
        raise Cannot("format", f"{value!r} cannot be enforced exactly")
    if value in _NARROWED_FORMATS:
        to.narrowed.append(Reason(site.at, "format", _NARROWED_FORMATS[value]))


def _pattern(to: Rewriter, value: Any, site: Site) -> None:
    site.out["pattern"] = ecma_pattern(value)


def _few(to: Rewriter, items: Any) -> list[Any] | None:
    """All values of a schema, if it lists them and says nothing else."""
    items = to.references.behind(items)
    if not isinstance(items, dict) or "enum" not in items or items.keys() - _PLAIN:
        return None
    kinds = kinds_of({"type": items["type"]}) if "type" in items else KINDS
    if any(not kinds & kinds_of({"const": value}) for value in items["enum"]):
        return None
    return [v for i, v in enumerate(items["enum"]) if v not in items["enum"][:i]]


def _closed_names(to: Rewriter, schema: Any) -> frozenset[str] | None:
    """The only names that properties can have, if a schema says so itself."""
    schema = to.references.behind(schema)
    if not isinstance(schema, dict) or schema.get("additionalProperties") is not False:
        return None
    return None if schema.get("patternProperties") else frozenset(schema.get("properties", ()))


#: What happens to each keyword: a rule adds to the site or raises `Cannot`.
RULES: dict[str, Rule] = {
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    **dict.fromkeys(("then", "else", "minContains", "maxContains"), _said_elsewhere),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), _dependencies),
    "propertyNames": _property_names,
    "minProperties": _property_counts,
    "maxProperties": _max_properties,
    "uniqueItems": _unique_items,
    "contains": _contains,
    "format": _format,
    "pattern": _pattern,
}
