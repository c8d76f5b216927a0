"""Parser of EBNF grammars in XGrammar's notation, which resembles GBNF of llama.cpp."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

from graft.grammar.errors import GrammarError
from graft.grammar.regular.expression import MAX_CHARACTER, complement
from graft.grammar.regular.nodes import (
    Choice,
    Node,
    Repeat,
    Rule,
    Sequence,
    Set,
    children,
    normalized,
)

__all__ = ["finite_rules", "parse_ebnf", "references", "references_from"]

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
      | (?P<define>::=)
      | (?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<set>\[(?:[^\]\\\n]|\\.)*\])
      | (?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
      | (?P<sign>[()|*+?])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"""\\x[0-9A-Fa-f]{2}(?![0-9A-Fa-f]) | \\u[0-9A-Fa-f]{4} | \\U[0-9A-Fa-f]{8}
      | \\[^xuU] | [^\\]""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse_ebnf(text: str, root: str) -> dict[str, Node]:
    """Return the rules of an EBNF grammar by name, without the parts that match no finite text.

    Raise `GrammarError` if the grammar has a syntax error, an undefined rule or an extension of
    XGrammar, or if its root rule has no finite text.
    """
    rules = _Parser(text).parse()
    if root not in rules:
        raise _error(f'the root rule "{root}" is not found')
    references_from(root, rules)  # raises GrammarError for undefined rules
    finite = finite_rules(rules)
    if root not in finite:
        raise _error(f'the root rule "{root}" has no text, because its recursion never ends')
    return finite


def _error(message: str) -> GrammarError:
    return GrammarError(f"ebnf: {message}")


class _Parser:
    """Recursive-descent parser of an EBNF grammar."""

    def __init__(self, text: str):
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                error = self._syntax_error("unexpected", text[position], position)
                raise GrammarError(f"{error} (extensions of EBNF need the backend XGrammar)")
            assert match.lastgroup is not None
            if match.lastgroup != "space":
                self._tokens.append((match.lastgroup, match[0], position))
            position = match.end()
        self._next = 0

    def parse(self) -> dict[str, Node]:
        """Return the expression of each rule, by the rule's name."""
        rules: dict[str, Node] = {}
        while self._next < len(self._tokens):
            _, name, position = self._tokens[self._next]
            if not self._at_rule():
                raise self._syntax_error("expected a rule, got", name, position)
            if name in rules:
                raise self._syntax_error("a second rule has the name", name, position)
            self._next += 2
            rules[name] = self._choice()
        return rules

    def _at_rule(self) -> bool:
        kinds = [kind for kind, _, _ in self._tokens[self._next : self._next + 2]]
        return kinds == ["name", "define"]

    def _peek(self) -> tuple[str, str, int]:
        if self._next < len(self._tokens):
            return self._tokens[self._next]
        return "end", "the end", len(self._text)

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._peek()[1] == "|":
            self._next += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek()[0] in ("name", "string", "set") or self._peek()[1] == "(":
            if self._at_rule():
                break
            parts.append(self._repeated())
        kind, text, position = self._peek()
        at_end = kind == "end" or text in ("|", ")") or self._at_rule()
        if not parts or not at_end:
            raise self._syntax_error("expected an element, got", text, position)
        if len(parts) > 2 and isinstance(parts[-1], Rule | Repeat):
            # The last part becomes a separate node, because often only optional white space at
            # the end prevents the other parts from becoming one terminal.
            parts = [Sequence(tuple(parts[:-1])), parts[-1]]
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self) -> Node:
        part = self._element()
        while True:
            kind, text, position = self._peek()
            if kind == "count":
                low, comma, high = text[1:-1].replace(" ", "").partition(",")
                most = int(high) if high else None if comma else int(low)
                if most is not None and most < int(low):
                    raise self._syntax_error("invalid count", text, position)
                # LLGuidance refuses a repetition with the count 0.
                part = Sequence(()) if most == 0 else Repeat(part, int(low), most)
            elif text in _COUNTS and kind == "sign":
                part = Repeat(part, *_COUNTS[text])
            else:
                return part
            self._next += 1

    def _element(self) -> Node:
        kind, text, position = self._peek()
        self._next += 1
        if kind == "name":
            return Rule(text)
        if kind == "string":
            codes = [code for code, _ in self._characters(text, position)]
            return Sequence(tuple(Set(((code, code),)) for code in codes))
        if kind == "set":
            return self._set(text, position)
        inner = self._choice()
        if self._peek()[1] != ")":
            raise self._syntax_error("expected ), got", self._peek()[1], self._peek()[2])
        self._next += 1
        return inner

    def _set(self, text: str, position: int) -> Node:
        is_negated = text.startswith("[^")
        characters = self._characters(text[1:] if is_negated else text, position)
        ranges: list[tuple[int, int]] = []
        index = 0
        while index < len(characters):
            low, _ = characters[index]
            high = low
            following = characters[index + 1 : index + 3]
            if len(following) == 2 and following[0] == (ord("-"), False):
                high = following[1][0]
                index += 2
            if high < low:
                raise self._syntax_error("invalid range in", text, position)
            ranges.append((low, high))
            index += 1
        if is_negated:
            ranges = complement(ranges)
        return Set(normalized(ranges))

    def _characters(self, text: str, position: int) -> list[tuple[int, bool]]:
        """Return the codes of the characters between the delimiters of a string or set.

        Each code is paired with a flag that says whether the character was escaped. `position` is
        the position of `text` in the grammar, for error messages.
        """
        found: list[tuple[int, bool]] = []
        index = 1
        while index < len(text) - 1:
            match = _CHARACTER.match(text, index, len(text) - 1)
            if match is None:
                raise self._syntax_error("invalid escape in", text, position)
            found.append((self._code(match[0], text, position), len(match[0]) > 1))
            index = match.end()
        return found

    def _code(self, piece: str, text: str, position: int) -> int:
        if len(piece) > 2:
            code = int(piece[2:], 16)
            if code > MAX_CHARACTER:
                raise self._syntax_error("invalid character in", text, position)
            return code
        letter = piece[-1]
        if len(piece) == 1 or not (letter.isascii() and letter.isalnum()):
            return ord(letter)
        if letter not in _ESCAPES:
            raise self._syntax_error(f"unknown escape {piece} in", text, position)
        return ord(_ESCAPES[letter])

    def _syntax_error(self, what: str, found: str, position: int) -> GrammarError:
        line = self._text.count("\n", 0, position) + 1
        return _error(f"line {line}: {what} {found[:40]!r}")


