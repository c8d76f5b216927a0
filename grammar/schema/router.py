"""JSON schema router.

The router converts a JSON schema to the form from which an automaton is built (`automaton_form`),
or to a form that LLGuidance enforces exactly (`route`). The result of `route` also says where
LLGuidance's form deviates from the schema.
"""

from __future__ import annotations

import copy
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graft.grammar.errors import GrammarError
from graft.grammar.schema.any_order.grammar import any_order_grammar
from graft.grammar.schema.documents import Parts, has_orders, subschemas, word_set
from graft.grammar.schema.llguidance_check import (
    document_text,
    is_unsatisfiable,
    schema_errors,
    text_error,
)
from graft.grammar.schema.name_spelling import CONTROL, NO_CONTROL, OneSpelling, with_one_spelling
from graft.grammar.schema.reasons import NoExactForm, Reason
from graft.grammar.schema.references import nesting_of
from graft.grammar.schema.refused_keywords import find_causes
from graft.grammar.schema.rewrite import Rewritten, rewrite
from graft.grammar.schema.unsatisfiable_definitions import (
    endless_definitions,
    impossible_definitions,
)
from graft.grammar.schema.wellformed import check_schema
from graft.grammar.spec import KeyOrder, Whitespace, check_options

__all__ = ["AutomatonForm", "Route", "automaton_form", "refusal", "route"]

_MAX_REASONS = 20
#: Maximum nesting of subschemas, references included. LLGuidance compiles nested subschemas
#: recursively, and its stack overflows at a nesting of 1,750 or more, depending on the keywords.
_MAX_NESTING = 1_500
_MAX_REASONS_IN_MESSAGE = 5
#: Maximum processor time of each of two searches: for the keywords of the rewritten schema that
#: LLGuidance refuses, and then for their causes in the given schema.
_SEARCH_SECONDS = 2.0

#: Parts of a pattern that may match a character of `CONTROL`.
_CONTROL_IN_PATTERN = re.compile(r"\\(?:x[017]|u00[017]|U000000[017]|v)|[\x00-\x1f\x7f]")
_BOUNDS = word_set("minimum maximum exclusiveMinimum exclusiveMaximum")


@dataclass(frozen=True)
class Route:
    """Result of `route`: the form in which a JSON schema is compiled, and how it deviates.

    Attributes
    ----------
    backend
        ``"llguidance"``; None if LLGuidance refuses even the closest form of the schema.
    schema
        Schema to compile. Keywords that LLGuidance does not support are replaced with equivalent
        keywords. If `exact` is False, the parts that `reasons` names are missing.
    text
        `schema` with LLGuidance's options as JSON text that LLGuidance accepts; empty if `backend`
        is None, or if only `rules` is known.
    exact
        Whether every output satisfies the original schema.
    rules
        Lark grammar to compile instead of `schema`; empty if there is none.
    reasons
        Reasons why `exact` is False.
    narrowed
        Valid values that are never produced, including the values that `ordered` describes. For
        example, if the overlap of two options of a ``oneOf`` has no exact complement, further
        values are excluded with it. If `exact` is True and `narrowed` is empty, every value that
        satisfies the schema can be produced.
    ordered
        Objects whose keys are produced in one order only. By default, these are all objects with
        several possible key orders. With ``key_order="any"``, these are the objects for which no
        grammar with keys in any order could be built.
    spelling
        Values that can be produced, but not in every JSON spelling, such as ``2`` but not ``2.0``.
        Restrictions that apply everywhere are not listed: the layout of white space, and strings
        with as few escape sequences as possible.
    unique
        Result of `unique_items` for the keywords ``uniqueItems``, which `schema` does not contain;
        None if there are none.
    """

    backend: str | None
    schema: Any
    exact: bool
    text: str = ""
    rules: str = ""
    reasons: tuple[Reason, ...] = ()
    narrowed: tuple[Reason, ...] = ()
    ordered: tuple[Reason, ...] = ()
    spelling: tuple[Reason, ...] = ()
    unique: Any = None

    def refusal(self) -> str:
        """Return the reasons as one sentence."""
        return refusal(self.reasons)


def refusal(reasons: Sequence[Reason]) -> str:
    """Return one sentence with the reasons why a schema is refused."""
    named = "; ".join(map(str, reasons[:_MAX_REASONS_IN_MESSAGE]))
    more = len(reasons) - _MAX_REASONS_IN_MESSAGE
    suffix = f"; and {more} more" if more > 0 else ""
    return f"cannot be enforced: {named}{suffix}"


