"""Tests of ``key_order="any"``, with which objects may have their keys in any order."""

from __future__ import annotations

import collections
import decimal
import itertools
import json
import random
from typing import Any

import pytest
from guide_util import BYTES
from router_util import STOP, Grammar
from schema_fuzz import walk

from graft.grammar import GrammarError, GrammarSpec, resolve_spec
from graft.grammar.schema.router import route

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

SCALARS: list[Any] = [
    {"type": "integer"},
    {"type": "string"},
    {"type": "boolean"},
    {"const": 3},
    {"enum": ["x", 1]},
    {"type": ["null", "string"]},
    {"type": "integer", "minimum": 2, "maximum": 7},
    {"type": "number", "not": {"type": "integer"}},
    False,
    {},
]
VALUES: list[Any] = [1, 3, 5, 0.5, "x", "y", True, None, [], {}]


def random_schema(rng: random.Random, depth: int) -> Any:
    """Return a random schema of objects, arrays, unions, conjunctions and references."""
    kind = rng.choice(["object"] * 4 + ["array", "union", "ref", "values"]) if depth else "scalar"
    if kind == "scalar" or rng.random() < 0.2:
        return rng.choice(SCALARS)
    if kind == "ref":
        return {"$ref": "#/$defs/shared"}
    if kind == "values":
        return {"enum": [{"a": 1, "b": [1, {"c": "x", "d": None}]}, {"b": 1, "a": 1}, 3]}
    if kind == "union":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    if kind == "array":
        schema: dict[str, Any] = {"type": "array", "items": random_schema(rng, depth - 1)}
        more = {
            "prefixItems": [random_schema(rng, depth - 1) for _ in range(2)],
            "minItems": rng.randint(0, 2),
            "maxItems": rng.randint(1, 3),
            "contains": random_schema(rng, depth - 1),
        }
        return schema | {key: value for key, value in more.items() if rng.random() < 0.5}
    names = rng.sample("abcdef", rng.randint(1, 4))
    schema = {"properties": {name: random_schema(rng, depth - 1) for name in names}}
    if rng.random() < 0.9:
        schema["type"] = rng.choice(["object", ["object", "integer"]])
    if rng.random() < 0.7:
        schema["required"] = rng.sample(names, rng.randint(1, len(names)))
    if rng.random() < 0.3:
        schema["patternProperties"] = {"^x.": random_schema(rng, depth - 1)}
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice([False, {"type": "integer"}])
    if rng.random() < 0.2:
        schema["anyOf"] = [{"required": [name]} for name in rng.choices(names, k=2)]
    if rng.random() < 0.2:
        schema["allOf"] = [
            {"properties": {rng.choice("abz"): {"type": ["integer", "string"]}}},
            {"$ref": "#/$defs/shared"},
        ]
    if rng.random() < 0.1:
        schema["not"] = {"properties": {names[0]: {"items": rng.choice(SCALARS)}}}
    if rng.random() < 0.1:
        schema[rng.choice(["minProperties", "maxProperties"])] = rng.randint(1, 4)
    return schema


def document(rng: random.Random) -> dict[str, Any]:
    """Return a random schema with one shared, recursive definition."""
    shared = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {}, "n": {"$ref": "#/$defs/shared"}},
        "required": rng.choice([[], ["a"]]),
    }
    schema = random_schema(rng, 3)
    return {**(schema if isinstance(schema, dict) else {}), "$defs": {"shared": shared}}


def random_value(rng: random.Random, schema: Any, defs: Any, depth: int = 0) -> Any:
    """Return a random value that may or may not satisfy the schema."""
    if not isinstance(schema, dict) or depth > 6 or rng.random() < 0.03:
        return rng.choice(VALUES)
    if "$ref" in schema:
        return random_value(rng, defs["shared"], defs, depth + 1)
    for keyword in ("anyOf", "enum"):
        if keyword in schema and "properties" not in schema:
            chosen = rng.choice(schema[keyword])
            if keyword == "anyOf":
                return random_value(rng, chosen, defs, depth + 1)
            return json.loads(json.dumps(chosen))
    if "items" in schema:
        first = schema.get("prefixItems", [])
        parts = [*first, *[schema["items"]] * 2][: rng.randint(0, 4)]
        return [random_value(rng, part, defs, depth + 1) for part in parts]
    if "properties" in schema:
        found = {
            name: random_value(rng, part, defs, depth + 1)
            for name, part in schema["properties"].items()
            if name in schema.get("required", ()) or rng.random() < 0.6
        }
        if rng.random() < 0.4:
            found[rng.choice(["xa", "xb", "z", "\n", "é"])] = rng.choice(VALUES)
        return found
    fitting = {"integer": 5, "string": "x", "boolean": True}
    kind = schema.get("type")
    return fitting.get(kind if isinstance(kind, str) else "", rng.choice(VALUES))


