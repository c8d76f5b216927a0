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

from collections.abc import Callable, Iterator

from graft.grammar.errors import GrammarError
from graft.grammar.regular.ebnf import parse_ebnf, references, references_from
from graft.grammar.regular.lexer import conflicts, is_nullable
from graft.grammar.regular.nodes import Choice, Node, Repeat, Rule, Sequence, Set, children
from graft.grammar.schema.llguidance_options import literal

__all__ = ["lark_grammar"]


def lark_grammar(text: str, root: str) -> str:
    """Return a Lark grammar that allows exactly the texts of an EBNF grammar.

    Raise `GrammarError` if the grammar has a syntax error, an undefined rule or an extension of
    XGrammar, or if its root rule has no finite text.
    """
    try:
        return _Lowering(parse_ebnf(text, root), root).lark()
    except RecursionError:
        raise GrammarError("ebnf: is nested too deeply") from None


class _Lowering:
    """Divides an EBNF grammar into terminals and rules, and writes both in Lark's notation."""

    def __init__(self, rules: dict[str, Node], root: str):
        self._root = root
        references = references_from(root, rules)
        self._rules = {name: rules[name] for name in references}
        #: Rules from which no recursive rule can be reached.
        self._regular: set[str] = set()
        while found := {
            name
            for name, names in references.items()
            if names <= self._regular and name not in self._regular
        }:
            self._regular |= found
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
                self._nullables[node] = self._nullable(self._rules[node.name])
            else:
                self._nullables[node] = is_nullable(node, self._nullable)
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
                    queue.append(self._rules[node.name])
            else:
                queue += children(node)

    def _conflicts(self) -> set[Node]:
        return conflicts(self._rules, dict.fromkeys(self._terminals()))

    # Output in Lark's notation

    def _define(self, node: Node, terminal: bool) -> str:
        """Return the name of the terminal or rule that matches `node`; define it if it is new."""
        key = (terminal, node)
        if key not in self._names:
            self._names[key] = name = f"{'T' if terminal else 'r'}{len(self._names)}"
            target = self._rules[node.name] if isinstance(node, Rule) else node
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
