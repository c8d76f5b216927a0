"""Random JSON schemas, texts and values that are checked against jsonschema.

`check_random_schema` generates one schema from a seed and checks the grammar that the router builds
from it in both directions:

* Random walks over the token bitmasks generate texts, which must satisfy the schema. A walk never
  reaches a state without a legal token.
* Random values that satisfy the schema, or nearly do, are written as JSON. A valid value must be
  accepted in at least one of its spellings, unless the attribute `narrowed` of `Route` or
  `AutomatonForm` names a reason. An invalid value must not be accepted.

The oracle is jsonschema with exact numbers: numbers are parsed as integers and decimal fractions.
If an object repeats a name, the last value counts, as in most JSON parsers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jsonschema
from guide_util import BYTES
from router_util import Grammar

from graft.grammar import GrammarError, GrammarSpec, LLGuidanceBackend, Matcher, Vocabulary
from graft.grammar.automaton.lower import compile_automaton
from graft.grammar.automaton.unique_items import NoUniqueItems, unique_shapes
from graft.grammar.resolve import ResolvedGrammar
from graft.grammar.schema.router import automaton_form, route

__all__ = ["Outcome", "automaton_of", "check_random_schema", "judge", "random_schema", "walk"]

NAMES = ("a", "b", "id", "A", "ab", "é", "日", "x y", "a\nb", 'a"b', "a\\b", "\x01", "/", "")
PATTERNS = ("^a", "^A", "^id$", "^[ab]$", "^[0-9]+$", "b$", "a", "^é", "^(a|id)$", "^[^a]*$", "")
STRINGS = ("", "a", "ab", "A", "b", "é", "日本", "a\nb", 'q"q', "\\", "0", "12", "aaa", "/", "\t")
FORMATS = ("date", "ipv4", "uuid")
LISTED = (
    0,
    1,
    -1,
    1.0,
    0.5,
    False,
    True,
    None,
    "a",
    "",
    "a\nb",
    "é",
    [],
    [0],
    [False],
    {},
    {"a": 1},
)
WHOLE = (0, 0, 1, 1, 2, 5, 10, 16, 99, 100, 2**31, 2**53 - 1, 2**53, 2**53 + 1, 10**18, 2**63 - 1)
FRACTIONS = ("", "", ".5", ".25", ".87", ".1", ".01", ".870000000000001", ".208148689759781")
MULTIPLES = (1, 2, 3, 10, 0.5, 0.1, 0.01, 2.5)
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")

_EXACT = decimal.Context(prec=400, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
_MAX_BYTES = 300  # maximum length of a generated text
_MAX_LEGAL = 600  # maximum number of legal tokens that a walk chooses from
#: First bytes of the tokens that end strings, objects and arrays, and of likely tokens.
_CLOSING = (b'"', b"}", b"]")
_LIKELY = [bytes([byte]) for byte in b'abidAu0014\\"n/.-5e ,:\n' + "é日".encode()]
_MAX_ORDERS = 720  # maximum number of orders in which the names of a value are written


class Outcome(NamedTuple):
    """Result of the check of one schema.

    Attributes
    ----------
    status
        ``exact``, ``automaton`` (exact, and an automaton was checked), ``only automaton``
        (LLGuidance cannot enforce the schema, and its automaton was checked), ``refused``,
        ``impossible``, or ``endless`` if jsonschema would not terminate.
    problems
        Description of each violation.
    texts
        Number of generated texts.
    values
        Number of valid values, and number of invalid values.
    excused
        Number of valid values that were refused for a reason that the route names.
    """

    status: str
    problems: list[str] = []  # noqa: RUF012
    texts: int = 0
    values: tuple[int, int] = (0, 0)
    excused: int = 0


# Schemas ------------------------------------------------------------------------------------------


class _Generator:
    """Generates one schema document."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._definitions = rng.sample(("d", "e"), rng.choice((0, 0, 1, 2)))

    def document(self) -> Any:
        document = self.schema(3)
        if not isinstance(document, dict):
            document = {"type": "array", "items": document}
        if self._definitions:
            document["$defs"] = {name: self.schema(2) for name in self._definitions}
        return document

    def schema(self, depth: int) -> Any:
        """Return a schema that is nested at most `depth` levels."""
        rng = self._rng
        draw = rng.random()
        if draw < 0.03:
            return rng.choice((True, False, {}))
        if self._definitions and draw < 0.15:
            return {"$ref": f"#/$defs/{rng.choice(self._definitions)}"}
        if draw < 0.25:
            return self._listed()
        if depth == 0:
            return self._typed(rng.choice(TYPES[:5]), 0)
        if draw < 0.42:
            return self._combined(depth - 1)
        if draw < 0.5:
            merged: dict[str, Any] = {}
            types = rng.sample(TYPES, 2)
            for json_type in types:
                merged |= self._typed(json_type, depth - 1)
            merged["type"] = types
            if rng.random() < 0.4:
                del merged["type"]
            return merged
        return self._typed(rng.choice((*TYPES, "object", "object", "array", "number")), depth - 1)

    def _maybe(self, share: float) -> bool:
        return self._rng.random() < share

    def _listed(self) -> dict[str, Any]:
        values = self._rng.sample(LISTED, self._rng.randint(1, 4))
        if self._maybe(0.1):
            values.append(self._rng.choice(WHOLE) * self._rng.choice((1, -1)))
        return {"const": values[0]} if self._maybe(0.3) else {"enum": values}

    def _combined(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        keyword = rng.choice(("anyOf", "anyOf", "oneOf", "allOf", "not", "if"))
        schema: dict[str, Any] = {}
        if self._maybe(0.4):
            schema = self._typed(rng.choice(TYPES), depth)
        if keyword == "not":
            schema["not"] = self.schema(min(depth, 1))
        elif keyword == "if":
            schema |= {key: self.schema(min(depth, 1)) for key in ("if", "then")}
            if self._maybe(0.5):
                schema["else"] = self.schema(min(depth, 1))
        else:
            schema[keyword] = [self.schema(depth) for _ in range(rng.randint(1, 3))]
        return self._shuffled(schema)

    def _typed(self, json_type: str, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": json_type}
        if json_type in ("number", "integer"):
            schema |= self._numbers()
        elif json_type == "string":
            schema |= self._strings()
        elif json_type == "array":
            schema |= self._arrays(depth)
        elif json_type == "object":
            schema |= self._objects(depth)
        return self._shuffled(schema)

    def _shuffled(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the schema with its keywords in another order, or unchanged."""
        items = list(schema.items())
        if self._maybe(0.3):
            self._rng.shuffle(items)
        return dict(items)

    def _number(self) -> int | float:
        rng = self._rng
        whole = rng.choice(WHOLE)
        fraction = rng.choice(FRACTIONS) if whole < 1000 else ""
        sign = rng.choice((1, 1, -1))
        return sign * (float(f"{whole}{fraction}") if fraction else whole)

    def _numbers(self) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        if self._maybe(0.6):
            low = self._number()
            schema[self._rng.choice(("minimum", "exclusiveMinimum"))] = low
            if self._maybe(0.5):
                high = low + self._rng.choice((0, 1, 2, 0.5, 10)) if abs(low) < 1000 else low + 1
                schema[self._rng.choice(("maximum", "exclusiveMaximum"))] = high
        elif self._maybe(0.5):
            schema[self._rng.choice(("maximum", "exclusiveMaximum"))] = self._number()
        if self._maybe(0.25):
            schema["multipleOf"] = self._rng.choice(MULTIPLES)
        return schema

    def _strings(self) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {}
        if self._maybe(0.3):
            schema["minLength"] = rng.randint(0, 3)
        if self._maybe(0.3):
            schema["maxLength"] = schema.get("minLength", 0) + rng.randint(0, 2)
        if self._maybe(0.3):
            schema["pattern"] = rng.choice(PATTERNS)
        elif self._maybe(0.1):
            schema["format"] = rng.choice(FORMATS)
        return schema

    def _arrays(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {}
        if self._maybe(0.8):
            schema["items"] = self.schema(depth)
        if self._maybe(0.2):
            schema["prefixItems"] = [self.schema(depth) for _ in range(rng.randint(1, 2))]
        if self._maybe(0.3):
            schema["minItems"] = rng.randint(0, 3)
        if self._maybe(0.4):
            schema["maxItems"] = schema.get("minItems", 0) + rng.randint(0, 2)
        if self._maybe(0.15):
            schema["uniqueItems"] = True
            schema["items"] = self._listed()
        if self._maybe(0.1):
            schema["contains"] = self.schema(0)
        return schema

    def _objects(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {}
        names = rng.sample(NAMES, rng.randint(0, 3))
        if names:
            schema["properties"] = {name: self.schema(depth) for name in names}
        if self._maybe(0.4):
            schema["required"] = rng.sample([*names, *rng.sample(NAMES, 1)], 1)
        if self._maybe(0.6):
            schema["additionalProperties"] = rng.choice((False, False, True, self.schema(0)))
        if self._maybe(0.25):
            patterns = rng.sample(PATTERNS, rng.choice((1, 1, 2)))
            schema["patternProperties"] = {pattern: self.schema(depth) for pattern in patterns}
        if self._maybe(0.15):
            schema["minProperties"] = rng.randint(0, 3)
        if self._maybe(0.15):
            schema["maxProperties"] = schema.get("minProperties", 0) + rng.randint(0, 2)
        if self._maybe(0.1):
            schema["propertyNames"] = rng.choice(
                ({"pattern": rng.choice(PATTERNS)}, {"enum": list(NAMES[:3])}, {"maxLength": 2})
            )
        if names and self._maybe(0.1):
            schema["dependentRequired"] = {names[0]: [rng.choice(NAMES)]}
        if names and self._maybe(0.05):
            schema["dependentSchemas"] = {names[0]: self.schema(min(depth, 1))}
        return schema


def random_schema(rng: random.Random) -> Any:
    """Return a random JSON schema of draft 2020-12."""
    return _Generator(rng).document()


def in_draft(schema: Any, draft: int) -> Any:
    """Return a schema of draft 2020-12 in the keywords of draft 4 or 7.

    Keywords that the older draft lacks and that have no equivalent are left out.
    """
    older = _older(schema, draft)
    return {"$schema": f"http://json-schema.org/draft-0{draft}/schema#", **older}


def _older(schema: Any, draft: int) -> Any:
    if isinstance(schema, bool):
        return schema if draft > 4 else ({} if schema else {"not": {}})
    new: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$ref":
            new["$ref"] = value.replace("$defs", "definitions")
        elif keyword in ("properties", "patternProperties", "$defs", "dependentSchemas"):
            parts = {name: _older(part, draft) for name, part in value.items()}
            name = {"$defs": "definitions", "dependentSchemas": "dependencies"}.get(keyword)
            new[name or keyword] = parts
        elif keyword == "dependentRequired":
            new["dependencies"] = value  # replaced if dependentSchemas follows
        elif keyword in ("anyOf", "oneOf", "allOf"):
            new[keyword] = [_older(part, draft) for part in value]
        elif keyword == "prefixItems":
            new["items"] = [_older(part, draft) for part in value]
        elif keyword == "items" and "prefixItems" in schema:
            new["additionalItems"] = _older(value, draft)
        elif keyword in ("not", "items", "additionalProperties"):
            new[keyword] = _older(value, draft)
            if keyword == "additionalProperties" and isinstance(value, bool):
                new[keyword] = value
        elif keyword == "format" and value != "ipv4":
            continue  # jsonschema knows few formats of older drafts
        elif draft == 4 and keyword == "const":
            new["enum"] = [value]
        elif draft == 4 and keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            new["m" + keyword[10:]] = value
            new[keyword] = True
        elif keyword in ("if", "then", "else", "contains", "propertyNames"):
            if draft > 4:
                new[keyword] = _older(value, draft)
        else:
            new[keyword] = value
    return new


# Decisions of jsonschema --------------------------------------------------------------------------


def parse(text: str) -> Any:
    """Return a parsed JSON text with exact numbers."""

    def number(text: str) -> Any:
        value = decimal.Decimal(text)
        if value.adjusted() < 300 and value == value.to_integral_value(context=_EXACT):
            return int(value)
        return value

    return json.loads(text, parse_float=number, parse_constant=decimal.Decimal)


def judge(schema: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether jsonschema accepts a value that `parse` has returned."""
    cls = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    cls = jsonschema.validators.extend(cls, {"uniqueItems": _unique_items})
    document = _for_python(parse(json.dumps(schema)))
    validator = cls(document, format_checker=cls.FORMAT_CHECKER)

    def is_valid(value: Any) -> bool:
        with decimal.localcontext(_EXACT):
            return bool(validator.is_valid(value))

    return is_valid


def _unique_items(validator: Any, is_unique: bool, value: Any, schema: Any) -> Iterator[Any]:
    """Yield an error for an array with equal items. jsonschema itself misses some of them."""
    if not is_unique or not isinstance(value, list):
        return
    for item, other in itertools.combinations(value, 2):
        if _equality_key(item) == _equality_key(other):
            yield jsonschema.ValidationError("has equal items")


def _equality_key(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _equality_key(part) for name, part in value.items()}
    if isinstance(value, list):
        return list(map(_equality_key, value))
    return isinstance(value, bool), value


def leads_back(document: Any) -> bool:
    """Return whether a definition refers to itself for the same value, so checks never end."""

    def applied(part: Any) -> set[str]:
        """Return the definitions that a schema applies to the same value."""
        if not isinstance(part, dict):
            return set()
        found = {part["$ref"][8:]} if "$ref" in part else set()
        inner = [part.get(key) for key in ("not", "if", "then", "else")]
        inner += [p for key in ("anyOf", "oneOf", "allOf") for p in part.get(key, ())]
        for other in (*inner, *part.get("dependentSchemas", {}).values()):
            found |= applied(other)
        return found

    definitions = document.get("$defs", {})
    reached = {name: applied(part) for name, part in definitions.items()}
    for _ in definitions:
        for name, names in reached.items():
            reached[name] = names.union(*(reached[other] for other in names))
    return any(name in names for name, names in reached.items())


def _for_python(part: Any, keyword: str = "") -> Any:
    """Return the schema with patterns in which ``$`` does not match before a final line feed."""
    if isinstance(part, list):
        return [_for_python(item) for item in part]
    if not isinstance(part, dict) or keyword in ("enum", "const"):
        return part
    new = {}
    for key, value in part.items():
        if keyword == "patternProperties":
            # jsonschema ignores an empty pattern next to additionalProperties.
            new[key.replace("$", r"\Z") or ".*"] = _for_python(value)
        elif key == "pattern" and isinstance(value, str) and keyword != "properties":
            new[key] = value.replace("$", r"\Z")
        else:
            new[key] = _for_python(value, "" if keyword == "properties" else key)
    return new


# Texts --------------------------------------------------------------------------------------------


class DeadEnd(Exception):
    """Raised by `walk` in a state without a legal token."""


def walk(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random) -> bytes | None:
    """Generate a random text of a grammar.

    The walk prefers tokens that end strings, objects and arrays, and more so in long texts.

    Returns
    -------
    bytes or None
        The text; None if it is not complete after `_MAX_BYTES` bytes.

    Raises
    ------
    DeadEnd
        No token is legal.
    """
    out = b""
    tokens, stops = vocabulary.tokens, vocabulary.stop_ids
    while len(out) < _MAX_BYTES:
        legal = matcher.legal().tolist()
        if not legal:
            raise DeadEnd(out.decode("utf-8", "replace"))
        if len(legal) > _MAX_LEGAL:
            short = [token for token in legal[:_MAX_LEGAL] if len(tokens[token]) < 2]
            legal = [*rng.sample(legal, _MAX_LEGAL), *short]
        ending = [token for token in legal if token in stops]
        closing = ending or [token for token in legal if tokens[token][:1] in _CLOSING]
        likely = [token for token in legal if tokens[token][:1] in _LIKELY]
        token = rng.choice(likely or legal)
        if closing and rng.random() < 0.25 + len(out) / 60:
            token = rng.choice(closing)
        elif rng.random() < 0.1:
            token = rng.choice(legal)
        assert matcher.accept(token)
        if token in stops:
            return out
        out += tokens[token]
    return None


# Values -------------------------------------------------------------------------------------------


def random_value(schema: Any, root: Any, rng: random.Random, depth: int = 5) -> Any:
    """Return a value that probably satisfies a schema. Numbers are integers or decimals."""
    if depth == 0 or not isinstance(schema, dict) or rng.random() < 0.03:
        return _any_value(rng)
    if "$ref" in schema:
        return random_value(root["$defs"][schema["$ref"][8:]], root, rng, depth - 1)
    if "const" in schema or "enum" in schema:
        return parse(json.dumps(rng.choice(schema.get("enum", [schema.get("const")]))))
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema and rng.random() < 0.7:
            part = rng.choice(schema[keyword])
            if keyword == "allOf" and rng.random() < 0.5:
                part = {key: value for key, value in schema.items() if key != "allOf"}
                for conjunct in schema["allOf"]:
                    part |= conjunct if isinstance(conjunct, dict) else {}
            return random_value(part, root, rng, depth - 1)
    for keyword in ("then", "else"):
        if keyword in schema and rng.random() < 0.4:
            return random_value(schema[keyword], root, rng, depth - 1)
    json_type = schema.get("type", rng.choice(TYPES))
    if isinstance(json_type, list):
        json_type = rng.choice(json_type)
    if json_type in ("number", "integer"):
        return _near_bounds(schema, json_type, rng)
    if json_type == "array":
        prefix = schema.get("prefixItems", [])
        low = int(schema.get("minItems", 0))
        items = []
        high = max(low, min(low + 2, schema.get("maxItems", 99)))
        for index in range(rng.randint(low, high)):
            part = prefix[index] if index < len(prefix) else schema.get("items", True)
            items.append(random_value(part, root, rng, depth - 1))
        return items
    if json_type == "object":
        return _random_object(schema, root, rng, depth)
    if json_type == "string":
        return rng.choice((*STRINGS, "2024-02-29", "127.0.0.1"))
    return None if json_type == "null" else rng.random() < 0.5


def _random_object(schema: Any, root: Any, rng: random.Random, depth: int) -> dict[str, Any]:
    properties = schema.get("properties", {})
    value = {}
    for name, part in properties.items():
        if name in schema.get("required", ()) or rng.random() < 0.6:
            value[name] = random_value(part, root, rng, depth - 1)
    for name in schema.get("required", ()):
        if name not in value:
            value[name] = random_value(properties.get(name, True), root, rng, depth - 1)
    extra = rng.choice((0, 0, 1, 2))
    if len(value) < schema.get("minProperties", 0):
        extra = schema["minProperties"] - len(value)
    for name in rng.sample(NAMES, extra):
        part = schema.get("additionalProperties", True)
        for pattern, found in schema.get("patternProperties", {}).items():
            if pattern.strip("^$") in name:
                part = found
        value.setdefault(name, random_value(properties.get(name, part), root, rng, depth - 1))
    return value


def _near_bounds(schema: dict[str, Any], json_type: str, rng: random.Random) -> Any:
    keywords = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    bounds = [schema[key] for key in keywords if key in schema] or [0]
    base = decimal.Decimal(repr(rng.choice(bounds)))
    step = decimal.Decimal(repr(schema.get("multipleOf", 1)))
    with decimal.localcontext(_EXACT):
        if "multipleOf" in schema:
            base = base // step * step
        offsets = [0, 0, step, -step, 2 * step]
        if json_type == "number" and "multipleOf" not in schema:
            offsets += [decimal.Decimal(text) for text in ("0.5", "-0.5", "0.01", "0.000001")]
        value = base + rng.choice(offsets)
        if json_type == "integer" and rng.random() < 0.9:
            value = value.to_integral_value()
    return int(value) if value == value.to_integral_value(context=_EXACT) else value


def _any_value(rng: random.Random) -> Any:
    value = rng.choice((*LISTED, *STRINGS, 7, {"b": [1]}, {"id": "x", "a": None}))
    return parse(json.dumps(value))


def mutated(value: Any, rng: random.Random) -> Any:
    """Return a value that differs from `value` in one place."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        rest = {key: part for key, part in value.items() if key != name}
        if rng.random() < 0.3:
            return rest
        if rng.random() < 0.3:
            return {**value, rng.choice(NAMES): _any_value(rng)}
        return {**value, name: mutated(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        changed = [mutated(value[index], rng)] if rng.random() < 0.6 else []
        return [*value[:index], *changed, *value[index + 1 :]]
    if isinstance(value, (int, decimal.Decimal)) and not isinstance(value, bool):
        return value + rng.choice((1, -1))
    return _any_value(rng)


def spellings(value: Any) -> Iterator[str]:
    """Yield JSON texts of a value.

    The texts differ in the order of names and in the number of trailing zeros of fractions. In the
    last text, integers have a fraction, too.
    """
    for ordered in itertools.islice(_orders(value), _MAX_ORDERS):
        plain = _written(ordered, 0, 0)
        yield plain
        if "." in plain:
            yield from (_written(ordered, zeros, 0) for zeros in (1, 2, 3))
    yield _written(value, 0, 1)


def escaped(text: str) -> str:
    r"""Return a JSON text in which letters and digits inside strings are ``\u`` escapes."""

    def escape(match: re.Match[str]) -> str:
        characters = re.findall(r"\\.|[^\\]", match[0])
        return "".join(f"\\u{ord(c):04x}" if c.isalnum() else c for c in characters)

    return re.sub(r'"(?:\\.|[^"\\])*"', escape, text)


def with_repeated_name(value: Any, rng: random.Random) -> str:
    """Return the text of an object that repeats one of its names; empty for other values."""
    if not isinstance(value, dict) or not value:
        return ""
    name = rng.choice(list(value))
    again = _written(mutated(value[name], rng), 0, 0)
    spelled = rng.choice((_quoted(name), escaped(_quoted(name))))
    return f"{_written(value, 0, 0)[:-1]}, {spelled}: {again}}}"


def _orders(value: Any) -> Iterator[Any]:
    """Yield the value with the names of its objects in all orders."""
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for parts in itertools.product(*(list(_orders(value[name])) for name in names)):
                yield dict(zip(names, parts, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(_orders(part)) for part in value)))
    else:
        yield value


def _written(value: Any, zeros: int, digits: int) -> str:
    """Return the JSON text of a value.

    Parameters
    ----------
    value
        The value.
    zeros
        Number of zeros at the end of each fraction.
    digits
        Number of digits of the fraction of each integer.
    """
    if isinstance(value, dict):
        pairs = [f"{_quoted(name)}: {_written(v, zeros, digits)}" for name, v in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_written(part, zeros, digits) for part in value) + "]"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value}.{'0' * digits}" if digits else str(value)
    if isinstance(value, decimal.Decimal):
        return format(value, "f").rstrip("0") + "0" * zeros
    return _quoted(value)


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Checks -------------------------------------------------------------------------------------------


def check_random_schema(
    seed: int,
    texts: int = 6,
    values: int = 10,
    backend: LLGuidanceBackend | None = None,
    automata: bool = False,
) -> Outcome:
    """Generate a schema from a seed and check its grammar.

    Parameters
    ----------
    seed
        Seed of the schema, the texts and the values.
    texts, values
        Numbers of texts and values.
    backend
        Backend with another vocabulary. One more text is generated with it.
    automata
        Whether the schema's automaton is checked, if it has one, instead of LLGuidance's matcher.
    """
    rng = random.Random(seed)
    schema = random_schema(rng)
    if leads_back(schema):
        return Outcome("endless")
    draft = rng.choice((2020, 2020, 2020, 7, 4))
    drawn = [random_value(schema, schema, rng) for _ in range(values)]
    drawn += [mutated(value, rng) for value in drawn]
    if draft <= 7:
        schema = in_draft(schema, draft)
    is_valid = judge(schema)
    valid = [value for value in drawn if is_valid(value)]
    invalid = [value for value in drawn if not is_valid(value)]
    problems: list[str] = []

    def report(problem: str) -> None:
        problems.append(f"seed {seed}: {problem}\n  {json.dumps(schema, ensure_ascii=False)}")

    key_order: Any = rng.choice(("schema", "schema", "any"))
    try:
        found = route(schema, key_order=key_order)
    except GrammarError as error:
        if valid:
            report(f"refused as impossible ({error}), but {valid[0]!r} is valid")
        return Outcome("impossible", problems)
    if not found.exact:
        if valid and any("allows no output (" in reason.why for reason in found.reasons):
            report(f"refused as impossible ({found.refusal()}), but {valid[0]!r} is valid")
        if not automata:
            return Outcome("refused", problems)
    form = automaton_form(schema, key_order=key_order) if automata else None
    automaton = unique = None
    if form is not None:
        with contextlib.suppress(NoUniqueItems):
            unique = unique_shapes(form.schema, any_order=key_order == "any")
            automaton = automaton_of(form.schema)
    if automaton is not None:
        found = dataclasses.replace(found, narrowed=form.narrowed + found.ordered)
    if automaton is None and not found.exact:
        return Outcome("refused", problems)
    grammar = Grammar.routed(found, automaton=automaton, unique=unique)
    count = 0
    walks = [(grammar.matcher(), BYTES) for _ in range(texts)]
    if backend is not None:
        other = Grammar.routed(found, backend, automaton, unique)
        walks.append((other.matcher(), backend.vocabulary))
    for matcher, vocabulary in walks:
        try:
            out = walk(matcher, vocabulary, rng)
        except DeadEnd as error:
            report(f"dead end after {error}")
            continue
        if out is None:
            continue
        count += 1
        try:
            right = is_valid(parse(out.decode()))
        except decimal.InvalidOperation:  # the exponent is too large
            continue
        except ValueError:
            right = False
        if not right:
            report(f"invalid output {out.decode('utf-8', 'replace')}")
    excused = 0
    for value in valid:
        accepted = next(filter(grammar.accepts, spellings(value)), None)
        if accepted is None and set(found.narrowed) - set(found.ordered):
            excused += 1
        elif accepted is None:
            report(f"refuses {next(spellings(value))}")
        elif len(accepted) > len(_written(value, 0, 0)) and not found.spelling:
            report(f"accepts {accepted}, but not without the zeros")
    for value in invalid:
        for text in (*spellings(value), escaped(next(spellings(value)))):
            if grammar.accepts(text):
                report(f"accepts {text}")
                break
    for value in drawn:
        text = with_repeated_name(value, rng)
        if text and grammar.accepts(text) and not is_valid(parse(text)):
            report(f"accepts {text}")
    status = "exact" if automaton is None else "automaton"
    if not found.exact:
        status = "only automaton"
    return Outcome(status, problems, count, (len(valid), len(invalid)), excused)


def automaton_of(schema: Any) -> bytes | None:
    """Return the serialized automaton of a schema from `automaton_form`; None if there is none."""
    return compile_automaton(
        ResolvedGrammar(GrammarSpec("json_schema", "{}"), "llguidance", schema)
    )
