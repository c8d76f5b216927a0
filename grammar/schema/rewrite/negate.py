"""The complement of a schema as a schema, where JSON schema can say it."""

from __future__ import annotations

import itertools
from typing import Any

from graft.grammar.schema import terms
from graft.grammar.schema.rewrite.strings import literals, none_of
from graft.grammar.schema.terms import KINDS, Cannot, Kinds, References, any_of, kinds_of, meet
from graft.grammar.validate import search_pattern

__all__ = ["Negation"]

_DEPTH = 12
_DIFFERS = "that some property differs cannot be said in JSON schema"
_KNOWN_FORMATS = terms.word_set(
    """date-time time date duration email hostname ipv4 ipv6 uuid uri idn-email idn-hostname iri
    iri-reference json-pointer relative-json-pointer regex uri-reference uri-template"""
)
_SAYS_NOTHING = terms.word_set(
    """$schema $id id $anchor $defs definitions $comment title description default examples
    deprecated readOnly writeOnly type const enum required properties additionalProperties
    patternProperties items additionalItems prefixItems minimum maximum exclusiveMinimum
    exclusiveMaximum then else"""
)
_ABOUT = {
    **dict.fromkeys(
        ("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"),
        "string",
    ),
    **dict.fromkeys(
        (
            "minItems",
            "maxItems",
            "uniqueItems",
            "contains",
            "minContains",
            "maxContains",
            "unevaluatedItems",
        ),
        "array",
    ),
    **dict.fromkeys(
        (
            "minProperties",
            "maxProperties",
            "propertyNames",
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "unevaluatedProperties",
        ),
        "object",
    ),
    "multipleOf": "number",
}


