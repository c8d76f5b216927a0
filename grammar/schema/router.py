"""Chooses a grammar backend for a JSON schema, and tells the truth about what it will enforce."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import GrammarError
from .any_order import in_any_order
from .enforcement import BACKENDS, available_backends, compile_cost, xgrammar_refusals
from .options import KeyOrder, Whitespace, check_options
from .rewrite.rewriter import Rewritten, rewrite
from .terms import Reason, has_orders, subschemas
from .trial import objections, unsatisfiable
from .wellformed import check_schema

__all__ = ["NOT_COMPACT", "Route", "refusal", "route", "route_named"]

_MOST_REASONS = 20
_LONGEST_LOOSE = 30_000  # characters; XGrammar takes seconds for some longer ones
_EMPTY = "allows no output"
NOT_COMPACT = "XGrammar writes spaces where a schema leaves the value free"
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))


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
    rules
        A Lark grammar to give to LLGuidance instead; empty: the schema does.
    reasons
        Why it is not exact: JSON pointer, keyword, why.
    rewritten
        What was rewritten, in the same form.
    narrowed
        What is said here is all that an exact route leaves out: texts of values that satisfy the
        schema and are not produced, in the same form. Keys come in one order, or should come in any
        and cannot; options of a ``oneOf`` may overlap in ways that have no exact form, and texts
        stay clear of the overlap. Empty: every value that satisfies the schema can be produced.
    ordered
        The part of ``narrowed`` that is about keys.
    spelling
        Where a value has several spellings of which some are not produced, in the same form: ``2``
        and not ``2.0``. (Everywhere: white space as the grammar lays it out, and escapes in strings
        only where JSON needs them.)
    """

    backend: str | None
    schema: Any
    exact: bool
    rules: str = ""
    reasons: tuple[Reason, ...] = ()
    rewritten: tuple[Reason, ...] = ()
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
    schema: Any, backends: Iterable[str] | None = None, *, draft: int = 2020,
    key_order: KeyOrder = "schema", whitespace: Whitespace = "line",
    assert_formats: bool | None = None,
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
    key_order, whitespace, assert_formats
        As in `GrammarSpec`.

    Returns
    -------
    Route
        The same for the same arguments. Nothing is loosened silently: whatever the route does not
        enforce stands in ``reasons``, and then ``exact`` is False.

    Raises
    ------
    GrammarError
        If this is no schema or one of nothing, no backend is given, or an option is unknown.
    """
    check_options(key_order, whitespace, assert_formats)
    names = available_backends() if backends is None else tuple(backends)
    if not names or set(names) - set(BACKENDS):
        raise GrammarError(
            f"router: backends are {list(names)}; needs some of {' and '.join(BACKENDS)}"
        )
    check_schema(schema)
    oracle = unsatisfiable if "llguidance" in names else None
    new = rewrite(schema, draft=draft, oracle=oracle, assert_formats=assert_formats)
    attempts = [
        _llguidance(new) if name == "llguidance"
        else _xgrammar(schema, new.schema, new.lost, whitespace == "compact")
        for name in names
    ]  # fmt: skip
    best = min(attempts, key=lambda attempt: (not attempt.exact, attempt.backend is None))
    empty = [a for a in attempts if a.reasons and a.reasons[0].why.startswith(_EMPTY)]
    if empty:  # proved by one backend, whatever another would let through
        best = empty[0]
    rules = ""
    ordered: tuple[Reason, ...] = ()
    if key_order == "any" and best.backend == "llguidance":
        rules, ordered = in_any_order(best.schema, whitespace)
    elif best.backend is not None:
        ordered = _one_order(best.schema)
    return Route(
        best.backend, best.schema, best.exact, rules, best.reasons[:_MOST_REASONS], new.changed,
        new.narrowed + ordered, ordered,
        tuple(itertools.islice(_spelled_once(schema), _MOST_REASONS)),
    )


def _one_order(schema: Any) -> tuple[Reason, ...]:
    """Whether objects that fit could have their keys in another order."""
    if any(has_orders(part) for _, part in subschemas(schema)):
        return (Reason("#", "properties", "keys come in the schema's order only"),)
    return ()


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


def route_named(schema: Any, backend: str, **options: Any) -> Route:
    """`route` by the name a user gives: ``"auto"``, ``"llguidance"`` or ``"xgrammar"``.

    Raises
    ------
    GrammarError
        As `route`, and if the name is unknown, or that backend is not installed.
    """
    available = available_backends()
    if backend == "auto":
        return route(schema, available, **options)
    if backend not in BACKENDS:
        raise GrammarError(
            f"grammar backend {backend!r} is unknown; use auto, {', '.join(BACKENDS)}"
        )
    if backend not in available:
        raise GrammarError(f"grammar backend {backend!r} is not available here")
    return route(schema, (backend,), **options)


def _llguidance(new: Rewritten) -> Route:
    """With LLGuidance; keywords that it refuses are taken out one by one, and named."""
    schema, reasons = new.schema, list(new.lost)
    if schema is False:
        return Route(None, schema, False, reasons=(Reason("#", "schema", _EMPTY),))
    if schema is True:
        schema = {}
    loose = schema
    while found := objections(loose):
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


def _xgrammar(schema: Any, rewritten: Any, lost: tuple[Reason, ...], compact: bool) -> Route:
    """With XGrammar, which is trusted only with keywords that it is known to enforce."""
    if schema is False or rewritten is False:
        return Route(None, schema, False, reasons=(Reason("#", "schema", _EMPTY),))
    if compact:
        return Route(None, schema, False, reasons=(Reason("#", "schema", NOT_COMPACT),))
    reasons = list(lost)
    if _patterns(rewritten) - _patterns(schema):
        reasons.append(Reason("#", "pattern", "XGrammar may read a pattern or format differently"))
    reasons += xgrammar_refusals(rewritten)
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
