"""Further orders of properties: more texts of the same values, and of no others."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from router_util import Grammar

from graft.grammar.preflight import trial
from graft.grammar.rewrite_orders import several_orders
from graft.grammar.router import route

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

PARTS: list[Any] = [
    {"type": "integer"}, {"type": "string"}, {"type": "boolean"}, {"const": 3}, {"enum": ["x", 1]},
]  # fmt: skip


def random_object(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object schema, nested, with required properties in an order of their own."""
    names = rng.sample("abcdef", rng.randint(2, 5))
    properties = {
        name: random_object(rng, depth - 1) if depth and rng.random() < 0.3 else rng.choice(PARTS)
        for name in names
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        schema["required"] = rng.sample(names, rng.randint(1, len(names)))
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    if rng.random() < 0.3:
        schema["anyOf"] = [{"required": [name]} for name in rng.sample(names, 2)]
    if rng.random() < 0.2:
        schema["allOf"] = [{"properties": {rng.choice(names): {"type": ["integer", "string"]}}}]
    return schema


def random_value(rng: random.Random, schema: Any) -> Any:
    """A value that fits now and then, its keys in any order."""
    if "properties" not in schema:
        fitting = {"integer": 1, "string": "x", "boolean": True}.get(schema.get("type"), 3)
        return fitting if rng.random() < 0.9 else rng.choice([1, "x", "y"])
    names = [name for name in schema["properties"] if rng.random() < 0.9]
    rng.shuffle(names)
    if rng.random() < 0.7:
        names = list(dict.fromkeys([*schema.get("required", ()), *sorted(names)]))
    value = {name: random_value(rng, schema["properties"][name]) for name in names}
    if rng.random() < 0.1:
        value["z"] = 1
    return value


def test_orders_add_texts_of_valid_values_only():
    """What the schema's own order allows stays allowed, and nothing invalid joins it."""
    rng = random.Random(3)
    offered = more = 0
    for _ in range(60):
        schema = random_object(rng)
        new = several_orders(schema, "$defs")
        if new is schema or trial(schema) or trial(new):
            continue
        offered += 1
        plain, ordered = Grammar(schema), Grammar(new)
        judge = jsonschema.Draft202012Validator(schema)
        for _ in range(25):
            value = random_value(rng, schema)
            text = json.dumps(value)
            if plain.accepts(text):
                assert ordered.accepts(text), (schema, text)
            elif ordered.accepts(text):
                more += 1
                assert judge.is_valid(value), (schema, text)
    assert offered >= 30 and more >= 100


def test_three_properties_come_in_every_order():
    """Each permutation of three properties is taken, also where two are optional."""
    schema = {"type": "object", "properties": {"a": {}, "b": {"type": "null"}, "c": {}},
              "required": ["b"], "additionalProperties": False}  # fmt: skip
    grammar = Grammar(route(schema, ("llguidance",)).schema)
    for names in itertools.permutations("abc"):
        assert grammar.takes(dict.fromkeys(names))
    assert grammar.takes({"c": 1, "b": None})
    assert not grammar.takes({"c": 1, "a": 1}) and not grammar.takes({"a": 1, "b": None, "d": 1})
    assert not grammar.accepts('{"b": null, "a": 1, "a": 1}')


def test_required_properties_may_come_first():
    """With more properties the required ones may come first, in their order or the schema's."""
    properties = {name: {"type": "integer"} for name in "abcdefg"}
    schema = {"type": "object", "properties": properties, "required": ["f", "c"]}
    grammar = Grammar(route(schema, ("llguidance",)).schema)
    assert grammar.takes(dict.fromkeys("abcdefg", 1))
    assert grammar.takes(dict.fromkeys("fcabdeg", 1)) and grammar.takes({"f": 1, "c": 2, "g": 3})
    assert not grammar.takes({"f": 1, "g": 2}) and not grammar.takes({"g": 1, "f": 1, "c": 1})


def test_orders_of_an_option_follow_what_it_requires():
    """In a union beside properties, each option's own required properties may come first."""
    schema = {
        "type": "object",
        "properties": {name: {"type": "number"} for name in ("base", "height", "radius", "side")}
        | {"shape": {"enum": ["circle", "square"]}},
        "oneOf": [
            {"properties": {"shape": {"const": "circle"}}, "required": ["shape", "radius"]},
            {"properties": {"shape": {"const": "square"}}, "required": ["shape", "side"]},
        ],
    }
    found = route(schema, ("llguidance",))
    assert found.exact
    grammar = Grammar(found.schema)
    for shape, size in (("circle", "radius"), ("square", "side")):
        assert grammar.takes({"shape": shape, size: 1}) and grammar.takes({size: 1, "shape": shape})
    assert not grammar.takes({"shape": "circle", "side": 1})


def test_a_schema_that_the_backend_would_refuse_with_orders_keeps_its_own():
    """Where a choice of orders meets the backend's limits, the route is what it was before."""
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 2,
              "required": ["a"]}  # fmt: skip
    found = route(schema, ("llguidance",))
    assert found.exact and not trial(found.schema)
    many = {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}, "required": ["p9"]}
    assert several_orders(many, "$defs") is many


def test_wide_unions_are_not_multiplied_by_orders():
    """Orders times options stay few: the backend's parser would meet its limits in mid-text."""
    names = [f"p{i}" for i in range(26)]
    few: dict[str, Any] = {
        "type": "object", "properties": {n: {} for n in names}, "required": ["p5"],
        "anyOf": [{"required": [n]} for n in names[:3]],
    }  # fmt: skip
    wide = {**few, "anyOf": [{"required": [n]} for n in names]}
    nested = {**few, "allOf": [{"anyOf": [{"minProperties": 1}] * 9}]}
    assert several_orders(few, "$defs") is not few
    assert several_orders(wide, "$defs") is wide and several_orders(nested, "$defs") is nested


def test_schemas_with_bases_of_their_own_and_simple_ones_are_left_alone():
    """References could mean something else under a nested identifier; one name has one order."""
    nested = {"type": "object", "properties": {"a": {"$id": "x:y", "type": "null"}, "b": {}}}
    assert several_orders(nested, "$defs") is nested
    for schema in (True, {"type": "string"}, {"type": "object", "properties": {"a": {}}}):
        assert several_orders(schema, "$defs") is schema
