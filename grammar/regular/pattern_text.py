"""Patterns for expressions of `graft.grammar.regular.expression`.

An expression may contain intersections and differences, which the notation of patterns lacks. It is
therefore compiled to a deterministic automaton, whose states are then eliminated one by one: every
two neighbours of an eliminated state are connected with the pattern of the paths through it.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict

from graft.grammar.regular.expression import (
    MAX_CHARACTER,
    Expression,
    NoAutomaton,
    Ranges,
    complement,
)
from graft.native import _native

__all__ = ["matching_pattern"]

_MAX_STATES = 400
_MAX_CLASSES = 100  # maximum number of sets of characters that an automaton distinguishes
_MAX_LENGTH = 20_000  # maximum length of a pattern
#: Matches the patterns that match exactly one character.
_ONE_CHARACTER = re.compile(r"\[[^\]]*\]|\\u.{4}|\\U.{8}|.")

#: Number of integers after an operation of an expression, by operation. Operation 1 has a number n
#: and n pairs, and is treated separately.
_NUM_OPERANDS = {0: 0, 2: 1, 3: 1, 4: 2, 7: 0, 8: 0}

#: Patterns, without duplicates, of the paths from one state to another. The pattern of a path that
#: reads no character is empty.
_Paths = dict[str, None]


def matching_pattern(expression: Expression) -> str | None:
    """Return a pattern that matches exactly the texts of an expression, from ``^`` to ``$``.

    Return None if the expression matches no text. Raise `NoAutomaton` if the expression contains
    calls or members, or if the automaton or the pattern would be too large.
    """
    classes = _classes(expression)
    if len(classes) > _MAX_CLASSES:
        raise NoAutomaton("a pattern distinguishes too many sets of characters")
    try:
        compiled = _native.guide.compile_automaton(
            [(0, 0, _with_numbered_classes(expression, classes))], _MAX_STATES
        )
    except ValueError as error:
        if "allows no text" in str(error):
            return None
        raise NoAutomaton(f"a pattern has no complement: {error}") from None
    table = _native.guide.AutomatonGrammar(
        compiled, _native.guide.TokenTrie([], b"", 0), _native.guide.RowMemory(0)
    ).table()
    columns = table["classes"][: len(classes)].tolist()
    successors = table["next"][:, columns].tolist()
    successors, accepting = _minimized(successors, table["accepting"].tolist())
    return f"^{_eliminated(successors, accepting, classes)}$"


def _classes(expression: Expression) -> list[Ranges]:
    """Return disjoint sets of characters whose union is the set of all characters.

    Each set of characters in the expression is a union of some of them.
    """
    sets = list(dict.fromkeys(_sets(expression)))
    starts = {0}
    for ranges in sets:
        for low, high in ranges:
            starts |= {low, high + 1}
    ordered = sorted(start for start in starts if start <= MAX_CHARACTER)
    members: list[list[int]] = [[] for _ in ordered]
    for index, ranges in enumerate(sets):
        for low, high in ranges:
            for place in range(bisect.bisect_left(ordered, low), len(ordered)):
                if ordered[place] > high:
                    break
                members[place].append(index)
    grouped: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for place, low in enumerate(ordered):
        high = ordered[place + 1] - 1 if place + 1 < len(ordered) else MAX_CHARACTER
        ranges_of = grouped.setdefault(tuple(sorted(set(members[place]))), [])
        if ranges_of and ranges_of[-1][1] == low - 1:
            ranges_of[-1] = (ranges_of[-1][0], high)
        else:
            ranges_of.append((low, high))
    return list(grouped.values())


def _sets(expression: Expression) -> list[tuple[tuple[int, int], ...]]:
    """Return the ranges of each set of characters in an expression."""
    found = []
    at = 0
    while at < len(expression):
        operation = expression[at]
        if operation == 1:
            end = at + 2 + 2 * expression[at + 1]
            bounds = expression[at + 2 : end]
            found.append(tuple(zip(bounds[::2], bounds[1::2], strict=True)))
            at = end
        elif operation in _NUM_OPERANDS:
            at += 1 + _NUM_OPERANDS[operation]
        else:
            raise NoAutomaton("calls and members have no pattern")
    return found


def _with_numbered_classes(expression: Expression, classes: list[Ranges]) -> Expression:
    """Return the expression in which each character is replaced with the number of its class."""
    first = {ranges[0][0]: number for number, ranges in enumerate(classes)}
    out: Expression = []
    at = 0
    for ranges in _sets(expression):
        while expression[at] != 1:
            size = 1 + _NUM_OPERANDS[expression[at]]
            out += expression[at : at + size]
            at += size
        numbers = sorted(
            number
            for start, number in first.items()
            if any(low <= start <= high for low, high in ranges)
        )
        out += [1, len(numbers)]
        for number in numbers:
            out += [number, number]
        at += 2 + 2 * expression[at + 1]
    return out + expression[at:]


def _minimized(
    successors: list[list[int]], accepting: list[int]
) -> tuple[list[list[int]], list[int]]:
    """Return the minimal automaton that accepts the same texts.

    A successor of -1 means that no accepted text continues with the character. State 0 is the
    initial state.
    """
    groups = accepting
    while True:
        numbers: dict[tuple[int, ...], int] = {}
        refined = []
        for state, row in enumerate(successors):
            key = (groups[state], *(-1 if to < 0 else groups[to] for to in row))
            refined.append(numbers.setdefault(key, len(numbers)))
        if len(numbers) == len(set(groups)):
            break
        groups = refined
    representatives = [refined.index(number) for number in range(len(numbers))]
    rows = [
        [-1 if to < 0 else refined[to] for to in successors[state]] for state in representatives
    ]
    return rows, [accepting[state] for state in representatives]


def _eliminated(successors: list[list[int]], accepting: list[int], classes: list[Ranges]) -> str:
    """Return a pattern of the texts that an automaton accepts."""
    start, end = -1, len(successors)
    forward: dict[int, dict[int, _Paths]] = defaultdict(dict)
    backward: dict[int, set[int]] = defaultdict(set)

    def connect(source: int, target: int, paths: _Paths) -> None:
        forward[source].setdefault(target, {}).update(paths)
        backward[target].add(source)

    connect(start, 0, {"": None})
    for state, row in enumerate(successors):
        by_target: dict[int, list[tuple[int, int]]] = {}
        for number, target in enumerate(row):
            if target >= 0:
                by_target.setdefault(target, []).extend(classes[number])
        for target, ranges in by_target.items():
            connect(state, target, {_class_text(ranges): None})
        if accepting[state]:
            connect(state, end, {"": None})
    remaining = set(range(len(successors)))
    while remaining:

        def weight(state: int) -> tuple[int, int]:
            others = len(backward[state] - {state}) * len(forward[state].keys() - {state})
            return others, sum(
                map(len, (text for paths in forward[state].values() for text in paths))
            )

        state = min(remaining, key=weight)
        remaining.remove(state)
        targets = forward.pop(state)
        loop = _starred(targets.pop(state, {}))
        sources = backward.pop(state) - {state}
        length = 0
        for target, paths in targets.items():
            backward[target].discard(state)
            suffix = loop + _joined(paths)
            for source in sources:
                text = _joined(forward[source][state]) + suffix
                length += len(text)
                connect(source, target, {text: None})
        for source in sources:
            del forward[source][state]
        if length > _MAX_LENGTH:
            raise NoAutomaton("the pattern is too long")
    return _joined(forward[start][end])


def _joined(paths: _Paths) -> str:
    """Return a pattern that matches what any one of the patterns in `paths` matches."""
    texts = [text for text in paths if text]
    if not texts:
        return ""
    if len(paths) == 1:
        return texts[0]
    joined = f"(?:{'|'.join(texts)})"
    return f"{joined}?" if "" in paths else joined


def _starred(paths: _Paths) -> str:
    """Return a pattern that matches any number of repetitions of the patterns in `paths`."""
    texts = [text for text in paths if text]
    if not texts:
        return ""
    if len(texts) == 1 and _ONE_CHARACTER.fullmatch(texts[0]):
        return f"{texts[0]}*"
    return f"(?:{'|'.join(texts)})*"


def _class_text(ranges: list[tuple[int, int]]) -> str:
    """Return the class of the characters of some ranges."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and merged[-1][1] == low - 1:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    if len(merged) == 1 and merged[0][0] == merged[0][1]:
        return _character(merged[0][0])
    others = complement(merged)
    if others and len(others) < len(merged):
        return f"[^{_ranges_text(others)}]"
    return f"[{_ranges_text(merged)}]"


def _ranges_text(ranges: Ranges) -> str:
    texts = []
    for low, high in ranges:
        texts.append(_character(low) + (f"-{_character(high)}" if high > low else ""))
    return "".join(texts)


def _character(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
