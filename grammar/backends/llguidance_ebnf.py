"""EBNF grammars in XGrammar's notation (GBNF), as Lark grammars for LLGuidance.

LLGuidance's lexer is greedy: a terminal matches as much text as possible, and the lexer never
backtracks. If the rules of an EBNF grammar were copied to Lark, some texts would be refused, unless
the lexer could see where each terminal ends. `lark_grammar` returns a grammar that allows exactly
the same texts:

* If no rule is recursive, the whole grammar becomes one terminal. Matching within a terminal is not
  greedy.
* Otherwise, the largest parts without recursion become terminals. If the next character could both
  extend a terminal and begin the text after it, the terminal is split into smaller terminals, if
  necessary into terminals of one character.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from graft.grammar.errors import GrammarError
from graft.grammar.regular.ebnf import (
    Choice,
    Node,
    Ranges,
    Repeat,
    Rule,
    Sequence,
    Set,
    children,
    normalized,
    parse_ebnf,
    references,
    references_from,
)
from graft.grammar.regular.expression import MAX_CHARACTER
from graft.grammar.schema.llguidance_options import literal

__all__ = ["lark_grammar"]

#: Maximum number of lexer states that `_Lexer.conflicts` visits before it stops the search.
_MAX_STATES = 2000

#: Maximum number of steps of this search. A state is a set of positions (`_Positions`). A visit
#: takes one step for each of its positions and each character class that the position matches.
_MAX_STEPS = 500_000

#: Maximum number of positions of the Glushkov automaton (`_Positions`) of a terminal in a recursive
#: grammar. A part with more positions does not become a terminal.
_MAX_POSITIONS = 2000


def lark_grammar(text: str, root: str) -> str:
    """Return a Lark grammar that allows exactly the texts of an EBNF grammar.

    Raise `GrammarError` if the grammar has a syntax error, an undefined rule or an extension of
    XGrammar, or if its root rule has no finite text.
    """
    try:
        return _Lowering(parse_ebnf(text, root), root).lark()
    except RecursionError:
        raise GrammarError("ebnf: is nested too deeply") from None


def _overlap(first: Ranges, second: Ranges) -> bool:
    return any(a <= d and c <= b for a, b in first for c, d in second)


# Terminals ----------------------------------------------------------------------------------------


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


class _Lowering:
    """Divides an EBNF grammar into terminals and rules, and writes both in Lark's notation."""

    def __init__(self, rules: dict[str, Node], root: str):
        self.rules = rules
        self._root = root
        references = references_from(root, rules)
        #: Rules from which no recursive rule can be reached.
        self._regular: set[str] = set()
        while found := {
            name
            for name, names in references.items()
            if names <= self._regular and name not in self._regular
        }:
            self._regular |= found
        self.reachable = references.keys()
        self._nullables: dict[Node, bool] = {}
        self._split: set[Node] = set()  # nodes that must not become terminals
        self._lines: list[str] = []
        self._names: dict[tuple[bool, Node], str] = {}

    def lark(self) -> str:
        """Return the grammar in Lark's notation."""
        root = Rule(self._root)
        if not self._is_regular(root):
            while conflicts := self._conflicts():
                self._split |= conflicts
        start = self._rule_text(root)
        return "\n".join([f"start: {start}", *self._lines])

    def _is_regular(self, node: Node) -> bool:
        return references(node) <= self._regular

    # Division into terminals

    def _is_terminal(self, node: Node) -> bool:
        if isinstance(node, Set):
            return True
        return node not in self._split and self._is_regular(node) and not self._nullable(node)

    def _nullable(self, node: Node) -> bool:
        """Return whether a node without recursion matches the empty text."""
        if node not in self._nullables:
            if isinstance(node, Rule):
                self._nullables[node] = self._nullable(self.rules[node.name])
            else:
                self._nullables[node] = _is_nullable(node, self._nullable)
        return self._nullables[node]

    def _terminals(self) -> Iterator[Node]:
        """Yield the largest nodes of each rule that can become terminals."""
        seen: set[str] = set()
        queue: list[Node] = [Rule(self._root)]
        while queue:
            node = queue.pop()
            if self._is_terminal(node):
                yield node
            elif isinstance(node, Rule):
                if node.name not in seen:
                    seen.add(node.name)
                    queue.append(self.rules[node.name])
            else:
                queue += children(node)

    def _conflicts(self) -> set[Node]:
        """Return the terminals that the caller must split.

        These are the terminals whose match the greedy lexer might extend with characters that
        belong to the next terminal. Terminals whose Glushkov automaton has more than
        `_MAX_POSITIONS` positions are too large to be examined. If there are any, the method
        returns only these; the caller splits them and calls the method again.
        """
        terminals = list(dict.fromkeys(self._terminals()))
        too_large = set()
        machines = {}
        for terminal in terminals:
            try:
                machines[terminal] = _Positions.of(self._expanded(terminal))
            except OverflowError:
                too_large.add(terminal)
        if too_large:
            return too_large
        following = _Following(self, machines).of_terminals()
        return _Lexer(machines, following).conflicts()

    def _expanded(self, node: Node, budget: list[int] | None = None) -> Node:
        """Return a node in which all references are replaced with the rules' expressions.

        `budget` holds the number of nodes that the call and its recursive calls may still visit.
        Raise `OverflowError` if they would visit more.
        """
        budget = [_MAX_POSITIONS] if budget is None else budget
        budget[0] -= 1
        if budget[0] < 0:
            raise OverflowError
        if isinstance(node, Rule):
            return self._expanded(self.rules[node.name], budget)
        if isinstance(node, Sequence):
            return Sequence(tuple(self._expanded(part, budget) for part in node.parts))
        if isinstance(node, Choice):
            return Choice(tuple(self._expanded(option, budget) for option in node.options))
        if isinstance(node, Repeat):
            return replace(node, part=self._expanded(node.part, budget))
        return node

    # Output in Lark's notation

    def _define(self, node: Node, terminal: bool) -> str:
        """Return the name of the terminal or rule that matches `node`; define it if it is new."""
        key = (terminal, node)
        if key not in self._names:
            self._names[key] = name = f"{'T' if terminal else 'r'}{len(self._names)}"
            target = self.rules[node.name] if isinstance(node, Rule) else node
            text = self._terminal_text(target) if terminal else self._rule_text(target)
            self._lines.append(f"{name}: {text}")
        return self._names[key]

    def _rule_text(self, node: Node) -> str:
        """Return the Lark expression that matches `node` within a rule."""
        if isinstance(node, Rule) and node.name == self._root and self._is_regular(node):
            return self._define(node, terminal=True)
        if self._is_terminal(node):
            return self._define(node, terminal=True)
        if isinstance(node, Rule):
            return self._define(node, terminal=False)
        return _combined(node, self._rule_text)

    def _terminal_text(self, node: Node) -> str:
        """Return the Lark expression that matches `node` within a terminal."""
        if isinstance(node, Rule):
            return self._define(node, terminal=True)
        if isinstance(node, Set):
            return _set_text(node)
        if isinstance(node, Sequence) and all(map(_character, node.parts)):
            return literal("".join(map(_character, node.parts)))
        return _combined(node, self._terminal_text)


