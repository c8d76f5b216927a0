"""A JSON schema as a Lark grammar for LLGuidance in which objects take their keys in any order.

LLGuidance's own compiler of schemas writes the properties of an object in one order. Here an object
is a rule with a bit per named property, set once the property is written::

    pairs::_: "\\"a\\"" COLON r1 more::set_bit(0) %if bit_clear(0) | ...
    more::_: "" %if is_ones([0:1]) | COMMA pairs::_

What holds no such object stays with LLGuidance's compiler (``%json``).
"""

from __future__ import annotations

from typing import Any

from graft.grammar.schema.any_order import lark
from graft.grammar.schema.any_order.leaves import KNOWN, Leaves
from graft.grammar.schema.any_order.shape import Array, Object, Parts, array_of, object_of
from graft.grammar.schema.options import Whitespace, json_options, literal
from graft.grammar.schema.terms import KINDS, Cannot, Reason, has_orders, kinds_of, meet, subschemas
from graft.grammar.schema.trial import trial_lark

__all__ = ["in_any_order"]

_WHOLE = "schema"  # where a `Cannot` says so, there is no grammar for the schema as a whole
_MOST_RULES = 3000
_MOST_OPTIONS = 256  # conjunctions that one union within a conjunction may become
_MOST_TEXT = 400_000
_KEPT = "keys in the schema's order only: "


Told = tuple[Reason, ...]


def in_any_order(schema: Any, whitespace: Whitespace) -> tuple[str, Told, Told]:
    """A Lark grammar for a schema that LLGuidance takes; empty if ``%json`` does it, or nothing.

    Also where, and why, keys keep the schema's order all the same: in some objects if there are
    rules, else in all; and where other keys are left out.
    """
    why = Cannot("schema", "it is too deep")
    try:
        # Asking whether anything fits each leaf costs time, and few schemas have any that nothing
        # fits; there LLGuidance refuses the grammar.
        for careful in (False, True):
            worker = _Rules(Leaves(schema, json_options(whitespace), careful))
            rules = worker.text(schema, whitespace)
            objection = trial_lark(rules) if rules else ""
            if not objection:
                kept = _located(schema, worker.kept, _KEPT)
                return rules, kept, _located(schema, worker.narrowed, "")
            why = Cannot("schema", objection)
            if "Unsatisfiable" not in objection:
                break
    except RecursionError:
        pass
    except Cannot as error:
        why = error
    return "", _located(schema, [why], _KEPT), ()


def _located(schema: Any, told: list[Cannot], what: str) -> Told:
    """Each obstacle with the part of the schema that has most of it."""
    parts = subschemas(schema) if told else []
    found = []
    for why in told:
        extents = [(_extent(part, why), pointer) for pointer, part in parts]
        place = max(extents, key=lambda one: one[0])[1] if extents else "#"
        found.append(Reason(place, why.keyword, what + why.why))
    return tuple(dict.fromkeys(found))


def _extent(part: dict[str, Any], why: Cannot) -> int:
    """How much of what stands in the way is in this part of the schema."""
    value = part.get(why.keyword)
    if why.keyword == "$ref":
        return int(repr(value) in why.why)
    return len(value) if isinstance(value, (dict, list)) else 0