def shuffled(rng: random.Random, value: Any) -> Any:
    """Return the value with the keys of its objects in random order."""
    if isinstance(value, dict):
        keys = rng.sample(list(value), len(value))
        return {key: shuffled(rng, value[key]) for key in keys}
    return [shuffled(rng, part) for part in value] if isinstance(value, list) else value


def exact_grammars(rng: random.Random, count: int) -> list[tuple[dict[str, Any], Grammar]]:
    """Return `count` random schemas with their exact grammars for keys in any order."""
    found = []
    while len(found) < count:
        schema = document(rng)
        try:
            answer = route(schema, key_order="any")
        except GrammarError:  # no finite value satisfies the schema
            continue
        if answer.exact and not answer.narrowed and answer.rules:
            found.append((schema, Grammar.routed(answer)))
    return found


SEEDS = [pytest.param(600, seed, marks=pytest.mark.full) for seed in (2, 3, 4, 5)]


@pytest.mark.parametrize("count, seed", [(10, 1), *SEEDS])
def test_any_order_accepts_exactly_valid_values(count, seed):
    """A text is accepted if and only if jsonschema accepts its value."""
    rng = random.Random(seed)
    outcomes = {True: 0, False: 0}
    for schema, grammar in exact_grammars(rng, count):
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(12):
            value = shuffled(rng, random_value(rng, schema, schema["$defs"]))
            valid = validator.is_valid(value)
            assert grammar.accepts_value(value) == valid, (schema, json.dumps(value))
            outcomes[valid] += 1
    assert min(outcomes.values()) > 2 * count, outcomes


@pytest.mark.parametrize("count", [8, pytest.param(30, marks=pytest.mark.full)])
def test_any_order_has_no_dead_ends(count):
    """Random legal bytes never lead to a dead end, and complete texts have no duplicate keys."""
    rng = random.Random(3)
    ended = 0

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        named = [key for key, _ in pairs if key in set("abcdefn")]
        assert len(named) == len(set(named)), pairs
        return dict(pairs)

    def choose(legal: list[int]) -> int:
        assert legal
        ends = [byte for byte in legal if byte in (*b'"}]', STOP)]
        return rng.choice(ends if ends and rng.random() < 0.5 else legal)

    for schema, grammar in exact_grammars(rng, count):
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(3):
            text = grammar.generate(choose, 400)
            if text is not None:
                # A float could round a fraction to an integer.
                value = json.loads(
                    text, parse_float=decimal.Decimal, object_pairs_hook=without_duplicates
                )
                assert validator.is_valid(value), (schema, text)
                ended += 1
    assert ended > count


def test_any_order_keys_have_one_spelling():
    """A key that the schema names cannot occur a second time in another spelling."""
    schema = {"properties": {"a": {"const": 1}, 'q"\n\\': {"const": 2}, "\x01": {"const": 3}}}
    spec = GrammarSpec.json_schema(schema, backend="llguidance", key_order="any")
    grammar = Grammar(spec=spec)
    for text in (
        '{"\\u0061": 2}',
        '{"a": 2}',
        '{"a": 1, "\\u0061": 1}',
        '{"\\u0001": 4}',
        '{"q\\"\\u000a\\\\": 3}',
        '{"\\u001F": 1}',
        '{"\x7f": 1}',
        '{"a": 1, "a": 1}',
        '{"a": 1, }',
        '{, "a": 1}',
        '{"b": 1,}',
    ):
        assert not grammar.accepts(text), text
    for value in ({'q"\n\\': 2, "a": 1}, {"\x01": 3, "é\u2028": 0, "a": 1, "\x1f": [], "": {}}):
        assert grammar.accepts_value(value)