def _character(node: Node) -> str:
    """Return the only character that a node matches; empty if it can match other texts."""
    if not isinstance(node, Set) or len(node.ranges) != 1:
        return ""
    low, high = node.ranges[0]
    return chr(low) if low == high else ""


def _set_text(node: Set) -> str:
    if not node.ranges:
        raise GrammarError("ebnf: a character class contains no character")
    pairs = (f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in node.ranges)
    return f"/[{''.join(pairs)}]/"


def _combined(node: Node, text_of: Callable[[Node], str]) -> str:
    """Return the Lark expression of a node. `text_of` returns the expression of a child."""
    texts = [text_of(child) for child in children(node)]
    if isinstance(node, Sequence):
        return f"({' '.join(texts)})" if texts else '""'
    if isinstance(node, Choice):
        return f"({' | '.join(texts)})"
    assert isinstance(node, Repeat)
    high = "" if node.high is None else node.high
    return f"({texts[0]}){{{node.low},{high}}}"


def _is_nullable(node: Node, nullable: Callable[[Node], bool]) -> bool:
    """Return whether a node matches the empty text. The node must not be a reference.

    `nullable` returns whether a child of the node matches the empty text.
    """
    if isinstance(node, Sequence):
        return all(map(nullable, node.parts))
    if isinstance(node, Choice):
        return any(map(nullable, node.options))
    return isinstance(node, Repeat) and (node.low == 0 or nullable(node.part))


# Conflicts of terminals ---------------------------------------------------------------------------


