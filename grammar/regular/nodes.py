"""Syntax trees of regular expressions, EBNF grammars and Lark grammars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "Anchor",
    "Choice",
    "Node",
    "Ranges",
    "Repeat",
    "Rule",
    "Sequence",
    "Set",
    "children",
    "normalized",
]

#: Sorted ranges of characters that neither overlap nor touch.
Ranges = tuple[tuple[int, int], ...]

_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True)
class Set:
    """A node that matches one character of the given ranges."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    """A node that matches its parts one after the other; without parts, the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """A node that matches one of several options."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A node that matches `low` to `high` repetitions of a part; no maximum if `high` is None."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Rule:
    """A reference to a rule. It matches the texts of the rule."""

    name: str


@dataclass(frozen=True)
class Anchor:
    """A node that matches the empty text at the start (``^``) or at the end (``$``)."""

    at_end: bool


Node = Set | Sequence | Choice | Repeat | Rule | Anchor


def normalized(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ranges, sorted and merged, without surrogates, which UTF-8 cannot encode."""
    pieces = []
    for low, high in ranges:
        pieces += [(low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)]
    joined: list[tuple[int, int]] = []
    for low, high in sorted(piece for piece in pieces if piece[0] <= piece[1]):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Sequence):
        return node.parts
    if isinstance(node, Choice):
        return node.options
    return (node.part,) if isinstance(node, Repeat) else ()