def test_any_order_whitespace_equals_schema_order():
    """Grammars with both values of `key_order` accept the same layouts of white space."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"items": {"properties": {"c": {}, "d": {}}}},
        },
    }
    texts = [
        '{"a":1,"b":[{"c":1},2]}',
        '{ "a" :1 ,\n"b":\t[ { "c": [ ] , "d":\r{ } } , 2 ] }',
        "{ }",
        ' {"a":1}',
        '{"a":1} ',
        '{"a": 1, "b": [{"c": 1}, 2]}',
        '{"a":1 2}',
        '{"a":- 1}',
        '{"a" "b"}',
        '{"a": 1, }',
        '{"b": [ ]}',
        '{"b": [1 , 2]}',
    ]
    for whitespace, fitting in (("line", 5), ("compact", 0), ("any", 1)):
        how: dict[str, Any] = {"backend": "llguidance", "whitespace": whitespace}
        one, other = (
            Grammar(spec=GrammarSpec.json_schema(schema, key_order=order, **how))
            for order in ("any", "schema")
        )
        assert [one.accepts(t) for t in texts] == [other.accepts(t) for t in texts]
        assert one.accepts(texts[1]) == (whitespace == "any") and one.accepts(texts[fitting])


def test_key_order_option():
    """The schema's order is the default, and it is the only order that XGrammar supports."""
    schema = {"type": "object", "properties": {"why": {}, "what": {}}, "required": ["why", "what"]}
    kept = GrammarSpec.json_schema(schema, backend="auto")
    free = GrammarSpec.json_schema(schema, backend="auto", key_order="any")
    assert kept == GrammarSpec.json_schema(schema, backend="auto", key_order="schema") != free
    for spec, accepted in ((kept, False), (free, True)):
        grammar = Grammar(spec=spec)
        assert grammar.accepts('{"why": 1, "what": 2}')
        assert grammar.accepts('{"what": 2, "why": 1}') == accepted
    asked = GrammarSpec.json_schema(schema, key_order="any")
    ordered, unordered = (resolve_spec(spec, "auto") for spec in (asked, free))
    assert (ordered.text, ordered.rules) == (unordered.text, unordered.rules)
    for spec in (
        lambda: resolve_spec(asked, "xgrammar"),
        lambda: GrammarSpec.json_schema(schema, backend="xgrammar", key_order="any").check(),
    ):
        with pytest.raises(GrammarError, match="XGrammar writes keys in the schema's order only"):
            spec()
    with pytest.raises(GrammarError, match="'sorted' is unknown"):
        GrammarSpec.json_schema(schema, key_order="sorted")


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 150), marks=pytest.mark.full)], ids=len
)
def test_any_order_limits_the_number_of_keys(seeds):
    """Random objects with bounds have the keys that jsonschema allows, and no dead ends."""
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        rng = random.Random(seed)
        names = rng.sample("abc", rng.randint(0, 3))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: rng.choice(SCALARS) for name in names},
            "required": rng.sample("abc", rng.choice((0, 0, 1, 2))),
            "additionalProperties": rng.choice((False, True, {"type": "integer"})),
        }
        if rng.random() < 0.7:
            schema["minProperties"] = rng.randint(0, 3)
        if rng.random() < 0.7:
            schema["maxProperties"] = rng.randint(0, 4)
        found = route(schema, key_order="any")
        if not found.exact or found.ordered:
            outcomes["refused"] += 1
            continue
        grammar = Grammar.routed(found)
        valid = jsonschema.Draft202012Validator(schema)
        for size in range(5):
            for keys in itertools.permutations("abcd", size):
                value = {key: rng.choice((1, 3, "x")) for key in keys}
                accepted = grammar.accepts_value(value)
                if not accepted and found.narrowed:
                    continue
                assert accepted == valid.is_valid(value), (schema, value)
        for _ in range(5):
            text = walk(grammar.matcher(), BYTES, rng)
            assert text is None or valid.is_valid(json.loads(text)), (schema, text)
        outcomes["checked"] += 1
    assert outcomes["checked"] > len(seeds) / 4


