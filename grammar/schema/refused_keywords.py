"""Find the keywords of a JSON schema that cause an error of LLGuidance.

LLGuidance compiles the rewritten schema. Its error messages name neither a JSON pointer nor, in
many cases, a keyword, and the rewritten schema has other pointers than the original one.
`find_causes` therefore removes keywords from the original schema, rewrites the remaining schema,
and observes whether the error disappears. A keyword is reported as a cause only if the error does
not occur without it.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from graft.grammar.schema.documents import SchemaObject, subschemas, word_set
from graft.grammar.schema.llguidance_check import keyword_of, schema_error
from graft.grammar.schema.name_spelling import with_one_spelling
from graft.grammar.schema.reasons import NoExactForm, Reason
from graft.grammar.schema.references import References
from graft.grammar.schema.rewrite import Rewritten

__all__ = ["find_causes"]

#: Keywords that LLGuidance and the rewriter expand to combinations, which can make a schema large.
_COMBINING = word_set(
    """allOf anyOf oneOf not if then else dependencies dependentRequired dependentSchemas
    minProperties maxProperties contains uniqueItems"""
)
#: Keywords that only contain other keywords or say where they apply.
_STRUCTURAL = word_set("type properties items prefixItems required $ref")

#: Keywords that are never reported as the cause of an error.
_NEUTRAL = word_set(
    """$schema $id id $defs definitions $comment title description default examples $anchor
    $dynamicAnchor $recursiveAnchor"""
)
#: Patterns of LLGuidance's errors that name no keyword, each with an explanation for users.
_EXPLANATIONS = (
    (
        r"schema too large",
        "the schema is too large after expansion: LLGuidance allows 50,000 compilation steps",
    ),
    (
        r"stack level exceeded",
        "the intersection of these schemas is nested more deeply than LLGuidance allows, "
        "probably because they are recursive",
    ),
    (
        r"Resource '(?:json-schema:///)?([^']*)' is not present",
        r"'\1' is another document, and other documents are not fetched; copy the schema to $defs",
    ),
    (r"(Unsatisfiable .*)", r"allows no output (\1)"),
)
#: Error of a schema whose rewriting does not end. This can happen after `_Search` has removed
#: keywords from the schema.
_ENDLESS = "rewriting does not end"

#: Errors that only occur because `_Search` has removed other keywords from the schema.
_ARTIFACT = re.compile(rf"does not exist|{_ENDLESS}")


class _Place(NamedTuple):
    """A keyword of the subschema at a JSON pointer."""

    pointer: str
    keyword: str


class _NotFound(Exception):
    """Raised if no keyword that causes LLGuidance's error is found before the deadline."""


def find_causes(
    schema: SchemaObject,
    rewritten: Rewritten,
    rewrite: Callable[[Any], Rewritten],
    max_reasons: int,
    deadline: float,
) -> tuple[list[Reason], list[Reason]]:
    """Return the keywords because of which a schema cannot be enforced exactly.

    When one of these keywords is removed, others may come into effect. The search therefore
    continues until the remaining schema has an exact form, or until the deadline.

    Parameters
    ----------
    schema
        The original schema. It is not modified.
    rewritten
        The rewritten schema.
    rewrite
        Function that rewrites a schema.
    max_reasons
        Number of reasons after which the search ends.
    deadline
        Value of ``time.thread_time()`` after which the search ends. The search compiles variants of
        the schema with LLGuidance, and checks the time before each one.

    Returns
    -------
    tuple
        The keywords that have no exact form, and the keywords that LLGuidance refuses. If the
        search ends before it has found the keyword that causes LLGuidance's error, the last reason
        contains this error but no keyword.
    """
    search = _Search(schema, rewrite, deadline)
    is_unsatisfiable = _error_of(rewritten).startswith("Unsatisfiable")
    removed: list[_Place] = []
    lost: list[Reason] = []
    refused: list[Reason] = []
    while len(lost) + len(refused) < max_reasons:
        if removed:
            try:
                rewritten = rewrite(_without(schema, removed))
            except RecursionError:
                break
        found = []
        for reason in rewritten.lost:
            if reason[:2] not in removed:
                found.append(reason)
        lost += found
        removed += [_Place(*reason[:2]) for reason in found]
        if found:
            continue
        error = _error_of(rewritten)
        if not error:
            break
        if removed and error.startswith("Unsatisfiable") and not is_unsatisfiable:
            break  # only the removals have made the schema unsatisfiable
        try:
            cause, error = search.find(error, removed)
        except _NotFound:
            refused.append(Reason("#", "schema", _explain(error)))
            break
        removed.append(cause)
        refused.append(Reason(*cause, _explain(error)))
    return lost, refused