class _Following:
    """Computes, for each terminal, the characters with which the text after it can begin."""

    def __init__(self, lowering: _Lowering, machines: dict[Node, _Positions]):
        self._lowering = lowering
        self._machines = machines
        self._nullable: dict[str, bool] = {}
        self._first: dict[str, Ranges] = {}
        self._after: dict[str, Ranges] = {}
        self._after_terminal: dict[Node, Ranges] = dict.fromkeys(machines, ())
        self._changed = False

    def of_terminals(self) -> dict[Node, Ranges]:
        """Return the characters that can follow each terminal, computed as least fixed points."""
        rules = self._lowering.rules
        for table, compute in ((self._nullable, self.nullable), (self._first, self.first)):
            self._changed = True
            while self._changed:
                self._changed = False
                for name, node in rules.items():
                    if name in self._lowering.reachable:
                        self._set(table, name, compute(node))
        self._changed = True
        while self._changed:
            self._changed = False
            for name, node in rules.items():
                if name in self._lowering.reachable:
                    self._pass_down(node, self._after.get(name, ()))
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
        if node in self._machines:
            return False
        if isinstance(node, Rule):
            return self._nullable.get(node.name, False)
        return _is_nullable(node, self.nullable)

    def first(self, node: Node) -> Ranges:
        """Return the characters with which the texts of a node can begin.

        Until `of_terminals` has completed the tables `_first` and `_nullable`, characters may be
        missing in the result.
        """
        if node in self._machines:
            machine = self._machines[node]
            return normalized(pair for at in machine.first for pair in machine.ranges[at])
        if isinstance(node, Rule):
            return self._first.get(node.name, ())
        found: list[tuple[int, int]] = []
        for child in children(node):
            found += self.first(child)
            if isinstance(node, Sequence) and not self.nullable(child):
                break
        return normalized(found)

    def _pass_down(self, node: Node, after: Ranges) -> None:
        """Record which characters can follow the terminals and rules in a node.

        `after` are the characters that can follow the node itself.
        """
        if node in self._machines:
            self._set(self._after_terminal, node, _union(self._after_terminal[node], after))
        elif isinstance(node, Rule):
            self._set(self._after, node.name, _union(self._after.get(node.name, ()), after))
        elif isinstance(node, Sequence):
            for part in reversed(node.parts):
                self._pass_down(part, after)
                first = self.first(part)
                after = _union(first, after) if self.nullable(part) else first
        elif isinstance(node, Choice):
            for option in node.options:
                self._pass_down(option, after)
        elif isinstance(node, Repeat):
            again = self.first(node.part) if node.high is None or node.high > 1 else ()
            self._pass_down(node.part, _union(again, after))


def _union(first: Ranges, second: Ranges) -> Ranges:
    return first if first == second else normalized([*first, *second])


class _Lexer:
    """Simulates LLGuidance's lexer as if the parser allowed all terminals at all times.

    `machines` contains the Glushkov automaton of each terminal, and `following` the characters that
    can follow each terminal.
    """

    def __init__(self, machines: dict[Node, _Positions], following: dict[Node, Ranges]):
        self._terminals = list(machines)
        self._machines = [machines[terminal] for terminal in self._terminals]
        self._following = [following[terminal] for terminal in self._terminals]
        bounds = {0, MAX_CHARACTER + 1}
        for ranges in [*self._following, *(r for m in self._machines for r in m.ranges)]:
            bounds.update(edge for low, high in ranges for edge in (low, high + 1))
        ordered = sorted(bounds)
        #: Character classes: no terminal distinguishes two characters of the same class.
        self._classes: list[Ranges] = [
            ((low, high - 1),) for low, high in itertools.pairwise(ordered)
        ]

    def conflicts(self) -> set[Node]:
        """Return the terminals that the lexer might extend where another terminal should begin.

        If the search exceeds its limits, return all terminals that can have more than one
        character, because any of them might be extended.
        """
        members: dict[Ranges, frozenset[int]] = {}

        def classes_of(ranges: Ranges) -> frozenset[int]:
            if ranges not in members:
                members[ranges] = frozenset(
                    i for i, cls in enumerate(self._classes) if _overlap(cls, ranges)
                )
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
            by_class: dict[int, set[tuple[int, int]]] = {}
            for terminal, position in nexts:
                for index in classes_of(self._machines[terminal].ranges[position]):
                    by_class.setdefault(index, set()).add((terminal, position))
                    steps += 1
            for index, reached in by_class.items():
                if any(index in classes_of(self._following[terminal]) for terminal in ended):
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