def test_any_order_of_listed_objects():
    schema = {"properties": {"a": {"enum": [{"x": 1, "y": {"p": None, "q": [2]}}, 5]}}}
    grammar = Grammar(spec=GrammarSpec.json_schema(schema, key_order="any"))
    for text in ('{"a": {"y": {"q": [2], "p": null}, "x": 1}}', '{"a": 5}'):
        assert grammar.accepts(text)
    for text in ('{"a": {"x": 1}}', '{"a": {"x": 1, "y": {"p": null, "q": [3]}}}', '{"a": 6}'):
        assert not grammar.accepts(text)


def test_any_order_of_many_keys():
    """Optional keys beyond 64 may occur several times, like keys that are not listed."""
    properties = {f"k{i}": {"type": "integer"} for i in range(80)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    schema["required"] = ["k70", "k79"]
    found = route(schema, key_order="any")
    assert found.exact and found.narrowed == ()
    grammar = Grammar.routed(found)
    assert grammar.accepts('{"k79": 1, "k3": 2, "k70": 3, "k78": 4, "k78": 5}')
    assert not grammar.accepts('{"k79": 1, "k3": 2}')
    assert not grammar.accepts('{"k79": 1, "k70": 2, "k70": 3}')
    assert not grammar.accepts('{"k79": 1, "k70": 2, "k77": "x"}')


def test_any_order_falls_back_to_schema_order():
    """In objects with more than 64 required properties, keys keep the schema's order.

    The route reports this restriction, and check() refuses such a schema with ``key_order="any"``.
    """
    wide: dict[str, Any] = {"type": "object", "properties": {f"k{i}": {} for i in range(65)}}
    wide["required"] = list(wide["properties"])
    schema = {"type": "object", "properties": {"a": {}, "b": wide}}
    found = route(schema, key_order="any")
    assert found.exact and found.rules and found.narrowed == found.ordered
    assert [r[:2] for r in found.narrowed] == [("#/properties/b", "required")]
    grammar = Grammar.routed(found)
    values = {f"k{i}": 1 for i in range(65)}
    assert grammar.accepts_value({"b": values, "a": 1})
    assert not grammar.accepts_value({"a": 1, "b": dict(reversed(values.items()))})
    with pytest.raises(GrammarError, match=r"more than 64 required properties \(65\)"):
        GrammarSpec.json_schema(schema, key_order="any").check()
    wide["required"].pop()
    assert route(schema, key_order="any").narrowed == ()
    pair = {"type": "object", "properties": {"a": {"type": "null"}, "b": {}}}
    found = route(pair)
    assert not found.rules and found.ordered == found.narrowed
    assert [r.keyword for r in found.ordered] == ["properties"]
    named = {
        "properties": {"a": {"$id": "http://x.y/z", "$ref": "#/$defs/q"}, "b": {}},
        "$defs": {"q": {"type": "null"}},
        "type": "object",
    }
    found = route(named, key_order="any")
    assert [r[:2] for r in found.reasons] == [("#/properties/a", "$ref")]
    for schema in (
        {"type": "object"},
        {"type": "array", "items": {"type": "null"}},
        {"enum": [{"a": 1}, 3]},
    ):
        assert route(schema).ordered == route(schema, key_order="any").ordered == ()


#: Schemas that LLGuidance refuses, with values of their property ``a``.
BEYOND_LLGUIDANCE: dict[str, tuple[Any, list[Any]]] = {
    "contains": (
        {"type": "array", "contains": {"required": ["p"]}},
        [[], [{}], [{"p": 1}], [{}, {"q": 1, "p": 1}, 2], [1, [], {"p": {}}], [1], "x"],
    ),
    "some item differs": (
        {"type": ["array", "null"], "not": {"items": {"type": "string"}}},
        [[], ["x"], [1], ["x", 1, "y"], ["x", "y", {"q": 1, "p": []}], None],
    ),
    "some item of a kind differs": (
        {"items": {"type": ["string", "integer"]}, "contains": {"not": {"type": "integer"}}},
        [[], [1], [1, "x"], [1, "x", None], ["x"], {}, 1],
    ),
    "fractions": (
        {"type": ["number", "string"], "not": {"type": "integer"}},
        [1, 0, -1, 0.5, -1.5, 10.05, "x", None],
    ),
    "recursive intersection": (
        {"$ref": "#/$defs/tree", "required": ["n"], "maxProperties": 2},
        [{}, {"n": {}}, {"n": {"m": 1, "n": {}}, "m": 2}, {"m": 2}, {"n": {"n": 1}}],
    ),
}


@pytest.mark.parametrize("name", BEYOND_LLGUIDANCE)
def test_any_order_of_schemas_that_llguidance_refuses(name):
    part, values = BEYOND_LLGUIDANCE[name]
    tree = {"type": "object", "properties": {"n": {"$ref": "#/$defs/tree"}, "m": {}}}
    schema = {
        "type": "object",
        "properties": {"a": part, "b": {}},
        "required": ["a"],
        "$defs": {"tree": tree},
    }
    found = route(schema, key_order="any")
    assert found.exact and not found.narrowed
    grammar = Grammar.routed(found)
    validator = jsonschema.Draft202012Validator(schema)
    verdicts = []
    for value in values:
        verdicts.append(validator.is_valid({"a": value}))
        for document in ({"a": value}, {"a": value, "b": 1}, {"b": [], "a": value}):
            assert grammar.accepts_value(document) == verdicts[-1], document
    assert set(verdicts) == {True, False}


def test_any_order_excludes_values_that_never_end():
    """No property begins if the intersection of two recursive schemas has no finite value."""

    def nested(leaf: int) -> dict[str, Any]:
        inner = {"anyOf": [{"$ref": f"#/$defs/nested{leaf}"}, {"const": leaf}]}
        return {"type": "object", "properties": {"n": inner, "x": {}}, "required": ["n"]}

    both = {"allOf": [{"$ref": "#/$defs/nested1"}, {"$ref": "#/$defs/nested2"}]}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": both, "b": {"anyOf": [both, {"type": "null"}]}, "c": {}},
        "additionalProperties": False,
        "$defs": {"nested1": nested(1), "nested2": nested(2)},
    }
    grammar = Grammar.routed(route(schema, key_order="any"))
    assert grammar.accepts('{"c": 1, "b": null}')
    for text in ('{"a', '{"b": {'):
        matcher = grammar.matcher()
        assert [matcher.accept(byte) for byte in text.encode()][-1] is False
    schema["required"] = ["a"]
    with pytest.raises(GrammarError):
        GrammarSpec.json_schema(schema, key_order="any").check()


