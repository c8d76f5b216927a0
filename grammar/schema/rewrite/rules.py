"""Rewriting rules, one for each keyword that grammar backends cannot enforce as written.

A rule is a function with three arguments: the rewriter of the document, the value of the keyword,
and the `Site`, that is, the subschema with the keyword. The rule adds the replacement (keywords or
schemas) to the site, or raises `NoExactForm`.
"""

from __future__ import annotations

from typing import Any

from graft.grammar.schema.documents import (
    JSON_TYPES,
    ForAutomata,
    JsonTypes,
    SchemaObject,
    any_of,
    common_types,
    required_of,
    types_of,
    without_duplicates,
    word_set,
)
from graft.grammar.schema.reasons import NoExactForm, Reason
from graft.grammar.schema.rewrite.objects import (
    contains,
    dependencies,
    distinct,
    property_count,
    property_names,
)
from graft.grammar.schema.rewrite.patterns import plain_pattern
from graft.grammar.schema.rewrite.rewriter import Rewriter, Rule, Site
from graft.grammar.schema.rewrite.strings import (
    COMPLEMENTED_FORMATS,
    FORMATS,
    HOSTNAME,
    HOSTNAME_WITHOUT_PUNYCODE,
    KNOWN_FORMATS,
)

__all__ = ["RULES"]

#: Formats that LLGuidance enforces correctly.
_KEPT_FORMATS = word_set("duration email ipv4 uuid uri")
_REFUSED_FORMATS = word_set("idn-hostname idn-email")
_NARROWED_FORMATS = {
    "email": "quoted local parts and numeric domains are not produced",
    "time": "leap seconds are not produced",
    "date-time": "leap seconds are not produced",
    "regex": "look-around, references, named groups, escapes of code points, bounds such as {2,3} "
    "and groups in more than three levels are not produced",
    "uri-template": "the operators that RFC 6570 reserves are not produced",
}
#: Keywords of a subschema with ``oneOf`` that are left out when the other keywords of the subschema
#: are combined with each option.
_NOT_ABOUT_VALUES = word_set("oneOf $schema $id id $defs definitions")

#: If a schema has only these keywords, its ``enum`` lists all values that it can allow.
_PLAIN = word_set("type enum const title description default examples $comment")
_MAX_OVERLAPS = 40
#: For arrays and objects: the keyword for the schema of all elements, and the keyword for the
#: minimum number of elements.
_ELEMENTS = {"array": ("items", "minItems"), "object": ("additionalProperties", "minProperties")}
_COUNTS = ("minProperties", "maxProperties")
_OBJECT_KEYWORDS = ("properties", "patternProperties", "additionalProperties")


def _one_of(rewriter: Rewriter, value: Any, site: Site) -> None:
    """Replace ``oneOf`` with an ``anyOf`` whose options exclude each other."""
    narrowed_before = len(rewriter.narrowed)
    rewritten = []
    for index, part in enumerate(value):
        option = rewriter.rewrite(part, f"{site.at}/oneOf/{index}", site.types)
        rewritten.append(option)
    # A value that two options of the ``oneOf`` allow is invalid. If rewriting has excluded values
    # from an option (`narrowed`), the rewritten options no longer show all of these values, so the
    # search for options that overlap uses the options as they were.
    complete = rewritten if len(rewriter.narrowed) == narrowed_before else value
    base = {key: site.out[key] for key in site.out if key not in _NOT_ABOUT_VALUES}
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
    """Return a dict from the index of an option to the indices of the options it may overlap with.

    Only values that satisfy the schema `base` are considered. The dict has no entry for an option
    that is proved disjoint from all other options.
    """
    overlaps: dict[int, list[int]] = {}
    for i in range(len(options)):
        for j in range(i):
            disjoint = rewriter.disjoint.proved(options[i], options[j], base)
            if not disjoint:
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

    `options` are the original options, and `rewritten` their rewritten forms. `overlaps` contains,
    for each option, the indices of the options that may overlap with it. `base` contains the other
    keywords of the subschema, which values must satisfy in addition to an option. The results are
    the restricted options, without unsatisfiable options, and a reason for each group of valid
    values that the options leave out.
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
            conjuncts = []
            for restriction in restrictions:
                if restriction is not True:
                    conjunct = rewriter.rewrite_exactly(restriction, pointer, types)
                    conjuncts.append(conjunct)
            omitted = [
                error for error in omitted if not rewriter.disjoint.proved(part, error.values, base)
            ]
            if omitted and rewriter.disjoint.proved(part, {"allOf": conjuncts}, base):
                raise omitted[0]  # the restricted option would allow no value
            exclusive.append({"allOf": [part, *conjuncts]} if conjuncts else part)
        for error in omitted:
            why = f"some valid values are not produced: {error}"
            narrowed.append(Reason(pointer, "oneOf", why))
    return exclusive, narrowed


