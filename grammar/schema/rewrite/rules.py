"""Rewriting rules: one per keyword that grammar backends cannot enforce as written."""

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
    JSON_TYPES,
    JsonTypes,
    NoExactForm,
    Reason,
    any_of,
    common_types,
    required_of,
    types_of,
    word_set,
)

__all__ = ["RULES"]

#: Formats that LLGuidance enforces correctly.
_KEPT_FORMATS = word_set("duration email ipv4 uuid uri")
_REFUSED_FORMATS = word_set(
    "hostname idn-hostname idn-email regex iri iri-reference uri-template relative-json-pointer"
)
_NARROWED_FORMATS = {
    "email": "quoted local parts and numeric domains are not produced",
    "time": "leap seconds are not produced",
    "date-time": "leap seconds are not produced",
}
#: Keywords that do not restrict values by themselves.
_NOT_ABOUT_VALUES = word_set("oneOf $schema $id id $defs definitions")
#: Keywords that do not restrict values beyond a list of them.
_PLAIN = word_set("type enum const title description default examples $comment")
_MAX_OVERLAPS = 40
#: By type: the keyword of its elements, and the keyword of their minimum number.
_ELEMENTS = {"array": ("items", "minItems"), "object": ("additionalProperties", "minProperties")}
_COUNTS = ("minProperties", "maxProperties")
_OBJECT_KEYWORDS = ("properties", "patternProperties", "additionalProperties")


def _one_of(rewriter: Rewriter, value: Any, site: Site) -> None:
    """Replace ``oneOf`` by ``anyOf``: its options are made to exclude each other."""
    pointer = f"{site.at}/oneOf"
    narrowed_before = len(rewriter.narrowed)
    rewritten = [
        rewriter.rewrite(part, f"{pointer}/{i}", site.types) for i, part in enumerate(value)
    ]
    # Values that a narrowed option leaves out still have to be excluded from other options.
    complete = rewritten if len(rewriter.narrowed) == narrowed_before else value
    base = {k: part for k, part in site.out.items() if k not in _NOT_ABOUT_VALUES}
    overlaps = _overlaps(rewriter, complete, base)
    if not overlaps:
        site.extra.append({"anyOf": rewritten})
        return
    try:
        if sum(map(len, overlaps.values())) > _MAX_OVERLAPS:
            raise NoExactForm("oneOf", f"the {len(value)} options overlap in too many pairs")
        options, narrowed = _exclusive_options(rewriter, value, rewritten, overlaps, base, site)
    except NoExactForm as error:
        rewriter.report_lost(site.at, "oneOf", f"options may overlap, and {error}")
        site.extra.append({"anyOf": rewritten})
        return
    rewriter.narrowed += narrowed
    site.extra.append({"anyOf": options} if options else False)


def _overlaps(rewriter: Rewriter, options: list[Any], base: Any) -> dict[int, list[int]]:
    """Return, for each option that may overlap with others, the indices of the others."""
    overlaps: dict[int, list[int]] = {}
    for i in range(len(options)):
        for j in range(i):
            if not rewriter.disjoint.proved(options[i], options[j], base):
                overlaps.setdefault(i, []).append(j)
                overlaps.setdefault(j, []).append(i)
    return overlaps


def _exclusive_options(
    rewriter: Rewriter,
    options: list[Any],
    rewritten: list[Any],
    overlaps: dict[int, list[int]],
    base: Any,
    site: Site,
) -> tuple[list[Any], list[Reason]]:
    """Restrict each option of a ``oneOf`` to the values that no other option allows.

    Parameters
    ----------
    rewriter
        Rewriter of the document.
    options, rewritten
        Options of the ``oneOf``, original and rewritten.
    overlaps
        As returned by `_overlaps`.
    base
        Schema that all options are combined with.
    site
        The subschema with the ``oneOf``.

    Returns
    -------
    tuple
        The restricted options without unsatisfiable ones, and the values that they leave out.
    """
    exclusive: list[Any] = []
    narrowed: list[Reason] = []
    for i, part in enumerate(rewritten):
        pointer = f"{site.at}/oneOf/{i}"
        types = common_types(site.types, types_of(options[i]))
        names = _closed_names(rewriter, options[i])
        if names is None:
            names = _closed_names(rewriter, site.schema)
        omitted: list[NoExactForm] = []
        restrictions = []
        for j in overlaps.get(i, ()):
            restriction = _exclude_empty(rewriter, options[i], options[j])
            if restriction is None:
                pair = (options[i], options[j])
                restriction = _exclude(rewriter, pair, base, types, names, omitted)
            restrictions.append(restriction)
        if False not in restrictions:
            conjuncts = [
                rewriter.rewrite_exactly(restriction, pointer, types)
                for restriction in restrictions
                if restriction is not True
            ]
            if omitted and rewriter.disjoint.proved(part, {"allOf": conjuncts}, base):
                raise omitted[0]  # nothing of the option would remain
            exclusive.append({"allOf": [part, *conjuncts]} if conjuncts else part)
        narrowed += [Reason(pointer, "oneOf", f"leaves values out: {error}") for error in omitted]
    return exclusive, narrowed