class _Rules:
    def __init__(self, leaves: Leaves):
        self.kept: list[Cannot] = []
        self.narrowed: list[Cannot] = []
        self._leaves = leaves
        self._names: dict[tuple[int, ...], str | None] = {}  # conjunctions, by identity
        self._open: set[str] = set()  # names given whose rules are being made
        self._used: set[str] = set()  # of those, the ones referred to
        self._alive: list[Any] = []  # what identities stand for lives as long as this
        self._rules: dict[str, str] = {}
        self._known: dict[str, str] = {}  # rule bodies
        self._terminals: dict[str, str] = {}
        self._count = 0
        self._size = 0

    def text(self, root: Any, whitespace: Whitespace) -> str:
        """All rules, started from ``start``; none if one ``%json`` says the same."""
        if not self._leaves.has_objects(root):
            return ""
        start = self.of((root,))
        if start is None:
            raise Cannot(_WHOLE, "allows no output")
        lines = [f"start: {start}"]
        lines += [f"{name}: {body}" for name, body in self._rules.items()]
        lines += [f"{name}: {body}" for body, name in self._terminals.items()]
        return "\n".join([*lines, lark.separators(json_options(whitespace))])

    def of(self, parts: Parts) -> str | None:
        """The rule of what fits all the schemas; None if nothing does."""
        flat = self._leaves.conjuncts(parts)
        if flat is None:
            return None
        if len(flat) == 1 and flat[0].keys() == {"$ref"}:
            return self.of((self._leaves.resolved(flat[0]["$ref"]),))
        identity = tuple(sorted({id(part) for part in flat}))
        if identity in self._names:
            name = self._names[identity]
            if name in self._open:
                self._used.add(name)
            return name
        self._alive.append(flat)
        name = self._names[identity] = self._new("r")
        self._open.add(name)
        try:
            body = self._body(flat)
        except Cannot as error:
            del self._names[identity]
            if name in self._used:  # by rules that may be used
                raise Cannot(_WHOLE, error.why) from None
            raise
        finally:
            self._open.remove(name)
        if body is None:
            if name in self._used:
                raise Cannot("$ref", "a recursive schema that allows nothing")
            self._names[identity] = None
            return None
        if name in self._used:
            self._define(name, body)
        else:
            self._names[identity] = name = self._shared(body, name)
        return name

    def _new(self, kind: str) -> str:
        self._count += 1
        if self._count > _MOST_RULES:
            raise Cannot(_WHOLE, "too large")
        return f"{kind}{self._count}"

    def _define(self, name: str, body: str) -> None:
        self._rules[name] = body
        self._size += len(body)
        if self._size > _MOST_TEXT:
            raise Cannot(_WHOLE, "too large")

    def _shared(self, body: str, name: str = "") -> str:
        if body not in self._known:
            self._known[body] = name or self._new("r")
            self._define(self._known[body], body)
        return self._known[body]

    def _terminal(self, body: str) -> str:
        return self._terminals.setdefault(body, f"T{len(self._terminals)}")

    def _body(self, parts: tuple[dict[str, Any], ...]) -> str | None:
        if not any(self._leaves.has_objects(part) for part in parts):
            return self._leaves.of(parts)
        for index, part in enumerate(parts):
            rest = (*parts[:index], *parts[index + 1 :])
            if "$ref" in part:
                target = self._leaves.resolved(part["$ref"])
                return self.of((target, self._leaves.without(part, "$ref"), *rest))
            if "anyOf" in part:
                return self._union(part["anyOf"], (self._leaves.without(part, "anyOf"), *rest))
        return self._plain(parts)

    def _union(self, options: list[Any], rest: Parts) -> str | None:
        if len(options) > _MOST_OPTIONS:
            raise Cannot("anyOf", f"{len(options)} options")
        together = self._leaves.conjuncts(rest)
        if together is None:
            return None
        small = []
        names = []
        for option in options:
            if any(map(self._leaves.has_objects, (option, *together))):
                names.append(self.of((option, *together)))
            else:
                small.append(option)
        if small:
            names.append(self.of(({"anyOf": small}, *together)))
        named = list(dict.fromkeys(name for name in names if name is not None))
        return " | ".join(named) or None

    def _plain(self, parts: tuple[dict[str, Any], ...]) -> str | None:
        """Conjuncts without references and unions."""
        for part in parts:
            if part.keys() - KNOWN:
                keyword = min(part.keys() - KNOWN)
                raise Cannot(keyword, "in an object")
        for part in parts:
            if "enum" in part or "const" in part:
                if has_orders(part):
                    self.kept.append(Cannot("enum" if "enum" in part else "const", "of objects"))
                return self._leaves.of(parts)
        kinds = KINDS
        for part in parts:
            kinds = meet(kinds, kinds_of(part))
        names = []
        for kind in ("object", "array"):
            if kind in kinds:
                try:
                    names.append(
                        self._object(object_of(parts))
                        if kind == "object"
                        else self._array(array_of(parts), parts)
                    )
                except Cannot as error:
                    if error.keyword == _WHOLE:
                        raise
                    self.kept.append(error)
                    names.append(self._leaf(parts, frozenset((kind,))))
        if kinds - {"object", "array"}:
            names.append(self._leaf(parts, kinds - {"object", "array"}))
        return " | ".join(name for name in names if name) or None

    def _leaf(self, parts: Parts, kinds: frozenset[str]) -> str | None:
        text = self._leaves.of(parts, kinds)
        return None if text is None else self._shared(text)

    def _array(self, array: Array, parts: Parts) -> str | None:
        if not any(map(self._leaves.has_objects, array.items)):
            return self._leaf(parts, frozenset(("array",)))
        item = None if array.high == 0 else self.of(array.items)
        high = 0 if item is None else array.high
        if high is not None and array.low > high:
            return None
        return self._shared(lark.array_body(item, array.low, high))

    def _object(self, shape: Object) -> str | None:
        names: dict[str, str] = {}
        for name in sorted(shape.names, key=lambda name: name not in shape.required):
            rule = self.of(shape.names[name])
            if rule is not None:
                names[name] = rule
            elif name in shape.required:
                return None
        if len(names) > lark.BITS:
            raise Cannot("properties", f"{len(names)} of them or more")
        pairs = lark.Pairs(tuple(names.items()), len(shape.required), self._other_pairs(shape))
        known = repr(pairs)
        if known not in self._known:
            name = self._known[known] = self._new("o")
            for head, body in lark.object_rules(name, pairs).items():
                self._define(head, body)
        return self._known[known]

    def _other_pairs(self, shape: Object) -> str | None:
        """Rule of one pair whose key has no name in the schema."""
        taken = [literal(lark.key(name)) for name in shape.names]
        patterns = [lark.regex(lark.pattern_key(pattern)) for pattern in shape.patterns]
        others = lark.regex(lark.PLAIN_KEY if patterns else lark.ANY_KEY)
        if patterns:
            self.narrowed.append(Cannot("patternProperties", "no keys that JSON escapes"))
        options = []
        for which, but, schemas in (
            *(
                (f"{one} & ", taken, schemas)
                for one, schemas in zip(patterns, shape.patterns.values(), strict=True)
            ),
            ("", taken + patterns, shape.rest),
        ):
            rule = self.of(schemas)
            if rule is not None:
                free = f" & ~({' | '.join(but)})" if but else ""
                options.append(f"{self._terminal(which + others + free)} COLON {rule}")
        return self._shared(" | ".join(options)) if options else None
