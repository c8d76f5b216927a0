"""Chooses a grammar backend for a JSON schema, and tells the truth about what it will enforce."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import GrammarError
from ..judge import check_output
from .any_order.key_order import has_key_orders, in_any_order
from .enforcement import (
    BACKENDS,
    available_backends,
    compile_cost,
    refusals,
    subschemas,
    unsatisfiable,
)
from .rewrite.rewriter import Rewritten, rewrite
from .terms import Reason

__all__ = ["KEY_ORDERS", "Reason", "Route", "check_output", "route", "route_named"]

#: ``"any"``, or ``"schema"``: as the schema lists its properties.
KEY_ORDERS = ("any", "schema")

_MOST_REASONS = 20
_LONGEST_LOOSE = 30_000  # characters; XGrammar takes seconds for some longer ones
_EMPTY = "allows no output"


@dataclass(frozen=True)
class Route:
    """What is to be done with a schema.

    Attributes
    ----------
    backend
        ``"llguidance"``, ``"xgrammar"``, or None if no backend takes the schema even loosely.
    schema
        What to give to it: the schema, rewritten where the rewriting is equivalent. If not
        ``exact``, the parts named in ``reasons`` are missing.
    exact
        Whether every text that can be produced is one of a value that satisfies the schema.
    key_order
        ``"any"`` if the grammar for ``schema`` takes the keys of its objects in any order, but for
        what is ``narrowed``; ``"schema"`` if only as the schema lists them, named ones first.
    reasons
        Why it is not exact: JSON pointer, keyword, why.
    rewritten
        What was rewritten, in the same form.
    narrowed
        What is said here is all that an exact route leaves out: texts of values that satisfy the
        schema and are not produced, in the same form. Options of a ``oneOf`` may overlap in ways
        that have no exact form, and texts stay clear of the overlap; keys in any order may have
        been asked for and be beyond the backend. Empty: every value that satisfies the schema can
        be produced, with its keys in every order that was asked for.
    ordered
        The part of ``narrowed`` that is about keys.
    spelling
        Where a value has several spellings of which one is produced, in the same form: ``2`` and
        not ``2.0``. (Everywhere: white space as the grammar lays it out, and escapes in strings
        only where JSON needs them.)
    """

    backend: str | None
    schema: Any
    exact: bool
    key_order: str = "any"
    reasons: tuple[Reason, ...] = ()
    rewritten: tuple[Reason, ...] = ()
    narrowed: tuple[Reason, ...] = ()
    ordered: tuple[Reason, ...] = ()
    spelling: tuple[Reason, ...] = ()

    def refusal(self) -> str:
        """The reasons as one sentence."""
        named = "; ".join(str(reason) for reason in self.reasons[:5])
        more = len(self.reasons) - 5
        return f"cannot be enforced: {named}" + (f"; and {more} more" if more > 0 else "")


def route(
    schema: Any, backends: Sequence[str] | None = None, *, draft: int = 2020,
    key_order: str = "any",
) -> Route:  # fmt: skip
    """Find the backend that enforces a schema exactly, or the one that comes closest.

    Parameters
    ----------
    schema
        Parsed JSON schema: an object or a boolean. It is not changed.
    backends
        Names of the backends to choose from, best first; default: those installed.
    draft
        Draft of schemas that do not name theirs: 3, 4, 6, 7, 2019 or 2020.
    key_order
        Asked-for order of the keys of objects: ``"any"`` or ``"schema"``.

    Returns
    -------
    Route
        The same for the same arguments. Nothing is loosened silently: whatever the route does not
        enforce stands in ``reasons``, and then ``exact`` is False.

    Raises
    ------
    GrammarError
        If no backend is given, or one or the order of keys is unknown.
    """
    if key_order not in KEY_ORDERS:
        raise GrammarError(f"key order {key_order!r} is unknown; use {' or '.join(KEY_ORDERS)}")
    names = available_backends() if backends is None else tuple(backends)
    unknown = [name for name in names if name not in ("llguidance", "xgrammar")]
    if unknown or not names:
        raise GrammarError(
            f"router: backends are {list(names)}; needs some of llguidance and xgrammar"
        )
    oracle = unsatisfiable if "llguidance" in names else None
    new = rewrite(schema, draft=draft, oracle=oracle)
    attempts = [
        _llguidance(new)
        if name == "llguidance"
        else _xgrammar(schema, new.schema, new.lost)
        for name in names
    ]
    best = min(attempts, key=lambda attempt: (not attempt.exact, attempt.backend is None))
    empty = [a for a in attempts if a.reasons and a.reasons[0].why.startswith(_EMPTY)]
    if empty:  # proved by one backend, whatever another would let through
        best = empty[0]
    order: str = key_order
    kept: tuple[Reason, ...] = ()
    if key_order == "any" and best.backend is not None:
        order, kept = _orders(best)
    return Route(
        best.backend, best.schema, best.exact, order, best.reasons[:_MOST_REASONS], new.changed,
        new.narrowed + kept, kept, tuple(itertools.islice(_spelled_once(schema), _MOST_REASONS)),
    )


def _orders(found: Route) -> tuple[str, tuple[Reason, ...]]:
    """The order of keys that can be had, and where it is not any."""
    if found.backend == "llguidance":
        orders = in_any_order(json.dumps(found.schema, ensure_ascii=False), False)
        return "any" if orders.rules or not orders.kept else "schema", orders.kept
    if not has_key_orders(found.schema):
        return "schema", ()
    why = "XGrammar writes keys in the schema's order only"
    return "schema", (Reason("#", "properties", why),)


def _spelled_once(schema: Any) -> Iterator[Reason]:
    """Where numbers have one spelling."""
    for pointer, part in subschemas(schema):
        kind = part.get("type")
        if kind == "integer" or (isinstance(kind, list) and "integer" in kind):
            yield Reason(pointer, "type", "integers are written without a fraction")
        for keyword in ("const", "enum"):
            if keyword in part and _has_number(part[keyword]):
                yield Reason(pointer, keyword, "whole numbers are written without a fraction")


def _has_number(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_has_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def route_named(schema: Any, backend: str, key_order: str = "any") -> Route:
    """`route` by the name a user gives: ``"auto"``, ``"llguidance"`` or ``"xgrammar"``.

    Raises
    ------
    GrammarError
        If the name is unknown, or that backend is not installed.
    """
    available = available_backends()
    if backend == "auto":
        return route(schema, available, key_order=key_order)
    if backend not in BACKENDS:
        raise GrammarError(
            f"grammar backend {backend!r} is unknown; use auto, {', '.join(BACKENDS)}"
        )
    if backend not in available:
        raise GrammarError(f"grammar backend {backend!r} is not available here")
    return route(schema, (backend,), key_order=key_order)


def _llguidance(new: Rewritten) -> Route:
    """With LLGuidance; keywords that it refuses are taken out one by one, and named."""
    schema, reasons = new.schema, list(new.lost)
    if schema is False:
        return Route(None, schema, False, reasons=(Reason("#", "schema", _EMPTY),))
    if schema is True:
        schema = {}
    loose = schema
    while found := refusals(loose, "llguidance"):
        reasons += found
        reason = found[0]
        if loose is schema:
            loose = copy.deepcopy(schema)
        parts = dict(subschemas(loose))
        here = parts.get(reason.pointer, {})
        if reason.keyword not in here:
            return Route(None, schema, False, reasons=tuple(reasons))
        # With so many the rest is not looked for one by one.
        for part in parts.values() if len(reasons) > _MOST_REASONS else (here,):
            part.pop(reason.keyword, None)
    return Route("llguidance", loose, not reasons, reasons=tuple(reasons))


def _xgrammar(schema: Any, rewritten: Any, lost: tuple[Reason, ...]) -> Route:
    """With XGrammar, which is trusted only with keywords that it is known to enforce."""
    if schema is False or rewritten is False:
        return Route(None, schema, False, reasons=(Reason("#", "schema", _EMPTY),))
    reasons = list(lost)
    if _patterns(rewritten) - _patterns(schema):
        reasons.append(Reason("#", "pattern", "XGrammar may read a pattern or format differently"))
    reasons += refusals(rewritten, "xgrammar")
    if not reasons:
        return Route("xgrammar", rewritten, True)
    long = len(json.dumps(schema)) > _LONGEST_LOOSE
    backend = None if long or compile_cost(schema) else "xgrammar"
    return Route(backend, schema, False, reasons=tuple(reasons))


def _patterns(schema: Any) -> set[str]:
    found: set[str] = set()
    for _, part in subschemas(schema):
        if isinstance(part.get("pattern"), str):
            found.add(part["pattern"])
        found.update(part.get("patternProperties") or ())
    return found
