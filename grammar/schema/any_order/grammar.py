"""Build Lark grammars for LLGuidance in which objects have their keys in any order.

LLGuidance's own schema compiler (``%json``) produces the properties of an object in one order only.
The grammars of this module contain Lark rules for each object instead. The rules have a parameter
with one bit per named property. A property's bit is set after the property has been written, so
that no property occurs twice. For example::

    pairs::_: "\\"a\\"" COLON r1 more::set_bit(0) %if bit_clear(0) | ...
    more::_: "" %if is_ones([0:1]) | COMMA pairs::_

Parts of the schema that contain no object with several key orders remain ``%json`` expressions.
They are called JSON parts (see `json_parts.py`).
"""

from __future__ import annotations

from typing import Any

from graft.grammar.schema.any_order import lark
from graft.grammar.schema.any_order.json_parts import KNOWN, JsonParts
from graft.grammar.schema.any_order.merged_constraints import (
    ArrayShape,
    Conjuncts,
    ObjectShape,
    merge_arrays,
    merge_objects,
)
from graft.grammar.schema.documents import (
    JSON_TYPES,
    ForAutomata,
    SchemaObject,
    common_types,
    has_orders,
    subschemas,
    types_of,
    values_of,
    word_set,
)
from graft.grammar.schema.llguidance_check import lark_error
from graft.grammar.schema.llguidance_options import json_options, literal
from graft.grammar.schema.reasons import NoExactForm, Reason
from graft.grammar.schema.rewrite.patterns import have_common_string
from graft.grammar.spec import Whitespace

__all__ = ["any_order_grammar"]

_WHOLE = "schema"  # keyword of the `NoExactForm` errors that end the construction of a grammar
_MAX_RULES = 20_000
_MAX_OPTIONS = 256  # maximum number of options of an anyOf
_MAX_CHARACTERS = 1_200_000
_OF_NUMBERS = word_set("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf enum const")
_NO_INTEGER = ForAutomata(1)
_KEPT_ORDER = "keys are produced in the schema's order only: "


Reasons = tuple[Reason, ...]
#: A conjunction: the sorted object ids of its schemas.
_Key = tuple[int, ...]


def any_order_grammar(schema: Any, whitespace: Whitespace) -> tuple[str, Reasons, Reasons]:
    """Return a Lark grammar in which the objects of a schema have their keys in any order.

    Parameters
    ----------
    schema
        A rewritten schema; see `graft.grammar.schema.rewrite`.
    whitespace
        As in `Spec`.

    Returns
    -------
    rules
        The Lark grammar. It is empty if ``%json`` allows the same outputs, or if no Lark grammar
        could be built.
    ordered
        Objects whose keys are produced in the schema's order only, with the reasons. If no grammar
        could be built, all objects keep the schema's order, and the only reason states why.
    excluded
        Valid keys that are never produced, with the reasons.
    """
    error = NoExactForm("schema", "the schema is nested too deeply")
    try:
        # Checking the satisfiability of each JSON part takes time, and few schemas have
        # unsatisfiable JSON parts. The JSON parts are therefore checked only if LLGuidance refuses
        # the first grammar because a JSON part is unsatisfiable.
        for check_satisfiable in (False, True):
            json_parts = JsonParts(schema, whitespace, check_satisfiable)
            builder, rules = _build(json_parts, schema, whitespace)
            message = lark_error(rules) if rules else ""
            if not message:
                ordered = _locate(schema, builder.ordered, _KEPT_ORDER)
                excluded = _locate(schema, builder.excluded + json_parts.excluded, "")
                return rules, ordered, excluded
            error = NoExactForm("schema", message)
            if "Unsatisfiable" not in message:
                break
    except RecursionError:
        pass
    except NoExactForm as caught:
        error = caught
    return "", _locate(schema, [error], _KEPT_ORDER), ()


