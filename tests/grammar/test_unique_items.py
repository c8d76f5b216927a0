"""Tests of ``uniqueItems`` where items are not listed: `graft.grammar.automaton.unique_items`."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from engine_util import demo_engine

from graft.grammar import (
    GrammarError,
    GrammarSpec,
    LLGuidanceBackend,
    Matcher,
    StructuralTag,
    Vocabulary,
)
from graft.grammar.validate import satisfies_schema
from graft.models.request import Request

BOOLEAN, STRING, INTEGER, NUMBER = ({"type": t} for t in ("boolean", "string", "integer", "number"))
#: Tokens with several bytes, many of which complete an item and begin the next one.
TEXTS = """
true true, ,true [true [true, true] [true,false] false false, ,false false] alse rue ue ue, [],[1]
"" "", "","" ["" [""] [""," ","a" "a","a" "a"] "a ",""] " "] ", ," ",\n ,\n } }, },{ "b": ,"b":
00 01 10 1,1 0,0 0,1 -0 0.0 e0 1e 0e ,1 ,0 1] 0] [1 [1,1] ]] ]], ],[ [[ [[] [], [1],[1] ":1}, }}
{} {}, {},{} [{},{}] {"a":1 {"a":1} {"a":1},{"a":1} "a": "a":1 null null, null,null [null,null]
"""
BYTES = [bytes([byte]) for byte in range(256)]
STOP = 256
VOCABULARY = Vocabulary(
    [*BYTES, b"", *(text.encode() for text in dict.fromkeys(TEXTS.split()) if len(text) > 1)],
    512,
    [STOP],
)


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(VOCABULARY)


def unique(items: Any, **keywords: Any) -> dict[str, Any]:
    """Return a schema of arrays with different items."""
    return {"type": "array", "items": items, "uniqueItems": True, **keywords}


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return a schema of objects without additional properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def without_keyword(schema: Any) -> Any:
    """Return a schema without ``uniqueItems``."""
    if isinstance(schema, dict):
        return {key: without_keyword(part) for key, part in schema.items() if key != "uniqueItems"}
    return [without_keyword(part) for part in schema] if isinstance(schema, list) else schema


def matcher_of(backend: LLGuidanceBackend, schema: Any, key_order: Any = "schema") -> Matcher:
    spec = GrammarSpec.json_schema(schema, whitespace="compact", key_order=key_order)
    return backend.compile(spec).matcher()


def legal(matcher: Matcher) -> set[int]:
    """Return the legal ids, and check that the matcher accepts these and no others."""
    ids = {int(token) for token in matcher.legal()}
    for token in range(len(VOCABULARY.tokens)):
        accepted = matcher.accept(token)
        assert accepted == (token in ids), (VOCABULARY.tokens[token], accepted)
        if accepted:
            matcher.rollback(1)
    return ids


def texts(matcher: Matcher, prefix: bytes = b"") -> Iterator[bytes]:
    """Yield all texts of a grammar with finitely many texts."""
    for token in matcher.legal():
        assert matcher.accept(token)
        if token == STOP:
            yield prefix
        elif token < STOP:
            yield from texts(matcher, prefix + BYTES[token])
        matcher.rollback(1)


BIT = {"enum": ["a", "b"]}
DIGITS = {"type": "integer", "minimum": 0, "maximum": 5}
#: Schemas with finitely many texts, most of them with few different items.
FINITE: dict[str, Any] = {
    "booleans": unique(BOOLEAN, maxItems=3),
    "booleans twice": unique(BOOLEAN, minItems=2, maxItems=4),
    "digits": unique({**DIGITS, "maximum": 2, "minimum": -1}, maxItems=3),
    "digits and words": unique(
        {"type": ["boolean", "null", "integer"], "minimum": 0, "maximum": 1}, maxItems=3
    ),
    "strings": unique({"type": "string", "pattern": "^[ab]{0,2}$"}, maxItems=2),
    "escapes": unique({"type": "string", "pattern": '^[\n"]?$'}, maxItems=3),
    "spellings": unique({"type": "string", "pattern": "^[é\n]$"}, maxItems=3),
    "control characters": unique({"type": "string", "pattern": "^[\\x01\\x7f]$"}, maxItems=2),
    "halves": unique({"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 1}, maxItems=3),
    "nested": unique({"type": "array", "items": BIT, "maxItems": 2}, maxItems=2),
    "nested unique": unique(unique(BOOLEAN, maxItems=2), maxItems=3),
    "nested unique pairs": unique(unique(BOOLEAN, minItems=2, maxItems=2), minItems=2, maxItems=3),
    "tuples": unique(
        {"type": "array", "prefixItems": [BIT, BOOLEAN], "items": False, "minItems": 1}, maxItems=2
    ),
    "objects": unique(closed(a=BOOLEAN, b=BIT), maxItems=2),
    "objects with required": unique(closed(("b",), a=BOOLEAN, b=BIT), maxItems=2),
    "objects in objects": unique(closed(("a",), a=closed(b=BOOLEAN), c={"const": 1}), maxItems=2),
    "one required": unique(
        {**closed(a={"const": 1}, b=BOOLEAN), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        maxItems=2,
    ),
    "other order": unique(
        {
            **closed(a=BOOLEAN, b=BIT, c={"const": 1}),
            "dependentRequired": {"b": ["c"]},
            "required": ["a"],
        },
        maxItems=2,
    ),
    "dependent": unique(
        {**closed(a=BOOLEAN, b=BIT), "dependentRequired": {"a": ["b"]}}, maxItems=2
    ),
    "kinds": unique(
        {
            "anyOf": [
                BOOLEAN,
                BIT,
                closed(a=BOOLEAN),
                {"type": "array", "items": BOOLEAN, "maxItems": 1},
            ]
        },
        maxItems=2,
    ),
    "unique in objects": unique(closed(a=unique(BOOLEAN, maxItems=2)), maxItems=2),
    "document": closed(
        ("x",),
        x=unique(BOOLEAN, maxItems=2),
        y={"type": "array", "items": unique({"const": 1}, maxItems=2), "maxItems": 2},
    ),
    "reference": {
        "$ref": "#/$defs/a",
        "$defs": {"a": closed(b={"anyOf": [unique(BOOLEAN, maxItems=3), BIT]})},
    },
    "tree": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": unique(
                {
                    "anyOf": [
                        BOOLEAN,
                        unique({"anyOf": [BOOLEAN, unique(BOOLEAN, maxItems=1)]}, maxItems=1),
                    ]
                },
                maxItems=2,
            )
        },
    },
    "options": {
        "anyOf": [unique(BOOLEAN, maxItems=2), closed(a=unique(BIT, minItems=1, maxItems=2)), BIT]
    },
}


def check_finite(backend: LLGuidanceBackend, schema: Any, key_order: Any) -> None:
    """Compare each row with the texts of the grammar without the keyword that are valid."""
    prefixes = {b""}
    valid = set()
    document = json.dumps(schema)
    for text in texts(matcher_of(backend, without_keyword(schema), key_order)):
        if satisfies_schema(document, text.decode()):
            valid.add(text)
            prefixes.update(text[:size] for size in range(len(text) + 1))
    matcher = matcher_of(backend, schema, key_order)
    pending: list[list[int]] = [[]]
    seen = set()
    while pending:
        path = pending.pop()
        prefix = b"".join(VOCABULARY.tokens[token] for token in path)
        assert matcher.accept_all(path) == len(path)
        expected = {
            token
            for token, text in enumerate(VOCABULARY.tokens)
            if text and prefix + text in prefixes
        }
        if prefix in valid:
            expected.add(STOP)
        # Trying every token takes most of the time.
        found = legal(matcher) if len(seen) % 4 == 0 else set(map(int, matcher.legal()))
        assert found == expected, (prefix, [VOCABULARY.tokens[t] for t in found ^ expected])
        for token in sorted(found - {STOP}):
            if prefix + VOCABULARY.tokens[token] not in seen:
                seen.add(prefix + VOCABULARY.tokens[token])
                pending.append([*path, token])
        matcher.rollback(len(path))


@pytest.mark.full(
    "order-any", "objects-any", "required-any", "document", "dependent-any", "unique-any"
)
@pytest.mark.parametrize("key_order", ["schema", "any"])
@pytest.mark.parametrize("name", FINITE)
def test_unique_items_allow_exactly_the_prefixes_of_valid_texts(backend, name, key_order):
    check_finite(backend, FINITE[name], key_order)


# Infinitely many values ---------------------------------------------------------------------------

TREE = {"$ref": "#/$defs/t", "$defs": {"t": unique({"anyOf": [STRING, {"$ref": "#/$defs/t"}]})}}
POINT = closed(("x",), x=NUMBER, label={"type": "string", "maxLength": 2}, on=BOOLEAN)
ANY_OBJECT = {"type": "object", "properties": {"a": unique(INTEGER), "b": BOOLEAN}}
INFINITE: dict[str, Any] = {
    "strings": unique(STRING, minItems=2),
    "numbers": unique(NUMBER),
    "integers": unique(INTEGER, maxItems=4),
    "scalars": unique({"type": ["string", "number", "boolean", "null"]}),
    "anything": unique({}),
    "short strings": unique({"type": "string", "maxLength": 1}),
    "long strings": unique({"type": "string", "minLength": 2, "maxLength": 300}),
    "pattern": unique({"type": "string", "pattern": "^a+b?$"}),
    "listed": unique({"enum": [*"abcdefgh", "ab", "abc", 1, 10, 1.5, None, ["a"]]}, minItems=3),
    "bounds": unique({"type": "number", "minimum": 0, "exclusiveMaximum": 1}),
    "dates": unique({"type": "string", "format": "date"}),
    "objects": unique(ANY_OBJECT),
    "closed objects": unique(POINT, minItems=1),
    "required alternatives": unique(
        {**POINT, "anyOf": [{"required": ["on"]}, {"required": ["label"]}]}
    ),
    "objects by name": {"type": "object", "additionalProperties": unique(BOOLEAN)},
    "objects by pattern": {
        "type": "object",
        "patternProperties": {"^a": unique(BOOLEAN), "^b": BOOLEAN},
        "properties": {"c": unique(POINT)},
    },
    "lists": unique({"type": "array", "items": BOOLEAN}),
    "lists of one": unique({"type": "array", "items": STRING, "maxItems": 1}),
    "tuples": unique({"type": "array", "prefixItems": [BOOLEAN, STRING], "items": False}),
    "unique tuples": {"type": "array", "prefixItems": [STRING, NUMBER], "uniqueItems": True},
    "unique lists": unique(unique(INTEGER, minItems=1)),
    "tree": TREE,
    "children": {
        "$ref": "#/$defs/n",
        "$defs": {"n": closed(n=unique({"$ref": "#/$defs/n"}), v=BOOLEAN)},
    },
    "options": unique({"anyOf": [STRING, ANY_OBJECT, {"type": "array", "items": BOOLEAN}]}),
}  # fmt: skip
OFTEN = [*b'[]{},"a:01te']
PREFERRED = [STOP, *b'"]}e1', *map(VOCABULARY.tokens.index, (b"]]", b"},"))]


def close(rng: random.Random, matcher: Matcher, text: bytes) -> bytes:
    """Return a complete text that begins with the tokens of a matcher."""
    accepted = 0
    token = -1
    while token != STOP:
        choices = matcher.legal()
        assert len(choices) > 0, text
        preferred = [choice for choice in PREFERRED if choice in choices]
        # After many tokens, most of which are preferred, items are long enough to differ.
        token = preferred[0] if preferred and rng.random() < 0.7 else int(rng.choice(choices))
        assert matcher.accept(token)
        accepted += 1
        assert accepted < 400, text
        if token != STOP:
            text += VOCABULARY.tokens[token]
    matcher.rollback(accepted)
    return text


def random_token(rng: random.Random, matcher: Matcher) -> int:
    """Return a legal token, often one that repeats or completes an item."""
    choices = set(map(int, matcher.legal()))
    if rng.random() < 0.6:
        several = [token for token in choices if token > STOP or token in OFTEN]
        if several:
            return rng.choice(several)
    return rng.choice(sorted(choices))


@pytest.mark.full("objects-any", "strings-any", "tree-any", "options-schema", "lists", "tuples")
@pytest.mark.parametrize("key_order", ["schema", "any"])
@pytest.mark.parametrize("name", INFINITE)
def test_unique_items_can_always_be_completed_and_exclude_only_repetitions(
    backend, name, key_order
):
    rng = random.Random(f"{name} {key_order}")
    schema = INFINITE[name]
    document = json.dumps(schema)
    excluded = 0
    for _ in range(4):
        matcher = matcher_of(backend, schema, key_order)
        plain = matcher_of(backend, without_keyword(schema), key_order)
        text = b""
        for _ in range(rng.randrange(5, 40)):
            ids = legal(matcher) if rng.random() < 0.2 else set(map(int, matcher.legal()))
            assert ids <= set(map(int, plain.legal()))
            for token in sorted(set(map(int, plain.legal())) - ids)[:3]:
                assert plain.accept(token)
                excluded += 1
                for _ in range(2 if token != STOP else 0):
                    other = close(rng, plain, text + VOCABULARY.tokens[token])
                    assert not satisfies_schema(document, other.decode()), other
                plain.rollback(1)
            token = random_token(rng, matcher)
            if token == STOP:
                break
            assert matcher.accept(token) and plain.accept(token)
            text += VOCABULARY.tokens[token]
        complete = close(rng, matcher, text)
        # The validator cannot read very long exponents.
        is_readable = not re.search(rb"e[+-]?\d{15}", complete, re.IGNORECASE)
        assert satisfies_schema(document, complete.decode()) or not is_readable, complete


def test_unique_items_compare_values_and_not_texts(backend):
    """Repeated items are refused in every spelling, and other items are accepted."""
    matcher = matcher_of(backend, unique({}))
    for first, *others in (
        (b"1", b"1.0", b"1e0", b"10e-1", b"0.1E+1", b"1.000"),
        (b"0", b"-0", b"0.0", b"0e99999999999999999999"),
        (b"12e100000000000000000000", b"1.2e100000000000000000001"),
        (b"-5e-1000000000000000000000", b"-50e-1000000000000000000001"),
        (b'"a/"', b'"\\u0061/"', b'"a\\/"'),
        (b'"\\n"', b'"\\u000a"', b'"\\u000A"'),
        (b"[1,2]", b"[1.0,2]"),
        (b'{"a":1,"b":[2]}', b'{"b":[2],"a":1}', b'{"a":0,"b":[2],"a":1.0}'),
    ):
        for other in others:
            accepted = matcher.accept_all([*b"[" + first + b"," + other + b"]"])
            assert accepted < 3 + len(first) + len(other), (first, other)
            matcher.rollback(accepted)
    for text in (
        b"[1,true,0,false,null]",
        b'["1",1,"true",true,"",[],{},[[]],[{}],"[]"]',
        b"[1e400,1e401,1e-400,1e-401,0.1,0.10000000000000000000001]",
        b'[{"a":1},{"a":2},{"b":1},{"a":1,"b":1},{"a":[1]}]',
        b"[[1,2],[2,1],[[1],2],[1,[2]],[12]]",
        b'["a","A","aa"," a","\xc3\xa4"]',
    ):
        text = text.decode("unicode_escape").encode("latin-1")
        assert matcher.accept_all([*text, STOP]) == len(text) + 1, text
        matcher.rollback(len(text) + 1)


# Random schemas -----------------------------------------------------------------------------------


def random_items(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return a schema with few values."""
    kinds = ["boolean", "enum", "integer", "string", "constant"]
    if depth:
        kinds += ["array", "object", "object", "union"]
    kind = rng.choice(kinds)
    if kind == "boolean":
        return rng.choice([BOOLEAN, {"type": ["boolean", "null"]}])
    if kind == "enum":
        return {"enum": rng.sample(["a", "ab", "b", "", 0, 1, None, True], rng.randint(1, 3))}
    if kind == "integer":
        low = rng.randint(-1, 1)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2)}
    if kind == "string":
        pattern = rng.choice(["^a?$", "^[ab]$", "^(a|aa)$", "^\n?$", '^["a]$', "^é?$"])
        return {"type": "string", "pattern": pattern}
    if kind == "constant":
        return {"const": rng.choice([1, "a", False, [], {}])}
    if kind == "array":
        array = {
            "type": "array",
            "items": random_items(rng, depth - 1),
            "minItems": rng.choice([0, 0, 1]),
            "maxItems": rng.choice([1, 2, 2]),
        }
        if rng.random() < 0.4:
            array["uniqueItems"] = True
        if rng.random() < 0.2:
            array["prefixItems"] = [random_items(rng, depth - 1)]
            array.pop("uniqueItems", None)
        return array
    if kind == "union":
        return {"anyOf": [random_items(rng, depth - 1) for _ in range(2)]}
    names = rng.sample(["a", "b", "ab"], rng.randint(1, 2))
    properties = {name: random_items(rng, depth - 1) for name in names}
    objects = closed(tuple(name for name in names if rng.random() < 0.4), **properties)
    if len(names) > 1 and rng.random() < 0.3:
        objects["dependentRequired"] = {names[0]: [names[1]]}
    return objects


def random_schema(rng: random.Random) -> dict[str, Any]:
    array = unique(random_items(rng, 2), minItems=rng.choice([0, 0, 1, 2]))
    array["maxItems"] = max(2, array["minItems"])
    if rng.random() < 0.3:
        return closed(("a",), a=array, b=random_items(rng, 1))
    return array


def count_texts(matcher: Matcher, limit: int) -> int:
    """Return the number of texts of a grammar, or `limit`."""
    return len(list(itertools.islice(texts(matcher), limit)))


MAX_TEXTS = 400


def check_random(backend: LLGuidanceBackend, seed: int) -> str:
    """Check a random schema, and return the result."""
    rng = random.Random(seed)
    schema = random_schema(rng)
    key_order = rng.choice(["schema", "any"])
    try:
        plain = matcher_of(backend, without_keyword(schema), key_order)
        if count_texts(plain, MAX_TEXTS) == MAX_TEXTS:
            return "large"
    except GrammarError:
        return "refused without the keyword"
    try:
        matcher_of(backend, schema, key_order)
    except GrammarError as error:
        assert "uniqueItems" in str(error) or "no output" in str(error), (seed, schema)
        return "refused"
    check_finite(backend, schema, key_order)
    return "checked"


def check_seeds(backend: LLGuidanceBackend, seeds: range) -> None:
    results = Counter(check_random(backend, seed) for seed in seeds)
    assert results["checked"] > len(seeds) // 2, results


def test_unique_items_of_random_schemas(backend):
    check_seeds(backend, range(12))


@pytest.mark.full
def test_unique_items_of_many_random_schemas(backend):
    check_seeds(backend, range(12, 400))


# Refusals, rollback, engine -----------------------------------------------------------------------

REFUSED = {
    "contains": ({"uniqueItems": True, "contains": STRING}, "contains"),
    "few items": (unique(BOOLEAN, minItems=3), "minItems is 3, but there are only 2 different"),
    "few objects": (unique(closed(a={"const": 1}), minItems=3), "only 2 different items"),
    "first items": (
        {"type": "array", "uniqueItems": True, "prefixItems": [BOOLEAN, STRING]},
        "one has few values",
    ),
    "one option": (
        {"type": "array", "anyOf": [{"uniqueItems": True, "items": STRING}, {"maxItems": 3}]},
        "only some of the options",
    ),
    "other items": (
        {"anyOf": [unique(STRING), unique(INTEGER)]},
        "several options for the same array have different items",
    ),
    "kinds": (unique({"anyOf": [closed(a=STRING), closed(a=INTEGER)]}), "several kinds of objects"),
    "limited properties": (
        unique({"type": "object", "additionalProperties": BOOLEAN, "maxProperties": 2}),
        "limited number of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unique_items_are_refused_with_a_reason(name):
    schema, reason = REFUSED[name]
    with pytest.raises(GrammarError, match=rf"JSON schema: cannot be enforced: #.*{reason}"):
        GrammarSpec.json_schema(schema).check()
    GrammarSpec.json_schema(schema, partial=True).check()


def test_unique_items_are_refused_in_tags_and_formats():
    with pytest.raises(GrammarError, match=r"tag schema: .*uniqueItems: cannot be enforced unless"):
        StructuralTag.of("<t>", unique(STRING), "</t>").check()
    form = {"type": "json_schema", "json_schema": unique(STRING)}
    with pytest.raises(GrammarError, match="uniqueItems: cannot be enforced unless"):
        GrammarSpec.structural_format(form).check()


@pytest.mark.parametrize("key_order", ["schema", "any"])
def test_unique_items_matcher_rolls_back_items(backend, key_order):
    """After a rollback, rows are those of a new matcher that has accepted the same tokens."""
    rng = random.Random(key_order)
    schema = closed(("a", "b"), a=unique(BOOLEAN), b=unique(closed(x=unique(BOOLEAN), y=STRING)))
    matcher = matcher_of(backend, schema, key_order)
    tokens: list[int] = []
    for _ in range(80):
        if rng.random() < 0.3 or len(tokens) > 30 or matcher.is_terminated():
            count = rng.randint(0, len(tokens))
            matcher.rollback(count)
            tokens = tokens[: len(tokens) - count]
        else:
            token = random_token(rng, matcher)
            assert matcher.accept(token)
            tokens.append(token)
        again = matcher_of(backend, schema, key_order)
        assert again.accept_all(tokens) == len(tokens)
        assert again.is_terminated() == matcher.is_terminated()
        if not again.is_terminated():
            assert list(again.legal()) == list(matcher.legal())


def test_unique_items_follow_a_reasoning_section(backend):
    spec = GrammarSpec.json_schema(unique(BOOLEAN), whitespace="compact").after("</think>")
    matcher = backend.compile(spec).matcher()
    assert matcher.accept_all(b"[true,true]</think>[true,") == 25
    assert [VOCABULARY.tokens[token] for token in matcher.legal()] == [b"f", b"false", b"false]"]
    assert matcher.distance() is None


@pytest.mark.parametrize("whitespace", ["line", "any", 2])
def test_unique_items_with_white_space(backend, whitespace):
    spec = GrammarSpec.json_schema(unique(BOOLEAN), whitespace=whitespace)
    matcher = backend.compile(spec).matcher()
    text = b"[true, false]" if whitespace == "line" else b"[ true , false ]"
    assert matcher.accept_all([*text, STOP]) == len(text) + 1
    matcher.rollback(matcher.accept_all([]) + len(text) + 1)
    text = b"[false, fa" if whitespace == "line" else b"[ false , fa"
    assert matcher.accept_all(text) == len(text) - 2


def test_unique_items_in_deeply_nested_items(backend):
    """Items are compared without recursion, so nesting does not exhaust the stack."""
    matcher = matcher_of(backend, unique({}))
    item = b"[" * 20_000 + b"]" * 20_000
    assert matcher.accept_all(b"[" + item + b"," + item) == 2 * len(item) + 1


def test_engine_outputs_have_unique_items_with_and_without_speculation():
    listed = unique({"enum": [*"abcdefgh"]}, minItems=3, maxItems=6)
    objects = unique(closed(("a",), a=BOOLEAN, b=BIT), minItems=4)
    requests = []
    for schema, order, temperature in (
        (listed, "schema", 0.0),
        (objects, "schema", 1.0),
        (objects, "any", 1.0),
        (unique(STRING, minItems=1, maxItems=3), "any", 0.0),
    ):
        spec = GrammarSpec.json_schema(schema, key_order=order)
        options = {"temperature": temperature, "seed": 7, "verify": "coupled"}
        requests.append(Request(prompt="?", grammar=spec, max_tokens=120, **options))
    with demo_engine(speculation=False) as engine:
        expected = engine.generate(requests)
    with demo_engine() as engine:
        found = engine.generate(requests)
    for request, output, same in zip(requests, found, expected, strict=True):
        assert output.tokens == same.tokens and output.closing == "not guaranteed"
        if output.reason == "stop":
            assert satisfies_schema(request.grammar.text, output.text), output.text
    assert [output.reason for output in found[:3]] == ["stop"] * 3