def _exclude(
    rewriter: Rewriter,
    pair: tuple[Any, Any],
    base: Any,
    types: JsonTypes,
    names: frozenset[str] | None,
    omitted: list[NoExactForm],
) -> Any:
    """Return a schema that excludes the values of the second option of `pair` from the first.

    The options are those of a ``oneOf``. The caller combines the result with the first option and
    the schema `base`, so the result may allow anything else that these two exclude. It allows all
    values of a JSON type of which no value satisfies the two options of `pair`. `names` are all
    properties that objects can have; None if they can have any name.

    If a part of the second option's complement cannot be expressed, the result does not allow the
    values of this part, and the function appends the error to `omitted`.
    """

    def complement(types: JsonTypes) -> Any:
        found, error = rewriter.negation.partial_complement(pair[1], types, names)
        if error is not None:
            omitted.append(error)
        return found

    disjoint_types = frozenset(
        json_type
        for json_type in types
        if rewriter.disjoint.proved(*pair, base, frozenset((json_type,)))
    )
    shared_types = types - disjoint_types
    if not disjoint_types:
        return complement(types)
    options: list[Any] = [{"type": sorted(disjoint_types)}]
    if shared_types:
        rest = complement(shared_types)
        if rest is not False:
            options.append({"allOf": [{"type": sorted(shared_types)}, rest]})
    return any_of(options)


def _exclude_empty(rewriter: Rewriter, one: Any, other: Any) -> SchemaObject | None:
    """Return a restriction that makes two options of a ``oneOf`` disjoint by excluding one value.

    The value is empty: ``[]`` if both options describe arrays, and ``{}`` if both describe objects.
    No other value satisfies both if their schemas for the elements are disjoint. Return None if the
    function cannot prove this. The caller adds the restriction to one of the options.
    """
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


def _require(rewriter: Rewriter, schema: Any, site: Site, keyword: str) -> None:
    """Replace the keyword `keyword` of the subschema at `site` with the requirement `schema`.

    The values of the subschema must satisfy `schema`. `schema` is rewritten first, because it may
    contain keywords that have rules.
    """
    pointer = f"{site.at}/{keyword}"
    new_schema = rewriter.rewrite_exactly(schema, pointer, site.types)
    site.extra.append(new_schema)


def _not(rewriter: Rewriter, value: Any, site: Site) -> None:
    """Replace ``not`` with the complement of its schema."""
    names = _closed_names(rewriter, site.schema)
    complement = rewriter.negation.complement(value, site.types, names)
    _require(rewriter, complement, site, "not")


def _if(rewriter: Rewriter, value: Any, site: Site) -> None:
    """Replace ``if C then T else E`` with ``(C and T) or (not C and E)``."""
    then = site.schema.get("then", True)
    otherwise = site.schema.get("else", True)
    if then is True and otherwise is True:
        return
    if then is True:
        options = [value, otherwise]  # "C or E" is equivalent and needs no complement of C
    else:
        names = _closed_names(rewriter, site.schema)
        complement = rewriter.negation.complement(value, site.types, names)
        if otherwise is not True:
            complement = {"allOf": [complement, otherwise]}
        options = [{"allOf": [value, then]}, complement]
    _require(rewriter, {"anyOf": options}, site, "if")


def _handled_elsewhere(rewriter: Rewriter, value: Any, site: Site) -> None:
    """Do nothing, because the rule of another keyword reads this keyword."""


def _dependencies(rewriter: Rewriter, value: Any, site: Site) -> None:
    for part in dependencies(value, required_of(site.schema), site.types == {"object"}):
        _require(rewriter, part, site, "dependencies")


def _property_names(rewriter: Rewriter, value: Any, site: Site) -> None:
    names = _without_format(rewriter, rewriter.references.follow(value), site)
    for keyword, part in property_names(names, site.schema).items():
        if keyword == "maxProperties":
            site.extra.append({keyword: part})
        else:
            rewriter.replace_keyword(keyword, part, site)


def _without_format(rewriter: Rewriter, names: Any, site: Site) -> Any:
    """Replace ``format`` in a schema of names with a pattern if one is known."""
    if not isinstance(names, dict) or not isinstance(names.get("format"), str):
        return names
    value = names["format"]
    rest = {keyword: part for keyword, part in names.items() if keyword != "format"}
    if not rewriter.assert_formats or value not in KNOWN_FORMATS:
        return rest
    pattern = COMPLEMENTED_FORMATS.get(value, FORMATS.get(value))
    if pattern is None or "pattern" in rest:
        return names
    if value in _NARROWED_FORMATS:
        rewriter.narrowed.append(Reason(site.at, "propertyNames", _NARROWED_FORMATS[value]))
    return {**rest, "pattern": pattern}