class Negation:
    """Complements within one document."""

    def __init__(self, references: References, draft: int):
        self._references = references
        self._draft = draft
        self._depth = 0
        self._missing: list[Cannot] | None = None  # not None while a part may be left out

    def most_of(
        self, schema: Any, kinds: Kinds = KINDS, names: frozenset[str] | None = None
    ) -> tuple[Any, Cannot | None]:
        """`of`, or where it has no words for it a part of the complement, and what is missing.

        Objects that fail the schema only in the value of a property are left out if the complement
        of that value's schema cannot be said, while those without the property are kept. `Cannot`
        if nothing would be left, or something else has no words.
        """
        self._missing = []
        try:
            found = self.of(schema, kinds, names)
            missing = self._missing
        finally:
            self._missing = None
        if found is False and missing:
            raise missing[0]
        return found, missing[0] if missing else None

    def _if_possible(self, name: str, part: Any) -> Any:
        """Objects whose property fails the schema; none if that may be left out and has no form."""
        try:
            return _property(name, self.of(part))
        except Cannot as error:
            if self._missing is None:
                raise
            self._missing.append(error)
            return False

    def of(self, schema: Any, kinds: Kinds = KINDS, names: frozenset[str] | None = None) -> Any:
        """Everything that ``schema`` refuses; `Cannot` if JSON schema has no words for it.

        Only values of these ``kinds`` matter, what the complement says of others is free; and, if
        given, only objects whose property names are among ``names``.
        """
        if isinstance(schema, bool):
            return not schema
        if self._depth >= _DEPTH:
            raise Cannot("not", "is nested too deeply or refers to itself")
        self._depth += 1
        try:
            return any_of(list(self._options(schema, kinds, names)))
        finally:
            self._depth -= 1

    def _options(self, schema: dict[str, Any], kinds: Kinds, names: frozenset[str] | None) -> Any:
        yield from _other_types(schema, kinds)
        # Values that the schema's own type already excludes need not be excluded twice.
        kinds = meet(kinds, kinds_of({"type": schema["type"]}) if "type" in schema else KINDS)
        for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if values is not None:
                yield from self._other_values(values, kinds)
        if "object" in kinds:
            yield from self._objects(schema, names)
        if "array" in kinds:
            yield from self._arrays(schema)
        if kinds & {"number", "integer"}:
            yield from _numbers(schema, "number" if "number" in kinds else "integer")
        for keyword, value in schema.items():
            if keyword in _SAYS_NOTHING:
                continue
            about = _ABOUT.get(keyword)
            if about is None or about in kinds or (about == "number" and "integer" in kinds):
                yield from self._keyword(keyword, value, kinds, names)

    def _keyword(self, keyword: str, value: Any, kinds: Kinds, names: frozenset[str] | None) -> Any:
        if keyword in ("minLength", "minItems", "minProperties"):
            if value > 0:
                yield {"type": _ABOUT[keyword], "max" + keyword[3:]: int(value) - 1}
        elif keyword in ("maxLength", "maxItems", "maxProperties"):
            yield {"type": _ABOUT[keyword], "min" + keyword[3:]: int(value) + 1}
        elif keyword == "pattern":
            words = literals(value)
            if words is None:
                raise Cannot("pattern", f"the complement of {value!r} is not known")
            yield {"type": "string", "pattern": none_of(words)}
        elif keyword == "format":
            if value in _KNOWN_FORMATS:
                raise Cannot("format", f"the complement of {value!r} is not known")
        elif keyword == "allOf":
            yield from (self.of(part, kinds, names) for part in value)
        elif keyword == "anyOf":
            yield {"allOf": [self.of(part, kinds, names) for part in value]}
        elif keyword == "oneOf":
            if len(value) > 6:
                raise Cannot("oneOf", f"the complement of {len(value)} options is too long")
            yield {"allOf": [self.of(part, kinds, names) for part in value]}
            yield from ({"allOf": list(two)} for two in itertools.combinations(value, 2))
        elif keyword == "not":
            yield value
        elif keyword == "$ref":
            yield self.of(self._references.resolve(value), kinds, names)
        elif keyword == "uniqueItems" and value is False:
            return
        elif keyword in _ABOUT or keyword == "if" or keyword.startswith(("$dynamic", "$recursive")):
            raise Cannot(keyword, "its complement cannot be said in JSON schema")
        # Anything else is no assertion.

    def _other_values(self, values: Any, kinds: Kinds) -> Any:
        by_kind: dict[str, list[Any]] = {}
        for value in values:
            by_kind.setdefault(terms.value_kind(value), []).append(value)
        free = sorted(k for k in kinds if ("number" if k == "integer" else k) not in by_kind)
        if free:
            yield {"type": free}
        if "boolean" in kinds and len({*by_kind.get("boolean", ())}) == 1:
            yield {"const": not by_kind["boolean"][0]}
        if "string" in kinds and "string" in by_kind:
            yield {"type": "string", "pattern": none_of(by_kind["string"])}
        if "number" in by_kind and kinds & {"number", "integer"}:
            kind = "number" if "number" in kinds else "integer"
            low: dict[str, Any] = {}
            for number in sorted(set(by_kind["number"])):
                yield {"type": kind, **low, "exclusiveMaximum": number}
                low = {"exclusiveMinimum": number}
            yield {"type": kind, **low}
        for kind in ("array", "object"):
            if kind in kinds and kind in by_kind:
                apart = [self._other_than(value) for value in by_kind[kind]]
                yield apart[0] if len(apart) == 1 else {"allOf": apart}

    def _other_than(self, value: Any) -> Any:
        """Arrays (or objects) that differ from this one."""
        options: list[Any] = []
        if isinstance(value, list):
            if value:
                options.append({"type": "array", "maxItems": len(value) - 1})
            options.append({"type": "array", "minItems": len(value) + 1})
            options += (self._item(i, self.of({"const": v})) for i, v in enumerate(value))
        else:
            options += [_and_another(tuple(value), tuple(value))]
            for name, part in value.items():
                options.append({"type": "object", "properties": {name: False}})
                options.append(_property(name, self.of({"const": part})))
        return any_of(options)

    def _item(self, index: int, schema: Any) -> Any:
        """Arrays whose item at ``index`` exists and fits the schema."""
        if schema is False:
            return False
        prefix = "prefixItems" if self._draft >= 2020 else "items"
        return {"type": "array", "minItems": index + 1, prefix: [True] * index + [schema]}

    def _arrays(self, schema: dict[str, Any]) -> Any:
        items = schema.get("items")
        prefix = schema.get("prefixItems", [])
        rest = items if not isinstance(items, list) else schema.get("additionalItems", True)
        prefix = items if isinstance(items, list) else prefix if self._draft >= 2020 else []
        for index, part in enumerate(prefix):
            yield self._item(index, self.of(part))
        if rest is None or rest is True or rest == {}:
            return
        if rest is False:
            yield {"type": "array", "minItems": len(prefix) + 1}
            return
        bound = schema.get("maxItems")
        if not isinstance(bound, (int, float)) or bound > 4:
            raise Cannot("items", "that some item differs cannot be said in JSON schema")
        complement = self.of(rest)
        yield from (self._item(index, complement) for index in range(len(prefix), int(bound)))

    def _objects(self, schema: dict[str, Any], names: frozenset[str] | None) -> Any:
        properties = schema.get("properties", {})
        for name in terms.required_of(schema):
            yield {"type": "object", "properties": {name: False}}
        for name, part in properties.items():
            yield self._if_possible(name, part)
        patterns = schema.get("patternProperties", {})
        if any(part is not True and part != {} for part in patterns.values()):
            raise Cannot("patternProperties", _DIFFERS)
        rest = schema.get("additionalProperties", True)
        if rest is True or rest == {}:
            return
        if names is not None:
            complement = self.of(rest)
            for name in sorted(names - properties.keys()):
                if not any(search_pattern(pattern, name) for pattern in patterns):
                    yield _property(name, complement)
        elif rest is False and not patterns and len(properties) <= 5:
            listed = tuple(properties)
            for count in range(len(listed) + 1):
                for present in itertools.combinations(listed, count):
                    yield _and_another(present, listed)
        else:
            raise Cannot("additionalProperties", _DIFFERS)


def _property(name: str, schema: Any) -> Any:
    """Objects that have the property, fitting the schema."""
    if schema is False:
        return False
    return {"type": "object", "required": [name], "properties": {name: schema}}


def _and_another(present: tuple[str, ...], names: tuple[str, ...]) -> Any:
    """Objects with just ``present`` of the names and a property that is none of the names."""
    return {
        "type": "object",
        "properties": {name: name in present for name in names},
        "required": list(present),
        "minProperties": len(present) + 1,
    }


def _other_types(schema: dict[str, Any], kinds: Kinds) -> Any:
    if "type" not in schema:
        return
    own = kinds_of({"type": schema["type"]})
    if "integer" in own and "number" in kinds:
        raise Cannot("type", "numbers that are no integers cannot be told from integers")
    free = sorted(k for k in kinds if k not in own and not (k == "integer" and "number" in own))
    if free:
        yield {"type": free}


def _numbers(schema: dict[str, Any], kind: str) -> Any:
    """Numbers outside the bounds, whichever draft's way the bounds are written."""
    for bound, other in (("minimum", "Maximum"), ("maximum", "Minimum")):
        strict = schema.get("exclusive" + bound.capitalize())
        if bound in schema:
            inside = strict is True
            keyword = other.lower() if inside else "exclusive" + other
            yield {"type": kind, keyword: schema[bound]}
        if strict is not None and not isinstance(strict, bool):
            yield {"type": kind, other.lower(): strict}