@functools.lru_cache(maxsize=4096)
def references(node: Node) -> frozenset[str]:
    """Return the names of the rules to which a node refers."""
    if isinstance(node, Rule):
        return frozenset([node.name])
    found: frozenset[str] = frozenset()
    return found.union(*map(references, children(node)))


def references_from(root: str, rules: dict[str, Node]) -> dict[str, frozenset[str]]:
    """Return the names that each rule refers to, for all rules that the root rule reaches."""
    found: dict[str, frozenset[str]] = {}
    queue = [root]
    while queue:
        name = queue.pop()
        if name in found:
            continue
        if name not in rules:
            raise _error(f'rule "{name}" is not defined')
        found[name] = references(rules[name])
        queue += found[name]
    return found


def finite_rules(rules: dict[str, Node]) -> dict[str, Node]:
    """Return the rules without the parts that match no finite text.

    If these parts were kept, a model could begin to generate one of them and never end. For
    example, the second option of ``x ::= "a" | "b" y`` with ``y ::= "c" y`` has no finite text.
    """
    finite: set[str] = set()
    pending = list(rules)
    count = -1
    while len(finite) > count:
        count = len(finite)
        finite.update(name for name in pending if _is_finite(rules[name], finite))
        # Rules often refer to later rules, so the last rules are examined first.
        pending = [name for name in reversed(pending) if name not in finite]
    return {name: _finite_part(node, finite) for name, node in rules.items() if name in finite}


def _is_finite(node: Node, finite: set[str]) -> bool:
    """Return whether the recursion in a node can end, so that the node matches a finite text.

    `finite` are the names of the rules that are known to match a finite text.
    """
    if isinstance(node, Rule):
        return node.name in finite
    if isinstance(node, Choice):
        return any(_is_finite(option, finite) for option in node.options)
    if isinstance(node, Repeat) and node.low == 0:
        return True
    return all(_is_finite(child, finite) for child in children(node))


def _finite_part(node: Node, finite: set[str]) -> Node:
    """Return the node without its parts that match no finite text."""
    if isinstance(node, Sequence):
        return Sequence(tuple(_finite_part(part, finite) for part in node.parts))
    if isinstance(node, Choice):
        options = [option for option in node.options if _is_finite(option, finite)]
        return Choice(tuple(_finite_part(option, finite) for option in options))
    if isinstance(node, Repeat):
        if not _is_finite(node.part, finite):
            return Sequence(())
        return replace(node, part=_finite_part(node.part, finite))
    return node