class _Search:
    """Searches one schema for the cause of LLGuidance's error; arguments as for `find_causes`."""

    def __init__(self, schema: SchemaObject, rewrite: Callable[[Any], Rewritten], deadline: float):
        self._schema = schema
        self._rewrite = rewrite
        self._deadline = deadline
        self._values: dict[_Place, Any] = {}
        for pointer, part in _all_subschemas(schema):
            for keyword, value in part.items():
                if keyword not in _NEUTRAL:
                    self._values[_Place(pointer, keyword)] = value
        self._places = list(self._values)

    def find(self, error: str, removed: Sequence[_Place]) -> tuple[_Place, str]:
        """Return a keyword that causes an error, and the error message that refers to this keyword.

        `removed` are the causes that were found before, and `error` is the error of the schema
        without these keywords. Raise `_NotFound` if no cause is found.
        """
        kind = _kind(error)
        for candidates in self._candidates(kind):
            rest = [place for place in candidates if place not in removed]
            quoted = self._quoted_cause(error, rest, removed)
            if quoted is not None:
                return quoted, error
            if not rest or self._remains(kind, [*removed, *rest]):
                continue
            cause, others = self._narrow(kind, rest, [*removed])
            try:
                if len(others) == len(removed):
                    cause = self._innermost(kind, cause, rest, others)
                return cause, self._error(others)
            except _NotFound:
                return cause, error
        raise _NotFound

    def _quoted_cause(
        self, error: str, candidates: list[_Place], removed: Sequence[_Place]
    ) -> _Place | None:
        """Return a candidate whose value the error message quotes and that alone causes the error.

        Return None if there is no such candidate.
        """
        for place in candidates:
            value = self._values[place]
            if isinstance(value, str) and place.keyword == "$ref":
                value = value.partition("#")[0]  # an error about a missing document names only it
            if not isinstance(value, str) or not value or value not in error:
                continue
            new_error = self._error([*removed, place])
            if new_error != error and not _ARTIFACT.search(new_error):
                return place
        return None

    def _candidates(self, kind: str) -> list[list[_Place]]:
        """Return lists of keywords that may cause an error, the likeliest list first.

        `kind` is the error's kind, as `_kind` returns it.
        """
        named = [place for place in self._places if place.keyword == kind]
        if kind in ("schema too large", "Schema intersection stack level exceeded"):
            named = [place for place in self._places if place.keyword in _COMBINING]
        plain = [place for place in self._places if place.keyword not in _STRUCTURAL]
        return [named, plain, self._places]

    def _narrow(
        self, kind: str, candidates: list[_Place], removed: list[_Place]
    ) -> tuple[_Place, list[_Place]]:
        """Find one of the candidates that cause an error by binary search.

        `kind` is the error's kind, as `_kind` returns it. If the error disappears when one half of
        the candidates is removed, the search continues in this half. If it remains whichever half
        is removed, both halves contain a cause: the search removes the first half for good and
        continues in the second. Return the last remaining candidate, and the list of all removed
        keywords, which begins with `removed`.
        """
        while len(candidates) > 1:
            middle = len(candidates) // 2
            first = candidates[:middle]
            second = candidates[middle:]
            if not self._remains(kind, removed + first):
                candidates = first
                continue
            if self._remains(kind, removed + second):
                removed = removed + first
            candidates = second
        return candidates[0], removed

    def _innermost(
        self, kind: str, cause: _Place, candidates: list[_Place], removed: list[_Place]
    ) -> _Place:
        """Return the innermost keyword that alone causes an error: `cause` or one inside its value.

        `kind` is the error's kind, `candidates` are the keywords to consider, and `removed` are
        keywords that are already removed from the schema.
        """
        while True:
            inside = f"{cause.pointer}/{cause.keyword}/"
            inner = []
            for place in candidates:
                if f"{place.pointer}/".startswith(inside):
                    inner.append(place)
            if not inner or self._remains(kind, removed + inner):
                return cause
            inner_cause, others = self._narrow(kind, inner, removed)
            if len(others) > len(removed):
                return cause  # several keywords inside the cause together cause the error
            cause = inner_cause

    def _remains(self, kind: str, removed: Sequence[_Place]) -> bool:
        """Return whether the schema without the keywords `removed` has an error of this kind."""
        error = self._error(removed)
        if not error:
            return False
        return _kind(error) == kind or _ARTIFACT.search(error) is not None

    def _error(self, removed: Sequence[_Place]) -> str:
        """Remove the keywords `removed` from the schema and return LLGuidance's error for the rest.

        The result is "" if LLGuidance accepts it. Raise `_NotFound` after the deadline.
        """
        if time.thread_time() > self._deadline:
            raise _NotFound
        try:
            return _error_of(self._rewrite(_without(self._schema, removed)))
        except RecursionError:
            return _ENDLESS


def _error_of(rewritten: Rewritten) -> str:
    if rewritten.schema is False:
        return "Unsatisfiable schema: schema is false"
    return schema_error(with_one_spelling(rewritten.schema).schema)


def _kind(error: str) -> str:
    """Return the keyword that an error names, or else the beginning of the message."""
    keyword = keyword_of(error)
    return keyword if keyword != "schema" else error.partition(":")[0]


def _explain(error: str) -> str:
    for pattern, explanation in _EXPLANATIONS:
        if re.search(pattern, error):
            return re.sub(f".*?{pattern}.*", explanation, error, flags=re.DOTALL)
    return error


def _all_subschemas(schema: SchemaObject) -> list[tuple[str, SchemaObject]]:
    """Return each subschema with its JSON pointer.

    The target of a reference is included even if it lies in the value of an unknown keyword, where
    `subschemas` does not find it.
    """
    references = References(schema)
    parts = subschemas(schema)
    known = {id(part) for _, part in parts}
    for _, part in parts:  # the list grows during the loop
        reference: Any = part.get("$ref")
        if references.pointer(reference) is None:
            continue
        try:
            target = references.resolve(reference)
        except NoExactForm:
            continue
        for pointer, new_part in subschemas(target, f"#{references.pointer(reference)}"):
            if id(new_part) not in known:
                known.add(id(new_part))
                parts.append((pointer, new_part))
    return parts


def _without(schema: SchemaObject, removed: Sequence[_Place]) -> SchemaObject:
    """Return a copy of a schema without the keywords `removed`."""
    remaining = copy.deepcopy(schema)
    parts = dict(_all_subschemas(remaining)) if removed else {}
    for pointer, keyword in removed:
        part = parts.get(pointer, {})
        part.pop(keyword, None)
        if keyword == "patternProperties":
            # Without the patterns, additionalProperties would apply to properties that match them.
            part.pop("additionalProperties", None)
    return remaining