def _exclude(
    rewriter: Rewriter,
    pair: tuple[Any, Any],
    base: Any,
    types: JsonTypes,
    names: frozenset[str] | None,
    omitted: list[NoExactForm],
) -> Any:
    """Return a schema that, combined with the first of a pair, excludes the second.

    Values of types that the two do not share are not restricted. Parts of the complement that
    cannot be expressed are left out and appended to `omitted`.
    """

    def complement(types: JsonTypes) -> Any:
        found, error = rewriter.negation.partial_complement(pair[1], types, names)
        if error is not None:
            omitted.append(error)
        return found

    shared = frozenset(
        json_type
        for json_type in types
        if not rewriter.disjoint.proved(*pair, base, frozenset((json_type,)))
    )
    if shared == types:
        return complement(types)
    options: list[Any] = [{"type": sorted(types - shared)}]
    rest = complement(shared) if shared else False
    if rest is not False:
        options.append({"allOf": [{"type": sorted(shared)}, rest]})
    return any_of(options)


def _exclude_empty(rewriter: Rewriter, one: Any, other: Any) -> dict[str, Any] | None:
    """Return a schema that excludes ``[]`` or ``{}`` if the pair shares no other value."""
    one = rewriter.references.follow(one)
    other = rewriter.references.follow(other)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None
    json_type = one.get("type")
    elements, min_elements = _ELEMENTS.get(str(json_type), ("", ""))
    for schema in (one, other):
        if schema.get("type") != json_type or not isinstance(schema.get(elements), dict):
            return None
        if schema.keys() & {"properties", "patternProperties", "prefixItems", "$ref"}:
            return None
    if not rewriter.disjoint.proved(one[elements], other[elements]):
        return None
    return {min_elements: 1}


def _not(rewriter: Rewriter, value: Any, site: Site) -> None:
    names = _closed_names(rewriter, site.schema)
    complement = rewriter.negation.complement(value, site.types, names)
    site.extra.append(rewriter.rewrite_exactly(complement, f"{site.at}/not", site.types))


def _if(rewriter: Rewriter, value: Any, site: Site) -> None:
    """Replace ``if C then T else E`` by ``(C and T) or (not C and E)``."""
    then = site.schema.get("then", True)
    otherwise = site.schema.get("else", True)
    if then is True and otherwise is True:
        return
    if then is True:
        options = [value, otherwise]  # needs no complement
    else:
        names = _closed_names(rewriter, site.schema)
        complement = rewriter.negation.complement(value, site.types, names)
        if otherwise is not True:
            complement = {"allOf": [complement, otherwise]}
        options = [{"allOf": [value, then]}, complement]
    site.extra.append(rewriter.rewrite_exactly({"anyOf": options}, f"{site.at}/if", site.types))


def _handled_elsewhere(rewriter: Rewriter, value: Any, site: Site) -> None:
    """Do nothing: the rule of another keyword reads this one."""


def _dependencies(rewriter: Rewriter, value: Any, site: Site) -> None:
    for part in dependencies(value, required_of(site.schema)):
        pointer = f"{site.at}/dependencies"
        site.extra.append(rewriter.rewrite_exactly(part, pointer, site.types))


def _property_names(rewriter: Rewriter, value: Any, site: Site) -> None:
    for keyword, part in property_names(value, site.schema).items():
        if keyword == "maxProperties":
            site.extra.append({keyword: part})
        else:
            rewriter.replace_keyword(keyword, part, site)


