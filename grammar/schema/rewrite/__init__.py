"""Rewriting of JSON schemas into equivalent ones that grammar backends can enforce.

Grammar backends cannot complement a language and cannot count across an object. ``not``, ``oneOf``,
``if``, ``dependencies``, ``propertyNames``, ``uniqueItems``, ``contains`` and the property counts
are therefore expanded into unions and intersections where that is exact. For example, options of a
``oneOf`` that exclude each other become an ``anyOf``, and formats that the standard does not define
are removed as annotations. Parts without an exact form are removed and reported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from graft.grammar.schema.rewrite.normal import normalize
from graft.grammar.schema.rewrite.rewriter import Rewriter
from graft.grammar.schema.rewrite.rules import RULES
from graft.grammar.schema.terms import Reason, dialect

__all__ = ["Rewritten", "rewrite"]


class Rewritten(NamedTuple):
    """A rewritten schema.

    Attributes
    ----------
    schema
        The new schema, without the parts in `lost`.
    lost
        Parts of the original schema that have no exact form. The new schema allows more.
    narrowed
        Parts where the new schema allows less: some valid values have no exact form, others have.
    """

    schema: Any
    lost: tuple[Reason, ...] = ()
    narrowed: tuple[Reason, ...] = ()


def rewrite(schema: Any, *, draft: int = 2020, assert_formats: bool | None = None) -> Rewritten:
    """Rewrite a schema that `check_schema` accepts. The options are those of `route`."""
    if not isinstance(schema, dict):
        return Rewritten(schema)
    if assert_formats is None:
        assert_formats = dialect(schema, 7) <= 7
    draft = dialect(schema, draft)
    schema = normalize(schema, draft)
    rewriter = Rewriter(schema, draft, assert_formats, RULES)
    new_schema = rewriter.rewrite_document(schema)
    lost = tuple(dict.fromkeys(rewriter.lost))
    narrowed = tuple(dict.fromkeys(rewriter.narrowed))
    return Rewritten(new_schema, lost, narrowed)