def _build(json_parts: JsonParts, schema: Any, whitespace: Whitespace) -> tuple[_RuleBuilder, str]:
    """Return the text of a grammar, and the builder of its rules.

    If a conjunction is satisfied only by values that never end, the grammar is built again without
    this conjunction. Otherwise, LLGuidance would let a model begin such a value.
    """
    builders = []  # keeps schemas alive, so that their ids stay unique
    impossible: dict[_Key, None] = {}
    while True:
        builder = _RuleBuilder(json_parts, impossible)
        rules = builder.grammar(schema, whitespace)
        endless = builder.endless_conjunctions()
        if not endless:
            return builder, rules
        builders.append(builder)
        impossible |= endless


def _value_schema(value: Any) -> Any:
    """Return a schema that only one value satisfies, and that lists its properties.

    Return None if an array contains objects with several orders of keys.
    """
    if isinstance(value, dict):
        properties = {name: _value_schema(part) for name, part in value.items()}
        if None in properties.values():
            return None
        return {
            "type": "object",
            "properties": properties,
            "required": list(value),
            "additionalProperties": False,
        }
    schema = {"enum": [value]}
    return None if has_orders(schema) else schema


def _locate(schema: Any, errors: list[NoExactForm], prefix: str) -> Reasons:
    """Convert errors to reasons, each with the pointer of the subschema that probably caused it.

    A `NoExactForm` error names a keyword but no subschema. The subschema with the largest
    `_cause_score` is assumed to be the cause. `prefix` begins each explanation.
    """
    parts = subschemas(schema) if errors else []
    reasons = []
    for error in errors:
        pointer = "#"
        largest = -1
        for part_pointer, part in parts:
            size = _cause_score(part, error)
            if size > largest:
                largest = size
                pointer = part_pointer
        reason = Reason(pointer, error.keyword, prefix + error.why)
        reasons.append(reason)
    return tuple(dict.fromkeys(reasons))


def _cause_score(part: SchemaObject, error: NoExactForm) -> int:
    """Return a score of a subschema: the larger it is, the likelier the subschema caused an error.

    The score is the length of the list or dict that is the value of the error's keyword. For
    ``$ref``, it is 1 if the explanation of the error contains the reference, and 0 otherwise.
    """
    value = part.get(error.keyword)
    if error.keyword == "$ref":
        return int(repr(value) in error.why)
    return len(value) if isinstance(value, (dict, list)) else 0