def _property_counts(rewriter: Rewriter, value: Any, site: Site) -> None:
    """Replace ``minProperties`` and ``maxProperties`` with a union, if properties are optional.

    The union has one schema for each allowed set of optional properties.
    """
    bounds = {key: int(site.schema[key]) for key in _COUNTS if key in site.schema}
    required_count = len(set(required_of(site.schema)))
    new_keywords = {key: site.out[key] for key in _OBJECT_KEYWORDS if key in site.out}
    options, narrowed = property_count({**site.schema, **new_keywords})
    if narrowed:
        why = "objects with several properties that are not listed are not always produced"
        rewriter.narrowed.append(Reason(site.at, "minProperties", why))
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
    if "minProperties" not in site.schema:  # the rule of minProperties handles both keywords
        _property_counts(rewriter, value, site)


def _unique_items(rewriter: Rewriter, value: Any, site: Site) -> None:
    if value is not True:
        return
    values = _listed_values(rewriter, site.schema.get("items", True))
    if site.schema.get("prefixItems"):
        values = None
    try:
        options = distinct(site.schema, values)
    except NoExactForm:
        if not rewriter.keep_unique_items:
            raise
        rewriter.has_unique_items = True
        site.out["uniqueItems"] = True
        return
    if options is not None:
        options += _other_than_arrays(site)
        _require(rewriter, {"anyOf": options} if options else False, site, "uniqueItems")


def _contains(rewriter: Rewriter, value: Any, site: Site) -> None:
    if rewriter.keeps_contains and "maxContains" not in site.schema:
        site.out["contains"] = rewriter.rewrite(value, f"{site.at}/contains", JSON_TYPES)
        site.out["minContains"] = int(site.schema.get("minContains", 1))
        return
    prefix = "prefixItems" if rewriter.draft >= 2020 else "items"
    options = contains(value, site.schema, prefix)
    options += _other_than_arrays(site)
    _require(rewriter, {"anyOf": options}, site, "contains")


def _other_than_arrays(site: Site) -> list[Any]:
    """Return a list with one schema, which allows the values of the site's types except arrays.

    The list is empty if the site allows only arrays.
    """
    others = sorted(site.types - {"array"})
    return [{"type": others}] if others else []


def _format(rewriter: Rewriter, value: Any, site: Site) -> None:
    """Keep ``format``, replace it with a pattern, or raise `NoExactForm`.

    Formats that are not in `KNOWN_FORMATS` are annotations and are removed.
    """
    if not rewriter.assert_formats:
        return
    if value in _KEPT_FORMATS:
        site.out["format"] = value
    elif value in FORMATS:
        site.extra.append({"pattern": FORMATS[value]})
    elif value == "hostname":
        pattern = HOSTNAME
        if rewriter.draft >= 7:
            pattern = HOSTNAME_WITHOUT_PUNYCODE
            why = "labels with two hyphens as third and fourth character are not produced"
            rewriter.narrowed.append(Reason(site.at, "format", why))
        site.extra.append({"pattern": pattern, "maxLength": 253})
    elif value in _REFUSED_FORMATS:
        raise NoExactForm("format", f"{value!r} cannot be enforced exactly")
    if value in _NARROWED_FORMATS:
        rewriter.narrowed.append(Reason(site.at, "format", _NARROWED_FORMATS[value]))


def _pattern(rewriter: Rewriter, value: Any, site: Site) -> None:
    pattern = plain_pattern(value)
    if pattern is None:
        others = sorted(site.types - {"string"})
        site.extra.append({"type": others} if others else False)
    else:
        site.out["pattern"] = pattern


def _only_for_automata(keyword: str) -> Rule:
    """Return the rule of a keyword whose values are `ForAutomata`."""

    def rule(rewriter: Rewriter, value: Any, site: Site) -> None:
        if isinstance(value, ForAutomata):
            site.out[keyword] = value

    return rule


def _listed_values(rewriter: Rewriter, items: Any) -> list[Any] | None:
    """Return the distinct values that the schema `items` lists; None if it does not list them."""
    items = rewriter.references.follow(items)
    if not isinstance(items, dict) or "enum" not in items or items.keys() - _PLAIN:
        return None
    types = types_of({"type": items["type"]}) if "type" in items else JSON_TYPES
    if any(not types & types_of({"const": value}) for value in items["enum"]):
        return None
    return without_duplicates(items["enum"])


def _closed_names(rewriter: Rewriter, schema: Any) -> frozenset[str] | None:
    """Return the names of the properties that a closed object schema allows.

    Return None if the schema is not closed, that is, if it allows properties with other names.
    """
    schema = rewriter.references.follow(schema)
    if not isinstance(schema, dict) or schema.get("additionalProperties") is not False:
        return None
    if schema.get("patternProperties"):
        return None
    return frozenset(schema.get("properties", ()))


#: Rewriting rules by keyword.
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
    **{keyword: _only_for_automata(keyword) for keyword in ("notPattern", "notMultipleOf")},
}
