"""Lowering of regular expressions to the expressions of `graft.grammar.regular.expression`.

LLGuidance reads patterns with Rust's ``regex-syntax`` crate, and so does this module. It supports
groups of all kinds, lazy repetitions, flags, Unicode classes, and the operators of character
classes. For any other pattern, for example one with a word boundary, the functions raise
`NoAutomaton`, and the request uses the matcher of the grammar library instead of an automaton.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from graft.grammar.regular.expression import (
    EMPTY,
    MAX_CHARACTER,
    Expression,
    NoAutomaton,
    Ranges,
    characters,
    complement,
    concat,
    intersection,
    repeat,
    union,
)
from graft.grammar.regular.nodes import Anchor, Choice, Node, Repeat, Sequence, Set, children
from graft.grammar.regular.unicode_classes import category_ranges, digit_ranges, word_ranges

__all__ = [
    "ANY",
    "CHARACTER_CLASS",
    "JSON_CLASSES",
    "RUST_CLASSES",
    "SPACE",
    "NoAutomaton",
    "has_alternatives",
    "lower_regex",
    "lower_search",
    "parse_regex",
]

#: Maximum nesting of groups.
MAX_NESTING = 100

#: Maximum count of a repetition such as ``{1000}``. Native code limits the size of automata.
MAX_COUNT = 1 << 30

#: Regular expression of a character class in a pattern. A class that is not closed extends to the
#: end of the pattern. Otherwise, each of many opening brackets would lead to a search for the end.
CHARACTER_CLASS = r"\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)"

#: All characters.
ANY: Ranges = ((0, MAX_CHARACTER),)
#: Characters of ``\s``: those with the Unicode property White_Space.
SPACE: Ranges = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0x85, 0x85),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)
#: Functions that return the characters of ``\d``, ``\s`` and ``\w``, by letter.
Classes = Mapping[str, Callable[[], Ranges]]
RUST_CLASSES: Classes = MappingProxyType({"d": digit_ranges, "s": lambda: SPACE, "w": word_ranges})
_DIGITS = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
#: In patterns of JSON schemas, ``\d`` and ``\w`` match only ASCII characters.
JSON_CLASSES: Classes = MappingProxyType({**RUST_CLASSES, "d": lambda: _DIGITS, "w": lambda: _WORD})

_CONTROL_ESCAPES = {"a": "\a", "n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
#: Number of hexadecimal digits of an escape without braces, by letter.
_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}
_NOT_LINE_FEED = complement([(0x0A, 0x0A)])
_ASCII_CLASSES: dict[str, Ranges] = {
    "alnum": ((0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A)),
    "alpha": ((0x41, 0x5A), (0x61, 0x7A)),
    "ascii": ((0, 0x7F),),
    "blank": ((0x09, 0x09), (0x20, 0x20)),
    "cntrl": ((0, 0x1F), (0x7F, 0x7F)),
    "digit": ((0x30, 0x39),),
    "graph": ((0x21, 0x7E),),
    "lower": ((0x61, 0x7A),),
    "print": ((0x20, 0x7E),),
    "punct": ((0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E)),
    "space": ((0x09, 0x0D), (0x20, 0x20)),
    "upper": ((0x41, 0x5A),),
    "word": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "xdigit": ((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)),
}
_ASCII_CLASS = re.compile(r"\[:(\^?)([a-z]+):\]")
_GROUP_NAME = re.compile(r"P?<[A-Za-z_][A-Za-z0-9_.\[\]]*>")
#: Characters outside ASCII with the same simple case folding as an ASCII letter.
_FOLDED = {"k": 0x212A, "s": 0x017F}


def parse_regex(pattern: str) -> Node:
    """Return the syntax tree of a pattern without anchors.

    Raise `NoAutomaton` if the pattern has anchors or unsupported syntax.
    """
    node = _Parser(pattern, RUST_CLASSES).parse()
    queue = [node]
    while queue:
        part = queue.pop()
        if isinstance(part, Anchor):
            raise NoAutomaton("anchors are not supported here")
        queue += children(part)
    return node


def lower_regex(
    pattern: str,
    one_of: Callable[[Ranges], Expression] = characters,
    classes: Classes = RUST_CLASSES,
) -> Expression:
    """Return the expression of the texts that match a pattern from start to end.

    `one_of` returns the expression of one character of the given ranges. It is called for each
    character, class and escape of the pattern, and can add, for example, the escape sequences of
    JSON strings. `classes` contains the characters of class escapes such as ``\\d``, by letter.
    Raise `NoAutomaton` if the pattern has unsupported syntax.
    """
    return _Writer(one_of, None).write(_Parser(pattern, classes).parse(), True, True)


def lower_search(
    pattern: str,
    one_of: Callable[[Ranges], Expression],
    classes: Classes,
    low: int = 0,
    high: int | None = None,
) -> tuple[Expression, bool]:
    """Return the expression of the texts in which a pattern matches some part.

    `one_of` and `classes` are as in `lower_regex`. The second result says whether each of these
    texts is known to have at least `low` and at most `high` characters; None stands for no limit.
    """
    node = _Parser(pattern, classes).parse()
    writer = _Writer(one_of, repeat(one_of(ANY), 0, None))
    start, end = _anchors(node, True, True)
    shortest, longest = _lengths(node, True, True)
    if not (start and end):
        longest = None
    within = shortest >= low and (high is None or (longest is not None and longest <= high))
    return writer.search(node, True, True, not start, not end), within


def has_alternatives(pattern: str) -> bool:
    """Return whether a pattern has a ``|`` outside groups, escapes and classes."""
    outside_classes = re.sub(rf"\\.|{CHARACTER_CLASS}", "", pattern, flags=re.DOTALL)
    nesting = 0
    for character in outside_classes:
        if character == "|" and nesting == 0:
            return True
        nesting += (character == "(") - (character == ")")
    return False


def _anchors(node: Node, at_start: bool, at_end: bool) -> tuple[bool, bool]:
    """Return whether matches of a node are anchored to the start and to the end of the text.

    `at_start` and `at_end` say whether the node is the first and the last part of the pattern. A
    choice counts as anchored if one of its options is.
    """
    if isinstance(node, Anchor):
        return not node.at_end, node.at_end
    if isinstance(node, Choice):
        options = [_anchors(option, at_start, at_end) for option in node.options]
        return any(start for start, _ in options), any(end for _, end in options)
    if isinstance(node, Sequence) and node.parts:
        last = len(node.parts) - 1
        start = _anchors(node.parts[0], at_start, at_end and last == 0)[0]
        return start, _anchors(node.parts[-1], at_start and last == 0, at_end)[1]
    return False, False


def _lengths(node: Node, at_start: bool, at_end: bool) -> tuple[int, int | None]:
    """Return the numbers of characters of the shortest and the longest match of a node.

    `at_start` and `at_end` are as in `_anchors`. If one option is anchored and another one is not,
    the longest match is unlimited (None).
    """
    if isinstance(node, Set):
        return 1, 1
    if isinstance(node, Anchor):
        return 0, 0
    if isinstance(node, Repeat):
        low, high = _lengths(node.part, False, False)
        unlimited = high is None or node.high is None
        return low * node.low, None if unlimited or high == 0 else (high or 0) * (node.high or 0)
    if isinstance(node, Sequence):
        last = len(node.parts) - 1
        found = [
            _lengths(part, at_start and index == 0, at_end and index == last)
            for index, part in enumerate(node.parts)
        ]
        total: int | None = 0
        for _, high in found:
            total = None if total is None or high is None else total + high
        return sum(low for low, _ in found), total
    assert isinstance(node, Choice)
    found = [_lengths(option, at_start, at_end) for option in node.options]
    anchors = [_anchors(option, at_start, at_end) for option in node.options]
    longest = [high for _, high in found]
    if None in longest or len(set(anchors)) > 1:
        return min(low for low, _ in found), None
    return min(low for low, _ in found), max(high for high in longest if high is not None)


class _Writer:
    """Writes nodes as expressions.

    `anything` is the expression of any text. It is None if the pattern must match the whole text,
    so that anchors have no effect.
    """

    def __init__(self, one_of: Callable[[Ranges], Expression], anything: Expression | None):
        self._one_of = one_of
        self._anything = anything

    def search(
        self, node: Node, at_start: bool, at_end: bool, before: bool, after: bool
    ) -> Expression:
        """Write a node; any text may precede it if `before`, and follow it if `after` is true."""
        assert self._anything is not None
        parts = [self.write(node, at_start, at_end)]
        if before:
            parts.insert(0, self._anything)
        if after:
            parts.append(self._anything)
        return concat(parts)

    def write(self, node: Node, at_start: bool, at_end: bool) -> Expression:
        """Write a node; `at_start` and `at_end` are as in `_anchors`."""
        if isinstance(node, Set):
            return self._one_of(node.ranges)
        if isinstance(node, Repeat):
            return repeat(self.write(node.part, False, False), node.low, node.high)
        if isinstance(node, Sequence):
            last = len(node.parts) - 1
            return concat(
                self.write(part, at_start and index == 0, at_end and index == last)
                for index, part in enumerate(node.parts)
            )
        if isinstance(node, Anchor):
            if not (at_end if node.at_end else at_start):
                raise NoAutomaton("anchors inside a pattern are not supported")
            return EMPTY
        assert isinstance(node, Choice)
        if self._anything is None or not (at_start or at_end):
            return union(self.write(option, at_start, at_end) for option in node.options)
        # If another option has an anchor, an option without it can match anywhere.
        some_start, some_end = _anchors(node, at_start, at_end)
        options = []
        for option in node.options:
            start, end = _anchors(option, at_start, at_end)
            options.append(
                self.search(
                    option, at_start, at_end, some_start and not start, some_end and not end
                )
            )
        return union(options)


class _Flags(NamedTuple):
    """Flags of a pattern: whether letters match in both cases, and ``.`` matches line feeds."""

    ignore_case: bool = False
    dot_all: bool = False


class _Parser:
    """Recursive-descent parser of a pattern."""

    def __init__(self, pattern: str, classes: Classes):
        self._pattern = pattern
        self._classes = classes
        self._position = 0
        self._nesting = 0
        self._flags = _Flags()

    def parse(self) -> Node:
        node = self._alternatives()
        if self._position < len(self._pattern):
            raise NoAutomaton(f"unexpected {self._peek()!r}")
        return node

    def _peek(self) -> str:
        """Return the next character, or an empty string at the end."""
        return self._pattern[self._position : self._position + 1]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise NoAutomaton("the pattern ends too early")
        self._position += 1
        return character

    def _skip(self, text: str) -> bool:
        """Skip a text if it comes next, and return whether it did."""
        found = self._pattern.startswith(text, self._position)
        if found:
            self._position += len(text)
        return found

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._skip("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts = []
        while self._peek() and self._peek() not in "|)":
            part = self._repeated()
            if part is not None:
                parts.append(part)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self) -> Node | None:
        """Read an atom with its repetitions; return None for a change of the flags."""
        part = self._atom()
        while part is not None:
            if self._skip("*"):
                part = Repeat(part, 0, None)
            elif self._skip("+"):
                part = Repeat(part, 1, None)
            elif self._skip("?"):
                part = Repeat(part, 0, 1)
            elif self._skip("{"):
                part = Repeat(part, *self._counts())
            else:
                return part
            self._skip("?")  # a lazy repetition matches the same texts
        return None

    def _counts(self) -> tuple[int, int | None]:
        """Read ``{n}``, ``{n,}`` or ``{n,m}`` after the ``{``; return the minimum and maximum."""
        low = self._number()
        high: int | None = low
        if self._skip(","):
            high = None if self._peek() == "}" else self._number()
        if not self._skip("}") or (high is not None and high < low):
            raise NoAutomaton("invalid repetition count")
        return low, high

    def _number(self) -> int:
        digits = ""
        while self._peek().isascii() and self._peek().isdigit():
            digits += self._take()
        if not digits or int(digits) > MAX_COUNT:
            raise NoAutomaton("repetition count is missing or too large")
        return int(digits)

    def _atom(self) -> Node | None:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return Set(tuple(self._class()))
        if character == ".":
            return Set(tuple(ANY if self._flags.dot_all else _NOT_LINE_FEED))
        if character in "^$":
            return Anchor(character == "$")
        if character == "\\":
            if self._peek() in ("A", "z"):
                return Anchor(self._take() == "z")
            is_class = self._peek().lower() in self._classes
            ranges = self._escape()
            return Set(tuple(ranges)) if is_class else self._folded(ranges)
        if character in "*+?{":
            raise NoAutomaton(f"{character!r} is not supported here")
        return self._folded([(ord(character), ord(character))])

    def _folded(self, ranges: Ranges) -> Set:
        """Return a node for some characters; with ``(?i)``, also for their other case."""
        return Set(tuple(_both_cases(ranges) if self._flags.ignore_case else ranges))

    def _group(self) -> Node | None:
        """Read a group after its ``(``; return None for a group that only changes the flags."""
        flags = self._flags
        if self._skip("?"):
            name = _GROUP_NAME.match(self._pattern, self._position)
            if name is not None:
                if "<stop>" in name[0]:  # LLGuidance reads this group as a lookahead
                    raise NoAutomaton("groups with the name 'stop' are not supported")
                self._position = name.end()
            elif not self._read_flags():
                return None
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise NoAutomaton("groups are nested too deeply")
        node = self._alternatives()
        if not self._skip(")"):
            raise NoAutomaton("a group is not closed")
        self._nesting -= 1
        self._flags = flags
        return node

    def _read_flags(self) -> bool:
        """Read the flags of a group; return whether the group continues after them."""
        value = True
        flags = self._flags
        while True:
            character = self._take()
            if character in ":)":
                break
            if character == "-":
                value = False
            elif character == "i":
                flags = flags._replace(ignore_case=value)
            elif character == "s":
                flags = flags._replace(dot_all=value)
            elif character != "U" and (character != "u" or not value):
                # Whether repetitions are lazy (U) has no effect, and Unicode (u) is the default.
                raise NoAutomaton(f"the flag or group {character!r} is not supported")
        self._flags = flags
        return character == ":"

    def _escape(self) -> Ranges:
        """Read an escape after its backslash and return the characters that it matches."""
        character = self._take()
        if character.lower() in self._classes:
            ranges = self._classes[character.lower()]()
            return ranges if character.islower() else complement(ranges)
        if character in "pP":
            return self._property(character == "P")
        if character in _CONTROL_ESCAPES:
            code = ord(_CONTROL_ESCAPES[character])
        elif character in _HEXADECIMAL:
            code = self._hexadecimal(_HEXADECIMAL[character])
        elif character.isascii() and not character.isalnum() and character not in "<>":
            code = ord(character)
        else:
            raise NoAutomaton(f"the escape \\{character} is not supported")
        return [(code, code)]

    def _hexadecimal(self, digits: int) -> int:
        if self._skip("{"):
            end = self._pattern.find("}", self._position)
            text = self._pattern[self._position : max(end, self._position)]
            self._position = end + 1
        else:
            text = "".join(self._take() for _ in range(digits))
        if not text or not set(text) <= set("0123456789abcdefABCDEF") or len(text) > 8:
            raise NoAutomaton(f"{text!r} is not a hexadecimal number")
        return int(text, 16)

    def _property(self, negated: bool) -> Ranges:
        """Read the name of a general category after ``\\p`` and return its characters."""
        name = self._take()
        if name == "{":
            end = self._pattern.find("}", self._position)
            name = self._pattern[self._position : max(end, self._position)]
            self._position = end + 1
        if name.startswith("^"):
            name = name[1:]
            negated = not negated
        ranges = category_ranges(name)
        if ranges is None or self._flags.ignore_case:
            raise NoAutomaton(f"the Unicode property {name!r} is not supported")
        return complement(ranges) if negated else ranges

    def _class(self) -> Ranges:
        """Read a character class after its ``[`` and return its characters."""
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise NoAutomaton("classes are nested too deeply")
        negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        while self._skip("-"):
            ranges.append((0x2D, 0x2D))
        if not ranges and self._skip("]"):
            ranges.append((0x5D, 0x5D))
        left: Ranges | None = None
        operator = ""
        while True:
            following = self._pattern[self._position : self._position + 2]
            if following in ("&&", "--", "~~") or following.startswith("]"):
                left = ranges if left is None else _combined(left, operator, ranges)
                if self._skip("]"):
                    break
                operator = following
                self._position += 2
                ranges = []
            else:
                ranges += self._class_item()
        self._nesting -= 1
        if self._flags.ignore_case:
            left = _both_cases(left)
        return complement(left) if negated else left

    def _class_item(self) -> Ranges:
        """Read one item of a character class: a character, a range, an escape or a class."""
        named = _ASCII_CLASS.match(self._pattern, self._position)
        if named is not None and named[2] in _ASCII_CLASSES:
            self._position = named.end()
            ranges = _ASCII_CLASSES[named[2]]
            return complement(ranges) if named[1] else ranges
        if self._skip("["):
            return self._class()
        is_class = self._pattern[self._position : self._position + 2].lower() in {
            "\\" + letter for letter in (*self._classes, "p")
        }
        part = self._class_character()
        following = self._pattern[self._position : self._position + 2]
        if is_class or not following.startswith("-") or following in ("-]", "--"):
            return part
        self._take()
        end = self._class_character()
        if len(end) != 1 or end[0][0] != end[0][1] or end[0] < part[0]:
            raise NoAutomaton("invalid range in a class")
        return [(part[0][0], end[0][0])]

    def _class_character(self) -> Ranges:
        """Read one character or escape of a character class and return its characters."""
        character = self._take()
        if character == "\\":
            return self._escape()
        return [(ord(character), ord(character))]


def _combined(left: Ranges, operator: str, right: Ranges) -> Ranges:
    """Apply the operator ``&&``, ``--`` or ``~~`` of character classes."""
    if operator == "&&":
        return intersection(left, right)
    if operator == "--":
        return intersection(left, complement(right))
    return [*intersection(left, complement(right)), *intersection(complement(left), right)]


def _both_cases(ranges: Ranges) -> Ranges:
    """Add the other case of each letter; raise `NoAutomaton` for letters outside ASCII."""
    out = list(ranges)
    for low, high in ranges:
        if high > 0x7F:
            if low <= 0x80 and high == MAX_CHARACTER:  # all characters outside ASCII
                out += [(ord(letter), ord(letter)) for letter in "kKsS"]
            elif high - low > 1000 or any(map(_has_case, range(max(low, 0x80), high + 1))):
                raise NoAutomaton("(?i) is only supported for ASCII letters")
        for first, offset in ((0x41, 0x20), (0x61, -0x20)):
            start = max(low, first)
            end = min(high, first + 25)
            if start <= end:
                out.append((start + offset, end + offset))
        for letter, other in _FOLDED.items():
            if low <= ord(letter) <= high or low <= ord(letter.upper()) <= high:
                out.append((other, other))
    return out


def _has_case(code: int) -> bool:
    character = chr(code)
    return character.lower() != character or character.upper() != character