class _RuleBuilder:
    """Builds the Lark rules of one schema document.

    A conjunction is a set of schemas, which the methods take as a tuple `parts`. There is one rule
    per conjunction: it matches the JSON texts of the values that satisfy all schemas in `parts`.
    The methods append errors to the attribute `ordered` where keys keep the schema's order, and to
    `excluded` where valid keys are never produced. `any_order_grammar` returns both as reasons.
    `impossible` contains conjunctions that no value satisfies.
    """

    def __init__(self, json_parts: JsonParts, impossible: dict[_Key, None]):
        self.ordered: list[NoExactForm] = []
        self.excluded: list[NoExactForm] = []
        self._json_parts = json_parts
        # Name of each conjunction's rule; None if the conjunction is unsatisfiable.
        self._names: dict[_Key, str | None] = dict(impossible)
        self._unfinished: set[str] = set()  # names of rules that are being built
        self._recursive: set[str] = set()  # names of rules that refer to themselves
        self._alive: list[Any] = []  # keeps schemas alive, so that their ids stay unique
        self._rules: dict[str, str] = {}  # rule bodies by name
        # For each rule of values, the ways to write a value: the rules of the parts that it must
        # contain. A rule has a finite text if all parts of one way have one.
        self._ways: dict[str, list[tuple[str, ...]]] = {}
        self._name_of_body: dict[str, str] = {}
        self._terminals: dict[str, str] = {}  # names of terminals by body
        self._count = 0  # number of names that have been created
        self._size = 0  # number of characters of all rule bodies

    def grammar(self, root: Any, whitespace: Whitespace) -> str:
        """Return the text of the grammar; empty if a single ``%json`` allows the same outputs."""
        if not self._json_parts.needs_rules(root):
            return ""
        start = self._rule((root,))
        if start is None:
            raise NoExactForm(_WHOLE, "allows no output")
        lines = [f"start: {start}"]
        for name, body in self._rules.items():
            lines.append(f"{name}: {body}")
        for body, name in self._terminals.items():
            lines.append(f"{name}: {body}")
        lines.append(lark.separators(json_options(whitespace)))
        return "\n".join(lines)

    def endless_conjunctions(self) -> dict[_Key, None]:
        """Return the conjunctions whose rules allow only texts that never end."""
        remaining = self._ways
        while True:
            endless = {
                name: ways
                for name, ways in remaining.items()
                if all(any(part in remaining for part in way) for way in ways)
            }
            if len(endless) == len(remaining):
                return dict.fromkeys(key for key, name in self._names.items() if name in endless)
            remaining = endless

    # Names -------------------------------------------------------------------------------------

    def _rule(self, parts: Conjuncts) -> str | None:
        """Return the name of the rule for values that satisfy all schemas in `parts`.

        The rule is built if it is new. Return None if there are no such values.
        """
        conjuncts = self._json_parts.conjuncts(parts)
        if conjuncts is None:
            return None
        if len(conjuncts) == 1 and conjuncts[0].keys() == {"$ref"}:
            target = self._json_parts.resolve(conjuncts[0]["$ref"])
            return self._rule((target,))
        ids = {id(part) for part in conjuncts}
        key = tuple(sorted(ids))
        if key in self._names:
            known_name = self._names[key]
            if known_name in self._unfinished:
                self._recursive.add(known_name)
            return known_name
        self._alive.append(conjuncts)
        name = self._new_name("r")
        self._names[key] = name
        self._unfinished.add(name)
        try:
            options = self._options(conjuncts)
        except NoExactForm as error:
            del self._names[key]
            if name in self._recursive:  # a finished rule may refer to the missing rule `name`
                raise NoExactForm(_WHOLE, error.why) from None
            raise
        finally:
            self._unfinished.remove(name)
        if name in self._recursive:
            self._define(name, " | ".join(options))
            self._ways[name] = [(option,) for option in options]
            return name
        self._names[key] = self._union_rule(options)
        return self._names[key]

    def _union_rule(self, options: list[str]) -> str | None:
        """Return the name of a rule of the texts of several rules; None without `options`."""
        if len(options) <= 1:
            return options[0] if options else None
        return self._shared_rule(" | ".join(options), [(option,) for option in options])

    def _new_name(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def _define(self, name: str, body: str) -> None:
        self._rules[name] = body
        self._size += len(body)
        if len(self._rules) > _MAX_RULES or self._size > _MAX_CHARACTERS:
            raise NoExactForm(_WHOLE, "the grammar would be too large")

    def _shared_rule(self, body: str, ways: list[tuple[str, ...]]) -> str:
        """Return the name of the rule with this body. If there is no such rule, define it.

        `ways` is the rule's element of `_ways`.
        """
        if body not in self._name_of_body:
            name = self._name_of_body[body] = self._new_name("r")
            self._define(name, body)
            self._ways[name] = ways
        return self._name_of_body[body]

    def _terminal(self, body: str) -> str:
        new_name = f"T{len(self._terminals)}"
        return self._terminals.setdefault(body, new_name)

    # Rules of schemas --------------------------------------------------------------------------

    def _options(self, parts: tuple[SchemaObject, ...]) -> list[str]:
        """Return the names of the rules that together match the values of a conjunction.

        The list is empty if no value satisfies all schemas in `parts`.
        """
        if not any(self._json_parts.needs_rules(part) for part in parts):
            return _without_none([self._json_rule(parts)])
        for index, part in enumerate(parts):
            others = parts[:index] + parts[index + 1 :]
            if "$ref" in part:
                target = self._json_parts.resolve(part["$ref"])
                rest = self._json_parts.without(part, "$ref")
                return _without_none([self._rule((target, rest, *others))])
            if "anyOf" in part:
                rest = self._json_parts.without(part, "anyOf")
                return self._union(part["anyOf"], (rest, *others))
        return self._plain(parts)

    def _union(self, options: list[Any], rest: Conjuncts) -> list[str]:
        """Return rules for the values that satisfy one of `options` and all schemas in `rest`.

        `options` are the schemas of an ``anyOf``. There is a rule for each option, except that the
        options that need no Lark rules share one JSON part (``%json``).
        """
        if len(options) > _MAX_OPTIONS:
            raise NoExactForm("anyOf", f"more than {_MAX_OPTIONS} options ({len(options)})")
        conjuncts = self._json_parts.conjuncts(rest)
        if conjuncts is None:
            return []
        leaf_options = []
        names = []
        for option in options:
            if any(map(self._json_parts.needs_rules, (option, *conjuncts))):
                names.append(self._rule((option, *conjuncts)))
            else:
                leaf_options.append(option)
        if leaf_options:
            names.append(self._rule(({"anyOf": leaf_options}, *conjuncts)))
        return _without_none(names)

    def _plain(self, parts: tuple[SchemaObject, ...]) -> list[str]:
        """Implement `_options` for schemas that have neither ``$ref`` nor ``anyOf``."""
        for part in parts:
            unknown = part.keys() - KNOWN
            if unknown:
                raise NoExactForm(min(unknown), "not supported for keys in any order")
        types = JSON_TYPES
        for part in parts:
            types = common_types(types, types_of(part))
        if not types:
            return []
        for index, part in enumerate(parts):
            if "enum" in part or "const" in part:
                if not has_orders(part):
                    return _without_none([self._json_rule(parts, types)])
                keyword = "enum" if "enum" in part else "const"
                options = [_value_schema(value) for value in values_of(part) or ()]
                if None in options:
                    self.ordered.append(NoExactForm(keyword, "the listed values contain objects"))
                    return _without_none([self._json_rule(parts, types)])
                self._alive.append(tuple(options))
                rest = self._json_parts.without(part, keyword)
                return self._union(options, (rest, *parts[:index], *parts[index + 1 :]))
        names = []
        for json_type in ("object", "array"):
            if json_type in types:
                names.append(self._object_or_array(json_type, parts))
        scalar_types = types - {"object", "array"}
        if any("notMultipleOf" in part for part in parts):
            if "number" in types:
                names.append(self._fraction(parts))
            elif "integer" in types and not any(map(_excludes_integers, parts)):
                raise NoExactForm("multipleOf", "not supported for keys in any order")
            scalar_types -= {"number", "integer"}
        if scalar_types:
            names.append(self._json_rule(parts, scalar_types))
        return _without_none(names)

    def _fraction(self, parts: tuple[SchemaObject, ...]) -> str:
        """Return the name of the rule for the numbers that are no integers.

        Raise `NoExactForm` if the schemas in `parts` have other requirements for numbers.
        """
        for part in parts:
            if _OF_NUMBERS & part.keys() or part.get("notMultipleOf", _NO_INTEGER) != _NO_INTEGER:
                raise NoExactForm("multipleOf", "not supported for keys in any order")
        return self._shared_rule(self._terminal(lark.regex(lark.FRACTION)), [()])

    def _object_or_array(self, json_type: str, parts: tuple[SchemaObject, ...]) -> str | None:
        """Return the name of the rule for the objects or the arrays that satisfy a conjunction.

        If no rule with keys in any order is known, the rule is a JSON part (``%json``), in which
        keys have the schema's order. Return None if there are no such objects or arrays.
        """
        try:
            if json_type == "object":
                return self._object(merge_objects(parts))
            return self._array(merge_arrays(parts), parts)
        except NoExactForm as error:
            if error.keyword == _WHOLE:
                raise
            self.ordered.append(error)
            return self._json_rule(parts, frozenset((json_type,)))

    def _json_rule(self, parts: Conjuncts, types: frozenset[str] | None = None) -> str | None:
        """Return the name of a rule for the values of `types` that satisfy all schemas in `parts`.

        The rule consists of a schema for LLGuidance (``%json``). Return None if it is known that no
        value satisfies them. By default, the values may have any type.
        """
        body = self._json_parts.json_part(parts, types)
        return None if body is None else self._shared_rule(body, [()])

    def _array(self, shape: ArrayShape, parts: Conjuncts) -> str | None:
        """Return the name of the rule for arrays; None if no array is valid.

        `shape` contains the merged constraints of the conjunction `parts`.
        """
        if shape.contained is not True:
            return self._containing_array(shape)
        if not any(map(self._json_parts.needs_rules, shape.items)):
            return self._json_rule(parts, frozenset(("array",)))
        item = None if shape.high == 0 else self._rule(shape.items)
        high = 0 if item is None else shape.high
        if high is not None and shape.low > high:
            return None
        way = (item,) if item is not None and shape.low > 0 else ()
        return self._shared_rule(lark.array_body(item, shape.low, high), [way])

    def _containing_array(self, shape: ArrayShape) -> str | None:
        """Return the name of the rule for arrays with an item that `shape.contained` requires.

        Return None if there are no such arrays.
        """
        if shape.low > 1 or shape.high is not None:
            raise NoExactForm("contains", "the number of items is limited")
        contained = self._rule((shape.contained, *shape.items))
        item = self._rule(shape.items)
        # A JSON part, which `contained` can be, is not always known to have no values.
        if contained is None or item is None:
            return None
        return self._shared_rule(lark.containing_body(item, contained), [(contained,)])

    def _object(self, shape: ObjectShape) -> str | None:
        """Return the name of the rule for objects with the constraints `shape`.

        Return None if no object satisfies the constraints.
        """
        required = [name for name in shape.names if name in shape.required]
        optional = [name for name in shape.names if name not in shape.required]
        rules: dict[str, str] = {}
        for name in required + optional:
            rule = self._rule(shape.names[name])
            if rule is not None:
                rules[name] = rule
            elif name in shape.required:
                return None
        low, high = shape.low, shape.high
        if high is not None and high < max(low, len(shape.required)):
            return None
        others = self._other_pairs(shape)
        if others is None and len(rules) < low:
            return None
        pairs = lark.Pairs(tuple(rules.items()), len(shape.required), others, shape.low, high)
        key = repr(pairs)
        if key not in self._name_of_body:
            name = self._new_name("o")
            self._name_of_body[key] = name
            for head, body in lark.object_rules(name, pairs).items():
                self._define(head, body)
            self._ways[name] = [tuple(rules[name] for name in required)]
        return self._name_of_body[key]

    def _other_pairs(self, shape: ObjectShape) -> str | None:
        """Return the name of the rule for a key-value pair whose key is not in `shape.names`.

        Return None if no such pair is allowed.
        """
        names = [literal(lark.key(name)) for name in shape.names]
        patterns = [lark.regex(lark.pattern_key(pattern)) for pattern in shape.patterns]
        any_key = lark.regex(lark.PLAIN_KEY if patterns else lark.ANY_KEY)
        if len(shape.patterns) > 1 and have_common_string(shape.patterns):
            raise NoExactForm("patternProperties", "a name may match several patterns")
        if patterns:
            why = "keys with characters that JSON escapes are not produced"
            self.excluded.append(NoExactForm("patternProperties", why))
        # One element for the keys that match each pattern, and one for the keys that match none.
        # An element has three parts: the pattern as the beginning of a Lark expression for the keys
        # (`any_key` is appended), the literals and patterns that the keys must not match, and the
        # schemas of the values.
        groups: list[tuple[str, list[str], Conjuncts]] = []
        for pattern, schemas in zip(patterns, shape.patterns.values(), strict=True):
            groups.append((f"{pattern} & ", names, schemas))
        groups.append(("", names + patterns, shape.rest))
        options = []
        for prefix, excluded, schemas in groups:
            rule = self._rule(schemas)
            if rule is None:
                continue
            keys = prefix + any_key
            if excluded:
                keys += f" & ~({' | '.join(excluded)})"
            options.append(f"{self._terminal(keys)} COLON {rule}")
        return self._shared_rule(" | ".join(options), [()]) if options else None


def _excludes_integers(part: SchemaObject) -> bool:
    return bool(part.get("notMultipleOf") == _NO_INTEGER)


def _without_none(names: list[str | None]) -> list[str]:
    """Return the distinct names of rules in a list. The list has None for each missing rule."""
    return list(dict.fromkeys(name for name in names if name is not None))
