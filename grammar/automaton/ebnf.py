"""Lowering of EBNF and Lark grammars to rules in brackets."""

from __future__ import annotations

from graft.grammar.automaton.schema import Rules
from graft.grammar.regular.ebnf import parse_ebnf, references_from
from graft.grammar.regular.expression import (
    MAX_EXPRESSION,
    Expression,
    call,
    characters,
    concat,
    repeat,
    union,
)
from graft.grammar.regular.lark import parse_lark
from graft.grammar.regular.nodes import Choice, Node, Repeat, Rule, Sequence, Set
from graft.grammar.regular.regex import MAX_COUNT, NoAutomaton

__all__ = ["lower_ebnf", "lower_lark"]

#: Brackets around recursive parts: the closing bracket of each opening one.
_BRACKETS = {ord(opening): ord(closing) for opening, closing in ("{}", "[]", "()", "<>")}


def lower_ebnf(text: str, root: str, rules: Rules) -> Expression:
    """Return the expression of an EBNF grammar, whose rules in brackets are added to `rules`.

    Raise `NoAutomaton` if a rule refers to itself without brackets in between, unless the reference
    is the last part of an option, as in ``x ::= "a" x | "b"``.
    """
    return _Lowering(parse_ebnf(text, root), root, rules).rule(root)


def lower_lark(text: str, rules: Rules) -> Expression:
    """Return the expression of a Lark grammar, whose rules in brackets are added to `rules`.

    Raise `NoAutomaton` as `lower_ebnf` and `parse_lark` do.
    """
    return _Lowering(parse_lark(text), "start", rules).rule("start")


class _Lowering:
    def __init__(self, nodes: dict[str, Node], root: str, rules: Rules):
        self._nodes = nodes
        self._rules = rules
        self._recursive = _recursive_names(references_from(root, nodes))
        self._finished: dict[str, Expression] = {}
        # Names of the rules that are being lowered inside the innermost bracket. Another reference
        # to one of them is recursion without a bracket.
        self._open: set[str] = set()
        # Rules in brackets by the parts between the brackets.
        self._between: dict[tuple[Node, ...], int] = {}

    def rule(self, name: str) -> Expression:
        """Return the expression of a rule of the grammar."""
        if name in self._finished:
            return self._finished[name]
        if name in self._open:
            raise NoAutomaton(f"rule {name!r} is recursive without brackets")
        self._open.add(name)
        # A rule such as x ::= "a" x | "b" repeats what precedes its reference to itself.
        repeated = []
        others = []
        for option in _options(self._nodes[name]):
            parts = _flat(option)
            if parts and parts[-1] == Rule(name):
                repeated.append(self._sequence(parts[:-1]))
            else:
                others.append(self._sequence(parts))
        expression = union(others)
        if repeated:
            expression = concat([repeat(union(repeated), 0, None), expression])
        self._open.remove(name)
        if len(expression) > MAX_EXPRESSION:
            raise NoAutomaton("the grammar is too large")
        self._finished[name] = expression
        return expression

    def _lower(self, node: Node) -> Expression:
        if isinstance(node, Rule):
            return self.rule(node.name)
        if isinstance(node, Set):
            return characters(node.ranges)
        if isinstance(node, Choice):
            return union(map(self._lower, node.options))
        if isinstance(node, Repeat):
            if max(node.low, node.high or 0) > MAX_COUNT:
                raise NoAutomaton("a repetition count is too large")
            return repeat(self._lower(node.part), node.low, node.high)
        return self._sequence(_flat(node))

    def _sequence(self, parts: list[Node]) -> Expression:
        """Lower parts that follow one another; recursive parts in brackets become rules."""
        lowered = []
        index = 0
        while index < len(parts):
            end = self._closing(parts, index)
            if end is None:
                lowered.append(self._lower(parts[index]))
                index += 1
            else:
                lowered.append(call(self._in_brackets(parts, index, end)))
                index = end + 1
        return concat(lowered)

    def _closing(self, parts: list[Node], start: int) -> int | None:
        """Return the index of the bracket that closes the bracket at `start`.

        Return None if there is none, or if no part between the two is recursive.
        """
        opening = _character(parts[start])
        closing = _BRACKETS.get(opening)
        nesting = 0
        for index in range(start, len(parts) if closing else 0):
            code = _character(parts[index])
            nesting += (code == opening) - (code == closing)
            if nesting == 0:
                inside = parts[start + 1 : index]
                return index if any(map(self._is_recursive, inside)) else None
        return None

    def _in_brackets(self, parts: list[Node], start: int, end: int) -> int:
        """Return the rule of the parts between two brackets, with these brackets."""
        key = tuple(parts[start : end + 1])
        rule = self._between.get(key)
        if rule is None:
            rule = self._rules.reserve((_character(parts[start]), _character(parts[end])))
            self._between[key] = rule
            outside = self._open
            self._open = set()
            self._rules.set(rule, self._sequence(parts[start + 1 : end]))
            self._open = outside
        return rule

    def _is_recursive(self, node: Node) -> bool:
        if isinstance(node, Rule):
            return node.name in self._recursive
        if isinstance(node, Sequence):
            return any(map(self._is_recursive, node.parts))
        if isinstance(node, Choice):
            return any(map(self._is_recursive, node.options))
        return isinstance(node, Repeat) and self._is_recursive(node.part)


def _recursive_names(references: dict[str, frozenset[str]]) -> set[str]:
    """Return the names of the rules that refer to themselves or to such a rule."""
    recursive = set(references)
    while True:
        # A rule is not recursive if all rules to which it refers are not.
        found = {name for name in recursive if not references[name] & recursive}
        if not found:
            return recursive
        recursive -= found


def _options(node: Node) -> list[Node]:
    """Return the options of a choice or of an optional part; for other nodes, the node itself."""
    if isinstance(node, Choice):
        return [option for part in node.options for option in _options(part)]
    if isinstance(node, Repeat) and (node.low, node.high) == (0, 1):
        return [*_options(node.part), Sequence(())]
    return [node]


def _flat(node: Node) -> list[Node]:
    """Return the parts of a sequence and of inner sequences; for other nodes, the node itself."""
    if not isinstance(node, Sequence):
        return [node]
    return [part for inner in node.parts for part in _flat(inner)]


def _character(node: Node) -> int:
    """Return the only character that a node matches; -1 if the node matches other texts."""
    if isinstance(node, Set) and len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return node.ranges[0][0]
    return -1
