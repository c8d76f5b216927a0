"""JSON schemas rewritten into equivalent ones that grammar backends can enforce.

Grammar backends have no complement and no counting across an object, so ``not``, ``oneOf``,
``if``, ``dependencies``, ``propertyNames``, ``uniqueItems``, ``contains`` and the property counts
are spelled out as unions and intersections where that is exact: formats outside the standard are
annotations and go, options of a ``oneOf`` that exclude each other are an ``anyOf``, and so on. What
has no exact form is left out of the result and reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..terms import Reason, dialect
from .disjoint import Oracle
from .normal import normal
from .rewriter import Rewriter
from .rules import RULES

__all__ = ["Rewritten", "rewrite"]


@dataclass(frozen=True)
class Rewritten:
    """The outcome.

    Attributes
    ----------
    schema
        The new schema; the parts named in ``lost`` are missing from it, so it allows more.
    lost
        What could not be said exactly.
    changed
        What was rewritten, for the curious.
    narrowed
        Where the new schema allows less: values that have no exact form beside others that do.
    """

    schema: Any
    lost: tuple[Reason, ...]
    changed: tuple[Reason, ...]
    narrowed: tuple[Reason, ...]


def rewrite(
    schema: Any, *, draft: int = 2020, oracle: Oracle | None = None,
    assert_formats: bool | None = None,
) -> Rewritten:  # fmt: skip
    """Rewrite a schema.

    Parameters
    ----------
    schema
        Parsed JSON. It is not changed.
    draft
        Draft of schemas that do not name theirs in ``$schema``: 3, 4, 6, 7, 2019 or 2020.
    oracle
        See `Disjointness`.
    assert_formats
        Whether formats are enforced; None: unless ``$schema`` names a draft to which they are
        annotations.
    """
    if assert_formats is None:
        assert_formats = dialect(schema, 7) <= 7
    draft = dialect(schema, draft)
    schema, ignored = normal(schema, draft)
    worker = Rewriter(schema, draft, assert_formats, oracle, RULES)
    new = worker.whole(schema)
    lost, changed, narrowed = (
        tuple(dict.fromkeys(found))
        for found in (worker.lost, ignored + worker.changed, worker.narrowed)
    )
    return Rewritten(new, lost, changed, narrowed)
