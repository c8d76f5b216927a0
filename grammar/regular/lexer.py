"""Places where LLGuidance's lexer may extend a terminal although the next one should begin.

The lexer is greedy: a terminal matches as much text as possible, and the lexer never backtracks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from graft.grammar.regular.expression import MAX_CHARACTER
from graft.grammar.regular.nodes import Choice, Node, Ranges, Repeat, Rule, Sequence, Set, children

__all__ = ["conflicts", "is_nullable"]

#: Maximum number of lexer states that `_Lexer.conflicts` visits before it stops the search.
_MAX_STATES = 2000

#: Maximum number of steps of `_Lexer.conflicts`. A state of the lexer is a set of positions
#: (`_Positions`). The visit of a state takes one step for each of its positions and each character
#: class that the position matches.
_MAX_STEPS = 500_000

#: Maximum number of positions of the Glushkov automaton (`_Positions`) of a terminal. A larger
#: terminal of an EBNF grammar is divided. A Lark grammar with a larger terminal has no automaton.
_MAX_POSITIONS = 2000


def conflicts(rules: Mapping[str, Node], terminals: Iterable[Node]) -> set[Node]:
    """Return the terminals that the lexer might extend where the next terminal should begin.

    `rules` are the rules of the grammar that the root reaches, and `terminals` the nodes in them
    that are terminals. Terminals that match the empty text, and terminals whose Glushkov automaton
    has more than `_MAX_POSITIONS` positions, are not examined. If there are any, the function
    returns only these.
    """
    unknown = set()
    machines = {}
    for terminal in terminals:
        try:
            machines[terminal] = _Positions.of(_expanded(terminal, rules, [_MAX_POSITIONS]))
        except OverflowError:
            unknown.add(terminal)
        else:
            if machines[terminal].nullable:
                unknown.add(terminal)
    if unknown:
        return unknown
    outside = {name: node for name, node in rules.items() if Rule(name) not in machines}
    return _Lexer(machines, _Following(outside, machines).of_terminals()).conflicts()


def _expanded(node: Node, rules: Mapping[str, Node], budget: list[int]) -> Node:
    """Return a node in which all references are replaced with the rules' expressions.

    `budget` holds the number of nodes that the call and its recursive calls may still visit. Raise
    `OverflowError` if they would visit more.
    """
    budget[0] -= 1
    if budget[0] < 0:
        raise OverflowError
    if isinstance(node, Rule):
        return _expanded(rules[node.name], rules, budget)
    if isinstance(node, Sequence):
        return Sequence(tuple(_expanded(part, rules, budget) for part in node.parts))
    if isinstance(node, Choice):
        return Choice(tuple(_expanded(option, rules, budget) for option in node.options))
    if isinstance(node, Repeat):
        return replace(node, part=_expanded(node.part, rules, budget))
    return node


@dataclass
class _Positions:
    """Glushkov automaton of a terminal: each occurrence of a `Set` in it is one position.

    A part that is repeated up to n times has n copies of its positions.

    Attributes
    ----------
    ranges
        Characters that each position matches.
    first, last
        Positions at which a match can begin and end.
    following
        Positions that can follow each position.
    nullable
        Whether the terminal matches the empty text.
    """

    ranges: list[Ranges]
    first: frozenset[int]
    last: frozenset[int]
    following: list[set[int]]
    nullable: bool

    @classmethod
    def of(cls, node: Node) -> _Positions:
        """Return the automaton of a node that contains no reference to a rule."""
        built = cls([], frozenset(), frozenset(), [], True)
        built.first, built.last, built.nullable = built._add(node)
        return built

    def _add(self, node: Node) -> tuple[frozenset[int], frozenset[int], bool]:
        empty: frozenset[int] = frozenset()
        if isinstance(node, Set):
            if len(self.ranges) >= _MAX_POSITIONS:
                raise OverflowError
            self.ranges.append(node.ranges)
            self.following.append(set())
            here = frozenset([len(self.ranges) - 1])
            return here, here, False
        if isinstance(node, Sequence):
            return self._add_all(node.parts)
        if isinstance(node, Choice):
            added = [self._add(option) for option in node.options]
            firsts, lasts, nullables = zip(*added, strict=True)
            return empty.union(*firsts), empty.union(*lasts), any(nullables)
        assert isinstance(node, Repeat)
        # x{2,4} is read as x(x(x(x)?)?). In this form, each copy of x follows only the copy before
        # it, which keeps the sets in `following` small. If x can match the empty text, so can the
        # repetition, so its minimum `low` is then 0.
        first, last, nullable = self._add(node.part)
        if not last:  # x matches only the empty text
            return empty, empty, True
        low = 0 if nullable else node.low
        ends = last if low <= 1 else empty
        for count in range(2, (max(low, 1) if node.high is None else node.high) + 1):
            inner_first, inner_last, _ = self._add(node.part)
            self._connect(last, inner_first)
            last = inner_last
            if count >= low:
                ends = ends | last
        if node.high is None:
            self._connect(last, inner_first if low > 1 else first)
        return first, ends, low == 0

    def _add_all(self, parts: Iterable[Node]) -> tuple[frozenset[int], frozenset[int], bool]:
        first: frozenset[int] = frozenset()
        last: frozenset[int] = frozenset()
        nullable = True
        for part in parts:
            part_first, part_last, part_nullable = self._add(part)
            self._connect(last, part_first)
            first = first | part_first if nullable else first
            last = last | part_last if part_nullable else part_last
            nullable = nullable and part_nullable
        return first, last, nullable

    def _connect(self, ends: Iterable[int], begins: Iterable[int]) -> None:
        for end in ends:
            self.following[end].update(begins)


def is_nullable(node: Node, nullable: Callable[[Node], bool]) -> bool:
    """Return whether a node matches the empty text. The node must not be a reference.

    `nullable` returns whether a child of the node matches the empty text.
    """
    if isinstance(node, Sequence):
        return all(map(nullable, node.parts))
    if isinstance(node, Choice):
        return any(map(nullable, node.options))
    return isinstance(node, Repeat) and (node.low == 0 or nullable(node.part))


#: First bytes of characters in UTF-8.
_Bytes = frozenset[int]


class _Following:
    """Computes, for each terminal, the bytes with which the text after it can begin."""

    def __init__(self, rules: Mapping[str, Node], machines: dict[Node, _Positions]):
        self._rules = rules
        self._first_of_terminal = {
            node: _first_bytes(pair for at in machine.first for pair in machine.ranges[at])
            for node, machine in machines.items()
        }
        self._nullable: dict[str, bool] = {}
        self._first: dict[str, _Bytes] = {}
        self._after: dict[str, _Bytes] = {}
        self._after_terminal: dict[Node, _Bytes] = dict.fromkeys(machines, _Bytes())
        self._changed = False

    def of_terminals(self) -> dict[Node, _Bytes]:
        """Return the bytes that can follow each terminal, computed as least fixed points."""
        for table, compute in ((self._nullable, self.nullable), (self._first, self.first)):
            self._changed = True
            while self._changed:
                self._changed = False
                for name, node in self._rules.items():
                    self._set(table, name, compute(node))
        self._changed = True
        while self._changed:
            self._changed = False
            for name, node in self._rules.items():
                self._pass_down(node, self._after.get(name, _Bytes()))
        return self._after_terminal

    def _set(self, table: dict[Any, Any], key: Hashable, value: object) -> None:
        if table.get(key) != value:
            table[key] = value
            self._changed = True

    def nullable(self, node: Node) -> bool:
        """Return whether a node matches the empty text.

        Until `of_terminals` has completed the table `_nullable`, the result may be False although
        the node matches the empty text.
        """
        if node in self._first_of_terminal:
            return False
        if isinstance(node, Rule):
            return self._nullable.get(node.name, False)
        return is_nullable(node, self.nullable)

    def first(self, node: Node) -> _Bytes:
        """Return the bytes with which the texts of a node can begin.

        Until `of_terminals` has completed the tables `_first` and `_nullable`, bytes may be missing
        in the result.
        """
        if node in self._first_of_terminal:
            return self._first_of_terminal[node]
        if isinstance(node, Rule):
            return self._first.get(node.name, _Bytes())
        found: set[int] = set()
        for child in children(node):
            found |= self.first(child)
            if isinstance(node, Sequence) and not self.nullable(child):
                break
        return frozenset(found)

    def _pass_down(self, node: Node, after: _Bytes) -> None:
        """Record which bytes can follow the terminals and rules in a node.

        `after` are the bytes that can follow the node itself.
        """
        if node in self._first_of_terminal:
            self._set(self._after_terminal, node, self._after_terminal[node] | after)
        elif isinstance(node, Rule):
            self._set(self._after, node.name, self._after.get(node.name, _Bytes()) | after)
        elif isinstance(node, Sequence):
            for part in reversed(node.parts):
                self._pass_down(part, after)
                first = self.first(part)
                after = first | after if self.nullable(part) else first
        elif isinstance(node, Choice):
            for option in node.options:
                self._pass_down(option, after)
        elif isinstance(node, Repeat):
            repeats = node.high is None or node.high > 1
            self._pass_down(node.part, self.first(node.part) | after if repeats else after)


def _first_bytes(ranges: Iterable[tuple[int, int]]) -> _Bytes:
    """Return the first bytes of the characters in `ranges`, encoded in UTF-8.

    The result may contain further bytes with which no character begins.
    """
    ends = ((chr(c).encode(errors="surrogatepass")[0] for c in pair) for pair in ranges)
    return frozenset(byte for low, high in ends for byte in range(low, high + 1))


class _Lexer:
    """Simulates LLGuidance's lexer as if the parser allowed all terminals at all times.

    `machines` contains the Glushkov automaton of each terminal, and `following` the bytes that can
    follow each terminal.
    """

    def __init__(self, machines: dict[Node, _Positions], following: dict[Node, _Bytes]):
        self._terminals = list(machines)
        self._machines = [machines[terminal] for terminal in self._terminals]
        self._following = [following[terminal] for terminal in self._terminals]
        # First character of each class. No terminal distinguishes two characters of a class.
        edges = {0}
        for machine in self._machines:
            edges.update(e for ranges in machine.ranges for a, b in ranges for e in (a, b + 1))
        self._class_begins = sorted(edges - {MAX_CHARACTER + 1})
        # The lexer reads bytes: it extends a terminal even if only the first byte of a character
        # fits.
        ends = [begin - 1 for begin in self._class_begins[1:]] + [MAX_CHARACTER]
        classes = zip(self._class_begins, ends, strict=True)
        self._class_bytes = [_first_bytes([pair]) for pair in classes]

    def conflicts(self) -> set[Node]:
        """Return the terminals that the lexer might extend where another terminal should begin.

        If the search exceeds its limits, return all terminals that can have more than one
        character, because any of them might be extended.
        """
        members: dict[Ranges, list[int]] = {}

        def classes_of(ranges: Ranges) -> list[int]:
            if ranges not in members:
                ends = (
                    (bisect_left(self._class_begins, at) for at in (a, b + 1)) for a, b in ranges
                )
                members[ranges] = [index for first, last in ends for index in range(first, last)]
            return members[ranges]

        start = frozenset((t, p) for t, m in enumerate(self._machines) for p in m.first)
        found: set[Node] = set()
        seen = set()
        # Each element of the queue consists of the positions that can match the next character, and
        # of the terminals that can end before this character.
        queue = [(start, frozenset[int]())]
        steps = 0
        while queue:
            nexts, ended = queue.pop()
            following = _Bytes().union(*(self._following[terminal] for terminal in ended))
            by_class: dict[int, set[tuple[int, int]]] = {}
            for terminal, position in nexts:
                for index in classes_of(self._machines[terminal].ranges[position]):
                    by_class.setdefault(index, set()).add((terminal, position))
                    steps += 1
            for index, reached in by_class.items():
                if self._class_bytes[index] & following:
                    found |= {self._terminals[terminal] for terminal, _ in reached}
                    continue
                state = frozenset(reached)
                if state in seen:
                    continue
                seen.add(state)
                if len(seen) > _MAX_STATES or steps > _MAX_STEPS:
                    return {node for node in self._terminals if not isinstance(node, Set)}
                after = frozenset(
                    (terminal, following)
                    for terminal, position in state
                    for following in self._machines[terminal].following[position]
                )
                now_ended = frozenset(
                    terminal
                    for terminal, position in state
                    if position in self._machines[terminal].last
                )
                queue.append((after, now_ended))
        return found