def route(
    schema: Any,
    *,
    draft: int = 2020,
    key_order: KeyOrder = "schema",
    whitespace: Whitespace = "line",
    assert_formats: bool | None = None,
    unique_items: Callable[[Any], Any] | None = None,
) -> Route:
    """Return the form of a schema that LLGuidance enforces exactly, or else the closest form.

    Parameters
    ----------
    schema
        Parsed JSON schema: an object or a boolean. It is not modified.
    draft
        JSON schema draft that applies if the schema declares none: 3, 4, 6, 7, 2019 or 2020.
    key_order, whitespace, assert_formats
        As in `Spec`.
    unique_items
        Function for callers that enforce ``uniqueItems`` where no equivalent schema is known. It is
        called with the schema to compile, in which the keyword is kept, and returns
        `Route.unique`. It raises `NoExactForm` if the caller cannot enforce the keyword.

    Raises
    ------
    GrammarError
        The argument is not a schema, no finite value satisfies it, it is nested too deeply, or an
        option is unknown.
    """
    check_options(key_order, whitespace, assert_formats)
    given_parts = check_schema(schema)
    spelling = tuple(itertools.islice(_restricted_spellings(given_parts), _MAX_REASONS))
    if not any("uniqueItems" in part for _, part in given_parts):
        unique_items = None
    unique = refused = kept = None
    if key_order == "any":
        form = _any_order_form(schema, draft, whitespace, assert_formats, unique_items is not None)
        try:
            if form is not None and form.unique is not None and unique_items is not None:
                unique = unique_items(form.unique)
        except NoExactForm as error:
            form, unique_items, refused = None, None, error
        if form is not None:
            return Route(
                backend="llguidance",
                schema=form.schema,
                exact=True,
                rules=form.rules,
                narrowed=form.narrowed,
                spelling=spelling,
                unique=unique,
            )
    nesting = nesting_of(schema) if len(given_parts) > _MAX_NESTING else 0
    if nesting > _MAX_NESTING:
        raise GrammarError(
            f"JSON schema: subschemas are nested {nesting:,} levels deep, including references; at "
            f"most {_MAX_NESTING:,} levels are supported"
        )
    if unique_items is not None:
        # The schema with the keywords is checked first, because the search for the causes of a
        # refusal is slow.
        kept = rewrite(schema, draft=draft, assert_formats=assert_formats, unique_items=True).unique
    if unique_items is not None and kept is not None:
        try:
            unique = unique_items(with_one_spelling(kept).schema)
        except NoExactForm as error:
            refused, kept = error, None
    rewritten, reasons, checked = _closest_form(
        schema, draft, whitespace, assert_formats, kept is not None
    )
    if unique_items is not None and kept is not None and rewritten.unique != kept:
        unique = unique_items(with_one_spelling(rewritten.unique).schema)
    if refused is not None:
        reasons = _with_why(reasons, refused)
    closest = rewritten.schema
    accepted = bool(checked.text)
    spelled = checked.spelled
    if spelled.narrowed:
        reasons = [*reasons, *_control_character_reasons(closest)]
    rules = ""
    ordered: tuple[Reason, ...] = ()
    excluded: tuple[Reason, ...] = spelled.narrowed
    if key_order == "any" and accepted:
        rules, ordered, excluded_keys = any_order_grammar(closest, whitespace)
        excluded = excluded_keys if rules else excluded
    elif accepted and any(has_orders(part) for _, part in checked.parts):
        ordered = (Reason("#", "properties", "keys are produced in the schema's order only"),)
    return Route(
        backend="llguidance" if accepted else None,
        schema=spelled.schema,
        exact=accepted and not reasons,
        text=checked.text,
        rules=rules,
        reasons=tuple(reasons[:_MAX_REASONS]),
        narrowed=rewritten.narrowed + excluded + ordered,
        ordered=ordered,
        spelling=spelling,
        unique=unique,
    )


def _with_why(reasons: list[Reason], error: NoExactForm) -> list[Reason]:
    """Return reasons with the explanation of `error` for its keyword."""
    why = f"cannot be enforced: {error.why}"
    return [r._replace(why=why) if r.keyword == error.keyword else r for r in reasons]


class AutomatonForm(NamedTuple):
    """The form of a JSON schema for automata.

    Attributes
    ----------
    schema
        Schema with the same meaning. It may have keywords that LLGuidance does not support, and
        ``uniqueItems``, which the automaton's rules do not enforce.
    narrowed
        Valid values that the schema excludes.
    """

    schema: Any
    narrowed: tuple[Reason, ...]


