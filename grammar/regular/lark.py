"""Parser of the part of Lark, in LLGuidance's dialect, that can be lowered to automata."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from graft.grammar.regular.ebnf import finite_rules, references_from
from graft.grammar.regular.expression import NoAutomaton
from graft.grammar.regular.lexer import conflicts
from graft.grammar.regular.nodes import Choice, Node, Repeat, Rule, Sequence, Set, children
from graft.grammar.regular.regex import parse_regex

__all__ = ["parse_lark"]

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|(?:\#|//)[^\n]+)
      | (?P<line>(?:\r?\n)+)
      | (?P<name>_?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*)
      | (?P<string>"(?:\\.|[^"\\\n])*"i?)
      | (?P<pattern>/(?:\\.|[^/\\])+/[imslux]*)
      | (?P<range>\.\.)
      | (?P<number>\d+)
      | (?P<sign>[:|()\[\]{},~*+?])""",
    re.VERBOSE,
)
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse_lark(text: str) -> dict[str, Node]:
    """Return the rules and terminals of a Lark grammar by name; the root has the name ``start``.

    LLGuidance's lexer divides a text into terminals before it looks at rules. A terminal ends only
    where it cannot be continued. With ``start: /a+/ "ab"``, for example, the text ``aab`` is not
    legal, because the terminal ``/a+/`` takes both letters a. Raise `NoAutomaton` unless the lexer
    can see where each terminal ends, so that the legal texts are those of the rules. Raise it also
    for directives, special tokens, attributes and other parts that graft does not read.
    """
    rules = _Parser(text).parse()
    if "start" not in rules or finite_rules(rules) != rules:
        raise NoAutomaton("a Lark grammar has a rule without a finite text")
    names = references_from("start", rules)
    reachable = {name: rules[name] for name in names}
    if any(not _is_terminal(used) for name in names if _is_terminal(name) for used in names[name]):
        raise NoAutomaton("a terminal of a Lark grammar refers to a rule")
    terminals = [
        node for name in names if not _is_terminal(name) for node in _terminals(rules[name])
    ]
    if conflicts(reachable, dict.fromkeys(terminals)):
        raise NoAutomaton("the lexer cannot see where a terminal of a Lark grammar ends")
    return reachable


def _is_terminal(name: str) -> bool:
    """Return whether a name is that of a terminal. The name of a text or pattern is its source."""
    return name.lstrip("_")[0] in '"/' or name.isupper()


def _terminals(node: Node) -> Iterator[Node]:
    """Yield the terminals in the node of a rule. A `Set` is the terminal of one character."""
    if isinstance(node, Set) or (isinstance(node, Rule) and _is_terminal(node.name)):
        yield node
    for child in children(node):
        yield from _terminals(child)


class _Parser:
    """Recursive-descent parser of a Lark grammar that LLGuidance has accepted."""

    def __init__(self, text: str):
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                raise NoAutomaton(f"Lark grammars with {text[position]!r} have no lowering")
            if match.lastgroup != "space":
                self._tokens.append((match.lastgroup, match[0]))
            position = match.end()
        self._next = 0
        self._rules: dict[str, Node] = {}

    def parse(self) -> dict[str, Node]:
        """Return the nodes of all rules and terminals by name."""
        self._skip_lines()
        while self._next < len(self._tokens):
            name = self._take("name")
            self._take(":")
            node = self._choice()
            if name in self._rules:
                raise NoAutomaton(f"the Lark grammar defines {name} twice")
            self._rules[name] = node
            if self._next < len(self._tokens):
                self._take("line")
            self._skip_lines()
        return self._rules

    def _skip_lines(self) -> None:
        while self._is("line"):
            self._next += 1

    def _is(self, what: str, ahead: int = 0) -> bool:
        """Return whether a token is of the kind `what`, or is the sign `what`."""
        at = self._next + ahead
        if at >= len(self._tokens):
            return False
        kind, text = self._tokens[at]
        return what == (text if kind == "sign" else kind)

    def _skip(self, what: str) -> bool:
        """Skip the next token if it is `what`, and return whether it was."""
        found = self._is(what)
        self._next += found
        return found

    def _take(self, what: str) -> str:
        if not self._is(what):
            raise NoAutomaton(f"expected {what} in a Lark grammar")
        self._next += 1
        return self._tokens[self._next - 1][1]

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._is("|") or (self._is("line") and self._is("|", 1)):
            self._skip("line")
            self._take("|")
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts = []
        while any(map(self._is, ("name", "string", "pattern", "(", "["))):
            parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self) -> Node:
        part = self._atom()
        for sign, counts in _COUNTS.items():
            if self._skip(sign):
                return Repeat(part, *counts)
        if self._skip("~"):
            low = high = int(self._take("number"))
            if self._skip("range"):
                high = int(self._take("number"))
            return Repeat(part, low, high)
        if self._skip("{"):
            low = 0 if self._is(",") else int(self._take("number"))
            most: int | None = low
            if self._skip(","):
                most = None if self._is("}") else int(self._take("number"))
            self._take("}")
            return Repeat(part, low, most)
        return part

    def _atom(self) -> Node:
        if self._skip("("):
            node = self._choice()
            self._take(")")
            return node
        if self._skip("["):
            node = Repeat(self._choice(), 0, 1)
            self._take("]")
            return node
        if self._is("name"):
            return Rule(self._take("name"))
        if self._is("string"):
            source = self._take("string")
            if self._skip("range"):
                first, last = _character(source), _character(self._take("string"))
                return Set(((first, last),))
            return self._terminal(source, _text(source))
        source = self._take("pattern")
        end = source.rindex("/")
        flags = source[end + 1 :]
        return self._terminal(source, parse_regex((f"(?{flags})" if flags else "") + source[1:end]))

    def _terminal(self, source: str, node: Node) -> Node:
        """Return the node of a text or pattern in the grammar.

        It is a reference to a terminal with the name `source`, unless it is one character or empty.
        """
        if isinstance(node, Set) or node == Sequence(()):
            return node
        self._rules[source] = node
        return Rule(source)


def _text(source: str) -> Node:
    """Return the node of a text in quotation marks."""
    text = _decoded(source.removesuffix("i"))
    if source.endswith("i"):
        return parse_regex("(?i)" + "".join(f"\\x{{{ord(character):x}}}" for character in text))
    sets = tuple(Set(((ord(character), ord(character)),)) for character in text)
    return sets[0] if len(sets) == 1 else Sequence(sets)


def _character(source: str) -> int:
    """Return the code of the one character between quotation marks."""
    text = "" if source.endswith("i") else _decoded(source)
    if len(text) != 1:
        raise NoAutomaton("a range in a Lark grammar has an end that is not a character")
    return ord(text)


def _decoded(source: str) -> str:
    """Return the text of a JSON string in which ``\\xHH`` is an escape too."""
    try:
        text = json.loads(re.sub(r"\\(.)", lambda m: r"\u00" if m[1] == "x" else m[0], source))
        text.encode()
    except ValueError:
        raise NoAutomaton("a Lark grammar has an unknown escape") from None
    return str(text)
