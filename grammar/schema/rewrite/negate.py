"""Complements of schemas (for ``not``), as far as JSON schema can express them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from graft.grammar.schema.documents import (
    JSON_TYPES,
    ForAutomata,
    JsonTypes,
    SchemaObject,
    any_of,
    common_types,
    required_of,
    type_of_value,
    types_of,
    word_set,
)
from graft.grammar.schema.reasons import NoExactForm
from graft.grammar.schema.references import References
from graft.grammar.schema.rewrite.patterns import complement_of
from graft.grammar.schema.rewrite.strings import (
    COMPLEMENTED_FORMATS,
    HOSTNAME,
    KNOWN_FORMATS,
    NOT_HOSTNAME,
    PERHAPS_PUNYCODE,
    ecma_pattern,
    literals,
    none_of,
)
from graft.grammar.validate import search_pattern

__all__ = ["Negation"]

_MAX_DEPTH = 12
_MAX_ONE_OF = 6  # maximum number of options of a oneOf whose complement is written as a union
_MAX_ITEMS = 4  # maximum length of arrays for which "some item is invalid" is written as a union
# Maximum number of names in `properties` for which "the object has a property with another name" is
# written as a union. The union has one schema for each subset of the names.
_MAX_LISTED = 5
_SOME_PROPERTY_DIFFERS = "that some property differs cannot be expressed in JSON schema"
_SOME_ITEM_DIFFERS = "that some item differs cannot be expressed in JSON schema"
#: Keywords that `Negation._keyword` does not handle: annotations, and keywords that other methods
#: negate, because their complement depends on several keywords.
_HANDLED_ELSEWHERE = word_set(
    """$schema $id id $anchor $defs definitions $comment title description default examples
    deprecated readOnly writeOnly type const enum required properties additionalProperties
    patternProperties items additionalItems prefixItems minimum maximum exclusiveMinimum
    exclusiveMaximum if then else dependencies dependentRequired dependentSchemas contains
    minContains maxContains"""
)
#: JSON type of the values that each keyword constrains. All values of other types are valid.
_TYPE_OF_KEYWORD = {
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

#: Names of all properties that an object can have; None if it can have properties of any name.
Names = frozenset[str] | None


class Negation:
    """Computes complements of schemas of one document.

    `draft` is the document's JSON schema draft: 3, 4, 6, 7, 2019 or 2020. `for_automaton`
    and `for_lark` are as in `rewrite`.
    """

    def __init__(
        self,
        references: References,
        draft: int,
        for_automaton: bool = False,
        for_lark: bool = False,
    ):
        self._references = references
        self._draft = draft
        self._has_not_pattern = for_automaton
        self._has_other_keywords = for_automaton or for_lark
        self._depth = 0
        # During a call of `partial_complement`: the errors of the parts that the complement leaves
        # out. None at other times.
        self._omitted: list[NoExactForm] | None = None

    def complement(self, schema: Any, types: JsonTypes = JSON_TYPES, names: Names = None) -> Any:
        """Return a schema that allows exactly the values that `schema` does not allow.

        The result need not be correct for values of other JSON types than `types`. If `names` is
        not None, it need not be correct for objects with a property that is not in `names` either.
        Raise `NoExactForm` if JSON schema cannot express the complement.
        """
        if isinstance(schema, bool):
            return not schema
        if self._depth >= _MAX_DEPTH:
            raise NoExactForm("not", "is nested too deeply or refers to itself")
        self._depth += 1
        try:
            return any_of(list(self._options(schema, types, names)))
        finally:
            self._depth -= 1

    def partial_complement(
        self, schema: Any, types: JsonTypes = JSON_TYPES, names: Names = None
    ) -> tuple[Any, NoExactForm | None]:
        """Return the complement of a schema, possibly without some objects.

        The complement contains the objects with an invalid property. If the complement of a
        property's schema cannot be expressed, the result leaves out the objects that violate
        `schema` only by the value of this property. Everything else in the complement is included,
        or `NoExactForm` is raised.

        Parameters
        ----------
        schema, types, names
            As in `complement`.

        Returns
        -------
        tuple
            The schema, and the error of the first property whose schema has no complement. The
            error is None if the complement is complete.

        Raises
        ------
        NoExactForm
            The result would allow no value, or the complement of `schema` cannot be expressed for
            another reason.
        """
        self._omitted = []
        try:
            found = self.complement(schema, types, names)
            omitted = self._omitted
        finally:
            self._omitted = None
        if found is False and omitted:
            raise omitted[0]
        return found, omitted[0] if omitted else None

    def _options(self, schema: SchemaObject, types: JsonTypes, names: Names) -> Iterator[Any]:
        """Yield schemas whose union is the complement of a schema."""
        yield from self._other_types(schema, types)
        # `_other_types` has yielded the values of all types that `schema` excludes. Only the types
        # that `schema` allows remain.
        if "type" in schema:
            types = common_types(types, types_of({"type": schema["type"]}))
        else:
            types = common_types(types, JSON_TYPES)
        if "const" in schema:
            yield from self._other_values([schema["const"]], types)
        if schema.get("enum") is not None:
            yield from self._other_values(schema["enum"], types)
        if "object" in types:
            yield from self._objects(schema, names)
        if "array" in types:
            yield from self._arrays(schema)
        if types & {"number", "integer"}:
            yield from _numbers(schema, "number" if "number" in types else "integer")
        for keyword, value in schema.items():
            if keyword not in _HANDLED_ELSEWHERE and _is_relevant(keyword, types):
                yield from self._keyword(keyword, value, types, names)
        if "object" in types:
            yield from self._unmet_dependencies(schema)
        if "if" in schema:
            yield from self._unmet_conditions(schema, types, names)
        if "contains" in schema and "array" in types:
            yield from self._arrays_without(schema)

    def _keyword(self, keyword: str, value: Any, types: JsonTypes, names: Names) -> Iterator[Any]:
        """Yield schemas whose union contains the values that violate one keyword.

        `types` and `names` are as in `complement`.
        """
        if keyword in ("minLength", "minItems", "minProperties"):
            if value > 0:
                yield {"type": _TYPE_OF_KEYWORD[keyword], "max" + keyword[3:]: int(value) - 1}
        elif keyword in ("maxLength", "maxItems", "maxProperties"):
            yield {"type": _TYPE_OF_KEYWORD[keyword], "min" + keyword[3:]: int(value) + 1}
        elif keyword == "pattern":
            yield self._other_strings(value)
        elif keyword == "format":
            if value in COMPLEMENTED_FORMATS:
                yield self._other_strings(COMPLEMENTED_FORMATS[value])
            elif value == "hostname":
                yield from self._other_than_hostnames()
            elif value in KNOWN_FORMATS:
                raise NoExactForm("format", f"the complement of {value!r} is not known")
        elif keyword == "allOf":
            for part in value:
                yield self.complement(part, types, names)
        elif keyword == "anyOf":
            yield {"allOf": [self.complement(part, types, names) for part in value]}
        elif keyword == "oneOf":
            if len(value) > _MAX_ONE_OF:
                raise NoExactForm("oneOf", f"the complement of {len(value)} options is too long")
            yield {"allOf": [self.complement(part, types, names) for part in value]}
            for pair in itertools.combinations(value, 2):
                yield {"allOf": list(pair)}
        elif keyword == "not":
            yield value
        elif keyword == "$ref":
            yield self.complement(self._references.resolve(value), types, names)
        elif keyword == "uniqueItems" and value is False:
            return
        elif keyword == "multipleOf" and self._has_other_keywords and value == int(value):
            json_type = "number" if "number" in types else "integer"
            yield {"type": json_type, "notMultipleOf": ForAutomata(int(value))}
        elif _is_assertion(keyword):
            raise NoExactForm(keyword, "its complement cannot be expressed in JSON schema")

    def _other_types(self, schema: SchemaObject, types: JsonTypes) -> Iterator[Any]:
        """Yield schemas whose union contains the values of the `types` that `schema` excludes."""
        if "type" not in schema:
            return
        own_types = types_of({"type": schema["type"]})
        excluded = [
            t
            for t in types
            if t not in own_types and not (t == "integer" and "number" in own_types)
        ]
        if "integer" in own_types and "number" in types:
            if not self._has_other_keywords:
                why = "fractional numbers cannot be distinguished from integers"
                raise NoExactForm("type", why)
            excluded.remove("number")
            yield {"type": "number", "notMultipleOf": ForAutomata(1)}
        if excluded:
            yield {"type": sorted(excluded)}

    def _other_strings(self, pattern: str) -> Any:
        """Return the schema of the strings that a pattern does not match."""
        words = literals(pattern)
        try:
            other = complement_of(pattern) if words is None else none_of(words)
        except NoExactForm:
            if not self._has_not_pattern:
                raise
            excluded = ecma_pattern(pattern, without_nul=False)
            return {"type": "string", "notPattern": ForAutomata(excluded)}
        return False if other is None else {"type": "string", "pattern": other}

    def _other_than_hostnames(self) -> Iterator[Any]:
        """Yield schemas whose union contains the strings that are no host names.

        From draft 7 on, labels that begin like punycode must be valid punycode.
        """
        if self._draft >= 7:
            values = {"type": "string", "pattern": PERHAPS_PUNYCODE}
            error = NoExactForm("format", "the complement of 'hostname' is not known", values)
            if self._omitted is None:
                raise error
            self._omitted.append(error)
        if self._has_not_pattern:  # it has a much smaller automaton than NOT_HOSTNAME
            yield {"type": "string", "notPattern": ForAutomata(HOSTNAME)}
        else:
            yield {"type": "string", "pattern": NOT_HOSTNAME}
        yield {"type": "string", "minLength": 254}

    def _other_values(self, values: Any, types: JsonTypes) -> Iterator[Any]:
        """Yield schemas whose union contains all values of the given types except `values`."""
        by_type: dict[str, list[Any]] = {}
        for value in values:
            by_type.setdefault(type_of_value(value), []).append(value)
        absent = []
        for json_type in types:
            kind = "number" if json_type == "integer" else json_type
            if kind not in by_type:
                absent.append(json_type)
        if absent:
            yield {"type": sorted(absent)}
        if "boolean" in types and len(set(by_type.get("boolean", ()))) == 1:
            yield {"enum": [not by_type["boolean"][0]]}  # draft 4 has no const
        if "string" in types and "string" in by_type:
            yield {"type": "string", "pattern": none_of(by_type["string"])}
        if "number" in by_type and types & {"number", "integer"}:
            json_type = "number" if "number" in types else "integer"
            lower: SchemaObject = {}
            for number in sorted(set(by_type["number"])):
                yield {"type": json_type, **lower, "exclusiveMaximum": number}
                lower = {"exclusiveMinimum": number}
            yield {"type": json_type, **lower}
        for json_type in ("array", "object"):
            if json_type in types and json_type in by_type:
                others = [self._other_than(value) for value in by_type[json_type]]
                yield others[0] if len(others) == 1 else {"allOf": others}

    def _other_than(self, value: Any) -> Any:
        """Return the schema of the arrays or objects that differ from a given array or object."""
        options: list[Any] = []
        if isinstance(value, list):
            if value:
                options.append({"type": "array", "maxItems": len(value) - 1})
            options.append({"type": "array", "minItems": len(value) + 1})
            for i, item in enumerate(value):
                options.append(self._item(i, self.complement({"const": item})))
        else:
            options.append(_with_another_property(tuple(value), tuple(value)))
            for name, part in value.items():
                options.append({"type": "object", "properties": {name: False}})
                options.append(_property(name, self.complement({"const": part})))
        return any_of(options)

    def _item(self, index: int, schema: Any) -> Any:
        """Return the schema of arrays whose item at `index` exists and satisfies `schema`."""
        if schema is False:
            return False
        prefix = "prefixItems" if self._draft >= 2020 else "items"
        return {"type": "array", "minItems": index + 1, prefix: [True] * index + [schema]}

    def _arrays(self, schema: SchemaObject) -> Iterator[Any]:
        """Yield schemas whose union contains the arrays with an item that `schema` forbids."""
        items = schema.get("items")
        if isinstance(items, list):
            prefix = items
            rest = schema.get("additionalItems", True)
        else:
            prefix = schema.get("prefixItems", []) if self._draft >= 2020 else []
            rest = items
        for index, part in enumerate(prefix):
            yield self._item(index, self.complement(part))
        if rest is None or rest is True or rest == {}:
            return
        if rest is False:
            yield {"type": "array", "minItems": len(prefix) + 1}
            return
        max_items = schema.get("maxItems")
        if self._has_other_keywords and not prefix:
            yield {"type": "array", "contains": self.complement(rest)}
            return
        if not isinstance(max_items, (int, float)) or max_items > _MAX_ITEMS:
            raise NoExactForm("items", _SOME_ITEM_DIFFERS)
        complement = self.complement(rest)
        for index in range(len(prefix), int(max_items)):
            yield self._item(index, complement)

    def _arrays_without(self, schema: SchemaObject) -> Iterator[Any]:
        """Yield the schema of arrays without an item that ``contains`` requires."""
        if schema.get("minContains", 1) != 1 or "maxContains" in schema:
            raise NoExactForm("contains", "its complement cannot be expressed in JSON schema")
        yield {"type": "array", "items": self.complement(schema["contains"])}

    def _unmet_conditions(
        self, schema: SchemaObject, types: JsonTypes, names: Names
    ) -> Iterator[Any]:
        """Yield schemas whose union contains the values that violate ``then`` or ``else``."""
        condition = schema["if"]
        if "then" in schema:
            yield {"allOf": [condition, self.complement(schema["then"], types, names)]}
        if "else" in schema:
            otherwise = self.complement(schema["else"], types, names)
            yield {"allOf": [self.complement(condition, types, names), otherwise]}

    def _unmet_dependencies(self, schema: SchemaObject) -> Iterator[Any]:
        """Yield schemas whose union contains the objects that violate a dependency."""
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, dependency in schema.get(keyword, {}).items():
                present = {"type": "object", "required": [name]}
                if isinstance(dependency, str):  # draft 3 allows a single name
                    yield {**present, "properties": {dependency: False}}
                elif isinstance(dependency, list):
                    for other in dependency:
                        yield {**present, "properties": {other: False}}
                else:
                    yield {"allOf": [present, self.complement(dependency, frozenset(["object"]))]}

    def _objects(self, schema: SchemaObject, names: Names) -> Iterator[Any]:
        """Yield schemas whose union contains the objects with a missing or invalid property.

        These objects violate one of the keywords ``required``, ``properties``,
        ``patternProperties`` and ``additionalProperties`` of `schema`. `names` is as in
        `complement`.
        """
        properties = schema.get("properties", {})
        for name in required_of(schema):
            yield {"type": "object", "properties": {name: False}}
        for name, part in properties.items():
            yield self._invalid_property(name, part)
        patterns = schema.get("patternProperties", {})
        if any(part is not True and part != {} for part in patterns.values()):
            raise NoExactForm("patternProperties", _SOME_PROPERTY_DIFFERS)
        rest = schema.get("additionalProperties", True)
        if rest is True or rest == {}:
            return
        if names is not None:
            complement = self.complement(rest)
            for name in sorted(names - properties.keys()):
                if not any(search_pattern(pattern, name) for pattern in patterns):
                    yield _property(name, complement)
        elif rest is False and not patterns and len(properties) <= _MAX_LISTED:
            listed = tuple(properties)
            for count in range(len(listed) + 1):
                for present in itertools.combinations(listed, count):
                    yield _with_another_property(present, listed)
        else:
            raise NoExactForm("additionalProperties", _SOME_PROPERTY_DIFFERS)

    def _invalid_property(self, name: str, part: Any) -> Any:
        """Return the schema of objects whose property `name` violates the schema `part`.

        If the complement of `part` cannot be expressed, raise `NoExactForm`. During a call of
        `partial_complement`, append the error to `_omitted` and return False instead.
        """
        try:
            return _property(name, self.complement(part))
        except NoExactForm as error:
            if self._omitted is None:
                raise
            self._omitted.append(error)
            return False


def _is_relevant(keyword: str, types: JsonTypes) -> bool:
    """Return whether a keyword constrains values of these types."""
    json_type = _TYPE_OF_KEYWORD.get(keyword)
    if json_type is None or json_type in types:
        return True
    return json_type == "number" and "integer" in types


def _is_assertion(keyword: str) -> bool:
    if keyword in _TYPE_OF_KEYWORD or keyword == "if":
        return True
    return keyword.startswith(("$dynamic", "$recursive"))


def _property(name: str, schema: Any) -> Any:
    """Return the schema of objects whose property `name` is present and satisfies `schema`."""
    if schema is False:
        return False
    return {"type": "object", "required": [name], "properties": {name: schema}}


def _with_another_property(present: tuple[str, ...], names: tuple[str, ...]) -> Any:
    """Return the schema of objects with a property whose name is not in `names`.

    In addition, these objects have all properties in `present`, which is a subset of `names`, and
    no other property in `names`.
    """
    return {
        "type": "object",
        "properties": {name: name in present for name in names},
        "required": list(present),
        "minProperties": len(present) + 1,
    }


def _numbers(schema: SchemaObject, json_type: str) -> Iterator[Any]:
    """Yield schemas whose union contains the numbers that violate a bound of `schema`.

    In draft 4, ``exclusiveMinimum`` is a boolean that modifies ``minimum``. In later drafts,
    ``exclusiveMinimum`` is a bound itself.
    """
    for bound, other in (("minimum", "Maximum"), ("maximum", "Minimum")):
        strict = schema.get("exclusive" + bound.capitalize())
        if bound in schema:
            keyword = other.lower() if strict is True else "exclusive" + other
            yield {"type": json_type, keyword: schema[bound]}
        if strict is not None and not isinstance(strict, bool):
            yield {"type": json_type, other.lower(): strict}