def automaton_form(
    schema: Any,
    *,
    draft: int = 2020,
    key_order: KeyOrder = "schema",
    assert_formats: bool | None = None,
) -> AutomatonForm | None:
    """Return the form of a schema that graft's automata enforce; None if a part has no exact form.

    The parameters are those of `route`. Unlike `route`, this function does not check whether any
    value satisfies the schema: `graft.grammar.automaton.lower.compile_automaton` does.

    Raises
    ------
    GrammarError
        The argument is not a schema.
    """
    check_schema(schema)
    form = rewrite(
        schema, draft=draft, assert_formats=assert_formats, for_automaton=True, unique_items=True
    )
    new = form.schema if form.unique is None else form.unique
    if form.lost or not isinstance(new, dict):
        return None
    if key_order == "any" and any(has_orders(part) for _, part in subschemas(new)):
        return None
    return AutomatonForm(new, form.narrowed)


class _AnyOrderForm(NamedTuple):
    """Result of `_any_order_form`: the fields of `Route` with the same names.

    `unique` is the schema in which keywords ``uniqueItems`` are kept; None if there are none.
    """

    schema: Any
    rules: str
    narrowed: tuple[Reason, ...]
    unique: Any


def _any_order_form(
    schema: Any, draft: int, whitespace: Whitespace, assert_formats: bool | None, keep_unique: bool
) -> _AnyOrderForm | None:
    """Return a Lark grammar of a schema with all objects' keys in any order, if one is known.

    Return None if the schema needs no Lark grammar. LLGuidance checks the grammar but not the
    schema, because a grammar may exist for a schema that LLGuidance refuses.
    """
    impossible: frozenset[str] = frozenset()
    while True:
        form = rewrite(
            schema,
            draft=draft,
            assert_formats=assert_formats,
            impossible=impossible,
            for_lark=True,
            unique_items=keep_unique,
        )
        if form.lost or not isinstance(form.schema, dict):
            return None
        pointers = endless_definitions(form.schema, subschemas(form.schema))
        found = {form.origins.get(pointer, pointer) for pointer in pointers}
        if found <= impossible:
            break
        impossible |= found
    rules, ordered, excluded = any_order_grammar(form.schema, whitespace)
    if not rules or ordered:
        return None
    return _AnyOrderForm(form.schema, rules, form.narrowed + excluded, form.unique)


class _Checked(NamedTuple):
    """Result of `_closest_accepted`.

    Attributes
    ----------
    schema
        The rewritten schema, without the keywords that LLGuidance refuses.
    parts
        All subschemas of `schema`; see `subschemas`.
    spelled
        `schema` in the form that LLGuidance compiles: with one spelling of each property name; see
        `with_one_spelling`.
    text
        `spelled` as JSON text; empty if LLGuidance refuses it.
    """

    schema: Any
    parts: Parts
    spelled: OneSpelling
    text: str


def _closest_form(
    schema: Any, draft: int, whitespace: Whitespace, assert_formats: bool | None, keep_unique: bool
) -> tuple[Rewritten, list[Reason], _Checked]:
    """Rewrite a schema, and remove the keywords that LLGuidance refuses.

    Return the resulting schema, the reasons why it is not equivalent to the given one, and what
    `_closest_accepted` has returned for it. Each reason has a JSON pointer into the given schema,
    not into the result.

    Some definitions are not satisfied by any finite value. References to them are replaced with
    ``false`` if LLGuidance refuses the definitions, or if outputs could begin a value that never
    ends.
    """
    narrowed: tuple[Reason, ...] = ()
    impossible: frozenset[str] = frozenset()

    def rewritten_form(document: Any) -> Rewritten:
        return rewrite(
            document,
            draft=draft,
            assert_formats=assert_formats,
            impossible=impossible,
            unique_items=keep_unique,
        )

    deadline = time.thread_time() + _SEARCH_SECONDS
    while True:
        rewritten = rewritten_form(schema)
        narrowed += rewritten.narrowed
        parts = subschemas(rewritten.schema)
        checked = _closest_accepted(rewritten.schema, parts, whitespace, deadline)
        accepted = bool(checked.text)
        pointers = endless_definitions(rewritten.schema, parts)
        if not accepted and isinstance(rewritten.schema, dict):
            pointers |= impossible_definitions(rewritten.schema)
        found = {rewritten.origins.get(pointer, pointer) for pointer in pointers}
        if found <= impossible:
            break
        impossible |= found
    reasons: list[Reason] = []
    if rewritten.lost or checked.schema is not rewritten.schema or not accepted:
        lost, refused = find_causes(
            schema, rewritten, rewritten_form, _MAX_REASONS, time.thread_time() + _SEARCH_SECONDS
        )
        reasons = lost + refused if accepted else refused + lost
    narrowed = tuple(dict.fromkeys(narrowed))
    if narrowed:
        produced = "allows no output except values that are not produced"
        reasons = [
            reason._replace(why=reason.why.replace("allows no output", produced))
            for reason in reasons
        ]
    return rewritten._replace(schema=checked.schema, narrowed=narrowed), reasons, checked