def _property_counts(rewriter: Rewriter, value: Any, site: Site) -> None:
    """Replace ``minProperties`` and ``maxProperties``."""
    bounds = {k: int(site.schema[k]) for k in _COUNTS if k in site.schema}
    required_count = len(set(required_of(site.schema)))
    new_keywords = {k: site.out[k] for k in _OBJECT_KEYWORDS if k in site.out}
    options = property_count({**site.schema, **new_keywords})
    if options is None:
        site.out.update(bounds)
    elif options:
        site.extra.append({"anyOf": options})
    else:
        low = bounds.get("minProperties", 0)
        high = bounds.get("maxProperties", required_count)
        if not low <= required_count <= high:
            site.extra.append({"type": sorted(site.types - {"object"})})


def _max_properties(rewriter: Rewriter, value: Any, site: Site) -> None:
    if "minProperties" not in site.schema:  # its rule handles both
        _property_counts(rewriter, value, site)


def _unique_items(rewriter: Rewriter, value: Any, site: Site) -> None:
    if value is not True:
        return
    options = distinct(site.schema, _listed_values(rewriter, site.schema.get("items", True)))
    if options is not None:
        options += _other_than_arrays(site)
        site.extra.append({"anyOf": options} if options else False)


def _contains(rewriter: Rewriter, value: Any, site: Site) -> None:
    options = contains(value, site.schema, "prefixItems" if rewriter.draft >= 2020 else "items")
    options += _other_than_arrays(site)
    site.extra.append(
        rewriter.rewrite_exactly({"anyOf": options}, f"{site.at}/contains", site.types)
    )


def _other_than_arrays(site: Site) -> list[Any]:
    """Return the schema of all other types that the site allows, if any."""
    others = sorted(site.types - {"array"})
    return [{"type": others}] if others else []


def _format(rewriter: Rewriter, value: Any, site: Site) -> None:
    """Replace ``format``. Formats that the standard does not define are annotations."""
    if not rewriter.assert_formats:
        return
    if value in _KEPT_FORMATS:
        site.out["format"] = value
    elif value in FORMATS:
        site.extra.append({"pattern": FORMATS[value]})
    elif value == "hostname" and rewriter.draft <= 6:  # later drafts also check punycode
        site.extra.append({"pattern": HOSTNAME, "maxLength": 253})
    elif value in _REFUSED_FORMATS:
        raise NoExactForm("format", f"{value!r} cannot be enforced exactly")
    if value in _NARROWED_FORMATS:
        rewriter.narrowed.append(Reason(site.at, "format", _NARROWED_FORMATS[value]))


def _pattern(rewriter: Rewriter, value: Any, site: Site) -> None:
    site.out["pattern"] = ecma_pattern(value)


def _listed_values(rewriter: Rewriter, items: Any) -> list[Any] | None:
    """Return the distinct values of a schema that is an ``enum``; None if it is not."""
    items = rewriter.references.follow(items)
    if not isinstance(items, dict) or "enum" not in items or items.keys() - _PLAIN:
        return None
    types = types_of({"type": items["type"]}) if "type" in items else JSON_TYPES
    if any(not types & types_of({"const": value}) for value in items["enum"]):
        return None
    distinct_values: list[Any] = []
    for value in items["enum"]:
        if value not in distinct_values:
            distinct_values.append(value)
    return distinct_values


def _closed_names(rewriter: Rewriter, schema: Any) -> frozenset[str] | None:
    """Return the only property names that a schema allows; None if it allows others."""
    schema = rewriter.references.follow(schema)
    if not isinstance(schema, dict) or schema.get("additionalProperties") is not False:
        return None
    return None if schema.get("patternProperties") else frozenset(schema.get("properties", ()))


#: Rule of each keyword. A rule adds to the site or raises `NoExactForm`.
RULES: dict[str, Rule] = {
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    **dict.fromkeys(("then", "else", "minContains", "maxContains"), _handled_elsewhere),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), _dependencies),
    "propertyNames": _property_names,
    "minProperties": _property_counts,
    "maxProperties": _max_properties,
    "uniqueItems": _unique_items,
    "contains": _contains,
    "format": _format,
    "pattern": _pattern,
}
