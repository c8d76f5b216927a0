"""JSON schemas rewritten into equivalent ones that grammar backends can enforce.

Grammar backends have no complement and no counting across an object, so ``not``, ``oneOf``,
``if``, ``dependencies``, ``propertyNames``, ``uniqueItems``, ``contains`` and the property counts
are spelled out as unions and intersections where that is exact: formats outside the standard are
annotations and go, options of a ``oneOf`` that exclude each other are an ``anyOf``, and so on. What
has no exact form is left out of the result and reported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from graft.grammar.schema.rewrite.normal import normal
from graft.grammar.schema.rewrite.rewriter import Rewriter
from graft.grammar.schema.rewrite.rules import RULES
from graft.grammar.schema.terms import Reason, dialect

__all__ = ["Rewritten", "rewrite"]


class Rewritten(NamedTuple):
    """A schema without the parts named in ``lost``, which have no exact form.

    ``narrowed`` says where it allows less: values without exact form beside others that have one.
    """

    schema: Any
    lost: tuple[Reason, ...] = ()
    narrowed: tuple[Reason, ...] = ()


def rewrite(schema: Any, *, draft: int = 2020, assert_formats: bool | None = None) -> Rewritten:
    """Rewrite a schema that `check_schema` takes; see `route` for the options."""
    if not isinstance(schema, dict):
        return Rewritten(schema)
    if assert_formats is None:
        assert_formats = dialect(schema, 7) <= 7
    draft = dialect(schema, draft)
    schema = normal(schema, draft)
    worker = Rewriter(schema, draft, assert_formats, RULES)
    new = worker.whole(schema)
    return Rewritten(new, *(tuple(dict.fromkeys(f)) for f in (worker.lost, worker.narrowed)))
