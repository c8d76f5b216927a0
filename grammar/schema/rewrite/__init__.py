"""Rewriting of JSON schemas into equivalent schemas that grammar backends can enforce.

Grammar backends can neither complement a language nor count the properties of an object. The
keywords ``not``, ``oneOf``, ``if``, ``dependencies``, ``propertyNames``, ``uniqueItems``,
``contains``, ``minProperties`` and ``maxProperties`` are therefore replaced with unions and
intersections of schemas (``anyOf`` and ``allOf``). For example, a ``oneOf`` whose options exclude
each other becomes an ``anyOf``. Formats that the standard does not define are only annotations and
are removed.

A replacement is called an exact form if it is equivalent to the original part of the schema. Parts
of a schema that have no known exact form are removed and reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from graft.grammar.schema.documents import copy_json, dialect, subschemas
from graft.grammar.schema.reasons import Reason
from graft.grammar.schema.rewrite.normalize import normalize
from graft.grammar.schema.rewrite.rewriter import Rewriter
from graft.grammar.schema.rewrite.rules import RULES

__all__ = ["Rewritten", "rewrite"]


class Rewritten(NamedTuple):
    """A rewritten schema.

    Attributes
    ----------
    schema
        The new schema.
    lost
        Parts of the original schema that have no exact form and are missing in the new schema. The
        new schema allows values that these parts exclude.
    narrowed
        Parts of the original schema for which the new schema excludes some valid values, because no
        form is known that allows exactly the valid values.
    origins
        Rewriting adds definitions that are copies of subschemas. This dict maps the JSON pointer of
        each added definition to the pointer of the original subschema.
    unique
        The new schema with those keywords ``uniqueItems`` that have no equivalent form; None if
        there are none.
    """

    schema: Any
    lost: tuple[Reason, ...] = ()
    narrowed: tuple[Reason, ...] = ()
    origins: Mapping[str, str] = MappingProxyType({})
    unique: Any = None


def rewrite(
    schema: Any,
    *,
    draft: int = 2020,
    assert_formats: bool | None = None,
    impossible: frozenset[str] = frozenset(),
    for_automaton: bool = False,
    for_lark: bool = False,
    unique_items: bool = False,
) -> Rewritten:
    """Rewrite a schema into an equivalent schema that LLGuidance can enforce.

    Parameters
    ----------
    schema
        A parsed JSON schema that `check_schema` accepts.
    draft, assert_formats
        As in `graft.grammar.route`.
    impossible
        JSON pointers of subschemas that no value satisfies. References to them are replaced with
        ``false``.
    for_automaton
        Whether the new schema may have keywords that only automata can enforce: those of
        `ForAutomata`, and ``contains``.
    for_lark
        Whether the new schema may have those of these keywords that `any_order_grammar` supports:
        ``contains`` and ``notMultipleOf``.
    unique_items
        Whether the caller enforces the keywords ``uniqueItems`` of `Rewritten.unique`. If False, a
        keyword without an equivalent form is lost.
    """
    if not isinstance(schema, dict):
        return Rewritten(schema)
    if assert_formats is None:
        assert_formats = dialect(schema, 7) <= 7
    draft = dialect(schema, draft)
    schema = normalize(schema, draft, impossible)
    if not isinstance(schema, dict):
        return Rewritten(schema)
    rewriter = Rewriter(schema, draft, assert_formats, RULES, for_automaton, for_lark, unique_items)
    new_schema = rewriter.rewrite_document(schema)
    lost = tuple(dict.fromkeys(rewriter.lost))
    narrowed = tuple(dict.fromkeys(rewriter.narrowed))
    unique = None
    if rewriter.has_unique_items:
        unique = new_schema
        new_schema = copy_json(new_schema)
        for _, part in subschemas(new_schema):
            part.pop("uniqueItems", None)
    return Rewritten(new_schema, lost, narrowed, rewriter.origins(), unique)
