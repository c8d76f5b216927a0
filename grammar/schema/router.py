"""What LLGuidance is to be given for a JSON schema, and the truth about what it will enforce."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graft.grammar.schema.any_order.rules import in_any_order
from graft.grammar.schema.options import KeyOrder, Whitespace, check_options
from graft.grammar.schema.rewrite import Rewritten, rewrite
from graft.grammar.schema.terms import Reason, has_orders, subschemas, word_set
from graft.grammar.schema.trial import objections
from graft.grammar.schema.wellformed import check_schema

__all__ = ["Route", "refusal", "route"]

_MOST_REASONS = 20
_BOUNDS = word_set("minimum maximum exclusiveMinimum exclusiveMaximum")


@dataclass(frozen=True)
class Route:
    """What is to be done with a schema. Nothing is loosened without a word.

    Attributes
    ----------
    backend
        ``"llguidance"``, or None if it does not take the schema even loosely.
    schema
        What to give to it: the schema, rewritten where the rewriting is equivalent. If not
        ``exact``, the parts named in ``reasons`` are missing.
    exact
        Whether every text that can be produced is one of a value that satisfies the schema.
    rules
        A Lark grammar to give to it instead; empty: the schema does.
    reasons
        Why it is not exact.
    narrowed, ordered
        All that an exact route leaves out: texts of values that satisfy the schema and are not
        produced. Keys come in one order, or should come in any and cannot, which ``ordered`` says
        alone; options of a ``oneOf`` may overlap in ways that have no exact form, and texts stay
        clear of the overlap. Empty: every value that satisfies the schema can be produced.
    spelling
        Where a value has several spellings of which some are not produced: ``2`` and not ``2.0``.
        (Everywhere: white space as the grammar lays it out, and escapes in strings only where JSON
        needs them.)
    """

    backend: str | None
    schema: Any
    exact: bool
    rules: str = ""
    reasons: tuple[Reason, ...] = ()
    narrowed: tuple[Reason, ...] = ()
    ordered: tuple[Reason, ...] = ()
    spelling: tuple[Reason, ...] = ()

    def refusal(self) -> str:
        """The reasons as one sentence."""
        return refusal(self.reasons)


def refusal(reasons: Sequence[Reason]) -> str:
    """Why a schema is refused, as one sentence."""
    named = "; ".join(map(str, reasons[:5]))
    more = len(reasons) - 5
    return f"cannot be enforced: {named}" + (f"; and {more} more" if more > 0 else "")


def route(
    schema: Any,
    *,
    draft: int = 2020,
    key_order: KeyOrder = "schema",
    whitespace: Whitespace = "line",
    assert_formats: bool | None = None,
) -> Route:
    """Find the form of a schema that LLGuidance enforces exactly, or the one that comes closest.

    Parameters
    ----------
    schema
        Parsed JSON schema: an object or a boolean. It is not changed. ``GrammarError`` if it is
        none, or one of nothing.
    draft
        Draft of schemas that do not name theirs: 3, 4, 6, 7, 2019 or 2020.
    key_order, whitespace, assert_formats
        As in `Spec`.
    """
    check_options(key_order, whitespace, assert_formats)
    check_schema(schema)
    new = rewrite(schema, draft=draft, assert_formats=assert_formats)
    found, reasons, taken = _taken(new)
    rules = ""
    ordered: tuple[Reason, ...] = ()
    unusual: tuple[Reason, ...] = ()
    if key_order == "any" and taken:
        rules, ordered, unusual = in_any_order(found, whitespace)
    elif taken and any(has_orders(part) for _, part in subschemas(found)):
        ordered = (Reason("#", "properties", "keys come in the schema's order only"),)
    return Route(
        "llguidance" if taken else None,
        found,
        taken and not reasons,
        rules,
        tuple(reasons[:_MOST_REASONS]),
        new.narrowed + unusual + ordered,
        ordered,
        tuple(itertools.islice(_spelled_once(schema), _MOST_REASONS)),
    )


def _taken(new: Rewritten) -> tuple[Any, list[Reason], bool]:
    """What LLGuidance takes: keywords that it refuses are taken out one by one, and named."""
    schema = new.schema
    reasons = list(new.lost)
    if isinstance(schema, bool):
        nothing = [] if schema else [Reason("#", "schema", "allows no output")]
        return {}, nothing or reasons, schema
    loose = schema
    while found := objections(loose):
        reasons += found
        reason = found[0]
        if loose is schema:
            loose = copy.deepcopy(schema)
        parts = dict(subschemas(loose))
        here = parts.get(reason.pointer, {})
        if reason.keyword not in here:  # as where it allows no output
            return schema, list(dict.fromkeys([reason, *reasons])), False
        # With so many the rest is not looked for one by one.
        for part in parts.values() if len(reasons) > _MOST_REASONS else (here,):
            part.pop(reason.keyword, None)
    return loose, reasons, True


def _spelled_once(schema: Any) -> Iterator[Reason]:
    """Where numbers have fewer spellings than JSON has."""
    for pointer, part in subschemas(schema):
        kind = part.get("type")
        if kind == "integer" or (isinstance(kind, list) and "integer" in kind):
            yield Reason(pointer, "type", "integers are written without a fraction or exponent")
        elif _BOUNDS & part.keys():
            keyword = min(_BOUNDS & part.keys())
            yield Reason(pointer, keyword, "numbers are written without an exponent, 0 without -")
        if isinstance(part.get("multipleOf"), float):
            yield Reason(pointer, "multipleOf", "multiples have as many digits as the divisor")
        for keyword in ("const", "enum"):
            if keyword in part and _has_number(part[keyword]):
                yield Reason(pointer, keyword, "numbers are written in one way")


def _has_number(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_has_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)