def test_any_order_of_contains_without_valid_items():
    """No value is a valid item, so no array contains one of the listed values."""
    schema = {
        "type": ["array", "null"],
        "items": {"additionalProperties": False, "allOf": [{"$ref": "#/$defs/required"}]},
        "contains": {"enum": [{}]},
        "$defs": {"required": {"type": "object", "required": ["a"]}},
    }
    grammar = Grammar.routed(route(schema, key_order="any"))
    assert grammar.accepts_value(None)
    assert not any(map(grammar.accepts_value, ([], [{}], [{"a": 1}])))


@pytest.mark.parametrize("json_type", ["integer", "number"])
def test_any_order_keeps_or_refuses_integers_that_are_no_multiples(json_type):
    """No rule is known for integers that are not multiples of 3."""
    number = {"type": json_type, "not": {"type": "integer", "multipleOf": 3}}
    schema = {"type": "object", "properties": {"a": number, "b": {}}, "required": ["a"]}
    found = route(schema, key_order="any")
    assert not found.exact or Grammar.routed(found).accepts_value({"a": 2})


def test_any_order_of_names_that_match_one_pattern():
    """The pattern need not have an automaton."""
    names = "|".join(f"name {i}{'x' * i}" for i in range(70))
    schema = {"type": "object", "patternProperties": {names: {"type": "null"}}}
    grammar = Grammar(spec=GrammarSpec.json_schema(schema, key_order="any"))
    assert grammar.accepts_value({"other": 1, "name 2xx": None})
    assert not grammar.accepts_value({"other": 1, "name 2xx": 1})


def test_any_order_refuses_patterns_with_common_names():
    """Patterns are compared where no disjoint patterns are known for them."""
    patterns = {"^a": {"type": "integer"}, "^(?=[a-z]{50,60}$).*b": {"type": "string"}}
    schema = {"properties": {"x": {}}, "patternProperties": patterns}
    found = route(schema, key_order="any")
    grammar = Grammar.routed(found) if found.exact and not found.ordered else None
    assert grammar is None or not grammar.accepts_value({"x": 1, "a" * 50 + "b": "s"})