def _closest_accepted(
    schema: Any, parts: Parts, whitespace: Whitespace, deadline: float
) -> _Checked:
    """Remove from a rewritten schema, one by one, the keywords that LLGuidance refuses.

    `parts` are all subschemas of the schema. Searches for refused keywords stop when
    ``time.thread_time()`` reaches `deadline`. If no keyword to remove is found, the result contains
    the given schema, and its `text` is empty.
    """
    remaining = schema
    count = 0
    while True:
        remaining_parts = parts if remaining is schema else subschemas(remaining)
        spelled = with_one_spelling(remaining, remaining_parts)
        text = document_text(spelled.schema, whitespace)
        error = text_error(text)
        if not error:
            return _Checked(remaining, remaining_parts, spelled, text)
        refused = _Checked(schema, parts, with_one_spelling(schema, parts), "")
        if not isinstance(schema, dict):
            return refused
        if remaining is schema:
            remaining = copy.deepcopy(schema)
        by_pointer = dict(subschemas(remaining))
        [reason] = schema_errors(remaining) or [Reason("#", "schema", error)]
        if reason.keyword not in by_pointer.get(reason.pointer, ()) and reason.keyword != "schema":
            _, [reason] = find_causes(remaining, Rewritten(remaining), Rewritten, 1, deadline)
        if reason.keyword not in by_pointer.get(reason.pointer, ()):
            # No keyword can be removed, for example because the schema is unsatisfiable.
            return refused
        count += 1
        if count > _MAX_REASONS:
            # After `_MAX_REASONS` iterations, the keyword is removed from all subschemas at once,
            # so that the number of iterations is bounded.
            for part in by_pointer.values():
                part.pop(reason.keyword, None)
        else:
            by_pointer[reason.pointer].pop(reason.keyword)


def _control_character_reasons(schema: Any) -> Iterator[Reason]:
    """Yield a reason for each keyword that needs characters of `CONTROL` in strings.

    A ``const`` or ``enum`` is reported if one of its values contains such a character, and a
    ``pattern`` if every string that it matches contains one.
    """
    why = "control characters cannot be enforced next to compared names of additional properties"
    for pointer, part in subschemas(schema):
        for keyword in ("enum", "const"):
            if keyword in part and _has_control(part[keyword]):
                yield Reason(pointer, keyword, why)
        pattern = part.get("pattern", "")
        if _CONTROL_IN_PATTERN.search(pattern):
            both = [{"pattern": pattern}, {"pattern": NO_CONTROL}]
            if is_unsatisfiable({"type": "string", "allOf": both}):
                yield Reason(pointer, "pattern", why)


def _has_control(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_control, value.values()))
    if isinstance(value, list):
        return any(map(_has_control, value))
    return isinstance(value, str) and CONTROL.search(value) is not None


def _restricted_spellings(parts: Parts) -> Iterator[Reason]:
    """Yield a reason for each subschema whose numbers are allowed in some JSON spellings only."""
    for pointer, part in parts:
        json_type = part.get("type")
        types = json_type if isinstance(json_type, list) else [json_type]
        if "integer" in types:
            yield Reason(pointer, "type", "integers are written without a fraction or exponent")
        elif _BOUNDS & part.keys():
            keyword = min(_BOUNDS & part.keys())
            yield Reason(
                pointer,
                keyword,
                "numbers have no exponent and no zeros at the end, but near a bound as many digits "
                "as the bound: 16.80 next to 16.87",
            )
        if "multipleOf" in part and types != ["integer"]:
            yield Reason(
                pointer,
                "multipleOf",
                "multiples have no exponent, and no more digits than the divisor",
            )
        for keyword in ("const", "enum"):
            if keyword in part and _contains_number(part[keyword]):
                yield Reason(pointer, keyword, "each number has only one spelling")


def _contains_number(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_contains_number, value.values()))
    if isinstance(value, list):
        return any(map(_contains_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)
